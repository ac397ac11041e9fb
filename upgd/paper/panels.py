"""The kinds of panels of the paper's figures, each drawn into its axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd import metrics
from upgd.metrics import UTILITIES
from upgd.pages.colours import INK, RULE, SOFT
from upgd.paper.evidence import forgotten, plasticity_lost
from upgd.paper.experiments import AGENT_RIVALS, EXPERIMENTS, title
from upgd.paper.figures import AXES, SHORT, Kind, Panel
from upgd.paper.looks import colour, look
from upgd.paper.policy_collapse import curves as returns_of
from upgd.paper.results import Results
from upgd.paper.sets import MAIN, METHODS
from upgd.report.plotting import (
    BAND,
    SMALL,
    curve,
    footnote,
    in_thousands,
    seeds,
    standard_error,
)
from upgd.report.sections import Line, thin
from upgd.streams import get as get_problem
from upgd.text import count

FEW = 2
"""Tasks at either end of a closer look."""
POINTS = 100
"""The most of a line; beyond, points are means of several tasks."""
SURGE = 3.0
"""Losses above this multiple of the highest median of the arms are cut off."""
LAST = 100
"""Tasks of the means in a scatter."""
RAREST = 1e-7
"""The lowest share of a histogram: one weight in ten million."""


def draw_panel(axes: Any, panel: Panel, results: Mapping[str, Results]) -> None:
    """Draw a panel, or why there is nothing to draw."""
    axes.set_title(panel.title)
    if panel.kind == "heat":
        _heat(axes, panel, results)
        return
    both = [panel] if panel.beside is None else [panel, panel.beside]
    there = [p for p in both if (r := results.get(p.experiment)) and p.metric in r.series]
    if not there:
        why = "not run" if panel.experiment not in results else "not measured"
        axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[], ylabel=AXES.get(panel.metric, panel.metric))
    elif panel.kind == "dots":
        _dots(axes, there, results)
    else:
        for each in there:
            KINDS[each.kind](axes, each, results[each.experiment])
        footnote(axes, _told(there, results))


def _told(panels: Sequence[Panel], results: Mapping[str, Results]) -> str:
    """The note under a panel: its seeds, what its bands are, what a point is."""
    counts = _counts(panels, results)
    told = [seeds(counts) if counts else "no seeds"]
    kind = panels[0].kind
    if kind == "histogram":
        told.append("means")
    elif max(counts, default=0) > 1:
        told.append(f"{'bars' if kind == 'scatter' else 'bands'}: {BAND}")
    if kind == "scatter":
        told.append(f"the last {LAST} tasks")
    elif kind == "curves":
        told += _point(panels[0], results[panels[0].experiment])
    elif kind == "returns" and AGENT_RIVALS.keys() & set(results[panels[0].experiment].arms):
        told.append("thin: not in the paper")
    return "; ".join(told)


def _counts(panels: Iterable[Panel], results: Mapping[str, Results]) -> list[int]:
    """The seeds of each arm that is drawn."""
    found = (
        len(results[panel.experiment].of(source(panel, arm), panel.metric))
        for panel in panels
        for arm in titles(panel)
    )
    return [number for number in found if number]


# ------------------------------------------------------------------------------- curves
def _curves(axes: Any, panel: Panel, results: Results) -> None:
    """Mean over seeds and standard error, against tasks."""
    usual, highest = 0.0, 0.0
    for arm, name in titles(panel).items():
        for metric in filter(None, (panel.metric, panel.dashed)):
            line = _thinned(panel, results, arm, metric)
            if line is None:
                continue
            drawn = look(arm) | ({"linestyle": "--"} if metric == panel.dashed else {})
            which = f", {'on' if metric == 'accuracy' else 'off'}line" if panel.dashed else ""
            curve(axes, line.samples, line.values, drawn, name + which, standard_error)
            middle = np.nanmean(line.values, 0)
            usual = max(usual, float(np.nanmedian(middle)))
            highest = max(highest, float(np.nanmax(middle)))
    if panel.metric == "loss" and highest > SURGE * usual > 0:
        axes.set_ylim(0, SURGE / 2 * usual)  # a curve that nearly diverges would hide the others
    axes.xaxis.get_major_locator().set_params(integer=True)
    along = "Task number" if _task_length(panel) else "Samples"
    if along == "Samples":
        _skip_start(axes)
        in_thousands(axes.xaxis)
    more = "; dashed: online" if panel.dashed else ""
    axes.set(xlabel=along, ylabel=AXES.get(panel.metric, panel.metric) + more)


def _skip_start(axes: Any) -> None:
    """Limits of the values after the first twentieth, in which all lines rise alike."""
    lines = [np.asarray(line.get_ydata()) for line in axes.get_lines()]
    later = np.concatenate([y[len(y) // 20 :] for y in lines])
    low, high = float(np.nanmin(later)), float(np.nanmax(later))
    room = 0.05 * max(high - low, 1e-6)
    axes.set_ylim(low - room, high + room)


def _thinned(panel: Panel, results: Results, arm: str, metric: str) -> Any:
    """An arm's line over tasks, or over samples where there are no tasks; None if there is none."""
    found = results.by_task(source(panel, arm), metric)
    length = _task_length(panel)
    window = results.window if length is None else max(1, results.window // length)
    return thin(Line(window, tuple(found), _stack(found)), POINTS) if found else None


def _point(panel: Panel, results: Results) -> list[str]:
    """How many tasks or samples a point is the mean of, if not of one task."""
    lines = (_thinned(panel, results, arm, panel.metric) for arm in titles(panel))
    steps = {line.samples[0] for line in lines if line is not None}
    several = max(steps, default=1)
    unit = "task" if _task_length(panel) else "sample"
    return [f"a point: {count(int(several), unit)}"] if several > 1 else []


def _task_length(panel: Panel) -> int | None:
    return get_problem(EXPERIMENTS[panel.experiment].problem).task_length


def _closer(axes: Any, panel: Panel, results: Results) -> None:
    """The first tasks and the last, side by side, at the resolution of windows."""
    options = EXPERIMENTS[panel.experiment].options
    per_task = int(options.get("task_length", results.window)) // results.window
    part = FEW * per_task
    x = np.arange(part) / per_task
    for arm, name in titles(panel).items():
        found = results.of(arm, panel.metric)
        if not found:
            continue
        values = _stack(found)
        tasks = values.shape[1] // per_task
        later = tasks > FEW
        curve(axes, x, values[:, :part], look(arm), "" if later else name, standard_error)
        if later:
            last = values[:, (tasks - FEW) * per_task : tasks * per_task]
            curve(axes, x + FEW + 0.3, last, look(arm), name, standard_error)
            places = [0.5, 1.5, FEW + 0.8, FEW + 1.8]
            axes.set_xticks(places, [str(task) for task in (1, 2, tasks - 1, tasks)])
    axes.axvspan(FEW, FEW + 0.3, color=RULE, linewidth=0)
    axes.set(xlabel="Task", ylabel=AXES[panel.metric])


def _returns(axes: Any, panel: Panel, results: Results) -> None:
    """Return against steps: mean over seeds and standard error; of rivals, the mean alone."""
    for arm, name in titles(panel).items():
        returns = returns_of(results, arm)
        if returns is None:
            continue
        steps = results.window * np.arange(1, returns.shape[1] + 1) / 1e6
        if arm in AGENT_RIVALS:
            drawn = look(arm) | {"linewidth": 1.0}
            axes.plot(steps, returns.mean(0), **drawn, label=name)
        else:
            curve(axes, steps, returns, look(arm), name, standard_error)
    axes.set_xlim(left=0)
    axes.tick_params(labelbottom=True)
    in_thousands(axes.yaxis)
    axes.set(xlabel="Steps (millions)", ylabel=AXES["return"])


# -------------------------------------------------------------------------------- points
def _scatter(axes: Any, panel: Panel, results: Results) -> None:
    """Means of the last tasks, a point per arm; rings for arms that are dashed elsewhere."""
    for arm, name in titles(panel).items():
        pair = [results.of(source(panel, arm), metric) for metric in ("plasticity", "accuracy")]
        if all(pair):
            means = [np.array([float(c[-LAST:].mean()) for c in found.values()]) for found in pair]
            errors = [float(metrics.standard_error(m)) if len(m) > 1 else 0.0 for m in means]
            x, y = (float(m.mean()) for m in means)
            shade, ring = colour(arm), look(arm)["linestyle"] != "-"
            axes.errorbar(x, y, *reversed(errors), fmt="none", color=shade, elinewidth=1)
            face = {"markerfacecolor": "white" if ring else shade}
            axes.plot(x, y, "o", color=shade, **face, label=name)
    axes.set(xlabel="Average plasticity", ylabel="Average online accuracy")


def _histogram(axes: Any, panel: Panel, results: Results) -> None:
    """Shares of weights by scaled utility, after the first task and after the last."""
    [arm] = titles(panel)
    found = [results.of(source(panel, arm), share) for share in UTILITIES]
    if not all(found):
        return  # others have been run
    by_bin = [_stack(each) for each in found]
    edges = np.linspace(0, 1, len(UTILITIES) + 1)
    first, last = (np.array([shares[:, task].mean() for shares in by_bin]) for task in (0, -1))
    axes.stairs(last, edges, fill=True, color=colour(arm), alpha=0.5, label="after the last task")
    axes.stairs(first, edges, color=INK, label="after the first task")
    axes.set(xlabel="Scaled utility", ylabel=AXES[panel.metric])
    axes.set(xlim=(0, 1), yscale="log", ylim=(RAREST, 1.5))


def _dots(axes: Any, panels: Sequence[Panel], results: Mapping[str, Results]) -> None:
    """Means over common tasks with 95% intervals; rings for printed sets."""
    found = [
        (panel.experiment in MAIN, arm, list(by_seed.values()))
        for panel in panels
        for arm in titles(panel)
        if (by_seed := results[panel.experiment].by_task(source(panel, arm), panel.metric))
    ]
    tasks = min((len(one) for *_, each in found for one in each), default=0)
    for printed, arm, each in found:
        mean, low, high = metrics.mean_interval([float(c[:tasks].mean()) for c in each])
        row, shade = METHODS.index(arm), colour(arm)
        axes.plot([low, high], [row, row], color=shade)
        axes.plot(mean, row, **_dot(printed), color=shade)
    for printed in sorted({printed for printed, *_ in found}):
        label = "printed set" if printed else "best set found here"
        axes.plot([], [], **_dot(printed), color=SOFT, label=label)
    axes.set_yticks(range(len(METHODS)), [title(method) for method in METHODS])
    axes.set_ylim(len(METHODS) - 0.5, -0.5)
    axes.grid(axis="y")
    axes.set_xlabel(f"{AXES[panels[0].metric]}, {tasks} tasks")
    told = [
        f"{what}: {seeds(counts)}"
        for is_ring, what in ((True, "rings"), (False, "dots"))
        if (counts := [len(some) for printed, _, some in found if printed == is_ring])
    ]
    footnote(axes, "; ".join([*told, "95% intervals"]))


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
        axes.text(j, i, text, ha="center", va="center", fontsize=SMALL, color="w" if dark else "k")
    axes.set_xticks(range(len(METHODS)), [title(m) for m in METHODS], rotation=30, ha="right")
    axes.set_yticks(range(len(MAIN)), [_row_name(name, panel, results) for name in MAIN])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(AXES[panel.metric])


def _row_name(name: str, panel: Panel, results: Mapping[str, Results]) -> str:
    """A problem with its number of seeds."""
    metric = "accuracy" if panel.metric == "forgetting" else "plasticity"
    mine = [Panel(name, metric)] if name in results else []
    counts = _counts(mine, results)
    return f"{SHORT[name]}\n{seeds(counts)}" if counts else SHORT[name]


KINDS: Mapping[Kind, Callable[[Any, Panel, Results], None]] = {
    "curves": _curves,
    "tasks": _closer,
    "returns": _returns,
    "scatter": _scatter,
    "histogram": _histogram,
}
"""What draws a panel of one experiment."""


# ---------------------------------------------------------------------------------- arms
def titles(panel: Panel) -> dict[str, str]:
    """Names and titles of the panel's arms that the experiment has."""
    known = {arm.name: arm.title for arm in EXPERIMENTS[panel.experiment].arms}
    return {arm: panel.names.get(arm, known[arm]) for arm in panel.arms if arm in known}


def source(panel: Panel, arm: str) -> str:
    """The arm under which this arm's runs are stored: identical learners run once."""
    return EXPERIMENTS[panel.experiment].twins().get(arm, arm)


def _stack(found: Mapping[int, NDArray[Any]]) -> NDArray[Any]:
    shortest = min(map(len, found.values()))
    return np.stack([values[:shortest] for values in found.values()])
