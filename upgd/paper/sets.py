"""The paper's methods and problems, and the hyperparameter sets it prints as best, as data.

From the tables "Best hyperparameter set of each method"; kept as printed, also where a value lies
outside the printed grids. :func:`from_paper` makes hyperparameters of this package's optimizers of
them; nothing else converts.
"""

from __future__ import annotations

from collections.abc import Mapping

from upgd.optim.registry import Row, scalars
from upgd.optim.registry import get as get_method
from upgd.optim.upgd import UtilityOptimizer

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
"""Values by the name of the hyperparameter."""


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
"""By problem and method, as printed: ``lr`` is the paper's α, ``weight_decay`` λ, ``sigma`` σ."""


def best(problem: str, method: str) -> Set:
    """The printed best set as hyperparameters; ValueError if the paper prints none.

    Example:
        >>> problem = "input-permuted-mnist"
        >>> printed(problem, "upgd")["lr"], best(problem, "upgd")["lr"]
        (0.01, 0.005)
    """
    return from_paper(method, printed(problem, method))


def printed(problem: str, method: str) -> Set:
    """The best set as it is printed; ValueError if the paper prints none."""
    try:
        return BEST[problem][method]
    except KeyError:
        known = ", ".join(BEST.get(problem, {})) or "none on this problem"
        raise ValueError(
            f"the paper prints no best set for {method} on {problem}; it has: {known}"
        ) from None


# ------------------------------------------------------------------------------ conversion
def from_paper(method: str, values: Set) -> dict[str, float]:
    """Values in the paper's form as hyperparameters of a method.

    A weight without utility has Ū = φ(0) = ½. In the paper's rules it takes half of the step or of
    the perturbation, in this package's the whole:

    ============== ================================ ====================================
    method         paper                            here
    ============== ================================ ====================================
    protecting     (1-αλ)·w - α·(g + ξ)·(1-Ū)       (1-lr·λ')·w - 2·lr·(g + ξ)·(1-Ū)
    non-protecting (1-αλ)·w - α·(g + ξ·(1-Ū))       (1-lr·λ)·w - lr·(g + 2ξ'·(1-Ū))
    ============== ================================ ====================================

    So ``lr`` is α/2 and ``weight_decay`` λ' = 2λ where the gate protects, and elsewhere ``sigma``
    is σ/2. The same holds of AdaUPGD, with its direction in place of g. Where utility belongs to
    features, the paper's output layer takes the step α, which is 2·lr: ``output_gate`` is 2 if the
    gate protects, and without effect otherwise. Other methods are as in the paper. Factors of two
    are exact, so both forms give the same weights bit for bit.

    Args:
        method: A name of the registry.
        values: Any of its hyperparameters, by name: ``lr`` is α, ``weight_decay`` λ, ``sigma`` σ.

    Returns:
        The same, converted, with ``output_gate`` if the method has one.

    Example:
        >>> from_paper("upgd", {"lr": 0.01, "sigma": 0.1, "weight_decay": 0.001})
        {'lr': 0.005, 'sigma': 0.1, 'weight_decay': 0.002}
        >>> from_paper("n-upgd", {"lr": 0.01, "sigma": 0.1})
        {'lr': 0.01, 'sigma': 0.05}
        >>> from_paper("feature-upgd", {"lr": 0.01})
        {'lr': 0.005, 'output_gate': 2.0}
    """
    factors = _factors(method)
    return {k: v * factors.get(k, 1.0) for k, v in values.items()} | _fixed(method)


def to_paper(method: str, hyper: Set) -> dict[str, float]:
    """The inverse of :func:`from_paper`; ValueError if the paper has no such set.

    Example:
        >>> to_paper("feature-upgd", {"lr": 0.005, "output_gate": 2.0})
        {'lr': 0.01}
    """
    factors, fixed = _factors(method), _fixed(method)
    for name, value in fixed.items():
        if hyper.get(name, value) != value:
            raise ValueError(f"the paper's {method} has {name} {value:g}, not {hyper[name]:g}")
    return {k: v / factors.get(k, 1.0) for k, v in hyper.items() if k not in fixed}


def _factors(method: str) -> Mapping[str, float]:
    """By hyperparameter, what the paper's value is multiplied by."""
    row = get_method(method)[0]
    if not (isinstance(row.optimizer, type) and issubclass(row.optimizer, UtilityOptimizer)):
        return {}
    return {"lr": 0.5, "weight_decay": 2.0} if _protects(row) else {"sigma": 0.5}


def _fixed(method: str) -> dict[str, float]:
    """Hyperparameters that the paper does not have, with the values that give its algorithm."""
    if "output_gate" not in scalars(method):
        return {}
    return {"output_gate": 2.0 if _protects(get_method(method)[0]) else 1.0}


def _protects(row: Row) -> bool:
    return bool(row.options.get("protect", True))
