"""Parts of pages: provenance, result tables, the paper's own tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from upgd.metrics import DIAGNOSTICS, STRIDED, Interval
from upgd.paper import evidence as ev
from upgd.paper import policy_collapse
from upgd.paper.experiments import EXPERIMENTS, PRINTED, Experiment, title
from upgd.paper.figures import Figure
from upgd.paper.found import Found, Sets, Tried, read
from upgd.paper.grids import AXES, OUTSIDE, grid, sets
from upgd.paper.provenance import Provenance
from upgd.paper.results import Results
from upgd.paper.searches import SEARCHES, Search
from upgd.paper.sets import BEST, MAIN, METHODS, best
from upgd.report.verdict import told
from upgd.streams import DATASETS
from upgd.streams import get as get_problem
from upgd.text import duration

_GREEK = {
    "lr": "α", "sigma": "σ", "beta_utility": "β_u", "weight_decay": "λ", "kappa": "κ",
    "beta_importance": "β_I", "beta_weight": "β_w", "beta1": "β₁", "beta2": "β₂", "eps": "ε",
}  # fmt: skip
"""The paper's letters, in the order of tables."""
_NAMES = (*_GREEK, "output_gate")
"""Hyperparameters in that order."""
_HERE = "Sets are hyperparameters here; `upgd.paper.sets.from_paper` converts printed ones."

_OLDER = (
    "zero activations are the mean of the layers' shares, and they and gradient norms are measured "
    "at steps 0, 100, 200 and so on, which always include each task's first sample; runs of today "
    "pool layers and measure at random steps, and will replace them"
)


# ------------------------------------------------------------------------------- sources
def source(known: Provenance | None, metrics: Iterable[str] = ()) -> list[str]:
    """What ran, where, and how to reproduce it; `metrics` are those of the table."""
    if known is None:
        return ["Where these numbers come from is not known.", ""]
    most = max((len(seeds) for seeds in known.seeds.values()), default=0)
    fewer = [f"{arm} {len(seeds)}" for arm, seeds in known.seeds.items() if len(seeds) < most]
    each = f"{most} seeds, {spaced(known.steps)} steps each" if known.steps else f"{most} rounds"
    arms = "1 arm" if len(known.seeds) == 1 else f"{len(known.seeds)} arms"
    runs = f"{arms}, {each}"
    rows = {
        "runs": runs + (f" (fewer seeds: {', '.join(fewer)})" if fewer else ""),
        "options": ", ".join(f"{k} {v}" for k, v in known.options.items()),
        "data": _data(known.data),
        "diverged": ", ".join(f"{arm} {len(seeds)}" for arm, seeds in known.diverged.items()),
    }
    if known.diagnostics < DIAGNOSTICS and set(metrics) & set(STRIDED):
        rows["older diagnostics"] = _OLDER
    for part in known.parts:
        versions = ", ".join(f"{name} {version}" for name, version in part.versions.items())
        rules = f", rules {part.rules}" if part.rules else ""
        days = part.began if part.began == part.ended else f"{part.began} to {part.ended}"
        where = f"{part.device}: {part.runs} runs, {duration(part.seconds)} of work, {days}"
        with_ = f"engine {part.engine}, {part.dtype}{rules}, {versions}"
        rows["ran on" + " " * (len(rows) - 4)] = f"{where}; {with_}"
    body = [f"| {name.strip()} | {text} |" for name, text in rows.items() if text]
    return [f"```\n{known.command}\n```", "", "| | |", "|---|---|", *body, ""]


def _data(data: Mapping[str, object] | None) -> str:
    if data is None:
        return ""
    name, samples = str(data["name"]), data.get("samples")
    if not isinstance(samples, dict):
        return name
    text = f"{name}, {' + '.join(map(spaced, samples.values()))} samples"
    published = DATASETS[name].published if name in DATASETS else ()
    if published and tuple(samples.values()) != published:
        text += f", not the published {' + '.join(map(spaced, published))}"
    sums = data.get("sha256")
    if isinstance(sums, dict):
        text += f"; SHA-256 of the training split {sums['train'][:16]}…"
    return text


