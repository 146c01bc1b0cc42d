"""The examples run, as a reader would run them, and the pages of the documentation show their code."""

import contextlib
import io
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = runpy.run_path(str(ROOT / "tools" / "example_pages.py"))
NEEDS = {"lora": "transformers"}  # which takes seconds to import
each_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
here_or_slow = pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in NEEDS)) for path in EXAMPLES]
)


def skip_without(path):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem], reason=f"{path.name} needs {NEEDS[path.stem]}")


@here_or_slow
def test_an_example_runs(path, tmp_path, monkeypatch):
    skip_without(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDNCV_CACHE", str(tmp_path / "cache"))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    assert "before" in printed.getvalue()


@pytest.mark.slow
@each_example
def test_an_example_runs_by_itself_without_a_warning(path, tmp_path):
    skip_without(path)
    done = subprocess.run(
        [sys.executable, "-W", "error", path], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "before" in done.stdout


def test_every_example_has_its_page_with_its_code():
    assert sorted(PAGES["ORDER"]) == [path.stem for path in EXAMPLES]
    for path in EXAMPLES:
        page = (ROOT / "docs" / "examples" / f"{path.stem}.md").read_text(encoding="utf-8")
        assert page.startswith(PAGES["head"](path)), f"python tools/example_pages.py {path.stem} brings it up to date"
        assert "\nIt prints:\n" in page
    index = (ROOT / "docs" / "examples" / "README.md").read_text(encoding="utf-8")
    assert index == PAGES["index"](), "python tools/example_pages.py brings the list up to date"
