"""The live page in a real browser: values appear without a reload, and nothing that is written in a folder runs."""

import contextlib
import json
import shutil
import threading

import pytest
from browsers import MARKS, chromium, contrast
from hostile_runs import hostile_folder, hostile_study
from made_up_runs import made_up_study, write_run, write_study
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from fedncv.config import RunConfig
from fedncv.watch import live
from fedncv.watch.live import LivePage
from fedncv.watch.server import open_server

pytestmark = MARKS
CONFIG = RunConfig(clients=20, per_round=5, rounds=20, eval_every=2)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@contextlib.contextmanager
def watching(browser, folder, *, width=1280, dark=False, port=0, stay=False):
    """A server in a thread, and its page in the browser."""
    with open_server(LivePage(folder), "127.0.0.1", port) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            if not port:
                scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
                still = {"name": "prefers-reduced-motion", "value": "reduce"}  # or scrolling is under way when we press
                browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, still]})
                size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
                browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
                browser.get(found.url)
                browser.execute_script("window.loadedOnce = true")
            browser.get_log("browser")
            yield found
        finally:
            if not stay:
                browser.get("about:blank")  # which asks nothing of a server that has ended
            found.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    for name in ("LOOK_SECONDS", "LEAST_SECONDS", "SHARE"):
        monkeypatch.setattr(live, name, 0.0)


def text(browser, selector):
    return browser.find_element(By.CSS_SELECTOR, selector).text


def wait(browser, until):
    WebDriverWait(browser, 30, poll_frequency=0.05).until(lambda _: until())
    assert browser.execute_script("return window.loadedOnce") is True  # it is the page that was loaded first


def ends(browser, method="fedavg"):
    """The last points of the unfinished runs of a method."""
    return [
        tuple(point)
        for point in browser.execute_script(
            "return [...document.querySelectorAll(`#curves-chart g[data-method='${arguments[0]}'] circle.open`)]"
            ".map((c) => [+c.getAttribute('data-x'), +c.getAttribute('data-y')])",
            method,
        )
    ]


def append(folder, *rows, end="\n"):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n".join(json.dumps(row) for row in rows) + end)


def test_values_appear_without_a_reload(browser, tmp_path):
    write_run(tmp_path, CONFIG, 0.5, until=6)
    with watching(browser, tmp_path):
        wait(browser, lambda: "6 of 20" in text(browser, "#now tr[data-run] td:nth-of-type(1)"))
        ((at, _),) = ends(browser)
        assert at == 6
        append(tmp_path, {"round": 7}, {"round": 8, "before": 0.875, "samples": 4000})
        wait(browser, lambda: ends(browser) == [(8.0, 0.875)])
        assert "8 of 20" in text(browser, "#now tr[data-run]")
        assert browser.title.startswith("40 % · ")
        append(tmp_path, {"round": 9, "before": 0.9}, end="")  # half a row, and then the rest
        write_run(tmp_path, CONFIG, 0.5)
        wait(browser, lambda: "1 of 1 run finished" in text(browser, "#now .headline"))
        wait(browser, lambda: not ends(browser) and "100 %" in browser.title)
        assert browser.find_elements(By.CSS_SELECTOR, "#main .mean")
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_what_a_reader_has_chosen_survives_the_changes(browser, tmp_path):
    study = made_up_study(methods=("fedavg", "scaffold", "fedncv"), datasets=("cifar10", "emnist"))
    write_study(tmp_path, study, skip=("emnist/fedavg-seed2",))
    config = next(cell.config for cell in study.cells() if str(cell.folder) == "emnist/fedavg-seed2")
    write_run(tmp_path / "emnist/fedavg-seed2", config, 0.5, until=5)
    with watching(browser, tmp_path):
        wait(browser, lambda: "5 of 20" in text(browser, "#now"))
        browser.find_element(By.CSS_SELECTOR, "#curves-chart .legend button[data-method='scaffold']").click()
        browser.find_elements(By.CSS_SELECTOR, "#curves-chart select")[0].find_elements(By.TAG_NAME, "option")[
            1
        ].click()
        browser.find_element(By.CSS_SELECTOR, "#main th[data-column='1'] button").click()
        browser.find_element(By.CSS_SELECTOR, "#table details summary").click()

        def order():
            rows = browser.find_elements(By.CSS_SELECTOR, "#main tbody tr")
            return [row.get_attribute("data-method") for row in rows]

        assert order() == ["fedncv", "scaffold", "fedavg"]
        append(tmp_path / "emnist/fedavg-seed2", {"round": 6, "before": 0.25})
        wait(browser, lambda: ends(browser) == [(6.0, 0.25)])
        write_run(tmp_path / "emnist/fedavg-seed2", config, 0.5)
        wait(browser, lambda: "18 of 18 runs finished" in text(browser, "#now .headline"))
        wait(browser, lambda: not ends(browser))
        assert order() == ["fedncv", "scaffold", "fedavg"]
        assert browser.execute_script("return document.querySelector('#table details').open")
        lines = browser.find_elements(By.CSS_SELECTOR, "#curves-chart g[data-method]")
        assert {line.get_attribute("data-method") for line in lines} == {"fedavg", "fedncv"}
        assert "EMNIST" in browser.find_element(By.CSS_SELECTOR, "#curves-chart svg[tabindex]").get_attribute(
            "aria-label"
        )
        browser.find_element(By.CSS_SELECTOR, "#main th[data-column='1'] button").click()
        assert order() == ["fedavg", "scaffold", "fedncv"]  # the table still sorts
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_runs_that_are_deleted_and_folders_that_hold_no_study_are_said(browser, tmp_path):
    with watching(browser, tmp_path):
        assert "holds no run yet" in text(browser, "#now")
        write_run(tmp_path / "a", CONFIG, 0.5, until=6)
        write_run(tmp_path / "b", RunConfig(clients=20, per_round=5, rounds=20, eval_every=2, seed=1), 0.5)
        wait(browser, lambda: "1 of 2 runs finished" in text(browser, "#now") and len(ends(browser)) == 1)
        shutil.rmtree(tmp_path / "a")
        wait(browser, lambda: "Deleted while this page was watching: a." in text(browser, "#now"))
        assert "1 of 1 run finished" in text(browser, "#now .headline")
        wait(browser, lambda: not ends(browser))
        tmp_path.rename(tmp_path.with_name("moved"))
        wait(browser, lambda: "any more" in text(browser, "#now"))
        tmp_path.with_name("moved").rename(tmp_path)
        wait(browser, lambda: "1 of 1 run finished" in text(browser, "#now"))
        (tmp_path / "b/metrics.jsonl").write_text('{"round": 0}\nnot a row\n')
        wait(browser, lambda: "line 2, is not a row of metrics" in text(browser, "#now"))
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_a_server_that_ends_is_said_and_one_that_comes_back_is_followed(browser, tmp_path):
    write_run(tmp_path, CONFIG, 0.5, until=6)
    with watching(browser, tmp_path, stay=True) as here:
        port = here.port
        wait(browser, lambda: "6 of 20" in text(browser, "#now"))
    wait(browser, lambda: "No answer from fedncv watch" in text(browser, ".lost"))
    assert "6 of 20" in text(browser, "#now")
    append(tmp_path, {"round": 7})
    with watching(browser, tmp_path, port=port):
        wait(browser, lambda: "7 of 20" in text(browser, "#now"))
        assert not browser.find_element(By.CSS_SELECTOR, ".lost").is_displayed()
    browser.get_log("browser")  # refused connections


