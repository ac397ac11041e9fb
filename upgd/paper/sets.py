"""The paper's methods and problems, and the hyperparameter sets it prints as best, as data.

From the tables "Best hyperparameter set of each method"; kept as printed, also where a value lies
outside the printed grids.
"""

from __future__ import annotations

from collections.abc import Mapping

METHODS = (
    *("sgdw", "shrink-and-perturb", "pgd", "adamw", "s-ewc", "s-mas", "s-si", "s-rwalk"),
    *("upgd", "n-upgd"),
)
"""The ten methods of the paper's main figures, in the order of its tables."""

MAIN = (
    *("input-permuted-mnist", "label-permuted-emnist", "label-permuted-cifar10"),
    "label-permuted-mini-imagenet",
)
"""The problems of the paper's main figures."""
TOYS = ("toy-changing-inputs", "toy-changing-sign")
STATIONARY = "stationary-mnist"

Set = Mapping[str, float]


_PULL = ("lr", "beta_importance", "beta_weight", "kappa")
_UPGD = ("lr", "sigma", "beta_utility", "weight_decay")
_NAMES: Mapping[str, tuple[str, ...]] = {
    "sgdw": ("lr", "weight_decay"), "shrink-and-perturb": ("lr", "sigma", "weight_decay"),
    "pgd": ("lr", "sigma"), "adamw": ("lr", "beta1", "beta2", "eps", "weight_decay"),
    "s-ewc": _PULL, "s-mas": _PULL, "s-si": _PULL, "s-rwalk": _PULL, "upgd": _UPGD, "n-upgd": _UPGD,
}  # fmt: skip


def _sets(*values: tuple[float, ...], methods: tuple[str, ...] = METHODS) -> dict[str, Set]:
    """By method, its values with their names."""
    both = zip(methods, values, strict=True)
    return {method: dict(zip(_NAMES[method], some, strict=True)) for method, some in both}


def _toy(sigma_of_upgd: float) -> dict[str, Set]:
    return _sets(
        *((0.01, 0.0), (0.01, 0.1), (0.01, 1.0, 0.1)),
        *((0.01, sigma_of_upgd, 0.9, 0.0), (0.01, 0.1, 0.999, 0.0)),
        methods=("sgdw", "pgd", "shrink-and-perturb", "upgd", "n-upgd"),
    )


BEST: Mapping[str, Mapping[str, Set]] = {
    "toy-changing-inputs": _toy(0.0001),
    "toy-changing-sign": _toy(0.1),
    "input-permuted-mnist": _sets(
        (0.001, 0.001), (0.001, 0.1, 0.01), (0.001, 0.1), (0.0001, 0.0, 0.99, 1e-8, 0.0),
        (0.001, 0.9999, 0.99, 0.001), (0.001, 0.9999, 0.999, 0.1),
        (0.001, 0.9999, 0.999, 0.1), (0.001, 0.99, 0.999, 10.0),
        (0.01, 0.1, 0.9999, 0.01), (0.001, 0.1, 0.9, 0.01),
    ),
    "label-permuted-emnist": _sets(
        (0.01, 0.0001), (0.01, 0.01, 0.001), (0.01, 0.01), (0.0001, 0.0, 0.9999, 1e-8, 0.1),
        (0.01, 0.9999, 0.9999, 1.0), (0.01, 0.999, 0.9999, 1.0),
        (0.01, 0.9, 0.9, 0.1), (0.01, 0.99, 0.9999, 0.1),
        (0.01, 0.001, 0.9, 0.0), (0.01, 0.01, 0.9999, 0.001),
    ),
    "label-permuted-mini-imagenet": _sets(
        (0.01, 0.001), (0.01, 0.01, 0.001), (0.01, 0.01), (0.0001, 0.9, 0.9999, 1e-8, 0.1),
        (0.01, 0.999, 0.9999, 1.0), (0.01, 0.999, 0.9999, 1.0),
        (0.001, 0.9, 0.99, 0.01), (0.01, 0.9, 0.9999, 0.1),
        (0.01, 0.001, 0.9, 0.0), (0.01, 0.01, 0.999, 0.0001),
    ),
    "label-permuted-cifar10": _sets(
        (0.01, 0.001), (0.01, 0.01, 0.001), (0.001, 0.01), (0.001, 0.0, 0.9999, 1e-8, 0.01),
        (0.01, 0.9999, 0.999, 10.0), (0.01, 0.9999, 0.999, 10.0),
        (0.001, 0.99, 0.99, 0.01), (0.001, 0.9, 0.999, 10.0),
        (0.01, 0.0, 0.999, 0.0001), (0.01, 0.0, 0.999, 0.001),
    ),
}  # fmt: skip
"""By problem and method."""


def best(problem: str, method: str) -> Set:
    """The printed best set; ValueError if the paper prints none."""
    try:
        return BEST[problem][method]
    except KeyError:
        known = ", ".join(BEST.get(problem, {})) or "none on this problem"
        raise ValueError(
            f"the paper prints no best set for {method} on {problem}; it has: {known}"
        ) from None
