"""The page in a real browser: nothing on the console, and what can be pressed does what it says."""

import csv
import json

import pytest
from browsers import MARKS, chromium, contrast
from made_up_runs import made_up_study, write_run, write_study
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from fedncv.config import Settings
from fedncv.report.write import write

pytestmark = MARKS
SEVEN = ("fedavg", "fedprox", "scaffold", "fedrep", "fedper", "pfedsim", "fedncv")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Seven methods on two datasets; one run is unfinished, variance was measured."""
    out = tmp_path_factory.mktemp("study")
    study = made_up_study(methods=SEVEN, datasets=("cifar10", "emnist"))
    write_study(out, study, skip=("emnist/fedavg-seed2",), variance=True)
    config = next(cell.config for cell in study.cells() if str(cell.folder) == "emnist/fedavg-seed2")
    write_run(out / "emnist/fedavg-seed2", config, 0.5, until=7)
    write(out)
    return out


def open_page(browser, folder, *, width=1280, dark=False):
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    still = {"name": "prefers-reduced-motion", "value": "reduce"}  # or scrolling is under way when we press
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, still]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get((folder / "report.html").as_uri())
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def lines(browser, chart="curves"):
    return browser.find_elements(By.CSS_SELECTOR, f"#{chart}-chart g[data-method]")


def legend(browser, method):
    return browser.find_element(By.CSS_SELECTOR, f"#curves-chart .legend button[data-method='{method}']")


def pick(browser, label, text):
    labels = browser.find_elements(By.CSS_SELECTOR, "#curves-chart .controls label")
    select = next(each for each in labels if each.text.startswith(label)).find_element(By.TAG_NAME, "select")
    next(each for each in select.find_elements(By.TAG_NAME, "option") if each.text == text).click()


def test_it_opens_in_silence_and_lines_can_be_hidden(browser, folder):
    open_page(browser, folder)
    assert browser.get_log("browser") == []
    assert len(lines(browser)) == 7
    legend(browser, "fedavg").click()
    assert len(lines(browser)) == 6
    assert legend(browser, "fedavg").get_attribute("aria-pressed") == "false"
    legend(browser, "fedavg").click()
    assert len(lines(browser)) == 7
    assert "1 unfinished" in browser.find_element(By.TAG_NAME, "header").text
    assert "round 7 of 20" in browser.page_source
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_the_chart_draws_the_numbers_of_the_csv(browser, folder):
    open_page(browser, folder)
    with (folder / "report/curves.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "before" and row["column"] == "emnist"]
    pick(browser, "Dataset", "EMNIST")
    for axis in ("round", "samples", "bytes"):
        browser.find_element(By.CSS_SELECTOR, f"#curves-chart input[value='{axis}'] + span").click()
        for method in SEVEN:
            dots = browser.execute_script(
                "return [...document.querySelectorAll(`#curves-chart g[data-method='${arguments[0]}'] circle`)]"
                ".map((c) => ['data-x', 'data-y', 'cx', 'cy'].map((name) => +c.getAttribute(name)))",
                method,
            )
            mine = [row for row in rows if row["method"] == method]
            assert [dot[:2] for dot in dots] == [
                pytest.approx([float(row[axis]), float(row["mean"])], rel=1e-5) for row in mine
            ]
            affine(dots, 0, 2)
            affine(dots, 1, 3)


def affine(dots, value, place):
    """Where a dot stands is a straight function of what it stands for."""
    (x0, p0), (x1, p1) = ((dots[i][value], dots[i][place]) for i in (0, -1))
    for dot in dots:
        assert dot[place] == pytest.approx(p0 + (dot[value] - x0) / (x1 - x0) * (p1 - p0), abs=0.05)


@pytest.mark.slow
def test_all_none_and_the_best_five(browser, folder):
    open_page(browser, folder)
    for text, count in (("None", 0), ("Best five", 5), ("All", 7)):
        buttons = browser.find_elements(By.CSS_SELECTOR, "#curves-chart button.plain")
        next(button for button in buttons if button.text == text).click()
        assert len(lines(browser)) == count
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_every_metric_of_every_dataset_can_be_drawn(browser, folder):
    open_page(browser, folder)
    for dataset in ("CIFAR-10", "EMNIST"):
        pick(browser, "Dataset", dataset)
        select = browser.find_elements(By.CSS_SELECTOR, "#curves-chart select")[1]
        for option in select.find_elements(By.TAG_NAME, "option"):
            option.click()
            assert len(lines(browser)) == 7
            assert "NaN" not in browser.find_element(By.CSS_SELECTOR, "#curves-chart svg").get_attribute("innerHTML")
    assert len(lines(browser, "variance")) == 7
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_tables_sort_and_return_to_their_order(browser, folder):
    open_page(browser, folder)

    def order():
        return [row.get_attribute("data-method") for row in browser.find_elements(By.CSS_SELECTOR, "#main tbody tr")]

    with (folder / "report/table.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if (r["column"], r["metric"]) == ("emnist", "after")]
    best_first = [row["method"] for row in sorted(rows, key=lambda row: -float(row["mean"]))]
    head = browser.find_element(By.CSS_SELECTOR, "#main th[data-column='4']")
    for expected, sort in ((best_first, "descending"), (best_first[::-1], "ascending"), (list(SEVEN), "none")):
        head.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
        assert order() == expected
        assert head.get_attribute("aria-sort") == sort


@pytest.mark.slow
def test_the_keyboard_reaches_the_chart_and_reads_it(browser, folder):
    open_page(browser, folder)
    chart = browser.find_element(By.CSS_SELECTOR, "#curves-chart svg[tabindex]")
    note = browser.find_element(By.CSS_SELECTOR, "#curves-chart [aria-live]")
    chart.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert note.text == "At 18 rounds:"
    shown = legend(browser, "fedncv").find_element(By.CLASS_NAME, "value").text
    with (folder / "report/curves.csv").open() as file:
        (row,) = (
            r for r in csv.DictReader(file)
            if (r["column"], r["metric"], r["method"], r["round"]) == ("cifar10", "before", "fedncv", "18")
        )  # fmt: skip
    assert shown == f"{100 * float(row['mean']):.1f} %"
    chart.send_keys(Keys.ESCAPE)
    assert note.text == "At the end:"
    legend(browser, "scaffold").send_keys(Keys.SPACE)
    assert len(lines(browser)) == 6
    assert browser.switch_to.active_element.get_attribute("data-method") == "scaffold"  # focus is not lost


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 768, 1600])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_every_screen_by_day_and_night(browser, folder, width, dark):
    open_page(browser, folder, width=width, dark=dark)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    colours = browser.execute_script(
        "return [document.body, ...document.querySelectorAll('td .mean, .soft, .badge, .legend .name, td small')]"
        ".map((e) => { let b = e; while (getComputedStyle(b).backgroundColor === 'rgba(0, 0, 0, 0)') b = b.parentNode;"
        " return [getComputedStyle(e).color, getComputedStyle(b).backgroundColor]; })"
    )
    for ink, paper in {tuple(pair) for pair in colours}:
        assert contrast(ink, paper) >= 4.5, (ink, paper)  # WCAG AA
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_twenty_methods_on_eight_datasets_stay_legible(browser, tmp_path):
    from fedncv.methods import METHODS

    datasets = ("cifar10", "cifar100", "tiny_imagenet", "emnist", "mnist", "svhn", "fashion_mnist", "cinic10")
    study = made_up_study(methods=tuple(METHODS)[:20], datasets=datasets, settings=Settings(rounds=20), seeds=(0, 1))
    write(write_study(tmp_path, study))
    assert (tmp_path / "report.html").stat().st_size < 3_000_000
    for width in (390, 1280):
        open_page(browser, tmp_path, width=width)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert len(lines(browser)) == 13  # FedNCV and the best others
        next(b for b in browser.find_elements(By.CSS_SELECTOR, "#curves-chart button.plain") if b.text == "All").click()
        assert len(lines(browser)) == 20
        looks = browser.execute_script(
            "return [...document.querySelectorAll('#curves-chart .legend line')]"
            ".map((l) => l.getAttribute('stroke') + l.getAttribute('stroke-dasharray'))"
        )
        assert len(set(looks)) == 20  # colour and dash together tell them apart
        clipped = browser.execute_script(
            "return [...document.querySelectorAll('#main td')].filter((c) => c.scrollWidth > c.clientWidth + 1).length"
        )
        assert clipped == 0
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_an_ablation_stays_legible(browser, tmp_path):
    from fedncv.studies import ablation

    methods = ablation().methods
    write_study(tmp_path, made_up_study(methods=methods, seeds=(0, 1)), level=lambda _, m: 0.3 + len(m) / 200)
    for path in tmp_path.glob("*/*/metrics.jsonl"):  # probed at the end
        *rows, last = path.read_text().splitlines()
        last = json.loads(last) | {"variance_between": 0.0123, "variance_within": 0.0123}
        path.write_text("\n".join([*rows, json.dumps(last)]) + "\n")
    write(tmp_path)
    for width in (390, 1280):
        open_page(browser, tmp_path, width=width)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.find_element(By.CSS_SELECTOR, "#curves-chart g.ours").get_attribute("data-method") == "fedncv"
        tracks = browser.execute_script("return [...document.querySelectorAll('.track')].map((t) => t.clientWidth)")
        assert min(tracks) > 100  # long names leave room for the bars
    table = browser.find_element(By.CSS_SELECTOR, "#gain table")
    assert len(table.find_elements(By.CSS_SELECTOR, "tbody tr")) == len(methods)
    assert browser.execute_script("return arguments[0].offsetWidth <= arguments[0].parentNode.clientWidth", table)
    assert browser.get_log("browser") == []
