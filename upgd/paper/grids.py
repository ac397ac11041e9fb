"""The paper's hyperparameter grids, as data: values as printed, and as hyperparameters.

From the table "Hyperparameter search spaces": an axis belongs to every method that has the
hyperparameter. What the table leaves out:

- PGD takes the axis of σ, SGDW and AdamW that of λ; feature-wise, local and second-order variants
  take UPGD's.
- On the toy problems and on stationary MNIST only shrink-and-perturb has an axis of λ; elsewhere
  it is 0 there. Methods that the table does not list there take the axes of the other problems.
- The embedded digits take the axes of the problem that permutes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from upgd.optim.registry import get as get_method
from upgd.optim.registry import scalars
from upgd.paper.sets import from_paper

Axis = tuple[float, ...]
Grid = Mapping[str, Axis]

_EVERYWHERE: Grid = {
    "lr": (0.1, 0.01, 0.001, 0.0001),
    "sigma": (0.001, 0.01, 0.1, 1.0),
    "beta1": (0.0, 0.9),
    "beta2": (0.99, 0.999, 0.9999),
    "eps": (1e-4, 1e-8, 1e-16),
    "kappa": (100.0, 10.0, 1.0, 0.1, 0.01),
    "beta_importance": (0.9, 0.99, 0.999, 0.9999),
    "beta_weight": (0.9, 0.99, 0.999, 0.9999),
}
_STEADY: Grid = {
    **_EVERYWHERE,
    "beta_utility": (0.0, 0.9, 0.99, 0.999),
    "weight_decay": (0.1, 0.01, 0.001, 0.0001),
}
_LABELS: Grid = {
    **_EVERYWHERE,
    "beta_utility": (0.9, 0.99, 0.999, 0.9999),
    "weight_decay": (0.0, 0.1, 0.01, 0.001, 0.0001),
}
_INPUTS: Grid = {**_LABELS, "beta_weight": (0.9, 0.99, 0.999)}

AXES: Mapping[str, Grid] = {
    "toy-changing-inputs": _STEADY,
    "toy-changing-sign": _STEADY,
    "stationary-mnist": _STEADY,
    "input-permuted-mnist": _INPUTS,
    "input-permuted-digits": _INPUTS,
    "label-permuted-emnist": _LABELS,
    "label-permuted-cifar10": _LABELS,
    "label-permuted-mini-imagenet": _LABELS,
    "label-permuted-digits": _LABELS,
}
"""By problem and hyperparameter, as printed; see :data:`upgd.paper.sets.BEST`."""

DECAYS_EVERYWHERE = "shrink-and-perturb"

OUTSIDE: frozenset[tuple[str, str, str]] = frozenset(
    {
        ("toy-changing-inputs", "upgd", "sigma"),
        ("input-permuted-mnist", "s-ewc", "kappa"),
        ("label-permuted-cifar10", "upgd", "sigma"),
        ("label-permuted-cifar10", "n-upgd", "sigma"),
    }
)
"""Problem, method and hyperparameter where the printed best value is not on the printed axis."""


def grid(problem: str, method: str) -> dict[str, Axis]:
    """A method's grid on a problem: by hyperparameter, the values to try.

    These are :func:`printed_grid`'s, converted (:func:`upgd.paper.sets.from_paper`);
    hyperparameters that the paper does not have keep their defaults.

    Raises:
        ValueError: There is no grid for this problem.

    Example:
        >>> grid("label-permuted-emnist", "pgd")
        {'lr': (0.1, 0.01, 0.001, 0.0001), 'sigma': (0.001, 0.01, 0.1, 1.0)}
        >>> grid("label-permuted-emnist", "upgd")["lr"]
        (0.05, 0.005, 0.0005, 5e-05)
    """
    usual = {name: (value,) for name, value in scalars(method).items()}
    return usual | axes_from_paper(method, printed_grid(problem, method))


def axes_from_paper(method: str, axes: Grid) -> dict[str, Axis]:
    """Axes of values in the paper's form as axes of a method's hyperparameters."""
    found = {
        name: tuple(from_paper(method, {name: value})[name] for value in axis)
        for name, axis in axes.items()
    }
    return found | {name: (value,) for name, value in from_paper(method, {}).items()}


def printed_grid(problem: str, method: str) -> dict[str, Axis]:
    """A method's grid on a problem, with values as printed; of what it has, what the paper has.

    A name that stands for a method without decay (``sgd``, ``adam``) stays without.

    Raises:
        ValueError: There is no grid for this problem.

    Example:
        >>> printed_grid("toy-changing-sign", "upgd")["weight_decay"]
        (0.0,)
    """
    if problem not in AXES:
        raise ValueError(f"there is no grid of the paper's for {problem}; give one with --grid")
    axes, row = AXES[problem], get_method(method)[0]
    fixed = {name for name, value in row.aliases.get(method.lower(), {}).items() if value == 0}
    if axes is _STEADY and row.name != DECAYS_EVERYWHERE:
        fixed.add("weight_decay")
    names = [name for name in scalars(method) if name in axes]
    return {name: (0.0,) if name in fixed else axes[name] for name in names}


def sets(axes: Grid) -> list[dict[str, float]]:
    """All combinations of the axes' values."""
    return list(each_set(axes))


def each_set(axes: Grid) -> Iterator[dict[str, float]]:
    """The same, one by one."""
    return (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
