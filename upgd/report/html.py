"""A study as one page with interactive figures: one file that needs no network.

All text is escaped here, and the numbers of the figures are base64. The page's content security
policy allows only its two scripts, and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd import metrics
from upgd.extras import install
from upgd.ledger import Result, Run, StudyError
from upgd.pages import alike, as_table, details, document, grouped, join
from upgd.pages.colours import DASHES, style
from upgd.report import sections as content
from upgd.report import sets, tables
from upgd.report.sections import Arm, Line, Section
from upgd.study.kinds import kind_of
from upgd.text import count, duration, ranges

ASSETS = Path(__file__).parent / "assets"
POINTS = 2000  # the most of a line; beyond, points are means of several windows
SEED_POINTS = 100_000  # the most of all single seeds in a figure; beyond, only bands are drawn
ROWS = 200  # the most of a table
WORDS = 1000  # the most characters of an error message


@dataclass(frozen=True)
class Judged:
    """One of the paper's claims, judged by this study."""

    number: int
    text: str
    verdict: str
    statements: Sequence[tuple[str, str, str]]  # statement, statistic and verdict of each


@dataclass(frozen=True)
class Report:
    """The content of a page; all text is plain."""

    title: str
    sections: Sequence[Section]
    claims: Sequence[Judged] = ()  # claims that the study has data for
    other_claims: Sequence[str] = ()  # the text of the others
    about: Sequence[str] = ()  # paragraphs at the top


def render(report: Report) -> str:
    """The page as HTML; StudyError if plotly is not installed."""
    scripts = [_script(plotly_source()), _script((ASSETS / "report.js").read_text("utf-8"))]
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    title = escape(report.title)
    allowed = f"script-src {hashes}; img-src data: blob:; "
    data = {"sections": [_section_data(section) for section in report.sections]}
    body = f"""<a class="skip" href="#main">Skip to the results</a>
<header><h1>{title}</h1><button type="button" id="theme" hidden>Dark colours</button></header>
<main id="main" tabindex="-1">
{_summary(report)}
{join(_section(n, section, report) for n, section in enumerate(report.sections))}
{_claims(report)}
{_failures(report.sections)}
{_provenance(report.sections)}
</main>
<script type="application/json" id="data">{embedded(data)}</script>
<script>{scripts[0]}</script>
<script>{scripts[1]}</script>"""
    return document(report.title, body, allowed)


# ----------------------------------------------------------------------------- scripts
def embedded(value: Any) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII alone
    return "".join(f"\\u{ord(c):04x}" if c in "<>&" else c for c in text)


def packed(values: NDArray[np.floating]) -> dict[str, str]:
    """Numbers as the page reads them: exact, and shorter than decimals."""
    kind = "f4" if values.dtype == np.float32 else "f8"
    raw = np.ascontiguousarray(values, f"<{kind}").tobytes()
    return {"type": kind, "data": base64.b64encode(raw).decode()}


def plotly_source() -> str:
    """Plotly's JavaScript; StudyError if it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise StudyError(f"reports need plotly: {install('report')}") from None
    return str(get_plotlyjs())


def _script(text: str) -> str:
    """A script without text that a browser takes for its end tag."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return re.sub("<(?=/script|script|!--)", r"\\x3c", text, flags=re.IGNORECASE)


def _section_data(section: Section) -> dict[str, Any]:
    arms = []
    for n, arm in enumerate(section.arms[: section.drawn]):
        colour, dash = style(n)
        arms.append({"name": arm.name, "colour": colour, "dash": DASHES[dash]})
    figures = [
        {
            "title": _title(metric),
            "unit": kind_of(section.problem).unit,
            "file": re.sub(r"[^\w-]+", "-", f"{section.problem}-{metric}"),
            "lines": [_line_data(n, line, _shows_seeds(lines)) for n, line in lines.items()],
        }
        for metric, lines in section.lines.items()
    ]
    return {"arms": arms, "figures": [*figures, *sets.figures(section)]}


def _line_data(arm: int, line: Line, shown: bool) -> dict[str, Any]:
    samples, values, _ = content.thin(line, POINTS)
    several = len(values) > 1
    with np.errstate(invalid="ignore", over="ignore"):  # a series may hold infinities
        error = metrics.half_width(values)
    return {
        "arm": arm,
        "seeds": line.seeds,
        "shown": shown and several,
        "samples": packed(samples),
        "mean": packed(content.mean(values, 0)),
        "error": packed(error),
        "values": packed(values if shown else values[:0]),
    }


