"""The page of the comparison, and its figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from prequential.evidence import Evidence, Scores, interval, verdict
from prequential.learners import LEARNERS
from prequential.runs import Result, Run
from prequential.streams import STREAMS
from upgd.pages.colours import BLUE, GREEN, INK, ORANGE, PINK, PURPLE
from upgd.report.plotting import (
    canvas,
    footnote,
    in_thousands,
    label_ends,
    made_look,
    plain,
    save,
    styled,
)
from upgd.report.plotting import (
    seeds as told_seeds,
)

OURS = "upgd"
DRAWN = {
    "upgd": made_look(BLUE),
    "adam-0.001-scaled": made_look(ORANGE),
    "mlp-scaled": made_look(PINK),
    "linear": made_look(INK, 1),
    "adaptive-tree": made_look(PURPLE, 1),
    "forest": made_look(GREEN, 1),
}
POINTS = 40
HEAD = """# Learners for a stream, test-then-train

`python benchmarks/stream.py table`; [runs](stream_runs.jsonl.gz){versions}.

Every sample is predicted, then learned, one at a time. The score is the share of right predictions
over the stream, in per cent; for regression R² × 100 relative to the mean of all targets so far,
without the first sample. Means over seeds with 95% bootstrap intervals. Files have one order: there
a seed decides the initial weights or the sampling of an ensemble, and learners without randomness
run once. Generated streams are a function of the seed, which all learners share.

