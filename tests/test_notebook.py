"""Results in notebooks: a short description, the curve, progress that disappears, and no figure left open."""

import base64
import re
import sys
import time

import matplotlib._pylab_helpers as open_figures
import pytest
from federations import Tiny, tiny_dataset
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from PIL import Image

import fedncv
from fedncv.config import RunConfig
from fedncv.notebook import RoundProgress

QUICK = {"data": tiny_dataset(60), "model": Tiny, "clients": 3, "per_round": 2, "rounds": 3, "epochs": 1}
QUICK |= {"partition": "iid", "eval_every": 1, "engine": "sequential"}


@pytest.fixture
def notebook():
    """A shell as a Jupyter kernel has it; what it would show is kept."""
    shell = InteractiveShell.instance()
    shell.kernel = object()
    shell.display_pub = CapturingDisplayPublisher()
    shell.user_ns |= {"fedncv": fedncv, "QUICK": QUICK}
    yield shell
    InteractiveShell.clear_instance()
    sys.modules["builtins"].__dict__.pop("get_ipython", None)


def run_cell(shell, code):
    """What the cell shows at its end, by display id, and the value of its last line."""
    shell.display_pub.outputs.clear()
    result = shell.run_cell(code, store_history=False)
    result.raise_error()
    shown = {}
    for number, output in enumerate(shell.display_pub.outputs):
        shown[(output["transient"] or {}).get("display_id", number)] = output["data"]
    return list(shown.values()), result.result


def test_a_cell_shows_progress_while_it_trains_and_nothing_of_it_afterwards(notebook, monkeypatch, capsys):
    monkeypatch.setattr("fedncv.notebook._Notebook.often", 0.0)
    left, result = run_cell(notebook, "fedncv.simulate(**QUICK)")
    assert left == [{"text/html": "", "text/plain": ""}]
    bars = [each["data"]["text/plain"] for each in notebook.display_pub.outputs if each["data"].get("text/html")]
    assert len(bars) == 4
    assert re.fullmatch(r"fedavg on tiny: round 3/3, before 0\.\d{3}, 0 s left", bars[-1])
    assert '<progress value="3" max="3">' in notebook.display_pub.outputs[-2]["data"]["text/html"]
    assert len(result.rows) == 4
    left, _ = run_cell(notebook, "fedncv.simulate(progress=False, **QUICK)")
    assert left == []
    with pytest.raises(ZeroDivisionError):  # a cell that fails leaves no bar either
        run_cell(notebook, "fedncv.simulate(on_round=lambda row: 1 / 0, **QUICK)")
    assert notebook.display_pub.outputs[-1]["data"] == {"text/html": "", "text/plain": ""}
    capsys.readouterr()


def test_a_result_is_a_small_table_with_its_curve(notebook, tmp_path, capsys):
    _, result = run_cell(notebook, f"fedncv.simulate(out={str(tmp_path / '<run>')!r}, **QUICK)")
    assert re.fullmatch(
        r"Result\(method fedavg, data tiny, seed 0, rounds 3, accuracy before .* %, folder .*\)", repr(result)
    )
    formats, _ = notebook.display_formatter.format(result)
    assert formats["text/plain"] == repr(result)
    page = formats["text/html"]
    assert "&lt;run&gt;" in page
    assert "<th" in page
    (picture,) = re.findall(r"data:image/png;base64,([^\"]+)", page)
    (tmp_path / "curve.png").write_bytes(base64.b64decode(picture))
    with Image.open(tmp_path / "curve.png") as image:
        assert len(image.convert("RGB").getcolors(1 << 24)) > 20
    assert len(repr(fedncv.simulate(**(QUICK | {"rounds": 0})))) < 150
    capsys.readouterr()


def test_plots_are_shown_once_and_leave_no_figure_open(notebook, capsys):
    _, results = run_cell(notebook, "results = fedncv.simulate_many(seeds=[0, 1], **QUICK); results")
    shown, axes = run_cell(notebook, "fedncv.plot(results)")
    assert [list(each) for each in shown] == [["image/png", "text/plain"]]
    assert next(line.get_label() for line in axes.get_lines()) == "fedavg"
    for _ in range(3):
        results[0].plot()
        results[0]._repr_html_()
        fedncv.plot(results)
    assert not open_figures.Gcf.figs
    capsys.readouterr()


def test_methods_are_lines_of_one_figure_on_given_axes():
    from matplotlib.figure import Figure

    results = [
        fedncv.simulate(method=method, seed=seed, **QUICK) for method in ("fedavg", "fedprox") for seed in (0, 1)
    ]
    axes = Figure().subplots()
    assert fedncv.plot(results, axes) is axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines["fedavg"].get_xdata()) == [0, 1, 2, 3]
    means = [sum(result.rows[t]["before"] for result in results[2:]) / 2 for t in range(4)]
    assert lines["fedprox"].get_ydata() == pytest.approx([100 * mean for mean in means])
    assert lines["fedavg"].get_color() != lines["fedprox"].get_color()
    assert results[0].plot().get_title(loc="left").startswith("tiny, 3 clients")
    assert results[0].config is results[0].problem.config
    with pytest.raises(ValueError, match="nothing to plot"):
        fedncv.plot([])


def test_a_metric_is_drawn_in_place_of_the_score():
    def spread(outputs, _targets):
        return float(outputs.std())

    result = fedncv.simulate(metrics=["ece", spread], **QUICK)
    axes = result.plot(metric="ece")
    assert list(axes.get_lines()[0].get_ydata()) == [row["before_ece"] for row in result.rows]
    assert axes.get_lines()[1].get_ydata()[0] == result.last["after_ece"]
    assert axes.get_ylabel().startswith("ece before local training")
    assert "label prior alone" not in [line.get_label() for line in axes.get_lines()]
    axes = fedncv.plot([result], metric="spread")
    assert list(axes.get_lines()[0].get_ydata()) == [row["before_spread"] for row in result.rows]
    with pytest.raises(ValueError, match=r"unknown metric 'spred'; did you mean 'spread'\? \(there are ece, spread\)"):
        result.plot(metric="spred")


class Terminal:
    """A stream that says it is a terminal."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return True


def test_a_terminal_shows_a_line_after_a_while_and_clears_it(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    fedncv.simulate(**QUICK)
    assert sys.stderr.text == ""  # too short for a line
    monkeypatch.setattr("fedncv.notebook.PATIENCE", 0.0)
    monkeypatch.setattr("fedncv.notebook._Terminal.often", 0.0)
    fedncv.simulate(on_round=lambda row: None, **QUICK)
    assert sys.stderr.text == ""  # the callback may print
    fedncv.simulate(**QUICK)
    assert "fedavg on tiny: round 3/3" in sys.stderr.text
    assert sys.stderr.text.endswith("\r\x1b[K")


def test_a_program_whose_output_goes_to_a_file_is_silent(capsys):
    fedncv.simulate(**QUICK)
    assert capsys.readouterr() == ("", "")
    fedncv.simulate(progress=True, **QUICK)
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("fedavg on tiny: round 0/3")
    assert len(error.splitlines()) == 1  # the next in ten seconds


def test_the_time_left_counts_only_rounds_of_this_call(monkeypatch):
    """Resumed at 80 of 100 rounds, two rounds took ten seconds: eighteen more take ninety."""
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with RoundProgress([RunConfig()], [80], False) as progress:
        progress.row({"round": 81})
        progress.row({"round": 82, "before": 0.5})
        assert progress.text(10.0) == "fedavg on digits: round 82/100, before 0.500, 90 s left"
