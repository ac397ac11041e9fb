"""Draw the paper's figures from results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from upgd.ledger import StudyError
from upgd.paper.evidence import diverged
from upgd.paper.experiments import EXPERIMENTS
from upgd.paper.figures import Figure, Panel
from upgd.paper.panels import draw_panel
from upgd.paper.results import Results
from upgd.paper.sets import MAIN
from upgd.report.plotting import canvas, label_ends, save, styled

SIZE = (3.7, 2.8)
"""Inches of a panel, with the names at its lines."""
WHERE_RUN = ("returns", "dots")
"""Kinds of panels that are omitted while their experiment has no runs."""
SHARE_A_LEGEND = ("dots", "histogram")
"""Kinds of panels whose marks are explained once, below all of them."""


@styled()
def draw(figure: Figure, results: Mapping[str, Results], *paths: Path) -> list[str]:
    """Draw a figure into files; returns what it lacks.

    Panels of :data:`WHERE_RUN` without runs are omitted. Raises StudyError if there is nothing to
    draw, matplotlib is missing, or it cannot write the format of a suffix.
    """
    lacking = missing(figure, results)
    if not can_draw(figure, results):
        raise StudyError(f"nothing to draw for {figure.name}: there is no {lacking[0]}")
    panels = [p for p in figure.panels if p.kind not in WHERE_RUN or _is_there(p, results)]
    rows = -(-len(panels) // figure.columns)
    columns = -(-len(panels) // rows)  # four panels of three columns are two by two
    heat = any(panel.kind == "heat" for panel in figure.panels)
    width = SIZE[0] * columns + (1.6 if columns == 1 else 0)
    size = (7.5, 3.05) if heat else (width, SIZE[1] * rows)
    agents = all(panel.kind == "returns" for panel in panels)
    picture, grid = canvas(rows, columns, size, sharex=agents)  # agents on one axis of steps
    for axes, panel in zip(grid.flat, panels, strict=False):
        draw_panel(axes, panel, results)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    if any(panel.kind in SHARE_A_LEGEND for panel in panels):
        marks = {
            name: handle
            for axes in grid.flat
            for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        picture.legend(marks.values(), marks.keys(), loc="outside lower center", ncols=2)
    else:
        label_ends(picture)
    save(picture, *paths)
    return lacking


def missing(figure: Figure, results: Mapping[str, Results]) -> list[str]:
    """Experiments, metrics and arms without results, except those that diverged."""
    found: list[str] = []
    unknown: dict[str, set[str]] = {}
    for panel in _parts(figure):
        for name, metric in _needs(panel):
            if _is_empty(name):
                continue
            there = results[name].series.get(metric, {}) if name in results else {}
            if name not in results:
                found.append(name)
            elif not there:
                found.append(f"{name}: {metric}")
            else:
                experiment = EXPERIMENTS[name]
                over = results[name].diverged.keys() - set(results[name].arms)
                known, twins = {arm.name for arm in experiment.arms}, experiment.twins()
                lacks = [a for a in panel.arms if twins.get(a, a) not in there and a not in over]
                found += [f"{name}: {arm}" for arm in lacks if arm in known]
                unknown.setdefault(name, set()).update(set(lacks) - known)
    searched = (f"{name}: sets of {len(some)} arms" for name, some in unknown.items() if some)
    return list(dict.fromkeys([*found, *searched]))


def diverged_arms(figure: Figure, results: Mapping[str, Results]) -> list[str]:
    """Titles of a figure's arms that have diverged seeds, by experiment."""
    found = []
    for panel in (part for part in _parts(figure) if part.experiment in results):
        titles = {a.name: a.title for a in EXPERIMENTS[panel.experiment].arms}
        for arm in panel.arms:
            gone, all_ = diverged(results[panel.experiment], arm)
            if gone:
                some = "" if gone == all_ else f" ({gone} of {all_} seeds)"
                found.append(f"{panel.experiment}: {titles[arm]}{some}")
    return list(dict.fromkeys(found))


def _is_empty(name: str) -> bool:
    """Whether an experiment has no arms and expects none: all printed sets were best."""
    return not EXPERIMENTS[name].arms and not EXPERIMENTS[name].awaited


def _is_there(panel: Panel, results: Mapping[str, Results]) -> bool:
    return panel.experiment in results or _is_empty(panel.experiment)


def can_draw(figure: Figure, results: Mapping[str, Results]) -> bool:
    """Whether there is anything to draw."""
    needs = (need for panel in _parts(figure) for need in _needs(panel) if need[0] in figure.run)
    return any(name in results and metric in results[name].series for name, metric in needs)


def _parts(figure: Figure) -> Iterator[Panel]:
    """Panels, including those drawn into the axes of others."""
    for panel in figure.panels:
        yield panel
        if panel.beside is not None:
            yield panel.beside


def _needs(panel: Panel) -> list[tuple[str, str]]:
    """The experiments and metrics that a panel is drawn from."""
    if panel.kind == "heat":
        metric = "accuracy" if panel.metric == "forgetting" else "plasticity"
        return [(name, metric) for name in MAIN]
    both = ("plasticity", "accuracy") if panel.kind == "scatter" else (panel.metric, panel.dashed)
    return [(panel.experiment, metric) for metric in both if metric]
