"""The page and the figure about defaults, from the evidence."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ordinary.evidence import (
    Choice,
    Comparison,
    Measured,
    Row,
    Unit,
    best,
    choose,
    compare,
    default_set,
    own_optimizers,
    rank,
)
from ordinary.runs import TORCH, Hyper
from ordinary.tasks import TASKS
from upgd.optim import registry
from upgd.report.plotting import SMALL, TINY, canvas, save, styled
from upgd.text import count, pairs

TITLES = {"sgd": "SGD", "sgd-momentum": "SGD, momentum 0.9", "adam": "Adam"}
COMPARED = {
    ("sgd", "upgd"): (0.01, 0.03, 0.1),
    ("adam", "ada-upgd"): (1e-3, 3e-3, 3e-4),
    ("sgd-momentum", "upgd-momentum"): (0.003, 0.01, 0.03),
}
"""Which optimizers are compared at which step sizes, the default first; 3e-4 is of PPO."""
UNTOLD = ("lr", "beta1", "beta2", "eps")  # not part of what is chosen
SHOWN_SETS = 10
FEW = 2  # an optimizer with so many sets or rows is not drawn beside others with more
DARKEST = 10.0  # points; larger regrets have the same colour

METHOD = """\
**Regret.** For one optimizer at its default step size, and one row: how far a set's mean over
seeds is from the best mean of all sets of this optimizer at this step size, in points of accuracy,
for squared errors in points of explained variance, for other losses and returns in per cent of the
best. A set's worst regret is its largest over rows; the smallest of these is the first. ± is the
standard error of the difference to the best set of that row, paired by seed."""

READING = """\
Both optimizers have the same step size, initial weights and batches; the package's has its
defaults otherwise. Mean ± standard error over seeds; accuracies in per cent. *Behind*, *ahead*: by
more than the standard error of the difference of the two means. The lead, positive where the
package's optimizer is better, is paired by seed, which shows much smaller differences: bold where
it is below minus its own standard error. Diverged runs count as accuracy 0, or the row's worst."""


def title(optimizer: str) -> str:
    return TITLES.get(optimizer) or registry.METHODS[optimizer].title


def number(unit: Unit, value: Measured, sign: str = "") -> str:
    """A mean and its standard error; accuracies in per cent. With a `sign` it is a difference."""
    if unit == "accuracy":
        text, error = f"{100 * value.mean:{sign}.2f}", f"{100 * value.error:.2f}"
    elif unit == "return":
        text, error = f"{value.mean:{sign}.0f}", f"{value.error:.0f}"
    else:
        digits = 2 if sign else 4
        text, error = f"{value.mean:{sign}.{digits}g}", f"{value.error:.2g}"
    return text if math.isnan(value.error) else f"{text} ± {error}"


def lead(found: Comparison) -> str:
    text = number(found.row.unit, found.lead, "+")
    return f"**{text}**" if found.is_behind_by_seed else text


