"""CSV and Parquet files: what becomes a sample, what is refused and where."""

import csv
import json
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
        (["9007199254740993", "9007199254740992"], "auto", [1, 0], ("9007199254740992", "9007199254740993")),
        (["1_000", "1000_", "1_000"], "auto", [1, 0, 1], ("1000_", "1_000")),  # texts
        (["0.1", "0.10000000000000002"], "classes", [0, 1], ("0.1", "0.10000000000000002")),
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
        (ROWS, {"y": "outcome", "x": ["age", "age"]}, "'age' is used twice"),
        (ROWS, {"y": "outcome", "x": ["age"], "drop": ["age"]}, "no column left"),
        ("x,y\n1_000,a\n2,b\n", {"y": "y"}, r"column 'x' holds text \('1_000'\)"),
        ("x,y\n1,a\n,b\n", {"y": "y"}, r"t.csv, line 3: 'x' is ''; remove such rows, fill the value.*drop=x"),
        ("x,y\n1,a\n\nNA,b\n", {"y": "y"}, "line 4: 'x' is 'NA'"),
        ("x,y\ninf,a\n1,b\n", {"y": "y"}, "line 2: 'x' is 'inf'"),
        ("x,y\n1,a\n2,\n", {"y": "y"}, "line 3: the target 'y' is '', which counts as missing; remove such"),
        ("x,y\n1,3\n2,NA\n", {"y": "y"}, "line 3: the target 'y' is 'NA', which counts as missing"),
        ("x,y\n1,3\n2,b\n", {"y": "y"}, "line 3: the target 'y' is 'b', but others are numbers"),
        ("x,y\n1,nan\n2,0.5\n", {"y": "y"}, "line 2: the target 'y' is 'nan'"),
        ("x,y\n1,inf\n2,1\n", {"y": "y", "target": "classes"}, "line 2: the target 'y' is 'inf'"),
        ("x,y\n1,a\n2,a\n", {"y": "y"}, "'y' is always 'a'"),
        (
            "x,y,o\n1,a,u\n2,b,\n",
            {"y": "y", "owner": "o"},
            "line 3: the owner 'o' is '', .* needs an owner",
        ),
        ("x,y\n1,a\n2\n", {"y": "y"}, "line 3: 1 values, but the header has 2 columns"),
        ('x,y\n"1\n",a\n2\n', {"y": "y"}, "line 4: 1 values"),
        ("x,x,y\n1,2,a\n", {"y": "y"}, "two columns called 'x'"),
        ("x,,y\n1,2,a\n", {"y": "y"}, "a column without a name"),
        ("", {"y": "y"}, "is empty; its first line must name the columns"),
        ("x,y\n", {"y": "y"}, "has no rows"),
        ('x,y\n"1,a\n', {"y": "y"}, "is not a CSV file"),
        ("x;y\n13,2;a\n1;b\n", {"y": "y"}, r"holds text \('13,2'\); write it as numbers with a decimal point"),
        ("x;y\n1;13,2\n1;4\n", {"y": "y"}, "line 2: the target 'y' is '13,2'; write numbers with a decimal point"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(tmp_path, text, knobs, words):
    with pytest.raises(ValueError, match=words) as caught:
        read_table(write(tmp_path, text), **knobs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["NA", "n/a", "?", "null", "nan", "None", "", " ", "<NA>"])
@pytest.mark.parametrize("knobs", [{"y": "a"}, {"y": "y", "owner": "a"}, {"y": "y"}])
def test_a_missing_value_is_no_class_no_owner_and_no_feature(tmp_path, value, knobs):
    others = "1 2" if knobs == {"y": "y"} else "ill ok"
    path = write(tmp_path, "a,y,x\n" + "".join(f"{a},{k % 2},{k}\n" for k, a in enumerate([*others.split(), value])))
    with pytest.raises(ValueError, match=f"line 4: .*'a' is {value.strip()!r}".replace("?", r"\?")):
        read_table(path, **knobs)


def test_the_column_that_a_message_says_to_drop_can_be_dropped_so(tmp_path):
    """Also if its name has a comma and quotes."""
    path = write(tmp_path, 'x,y,"alcohol, in % ""vol"""\n1,a,low\n2,b,high\n')
    text = f"table:path={path},y=y"
    with pytest.raises(ValueError, match="holds text") as caught:
        load(text)
    hint = str(caught.value).partition("leave it out with ")[2]
    assert load(f"{text},{hint}").features == ("x",)
    with pytest.raises(ValueError, match=r'put a value with a comma in quotes: drop="..."'):
        load(f"{text},drop=alcohol, in % vol")


def test_texts_with_commas_are_classes_if_they_are_called_so(tmp_path):
    path = write(tmp_path, "x;y\n1;1,2\n1;3,4\n")
    assert read_table(path, y="y", target="classes").classes == ("1,2", "3,4")


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


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("target", ["auto", "classes", "number"])
def test_a_missing_value_in_parquet_is_no_class_and_no_owner(tmp_path, value, target):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"x": [1, 2, 3], "y": [0, 1, 0], "o": [1.0, 2.0, value]}), path)
    with pytest.raises(ValueError, match=r"row 3: the owner 'o' is (None|nan|inf), which counts as missing"):
        read_table(path, y="y", owner="o", target=target)
    with pytest.raises(ValueError, match=r"row 3: the target 'o' is (None|nan|inf), which counts as missing"):
        read_table(path, y="o", target=target)


def test_the_index_of_pandas_is_a_feature_only_if_it_is_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    table = pyarrow.table({"age": [61, 47], "y": [0, 1], "patient": [7, 8], "__index_level_1__": [5, 3]})
    index = [{"kind": "range", "start": 0, "stop": 2, "step": 1}], ["patient", "__index_level_1__"]
    for columns, features in zip(index, (("age", "patient"), ("age",)), strict=True):
        metadata = {"pandas": json.dumps({"index_columns": columns, "columns": []})}
        parquet.write_table(table.replace_schema_metadata(metadata), path)
        assert read_table(path, y="y").features == features
    assert read_table(path, y="y", x=["age", "__index_level_1__"]).x.tolist() == [[61, 5], [47, 3]]
    assert read_table(path, y="y", owner="patient").owners.tolist() == [0, 1]


def test_integer_classes_beyond_2_to_the_53_do_not_merge_in_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"x": [1, 2, 3], "y": [2**62 + 1, 2**62, -(2**62)]}), path)
    data = read_table(path, y="y")
    assert data.y.tolist() == [2, 1, 0]
    assert data.classes == (str(-(2**62)), str(2**62), str(2**62 + 1))


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
