"""Write docs/examples/: one page per file of examples/, with its text, its code and what it prints.

    python tools/example_pages.py                 # all pages; runs every example
    python tools/example_pages.py tabular text    # these only

Numbers on a page are those of the machine that ran this command; the last bits may differ on another one. A test checks
that the code on every page is the code of its file, and runs it.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES, PAGES, NOTEBOOKS = ROOT / "examples", ROOT / "docs" / "examples", ROOT / "docs" / "notebooks"
ORDER = ("quickstart", "new_method", "tabular", "time_series", "text", "pictures", "lora")
"""The order in which to read them; a test checks that none is missing."""


def parts(path: Path) -> tuple[str, str, str]:
    """Return the title, the text and the code of an example: its docstring's first line, the rest, and what follows."""
    source = path.read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(source)) or ""
    title, _, rest = text.partition("\n")
    return title.removesuffix("."), rest.strip(), source.partition('"""\n\n')[2].strip()


def head(path: Path) -> str:
    """Return the page down to the output."""
    title, text, code = parts(path)
    return (
        f"# {title}\n\nThis is [`examples/{path.name}`](../../examples/{path.name}); run it with "
        f"`python examples/{path.name}`.\n\n{text}{chr(10) * 2 * bool(text)}```python\n{code}\n```\n"
    )


def page(path: Path, output: str) -> str:
    return f"{head(path)}\nIt prints:\n\n```\n{output.strip()}\n```\n"


def index() -> str:
    rows = [f"| [{name}]({name}.md) | {parts(EXAMPLES / f'{name}.py')[0]} |" for name in ORDER]
    found = sorted(NOTEBOOKS.glob("*.ipynb"))
    notebooks = [f"| [{path.stem}](../notebooks/{path.name}) | {title(path)} |" for path in found]
    lines = [
        "# Examples", "", "Each page is a file of `examples/` that the tests run.", "",
        "| page | shows |", "|---|---|", *rows, "",
        "## Notebooks", "", "Short; `make docs` and the slow tests execute them. They are stored without outputs.", "",
        "| notebook | shows |", "|---|---|", *notebooks, "",
        "## Gallery", "",
        "[Figures](../../examples/gallery/GALLERY_HEADER.rst), drawn by short scripts that `make docs` runs.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def title(notebook: Path) -> str:
    """Return the heading of a notebook: the first line of its first cell."""
    first = json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]["source"][0]
    return str(first).removeprefix("# ").strip()


def run(path: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, cwd=ROOT, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{path.name} failed:\n{done.stderr}")
    return done.stdout


def main(names: list[str]) -> None:
    PAGES.mkdir(exist_ok=True)
    for name in names or ORDER:
        path = EXAMPLES / f"{name}.py"
        (PAGES / f"{name}.md").write_text(page(path, run(path)), encoding="utf-8")
        print(f"docs/examples/{name}.md")
    (PAGES / "README.md").write_text(index(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