def briefly(known: Provenance | None) -> list[str]:
    """Runs, steps, devices and time, as cells."""
    if known is None:
        return ["-", "-", "-", "-"]
    devices = ", ".join(dict.fromkeys(part.device for part in known.parts))
    steps = spaced(known.steps) if known.steps else "-"
    return [str(known.runs), steps, devices, duration(known.seconds)]


def took(known: Provenance) -> str:
    """The same in words."""
    devices = ", ".join(dict.fromkeys(part.device for part in known.parts))
    runs = f"{known.runs} runs of {spaced(known.steps)} in " if known.steps else ""
    return f"{runs}{duration(known.seconds)} on {devices}"


def learner_steps(experiment: Experiment) -> int:
    """Steps of all runs of an experiment at full scale, with arms whose sets are not known yet."""
    arms = len(experiment.arms) - len(experiment.twins()) + len(experiment.awaited)
    return arms * experiment.seeds * experiment.steps


def listed(lacking: Iterable[str]) -> str:
    """What a figure lacks, by experiment."""
    found: dict[str, list[str]] = {}
    for each in lacking:
        name, _, what = each.partition(": ")
        found.setdefault(name, []).extend([what] if what else [])
    return ", ".join(f"{n} ({', '.join(some)})" if some else n for n, some in found.items())


# ------------------------------------------------------------------------------- numbers
def numbers(results: Results) -> list[str]:
    """The table of an experiment's methods."""
    experiment = EXPERIMENTS[results.name]
    if experiment.agents:
        return policy_collapse.numbers(results)
    metric = "accuracy" if "accuracy" in results.series else "loss"
    tasks = min(len(x) for arm in results.arms for x in results.by_task(arm, metric).values())
    chosen, unit = ev.parts(tasks), _unit(experiment, results)
    early, late = (told(part, unit) for part in chosen) if chosen else ("early", "late")
    first = told(range(min(10, tasks)), unit)
    header = [f"{metric}, all {unit}s", first, early, late, "change [95%]", "plasticity"]
    header += ["forgetting", "loss of plasticity"] if unit == "task" else []
    lines = [f"| method | {' | '.join(header)} |", "|---|" + "---:|" * len(header)]
    twins, titles = experiment.twins(), {arm.name: arm.title for arm in experiment.arms}
    for arm in experiment.arms:
        same = twins.get(arm.name)
        there = (same or arm.name) in results.arms
        if same or not there:
            gone = arm.name in results.diverged
            told_ = f"is {titles[same]}" if same else "diverged" if gone else ""
            lines += [f"| {arm.title} | {told_} |{' |' * (len(header) - 1)}"] if told_ else []
            continue
        whole = range(tasks)
        ranges = [whole, range(min(10, tasks)), *(chosen or ())]
        cells = [
            _estimate(ev.mean_over(results, arm.name, metric, some), metric) for some in ranges
        ]
        cells += [_with_interval(ev.change(results, arm.name, metric), metric)]
        cells += [_estimate(ev.mean_over(results, arm.name, "plasticity", whole), "plasticity")]
        if unit == "task":
            cells += [_with_interval(ev.forgotten(results, arm.name), "accuracy")]
            cells += [_with_interval(ev.plasticity_lost(results, arm.name), "plasticity")]
        lines.append(f"| {arm.title}{_less_seeds(results, arm.name)} | {' | '.join(cells)} |")
    note = f"Means over seeds; change is {late} less {early}, intervals are Student's over seeds. "
    note += "Losses are as they are, shares ×100." if metric == "loss" else "All numbers are ×100."
    if unit == "task":
        note += " Forgetting and loss of plasticity as in the paper; less is better."
    if unit == "point":
        length = get_problem(experiment.problem).task_length or 1
        note += f" A point is {results.window // length} tasks."
    return [*lines, "", note]


