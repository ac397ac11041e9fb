"""Draw the paper's figures from results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd import metrics
from upgd.ledger import StudyError
from upgd.paper.evidence import diverged, forgotten, plasticity_lost
from upgd.paper.experiments import EXPERIMENTS, PRINTED, title
from upgd.paper.figures import AXES, SHORT, Figure, Panel
from upgd.paper.policy_collapse import draw_returns
from upgd.paper.results import Results
from upgd.paper.searches import WEIGHTS, variants
from upgd.paper.sets import MAIN, METHODS
from upgd.report.figures import canvas, save
from upgd.streams import get as get_problem

COLOURS = {
    "upgd": "#0072b2", "n-upgd": "#56b4e9", "shrink-and-perturb": "#009e73", "pgd": "#7a9a01",
    "sgdw": "#5a5a5a", "adamw": "#d55e00", "s-ewc": "#cc79a7", "s-mas": "#882255",
    "s-si": "#e69f00", "s-rwalk": "#8c564b", "adam": "#d55e00", "adam-restarts": "#5a5a5a",
    "sgd": "#9a9a9a", "sgd+wd": "#5a5a5a", "sgd+wp": "#7a9a01", "sgd+wd+wp": "#009e73",
    "ada-upgd": "#0072b2", "ada-upgd-authors": "#56b4e9",
    "upgd-wd": "#cc79a7", "upgd-wp": "#e69f00", "upgd-ug": "#882255", "sgd+ug": "#56b4e9",
    "reference": "#cc79a7",
}  # fmt: skip
"""One colour per arm in every figure; safe for red-green colour blindness."""
_SECOND_ORDER = {"upgd": "#d55e00", "n-upgd": "#e69f00"}
_OF_KINDS = {
    name: COLOURS[method] if order == 1 else _SECOND_ORDER[method]
    for method in WEIGHTS
    for order in (1, 2)
    for name in variants(method, order)
}
"""Kinds of utility share the colour of their method: each kind has its own panels."""
SIZE = (3.6, 2.9)
FEW = 2
WHERE_RUN = ("returns", "dots")
"""Kinds of panels that are omitted while their experiment has no runs."""
SURGE = 3.0
"""Losses above this multiple of the highest median of the arms are cut off."""


def colour(arm: str) -> str | None:
    """An arm's colour; its printed set has the same."""
    return (COLOURS | _OF_KINDS).get(arm.removesuffix(PRINTED))


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
    size = (7.5, 3.05) if heat else (width, SIZE[1] * rows + 0.45)
    picture, grid = canvas(rows, columns, size)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _panel(axes, panel, results)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    _legend(picture, grid)
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


def _panel(axes: Any, panel: Panel, results: Mapping[str, Results]) -> None:
    if panel.kind == "heat":
        _heat(axes, panel, results)
        return
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(panel.title, fontsize=10)
    both = [panel] if panel.beside is None else [panel, panel.beside]
    there = [p for p in both if (r := results.get(p.experiment)) and p.metric in r.series]
    if not there:
        why = "not run" if panel.experiment not in results else "not measured"
        axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[], ylabel=AXES.get(panel.metric, panel.metric))
        return
    if panel.kind == "dots":
        _dots(axes, there, results)
        return
    kinds = {"curves": _curves, "tasks": _closer, "scatter": _scatter}
    for each in there:
        if each.kind == "returns":
            draw_returns(axes, dict(_arms(each)), results[each.experiment], COLOURS)
        else:
            kinds[each.kind](axes, each, results[each.experiment])


