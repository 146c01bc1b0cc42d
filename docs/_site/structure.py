"""The order of the pages, in one place, and links that leave docs/.

The pages are read on a code host too, so they have no tables of contents of their own: `PLACES` says which pages hang
below which. A star stands for the rest of that folder, so a new page needs no entry.
"""

import posixpath
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLACES = {
    "index": (
        "quickstart", "tutorials/README", "examples/README", "README", "methods/README", "api/README",
        "results/README", "theory", "glossary", "project/README",
    ),
    "tutorials/README": (
        "tutorials/own_data", "tutorials/method", "tutorials/variance", "tutorials/deploy", "tutorials/*",
    ),
    "examples/README": ("auto_examples/index", "notebooks/first_federation", "notebooks/*", "examples/*"),
    "auto_examples/index": ("auto_examples/*",),
    "README": (
        "your_own", "datasets", "models", "optimizers", "metrics", "runs", "studies", "variance", "federation", "*",
    ),
    "methods/README": ("methods/fedncv", "methods/*", "methods/switches/README"),
    "methods/switches/README": ("methods/switches/*",),
    "api/README": ("api/fedncv", "api/*"),
    "results/README": ("performance", "gallery", "results/*"),
    "project/README": ("project/*", "mutants"),
}  # fmt: skip
"""Page -> the pages below it, in their order. sphinx-gallery writes the contents of its own page itself."""
SHOWN = {
    "project/contributing": "CONTRIBUTING.md",
    "project/changelog": "CHANGELOG.md",
    "project/conduct": "CODE_OF_CONDUCT.md",
    "results/peers": "bench/peers/README.md",
    "auto_examples/index": "examples/gallery/GALLERY_HEADER.rst",
}
"""Page -> the file of the repository whose text it shows. README.md becomes the start page."""
GALLERY = ("compare_methods", "partitions", "heterogeneity", "learning_rate", "clients", "communication", "dropouts")
"""The first pages of the gallery; the others follow by name."""
NAMES = {
    "quickstart": "Quickstart",
    "api/README": "API",
    "results/README": "Benchmarks",
    "theory": "Theory",
    "project/README": "Project",
}
"""Page -> its name in menus, if neither its title nor the title up to a colon is short."""
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def tree(pages: Iterable[str]) -> dict[str, list[str]]:
    """Return page -> the pages below it, with stars filled in. Raise ValueError if a page has no place, or two.

    >>> tree(["index", "c/b", "c/a"])
    Traceback (most recent call last):
    ValueError: no place in the site for docs/c/a, docs/c/b: say below which page in PLACES of docs/_site/structure.py
    """
    left = set(pages)
    named = {name for names in PLACES.values() for name in names if "*" not in name} | {"index"}
    found = {}
    for page, names in PLACES.items():
        if page not in left and page != "index":
            continue
        found[page] = []
        for name in names:
            folder = posixpath.dirname(name)
            rest = sorted(p for p in left - named if fnmatchcase(p, name) and posixpath.dirname(p) == folder)
            found[page] += rest if "*" in name else [name] if name in left else []
    placed = [name for names in found.values() for name in names]
    twice = sorted({name for name in placed if placed.count(name) > 1})
    missing = sorted(left - set(placed) - {"index"})
    for what, wrong in (("no place", missing), ("two places", twice)):
        if wrong:
            names = ", ".join(f"docs/{page}" for page in wrong)
            raise ValueError(
                f"{what} in the site for {names}: say below which page in PLACES of docs/_site/structure.py"
            )
    return found


def linked(text: str, folder: str, page: str) -> str:
    """Return the text of a file in ``folder`` of the repository with its links as ``page`` needs them.

    >>> linked("[how](../CONTRIBUTING.md#set-up)", "docs", "runs")
    '[how](project/contributing.md#set-up)'
    >>> linked("[models](docs/models.md)", "", "project/contributing")
    '[models](../models.md)'
    """
    home = {shown: name for name, shown in SHOWN.items()} | {"README.md": "index"}

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[1]))
        moved = f"docs/{home[target]}{Path(target).suffix}" if target in home else target
        return f"]({posixpath.relpath(moved, posixpath.dirname(f'docs/{page}'))}{found[2] or ''})"

    return LINK.sub(link, text)


def read(app: Any, page: str, source: list[str]) -> None:
    """Give a page its contents and its links, as Sphinx reads it."""
    if Path(app.env.doc2path(page)).suffix != ".md":
        return
    app.env.note_dependency(__file__)
    if page in SHOWN:
        path = ROOT / SHOWN[page]
        app.env.note_dependency(str(path))
        source[0] = linked(path.read_text(encoding="utf-8"), posixpath.dirname(SHOWN[page]), page)
    else:
        source[0] = linked(source[0], posixpath.dirname(f"docs/{page}"), page)
    below = tree(app.env.found_docs).get(page)
    if below and page != "auto_examples/index":
        entries = (entry(name, Path(app.env.doc2path(name))) for name in below)
        source[0] += "\n\n```{toctree}\n:hidden:\n\n" + "".join(entries) + "```\n"


def entry(page: str, path: Path) -> str:
    """Return the line of a page in a table of contents: of "fedprox: pull local models …" only the name."""
    title = path.read_text(encoding="utf-8").partition("\n")[0] if path.suffix == ".md" else ""
    name = NAMES.get(page) or (title.removeprefix("# ").partition(":")[0] if ":" in title else "")
    return f"{name} </{page}>\n" if name else f"/{page}\n"


def gallery_order(path: str) -> tuple[int, str]:
    """Return the key by which sphinx-gallery sorts its files."""
    name = Path(path).stem
    return (GALLERY.index(name) if name in GALLERY else len(GALLERY), name)


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", read)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