All learners have their packages' defaults on every stream. PyTorch's and scikit-learn's networks
have {hidden} hidden units and know the classes beforehand. *Scaled*: inputs (and targets of
regression) standardised by the mean and variance of all samples so far; *raw*: pixels are in [0,
1], other inputs as they are. PyTorch's loops are compiled and scikit-learn's steps taken without
validation, after both were found to give the same numbers as the packages' own (`python
benchmarks/stream.py check`). Slow learners see the number of samples in the table, and comparisons
are made at equal numbers: those after which the slower one stops.

`upgd.stream` mixes six networks; every rival is one model, or river's ensemble of ten trees. Which
networks, and their step sizes, was decided on these files and on seed 0 of the generated streams,
before *sine*, *mixed*, *waveform* and *random-tree* were looked at; generated streams are compared
on other seeds. The sixth network, of SelfTunedSGD, was added later, after seeds 0 and 1 of nearly
all streams had been looked at. *One network* has {hidden} hidden units and UPGD's defaults.
"""


def page(results: Mapping[Run, Result], hidden: tuple[int, ...], picture: str) -> str:
    """The whole page as Markdown."""
    evidence = Evidence.of(results, hidden)
    parts = [
        HEAD.format(versions=versions(results), hidden="-".join(map(str, hidden))).strip(),
        f"![Accuracy over time on the streams that change]({picture})",
        "## Streams\n\n" + streams_table(evidence),
        "## The best of each family\n\n" + summary(evidence),
    ]
    if any(run.learner == OURS for run in evidence.results):
        parts.append(f"## {LEARNERS[OURS].title} against every rival\n\n" + leads(evidence))
    parts += ["## All learners", *(detail(evidence, stream) for stream in evidence.streams)]
    return "\n\n".join(parts) + "\n"


def versions(results: Mapping[Run, Result]) -> str:
    found: dict[str, set[str]] = {}
    for result in results.values():
        for name, version in result.versions.items():
            found.setdefault(name, set()).add(version)
    return "".join(f", {name} {' and '.join(sorted(v))}" for name, v in found.items())


def markdown(header: list[str], rows: Iterable[list[str]], left: int) -> str:
    """A table whose first `left` columns are text."""
    marks = ["---"] * left + ["---:"] * (len(header) - left)
    lines = [header, marks, *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def number(value: float) -> str:
    """In per cent; numbers without a meaning (R² of a learner that nearly diverged) are cut."""
    if math.isnan(value):
        return "diverged"
    if abs(value) > 10:
        return "> 1000" if value > 0 else "< −1000"
    return f"{100 * value:.1f}".replace("-0.0", "0.0").replace("-", "−")


def cell(values: Scores) -> str:
    """Mean and interval."""
    array = np.array(list(values.values()))
    between = interval(array)
    if not np.isfinite(array).all():
        return f"diverged ({int((~np.isfinite(array)).sum())} of {len(array)})"
    text = number(float(array.mean()))
    return text if between is None else f"{text} [{number(between[0])}, {number(between[1])}]"


def grouped(count: int) -> str:
    """As 100 000."""
    return f"{count:,}".replace(",", " ") if count >= 10_000 else str(count)


def streams_table(evidence: Evidence) -> str:
    rows = []
    for name in evidence.streams:
        kind = STREAMS[name]
        what = f"{kind.classes} classes" if kind.classes else "regression"
        order = "fixed" if kind.fixed else "by seed"
        rows.append([name, kind.about, kind.changes or "—", order, what, str(kind.features)])
    return markdown(["stream", "", "changes", "order", "target", "inputs"], rows, 5)


# ---------------------------------------------------------------------------- summary
def compared_at(evidence: Evidence, stream: str) -> int:
    """The samples that the slowest learner of a stream sees."""
    reach = [
        evidence.reach(stream, name)
        for name in evidence.learners(stream)
        if LEARNERS[name].family != "baseline"
    ]
    return min(reach)


def summary(evidence: Evidence) -> str:
    header = ["stream", "samples", "seeds", LEARNERS[OURS].title, "best neural"]
    header += ["Adam, best of three", "river's best three", "better baseline"]
    rows = []
    for stream in evidence.streams:
        samples = compared_at(evidence, stream)
        seeds = evidence.common_seeds(stream, samples)
        mean = {n: evidence.mean(stream, n, samples, seeds) for n in evidence.learners(stream)}

        def named(names: list[str], mean: dict[str, float] = mean) -> str:
            titles = [f"{number(mean[n])} {n}" for n in names if n in mean]
            return "; ".join(titles) or "—"

        ranked = {
            family: evidence.best(stream, family, samples, seeds)
            for family in ("neural", "river", "baseline")
        }
        adams = [n for n in ranked["neural"] if n.startswith("adam")]
        usual = [n for n in ranked["neural"] if not searched(n)]
        shown = "own" if seeds is None else str(len(seeds))
        rows.append([stream, grouped(samples), shown])
        rows[-1] += [number(mean[OURS]) if OURS in mean else "—"]
        rows[-1] += [named(usual[:1]), named(adams[:1])]
        rows[-1] += [named(ranked["river"][:3])]
        rows[-1] += [named(ranked["baseline"][:1])]
    text = markdown(header, rows, 1)
    return (
        "At the number of samples that all learners of the stream have seen. *Best neural*: with "
        "the usual step sizes, Adam's 0.001 and SGD's 0.01. *Best of three*: Adam's step size and "
        "scaling chosen in hindsight for the stream. *Seeds*: those that all learners have where a "
        "seed decides the samples; every learner's own on files.\n\n" + text
    )


def searched(learner: str) -> bool:
    """Whether a step size other than the usual one was tried."""
    return learner.startswith(("adam-0.0001", "adam-0.01"))


def leads(evidence: Evidence) -> str:
    """Ours against all others: leads by family, and sentences that count them."""
    found: dict[str, dict[str, list[tuple[str, str]]]] = {"neural": {}, "river": {}}
    rows = []
    for stream in evidence.streams:
        if OURS not in evidence.learners(stream):
            continue
        for rival in evidence.learners(stream):
            family = LEARNERS[rival].family
            if family not in found or not evidence.can_compare(stream, OURS, rival):
                continue
            lead, between, samples = evidence.lead(stream, OURS, rival)
            own = evidence.mean(stream, OURS, samples)
            judged = verdict(lead, between, math.isnan(own))
            found[family].setdefault(stream, []).append((rival, judged))
            if judged == "ahead":
                continue
            span = "" if between is None else f" [{number(between[0])}, {number(between[1])}]"
            rows.append([stream, LEARNERS[rival].title, grouped(samples)])
            rows[-1] += [f"{number(lead)}{span}", judged]
    sentences = [counted(found["neural"], "neural learner", "streams")]
    changing = {s: v for s, v in found["river"].items() if STREAMS[s].changes}
    still = {s: v for s, v in found["river"].items() if not STREAMS[s].changes}
    sentences.append(counted(changing, "learner of river", "streams that change"))
    sentences.append(counted(still, "learner of river", "other streams"))
    header = ["stream", "rival", "samples", "lead", ""]
    listed = markdown(header, rows, 2) if rows else "None."
    title = "Where it is not ahead (leads in points, 95% intervals; all samples equal):"
    return "\n".join(s for s in sentences if s) + f"\n\n{title}\n\n{listed}"


def counted(found: dict[str, list[tuple[str, str]]], what: str, where: str) -> str:
    """On how many streams a learner leads all rivals of a kind."""
    if not found:
        return ""
    wins = [s for s, rivals in found.items() if all(j == "ahead" for _, j in rivals)]
    least = [s for s, rivals in found.items() if all(j != "behind" for _, j in rivals)]
    text = f"- Ahead of every {what} on {len(wins)} of {len(found)} {where}, behind none on "
    return text + f"{len(least)}."


# ----------------------------------------------------------------------------- detail
def detail(evidence: Evidence, stream: str) -> str:
    kind = STREAMS[stream]
    keys = ("accuracy", "last", "kappa", "balanced") if kind.classes else ("r2", "last", "relative")
    titles = {
        "accuracy": "accuracy",
        "r2": "R²",
        "last": "last tenth",
        "kappa": "kappa",
        "balanced": "balanced",
        "relative": "absolute error",
    }
    header = ["learner", "samples", "seeds", *(titles[key] for key in keys)]
    ours = OURS in evidence.learners(stream)
    header += [f"{LEARNERS[OURS].title} at as many"] if ours else []
    rows: list[tuple[float, list[str]]] = []
    for learner in evidence.learners(stream):
        for samples, seeds in evidence.lengths(stream, learner).items():
            runs = {
                run.seed: result.scores
                for run, result in evidence.results.items()
                if (run.stream, run.learner, run.samples) == (stream, learner, samples)
            }
            columns = [
                cell({seed: scores[key] if scores else math.nan for seed, scores in runs.items()})
                for key in keys
            ]
            cells = [LEARNERS[learner].title, grouped(samples), str(len(seeds)), *columns]
            if ours:
                same = evidence.scores(stream, OURS, samples)
                cells.append(number(float(np.mean(list(same.values())))) if same else "—")
            mean = evidence.mean(stream, learner, samples)
            rows.append((-math.inf if math.isnan(mean) else mean, cells))
    rows.sort(key=lambda row: -row[0])
    return f"### {stream}\n\n" + markdown(header, (cells for _, cells in rows), 1)


# ----------------------------------------------------------------------------- figure
def curves(evidence: Evidence, stream: str, learner: str) -> tuple[np.ndarray, np.ndarray]:
    """Middles of spans of windows, and the score of each by seed [seeds, spans]."""
    kind, samples = STREAMS[stream], evidence.reach(stream, learner)
    chosen = [
        (run, result)
        for run, result in evidence.results.items()
        if (run.stream, run.learner) == (stream, learner)
        and run.samples >= samples
        and result.scores is not None
    ]
    whole = samples // kind.window
    per = max(1, whole // POINTS, kind.task // kind.window)
    per -= per % max(1, kind.task // kind.window)
    starts = np.arange(0, whole - per + 1, per)
    rows = []
    for _, result in chosen:
        windows = np.array(result.windows[:whole], dtype=float)
        if kind.classes:
            sums = np.add.reduceat(windows, starts)[: len(starts)]
            sizes = np.diff([*starts, whole]) * kind.window
            rows.append(sums / sizes)
        else:
            squared = np.add.reduceat(windows[:, 0], starts)
            reference = np.add.reduceat(np.array(result.reference)[:whole, 0], starts)
            rows.append(1 - squared / reference)
    middles = (starts + np.diff([*starts, whole]) / 2) * kind.window
    return middles, np.array(rows)


@styled()
def figure(results: Mapping[Run, Result], hidden: Iterable[int], path: Path) -> None:
    """Scores over time, a panel for every stream that changes."""
    evidence = Evidence.of(results, tuple(hidden))
    streams = [name for name in evidence.streams if STREAMS[name].changes]
    columns = 3
    height = -(-len(streams) // columns)
    picture, axes = canvas(height, columns, (14, 2.9 * height))
    for ax, stream in zip(axes.flat, streams, strict=False):
        _panel(ax, evidence, stream)
    for ax in axes.flat[len(streams) :]:
        ax.set_visible(False)
    label_ends(picture, *axes.flat[: len(streams)])
    path.parent.mkdir(parents=True, exist_ok=True)
    save(picture, path, path.with_suffix(".svg"), dpi=110)  # less than a megabyte


def _panel(ax: Any, evidence: Evidence, stream: str) -> None:
    """One stream: means over seeds, with 95% intervals where there are several seeds."""
    kind, floor, counts = STREAMS[stream], 1.0, []
    for learner, drawn in DRAWN.items():
        if learner not in evidence.learners(stream):
            continue
        x, rows = curves(evidence, stream, learner)
        if not len(rows):
            continue
        mean = rows.mean(0)
        width = 2.0 if learner == OURS else 1.3
        ax.plot(x, 100 * mean, **drawn, linewidth=width, label=plain(LEARNERS[learner].title))
        spans = [interval(column) for column in rows.T]
        if all(span is not None for span in spans):
            low, high = 100 * np.array(spans, dtype=float).T
            ax.fill_between(x, low, high, color=drawn["color"], alpha=0.2, linewidth=0)
        floor = min(floor, float(np.quantile(mean, 0.02)))
        counts.append(len(rows))
    about = kind.about.split(",")[0].split(";")[0]
    ax.set_title(f"{stream}: {about}\nchanges: {kind.changes}", fontweight="normal")
    ax.set_ylim(max(100 * floor - 5, -20), None)
    ax.set(xlabel="Samples", ylabel="Accuracy, %" if kind.classes else "R² × 100")
    in_thousands(ax.xaxis)
    footnote(ax, told_seeds(counts) + ("; bands: 95% intervals" if max(counts) > 1 else ""))