def beside_printed(found: Results, printed: Results) -> list[str]:
    """Found sets beside the printed ones, over the tasks and seeds that both have."""
    both, experiment = _together(found, printed, "accuracy"), EXPERIMENTS[found.name]
    header = ["set found", "accuracy", "printed set", "accuracy", "found less printed [95%]"]
    lines = [f"| method | {' | '.join(header)} |", "|---|---|---:|---|---:|---:|"]
    for arm in experiment.arms:
        if ev.diverged(found, arm.name)[1]:  # it ran
            other, cells = arm.name + PRINTED, []
            for name, results, hyper in (
                (arm.name, found, arm.hyper),
                (other, printed, best(experiment.problem, arm.name)),
            ):
                mean = ev.over_seeds(both, name, "accuracy", lambda x: float(np.nanmean(x)))
                cells += [_named(hyper) + _less_seeds(results, arm.name)]
                cells += [_estimate(mean, "accuracy")]
            cells += [_with_interval(ev.lead(both, arm.name, other), "accuracy")]
            lines.append(f"| {arm.title} | {' | '.join(cells)} |")
    return [*lines, "", f"Accuracy over all tasks, ×100, of seeds that both sets have. {_HERE}"]


def _together(found: Results, printed: Results, metric: str) -> Results:
    """A metric over the tasks and seeds that both have; arms with printed sets are marked."""
    series: dict[str, Mapping[int, NDArray[np.float64]]] = {}
    for arm in found.arms:
        mine, theirs = found.of(arm, metric), printed.of(arm, metric)
        pairs = {s: (mine[s], theirs[s]) for s in mine.keys() & theirs.keys()}
        windows = min((len(curve) for pair in pairs.values() for curve in pair), default=0)
        for name, which in ((arm, 0), (arm + PRINTED, 1)):
            series[name] = {seed: pair[which][:windows] for seed, pair in pairs.items()}
    return Results(found.name, found.window, {metric: series})


def _less_seeds(results: Results, arm: str) -> str:
    """The number of an arm's diverged seeds, if there are any."""
    gone, all_ = ev.diverged(results, arm)
    return f" ({gone} of {all_} seeds diverged)" if gone else ""


def _unit(experiment: Experiment, results: Results) -> str:
    """The unit of a value: a task, several tasks, or a window where there are no tasks."""
    problem = get_problem(experiment.problem)
    length = int(experiment.options.get("task_length", 0)) or problem.task_length
    if length is None:
        return "window"
    return "task" if results.window <= length else "point"


def _estimate(found: Interval | None, metric: str) -> str:
    return "-" if found is None or np.isnan(found.estimate) else _number(found.estimate, metric)


def _with_interval(found: Interval | None, metric: str) -> str:
    if found is None or np.isnan(found.estimate):
        return "-"
    value, low, high = (_number(x, metric, "+") for x in found)
    return value if np.isnan(found.low) else f"{value} [{low}, {high}]"


def _number(value: float, metric: str, sign: str = "") -> str:
    """Fractions ×100 with two decimals, losses with four digits."""
    text = f"{value:{sign}.4g}" if metric == "loss" else f"{round(100 * value, 2) + 0.0:{sign}.2f}"
    return text.replace("-", "−", 1) if value < 0 else text


# ---------------------------------------------------------------------- the paper's tables
def grid_table() -> list[str]:
    """The values that the paper searched, as printed, by problem and hyperparameter."""
    problems: dict[str, list[str]] = {}
    for problem, axes in AXES.items():
        problems.setdefault(repr(axes), []).append(problem)
    lines = ["| | " + " | ".join(f"`{p[0]}`" for p in problems.values()) + " |"]
    lines.append("|---|" + "---|" * len(problems))
    for name in _GREEK:
        cells = [", ".join(f"{v:g}" for v in AXES[p[0]][name]) for p in problems.values()]
        lines.append(f"| {_GREEK[name]} | {' | '.join(cells)} |")
    counts = {p[0]: {m: len(sets(grid(p[0], m))) for m in METHODS} for p in problems.values()}
    for method in METHODS:
        cells = [f"{counts[p][method]} sets" for p in counts]
        lines.append(f"| {title(method)} | {' | '.join(cells)} |")
    also = [f"`{p[0]}`: {', '.join(f'`{x}`' for x in p[1:])}" for p in problems.values() if p[1:]]
    return [*lines, "", f"The same grids: {'; '.join(also)}."]


def set_table() -> list[str]:
    """The sets that the paper prints as best, as printed; a star: the value is not on its grid."""
    lines = ["| | " + " | ".join(f"`{p}`" for p in BEST) + " |", "|---|" + "---|" * len(BEST)]
    for method in METHODS:
        cells = [_set(problem, method) for problem in BEST]
        lines.append(f"| {title(method)} | {' | '.join(cells)} |")
    return [*lines, "", "\\* not on the printed grid."]


