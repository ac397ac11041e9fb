"""A monitor's measurements as one HTML page, and as figures in a notebook: SVG, no scripts."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from upgd.monitor.reading import Array
from upgd.pages import MARK, alike, as_table, details, document, grouped, join
from upgd.pages.colours import DARK, LIGHT, css, style
from upgd.text import short

History = Sequence[tuple[int, Mapping[str, float]]]
Histograms = Sequence[tuple[int, Mapping[str, Array]]]
POINTS = 300  # the most of a line
LINES = 6  # the most in a figure, beside that of all layers
COLUMNS = 60  # the most of a figure of histograms
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 190, 46, 10, 10, 22
DARK_NOTEBOOKS = ('[data-jp-theme-light="false"]', ".vscode-dark", 'html[theme="dark"]')
GAPS = ("", "7 4", "2 3", "7 3 2 3")


class Measure(NamedTuple):
    """What is drawn of a measure, and how it is explained."""

    title: str
    told: str
    share: bool = False  # between 0 and 1, as per cent


MEASURES = {
    "dormant": Measure(
        "Dormant units", "Units whose mean output is far below their layer's.", share=True
    ),
    "dead": Measure("Dead units", "Units that put out zero for every sample.", share=True),
    "effective_rank": Measure(
        "Effective rank", "How many directions a layer's outputs make use of."
    ),
    "stable_rank": Measure("Stable rank", "The same, with more weight on the largest direction."),
    "plasticity": Measure(
        "Plasticity", "How much of a sample's loss a step on it takes away.", share=True
    ),
    "loss": Measure("Loss", "Before the steps that were measured."),
    "gradient_norm": Measure("Gradient norm", "Of the gradient that a step was made of."),
    "update_ratio": Measure("Update ratio", "A step's change, divided by the weights' norm."),
    "weight_norm": Measure("Weight norm", "Of weights and biases."),
    "weight_magnitude": Measure("Mean |w|", "Of weights and biases."),
    "protected": Measure(
        "Protected weights", "Weights that take at most 0.9 of a step.", share=True
    ),
    "eta": Measure("η", "The largest utility, by which the others are scaled."),
    "skipped_steps": Measure("Skipped steps", "Because of values that are not finite."),
}
ROWS = (
    *("dormant", "dead", "effective_rank", "stable_rank", "weight_norm", "weight_magnitude"),
    *("gradient_norm", "update_ratio", "protected"),
)

STYLE = """
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 17rem), 1fr));
  gap: 1.5rem 2rem; margin: 1rem 0; }
figure { margin: 0; }
figure h3 { margin: 0 0 .1rem; }
figure svg { width: 100%; height: auto; display: block; }
figure .soft { margin: 0 0 .4rem; }
figure text { font-size: 11px; fill: var(--soft); font-variant-numeric: tabular-nums; }
figure .axis { stroke: var(--edge); } figure .grid { stroke: var(--rule); }
figure .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
figure .all { stroke: var(--ink); stroke-width: 2.6; }
.legend { list-style: none; margin: .2rem 0 0; padding: 0; display: flex; flex-wrap: wrap;
  gap: .1rem .9rem; font-size: .82rem; color: var(--soft); }
.legend svg { width: 1.6rem; height: .7rem; display: inline-block; margin-right: .3rem; }
.warnings { list-style: none; padding: 0; }
.warnings li { border-left: .25rem solid var(--c1); padding: .1rem 0 .1rem .9rem; margin: .6rem 0;
  font-size: 1.05rem; }
thead th { white-space: normal; min-width: 5rem; }
"""


class Line(NamedTuple):
    """One line of a figure; `number` is that of its colour, -1 for all layers together."""

    name: str
    number: int
    points: Sequence[tuple[int, float]]


def render(
    title: str,
    warnings: Sequence[str],
    history: History,
    histograms: Histograms,
    units: Mapping[str, int],
    notes: Sequence[str] = (),
) -> str:
    """The page as HTML.

    Args:
        title: Its heading.
        warnings: Sentences for the top.
        history: Steps and numbers.
        histograms: Steps and counts of utilities.
        units: The number of units of each hidden layer.
        notes: Sentences about how it was measured.
    """
    body = f"""<header><h1>{escape(title)}</h1></header>
