"""fedncv partition, as a user calls it."""

import pytest

from fedncv import cli


def main(argv):
    return cli.main(["partition", *argv])


def test_it_prints_the_numbers_and_draws_the_picture(tmp_path, capsys):
    out = tmp_path / "p.png"
    assert main(["--clients", "10", "--partition", "classes:k=2", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "samples: 1,797 of 10 classes" in lines
    assert "classes per client: 2 to 2, median 2" in lines
    assert "samples moved to reach the minimum: 0" in lines
    assert any(line.startswith("accuracy of the label prior alone: ") for line in lines)
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_seed_gives_the_same_numbers_twice(tmp_path, capsys):
    printed = []
    for _ in range(2):
        main(["--clients", "20", "--seed", "7", "--out", str(tmp_path / "p.svg")])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


def test_a_terminal_gets_a_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["--clients", "10", "--out", str(tmp_path / "p.png")]) == 0
    assert "│ clients" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--clients", "0"], "0 clients; there must be at least one"),
        (["--clients", "1798", "--partition", "iid"], "1798 clients for 1797 samples"),
        (["--clients", "180"], "use at most 179 clients or min_samples=9"),
        (["--partition", "dirichlet:alpha=0"], "alpha is 0.0; it must be above 0"),
        (["--partition", "dirichlet:alpha=x"], "alpha must be float, not 'x'"),
        (["--partition", "dirichlet:beta=1"], "has no knob 'beta'"),
        (["--partition", "dirichle"], "did you mean 'dirichlet'"),
        (["--partition", "natural"], "does not say who owns its samples"),
        (["--data", "digit"], "did you mean 'digits'"),
        (["--data", "mnist", "--data-dir", "/nowhere"], "the data folder /nowhere does not exist"),
        (["--test-share", "1.5"], "test_share is 1.5"),
        (["--clients", "x"], "--clients"),
        (["--nonsense"], "--nonsense"),
        (["--out", "/dev/null/p.png"], "cannot write the picture"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