def _shows_seeds(lines: Mapping[int, Line]) -> bool:
    points = (len(line.seeds) * min(line.values.shape[1], POINTS) for line in lines.values())
    return bool(sum(points) <= SEED_POINTS)


# ---------------------------------------------------------------------------- sections
def _summary(report: Report) -> str:
    runs = [run for section in report.sections for arm in section.arms for run in arm.runs]
    methods = count(len({run.spec.name for run in runs}), "method")
    problems = list(dict.fromkeys(section.problem for section in report.sections))
    where = problems[0] if len(problems) == 1 else f"{len(problems)} problems"
    texts = (*report.about, f"{methods} on {where}, {content.tally(runs)}.")
    told = [f"<p>{escape(text)}</p>" for text in texts]
    if len(report.sections) > 1:
        links = (
            f'<li><a href="#section-{n}">{escape(_heading(section, report.sections))}</a></li>'
            for n, section in enumerate(report.sections)
        )
        told.append(f'<nav aria-label="Sections"><ul>{join(links)}</ul></nav>')
    return "\n".join(told)


def _heading(section: Section, among: Sequence[Section]) -> str:
    told = f"{section.problem}, {grouped(section.steps)} {kind_of(section.problem).unit}"
    told += f", tasks of {grouped(section.task_length)}" if section.task_length else ""
    several = len({other.rules for other in among}) > 1
    return f"{told}, version {section.rules} of the rules" if several else told


def _section(number: int, section: Section, report: Report) -> str:
    told = [f'<p class="result">{escape(text)}</p>' for text in content.sentences(section)]
    metrics_ = list(section.lines)
    first = [n for n, metric in enumerate(metrics_) if metric in content.FIRST] or list(range(1))
    rest = [n for n in range(len(metrics_)) if n not in first]
    parts = [_figure(number, section, n, main=n == first[0]) for n in first if metrics_]
    if rest:
        more = join(_figure(number, section, n) for n in rest)
        what = escape(", ".join(_title(metrics_[n]).lower() for n in rest))
        parts.append(details(f"Diagnostics: {what}", more))
    parts += list(sets.parts(number, section, len(metrics_)))
    heading = escape(_heading(section, report.sections))
    return f"""<section aria-labelledby="section-{number}">
<h2 id="section-{number}">{heading}</h2>
{join(told)}
{_tools(number, section) if metrics_ else ""}
{join(parts)}
{_other_settings(section)}
</section>"""


def _tools(number: int, section: Section) -> str:
    """Buttons that show and hide methods, and their seeds."""
    buttons = []
    for n in _by_end(section):
        arm, (colour, dash) = section.arms[n], style(n)
        gaps = ("", "7 4", "2 3", "7 3 2 3")[dash]
        buttons.append(
            f'<button type="button" aria-pressed="true" data-section="{number}" data-arm="{n}" '
            f'style="--line: var(--c{colour})"><svg viewBox="0 0 30 12" aria-hidden="true">'
            f'<line x1="0" x2="30" y1="6" y2="6" stroke-dasharray="{gaps}"/></svg>'
            f"<span>{escape(arm.name)}</span></button>"
        )
    if any(_shows_seeds(lines) and _many(lines) for lines in section.lines.values()):
        kind = 'type="button" class="seeds" aria-pressed="false"'
        buttons.append(f'<button {kind} data-section="{number}">Each seed</button>')
    return f"""<div class="tools" role="group" aria-label="Lines of the figures" hidden>
{join(buttons)}</div>
<p class="note keys">Buttons show and hide lines. Drag to zoom, double-click for all; on a figure \
that has the focus, + and − zoom, arrows move, 0 shows all.</p>
<noscript><p>The figures need scripts; the tables do not.</p></noscript>"""


def _by_end(section: Section) -> list[int]:
    """The numbers of the drawn arms in the order of their lines' ends, highest first."""
    ends = dict.fromkeys(range(section.drawn), -math.inf)
    for n, line in section.lines.get(section.metric, {}).items():
        mean = content.mean(line.values, 0)
        ends[n] = float(next((x for x in mean[::-1] if math.isfinite(x)), -math.inf))
    return sorted(ends, key=lambda n: -ends[n])


