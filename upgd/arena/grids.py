"""The sets of hyperparameters that the arena tries, as data: twelve for every entrant.

A grid is the values of each hyperparameter, of which all combinations are tried, or a list of sets.
What it leaves out keeps its default. An entrant is a method of the registry; ``+layer_norm`` and
``+input_norm`` behind its name add what :func:`upgd.networks.mlp` has under these names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from upgd.ledger.canonical import proper_name, row_name
from upgd.optim.registry import METHODS, scalars
from upgd.optim.registry import get as get_method
from upgd.rules.vocabulary import Hyperparameter

Set = Mapping[str, float]
Grid = Mapping[str, Sequence[float]] | Sequence[Set]

SETS = 12
"""How many sets an entrant may try."""
NORMS = ("layer_norm", "input_norm")

_SGDW: Grid = {"lr": [0.001, 0.003, 0.01, 0.03], "weight_decay": [0.0001, 0.001, 0.01]}
_ADAMW: Grid = {
    "lr": [1e-4, 3e-4, 1e-3], "weight_decay": [0.0, 0.1], "beta1": [0.0, 0.9], "beta2": [0.9999],
}  # fmt: skip
# Around the paper's best sets, which all have the step size 0.005.
_UPGD: Sequence[Set] = [
    {"sigma": 0.001, "weight_decay": 0.0, "beta_utility": 0.9},
    {"sigma": 0.001, "weight_decay": 0.0002, "beta_utility": 0.999},
    {"sigma": 0.1, "weight_decay": 0.01, "beta_utility": 0.9999},
    {"sigma": 0.1, "weight_decay": 0.02, "beta_utility": 0.9999},
]
_FADE: Grid = {
    "lr": [0.003, 0.01], "head.weight_decay": [0.03, 0.1, 0.3], "meta_lr": [0.01, 0.1],
}  # fmt: skip
_HEAD_DECAY: Grid = {"lr": [0.003, 0.01, 0.03], "head.weight_decay": [0.01, 0.03, 0.1, 0.3]}
_GATE: Grid = {"lr": [0.003, 0.01], "beta_utility": [0.9, 0.99], "sharpness": [1.0, 3.0, 10.0]}
_EQUAL = [
    {"lr": lr, "beta1": beta, "beta2": beta}
    for lr in (3e-5, 1e-4, 3e-4)
    for beta in (0.9, 0.99, 0.999, 0.9999)
]

GRIDS: dict[str, Grid] = {
    "sgd": {"lr": [1e-4, 3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 0.01, 0.02, 0.03, 0.05, 0.1]},
    "sgdw": _SGDW,
    "sgdw+input_norm": _SGDW,
    "sgdw+layer_norm": _SGDW,
    "sgdw+layer_norm+input_norm": _SGDW,
    "pgd": {"lr": [0.001, 0.003, 0.01], "sigma": [0.003, 0.01, 0.03, 0.1]},
    "shrink-and-perturb": {
        "lr": [0.001, 0.01], "sigma": [0.01, 0.03, 0.1], "weight_decay": [0.001, 0.01],
    },
    "adamw": _ADAMW,
    "adamw+input_norm": _ADAMW,
    "adamw+layer_norm": _ADAMW,
    "s-ewc": {
        "lr": [0.001, 0.01], "kappa": [0.1, 1.0, 10.0], "beta_weight": [0.999, 0.9999],
        "beta_importance": [0.9999],
    },
    "s-mas": {
        "lr": [0.001, 0.01], "kappa": [0.1, 1.0, 10.0], "beta_weight": [0.999, 0.9999],
        "beta_importance": [0.999],
    },
    "s-si": {
        "lr": [0.001, 0.01], "kappa": [0.01, 0.1, 1.0], "beta_weight": [0.9, 0.999],
        "beta_importance": [0.9],
    },
    "s-rwalk": {
        "lr": [0.001, 0.01], "kappa": [0.1, 1.0, 10.0], "beta_importance": [0.9, 0.99],
        "beta_weight": [0.9999],
    },
    "upgd-w": [{"lr": lr, **rest} for lr in (0.003, 0.005, 0.01) for rest in _UPGD],
    "n-upgd-w": {
        "lr": [0.001, 0.01], "sigma": [0.005, 0.05], "weight_decay": [0.0001, 0.001, 0.01],
        "beta_utility": [0.999],
    },
    "ada-upgd": {
        "lr": [1e-4, 3e-4, 1e-3], "sigma": [0.01, 1.0], "weight_decay": [0.01, 0.1],
        "beta1": [0.0], "beta_utility": [0.999],
    },
    # Methods of other papers, around their authors' values. A decay of 0.1 at a step size of 0.01
    # takes a thousandth of a weight; Adam's step sizes need larger ones for that.
    "sgd-head-decay": _HEAD_DECAY,
    "sgd-head-decay+input_norm": _HEAD_DECAY,
    "adam-head-decay": {"lr": [1e-4, 3e-4, 1e-3], "head.weight_decay": [0.1, 1.0, 3.0, 10.0]},
    "adam-equal-betas": _EQUAL,
    "l2-init": {"lr": [0.001, 0.003, 0.01], "weight_decay": [0.001, 0.003, 0.01, 0.03]},
    "weight-clipping": {"lr": [0.001, 0.003, 0.01], "clip": [1.0, 2.0, 3.0, 5.0]},
    "weight-clipping-adam": {"lr": [3e-5, 1e-4, 3e-4], "clip": [1.0, 2.0, 3.0, 5.0]},
    "hare-tortoise": {
        "lr": [0.003, 0.01], "beta_weight": [0.99, 0.999], "period": [100, 1_000, 10_000],
    },
    "fade-head": _FADE,
    "fade-1st-head": _FADE,
    "continual-backprop": {
        "lr": [0.003, 0.01], "weight_decay": [0.0, 0.001], "replacement_rate": [1e-5, 1e-4, 1e-3],
    },
    "continual-backprop-adam": {
        "lr": [1e-4, 3e-4], "weight_decay": [0.0, 0.1], "replacement_rate": [1e-5, 1e-4, 1e-3],
    },
    "redo": {"lr": [0.003, 0.01], "threshold": [0.01, 0.025, 0.1], "period": [1_000, 10_000]},
    "redo-adam": {"lr": [1e-4, 3e-4], "threshold": [0.01, 0.025, 0.1], "period": [1_000, 10_000]},
    # Methods of this package that no paper has.
    "centred-sgd": {
        "lr": [0.003, 0.01], "weight_decay": [0.001, 0.01], "head.weight_decay": [0.001, 0.03, 0.1],
    },
    "self-tuned-sgd": [{}],  # has nothing to tune
    # UPGD's gate in all layers, in the last one, in those before; whole and by halves.
    "gated-upgd": _GATE,
    "upgd-ungated": {"lr": [1e-4, 3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 0.01, 0.02, 0.03, 0.05, 0.1]},
    "upgd-protecting": _GATE,
    "upgd-undoing": _GATE,
    "upgd-head": _GATE,
    "upgd-head-protecting": _GATE,
    "upgd-head-undoing": _GATE,
    "upgd-body": _GATE,
    "upgd-body-protecting": _GATE,
    "upgd-body-undoing": _GATE,
}  # fmt: skip
"""By entrant; the order is that of tables."""
_BUILT_IN = dict(GRIDS)
_METHODS: dict[str, str] = {}  # of users' entrants that are named otherwise than their method


class Name(NamedTuple):
    """What an entrant's name stands for."""

    method: str  # a name of the registry, or an alias that changes defaults
    options: dict[str, bool]  # of its runs
    label: str = ""  # what it is called, if not by these

    def __str__(self) -> str:
        return self.label or "+".join([self.method, *self.options])


