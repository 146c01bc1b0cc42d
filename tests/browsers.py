"""A real browser for tests: Chromium without a window, and the contrast of two of its colours."""

import contextlib
import shutil

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MARKS = [
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="no Chromium with its driver here: `make browser` installs it"
    ),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of the driver's sockets
]
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1280,900"
)


@contextlib.contextmanager
def chromium(profile):
    """A browser whose console can be read, with its profile in this folder."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS.split(), f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def contrast(a, b):
    """The contrast of two colours as WCAG defines it, from 1 to 21."""

    def luminance(text):
        channels = [float(x) / 255 for x in text[text.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dim, bright = sorted((luminance(a), luminance(b)))
    return (bright + 0.05) / (dim + 0.05)