def _figure(number: int, section: Section, figure: int, main: bool = False) -> str:
    metric = list(section.lines)[figure]
    lines = section.lines[metric]
    title = escape(_title(metric))
    label = f"{title} over {kind_of(section.problem).unit}, a line per method"
    label += "; the table below has its numbers"
    banded = any(len(line.seeds) >= metrics.FEWEST for line in lines.values())
    caption = "Mean over seeds" + (f"; bands: {metrics.INTERVAL} interval." if banded else ".")
    table = _numbers(section, metric)
    if not main:
        table = details(f"Numbers: {title.lower()}", table)
    return f"""<h3>{title}</h3>
<div class="plot" tabindex="0" role="group" aria-label="{label}" data-section="{number}" \
data-figure="{figure}"></div>
<p class="soft">{caption}{escape(_thinning(lines))}</p>
{table}"""


def _many(lines: Mapping[int, Line]) -> bool:
    return any(len(line.seeds) > 1 for line in lines.values())


def _thinning(lines: Mapping[int, Line]) -> str:
    told = ""
    if factors := {content.thin(line, POINTS).factor for line in lines.values()} - {1}:
        each = " or ".join(map(str, sorted(factors)))
        told += f" Each point is a mean of {each} windows, so that there are {POINTS} at most."
    if not _shows_seeds(lines):
        told += f" Seeds are not drawn one by one: they have more than {SEED_POINTS} points."
    return told


def _numbers(section: Section, metric: str) -> str:
    """A table with a row per drawn method."""
    lines = section.lines[metric]
    long = any(line.values.shape[1] >= 4 for line in lines.values())
    early, late = ("second quarter", "last quarter") if long else ("first window", "last window")
    header = ["method", "mean over the run [95%]", late, "change [95%]", "seeds"]
    rows = [_row(section.arms[number], content.numbers(line)) for number, line in lines.items()]
    if any(section.arms[number].chosen for number in lines):
        header.append("set")
        for row, number in zip(rows, lines, strict=True):
            row.append(section.arms[number].chosen or "–")
    told = (
        f"Means over the seeds that are done with {metrics.INTERVAL} intervals, of "
        f"{metrics.FEWEST} seeds or more; the change is from the {early} to the {late} of the run."
    )
    caption = f"{_title(metric)} by method"
    return f'{as_table(caption, header, rows, long={5})}\n<p class="soft">{told}</p>'


def _row(arm: Arm, found: content.Numbers) -> list[str]:
    over = _bracketed(found.mean)
    return [arm.name, over, *alike(found.late), _change(found.change), _fates(arm)]


def _fates(arm: Arm) -> str:
    """An arm's runs by state."""
    told = {state: arm.count(state) for state in ("diverged", "failed")}
    told["not done"] = arm.count("pending", "running")
    rest = ", ".join(f"{count} {what}" for what, count in told.items() if count)
    return f"{arm.count('done')} done" + (f", {rest}" if rest else "")


def _change(found: metrics.Interval | None) -> str:
    told = "–" if found is None else _bracketed(found)
    return f"+{told}" if found is not None and found.estimate > 0 else told


def _bracketed(found: metrics.Interval) -> str:
    if math.isnan(found.estimate):
        return "–"
    estimate, low, high = alike(*found)
    return estimate if math.isnan(found.low) else f"{estimate} [{low}, {high}]"


def _other_settings(section: Section) -> str:
    """The settings that are not drawn: unfinished, or worse than their method's best."""
    rest = section.arms[section.drawn :]
    if not rest:
        return ""
    rows = []
    for arm in rest[:ROWS]:
        values = tables.summaries(arm.runs, section.metric)
        rows.append([arm.name, *alike(float(np.mean(values or [np.nan]))), _fates(arm)])
    header = ["setting", f"mean {section.metric}", "seeds"]
    caption = "Settings that are not drawn" + _cut(len(rest), "settings")
    table = as_table(caption, header, rows)
    return details(f"{grouped(len(rest))} more settings", table)


# ------------------------------------------------------------------------------ claims
def _claims(report: Report) -> str:
    if not (report.claims or report.other_claims):
        return ""
    none = "<p>None of the paper's claims is about these runs.</p>"
    found = [_claim(claim) for claim in report.claims] or [none]
    if report.other_claims:
        items = join(f"<li>{escape(text)}</li>" for text in report.other_claims)
        found.append(details("Claims for which this study has no runs", f"<ul>{items}</ul>"))
    return f"<section><h2>Claims of the paper</h2>\n{join(found)}</section>"


