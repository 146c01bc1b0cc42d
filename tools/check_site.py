"""Check a built site offline: every link inside it leads somewhere, nothing is loaded from elsewhere, no page is lost.

    python tools/check_site.py build/docs

It prints what is wrong, one line each, and the size of the site. `make docs` runs it.
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "embed": "src", "object": "data"}
LOADED |= {"audio": "src", "video": "src", "input": "src", "track": "src"}
NOT_LOADED = {"canonical", "next", "prev", "author", "license", "alternate", "help", "search", "index"}
IN_STYLE = re.compile(r"(?:@import\s*(?:url\()?|url\()\s*[\"']?([^\"')\s;]+)")
FOUND_BY_SEARCH = re.compile(r"(search|genindex|py-modindex)\.html|_modules/.*")


class Page(NamedTuple):
    links: list[str]  # what a reader can follow
    loads: list[str]  # what the browser fetches by itself
    ids: set[str]


class Reader(HTMLParser):
    """Collects the links, the loaded files and the anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.page = Page([], [], set())
        self._style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.page.ids.update(given[name] for name in ("id", "name") if given.get(name))
        self._style = tag == "style"
        if tag in ("a", "area") and "href" in given:
            self.page.links.append(given["href"])
        elif tag == "link" and not set(given.get("rel", "").split()) & NOT_LOADED:
            self.page.loads.append(given.get("href", ""))
        elif tag in LOADED and given.get(LOADED[tag]):
            self.page.loads.append(given[LOADED[tag]])
        self.page.loads.extend(part.split()[0] for part in given.get("srcset", "").split(",") if part.strip())
        self.page.loads.extend(IN_STYLE.findall(given.get("style", "")))

    def handle_data(self, data: str) -> None:
        if self._style:
            self.page.loads.extend(IN_STYLE.findall(data))

    def handle_endtag(self, tag: str) -> None:
        self._style = self._style and tag != "style"


def read(text: str) -> Page:
    """Return what a page links to, loads and offers as anchors.

    >>> read('<a href="b.html#x">b</a><img src="https://example.org/p.png"><h1 id="top">')
    Page(links=['b.html#x'], loads=['https://example.org/p.png'], ids={'top'})
    """
    reader = Reader()
    reader.feed(text)
    return reader.page


def problems(site: Path) -> Iterator[str]:
    """Yield what is wrong with the site."""
    paths = [path for path in site.rglob("*.html") if path.parent != site / "_static"]  # there the theme has a template
    pages = {path.relative_to(site).as_posix(): read(path.read_text(encoding="utf-8")) for path in paths}
    if "index.html" not in pages:
        yield f"{site} has no index.html; build it with `make docs`"
        return
    for name, page in sorted(pages.items()):
        for load in page.loads:
            yield from _loaded(site, name, load)
        for link in page.links:
            if not _elsewhere(link):
                yield from _linked(site, pages, name, link)
    for path in sorted(site.rglob("*.css")):
        for load in IN_STYLE.findall(path.read_text(encoding="utf-8")):
            yield from _loaded(site, path.relative_to(site).as_posix(), load)
    lost = sorted(name for name in set(pages) - _reached(pages) if not FOUND_BY_SEARCH.fullmatch(name))
    yield from (f"{name}: no link leads to it from index.html" for name in lost)


def _elsewhere(link: str) -> bool:
    return bool(urlsplit(link).scheme) or link.startswith("//")


def _target(name: str, link: str) -> tuple[str, str]:
    """Return the file of the site and the anchor that a link on page ``name`` leads to."""
    path, anchor = urldefrag(urljoin(f"https://site/{name}", link))
    path = unquote(urlsplit(path).path).removeprefix("/")
    return (f"{path}index.html" if path.endswith("/") or not path else path), unquote(anchor)


def _loaded(site: Path, name: str, load: str) -> Iterator[str]:
    if load.startswith(("data:", "#")) or not load:
        return
    if _elsewhere(load):
        yield f"{name}: loads {load}, which is not part of the site"
    elif not (site / _target(name, load)[0]).is_file():
        yield f"{name}: loads {load}, which does not exist"


def _linked(site: Path, pages: dict[str, Page], name: str, link: str) -> Iterator[str]:
    path, anchor = _target(name, link)
    if not (site / path).is_file():
        yield f"{name}: links to {link}, which does not exist"
    elif anchor and path in pages and anchor not in pages[path].ids:
        yield f"{name}: links to {link}, but {path} has no such anchor"


def _reached(pages: dict[str, Page]) -> set[str]:
    """Return the pages that a reader reaches from the first one."""
    found, waiting = {"index.html"}, ["index.html"]
    while waiting:
        name = waiting.pop()
        near = {_target(name, link)[0] for link in pages[name].links if not _elsewhere(link)} & set(pages)
        waiting += near - found
        found |= near
    return found


def size(site: Path) -> str:
    """Return the number of pages and the size of the site in words."""
    files = [path for path in site.rglob("*") if path.is_file()]
    pages = [path for path in files if path.suffix == ".html"]
    largest = max(pages, key=lambda path: path.stat().st_size)
    return (
        f"{len(pages)} pages, {len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB; "
        f"largest page {largest.relative_to(site)}, {largest.stat().st_size / 1e3:.0f} kB"
    )


def main(arguments: list[str]) -> int:
    (site,) = map(Path, arguments)
    found = list(problems(site))
    print("\n".join(found) if found else size(site))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
