"""Sphinx extension: a check of the built site, after every build; what it finds is a warning, which ends `make docs`.

Every page has one title, and no two pages the same; none loads anything from another host, as a page that is read
without a network would lack it; and no formula is left in TeX.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
#: What a browser fetches by itself; a link is followed by its reader.
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}
OUTSIDE = re.compile(r"(https?:)?//", re.IGNORECASE)
IMPORTED = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)
TEX = re.compile(r"\\\(|\\\[")


class Page(HTMLParser):
    """What one page says of itself: titles, headings, what it loads, and text outside code."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.titles: list[str] = []
        self.headings: list[str] = []
        self.loaded: list[str] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag begins or loads."""
        if tag in ("title", "h1") and "svg" not in self._open:  # pictures have titles of their own
            (self.titles if tag == "title" else self.headings).append("")
        if tag in ("title", "h1", "svg", "code", "pre", "script", "style"):
            self._open.append(tag)
        given = dict(attrs)
        address = given.get(LOADS.get(tag, "")) or ""
        if OUTSIDE.match(address) and given.get("rel") != "canonical":
            self.loaded.append(address)

    def handle_endtag(self, tag: str) -> None:
        """Leave the innermost element of this name."""
        if tag in self._open:
            del self._open[len(self._open) - 1 - self._open[::-1].index(tag)]

    def handle_data(self, data: str) -> None:
        """Keep text where it belongs."""
        inside = self._open[-1] if self._open else ""
        if "svg" in self._open or inside in ("script", "style"):
            return
        if inside in ("title", "h1"):
            (self.titles if inside == "title" else self.headings)[-1] += data
        if inside not in ("code", "pre"):
            self.text.append(data)


def problems(folder: Path) -> list[str]:
    """Return what is wrong with the built pages and styles below a folder, one line each."""
    found, seen = [], dict[str, str]()
    for path in sorted(folder.rglob("*.html")):
        name, page = path.relative_to(folder).as_posix(), Page(path.read_text(encoding="utf-8"))
        if [bool(title.strip()) for title in page.titles] != [True]:
            found.append(f"{name}: has no title, or several: {page.titles}")
        elif (other := seen.setdefault(page.titles[0], name)) != name:
            found.append(f"{name}: has the title of {other}, {page.titles[0]!r}")
        if [bool(heading.strip()) for heading in page.headings] != [True]:
            found.append(f"{name}: has no first heading, or several: {page.headings}")
        found += [f"{name}: loads {address} from another host" for address in page.loaded]
        if TEX.search("".join(page.text)):
            found.append(f"{name}: shows a formula in TeX")
    for path in sorted(folder.rglob("*.css")):
        addresses = IMPORTED.findall(path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(folder)}: loads {address} from another host" for address in addresses]
    return found


def check(app: Sphinx, error: Exception | None) -> None:
    """Warn of each problem after a complete build of pages."""
    if error is None and app.builder.name == "html":
        for line in problems(Path(app.outdir)):
            LOGGER.warning("built site: %s", line)


def setup(app: Sphinx) -> dict[str, Any]:
    """Check after every build."""
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
