"""A method has one colour and line in all figures, and colour-blind readers can tell the first eight apart."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from made_up_runs import made_up_study, write_study

import fedncv.report
from fedncv.catalogue import methods as listed
from fedncv.figures import APART, COLOURS, COLOURS_ON_DARK, FIRST, caption, looks
from fedncv.report import figures
from fedncv.report.gather import gather
from fedncv.report.page import chart_data

# Machado, Oliveira and Fernandes, 2009: full strength, on linear RGB
SEEN_AS = {
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    "all colours": np.eye(3),
}


def lab(colour, seen_as):
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.clip(np.array(seen_as) @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4), 0, 1)
    to_xyz = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])
    xyz = to_xyz @ linear / [0.9505, 1, 1.0888]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("seen_as", SEEN_AS)
@pytest.mark.parametrize("colours", [COLOURS, COLOURS_ON_DARK], ids=["light", "dark"])
def test_the_eight_colours_differ_for_every_reader(colours, seen_as):
    """A difference of 2.3 in CIELAB is just noticeable; these differ by more than six times as much."""
    places = [lab(colour, SEEN_AS[seen_as]) for colour in colours]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(places, 2)) > 14


def test_the_page_has_the_colours_of_the_figures():
    css = (Path(fedncv.report.__file__).parent / "page.css").read_text()
    found = re.findall(r"--c\d: (#\w{6})", css)
    assert [colour.upper() for colour in found] == COLOURS + COLOURS_ON_DARK


def test_all_built_in_methods_look_different_and_the_same_in_every_set():
    everyone = looks(listed())
    assert len(set(everyone.values())) == len(listed()) == 35
    assert {look.colour for method, look in everyone.items() if method in FIRST} == set(range(8))
    for some in (["fedavg", "moon"], ["moon", "my.code:mine", "fedavg"], list(listed())[::-3]):
        assert {m: look for m, look in looks(some).items() if m in everyone} == {
            m: everyone[m] for m in some if m in everyone
        }


def test_other_methods_have_looks_of_their_own_whatever_the_order():
    some = ["fedavg", *(f"mine{i}" for i in range(20)), "fedavg+prior", "fedncv"]
    assert looks(some) == looks(some[::-1])
    assert len(set(looks(some).values())) == len(some)
    few = looks(["fedavg", "another", "other", "third"])
    assert len({look.colour for look in few.values()}) == 4  # colours first, lines after
    assert len(looks([f"mine{i}" for i in range(50)])) == 50  # more than there are looks


def test_one_method_in_two_folders_has_one_colour_and_two_lines():
    found = looks([f"scaffold{APART}a", f"scaffold{APART}b", "fedavg"])
    a, b = found[f"scaffold{APART}a"], found[f"scaffold{APART}b"]
    assert a.colour == b.colour == looks(["scaffold"])["scaffold"].colour
    assert a.line != b.line


def test_curves_dots_clients_and_scale_use_them_and_so_does_the_page(tmp_path):
    methods = ("fedavg", "fedavg+prior", "fedncv", "local")
    study = made_up_study(methods=methods, seeds=(0, 1), clients=(20, 40))
    results = gather(write_study(tmp_path, study))
    expected = {method: COLOURS[look.colour] for method, look in looks(methods).items()}
    for draw in (figures.curves, figures.scale):
        for panel in draw(results).axes:
            assert {line.get_gid(): line.get_color() for line in panel.lines if line.get_gid() in methods} == expected
    for panel in figures.dots(results).axes:
        drawn = {line.get_gid().split()[0]: line.get_color() for line in panel.lines if " " in str(line.get_gid())}
        assert drawn == expected
    charted = chart_data(results)["methods"]
    assert {each["id"]: COLOURS[each["colour"]] for each in charted} == expected


# ---- intervals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_seeds", "kind"), [(1, "none"), (2, "bars"), (5, "bands")])
def test_every_figure_of_seeds_shows_intervals_and_says_what_they_are(tmp_path, num_seeds, kind):
    study = made_up_study(seeds=tuple(range(num_seeds)), clients=(20, 40))
    results = gather(write_study(tmp_path, study))
    for draw in (figures.curves, figures.dots, figures.clients, figures.scale):
        figure = draw(results)
        (said,) = (text.get_text().replace("\n", " ") for text in figure.texts if text.get_gid() == "caption")
        assert ("One seed: no interval" in said) == (num_seeds == 1)
        assert ("caution" in said) == (1 < num_seeds < 5)
        assert ("95 % interval by Student" in said) == (num_seeds > 1)
        if draw is not figures.dots:  # its intervals are tested by their ends
            drawn = [art for p in figure.axes for art in p.get_children() if "interval" in str(art.get_gid())]
            assert bool(drawn) == (kind != "none")
    panel = figures.curves(results).axes[0]
    bands = [art for art in panel.collections if "interval" in str(art.get_gid())]
    assert len(bands) == (3 if kind == "bands" else 0)


def test_a_bar_at_the_end_is_the_interval_of_the_last_round(tmp_path):
    results = gather(write_study(tmp_path, made_up_study(seeds=(0, 1, 2))))
    panel = figures.curves(results).axes[0]
    from fedncv.report import series

    for method, points in series.curves(results.columns[0])["before"].items():
        (bar,) = (line for line in panel.lines if line.get_gid() == f"{method} interval")
        assert bar.get_ydata() == pytest.approx([100 * points[-1].low, 100 * points[-1].high])
        assert min(bar.get_xdata()) > points[-1].round


def test_legend_and_caption_do_not_overlap(tmp_path):
    methods = tuple(listed())[:13]
    results = gather(write_study(tmp_path, made_up_study(methods=methods, seeds=(0, 1))))
    for draw in (figures.curves, figures.dots):
        figure = draw(results)
        figure.draw_without_rendering()
        (legend,) = figure.legends
        (text,) = (text for text in figure.texts if text.get_gid() == "caption")
        lowest = min(p.get_tightbbox().y0 for p in figure.axes)
        assert 0 <= text.get_window_extent().y0 < text.get_window_extent().y1 <= legend.get_window_extent().y0 + 1
        assert legend.get_window_extent().y1 <= lowest + 1


def test_different_numbers_of_seeds_are_said():
    assert caption([2, 7], drawn="bars").startswith("Mean over 2 to 7 seeds; bars: 95 %")
    assert "caution" not in caption([5, 7], drawn="bars")
    assert caption([], drawn="bars") == ""
