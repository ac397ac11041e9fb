"""A page that tells what a study showed: one file, no network, no scripts, light or dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from upgd.report.colours import DARK, LIGHT, css

PAPERS = f"""
:root {{ color-scheme: light dark; --ink: #1c1e21; --soft: #5a6068; --paper: #fff; --rule: #d9dce1;
  {css(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e8eb; --soft: #a2a9b2; --paper: #16181b;
  --rule: #363b42; {css(DARK)} }} }}
"""
MARK = '<meta name="generator" content="upgd">'
"""Stands near the beginning of every page."""
STYLE = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.55;
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 46rem; margin: 0 auto; padding: 2rem 1rem 3rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .5rem 0; }
.result { font-size: 1.1rem; border-left: .25rem solid var(--c0); padding-left: .9rem;
  margin: 1rem 0; }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
figure { margin: 1.25rem 0; }
svg { width: 100%; height: auto; display: block; overflow: visible; }
svg text { fill: var(--ink); font-size: 13px; }
svg .tick { fill: var(--soft); font-size: 12px; }
svg .grid { stroke: var(--rule); }
svg .line { stroke-width: 2.25; stroke-linejoin: round; }
svg .band { opacity: .18; }
svg .name { font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: right; padding: .4rem .6rem; border-bottom: 1px solid var(--rule);
  white-space: nowrap; font-variant-numeric: tabular-nums; }
th { font-weight: 600; vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; padding-left: 0; font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1rem; margin: .5rem 0;
  font-size: .92rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
code { font: .92em ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace; }
@media (max-width: 34rem) { table { font-size: .85rem; } th, td { padding: .35rem .3rem; }
  main { padding-top: 1.25rem; } h1 { font-size: 1.35rem; }
  svg text { font-size: 17px; } svg .tick { font-size: 15px; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; } }
"""


@dataclass(frozen=True)
class Page:
    """What is on a page; every text is plain and is escaped when the page is made.

    Attributes:
        title: The heading.
        result: What came out, in a sentence.
        about: Paragraphs before the figure.
        chart: The figure as SVG, the only part that is taken as it is.
        caption: Below the figure.
        header: The table's columns.
        rows: The table's rows; a row's first cell names a line of the chart.
        notes: Paragraphs below the table.
        facts: Where the numbers come from, by name.
    """

    title: str
    result: str
    about: Sequence[str]
    chart: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


def render(page: Page) -> str:
    """The page as HTML.

    Example:
        >>> page = Page("a < b", "b won", [], "<svg></svg>", "", ["method"], [["<b>"]])
        >>> html = render(page)
        >>> "<title>a &lt; b</title>" in html, "<td>&lt;b&gt;</td>" in html
        (True, True)
    """
    colours = "\n".join(
        f"svg .line-{i} {{ fill: var(--c{i}); }} "
        f"svg .line.line-{i} {{ fill: none; stroke: var(--c{i}); }}"
        for i in range(6)
    )
    header = "".join(f'<th scope="col">{escape(name)}</th>' for name in page.header)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in page.rows
    )
    facts = "\n".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in page.facts.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{MARK}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(page.title)}</title>
<style>{PAPERS}{STYLE}{colours}
</style>
</head>
<body>
<main>
<h1>{escape(page.title)}</h1>
<p class="result">{escape(page.result)}</p>
{_paragraphs(page.about)}
<figure>
{page.chart}
<figcaption>{escape(page.caption)}</figcaption>
</figure>
<div class="scroll"><table>
<thead><tr>{header}</tr></thead>
<tbody>
{rows}
</tbody>
</table></div>
{_paragraphs(page.notes)}
<h2>Where these numbers come from</h2>
<dl>
{facts}
</dl>
</main>
</body>
</html>
"""


def _paragraphs(texts: Sequence[str]) -> str:
    return "\n".join(f"<p>{escape(text)}</p>" for text in texts)