def parse(name: str) -> Name:
    """The method and the options of an entrant.

    Raises:
        KeyError: There is no such method.
        ValueError: There is no such option.

    Example:
        >>> parse("SGDW+layer_norm")
        Name(method='sgdw', options={'layer_norm': True}, label='')
        >>> str(parse("s&p"))
        'shrink-and-perturb'
    """
    if name.lower() in _METHODS:
        return parse(_METHODS[name.lower()])._replace(label=name.lower())
    if row_name(proper_name(name)) in METHODS:
        return Name(proper_name(name), {})
    method, *norms = name.lower().split("+")
    get_method(method)  # raises with a hint
    for norm in norms:
        if norm not in NORMS:
            raise ValueError(f"{name!r}: after a + stands one of {', '.join(NORMS)}, not {norm!r}")
    return Name(proper_name(method), {norm: True for norm in NORMS if norm in norms})


def register(name: str, grid: Grid, method: str = "") -> None:
    """Bring a grid along with a method of your own, in the file that ``--use`` names.

    Args:
        name: Of the entrant: a method, with ``+layer_norm`` or ``+input_norm`` where wanted; or any
            other name if `method` is given.
        grid: Its sets, twelve at most.
        method: What the entrant runs, so that one method can enter under several names, each with
            sets of its own.

    Raises:
        KeyError: There is no such method.
        ValueError: The grid has no set, or more than twelve; or the name is a method's.

    Example:
        >>> register("strong-decay", [{"weight_decay": 0.1}], method="sgdw+layer_norm")
        >>> parse("strong-decay").method, sets("strong-decay")
        ('sgdw', [{'weight_decay': 0.1}])
        >>> del GRIDS["strong-decay"], _METHODS["strong-decay"]
    """
    found, key = all_sets(grid), name.lower()
    if not 1 <= len(found) <= SETS:
        raise ValueError(f"{name}: 1 to {SETS} sets may be searched; this grid has {len(found)}")
    if method:
        parse(method)
        if row_name(proper_name(key)) in METHODS or "," in key:
            raise ValueError(f"{name!r} is a method's name, or has a comma; choose another")
        _METHODS[key] = method
    GRIDS[key] = grid


