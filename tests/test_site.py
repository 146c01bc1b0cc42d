"""The site's sources: every page has a place, every public name an entry, and what checks the built site works.

tests/test_site_built.py builds it. None of these tests needs Sphinx.
"""

import ast
import importlib
import json
import re
import runpy
import textwrap
from pathlib import Path

import pytest

import fedncv

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [path for path in DOCS.rglob("*") if path.suffix in (".md", ".ipynb") and "auto_examples" not in path.parts]
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
STRUCTURE = runpy.run_path(str(DOCS / "_site" / "structure.py"))
CHECK = runpy.run_path(str(ROOT / "tools" / "check_site.py"))
TUTORIALS = runpy.run_path(str(ROOT / "tools" / "tutorial_pages.py"))
ENTRY = re.compile(r"^\.\. (automodule|autofunction|autoclass|autodata):: ([\w.]+)$", re.MULTILINE)


def name_of(path):
    return path.relative_to(DOCS).with_suffix("").as_posix()


def test_every_page_hangs_below_exactly_one_other():
    pages = {name_of(path) for path in PAGES}
    below = STRUCTURE["tree"](pages)
    placed = [name for names in below.values() for name in names]
    assert sorted([*placed, "index"]) == sorted(pages)
    reached, waiting = {"index"}, ["index"]
    while waiting:
        near = set(below.get(waiting.pop(), ()))
        waiting += near - reached
        reached |= near
    assert reached == pages


def test_a_new_page_needs_no_entry_and_a_page_without_a_place_is_named():
    pages = {name_of(path) for path in PAGES}
    below = STRUCTURE["tree"]({*pages, "privacy", "tutorials/new", "methods/new"})
    assert "privacy" in below["README"]
    assert "tutorials/new" in below["tutorials/README"]
    assert "methods/new" in below["methods/README"]
    with pytest.raises(
        ValueError, match=r"^no place in the site for docs/lost/page: .* PLACES of docs/_site/structure.py$"
    ):
        STRUCTURE["tree"]({*pages, "lost/page"})


def test_a_file_outside_docs_that_pages_link_to_is_a_page_as_well():
    shown = {*STRUCTURE["SHOWN"].values(), "README.md"}
    for path in (path for path in [*PAGES, *(ROOT / name for name in shown)] if path.suffix == ".md"):
        for found in STRUCTURE["LINK"].finditer(path.read_text(encoding="utf-8")):
            target = path.parent.joinpath(found[1]).resolve().relative_to(ROOT)
            assert target.suffix != ".md" or target.parts[0] == "docs" or target.as_posix() in shown, (
                f"{path.relative_to(ROOT)} links to {target}: give it a page in docs/ and an entry in SHOWN of "
                "docs/_site/structure.py"
            )


def test_links_out_of_docs_become_links_inside_the_site():
    linked = STRUCTURE["linked"]
    assert linked("[a](../README.md)", "docs", "runs") == "[a](index.md)"
    assert linked("[a](../../CHANGELOG.md#x)", "docs/methods", "methods/fedavg") == "[a](../project/changelog.md#x)"
    assert linked("[a](docs/theory.md#b)", "", "project/contributing") == "[a](../theory.md#b)"
    assert linked("[a](../src/fedncv/cli/run.py)", "docs", "runs") == "[a](../src/fedncv/cli/run.py)"
    assert linked("[a](#here) [b](https://x.org/y.md)", "docs", "runs") == "[a](#here) [b](https://x.org/y.md)"


def test_short_names_in_menus():
    entry = STRUCTURE["entry"]
    assert entry("methods/fedprox", DOCS / "methods/fedprox.md") == "fedprox </methods/fedprox>\n"
    assert entry("theory", DOCS / "theory.md") == "Theory </theory>\n"
    assert entry("runs", DOCS / "runs.md").endswith("</runs>\n")


# ---- the reference


def documented():
    """Module -> its page, of all that the reference shows."""
    found = {}
    for path in (DOCS / "api").glob("[!R]*.md"):
        ((kind, module),) = ENTRY.findall(path.read_text(encoding="utf-8"))
        assert kind == "automodule"
        found[module] = path
    return found