<main>
{_summary(warnings, history)}
{figures(history, histograms)}
{_layers(history, units)}
{details("How it was measured", join(f"<p>{escape(note)}</p>" for note in notes)) if notes else ""}
</main>"""
    return document(title, body, style=STYLE)


def fragment(warnings: Sequence[str], history: History, histograms: Histograms) -> str:
    """Warnings and figures for a notebook, in its own colours."""
    soft = "--ink: currentColor; --soft: currentColor; --edge: #888888; --rule: #88888855;"
    dark = ", ".join(f"{theme} .upgd-monitor" for theme in DARK_NOTEBOOKS)
    rules = re.sub(r"^(?=[.ft])", ".upgd-monitor ", STYLE, flags=re.MULTILINE)
    rules += f".upgd-monitor {{ {css(LIGHT)} {soft} max-width: 62rem; }}\n{dark} {{ {css(DARK)} }}"
    body = _summary(warnings, history) + figures(history, histograms)
    return f'<style>{rules}</style><div class="upgd-monitor">{body}</div>'


def write(path: Path, text: str) -> Path:
    """Write a page; FileExistsError if there is a file that upgd did not write."""
    if path.exists() and MARK not in path.read_text("utf-8", "replace")[:1000]:
        raise FileExistsError(f"Monitor: {path} is not a page of upgd; choose another name")
    path.write_text(text, encoding="utf-8")
    return path


class Follower:
    """Shows something with figures in a notebook, and shows it anew at most once a second."""

    def __init__(self, shown: Any) -> None:
        try:
            from IPython.display import display
        except ImportError:
            raise ImportError("Monitor.show() needs a notebook: pip install ipython") from None
        self._shown = shown
        self._handle = display(shown, display_id=True)  # None outside a notebook
        self._last = time.monotonic()

    def __call__(self, step: int, scalars: dict[str, float]) -> None:
        """There is a new measurement."""
        if time.monotonic() - self._last >= 1:
            self._last = time.monotonic()
            self.close()

    def close(self) -> None:
        """Show the end."""
        if self._handle is not None:
            self._handle.update(self._shown)


def _summary(warnings: Sequence[str], history: History) -> str:
    if not history:
        return "<p>Nothing was measured yet.</p>"
    (first, _), (last, _) = history[0], history[-1]
    many = f"{grouped(len(history))} measurements" if len(history) > 1 else "One measurement"
    told = f"{many}, from step {grouped(first)} to step {grouped(last)}."
    if not warnings:
        return f"<p>{told}</p>\n<p>No warnings.</p>"
    items = join(f"<li>{escape(text)}</li>" for text in warnings)
    return f'<p>{told}</p>\n<ul class="warnings">{items}</ul>'


def _layers(history: History, units: Mapping[str, int]) -> str:
    """The newest numbers, a row per layer."""
    if not history:
        return ""
    step, newest = history[-1]
    shown = [m for m in ROWS if any(name.startswith(f"{m}/") for name in newest)]
    layers = dict.fromkeys(
        name.partition("/")[2] for m in shown for name in newest if name.startswith(f"{m}/")
    )
    rows = []
    for layer in layers:
        values = [newest.get(f"{m}/{layer}", math.nan) for m in shown]
        cells = [_cell(MEASURES[m], value) for m, value in zip(shown, values, strict=True)]
        rows.append([layer, str(units.get(layer, "–")), *cells])
    header = ["layer", "hidden units", *(MEASURES[m].title.lower() for m in shown)]
    caption = f"Newest numbers of each layer, at step {grouped(step)}"
    return f"<section><h2>Layers</h2>\n{as_table(caption, header, rows)}</section>"


def _cell(measure: Measure, value: float) -> str:
    if measure.share and math.isfinite(value):
        return f"{value:.1%}"
    return alike(value)[0]


# ----------------------------------------------------------------------------- figures
def figures(history: History, histograms: Histograms) -> str:
    """A figure for every measure that there is, and for the utilities."""
    found = []
    for name, measure in MEASURES.items():
        lines, layers = _lines(name, history)
        values = [value for line in lines for _, value in line.points]
        if values and (name != "skipped_steps" or any(values)):
            found.append(_figure(measure, lines, layers))
    if any("utility" in counts for _, counts in histograms):
        found.append(_heat(histograms))
    return f'<div class="figures">\n{join(found)}\n</div>' if found else ""


def _lines(name: str, history: History) -> tuple[list[Line], int]:
    """The lines of a measure, and of how many layers they are chosen."""
    start = f"{name}/"
    newest = history[-1][1] if history else {}
    layers = [key[len(start) :] for key in newest if key.startswith(start)]
    if len(layers) > LINES:  # the largest, since high shares and norms are what one looks for

        def size(layer: str) -> float:
            value = newest.get(start + layer, math.nan)
            return value if math.isfinite(value) else -math.inf

        drawn = {*sorted(layers, key=size, reverse=True)[:LINES]}
    else:
        drawn = {*layers}
    chosen = [layer for layer in layers if layer in drawn]
    lines = [Line(x, n, _points(start + x, history)) for n, x in enumerate(chosen)]
    whole = _points(name, history)
    if whole and len(layers) != 1:
        lines.append(Line("all layers" if layers else "", -1 if layers else 0, whole))
    return lines, len(layers)


def _points(name: str, history: History) -> list[tuple[int, float]]:
    every = -(-len(history) // POINTS)
    thin = [*history[: -1 : max(1, every)], *history[-1:]]
    found = [(step, s.get(name, math.nan)) for step, s in thin]
    return [(step, value) for step, value in found if math.isfinite(value)]


def _figure(measure: Measure, lines: Sequence[Line], layers: int) -> str:
    steps = [step for line in lines for step, _ in line.points]
    values = [value for line in lines for _, value in line.points]
    positive = [value for value in values if value > 0]
    log = not measure.share and len(positive) == len(values) and max(values) > 50 * min(values)
    ticks = _log_ticks(values) if log else _ticks(values, measure.share)
    low, high = (math.log10(t) for t in (ticks[0], ticks[-1])) if log else (ticks[0], ticks[-1])
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / (last - first)

    def y(value: float) -> float:
        value = math.log10(value) if log else value
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)

    parts = []
    for tick in ticks:
        kind = "axis" if tick == ticks[0] else "grid"
        at = f"{y(tick):.1f}"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        text = f"{100 * tick:.4g}%" if measure.share else f"{tick:.4g}"
        parts.append(f'<text x="{LEFT - 5}" y="{y(tick) + 4:.1f}" text-anchor="end">{text}</text>')
    parts += _step_labels(first, last)
    for line in lines:
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in line.points)
        if len(line.points) == 1:
            path += f" {x(line.points[0][0]) + 4:.1f},{y(line.points[0][1]):.1f}"
        parts.append(f'<polyline {_stroke(line.number)} points="{path}"/>')
    more = f" The {LINES} of {layers} layers with the largest values." if layers > LINES else ""
    log_told = " Logarithmic." if log else ""
    return _framed(measure.title, measure.told + more + log_told, parts, _legend(lines))


def _framed(title: str, told: str, parts: Iterable[str], below: str = "") -> str:
    name = escape(title)
    return f"""<figure><h3>{name}</h3><p class="soft">{escape(told)}</p>
