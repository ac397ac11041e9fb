"""What the site makes of ``docs``: navigation by folder, pages from outside, links that work."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
"""Files of the repository that have a page on the site."""

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.M | re.S)
DIAGRAM = re.compile(r'<img alt="([^"]*)" src="([^"]*/)?diagrams/([\w-]+\.svg)" ?/>')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages of a folder where the navigation names the folder."""
    config.nav = _expanded(config.nav, Path(config.docs_dir))
    return config


def _expanded(nav: Any, docs: Path) -> Any:
    if isinstance(nav, list):
        entries = (_expanded(entry, docs) for entry in nav)
        return [entry for entry in entries if entry not in ([], {})]
    if isinstance(nav, dict):
        inner = {title: _expanded(value, docs) for title, value in nav.items()}
        return {title: value for title, value in inner.items() if value != []}
    if not nav.endswith("/"):
        return nav
    folder = docs / nav
    found = [path.relative_to(docs) for path in folder.rglob("*.md") if path.name != "notes.md"]
    found += [path.relative_to(docs).with_suffix(".md") for path in folder.glob("*.ipynb")]
    index = next((folder / n for n in ("README.md", "index.md") if (folder / n).exists()), None)
    order = index.read_text("utf-8") if index else ""

    def place(path: Path) -> tuple[int, str]:
        """The folder's own page, then pages as it names them, then all others."""
        name = path.relative_to(Path(nav)).as_posix()
        named = order.find(f"]({name.removesuffix('.md')}")
        own = name in ("README.md", "index.md")
        return (-1 if own else named if named >= 0 else len(order), name)

    return [_entry(path, docs) for path in sorted(found, key=place)]


def _entry(path: Path, docs: Path) -> Any:
    """A page by its heading, which in generated pages is not the first line."""
    text = (docs / path).read_text("utf-8") if (docs / path).exists() else ""  # or a notebook
    heading = re.search(r"^# (.+)$", text, re.M)
    return {heading[1]: path.as_posix()} if heading else path.as_posix()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds stylesheet and script, and the repository's pages that are not in ``docs``."""
    for name in ("site.css", "iframe-worker.js"):
        files.append(File(name, str(ROOT / "website"), config.site_dir, False))
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    text = re.sub(r"\]\(docs/", "](", text)
    files.append(File.generated(config, OUTSIDE["CONTRIBUTING.md"], content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to files outside of ``docs`` lead to their page, or become plain text."""
    folder = posixpath.dirname(page.file.src_uri)
    fences = [m.span() for m in FENCE.finditer(markdown)]

    def link(match: re.Match[str]) -> str:
        target, _, anchor = match[3].partition("#")
        path = posixpath.normpath(posixpath.join(folder, target))
        if not path.startswith("../") or any(a < match.start() < b for a, b in fences):
            return match[0]
        inside = OUTSIDE.get(path.removeprefix("../"))
        if inside is None:
            return match[2]
        place = posixpath.relpath(inside, folder or ".") + (f"#{anchor}" if anchor else "")
        return f"[{match[2]}]({place})"

    return LINK.sub(link, markdown)


def on_page_content(html: str, config: MkDocsConfig, **_: Any) -> str:
    """Diagrams become part of their page, so that they follow its colours."""

    def inline(match: re.Match[str]) -> str:
        text = Path(config.docs_dir, "diagrams", match[3]).read_text("utf-8")
        text = text.replace("<svg", f'<svg role="img" aria-label="{match[1]}"', 1)
        return f'<div class="diagram-frame">{text}</div>'

    return DIAGRAM.sub(inline, html)
