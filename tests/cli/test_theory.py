"""``fedncv theory``: exit codes, what is printed, and the Markdown that the docs carry."""

import pytest

from fedncv.cli import main as fedncv
from fedncv.cli.theory import BEGIN, END, into_page, main, markdown
from fedncv.theory import STATEMENTS, Statement, Verdict


def test_it_prints_verdict_claim_and_counterexample(capsys):
    assert main(["--only", "zero-sum"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("holds  zero-sum weights")
    assert "the server rule's weights sum to zero for any sizes" in out
    assert "counterexample" not in out
    assert out.endswith("1 statements: 1 hold, 0 do not.\n")

    assert main(["--only", "Appendix A"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("fails  Appendix A's last step")
    assert "counterexample: n = (1, 1)" in out


def test_a_terminal_gets_a_table(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["--only", "zero-sum"]) == 0
    out = capsys.readouterr().out
    assert "verdict" in out
    assert "largest gap" in out
    assert "zero-sum weights" in out


def test_it_writes_markdown(tmp_path, capsys):
    page = tmp_path / "table.md"
    assert main(["--only", "weights sum to zero", "--markdown", str(page)]) == 0
    header, rule, row = page.read_text(encoding="utf-8").splitlines()
    assert header.count("|") == rule.count("|") == row.count("|") == 6
    assert row.startswith("| holds | zero-sum weights: the server rule's weights sum to zero")


def test_a_page_with_marks_keeps_everything_around_them(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"# Before\n{BEGIN}old table\n{END}\nafter\n", encoding="utf-8")
    assert main(["--only", "zero-sum", "--markdown", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Before\n{BEGIN}| verdict |")
    assert text.endswith(f"|\n{END}\nafter\n")
    assert "old table" not in text
    assert into_page(text, "new\n") == f"# Before\n{BEGIN}new\n{END}\nafter\n"


def test_bars_and_stars_do_not_break_the_table():
    statement = Statement("a|b", "β* of x", "|S|", list, lambda: None)
    table = markdown([(statement, Verdict(False, 2, 1.0, "|B| = 1"))])
    assert table.splitlines()[2] == r"| fails | a\|b: β\* of x | \|S\| | 2 | \|B\| = 1 |"


def test_help_and_unknown_words(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert leaving.value.code == 0
    assert "--markdown" in capsys.readouterr().out
    for words, message in ((["--only", "no such words"], "no statement mentions 'no such words'"), (["all"], "all")):
        assert fedncv(["theory", *words]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.startswith("fedncv: ")
        assert error.count("\n") == 1
    assert len(STATEMENTS) >= 15
