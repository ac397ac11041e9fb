"""The paper's figures, as data: which experiments, which arms, which metric, in which layout.

Only figures whose hyperparameters are known are here; those that need no study, such as Figure 2,
are in :mod:`upgd.paper.measured`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from upgd.paper.experiments import ENVIRONMENTS, EXPERIMENTS, MAIN, agents_name
from upgd.paper.sets import METHODS

Kind = Literal["curves", "scatter", "heat", "tasks", "returns"]
SHORT = {
    "input-permuted-mnist": "I/P MNIST",
    "label-permuted-emnist": "L/P EMNIST",
    "label-permuted-cifar10": "L/P CIFAR-10",
    "label-permuted-mini-imagenet": "L/P mini-ImageNet",
}
LONG = {
    "input-permuted-mnist": "Input-permuted MNIST",
    "label-permuted-emnist": "Label-permuted EMNIST",
    "label-permuted-cifar10": "Label-permuted CIFAR-10",
    "label-permuted-mini-imagenet": "Label-permuted mini-ImageNet",
    "toy-changing-inputs": "Changing inputs",
    "toy-changing-sign": "Changing sign",
}
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
    "return": "Mean return of episodes",
    "forgetting": "Forgetting (×100)",
    "loss_of_plasticity": "Loss of plasticity (×100)",
}
"""What axes call the metrics."""


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    Attributes:
        experiment: Whose results.
        metric: What is drawn.
        arms: Which of the experiment's, in this order.
        title: Above the axes.
        kind: ``"curves"`` over tasks; ``"tasks"``, a closer look at the first two and the last two
            tasks; ``"scatter"``, plasticity against accuracy; ``"heat"``, a number per arm and
            problem; ``"returns"`` of agents, over steps.
        dashed: A second metric, in dashed lines.
    """

    experiment: str
    metric: str = "accuracy"
    arms: tuple[str, ...] = METHODS
    title: str = ""
    kind: Kind = "curves"
    dashed: str = ""


@dataclass(frozen=True)
class Figure:
    """A figure of the paper.

    Attributes:
        name: What commands and files call it.
        caption: What it shows.
        panels: Its axes, in reading order.
        columns: Axes side by side.
    """

    name: str
    caption: str
    panels: tuple[Panel, ...]
    columns: int = 1

    @property
    def experiments(self) -> tuple[str, ...]:
        """Those that it draws from."""
        found: dict[str, None] = {}
        for panel in self.panels:
            found |= dict.fromkeys(MAIN if panel.kind == "heat" else (panel.experiment,))
        return tuple(found)


def _statistics(name: str, problem: str, metrics: Sequence[str], caption: str) -> Figure:
    panels = tuple(Panel(problem, metric) for metric in metrics)
    return Figure(name, caption, panels, 4)


def _ablation(name: str, arms: tuple[str, ...], caption: str) -> Figure:
    panels = tuple(
        Panel(f"ablation-{problem}", "accuracy", arms, LONG[problem]) for problem in MAIN
    )
    return Figure(name, caption, panels, 4)


def _agents(name: str, annealed: bool, caption: str) -> Figure:
    panels = []
    for environment in ENVIRONMENTS:
        experiment = agents_name(environment, annealed)
        arms = tuple(arm.name for arm in EXPERIMENTS[experiment].arms)
        panels.append(Panel(experiment, "return", arms, environment, "returns"))
    return Figure(name, caption, tuple(panels), 3)


_EIGHT = (
    *("plasticity", "zero_activations", "gradient_l0", "gradient_l1", "gradient_l2"),
    *("loss", "weight_l1", "weight_l2"),
)
_STORY = ("adam", "adam-restarts", "upgd")


def _all() -> list[Figure]:
    mnist, emnist, cifar, mini = MAIN
    toys = ("toy-changing-inputs", "toy-changing-sign")
    return [
        Figure(
            "fig1a",
            "Catastrophic forgetting: online (dashed) and offline accuracy.",
            (
                Panel(
                    emnist, "offline_accuracy", ("adamw", "upgd"), LONG[emnist], dashed="accuracy"
                ),
            ),
        ),
        Figure(
            "fig1b",
            "Loss of plasticity.",
            (Panel("figure-1", "accuracy", _STORY, LONG[mnist]),),
        ),
        Figure(
            "fig1c",
            "A closer look at loss of plasticity: the first two tasks and the last two.",
            (Panel("figure-1", "accuracy", _STORY, LONG[mnist], "tasks"),),
        ),
        Figure("fig3", "Performance on Input-permuted MNIST.", (Panel(mnist, title=LONG[mnist]),)),
        Figure(
            "fig4",
            "Average plasticity against average accuracy on Input-permuted MNIST.",
            (Panel(mnist, "plasticity", title=LONG[mnist], kind="scatter"),),
        ),
        _statistics(
            "fig5",
            mnist,
            ("zero_activations", "gradient_l0", "gradient_l1", "weight_l1"),
            "Diagnostic statistics on Input-permuted MNIST.",
        ),
        Figure(
            "fig6",
            "Performance on label-permuted problems.",
            tuple(Panel(problem, title=LONG[problem]) for problem in (cifar, emnist, mini)),
            3,
        ),
        Figure("fig7a", "Forgetting.", (Panel("", "forgetting", kind="heat"),)),
        Figure("fig7b", "Loss of plasticity.", (Panel("", "loss_of_plasticity", kind="heat"),)),
        _agents("fig8", False, "PPO with AdaUPGD and with Adam, constant step size."),
        _agents("fig8-annealed", True, "The same with a step size that falls to zero."),
        Figure(
            "toys",
            "The toy problems, weight-wise utility.",
            tuple(
                Panel(toy, "loss", tuple(a.name for a in EXPERIMENTS[toy].arms), LONG[toy])
                for toy in toys
            ),
            2,
        ),
        _statistics(
            "statistics-mnist",
            mnist,
            ("plasticity", "loss", "gradient_l1", "weight_l2"),
            "Further diagnostic statistics on Input-permuted MNIST.",
        ),
        *[
            _statistics(
                f"statistics-{short}", name, _EIGHT, f"Diagnostic statistics, {LONG[name]}."
            )
            for short, name in (("cifar10", cifar), ("emnist", emnist), ("mini-imagenet", mini))
        ],
        _ablation(
            "ablation",
            ("sgd", "sgd+wd", "sgd+wp", "sgd+wd+wp", "upgd"),
            "Ablation: from SGD to UPGD-W.",
        ),
        _ablation(
            "ablation-removed",
            ("upgd", "upgd-wd", "upgd-wp", "upgd-ug", "sgd+ug", "sgd+wd", "sgd+wp"),
            "Ablation: components removed from UPGD-W.",
        ),
    ]


FIGURES: Mapping[str, Figure] = {figure.name: figure for figure in _all()}
"""By name."""