def named_in_docs():
    """Every fedncv name that code on a page imports or uses, with its module."""
    found = set()
    for path in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "examples").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
            blocks = ["".join(cell["source"]) for cell in cells]
        else:
            blocks = [text] if path.suffix == ".py" else re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        for block in blocks:
            found |= set(names_in(ast.parse(textwrap.dedent(block))))
    return found


def names_in(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fedncv":
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("fedncv."):
            module, _, name = ast.unparse(node).rpartition(".")
            if re.fullmatch(r"fedncv(\.\w+)*", module):
                yield module, name


def test_every_name_that_the_documentation_uses_is_in_the_reference():
    pages = documented()
    used = named_in_docs()
    assert ("fedncv", "simulate") in used
    assert ("fedncv.methods.base", "Stepped") in used
    for module, name in used:
        if f"{module}.{name}" in pages or (module == "fedncv" and name in fedncv.SUBMODULES):
            continue
        assert module in pages, f"{module}.{name} is used in the documentation: give {module} a page in docs/api"
        found = importlib.import_module(module)
        assert hasattr(found, name), f"{module}.{name}"
        assert name in getattr(found, "__all__", [name])
        assert not name.startswith("_")


def test_what_fedncv_exports_and_all_its_submodules_have_a_page():
    pages = documented()
    assert {"fedncv", *(f"fedncv.{name}" for name in fedncv.SUBMODULES)} <= set(pages)
    index = (DOCS / "api" / "README.md").read_text(encoding="utf-8")
    for module, path in pages.items():
        line = f"[`{module}`]({path.name})"
        assert line in index, f"docs/api/README.md needs a line with {line}"
        assert path.read_text(encoding="utf-8").startswith(f"# {module}: ")


def test_every_exported_name_says_what_it_is():
    for name in fedncv.__all__:
        if name != "METHODS":  # a dictionary
            assert getattr(fedncv, name).__doc__, name


# ---- docstrings and formulas


def test_docstrings_are_plain_text_in_the_reference():
    as_rst = runpy.run_path(str(DOCS / "_site" / "plain_docstrings.py"))["as_rst"]
    assert as_rst(["||x||^2 of ``a*b`` and c_"]) == [r"\|\|x\|\|^2 of ``a*b`` and c\_"]
    assert as_rst(["A step:", "", "    y <- y - lr * g", "", "It is *one*."]) == [
        "A step:", "", "", "::", "", "    y <- y - lr * g", "", r"It is \*one\*.",
    ]  # fmt: skip
    assert as_rst(["`--help` prints `a*b`, a|b"]) == [r"``--help`` prints ``a*b``, a\|b"]
    assert as_rst([">>> 2 * 3", "6", "", "a * b"]) == [">>> 2 * 3", "6", "", r"a \* b"]


def test_a_field_without_a_docstring_is_explained_by_the_comment_behind_it():
    comment = runpy.run_path(str(DOCS / "_site" / "plain_docstrings.py"))["comment"]
    assert comment("fedncv.methods.fedavg.Up.delta_P") == ["x - y"]
    assert comment("fedncv.Dataset.name") == []


# ---- notebooks, tutorials, how to cite


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_stored_without_outputs(path):
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert text == json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"  # one form, so that diffs are small
    assert notebook["cells"][0]["source"][0].startswith("# ")
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert 3 <= len(code) <= 10
    for cell in code:
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}


