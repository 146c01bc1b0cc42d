"""CSV and Parquet files: what becomes a sample, what is refused and where."""

import csv
import sys

import numpy as np
import pytest
import torch

from fedncv.data import load, read_table

ROWS = """age,bmi,smokes,hospital,outcome
61,22.5,true,Bern,healthy
47,31,false,Oslo,ill
35,2.2e1,false,Bern,ill
"""


def write(tmp_path, text=ROWS, name="t.csv", encoding="utf-8"):
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    return path


def test_columns_become_features_labels_and_owners(tmp_path):
    data = read_table(write(tmp_path), y="outcome", owner="hospital")
    assert data.x.tolist() == [[61, 22.5, 1], [47, 31, 0], [35, 22, 0]]
    assert data.y.tolist() == [0, 1, 1]
    assert data.y.dtype == torch.int64
    assert (data.num_classes, data.classes, data.features) == (2, ("healthy", "ill"), ("age", "bmi", "smokes"))
    assert data.owners.tolist() == [0, 1, 0]
    assert (data.name, data.mean, data.standardise) == ("t", (), False)


def test_columns_can_be_chosen_and_left_out(tmp_path):
    path = write(tmp_path)
    assert load(f"table:path={path},y=outcome,x=bmi|age").features == ("bmi", "age")
    assert load(f"table:path={path},y=outcome,drop=hospital|age").features == ("bmi", "smokes")
    assert load(f"table:path={path},y=outcome,x=age,standardise=true").standardise


@pytest.mark.parametrize(("delimiter", "encoding"), [(",", "utf-8-sig"), (";", "utf-8"), ("\t", "utf-8")])
def test_separator_byte_order_mark_and_line_ends_do_not_matter(tmp_path, delimiter, encoding):
    text = ROWS.replace(",", delimiter).replace("\n", "\r\n") + "\r\n"
    data = read_table(write(tmp_path, text, encoding=encoding), y="outcome", owner="hospital")
    assert data.x.equal(read_table(write(tmp_path), y="outcome", owner="hospital").x)


@pytest.mark.parametrize(
    ("values", "target", "y", "classes"),
    [
        (["b", "a", "b"], "auto", [1, 0, 1], ("a", "b")),
        (["10", "9", "10"], "auto", [1, 0, 1], ("9", "10")),  # sorted as numbers
        (["True", "False", "True"], "auto", [1, 0, 1], ("False", "True")),
        (["1.5", "2", "1.5"], "auto", [1.5, 2, 1.5], ()),
        (["1", "2", "1"], "number", [1, 2, 1], ()),
        (["1.0", "2.0", "1.0"], "classes", [0, 1, 0], ("1", "2")),
        (["-1", "+1", "-1"], "auto", [0, 1, 0], ("-1", "1")),
    ],
)
def test_integers_and_texts_are_classes_and_decimal_numbers_are_values(tmp_path, values, target, y, classes):
    path = write(tmp_path, "x,y\n" + "".join(f"{k},{value}\n" for k, value in enumerate(values)))
    data = read_table(path, y="y", target=target)
    assert data.y.tolist() == y
    assert data.y.is_floating_point() == (not classes)
    assert (data.classes, data.num_classes) == (classes, len(classes) or 1)


