"""What a comparison of optimizers found: a table, sentences and a figure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from upgd import metrics
from upgd.lab.training import POINTS, Outcome
from upgd.lab.views import Cells, Part, Picture
from upgd.ledger.files import check_generated, check_output
from upgd.report import plotting
from upgd.text import count

FIGURE = "compare.png"
ASIDE = 1.04
"""Partners' bars at one step size stand beside each other: the factors are this and its inverse."""


class Run(NamedTuple):
    """One optimizer at one step size with one seed."""

    optimizer: str
    lr: float
    seed: int
    outcome: Outcome


class Pair(NamedTuple):
    """Two optimizers of which a sentence tells."""

    ours: str
    theirs: str
    lr: float | None  # their own step size, where both share step sizes


@dataclass(frozen=True, repr=False)
class Comparison(Cells):
    """A row per optimizer and step size; with print() the table and the verdict.

    Attributes:
        runs: All runs, in the table's order.
        pairs: Which optimizers the verdict is about.
        metrics: What was measured; the first decides which step size is best.
        steps: Updates of a run.
    """

    runs: Sequence[Run]
    pairs: Sequence[Pair]
    metrics: Sequence[str]
    steps: int

    @property
    def groups(self) -> dict[tuple[str, float], list[Run]]:
        """The runs of each optimizer and step size."""
        found: dict[tuple[str, float], list[Run]] = {}
        for run in self.runs:
            found.setdefault((run.optimizer, run.lr), []).append(run)
        return found

    @property
    def best(self) -> dict[str, float]:
        """By optimizer, its best step size, among those at which no run diverged."""
        ranks: dict[str, list[tuple[tuple[float, ...], float]]] = {}
        for (name, lr), runs in self.groups.items():
            if not any(run.outcome.diverged for run in runs):
                merits = tuple(float(np.mean(self._merits(m, runs))) for m in self.metrics)
                ranks.setdefault(name, []).append((merits, lr))
        return {name: max(rank)[1] for name, rank in ranks.items()}

    def _merits(self, metric: str, runs: Sequence[Run]) -> list[float]:
        """Values of a metric of which larger is better."""
        sign = 1.0 if metric.endswith("accuracy") else -1.0
        return [sign * run.outcome.scores[metric] for run in runs]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table as mappings: means over seeds that did not diverge, with half the interval."""
        best, found = self.best, []
        for (name, lr), runs in self.groups.items():
            whole = [run.outcome for run in runs if not run.outcome.diverged]
            row: dict[str, Any] = {"optimizer": name, "lr": lr, "best": best.get(name) == lr}
            row |= {"seeds": len(whole), "diverged": len(runs) - len(whole)}
            for metric in self.metrics:
                values = [outcome.scores[metric] for outcome in whole]
                row[metric] = _estimate(values) if values else None
            row["ms/step"] = 1e3 * float(np.median([run.outcome.seconds for run in runs]))
            found.append(row)
        return found

    def parts(self) -> list[Part]:
        """The table."""
        return [Part("", self.cells())]

    def cells(self) -> list[list[str]]:
        """The table as text, its header first; the best step size of each optimizer is marked."""
        several = any(row["seeds"] >= metrics.FEWEST for row in self.rows)
        over = f" ± {metrics.INTERVAL}" if several else ""
        found = [["optimizer", "lr", *(metric + over for metric in self.metrics), "ms/step"]]
        for row in self.rows:
            mark = " *" if row["best"] else ""
            if row["diverged"]:
                seeds = count(row["seeds"] + row["diverged"], "seed")
                rest = ["-"] * (len(self.metrics) - 1)
                shown = [f"diverged ({row['diverged']} of {seeds})", *rest]
            else:
                shown = [_shown(metric, row[metric]) for metric in self.metrics]
            found.append(
                [row["optimizer"], f"{row['lr']:.3g}{mark}", *shown, f"{row['ms/step']:.2f}"]
            )
        return found

    def __str__(self) -> str:
        return "\n".join([super().__str__(), "", *self.verdict])

    __repr__ = __str__

    # ------------------------------------------------------------------------ the verdict
    @property
    def verdict(self) -> list[str]:
        """In sentences: what each of ours is ahead of or behind, and by how much."""
        best = self.best
        return [self._sentence(pair, best) for pair in self.pairs] + self._notes(best)

    def _sentence(self, pair: Pair, best: Mapping[str, float]) -> str:
        for name in (pair.ours, pair.theirs):
            if name not in best:
                return f"{name} diverged at every step size, so nothing is said of {pair.ours}."
        at = {name: f"{name} at lr {best[name]:.3g}" for name in pair[:2]}
        word, by, doubt = self._difference(*((name, best[name]) for name in pair[:2]))
        unit = "points of" if self.metrics[0].endswith("accuracy") else "in"
        what = f" {unit} {self.metrics[0]}" if by else ""
        text = f"{at[pair.ours]} is {word} {at[pair.theirs]}{by}{what}{doubt}"
        both = [run.outcome for run in self.runs if run.optimizer in pair[:2] and run.lr == pair.lr]
        told = {best[name] for name in pair[:2]} == {pair.lr}
        if both and not told and not any(outcome.diverged for outcome in both):
            assert pair.lr is not None
            word, by, doubt = self._difference((pair.ours, pair.lr), (pair.theirs, pair.lr))
            text += f"; with both at lr {pair.lr:.3g}, {word} it{by}{doubt}"
        return text + "."

    def _difference(
        self, ours: tuple[str, float], theirs: tuple[str, float]
    ) -> tuple[str, str, str]:
        """The word for a difference of the first metric over paired seeds, its size, a doubt."""
        groups, metric = self.groups, self.metrics[0]
        pairs = zip(*(self._merits(metric, groups[key]) for key in (ours, theirs)), strict=True)
        lead = [mine - other for mine, other in pairs]
        if not any(lead):
            return "level with", "", ""
        mean, half = _estimate(lead)
        points = metric.endswith("accuracy")
        size = f"{100 * abs(mean):.1f}" if points else f"{abs(mean):.3g}"
        if half is not None:
            size += f" ± {100 * half:.1f}" if points else f" ± {half:.2g}"
        if len(lead) == 1:
            doubt = " (one seed: an example, not evidence)"
        else:
            clear = half is not None and abs(mean) > half
            doubt = "" if clear else f" (not clear from {len(lead)} seeds)"
        return "ahead of" if mean > 0 else "behind", f" by {size}", doubt

    def _notes(self, best: Mapping[str, float]) -> list[str]:
        """Optimizers that might do better at step sizes that were not tried."""
        found = []
        for name, lr in best.items():
            tried = [run.lr for run in self.runs if run.optimizer == name]
            for end, word in ((min(tried), "smallest"), (max(tried), "largest")):
                if lr == end and min(tried) < max(tried):
                    found.append(f"The best lr of {name} is the {word} that was tried.")
        return found

    # ------------------------------------------------------------------------- the figure
    def plot(self, path: str | os.PathLike[str] | None = None) -> Picture:
        """Draw the training loss at each best step size, and the first metric by step size.

        Args:
            path: The figure; by default ``compare.png`` here.

        Returns:
            The figure's file; a notebook shows it.
        """
        target = check_figure(path)
        with plotting.styled():
            self._draw(target)
        return Picture(target)

    def _draw(self, target: Path) -> None:
        figure, [[left, right]] = plotting.canvas(1, 2, (9.5, 4))
        names = list(dict.fromkeys(run.optimizer for run in self.runs))
        ours = {pair.ours for pair in self.pairs}
        for number, name in enumerate(names):
            look: dict[str, Any] = dict(plotting.look(number))
            if name not in ours:  # dashed and in front: lines of partners often coincide
                look |= {"linestyle": "--", "zorder": 3}
            self._draw_loss(left, name, look)
            aside = ASIDE if name in ours else 1 / ASIDE
            self._draw_metric(right, name, look, aside, bottom=0.03 * (number + 1))
        left.set(xlabel="Step", ylabel="Training loss", title="At each best step size")
        first = self.metrics[0].capitalize()
        right.set(xlabel="Step size (lr)", ylabel=first, title="By step size (×: diverged)")
        right.set_xscale("log")
        drawn = np.concatenate([line.get_ydata() for line in left.get_lines()])
        if drawn.min(initial=1.0) > 0 and drawn.max(initial=1.0) > 20 * drawn.min(initial=1.0):
            left.set_yscale("log")
        told = plotting.seeds([len(runs) for runs in self.groups.values()])
        for axes, what in ((left, "bands"), (right, "bars")):
            plotting.footnote(axes, told + self._bands(what))
        plotting.legend(figure, [left])
        plotting.save(figure, target)

    def _bands(self, what: str) -> str:
        """What bands or bars are, where there are any."""
        several = any(row["seeds"] >= metrics.FEWEST for row in self.rows)
        return f"; {what}: {metrics.INTERVAL}" if several else ""

    def _draw_loss(self, axes: Any, name: str, look: Mapping[str, Any]) -> None:
        lr = self.best.get(name)
        if lr is None:
            axes.plot([], [], **look, label=plotting.plain(f"{name}, diverged"))
            return
        curves = np.stack([run.outcome.curve for run in self.groups[name, lr]])
        taken = np.isfinite(curves[0])
        curves, x = curves[:, taken], (np.arange(POINTS)[taken] + 1) * self.steps / POINTS
        plotting.curve(axes, x, curves, look, f"{name}, lr {lr:.3g}")

    def _draw_metric(
        self, axes: Any, name: str, look: Mapping[str, Any], aside: float, bottom: float
    ) -> None:
        rows = [row for row in self.rows if row["optimizer"] == name]
        good = [row for row in rows if not row["diverged"]]
        values = [row[self.metrics[0]] for row in good]
        halves = [half or 0.0 for _, half in values]
        means = [mean for mean, _ in values]
        places = [aside * row["lr"] for row in good]
        axes.errorbar(places, means, halves, **look, marker="o", markersize=4)
        for row in (row for row in rows if row["diverged"]):
            place = axes.get_xaxis_transform()  # heights in parts of the axis
            axes.plot(aside * row["lr"], bottom, "x", color=look["color"], transform=place)


def check_figure(path: str | os.PathLike[str] | None) -> Path:
    """The figure's file; raises StudyError if it cannot be written, before anything is trained."""
    target = Path(FIGURE if path is None else path)
    plotting.check_format(target)
    check_output(target)
    if path is None:
        check_generated(target)
    return target


def _estimate(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and half of its interval, which few values do not have."""
    half = float(metrics.half_width(values))
    return float(np.mean(values)), None if np.isnan(half) else half


def _shown(metric: str, estimate: tuple[float, float | None]) -> str:
    mean, half = estimate
    form = ".4f" if metric.endswith("accuracy") or 0.01 <= abs(mean) < 1e3 else ".3g"
    return f"{mean:{form}}" + ("" if half is None else f" ± {half:{form}}")
