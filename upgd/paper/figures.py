"""The paper's figures, as data: which experiments, which arms, which metric, in which layout.

Panels may name arms whose hyperparameters are not known yet; a figure reports what it lacks.
Figures that need no study, such as Figure 2, are in :mod:`upgd.paper.measured`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from upgd.metrics import UTILITIES
from upgd.paper.experiments import (
    ABLATION,
    BEST_SETS,
    ENVIRONMENTS,
    EXPERIMENTS,
    PRINTED,
    VARIANTS,
    agents_name,
    title,
)
from upgd.paper.searches import KINDS, REFERENCE, variants
from upgd.paper.sets import MAIN, METHODS, STATIONARY, TOYS

Kind = Literal["curves", "scatter", "heat", "tasks", "returns", "dots", "histogram"]
LONG = {
    "input-permuted-mnist": "Input-permuted MNIST",
    "label-permuted-emnist": "Label-permuted EMNIST",
    "label-permuted-cifar10": "Label-permuted CIFAR-10",
    "label-permuted-mini-imagenet": "Label-permuted mini-ImageNet",
    "toy-changing-inputs": "Changing inputs",
    "toy-changing-sign": "Changing sign",
    "stationary-mnist": "Stationary MNIST",
}
SHORT = {name: f"{LONG[name][0]}/P {LONG[name].partition(' ')[2]}" for name in MAIN}
AXES = {
    "accuracy": "Average online accuracy",
    "offline_accuracy": "Offline accuracy",
    "loss": "Average online loss",
    "plasticity": "Average plasticity",
    "zero_activations": "Share of zero activations",
    "gradient_l0": "ℓ0 norm of gradients (share)",
    "gradient_l1": "ℓ1 norm of gradients",
    "gradient_l2": "ℓ2 norm of gradients",
    "weight_l1": "ℓ1 norm of weights",
    "weight_l2": "ℓ2 norm of weights",
    "effective_rank": "Effective rank of weights",
    UTILITIES[0]: "Share of weights",
    "return": "Mean return of episodes",
    "forgetting": "Forgetting (×100)",
    "loss_of_plasticity": "Loss of plasticity (×100)",
}
"""Axis labels of the metrics."""


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    Kinds: curves over tasks; a closer look at the first two and the last two tasks; scatter of
    plasticity against accuracy; heat, a number per arm and problem; returns of agents over steps;
    dots, means over tasks, a row per method; histogram of an arm's scaled utilities.
    """

    experiment: str
    metric: str = "accuracy"
    arms: tuple[str, ...] = METHODS
    title: str = ""
    kind: Kind = "curves"
    dashed: str = ""  # a second metric, in dashed lines
    names: Mapping[str, str] = field(default_factory=dict)  # legend entries, if not titles
    beside: Panel | None = None  # more curves in the same axes, from another experiment


@dataclass(frozen=True)
class Figure:
    """A figure of the paper."""

    name: str  # its name in commands and files
    caption: str
    panels: tuple[Panel, ...]
    columns: int = 1  # axes side by side
    about: tuple[str, ...] = ()  # experiments that are run for it; by default all it draws

    @property
    def run(self) -> tuple[str, ...]:
        """The experiments that are run for it."""
        return self.about or self.experiments

    @property
    def experiments(self) -> tuple[str, ...]:
        """Those that it draws from."""
        found: dict[str, None] = {}
        for panel in self.panels:
            found |= dict.fromkeys(MAIN if panel.kind == "heat" else (panel.experiment,))
            found |= dict.fromkeys([panel.beside.experiment] if panel.beside else [])
        return tuple(found)


def _statistics(name: str, problem: str, caption: str, *metrics: str) -> Figure:
    return Figure(name, caption, tuple(Panel(problem, metric) for metric in metrics), 4)


def _utilities() -> Figure:
    caption = "Scaled utilities of UPGD-W's weights; ½ is no utility. Not in the paper."
    panels = (Panel(name, UTILITIES[0], ("upgd",), LONG[name], "histogram") for name in MAIN)
    return Figure("utilities", caption, tuple(panels), 4)