@pytest.mark.parametrize(
    ("text", "knobs", "words"),
    [
        (ROWS, {"y": "outcom"}, r"t.csv: unknown column 'outcom'; did you mean 'outcome'\? \(there are age, bmi"),
        (ROWS, {"y": "outcome"}, r"column 'hospital' holds text \('Bern', 'Oslo'\); .*drop=hospital"),
        (ROWS, {"y": "outcome", "owner": "outcome"}, "'outcome' is used twice"),
        (ROWS, {"y": "outcome", "x": ["outcome"]}, "'outcome' is used twice"),
        (ROWS, {"y": "outcome", "x": ["age"], "drop": ["age"]}, "no column left"),
        ("x,y\n1,a\n,b\n", {"y": "y"}, r"t.csv, line 3: 'x' is ''; remove such rows, fill the value.*drop=x"),
        ("x,y\n1,a\n\nNA,b\n", {"y": "y"}, "line 4: 'x' is 'NA'"),
        ("x,y\ninf,a\n1,b\n", {"y": "y"}, "line 2: 'x' is 'inf'"),
        ("x,y\n1,a\n2,\n", {"y": "y"}, "line 3: the target 'y' is missing"),
        ("x,y\n1,3\n2,NA\n", {"y": "y"}, "line 3: the target 'y' is 'NA', but others are numbers"),
        ("x,y\n1,nan\n2,0.5\n", {"y": "y"}, "line 2: 'y' is 'nan'"),
        ("x,y\n1,a\n2,a\n", {"y": "y"}, "'y' is always 'a'"),
        ("x,y,o\n1,a,u\n2,b,\n", {"y": "y", "owner": "o"}, "line 3: 'o' is empty; every sample needs an owner"),
        ("x,y\n1,a\n2\n", {"y": "y"}, "line 3: 1 values, but the header has 2 columns"),
        ('x,y\n"1\n",a\n2\n', {"y": "y"}, "line 4: 1 values"),
        ("x,x,y\n1,2,a\n", {"y": "y"}, "two columns called 'x'"),
        ("x,,y\n1,2,a\n", {"y": "y"}, "a column without a name"),
        ("", {"y": "y"}, "is empty; its first line must name the columns"),
        ("x,y\n", {"y": "y"}, "has no rows"),
        ('x,y\n"1,a\n', {"y": "y"}, "is not a CSV file"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(tmp_path, text, knobs, words):
    with pytest.raises(ValueError, match=words) as caught:
        read_table(write(tmp_path, text), **knobs)
    assert "\n" not in str(caught.value)


def test_another_encoding_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is not text in UTF-8"):
        read_table(write(tmp_path, "größe,y\n1,a\n2,b\n", encoding="latin-1"), y="y")
    with pytest.raises(ValueError, match=r"there is no file .*no.csv"):
        read_table(tmp_path / "no.csv", y="y")


def test_a_file_that_changes_is_read_again(tmp_path):
    path = write(tmp_path, "x,y\n1,a\n2,b\n")
    assert len(load(f"table:path={path},y=y").y) == 2
    write(tmp_path, "x,y\n1,a\n2,b\n3,a\n")
    assert len(load(f"table:path={path},y=y").y) == 3


def test_parquet_gives_what_csv_gives(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"age": [61, 47, 35], "bmi": [22.5, 31.0, 22.0], "smokes": [True, False, False]}
    columns |= {"hospital": ["Bern", "Oslo", "Bern"], "outcome": ["healthy", "ill", "ill"]}
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    ours, theirs = (read_table(each, y="outcome", owner="hospital") for each in (path, write(tmp_path)))
    assert ours.x.equal(theirs.x)
    assert ours.y.equal(theirs.y)
    assert ours[3:7] == theirs[3:7]
    parquet.write_table(pyarrow.table(columns | {"age": [61, None, 35]}), path)
    with pytest.raises(ValueError, match=r"t.parquet, row 2: 'age' is None"):
        read_table(path, y="outcome", owner="hospital")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is not a complete Parquet file"):
        read_table(path, y="outcome")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"pip install 'fedncv\[tables\]'"):
        read_table(path, y="y")


def test_a_table_of_scikit_learn_is_read_as_it_was_written(tmp_path):
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    path = tmp_path / "cancer.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([*bunch.feature_names, "diagnosis"])
        rows.writerows([[*x, bunch.target_names[y]] for x, y in zip(bunch.data.tolist(), bunch.target, strict=True)])
    data = read_table(path, y="diagnosis")
    assert np.array_equal(data.x.numpy(), bunch.data)
    assert [data.classes[y] for y in data.y] == [bunch.target_names[y] for y in bunch.target]
    assert data.features == tuple(bunch.feature_names)
