"""The budget of a run: spent once a round, written before the noise, and never exceeded."""

import json
import subprocess
import sys
import textwrap

import pytest

import fedncv
from fedncv import ledger
from fedncv.accountant import Release, epsilon
from fedncv.cli import main
from fedncv.files import sealed
from fedncv.results import LEDGER, METRICS, STATE, read_run
from fedncv.runner import extend

QUICK = {
    "model": "mlp", "clients": 8, "per_round": 2, "rounds": 5, "epochs": 1, "engine": "sequential", "layers": "torch",
    "checkpoint_every": 3, "eval_every": 0, "sampling": "poisson",
}  # fmt: skip
METHOD = "fedavg+dp:clip=0.5,noise=2"
ROUND = Release(2.0, 2, 8, False)


def charged(folder):
    return [json.loads(line) for line in (folder / LEDGER).read_text().splitlines()]


def spent(rounds):
    return epsilon(ROUND, rounds, 1e-5)


def test_every_round_is_charged_once_and_its_row_says_the_same(tmp_path):
    result = fedncv.simulate(out=tmp_path / "run", method=METHOD, **QUICK)
    lines = charged(tmp_path / "run")
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["epsilon"] for line in lines] == [row["epsilon"] for row in result.rows[1:]]
    assert [line["epsilon"] for line in lines] == [spent(t) for t in range(1, 6)]
    assert {line["unit"] for line in lines} == {"client"}
    assert {(line["noise"], line["neighbours"], line["delta"]) for line in lines} == {(2.0, "add or remove one", 1e-5)}


def test_a_run_stops_before_its_budget_is_exceeded_and_stays_stopped(tmp_path, capsys):
    """A budget between the third and the fourth round."""
    budget = (spent(3) + spent(4)) / 2
    run = tmp_path / "run"
    text = f"{METHOD},epsilon={budget!r}"
    result = fedncv.simulate(out=run, method=text, **QUICK)
    assert "lasts for 3 of 5 rounds" in capsys.readouterr().err
    assert result.rows[-1]["epsilon"] == spent(3) <= budget
    assert [line["round"] for line in charged(run)] == [1, 2, 3]
    assert "the privacy budget is spent" in read_run(run).stopped
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.name in (METRICS, STATE, LEDGER)}
    fedncv.resume(run)
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.name in before} == before


def test_rounds_of_two_runs_stop_by_themselves(tmp_path):
    """Runs of one engine with budgets of their own share only the settings of the engine: here the seeds."""
    budget = (spent(2) + spent(3)) / 2
    results = fedncv.simulate_many(seeds=[0, 1], method=f"{METHOD},epsilon={budget!r}", **QUICK)
    assert [result.rows[-1]["round"] for result in results] == [2, 2]


def test_the_noise_that_was_found_lasts_to_the_last_round(tmp_path):
    result = fedncv.simulate(method="fedavg+dp:clip=0.5,epsilon=4", **QUICK)
    assert result.rows[-1]["round"] == 5
    assert 3.9 < result.rows[-1]["epsilon"] <= 4


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (
            "fedavg+dp:clip=0.5,epsilon=4",
            "5 rounds spend the budget of the run, epsilon 4: its noise was found for them",
        ),
        (f"{METHOD},epsilon={spent(6)!r}", "7 rounds spend epsilon .* more than the budget .*; it allows 6 rounds"),
    ],
)
def test_more_rounds_than_the_budget_allows_are_refused(method, words, tmp_path, capsys):
    run = tmp_path / "run"
    fedncv.simulate(out=run, method=method, **QUICK)
    with pytest.raises(ValueError, match=words):
        extend(run, 7)
    assert main(["resume", str(run), "--rounds", "7"]) == 2
    assert capsys.readouterr().err.count("\n") == 2  # the note of the run, and the refusal


def test_more_rounds_within_the_budget_are_charged(tmp_path):
    run = tmp_path / "run"
    fedncv.simulate(out=run, method=f"{METHOD},epsilon={spent(6)!r}", **QUICK)
    fedncv.resume(run, rounds=6)
    assert [line["epsilon"] for line in charged(run)] == [spent(t) for t in range(1, 7)]


def test_clip_and_decay_go_on_where_they_were(tmp_path):
    """What the switch keeps at the server survives the disk: an extended run has the rows of one planned so."""
    settings = QUICK | {"method": "scaffold+dp:clip=0.5,noise=2,adapt=0.2,decay=0.3,control=0.1"}
    fedncv.simulate(out=tmp_path / "run", **settings | {"rounds": 3})
    extended = fedncv.resume(tmp_path / "run", rounds=5)
    planned = fedncv.simulate(**settings)
    for name in ("loss", "clip", "clip_inside", "epsilon"):
        assert [row[name] for row in extended.rows[1:]] == [row[name] for row in planned.rows[1:]]


KILLED = """
    import os, signal, sys
    import fedncv
    from fedncv import ledger

    visits = 0

    def die(point):
        global visits
        visits += point == sys.argv[2]
        if point == sys.argv[2] and visits == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    ledger.write_point = die
    fedncv.simulate(out=sys.argv[1], method={method!r}, **{quick!r})
"""