def _ablation(name: str, caption: str, *arms: str) -> Figure:
    panels = (Panel(f"{ABLATION}{problem}", "accuracy", arms, LONG[problem]) for problem in MAIN)
    return Figure(name, caption, tuple(panels), 4)


def _agents(name: str, annealed: bool, caption: str) -> Figure:
    panels = []
    for environment in ENVIRONMENTS:
        experiment = agents_name(environment, annealed)
        arms = tuple(arm.name for arm in EXPERIMENTS[experiment].arms)
        panels.append(Panel(experiment, "return", arms, environment, "returns"))
    return Figure(name, caption, tuple(panels), 3)


def _performance(*problems: str) -> tuple[Panel, ...]:
    return tuple(Panel(p, title=LONG[p]) for p in problems)


_UTILITIES = tuple(
    f"{of} {scope} Utility" for scope in ("Global", "Local") for of in ("Weight", "Feature")
)


def _with_printed(experiment: str, arms: Sequence[str]) -> tuple[str, ...]:
    """Arms, each followed by the one with the printed set if there is one."""
    known = {arm.name for arm in EXPERIMENTS[experiment].arms}
    both = (name for arm in arms for name in (arm, f"{arm}{PRINTED}"))
    return tuple(name for name in both if not name.endswith(PRINTED) or name in known)


def _kinds(experiment: str, arms: Sequence[str], orders: Sequence[int]) -> list[Panel]:
    """A panel for each kind of utility: the same baselines, UPGD and N-UPGD of that kind.

    Printed sets are for weight-wise global utility, the first.
    """
    found = []
    for kind, heading in enumerate(_UTILITIES):
        names = {
            variants(method, order)[kind]: title(variants(method, order)[0], decay=False)
            for order in orders
            for method in ("upgd", "n-upgd")
        }
        mine = (*arms, *names)
        mine = _with_printed(experiment, mine) if kind == 0 else mine
        metric = "loss" if experiment in TOYS else "accuracy"
        found.append(Panel(experiment, metric, mine, heading, names=names))
    return found


def _toys() -> Figure:
    arms = (REFERENCE, "sgdw", "pgd", "shrink-and-perturb")
    panels = [
        replace(panel, title=f"{LONG[toy]}: {panel.title}")
        for toy in TOYS
        for panel in _kinds(toy, arms, (1, 2))
    ]
    caption = "The toy problems with first-order and second-order utilities."
    return Figure("toys", caption, tuple(panels), 4)


def _variants(name: str, problem: str) -> Figure:
    """Weight-wise global utility is the main experiment; the other kinds take its baselines."""
    experiment = f"{VARIANTS}{problem}"
    others = tuple(method for method in METHODS if method not in ("upgd", "n-upgd"))
    panels = []
    for number, (heading, (before, _)) in enumerate(zip(_UTILITIES, KINDS, strict=True)):
        if problem == "label-permuted-cifar10" and before:
            continue  # the paper has none
        if number == 0:
            panels.append(Panel(problem, title=heading))
            continue
        names = {variants(method)[number]: title(method) for method in ("upgd", "n-upgd")}
        mine = Panel(experiment, arms=tuple(names), names=names)
        panels.append(Panel(problem, arms=others, title=heading, beside=mine))
    kinds = "Feature-wise and local utilities" if len(panels) > 2 else "Local utility"
    caption = f"{kinds}, {LONG[problem]}."
    if problem == "label-permuted-mini-imagenet":
        caption += " Not in the paper."
    return Figure(name, caption, tuple(panels), len(panels), (experiment,))


