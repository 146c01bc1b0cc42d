"""fedncv datasets, as a user calls it."""

import pytest

from fedncv import cli
from fedncv.data import DATASETS, FORMS
from fedncv.data.table import markdown


def main(argv):
    return cli.main(["datasets", *argv])


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDNCV_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDNCV_DATA", raising=False)


def test_every_dataset_has_a_line_with_its_numbers(capsys):
    assert main([]) == 0
    table, _, own = capsys.readouterr().out.partition("\n\n")
    lines = [line.split("\t") for line in table.splitlines()]
    assert all(f"  {form}:path=" in own for form in FORMS)
    assert lines[0][0] == "name"
    assert [line[0] for line in lines[1:]] == list(DATASETS)
    by_name = {line[0]: line for line in lines[1:]}
    assert by_name["digits"][2:6] == ["1x28x28", "10", "1,797", "built in"]
    assert by_name["cifar100"][5] == "no"


def test_what_is_at_hand_is_said(capsys, tmp_path):
    (tmp_path / "SVHN").mkdir()
    for part in ("train", "test"):
        (tmp_path / "SVHN" / f"{part}_32x32.mat").write_bytes(b"")
    assert main(["--data-dir", str(tmp_path)]) == 0
    assert f"svhn\tSVHN\t3x32x32\t10\t99,289\t{tmp_path / 'SVHN'}" in capsys.readouterr().out


def test_one_dataset_says_what_to_put_where(capsys):
    assert main(["cifar100"]) == 0
    text = capsys.readouterr().out
    assert "manual installation: put train, test into " in text
    assert "hub id: uoft-cs/cifar100" in text
    assert "md5: 16019d7e3df5f24257cddd939b257f8d  train" in text


def test_table_2_is_printed_from_the_registry(capsys):
    assert main(["--markdown"]) == 0
    assert capsys.readouterr().out == markdown()


def test_a_terminal_gets_a_table(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    assert main([]) == 0
    text = capsys.readouterr().out
    assert "┃" in text
    assert "│ emnist_balanced │" in text


@pytest.mark.parametrize(
    ("argv", "words"), [(["minst"], "did you mean 'mnist'"), (["--data-dir", "/no"], "/no does not")]
)
def test_bad_input_is_one_line_and_exit_code_2(argv, words, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