def search_table() -> list[str]:
    """The searches and their size."""
    lines = [
        "| problem | arms | sets | seeds | stages: steps × runs | learner-steps |",
        "|---|---:|---:|---:|---|---:|",
    ]
    for search in SEARCHES.values():
        sets_ = sum(len(search.sets(arm)) for arm in search.arms)
        stages = ", then ".join(_stage(search, i) for i in range(len(search.stages)))
        cells = [f"`{search.problem}`", len(search.arms), sets_, search.seeds, stages]
        steps = f"{search.learner_steps / 1e6:.0f} M"
        lines.append(f"| {' | '.join(map(str, cells))} | {steps} |")
    return lines


def searched_in_part(figure: Figure, found: Sets | None = None) -> str:
    """A sentence about arms whose sets were chosen from a part of their grids."""
    known = read() if found is None else found
    parts_: dict[str, int] = {}
    for experiment in (EXPERIMENTS[name] for name in figure.run):
        for arm in experiment.arms:
            one = known.get(experiment.problem, {}).get(arm.name)
            if one is not None and one.hyper == arm.hyper:
                whole = len(SEARCHES[experiment.problem].sets(arm.name))
                text = f"{one.sets} of {whole} sets"
                parts_[text] = parts_.get(text, 0) + (one.sets < whole)
    return "".join(
        f" {'An arm was' if count == 1 else f'{count} arms were'} searched over {text} of the grid."
        for text, count in parts_.items()
        if count
    )


def _stage(search: Search, number: int) -> str:
    stage = search.stages[number]
    at = f" at every {_GREEK[stage.each]}" if stage.each else ""
    best = f" (best {stage.sets}{at})" if stage.sets else ""
    return f"{spaced(stage.steps)} × {spaced(search.runs(stage))}{best}"


def found_table(found: Sets | None = None) -> list[str]:
    """The sets found here, how they were chosen, and the results of the printed ones."""
    known = read() if found is None else found
    if not known:
        return ["None yet."]
    lines = []
    for problem in (name for name in SEARCHES if name in known):
        arms = known[problem]
        names = [arm for arm in SEARCHES[problem].arms if arm in arms]
        metric = arms[names[0]].metric
        header = f"| | set | {metric} [95%] | seeds, steps | sets tried, diverged | second best |"
        lines += [f"`{problem}`", "", f"{header} printed set |", "|---|---|---:|---:|---:|---|---|"]
        lines += [*(_found_row(problem, arm, arms[arm]) for arm in names), ""]
    return [_HERE, "", *lines[:-1]]


def _found_row(problem: str, arm: str, one: Found) -> str:
    between = "" if one.low is None else f" [{one.low:.4g}, {one.high:.4g}]"
    cells = [
        title(arm, problem in MAIN),
        _named(one.hyper),
        f"{one.mean:.4g}{between}",
        f"{len(one.seeds)}, {spaced(one.steps)}",
        f"{' → '.join(map(str, one.stages or (one.sets,)))}, {one.diverged}",
        _told_of(one.runner_up, one.steps),
        "it is" if one.printed and one.printed.hyper == one.hyper else _told_of(one.printed, 0),
    ]
    return f"| {' | '.join(cells)} |"


def _told_of(one: Tried | None, steps: int) -> str:
    if one is None:
        return "-"
    seeds = "1 seed" if one.diverged == 1 else f"{one.diverged} seeds"
    gave = f"{seeds} diverged" if one.mean is None else f"{one.mean:.4g}"
    after = "" if one.steps == steps else f" after {spaced(one.steps)}"
    return f"{_named(one.hyper)}: {gave}{after}"


def _named(hyper: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {hyper[name]:g}" for name in _NAMES if name in hyper)


def _set(problem: str, method: str) -> str:
    found = BEST[problem].get(method)
    if found is None:
        return "-"
    star = {name for p, m, name in OUTSIDE if (p, m) == (problem, method)}
    return ", ".join(f"{_GREEK[k]} {v:g}" + ("\\*" if k in star else "") for k, v in found.items())


# ---------------------------------------------------------------------------- for people
def spaced(number: int) -> str:
    """A whole number in groups of three."""
    return f"{number:,}".replace(",", " ")
