"""The site: `make docs` builds it. Its pages are ordinary Markdown, which a code host shows as well."""

import sys
import tomllib
from pathlib import Path

from jupyter_client.manager import KernelManager

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_site"))
about = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project, release = about["name"], about["version"]
author = "fedncv contributors"
project_copyright = author
language = "en"
highlight_language = "text"  # of a block that names none, such as a formula
toc_object_entries_show_parents = "hide"
smartquotes = False  # "--" in a docstring is an option
exclude_patterns = ["_site", "_build", "auto_examples/*.ipynb", "auto_examples/*.py"]
extensions = [
    "myst_nb",  # Markdown, and notebooks that are executed
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
    "structure",  # these three are in _site
    "offline_math",
    "plain_docstrings",
]

myst_enable_extensions = ["attrs_block", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
KernelManager.transport_encryption.default_value = "auto"  # of the notebooks' kernels, on machines that others use
viewcode_follow_imported_members = False  # its links back fail for names with two entries
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "auto_examples",
    "filename_pattern": r"\.py$",
    "abort_on_example_error": True,
    "capture_repr": (),
    "download_all_examples": False,
    "image_scrapers": ("matplotlib",),
    "show_signature": False,
    "write_computation_times": False,
    "min_reported_time": 3600,  # the time depends on the machine
    "remove_config_comments": True,
    "within_subsection_order": "structure.gallery_order",
}

html_theme = "pydata_sphinx_theme"
html_title = "fedncv"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_context = {"default_mode": "auto"}
html_favicon = "_static/favicon.svg"
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {
    "logo": {"text": "fedncv"},
    "header_links_before_dropdown": 8,
    "navbar_align": "left",
    "show_prev_next": True,
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
}
html_sidebars = {"index": [], "quickstart": [], "theory": [], "glossary": []}  # nothing hangs below them