@pytest.mark.slow
@pytest.mark.parametrize("make", [hostile_folder, hostile_study])
def test_hostile_texts_are_shown_and_not_run(browser, tmp_path, make):
    root = make(tmp_path)
    with watching(browser, root):
        assert "<script>alert(1)</script>" in text(browser, "body")
        append(
            next(root.glob("*/*")).parent if make is hostile_folder else next(root.glob("*/*/*/metrics.jsonl")).parent,
            {"round": 0},
        )
        browser.execute_async_script("setTimeout(arguments[0], 2500)")  # two more questions at least
        alerts = browser.execute_script("return [...document.querySelectorAll('img[src=x], [onerror]')].length")
        assert alerts == 0
        assert len(browser.find_elements(By.TAG_NAME, "script")) == 2
        blocked = browser.execute_async_script(  # and were one not escaped, the policy would not let it run
            "window.ran = false; document.querySelector('main').insertAdjacentHTML('beforeend', "
            "'<img src=x onerror=\"window.ran = true\">'); setTimeout(() => arguments[0](window.ran), 500)"
        )
        assert blocked is False
    browser.get_log("browser")  # the policy reports what it blocked


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_every_screen_by_day_and_night(browser, tmp_path, width, dark):
    methods = ("fedavg", "fedprox", "scaffold", "fedrep", "fedper", "pfedsim", "fedncv")
    study = made_up_study(methods=methods, datasets=("cifar10", "emnist"), seeds=tuple(range(20)))
    write_study(tmp_path, study, skip=[str(c.folder) for c in study.cells() if "emnist/fedp" in str(c.folder)])
    for cell in study.cells():
        if "emnist/fedprox" in str(cell.folder):
            write_run(tmp_path / cell.folder, cell.config, 0.5, until=5)
    append(tmp_path / "cifar10/fedavg-seed3", {"round": 20, "failed": "x" * 500})
    with watching(browser, tmp_path, width=width, dark=dark):
        wait(browser, lambda: "280 runs" in text(browser, "#now"))
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        colours = browser.execute_script(
            "return [...document.querySelectorAll('#now *')].filter((e) => e.childElementCount === 0 && e.textContent)"
            ".map((e) => { let b = e; while (getComputedStyle(b).backgroundColor === 'rgba(0, 0, 0, 0)') "
            "b = b.parentNode; return [getComputedStyle(e).color, getComputedStyle(b).backgroundColor]; })"
        )
        for ink, paper in {tuple(pair) for pair in colours}:
            assert contrast(ink, paper) >= 4.5, (ink, paper)  # WCAG AA
    assert browser.get_log("browser") == []
