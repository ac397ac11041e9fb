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


def _sgdw(lr: float, weight_decay: float) -> Set:
    return {"lr": lr, "weight_decay": weight_decay}


def _sp(lr: float, sigma: float, weight_decay: float) -> Set:
    return {"lr": lr, "sigma": sigma, "weight_decay": weight_decay}


def _pgd(lr: float, sigma: float) -> Set:
    return {"lr": lr, "sigma": sigma}


def _adamw(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> Set:
    return {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}


def _pull(lr: float, beta_importance: float, beta_weight: float, kappa: float) -> Set:
    betas = {"beta_importance": beta_importance, "beta_weight": beta_weight}
    return {"lr": lr, **betas, "kappa": kappa}


def _upgd(lr: float, sigma: float, beta_utility: float, weight_decay: float) -> Set:
    rest = {"beta_utility": beta_utility, "weight_decay": weight_decay}
    return {"lr": lr, "sigma": sigma, **rest}


def _ten(*sets: Set) -> dict[str, Set]:
    return dict(zip(METHODS, sets, strict=True))


def _toy(sigma_of_upgd: float) -> dict[str, Set]:
    return {
        "sgdw": _sgdw(0.01, 0.0),
        "pgd": _pgd(0.01, 0.1),
        "shrink-and-perturb": _sp(0.01, 1.0, 0.1),
        "upgd": _upgd(0.01, sigma_of_upgd, 0.9, 0.0),
        "n-upgd": _upgd(0.01, 0.1, 0.999, 0.0),
    }


BEST: Mapping[str, Mapping[str, Set]] = {
    "toy-changing-inputs": _toy(0.0001),
    "toy-changing-sign": _toy(0.1),
    "input-permuted-mnist": _ten(
        _sgdw(0.001, 0.001),
        _sp(0.001, 0.1, 0.01),
        _pgd(0.001, 0.1),
        _adamw(0.0001, 0.0, 0.99, 1e-8, 0.0),
        _pull(0.001, 0.9999, 0.99, 0.001),
        _pull(0.001, 0.9999, 0.999, 0.1),
        _pull(0.001, 0.9999, 0.999, 0.1),
        _pull(0.001, 0.99, 0.999, 10.0),
        _upgd(0.01, 0.1, 0.9999, 0.01),
        _upgd(0.001, 0.1, 0.9, 0.01),
    ),
    "label-permuted-emnist": _ten(
        _sgdw(0.01, 0.0001),
        _sp(0.01, 0.01, 0.001),
        _pgd(0.01, 0.01),
        _adamw(0.0001, 0.0, 0.9999, 1e-8, 0.1),
        _pull(0.01, 0.9999, 0.9999, 1.0),
        _pull(0.01, 0.999, 0.9999, 1.0),
        _pull(0.01, 0.9, 0.9, 0.1),
        _pull(0.01, 0.99, 0.9999, 0.1),
        _upgd(0.01, 0.001, 0.9, 0.0),
        _upgd(0.01, 0.01, 0.9999, 0.001),
    ),
    "label-permuted-mini-imagenet": _ten(
        _sgdw(0.01, 0.001),
        _sp(0.01, 0.01, 0.001),
        _pgd(0.01, 0.01),
        _adamw(0.0001, 0.9, 0.9999, 1e-8, 0.1),
        _pull(0.01, 0.999, 0.9999, 1.0),
        _pull(0.01, 0.999, 0.9999, 1.0),
        _pull(0.001, 0.9, 0.99, 0.01),
        _pull(0.01, 0.9, 0.9999, 0.1),
        _upgd(0.01, 0.001, 0.9, 0.0),
        _upgd(0.01, 0.01, 0.999, 0.0001),
    ),
    "label-permuted-cifar10": _ten(
        _sgdw(0.01, 0.001),
        _sp(0.01, 0.01, 0.001),
        _pgd(0.001, 0.01),
        _adamw(0.001, 0.0, 0.9999, 1e-8, 0.01),
        _pull(0.01, 0.9999, 0.999, 10.0),
        _pull(0.01, 0.9999, 0.999, 10.0),
        _pull(0.001, 0.99, 0.99, 0.01),
        _pull(0.001, 0.9, 0.999, 10.0),
        _upgd(0.01, 0.0, 0.999, 0.0001),
        _upgd(0.01, 0.0, 0.999, 0.001),
    ),
}
"""By problem and method."""


def best(problem: str, method: str) -> Set:
    """The printed best set.

    Raises:
        ValueError: The paper prints none.

    Example:
        >>> best("input-permuted-mnist", "upgd")["beta_utility"]
        0.9999
    """
    try:
        return BEST[problem][method]
    except KeyError:
        known = ", ".join(BEST.get(problem, {})) or "none on this problem"
        raise ValueError(
            f"the paper prints no best set for {method} on {problem}; it has: {known}"
        ) from None
