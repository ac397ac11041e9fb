"""The part of a report on sets of hyperparameters: how much each of them matters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import Any

from upgd.metrics import Interval
from upgd.pages import alike, as_table, details
from upgd.pages.colours import DASHES, style
from upgd.report.plotting import seeds
from upgd.report.sections import Section
from upgd.report.sensitivity import limits, lost, scale, sensitivity, varied
from upgd.rules.vocabulary import setting
from upgd.study.selection import Ranking
from upgd.text import pairs


def names(section: Section) -> list[str]:
    """The hyperparameters that have a figure."""
    return varied(list(section.rankings.values()))


def figures(section: Section) -> Iterator[dict[str, Any]]:
    """A figure for each hyperparameter, as the page's script reads it."""
    every = [
        point.best.estimate
        for ranking in section.rankings.values()
        for name in names(section)
        for point in sensitivity(ranking, name)
    ]
    for name in names(section):
        drawn = {k: r for k, r in section.rankings.items() if len(sensitivity(r, name)) > 1}
        values = {p.value for r in drawn.values() for p in sensitivity(r, name)}
        axis = scale(name, sorted(values.union(*(lost(r, name) for r in drawn.values()))))
        yield {
            "title": section.metric.replace("_", " ").capitalize(),
            "unit": name,
            "file": f"{section.problem}-{section.metric}-{name}".replace("/", "-"),
            "ticks": list(axis.ticks),
            "labels": list(axis.ticks.values()),
            "range": axis.limits,
            "limits": limits(every, section.metric),
            "sets": [_line(section, k, r, name, axis.places) for k, r in drawn.items()],
        }


def _line(section: Section, label: str, ranking: Ranking, name: str, places: Any) -> dict[str, Any]:
    points, winner = sensitivity(ranking, name), ranking.winner
    assert winner is not None  # without one there are no points
    colour, dash = style(_number(section, label, ranking))
    errors = [point.best.estimate - point.best.low for point in points]
    return {
        "name": label,
        "colour": colour,
        "dash": DASHES[dash],
        "x": [places[point.value] for point in points],
        "y": [point.best.estimate for point in points],
        "error": [error if math.isfinite(error) else None for error in errors],
        "told": [f"{name}={point.value:g}" for point in points],
        "best": [places[setting(dict(winner.hyper), name)], winner.value],
        "set": pairs(dict(winner.hyper)),
        "lost": [places[value] for value in lost(ranking, name)],
    }


def _number(section: Section, label: str, ranking: Ranking) -> int:
    """The number of the arm that is drawn for a ranking's best set, for its colour, or another."""
    for number, arm in enumerate(section.arms[: section.drawn]):
        mine = arm.runs[0].spec.method == ranking.family.method
        if mine and ranking.winner and arm.setting.hyper == ranking.winner.hyper:
            return number
    return section.drawn + list(section.rankings).index(label)


def parts(number: int, section: Section, first: int) -> Iterator[str]:
    """The HTML of these figures; `first` is the number of the first one in its section."""
    if not names(section):
        return
    counts = [len(ranking.seeds) for ranking in section.rankings.values()]
    told = (
        f"The best {section.metric} at each value of a hyperparameter, over all values of the "
        f"others: mean over the run and {seeds(counts)}, with 95% intervals where there are "
        "several. A star is a method's best set; a cross, a value with which every set diverged."
    )
    yield f"<h3>How much each hyperparameter matters</h3>\n<p>{escape(told)}</p>"
    for place, name in enumerate(names(section)):
        label = escape(f"{section.metric} by {name}, a line per method; the table has its numbers")
        yield f"""<h4>{escape(name)}</h4>
<div class="plot" tabindex="0" role="group" aria-label="{label}" data-section="{number}" \
data-figure="{first + place}"></div>
{details(escape(f"Numbers: {section.metric} by {name}"), _table(section, name))}"""


def _table(section: Section, name: str) -> str:
    """The numbers of a figure, a row per value."""
    found = {
        label: {point.value: point.best for point in sensitivity(ranking, name)}
        for label, ranking in section.rankings.items()
    }
    mine = {label: points for label, points in found.items() if len(points) > 1}
    gone = {label: lost(section.rankings[label], name) for label in mine}
    values = sorted({value for points in (*mine.values(), *gone.values()) for value in points})
    rows = [
        [
            f"{value:g}",
            *(_cell(points.get(value), value in gone[label]) for label, points in mine.items()),
        ]
        for value in values
    ]
    return as_table(f"{section.metric} by {name}", [name, *mine], rows)


def _cell(found: Interval | None, has_diverged: bool) -> str:
    if found is None:
        return "diverged" if has_diverged else "–"
    estimate, low, high = alike(*found)
    return estimate if math.isnan(found.low) else f"{estimate} [{low}, {high}]"
