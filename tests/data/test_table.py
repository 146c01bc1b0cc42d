"""Table 2, generated from the registry, and its copy in the docs."""

import inspect
from pathlib import Path

from fedncv.data import DATASETS, PARTITIONS
from fedncv.data.table import markdown

PAGE = Path(__file__).parents[2] / "docs" / "datasets.md"


def test_the_table_in_the_docs_is_the_one_the_registry_gives():
    """Bring it up to date with: fedncv datasets --markdown"""
    assert markdown() in PAGE.read_text()


def test_every_dataset_is_in_both_tables_with_its_numbers():
    text = markdown()
    for name, entry in DATASETS.items():
        assert text.count(f"| `{name}` |") == 2
        assert f"| {entry.num_classes} | {entry.num_images:,} |" in text
        assert entry.checked in text


def test_the_python_on_the_page_runs(capsys):
    for block in PAGE.read_text().split("```python\n")[1:]:
        exec(compile(block.split("```")[0], str(PAGE), "exec"), {})
    assert capsys.readouterr().out


def test_every_picture_on_the_page_exists():
    for line in PAGE.read_text().splitlines():
        if line.startswith("!["):
            assert (PAGE.parent / line.partition("](")[2].rstrip(")")).is_file()


def test_every_partition_and_its_defaults_are_on_the_page():
    text = PAGE.read_text()
    for name, partition in PARTITIONS.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |") and "=" in line)
        for knob, parameter in inspect.signature(partition).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY:
                assert f"`{knob}={parameter.default:g}`" in row
