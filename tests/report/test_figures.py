"""The figures of studies with many methods and many columns: every dot in its place, nothing cut off."""

import pytest
from made_up_runs import made_up_study, write_study

from fedncv.comparison import summary
from fedncv.report import figures, names, series
from fedncv.report.gather import gather
from fedncv.studies import ablation


def test_a_dot_stands_at_its_mean_in_the_row_of_its_name(tmp_path):
    results = gather(write_study(tmp_path, made_up_study(datasets=("cifar10", "emnist"))))
    figure = figures.dots(results)
    figure.draw_without_rendering()
    rows = {label.get_position()[1]: label.get_text() for label in figure.axes[0].get_yticklabels()}
    for panel, column in zip(figure.axes, results.columns, strict=True):
        dots = {line.get_gid(): line for line in panel.lines if " " in str(line.get_gid())}
        spans = [line.get_xydata().tolist() for line in panel.lines]
        assert len(dots) == 2 * 3
        for metric in ("before", "after"):
            for method, seeds in column.scores(metric).items():
                dot, each = dots[f"{method} {metric}"], summary(list(seeds.values()))
                (x,), (y,) = dot.get_data()
                assert x == pytest.approx(100 * each.mean)
                assert rows[round(y)] == names.method(method)
                assert [pytest.approx([100 * end, y]) for end in (each.low, each.high)] in spans
                assert (dot.get_markerfacecolor() == "white") == (metric == "before")
                assert (dot.get_color() == figures.COLOURS[0]) == (method == "fedncv")
        floor = [line for line in panel.lines if line.get_xdata() == pytest.approx([100 * column.prior()] * 2)]
        assert len(floor) == 1


def test_seven_columns_stand_in_two_rows_with_names_at_the_left_of_each(tmp_path):
    variants = {f"lr-{i}": {"lr": 0.01 * (1 + i)} for i in range(7)}
    results = gather(write_study(tmp_path, made_up_study(seeds=(0, 1), variants=variants)))
    figure = figures.dots(results)
    figure.draw_without_rendering()
    shown = [panel for panel in figure.axes if panel.axison]
    assert len(shown) == 7
    assert len({round(panel.get_position().y0, 3) for panel in shown}) == 2
    named = [any(label.get_visible() and label.get_text() for label in p.get_yticklabels()) for p in shown]
    assert named == [True, False, False, False, True, False, False]


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """The ablation's methods, each better than the one before; FedNCV is the first and the worst."""
    methods = ablation().methods
    level = {method: 0.3 + 0.02 * i for i, method in enumerate(methods)}
    folder = write_study(
        tmp_path_factory.mktemp("many"), made_up_study(methods=methods, seeds=(0, 1)), level=lambda _, m: level[m]
    )
    return gather(folder)


def test_of_many_methods_fedncv_and_the_best_are_drawn(many):
    figure = figures.curves(many)
    drawn = [line.get_gid() for line in figure.axes[0].lines if line.get_gid() in many.methods]
    assert drawn == ["fedncv", *many.methods[-12:]]
    assert figure.legends[0].get_title().get_text().startswith("13 of 29 methods")


def test_of_few_methods_all_are_drawn(tmp_path):
    results = gather(write_study(tmp_path, made_up_study(methods=ablation().methods[:13], seeds=(0,))))
    assert series.drawn(results) == results.methods
    assert figures.curves(results).legends[0].get_title().get_text() == ""


@pytest.mark.parametrize("draw", [figures.curves, figures.dots, figures.clients])
def test_with_many_methods_nothing_is_cut_off_and_there_is_room_to_draw(many, draw):
    figure = draw(many)
    figure.draw_without_rendering()
    (panel,) = figure.axes
    box, whole = panel.get_window_extent(), figure.bbox
    assert box.width > 0.3 * whole.width
    assert box.height > 0.3 * whole.height
    assert min(label.get_window_extent().x0 for label in panel.get_yticklabels()) >= 0
    for legend in figure.legends:
        extent = legend.get_window_extent()
        assert 0 <= extent.x0 <= extent.x1 <= whole.x1
        assert 0 <= extent.y0 <= extent.y1 <= whole.y1