def test_there_are_three_notebooks_and_the_list_of_examples_has_them():
    listed = (DOCS / "examples" / "README.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) == 3
    assert all(f"(../notebooks/{path.name})" in listed for path in NOTEBOOKS)


@pytest.mark.parametrize("name", TUTORIALS["PAGES"])
def test_a_tutorial_shows_what_its_commands_print(name):
    text = TUTORIALS["PAGES"][name].read_text(encoding="utf-8")
    blocks = [found for found in TUTORIALS["BLOCK"].finditer(text) if found["kind"] == "console"]
    commands = [command for block in blocks for command in TUTORIALS["commands"](block["text"])]
    assert len(commands) >= 3
    assert all(c.printed or c.line.startswith("python ") or c.line.endswith("/dev/null") for c in commands)
    saved = {found["file"] for found in TUTORIALS["BLOCK"].finditer(text) if found["file"]}
    assert saved == set(re.findall(r"Save this as `([^`]+)`", text))


def test_every_tutorial_is_in_the_list_of_tutorials():
    listed = (DOCS / "tutorials" / "README.md").read_text(encoding="utf-8")
    for name, path in TUTORIALS["PAGES"].items():
        assert name == "quickstart" or f"]({path.name})" in listed, (
            f"docs/tutorials/README.md needs a line on {path.name}"
        )


def test_commands_of_a_page_run_in_order_and_a_failure_is_named(tmp_path):
    played = TUTORIALS["played"]
    saved = "Save this as `a.txt`:\n\n```\none\n```\n\n"
    page = f"{saved}```console\n$ cat \\\n    a.txt\nold\n$ echo 'run 1/2'; echo 'two  '\n```\n"
    assert played(page, tmp_path) == page.replace("old\n", "one\n").replace("two  '\n", "two  '\ntwo\n")
    assert played("```\nfalse\n```\n", tmp_path) == "```\nfalse\n```\n"
    with pytest.raises(TUTORIALS["FailedError"], match="exit 3"):
        played("```console\n$ exit 3\n```\n", tmp_path)
    with pytest.raises(ValueError, match="begins with a command"):
        played("```console\nls\n```\n", tmp_path)


def test_the_version_to_cite_is_the_version_of_the_package():
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert f"version = {{{version}}}" in (DOCS / "project" / "README.md").read_text(encoding="utf-8")


# ---- nothing from elsewhere


def test_no_page_loads_anything_from_elsewhere():
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"!\[[^\]]*\]\((https?:)?//", text), path
        assert not re.search(r"<(script|link|img|iframe)\b", re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)), (
            path
        )
    style = (DOCS / "_static" / "site.css").read_text(encoding="utf-8")
    assert not re.search(r"url\(|@import", style)


def site(folder, **pages):
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return list(CHECK["problems"](folder))


def test_a_site_whose_links_lead_somewhere_has_no_problems(tmp_path):
    (tmp_path / "p.png").write_bytes(b"")
    good = '<a href="b.html#x">b</a><a href="https://example.org/">elsewhere</a><img src="p.png"><p id="top">'
    assert site(tmp_path, index=good, b='<h1 id="x"><a href="index.html#top">up</a><a href="#x">here</a>') == []


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ('<a href="c.html">', "index.html: links to c.html, which does not exist"),
        ('<a href="b.html#y">', "index.html: links to b.html#y, but b.html has no such anchor"),
        ('<a href="#y">', "index.html: links to #y, but index.html has no such anchor"),
        ('<img src="none.png">', "index.html: loads none.png, which does not exist"),
        (
            '<script src="https://cdn.example.org/a.js">',
            "index.html: loads https://cdn.example.org/a.js, which is not part",
        ),
        ('<link rel="stylesheet" href="//fonts.example.org/a.css">', "index.html: loads //fonts.example.org/a.css"),
        ("<style>@import url(https://x.org/a.css);</style>", "index.html: loads https://x.org/a.css"),
        ('<p style="background: url(http://x.org/a.png)">', "index.html: loads http://x.org/a.png"),
        ('<img srcset="https://x.org/a.png 2x">', "index.html: loads https://x.org/a.png"),
    ],
)
def test_what_is_wrong_with_a_site_is_named(tmp_path, wrong, problem):
    found = site(tmp_path, index=f'<a href="b.html">b</a>{wrong}', b='<h1 id="x">')
    assert len(found) >= 1
    assert found[0].startswith(problem)


def test_a_page_that_nobody_links_to_and_a_style_from_elsewhere_are_named(tmp_path):
    (tmp_path / "a.css").write_text("p { background: url('https://x.org/p.png') }")
    found = site(tmp_path, index="<p>", lonely="<p>", search="<p>")
    assert found == [
        "a.css: loads https://x.org/p.png, which is not part of the site",
        "lonely.html: no link leads to it from index.html",
    ]
    assert site(tmp_path / "none") == [f"{tmp_path / 'none'} has no index.html; build it with `make docs`"]
