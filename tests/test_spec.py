"""Texts of names and knobs: quoting, required knobs, names for people."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedncv import spec
from fedncv.data import check_name
from fedncv.data.load import absolute_name
from fedncv.study import data_folder_name


def folder(*, path: Path, size: int = 0, note: str = ""): ...


CHOICES = {"folder": folder}


@example("/a+b", 1, "x+y, z")
@given(st.text(min_size=1), st.integers(), st.text())
def test_what_is_written_is_read_back(path, size, note):
    values = {"path": Path(path), "size": size, "note": note}
    text = spec.write("folder", values)
    assert spec.parse(text, CHOICES, what="dataset") == ("folder", values)
    assert spec.split(text, r"\+(?!\d)") == [text]  # a chain of switches would be cut there


@given(st.text(min_size=1))
def test_a_quoted_value_is_never_split(path):
    text = f"folder:path={spec.quoted(path)}"
    assert spec.split(text, r"[,+]") == [text]
    assert spec.parse(text, CHOICES, what="dataset")[1]["path"] == Path(path)


@pytest.mark.parametrize("path", ["/a b/c", "/a=b", "/a:b", "C:\\a\\b", "/köln/データ", '/5"', "/it's"])
def test_only_commas_and_plus_signs_need_quotes(path):
    assert spec.parse(f"folder:path={path},size=3", CHOICES, what="dataset")[1] == {"path": Path(path), "size": 3}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("folder:path=/a, b", "' b' should be key=value.*put a value with a comma in quotes: path="),
        ('folder:path="/a', "begins with a quote and must end with one"),
        ('folder:path="/a"b', "begins with a quote and must end with one"),
        ("folder:path=", "path is empty; give a path"),
        ("folder:size=3", "does not give path; write folder:path="),
        ("folder:path=/a,path=/b", "sets path twice"),
    ],
)
def test_what_cannot_be_read_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        spec.parse(text, CHOICES, what="dataset")


def test_relative_paths_become_absolute_and_other_names_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute_name("folder:path=a/b,size=3") == f"folder:path={tmp_path}/a/b,size=3"
    assert absolute_name('leaf:path="a, b"') == f'leaf:path="{tmp_path}/a, b"'
    assert absolute_name("table:path=/t.csv,y=ill") == "table:path=/t.csv,y=ill"
    assert absolute_name("cifar10") == "cifar10"
    check_name(absolute_name('folder:path="../x+y"'))


@pytest.mark.parametrize(
    "data",
    [
        "folder:path=/a/b",
        "folder:path=/c/b",
        'folder:path="/a, b"',
        "my.module:patients",
        "table:path=/ü/データ.csv,y=a",
    ],
)
def test_every_dataset_has_a_folder_of_its_own_with_a_safe_name(data):
    name = data_folder_name(data)
    assert name == Path(name).name
    assert all(c.isalnum() or c in "._-" for c in name)
    assert name not in {data_folder_name(other) for other in ("folder:path=/b", "cifar10", "my.module:patients:n=2")}


def test_names_of_listed_datasets_are_their_folders():
    assert data_folder_name("cifar10") == "cifar10"


def test_a_beginning_of_a_name_is_a_hint():
    assert "did you mean 'f1_macro'?" in spec.nearest("f1", ["auroc", "f1_macro", "f1_micro"], what="metric")
    assert "did you mean" not in spec.nearest("x", ["xylophone"], what="metric")
