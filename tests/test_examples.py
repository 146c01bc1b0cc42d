"""The examples run, as a reader would run them."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
NEEDS = {"lora": "transformers"}  # which takes seconds to import


def marks(path):
    return [pytest.mark.slow] if path.stem in NEEDS else []


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem, marks=marks(path)) for path in EXAMPLES])
def test_an_example_runs(path, tmp_path):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem], reason=f"the example needs {NEEDS[path.stem]}")
    done = subprocess.run(
        [sys.executable, "-W", "error", path], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "before" in done.stdout
