"""Checks the built site: every link leads somewhere, and nothing is loaded from elsewhere."""

from __future__ import annotations

import logging
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mkdocs.config.defaults import MkDocsConfig

log = logging.getLogger("mkdocs.hooks.links")


def on_post_build(config: MkDocsConfig) -> None:
    """Warns of each link that is broken; with ``--strict`` the build fails."""
    for each in broken(Path(config.site_dir)):
        log.warning(each)


class Links(HTMLParser):
    """What a page refers to, and which places it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: list[tuple[str, str]] = []
        self.places: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collects the links and places of one element."""
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        self.targets += [(tag, given[name]) for name in ("href", "src") if name in given]


def broken(folder: Path) -> list[str]:
    """Links to files or places that do not exist, and what pages load from other machines."""
    folder = folder.resolve()
    pages = {path: Links(path) for path in folder.rglob("*.html")}
    wrong = []
    for path, page in pages.items():
        for tag, target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if tag != "a":
                    wrong.append(f"{path.relative_to(folder)} loads {target}")
                continue
            start = folder if parts.path.startswith("/") else path.parent
            file = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            place = unquote(parts.fragment)
            lacking = place and (file not in pages or place not in pages[file].places)
            if not file.is_file() or lacking:
                wrong.append(f"{path.relative_to(folder)} has a broken link: {target}")
    return wrong
