"""The site as `make docs` builds it, with the gallery and the notebooks executed, in a real browser."""

import fcntl
import functools
import http.server
import importlib
import os
import runpy
import shutil
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest
from browsers import MARKS, chromium, contrast

ROOT = Path(__file__).parents[1]
CHECK = runpy.run_path(str(ROOT / "tools" / "check_site.py"))
SEEN = (
    "index", "quickstart", "install", "methods/README", "methods/fedncv", "methods/switches/drift",
    "auto_examples/index", "auto_examples/compare_methods", "theory", "api/fedncv", "notebooks/first_federation",
    "notebooks/variance", "results/README", "tutorials/own_data", "federation", "glossary",
)  # fmt: skip

pytestmark = pytest.mark.slow


def in_a_browser(test):
    """Mark a test as one that needs Chromium."""
    return functools.reduce(lambda marked, mark: mark(marked), MARKS, test)


def build(folder):
    pytest.importorskip("sphinx_gallery", reason="the site needs the extra docs")
    shutil.rmtree(ROOT / "docs" / "auto_examples", ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", f"{folder}/doctrees", "docs",
         f"{folder}/site"],
        cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"FEDNCV_CACHE": f"{folder}/cache"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; with several workers the first builds it and the others wait."""
    number = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if number is None:
        return build(tmp_path_factory.mktemp("site"))
    folder = tmp_path_factory.getbasetemp().parent / f"site-{number}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "site" / "searchindex.js").exists():
            build(folder)
    return folder / "site"


@pytest.fixture(scope="module")
def address(site):
    """The site on a server of this machine."""
    handler = type("Silent", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def open_page(browser, url, *, width=1400, dark=False):
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(url)
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def wait_for(browser, script):
    """Return the value of a script as soon as it is true."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 30).until(lambda driver: driver.execute_script(script))


def test_every_link_of_the_built_site_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    assert list(CHECK["problems"](site)) == []


def test_the_reference_has_every_public_name(site):
    *_, packed = (site / "objects.inv").read_bytes().split(b"\n", maxsplit=4)  # after four lines of text
    entries = [line.split(" ") for line in zlib.decompress(packed).decode().splitlines()]
    known = {name for name, kind, *_ in entries if kind.startswith("py:")}
    for path in (ROOT / "docs" / "api").glob("[!R]*.md"):
        module = path.read_text(encoding="utf-8").partition(":")[0].removeprefix("# ")
        found = importlib.import_module(module)
        for name in getattr(found, "__all__", None) or public(found):
            assert f"{module}.{name}" in known, f"{module}.{name}"


def public(module):
    """The functions and classes that a module without __all__ defines."""
    return [
        name for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__ and callable(value)
        and hasattr(value, "__qualname__")
    ]  # fmt: skip


def test_every_example_of_the_gallery_has_its_figure(site):
    for path in (ROOT / "examples" / "gallery").glob("*.py"):
        assert list((site / "_images").glob(f"sphx_glr_{path.stem}_001*.png")), path.name
        assert path.stem in (site / "auto_examples" / "index.html").read_text(encoding="utf-8")


def test_notebooks_show_what_their_cells_print(site):
    for path in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        page = (site / "notebooks" / f"{path.stem}.html").read_text(encoding="utf-8")
        assert "cell_output" in page
        assert "Traceback" not in page


@in_a_browser
@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1400, False), (1400, True)])
def test_pages_fit_every_screen_by_day_and_night_and_load_nothing_from_elsewhere(browser, address, width, dark):
    for page in SEEN:
        open_page(browser, f"{address}/{page}.html", width=width, dark=dark)
        assert browser.execute_script("return document.documentElement.dataset.theme") == ("dark" if dark else "light")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width, page
        broken = "return [...document.images].filter((i) => i.complete && !i.naturalWidth).map((i) => i.src)"
        assert browser.execute_script(broken) == [], page
        loaded = browser.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)")
        assert len(loaded) > 3
        assert [each for each in loaded if not each.startswith((address, "data:"))] == [], page
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == [], page


@in_a_browser
@pytest.mark.parametrize("dark", [False, True])
def test_code_can_be_read_by_day_and_night(browser, address, dark):
    for page in ("auto_examples/compare_methods", "notebooks/variance", "tutorials/own_data", "api/fedncv"):
        open_page(browser, f"{address}/{page}.html", dark=dark)
        colours = browser.execute_script(
            "return [...document.querySelectorAll('.highlight pre, .highlight pre span')].map((e) => { let b = e;"
            " while (getComputedStyle(b).backgroundColor === 'rgba(0, 0, 0, 0)') b = b.parentNode;"
            " return [getComputedStyle(e).color, getComputedStyle(b).backgroundColor]; })"
        )
        assert len(colours) > 20
        for ink, paper in {tuple(pair) for pair in colours}:
            assert contrast(ink, paper) >= 4.5, (page, ink, paper)  # WCAG AA


@in_a_browser
def test_the_search_finds_pages_and_names_without_a_network(browser, address):
    for words, page in (("scaffold", "methods/scaffold.html"), ("simulate_many", "api/fedncv.html")):
        open_page(browser, f"{address}/search.html?q={words}")
        wait_for(browser, found(page))


def found(page):
    """The script that tells whether a page is among the results of a search."""
    return f"return document.querySelector('#search-results a[href*=\"{page}\"]') !== null"


@in_a_browser
def test_a_folder_on_a_disk_can_be_searched_without_a_server(browser, site):
    open_page(browser, f"{site.as_uri()}/search.html?q=scaffold")
    wait_for(browser, found("methods/scaffold.html"))


@in_a_browser
def test_formulas_are_drawn(browser, address):
    open_page(browser, f"{address}/theory.html")
    formulas = "[...document.querySelectorAll('math')]"
    heights = browser.execute_script(f"return {formulas}.map((m) => m.getBoundingClientRect().height)")
    assert len(heights) > 250
    assert min(heights) > 5
    assert "\\" not in browser.execute_script(f"return {formulas}.map((m) => m.textContent).join(' ')")


@in_a_browser
def test_the_start_page_has_three_doors_that_open(browser, address):
    open_page(browser, f"{address}/index.html")
    doors = browser.execute_script(
        "return [...document.querySelectorAll('ul.doors:not(.small) > li')].map((l) => [l.getBoundingClientRect().top,"
        " [...l.querySelectorAll('a:not(.headerlink)')].map((a) => a.href)])"
    )
    assert len(doors) == 3
    assert len({top for top, _ in doors}) == 1  # side by side
    for link in [link for _, links in doors for link in links]:
        open_page(browser, link)
        assert browser.execute_script("return document.querySelector('h1').textContent").strip("#\n ")
    open_page(browser, f"{address}/index.html", width=390)
    each = "[...document.querySelectorAll('ul.doors > li')]"
    tops = browser.execute_script(f"return {each}.map((l) => l.getBoundingClientRect().top)")
    assert len(set(tops)) == len(tops)  # one below the other


@in_a_browser
def test_the_theme_can_be_switched(browser, address):
    open_page(browser, f"{address}/index.html")
    for mode in ("dark", "light"):
        press(browser, ".theme-switch-button")
        press(browser, f".theme-change-button[data-mode={mode}]")
        wait_for(browser, f"return document.documentElement.dataset.theme === '{mode}'")


def press(browser, selector):
    """Press the button that is shown; there is another one for narrow screens."""
    visible = f"[...document.querySelectorAll('{selector}')].find((e) => e.checkVisibility())"
    wait_for(browser, f"return {visible}").click()