<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name} over steps">
{join(parts)}
</svg>{below}</figure>"""


def _step_labels(first: int, last: int) -> list[str]:
    bottom = HEIGHT - 6
    return [
        f'<text x="{LEFT}" y="{bottom}">{short(first)}</text>',
        f'<text x="{WIDTH - RIGHT}" y="{bottom}" text-anchor="end">step {short(last)}</text>',
    ]


def _stroke(number: int) -> str:
    if number < 0:
        return 'class="line all"'
    colour, dash = style(number)
    return f'class="line" stroke="var(--c{colour})" stroke-dasharray="{GAPS[dash]}"'


def _legend(lines: Sequence[Line]) -> str:
    items = [
        f'<li><svg viewBox="0 0 30 12" aria-hidden="true"><line x1="0" x2="30" y1="6" y2="6" '
        f"{_stroke(line.number)}/></svg>{escape(line.name)}</li>"
        for line in lines
        if line.name
    ]
    return f'<ul class="legend">{join(items)}</ul>' if items else ""


def _ticks(values: Sequence[float], share: bool) -> list[float]:
    """Two to five round numbers around some values; from zero on unless they hardly differ."""
    low, high = min(values), max(values)
    if share:
        low, high = 0.0, min(1.0, max(high, 0.01))
    elif low > 0 and low < 0.7 * high:
        low = 0.0
    size = high - low or abs(high) or 1.0
    unit = 10 ** math.floor(math.log10(size / 2))
    unit = next(unit * k for k in (1, 2, 5, 10) if size / (unit * k) <= 4)
    first = math.floor(low / unit)
    last = max(first + 1, math.ceil(high / unit - 1e-9))
    return [float(f"{unit * n:.10g}") for n in range(first, last + 1)]


def _log_ticks(values: Sequence[float]) -> list[float]:
    """Powers of ten around some values, five at most."""
    first = math.floor(math.log10(min(values)))
    last = max(first + 1, math.ceil(math.log10(max(values))))
    every = -(-(last - first) // 4)
    return [10.0**n for n in range(first, last + every, every)]


def _heat(histograms: Histograms) -> str:
    """Utilities over time: a column per measurement, darker where more weights are."""
    held = [(step, counts["utility"]) for step, counts in histograms if "utility" in counts]
    every = -(-len(held) // COLUMNS)
    held = held[(len(held) - 1) % every :: every]  # the last one is among them
    bins = len(held[0][1])
    wide, tall = (WIDTH - LEFT - RIGHT) / len(held), (HEIGHT - TOP - BOTTOM) / bins
    parts = []
    for place, (_, counts) in enumerate(held):
        most = math.log1p(float(counts.max()))
        for n, count in enumerate(counts):
            if count > 0:
                x, y = LEFT + wide * place, HEIGHT - BOTTOM - tall * (n + 1)
                strength = max(0.06, math.log1p(float(count)) / most)
                parts.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide + 0.1:.1f}" '
                    f'height="{tall:.1f}" fill="var(--c0)" fill-opacity="{strength:.2f}"/>'
                )
    for value in (0, 0.5, 1):
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value
        parts.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    parts += _step_labels(held[0][0], held[-1][0])
    told = "Of all weights: 0.5 is none, more is useful, less harmful. Darker: more weights (log)."
    return _framed("Scaled utilities", told, parts)
