"""What the pages that the package writes share: colours, style sheet, tables, numbers.

A page is one file that needs no network. Text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from html import escape
from pathlib import Path

from upgd.pages.colours import DARK, EDGE, INK, LIGHT, RULE, SOFT, css

MARK = '<meta name="generator" content="upgd">'  # a page with it may be overwritten
WHITE = f"""--ink: {INK}; --soft: {SOFT}; --paper: #ffffff; --rule: {RULE}; --edge: {EDGE};
  --hover: #eef1f5; --link: #0b57a4; {css(LIGHT)}"""
BLACK = f"""--ink: #e6e8eb; --soft: #a2a9b2; --paper: #16181b; --rule: #363b42; --edge: #868d96;
  --hover: #24282e; --link: #8ec5ff; {css(DARK)}"""
PAPERS = f"""
:root {{ color-scheme: light; {WHITE} }}
@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ color-scheme: dark;
  {BLACK} }} }}
:root[data-theme="dark"] {{ color-scheme: dark; {BLACK} }}
"""


def style_sheet() -> str:
    """The style of all pages, on white paper and on black."""
    return PAPERS + (Path(__file__).parent / "page.css").read_text("utf-8")


def document(title: str, body: str, allowed: str = "", style: str = "") -> str:
    """An HTML page that loads nothing.

    Args:
        title: Its name.
        body: What it shows.
        allowed: Directives of the content security policy, besides inline styles; each ends with
            a semicolon.
        style: Added to :func:`style_sheet`.
    """
    policy = f"default-src 'none'; {allowed}style-src 'unsafe-inline'; base-uri 'none'; "
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{MARK}
<meta http-equiv="Content-Security-Policy" content="{policy}form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{style_sheet()}{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def as_table(
    caption: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    kind: str = "",
    long: Collection[int] = (),
) -> str:
    """A table that scrolls where it is too wide; a row's first cell is its header."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = []
    for row in rows:
        kinds = [' class="long"' if n in long else "" for n in range(len(row))]
        cells = [f"<td{k}>{escape(x)}</td>" for k, x in zip(kinds[1:], row[1:], strict=True)]
        body.append(f'<tr><th scope="row"{kinds[0]}>{escape(row[0])}</th>{"".join(cells)}</tr>')
    label = escape(caption.split(":")[0])
    return f"""<div class="scroll" tabindex="0" role="region" aria-label="{label}">
<table class="{kind}"><caption>{escape(caption)}</caption>
<thead><tr>{head}</tr></thead>
<tbody>
{join(body)}
</tbody></table></div>"""


def details(summary: str, body: str) -> str:
    """A part that can be closed; both are HTML."""
    return f"<details><summary>{summary}</summary>{body}</details>"


def join(parts: Iterable[str]) -> str:
    """Parts of a page, a line each."""
    return "\n".join(parts)


def grouped(number: int) -> str:
    """A number with its digits in groups of three."""
    return f"{number:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def alike(*values: float) -> list[str]:
    """Numbers with four decimals, fewer for large ones, an exponent for tiny ones."""
    size = max((abs(value) for value in values if math.isfinite(value)), default=0)
    if size == 0 or 1e-3 <= size < 1e6:
        form = ".4f" if size < 10 else ".3f" if size < 100 else ".1f" if size < 1000 else ".0f"
    else:
        form = ".4g"
    finite = (f"{x:{form}}".replace("-", "−", int(x < 0)) for x in values)
    return [text if math.isfinite(x) else "–" for x, text in zip(values, finite, strict=True)]