def test_stopped_between_the_ledger_and_the_noise_a_run_pays_for_the_round_once(tmp_path, monkeypatch):
    """The same without a process of its own: the second charge is written, and then the run ends."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    fedncv.simulate(out=whole, method=METHOD, **QUICK)
    visits = []

    def end(point):
        visits.append(point)
        if visits.count("ledger: charged") == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ledger, "write_point", end)
        with pytest.raises(KeyboardInterrupt):
            fedncv.simulate(out=run, method=METHOD, **QUICK)
    assert [line["round"] for line in charged(run)] == [1, 2]
    assert fedncv.resume(run).rows[-1]["epsilon"] == spent(5)
    for name in (METRICS, STATE, LEDGER):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("point", ["ledger: charged", "ledger: half a line"])
def test_killed_between_the_ledger_and_the_noise_a_run_pays_for_the_round_once(point, tmp_path):
    """The round is on the ledger before it begins; it is repeated with the same clients and noise."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    fedncv.simulate(out=whole, method=METHOD, **QUICK)
    script = textwrap.dedent(KILLED).format(method=METHOD, quick=QUICK)
    done = subprocess.run([sys.executable, "-c", script, str(run), point], capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    rounds = [json.loads(line)["round"] for line in (run / METRICS).read_text().splitlines()]
    assert rounds == [0, 1]  # the second one was charged, or half so, and not made
    known = (run / LEDGER).read_bytes()
    assert known.count(b"\n") == (2 if point == "ledger: charged" else 1)
    fedncv.resume(run)
    for name in (METRICS, STATE, LEDGER):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_ledger_that_lacks_rounds_or_was_changed_is_refused(tmp_path):
    run = tmp_path / "run"
    fedncv.simulate(out=run, method=METHOD, **QUICK)
    path, lines = run / LEDGER, (run / LEDGER).read_bytes().splitlines(keepends=True)
    for content, words in (
        (b"", "has 0 rounds, but the run has made 5"),
        (b"".join(lines[:3]), "has 3 rounds, but the run has made 5"),
        (b"".join([lines[0], *lines[2:]]), "is damaged"),
        (b"".join(lines).replace(b'"noise": 2.0', b'"noise": 9.0'), "is damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            fedncv.resume(run, rounds=6)


def test_a_round_is_not_repeated_with_other_terms(tmp_path):
    entry = {
        "round": 1, "unit": "client", "neighbours": "add or remove one", "noise": 2.0, "drawn": 2, "clients": 8,
        "delta": 1e-5, "accountant": "pld", "epsilon": 1.0,
    }  # fmt: skip
    ledger.charge(tmp_path, entry)
    ledger.charge(tmp_path, entry | {"epsilon": 1.0000001})  # another version's last digits
    assert [json.loads(line) for line in (tmp_path / LEDGER).read_text().splitlines()] == [sealed(entry)]
    with pytest.raises(ValueError, match=r"round 1 is charged with other terms \(noise 2.0, now 1.0\)"):
        ledger.charge(tmp_path, entry | {"noise": 1.0})


def test_overwriting_a_run_begins_a_new_ledger(tmp_path):
    run = tmp_path / "run"
    fedncv.simulate(out=run, method=METHOD, **QUICK)
    fedncv.simulate(out=run, method=METHOD.replace("noise=2", "noise=3"), overwrite=True, **QUICK | {"rounds": 1})
    assert [line["noise"] for line in charged(run)] == [3.0]


def test_table_and_report_say_what_was_spent_and_of_whom(tmp_path, capsys):
    for name, method in (("a", METHOD), ("b", "fedavg"), ("c", "fedavg+dp:clip=0.5,noise=0")):
        fedncv.simulate(out=tmp_path / name, method=method, **QUICK | {"rounds": 2})
    capsys.readouterr()
    assert main(["show", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"epsilon {spent(2):.4g} at delta 1e-05, for a client as a whole" in said
    assert "no differential privacy, because there is no noise" in said
    line = next(line for line in said.splitlines() if line.lstrip().startswith(METHOD))
    assert line.split()[-1] == f"{spent(2):.3g}"
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "ε of a client" in page
    assert f"{spent(2):.3g} (δ 1e-05)" in page


def test_tables_of_runs_without_privacy_have_no_column_for_it(tmp_path, capsys):
    fedncv.simulate(out=tmp_path, method="fedavg", **QUICK | {"rounds": 1})
    main(["show", str(tmp_path)])
    assert "ε" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--sampling", "weighted"], "sampling=weighted: who is drawn depends on the sizes of all clients"),
        (["--method", "fedavg+dp:delta=0.2"], "delta is 0.2, but must be below 1 / clients = 0.125"),
        (["--method", "fedncv+dp"], "needs single replies"),
        (["--method", "fedavg+dp:epsilon=1e-9"], "would need noise of more than 10000 times the clip"),
    ],
)
def test_the_command_line_refuses_in_one_line_and_makes_no_folder(words, reason, tmp_path, capsys):
    out = tmp_path / "out"
    plain = ["run", "--method", METHOD, "--clients", "8", "--per-round", "2", "--model", "mlp", "--out", str(out)]
    given = [word for word in plain if words[0] != "--method" or word not in ("--method", METHOD)]
    assert main([*given, *words, "--seeds", "0"]) == 2
    error = capsys.readouterr().err.strip()
    assert reason in error
    assert "\n" not in error
    assert not out.exists()


def test_without_the_library_the_extra_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert main(["run", "--method", METHOD, "--out", str(tmp_path / "out")]) == 2
    assert "+dp needs dp-accounting, which is not installed; pip install 'fedncv[dp]'" in capsys.readouterr().err


def test_a_federation_and_the_observatory_refuse_it_by_name(capsys, tmp_path):
    from fedncv.config import RunConfig
    from fedncv.flower.halves import check

    with pytest.raises(ValueError, match="secret noise for federations is not built yet"):
        check(RunConfig(method=METHOD))
    with pytest.raises(ValueError, match="sampling is poisson"):
        check(RunConfig(sampling="poisson"))
    out = ["--out", str(tmp_path / "out"), "--clients", "8", "--per-round", "2", "--rounds", "2", "--model", "mlp"]
    assert main(["variance", METHOD, *out]) == 2
    assert "measure the method without +dp" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