def _best_sets() -> Figure:
    """The sets found here beside the printed ones of the main experiments."""
    panels = []
    for problem in MAIN:
        experiment = EXPERIMENTS[f"{BEST_SETS}{problem}"]
        arms = (*(arm.name for arm in experiment.arms), *experiment.awaited)
        printed = Panel(problem, kind="dots")
        panel = Panel(experiment.name, "accuracy", arms, LONG[problem], "dots", beside=printed)
        panels.append(panel)
    caption = (
        "Printed sets, and those that were found here where they are others, with 95% intervals; "
        "printed ones may have more seeds. Not in the paper."
    )
    names = tuple(panel.experiment for panel in panels)
    return Figure("best-sets", caption, tuple(panels), 2, names)


def declare() -> dict[str, Figure]:
    """All figures by name, with the arms that experiments have now."""
    return {figure.name: figure for figure in _all()}


def _all() -> list[Figure]:
    mnist, emnist, cifar, mini = MAIN
    offline = Panel(emnist, "offline_accuracy", ("adamw", "upgd"), LONG[emnist], dashed="accuracy")
    forgetting = "Catastrophic forgetting: online (dashed) and offline accuracy."
    story = Panel("figure-1", "accuracy", ("adam", "adam-restarts", "upgd"), LONG[mnist])
    closer = "A closer look at loss of plasticity: the first two tasks and the last two."
    scatter = "Average plasticity against average accuracy on Input-permuted MNIST."
    permuted = _performance(cifar, emnist, mini)
    stationary = tuple(_kinds(STATIONARY, ("sgdw", "pgd", "shrink-and-perturb"), (1,)))
    others = (("cifar10", cifar), ("emnist", emnist), ("mini-imagenet", mini))
    return [
        Figure("fig1a", forgetting, (offline,)),
        Figure("fig1b", "Loss of plasticity.", (story,)),
        Figure("fig1c", closer, (replace(story, kind="tasks"),)),
        Figure("fig3", "Performance on Input-permuted MNIST.", _performance(mnist)),
        Figure("fig4", scatter, (Panel(mnist, "plasticity", title=LONG[mnist], kind="scatter"),)),
        _statistics(
            *("fig5", mnist, "Diagnostic statistics on Input-permuted MNIST."),
            *("zero_activations", "gradient_l0", "gradient_l1", "weight_l1"),
        ),
        Figure("fig6", "Performance on label-permuted problems.", permuted, 3),
        Figure("fig7a", "Forgetting.", (Panel("", "forgetting", kind="heat"),)),
        Figure("fig7b", "Loss of plasticity.", (Panel("", "loss_of_plasticity", kind="heat"),)),
        _agents("fig8", False, "PPO with AdaUPGD and with Adam, constant step size."),
        _agents("fig8-annealed", True, "The same with a step size that falls to zero."),
        _toys(),
        Figure("stationary", "First-order utilities on stationary MNIST.", stationary, 4),
        _variants("variants-mnist", mnist),
        _variants("variants-emnist", emnist),
        _variants("variants-cifar10", cifar),
        _variants("variants-mini-imagenet", mini),
        _best_sets(),
        _statistics(
            *("statistics-mnist", mnist, "Further diagnostic statistics on Input-permuted MNIST."),
            *("plasticity", "loss", "gradient_l1", "weight_l2"),
        ),
        *[
            _statistics(
                *(f"statistics-{short}", name, f"Diagnostic statistics, {LONG[name]}."),
                *("plasticity", "zero_activations", "gradient_l0", "gradient_l1", "gradient_l2"),
                *("loss", "weight_l1", "weight_l2"),
            )
            for short, name in others
        ],
        _utilities(),
        _ablation(
            *("ablation", "Ablation: from SGD to UPGD-W."),
            *("sgd", "sgd+wd", "sgd+wp", "sgd+wd+wp", "upgd"),
        ),
        _ablation(
            *("ablation-removed", "Ablation: components removed from UPGD-W."),
            *("upgd", "upgd-wd", "upgd-wp", "upgd-ug", "sgd+ug", "sgd+wd", "sgd+wp"),
        ),
    ]


FIGURES: Mapping[str, Figure] = declare()
"""By name."""