def verdict(found: Comparison) -> str:
    if math.isnan(found.lead.error):
        return "one seed"
    if found.is_behind:
        behind = number(found.row.unit, Measured(-found.lead.mean, math.nan), "-")
        return f"**behind by {behind}**"
    return "ahead" if found.is_ahead else "not behind"


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table; columns of numbers are aligned to the right."""
    body = list(lines)
    columns = zip(*body, strict=True)
    numeric = (all(re.match(r"[+-]?\d", cell) for cell in column) for column in columns)
    rule = ["---:" if right else "---" for right in numeric]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *body])


# ------------------------------------------------------------------------- sections
def comparisons(rows: Iterable[Row], peer: str, own: str) -> list[Comparison]:
    found = (compare(row, peer, own, lr) for row in rows for lr in COMPARED[peer, own])
    return [each for each in found if each is not None]


def compared(rows: Sequence[Row], peer: str, own: str) -> str:
    """A table of one pair, with the count of verdicts above it; empty if it was not run."""
    if not any(row.sets(peer) and row.sets(own) for row in rows):
        return ""
    found = comparisons(rows, peer, own)
    values = {k: v for k, v in default_set(own, COMPARED[peer, own][0]) if k not in UNTOLD}
    head = f"{title(own)} with defaults ({pairs(values)}) against {title(peer)}: "
    if not found:
        return head + "not run."
    behind = sum(each.is_behind for each in found)
    ahead = sum(each.is_ahead for each in found)
    by_seed = sum(each.is_behind_by_seed for each in found)
    head += f"ahead in {ahead} of {len(found)}, behind in {behind} "
    head += f"(seed by seed in {by_seed}).\n\n"
    lines = (
        [
            *(f"{each.row.name}", f"{each.lr:g}"),
            *(number(each.row.unit, each.peer), number(each.row.unit, each.own)),
            *(lead(each), verdict(each)),
        ]
        for each in found
    )
    return head + markdown(["", "lr", title(peer), title(own), "lead", "verdict"], lines)


def varied(sets: Iterable[Hyper]) -> dict[Hyper, dict[str, float]]:
    """Of each set the hyperparameters in which they differ, the step size first."""
    found = {hyper: dict(hyper) for hyper in sets}
    names = {name for each in found.values() for name in each}
    kept = [n for n in names if len({each.get(n) for each in found.values()}) > 1]
    kept.sort(key=lambda name: (name != "lr", name))
    return {hyper: {n: each[n] for n in kept if n in each} for hyper, each in found.items()}


def symbols(optimizer: str, values: Mapping[str, float]) -> str:
    """Hyperparameters in few characters, for figures: the u of β_u is an index."""
    known = registry.METHODS[optimizer].hyper
    parts = (f"{_index(known[n].symbol) if n in known else n} {v:g}" for n, v in values.items())
    return ", ".join(parts)


def _index(symbol: str) -> str:
    letter, _, index = symbol.partition("_")
    return rf"$\mathregular{{{letter}_{{{index}}}}}$" if index else symbol


def best_of_each(rows: Mapping[str, Row]) -> str:
    lines = []
    for row in rows.values():
        for optimizer in [*TORCH, *own_optimizers(rows)]:
            found = best(row, optimizer)
            if found is not None:
                text = pairs(varied(row.sets(optimizer))[found[0]]) or "one set"
                lines.append([row.name, title(optimizer), number(row.unit, found[1]), text])
    return markdown(["", "optimizer", "best", "at"], lines)


def chosen(choice: Choice) -> str:
    """The sets with the smallest worst regrets, and the default wherever it stands."""
    texts = varied(choice.regrets)
    default = default_set(choice.optimizer, choice.lr)
    lines = []
    for place, (hyper, regrets) in enumerate(choice.regrets.items(), 1):
        if place <= SHOWN_SETS or hyper == default:
            worst = choice.worst(hyper)
            value = regrets[worst]
            error = "" if math.isnan(value.error) else f" ± {value.error:.2f}"
            mark = ", the default" if hyper == default else ""
            name = f"{pairs(texts[hyper])}{mark}"
            lines.append([name, f"{place}", f"{value.mean:.2f}{error}", worst])
            lines[-1].append(f"{rank(regrets)[1]:.2f}")
    text = (
        f"### {title(choice.optimizer)} at lr {choice.lr:g}\n\n"
        f"{count(len(choice.regrets), 'set')} on {count(len(choice.rows), 'row')}"
        f" ({', '.join(row.name for row in choice.rows)})."
    )
    if choice.incomplete:
        text += f" Left out, for a row or a seed is missing: {count(choice.incomplete, 'set')}."
    if choice.skipped:
        text += f" Not counted, for few sets were run there: {', '.join(choice.skipped)}."
    if default not in choice.regrets:
        text += " The default is not among them."
    header = ["set", "place", "worst regret", "on", "mean regret"]
    return f"{text}\n\n{markdown(header, lines)}"


def tasks(rows: Mapping[str, Row]) -> str:
    lines = [
        [name, task.title, f"{task.steps}", f"{task.batch}"]
        for name, task in TASKS.items()
        if name in rows
    ]
    return markdown(["task", "what", "steps", "batch"], lines)


def choices(rows: Mapping[str, Row]) -> list[Choice]:
    """Of the optimizers of which there are sets to choose from."""
    found = (choose(rows, optimizer) for optimizer in own_optimizers(rows))
    return [choice for choice in found if len(choice.regrets) > 1]


def page(
    rows: Mapping[str, Row], fresh: Mapping[str, Row], command: str, picture: str, machine: str
) -> str:
    """The page; comparisons are made by `fresh` rows, the choice by the others."""
    ordinary = [row for row in fresh.values() if row.is_ordinary]
    others = [row for row in fresh.values() if not row.is_ordinary]
    head = "# Defaults, and the evidence for them\n\n"
    head += f"`{command}`" + (f"; {machine}" if machine else "") + "."
    parts = [head, "## At the same step size", READING]
    for label, some in (("Ordinary work", ordinary), ("Streams and agents", others)):
        found = [text for pair in COMPARED if (text := compared(some, *pair))]
        parts += [f"### {label}", *found] if found else []
    parts += ["## The best of each optimizer", best_of_each(rows)]
    if selections := choices(rows):
        parts += ["## The choice", METHOD, *map(chosen, selections)]
        parts += [f"![regret of every set on every row]({picture})"]
    if any(row.is_ordinary for row in rows.values()):
        parts += ["## The tasks", tasks(rows)]
    return "\n\n".join(parts) + "\n"


@styled()
def figure(rows: Mapping[str, Row], path: Path) -> None:
    """Regrets as colours: a panel per optimizer, a line per set, a column per row."""
    found = choices(rows)
    selections = [c for c in found if len(c.regrets) > FEW and len(c.rows) > FEW] or found
    if not selections:
        return
    most = max(len(choice.regrets) for choice in selections)
    width = 3 + 0.35 * len(selections[0].rows)
    drawn, axes = canvas(1, len(selections), (width * len(selections), 1.8 + 0.17 * most))
    for axis, choice in zip(axes[0], selections, strict=True):
        names = [row.name for row in choice.rows]
        values = [[found[name].mean for name in names] for found in choice.regrets.values()]
        image = axis.imshow(np.array(values), cmap="Blues", vmin=0, vmax=DARKEST, aspect="auto")
        texts, default = varied(choice.regrets), default_set(choice.optimizer, choice.lr)
        labels = [
            symbols(choice.optimizer, texts[hyper]) + (" (default)" if hyper == default else "")
            for hyper in choice.regrets
        ]
        axis.set_yticks(range(len(labels)), labels, fontsize=TINY)
        axis.set_xticks(range(len(names)), names, fontsize=TINY, rotation=60, ha="right")
        axis.set_title(f"{title(choice.optimizer)}, lr {choice.lr:g}")
    bar = drawn.colorbar(image, ax=list(axes[0]), extend="max")
    bar.set_label("regret: points, or per cent", fontsize=SMALL)
    save(drawn, path, path.with_suffix(".svg"))