def _curves(axes: Any, panel: Panel, results: Results) -> None:
    """Mean over seeds and standard error, against tasks."""
    usual, highest = 0.0, 0.0
    for arm, name in _arms(panel):
        solid = ":" if arm.endswith(PRINTED) else "-"
        for metric, style in ((panel.metric, solid), (panel.dashed, "--")):
            curves = results.by_task(_source(panel, arm), metric)
            if metric and curves:
                label = name if style == solid else None
                values = _stack(curves)
                _line(axes, np.arange(1, values.shape[1] + 1), values, arm, style, label)
                middle = np.nanmean(values, 0)
                usual = max(usual, float(np.nanmedian(middle)))
                highest = max(highest, float(np.nanmax(middle)))
    if panel.metric == "loss" and highest > SURGE * usual > 0:
        axes.set_ylim(0, SURGE / 2 * usual)  # a curve that nearly diverges would hide the others
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel=_points(panel, results), ylabel=AXES.get(panel.metric, panel.metric))
    _tell_twins(axes, panel)


def _points(panel: Panel, results: Results) -> str:
    """The name of the window of a value."""
    length = get_problem(EXPERIMENTS[panel.experiment].problem).task_length
    if length is None:
        return f"Points of {results.window} samples"
    points = max(1, results.window // length)
    return "Task number" if points == 1 else f"Points of {points} tasks"


def _line(
    axes: Any, x: NDArray[Any], values: NDArray[Any], arm: str, style: str, label: str | None
) -> None:
    with np.errstate(invalid="ignore"):
        mean = np.nanmean(values, 0)
    shade = colour(arm) or "black"
    axes.plot(x, mean, style, color=shade, label=label, linewidth=1.3)
    if len(values) > 1:
        error = metrics.standard_error(values)
        axes.fill_between(x, mean - error, mean + error, color=shade, alpha=0.25, linewidth=0)


def _closer(axes: Any, panel: Panel, results: Results) -> None:
    """The first tasks and the last, side by side, at the resolution of windows."""
    options = EXPERIMENTS[panel.experiment].options
    per_task = int(options.get("task_length", results.window)) // results.window
    for arm, name in _arms(panel):
        curves = results.of(arm, panel.metric)
        if not curves:
            continue
        values = _stack(curves)
        tasks = values.shape[1] // per_task
        part = FEW * per_task
        x = np.arange(part) / per_task
        _line(axes, x, values[:, :part], arm, "-", name)
        if tasks > FEW:
            last = values[:, (tasks - FEW) * per_task : tasks * per_task]
            _line(axes, x + FEW + 0.3, last, arm, "-", None)
            places = [0.5, 1.5, FEW + 0.8, FEW + 1.8]
            axes.set_xticks(places, [str(task) for task in (1, 2, tasks - 1, tasks)])
    axes.axvspan(FEW, FEW + 0.3, color="0.9", linewidth=0)
    axes.set(xlabel="Task", ylabel=AXES[panel.metric])


def _scatter(axes: Any, panel: Panel, results: Results) -> None:
    """Means of the last 100 tasks, a point per arm."""
    for arm, name in _arms(panel):
        pair = [results.of(arm, metric) for metric in ("plasticity", "accuracy")]
        if all(pair):
            means = [np.array([float(c[-100:].mean()) for c in curves.values()]) for curves in pair]
            errors = [float(metrics.standard_error(m)) if len(m) > 1 else 0.0 for m in means]
            x, y = (float(m.mean()) for m in means)
            axes.errorbar(x, y, *reversed(errors), fmt="o", color=COLOURS[arm], label=name)
    axes.set(xlabel="Average plasticity", ylabel="Average online accuracy")


def _dots(axes: Any, panels: Sequence[Panel], results: Mapping[str, Results]) -> None:
    """Means over common tasks with 95% intervals; rings for printed sets."""
    found = [
        (panel.experiment in MAIN, arm, list(by_seed.values()))
        for panel in panels
        for arm, _ in _arms(panel)
        if (by_seed := results[panel.experiment].by_task(_source(panel, arm), panel.metric))
    ]
    tasks = min((len(curve) for *_, curves in found for curve in curves), default=0)
    for printed, arm, curves in found:
        mean, low, high = metrics.mean_interval([float(c[:tasks].mean()) for c in curves])
        row, shade = METHODS.index(arm), colour(arm)
        axes.plot([low, high], [row, row], color=shade, linewidth=1.3)
        axes.plot(mean, row, **_dot(printed), color=shade)
    for printed in sorted({printed for printed, *_ in found}):
        label = "printed set" if printed else "best set found here"
        axes.plot([], [], **_dot(printed), color="0.3", label=label)
    axes.set_yticks(range(len(METHODS)), [title(method) for method in METHODS])
    axes.set_ylim(len(METHODS) - 0.5, -0.5)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(f"{AXES[panels[0].metric]}, {tasks} tasks")


def _dot(printed: bool) -> dict[str, Any]:
    """A dot, or a ring for a printed set."""
    shape = {"markerfacecolor": "none", "markersize": 9} if printed else {"markersize": 5}
    return {"marker": "o", "linestyle": "none", **shape}


def _heat(axes: Any, panel: Panel, results: Mapping[str, Results]) -> None:
    """A number per problem and method; blue is good."""
    overall = forgotten if panel.metric == "forgetting" else plasticity_lost
    table = np.empty((len(MAIN), len(METHODS)))
    for i, name in enumerate(MAIN):
        for j, method in enumerate(METHODS):
            found = overall(results.get(name), method)
            table[i, j] = np.nan if found is None else found.estimate
    largest = max(float(np.nanmax(np.abs(table))), 1e-9) if not np.isnan(table).all() else 1.0
    axes.imshow(table, cmap="RdBu_r", vmin=-largest, vmax=largest, aspect="auto")
    for i, j in np.ndindex(table.shape):
        value = table[i, j]
        text = "-" if np.isnan(value) else f"{round(100 * value, 1) + 0.0:.1f}".replace("-", "−")
        dark = not np.isnan(value) and abs(value) > 0.6 * largest
        axes.text(j, i, text, ha="center", va="center", fontsize=8, color="w" if dark else "k")
    axes.set_xticks(range(len(METHODS)), [title(m) for m in METHODS], rotation=30, ha="right")
    axes.set_yticks(range(len(MAIN)), [SHORT[name] for name in MAIN])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(AXES[panel.metric], fontsize=10)


def _arms(panel: Panel) -> list[tuple[str, str]]:
    """Names and titles of drawn arms; of identical learners, the first."""
    return [(arm, name) for arm, name in _titles(panel).items() if not _drawn_as(panel, arm)]


def _titles(panel: Panel) -> dict[str, str]:
    """The panel's arms that the experiment has."""
    known = {arm.name: arm.title for arm in EXPERIMENTS[panel.experiment].arms}
    return {arm: panel.names.get(arm, known[arm]) for arm in panel.arms if arm in known}


def _source(panel: Panel, arm: str) -> str:
    """The arm under which this arm's runs are stored."""
    return EXPERIMENTS[panel.experiment].twins().get(arm, arm)


def _drawn_as(panel: Panel, arm: str) -> str:
    """An earlier arm of the panel that is the same learner, or None."""
    same = _source(panel, arm)
    return same if same != arm and same in panel.arms else ""


def _tell_twins(axes: Any, panel: Panel) -> None:
    """Note under the axes which arms equal a drawn one."""
    titles = _titles(panel)
    pairs = ((titles[arm], titles.get(_drawn_as(panel, arm))) for arm in titles)
    told = "\n".join(f"{name} is {same}" for name, same in pairs if same)
    if told:
        place = {"xycoords": axes.xaxis.label, "textcoords": "offset points"}
        axes.annotate(told, (0.5, 0), (0, -3), ha="center", va="top", fontsize=8, **place)


def _stack(curves: Mapping[int, NDArray[Any]]) -> NDArray[Any]:
    shortest = min(map(len, curves.values()))
    return np.stack([curve[:shortest] for curve in curves.values()])


def _legend(picture: Any, grid: Any) -> None:
    """One legend for all axes."""
    known: dict[str, Any] = {}
    for axes in grid.flat:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            known.setdefault(name, handle)
    if known:
        columns = max(1, min(len(known), int(picture.get_figwidth() / 1.35)))
        picture.legend(
            *(list(known.values()), list(known)), loc="outside lower center", ncols=columns,
            frameon=False, fontsize=8,
        )  # fmt: skip