def _claim(claim: Judged) -> str:
    verdict = f'<span class="verdict">{escape(claim.verdict)}</span>'
    rows = [statement for statement in claim.statements if statement[1] != "-"]
    header = ["statement", "found [95%]", "verdict"]
    table = as_table(f"Claim {claim.number}", header, rows, "text", long={0})
    rest = len(claim.statements) - len(rows)
    more = f'<p class="soft">{rest} more statements have no data here.</p>' if rest else ""
    return details(f"{claim.number}. {escape(claim.text)}: {verdict}", table + more)


# -------------------------------------------------------------------------- provenance
def _failures(sections: Sequence[Section]) -> str:
    lost = [
        (section, arm, run)
        for section in sections
        for arm in section.arms
        for run in arm.runs
        if run.state in ("failed", "diverged") or run.error
    ]
    if not lost:
        return ""
    rows = [
        [arm.name, str(run.spec.seed), run.state, _reason(run), section.problem]
        for section, arm, run in lost[:ROWS]
    ]
    header = ["method", "seed", "state", "reason", "problem"]
    caption = "Runs that are in no mean" + _cut(len(lost), "runs")
    table = as_table(caption, header, rows, "text", long={3})
    return f"<section><h2>What went wrong</h2>\n{table}</section>"


def _reason(run: Run) -> str:
    if run.state == "diverged" and run.result is not None:
        return f"the loss was not finite at step {run.result.diverged_at}"
    text = (run.error or "").strip()
    return text if len(text) <= WORDS else text[:WORDS] + " …"


def _provenance(sections: Sequence[Section]) -> str:
    rows = [row for section in sections for arm in section.arms for row in _sources(section, arm)]
    header = ["method", "problem", "steps", "hyperparameters", "options", "seeds", "rules"]
    header += ["engine", "device", "versions", "machine", "time of a run", "begun", "ended"]
    caption = "Specifications, and where they were run" + _cut(len(rows), "rows")
    table = as_table(caption, header, rows[:ROWS], "text", long={3, 9})
    results = [r.result for s in sections for arm in s.arms for r in arm.runs if r.result]
    work = _times(results)
    when = f", from {work[1]} to {work[2]}" if "–" not in work else ""
    return f"""<section><h2>Where these numbers come from</h2>
<p>{escape(f"{len(results)} finished runs{when}.")}
The study's ledger has every number: <code>upgd export</code> writes it as CSV.</p>
{details("Specifications, engines and versions", table)}
</section>"""


def _sources(section: Section, arm: Arm) -> Iterable[list[str]]:
    """A row for each combination of engine, device and versions of an arm's runs."""
    ways: dict[tuple[str, ...], list[Run]] = {}
    for run in arm.runs:
        ways.setdefault(_way(run), []).append(run)
    for way, runs in ways.items():
        results = [run.result for run in runs if run.result is not None]
        seeds = ranges(run.spec.seed for run in runs)
        hyper = " ".join(f"{name}={value:g}" for name, value in arm.setting.hyper)
        options = " ".join(f"{name}={value}" for name, value in arm.setting.options)
        spec = [arm.setting.method, section.problem, str(section.steps), hyper, options or "–"]
        yield [*spec, seeds, str(section.rules), *way, *_times(results)]


def _times(results: Sequence[Result]) -> list[str]:
    """The time of the longest run, the start of the first and the end of the last."""
    if not results:
        return ["–"] * 3
    begun, ended = min(r.started or math.inf for r in results), max(r.finished for r in results)
    return [duration(max(r.wall for r in results)), _time(begun), _time(ended)]


def _way(run: Run) -> tuple[str, ...]:
    if run.result is None:
        return (run.state, "–", "–", "–")
    versions = ", ".join(f"{name} {version}" for name, version in run.result.versions.items())
    host = ", ".join(str(value) for value in run.result.host.values())
    device = f"{run.result.device}, {run.result.dtype}"
    return (run.result.engine, device, versions or "–", host or "–")


# ------------------------------------------------------------------------------- parts
def _cut(count: int, what: str) -> str:
    return f" (the first {ROWS} of {grouped(count)} {what})" if count > ROWS else ""


def _title(metric: str) -> str:
    return metric.replace("_", " ").capitalize()


def _time(seconds: float) -> str:
    if not 0 < seconds < math.inf:
        return "–"
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
