"""Every link in the documentation leads to a file and a heading that exist, and every path in backticks exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:bench|docs|examples|src|tests|tools)/[^`\s]*)`")


def anchors(page):
    """Of its headings, as GitHub makes them: lower case, blanks to dashes, all other marks gone."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = [line.lstrip("# ") for line in text.splitlines() if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_paths_in_backticks_exist(page):
    for path in NAMED.findall(page.read_text()):
        if "yours" not in path:  # CONTRIBUTING.md names the files of a method that the reader will write
            assert (ROOT / path).exists(), path