def registered() -> list[str]:
    """The entrants whose grids were registered."""
    return [name for name, grid in GRIDS.items() if _BUILT_IN.get(name) is not grid]


def all_sets(grid: Grid) -> list[dict[str, float]]:
    """The sets of a grid, the last hyperparameter changing fastest."""
    if isinstance(grid, Mapping):
        return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    return [dict(one) for one in grid]


def sets(name: str, count: int = SETS) -> list[dict[str, float]]:
    """The sets of an entrant: its grid's, or those around its defaults.

    Of a grid that has more, they are chosen one by one: so that all hyperparameters have many
    values, and then so that each set is far from those before. Along a single axis they are evenly
    spaced.

    Example:
        >>> [one["lr"] for one in sets("sgdw", 4)], [one["weight_decay"] for one in sets("sgdw", 4)]
        ([0.001, 0.03, 0.01, 0.003], [0.0001, 0.01, 0.001, 0.01])
    """
    wanted = parse(name)
    possible = (name.lower(), str(wanted), wanted.method)
    own = next((GRIDS[each] for each in possible if each in GRIDS), None)
    found = all_sets(own or around(wanted.method))
    if len(found) <= count:
        return found
    names = dict.fromkeys(name for one in found for name in one)
    every = {name: sorted({one[name] for one in found if name in one}) for name in names}
    axes = {name: values for name, values in every.items() if len(values) > 1}
    if len(axes) == 1:
        return [found[(2 * i + 1) * len(found) // (2 * count)] for i in range(count)]
    chosen, left = found[:1], found[1:]
    while len(chosen) < count:
        following = max(left, key=lambda one: _new(one, chosen, axes))
        left.remove(following)
        chosen.append(following)
    return chosen


def _new(one: Set, chosen: Sequence[Set], axes: Mapping[str, Sequence[float]]) -> tuple[int, float]:
    """How many values of a set are in no other, and how far it is from the nearest on the axes."""
    values = {item for other in chosen for item in other.items()}

    def place(of: Set, name: str) -> float:
        return axes[name].index(of[name]) / (len(axes[name]) - 1) if name in of else -1.0

    apart = (sum(abs(place(one, name) - place(other, name)) for name in axes) for other in chosen)
    return len(one.items() - values), min(apart)


def around(method: str) -> Grid:
    """Twelve sets on a logarithmic grid around a method's defaults.

    Four step sizes, from a tenth of the default on, by three values of the decay, or of the first
    other positive hyperparameter that is no decay rate and may be ten times as large; twelve step
    sizes if there is neither.

    Example:
        >>> around("pgd")
        {'lr': [0.001, 0.003, 0.01, 0.03], 'sigma': [0.001, 0.01, 0.1]}
    """
    usual = scalars(method)
    step = "lr" if "lr" in usual else next((n for n, v in usual.items() if v > 0), "")
    if not step:
        return [{}]
    second = _second({n: v for n, v in usual.items() if n != step}, get_method(method)[0].hyper)
    if not second:
        return {step: [_tidy(usual[step] * 10 ** (k / 2)) for k in range(-7, 5)]}
    return {step: [_tidy(usual[step] * f) for f in (0.1, 0.3, 1, 3)], **second}


def _second(
    usual: Mapping[str, float], ranges: Mapping[str, Hyperparameter]
) -> dict[str, list[float]]:
    """Three values of one more hyperparameter, if there is one to vary."""
    if usual.get("weight_decay") == 0:
        return {"weight_decay": [0.0, 0.001, 0.01]}
    free = {n: v for n, v in usual.items() if v > 0 and not n.startswith("beta") and n != "eps"}
    free = {n: v for n, v in free.items() if n in ranges and ranges[n].admits(10 * v)}
    name = "weight_decay" if "weight_decay" in free else next(iter(free), "")
    return {name: [_tidy(free[name] * factor) for factor in (0.1, 1, 10)]} if name else {}


def _tidy(number: float) -> float:
    """Rounded to two digits."""
    return float(f"{number:.2g}")
