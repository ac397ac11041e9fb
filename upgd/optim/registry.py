"""Every method by name, with what there is to know about it.

Tests, benchmarks, documentation and the command line go through this table: a method
that has a row here is tested, timed, listed and documented.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from upgd.optim.ada_upgd import ADAMW, AdamW, AdaUPGD, ada_upgd_method
from upgd.optim.base import RuleOptimizer
from upgd.optim.consolidation import StreamingEWC, StreamingMAS, StreamingRWalk, StreamingSI
from upgd.optim.feature_upgd import FeatureUPGD, feature_upgd_method
from upgd.optim.features import Features
from upgd.optim.perturbed import (
    PGD,
    PGD_METHOD,
    SGDW,
    SGDW_METHOD,
    SHRINK_AND_PERTURB_METHOD,
    ShrinkAndPerturb,
)
from upgd.optim.upgd import UPGD, upgd_method
from upgd.rules.vocabulary import Hyperparameter, Method, as_numbers


@dataclass(frozen=True)
class Row:
    """One method.

    Attributes:
        name: Its name on the command line and in results.
        title: Its name in the paper.
        optimizer: The class that runs it.
        method: The rule.
        options: Constructor arguments that make it this method.
        aliases: Other names; each may change defaults (UPGD-W is UPGD with decay).
        unsupported: Features it lacks, each with the reason.
        source: Digits that change with what it computes, for a user's own; "" for those here.
    """

    name: str
    title: str
    optimizer: type[RuleOptimizer]
    method: Method
    options: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    unsupported: Mapping[str, str] = field(default_factory=dict)
    source: str = ""

    @property
    def hyper(self) -> dict[str, Hyperparameter]:
        """Its hyperparameters with their ranges."""
        return self.method.hyperparameters

    @property
    def defaults(self) -> dict[str, Any]:
        """The default value of each hyperparameter, as the constructor has it."""
        return {name: self._parameters[name].default for name in self.method.hyper}

    @functools.cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.optimizer.__init__).parameters

    @property
    def states(self) -> tuple[str, ...]:
        """What it keeps per weight (or per feature)."""
        return self.method.states

    @property
    def needs(self) -> frozenset[str]:
        """What it reads besides gradients: ``noise``, ``curvature``, ``gates``."""
        return self.method.needs

    def make(self, model: nn.Module, **arguments: Any) -> RuleOptimizer:
        """An optimizer for all parameters of `model`."""
        if "gates" in self.needs:
            arguments.setdefault("features", Features(model))
        return self.optimizer(model.parameters(), **{**self.options, **arguments})


_UNKNOWN_SCALE = (
    "gates see the scaled loss; scaler.step() hands the scale over, unscale_() does not"
)
_NO_KERNELS = "kernels update weight by weight, and gates belong to features"


def _rows() -> Iterator[Row]:
    for local in (False, True):
        for second in (False, True):
            for protect in (True, False):
                options = {
                    "scaling": "local" if local else "global",
                    "order": 2 if second else 1,
                    "protect": protect,
                }
                tail = ("-2nd" if second else "") + ("-local" if local else "")
                head = "" if protect else "n-"
                title = ("" if protect else "N-") + "UPGD" + (", 2nd order" if second else "")
                title += ", local" if local else ""
                yield Row(
                    f"{head}upgd{tail}",
                    title,
                    UPGD,
                    upgd_method(**options),
                    options,
                    {f"{head}upgd-w{tail}": {"weight_decay": 0.001}},
                )
                yield Row(
                    f"feature-{head}upgd{tail}",
                    f"Feature-wise {title}",
                    FeatureUPGD,
                    feature_upgd_method(**options),
                    options,
                    {f"feature-{head}upgd-w{tail}": {"weight_decay": 0.001}},
                    {"unscale_": _UNKNOWN_SCALE, "fused": _NO_KERNELS},
                )
    yield Row("ada-upgd", "AdaUPGD", AdaUPGD, ada_upgd_method(), aliases={"adaupgd": {}})
    yield Row(
        "ada-upgd-2nd",
        "AdaUPGD, 2nd order",
        AdaUPGD,
        ada_upgd_method(order=2),
        {"order": 2},
        {"adaupgd-2nd": {}},
    )
    yield Row("sgdw", "SGDW", SGDW, SGDW_METHOD, aliases={"sgd": {"weight_decay": 0.0}})
    yield Row("pgd", "PGD", PGD, PGD_METHOD)
    yield Row(
        "shrink-and-perturb",
        "S&P",
        ShrinkAndPerturb,
        SHRINK_AND_PERTURB_METHOD,
        aliases={"s&p": {}, "sp": {}},
    )
    yield Row("adamw", "AdamW", AdamW, ADAMW, aliases={"adam": {"weight_decay": 0.0}})
    streaming = {
        "ewc": StreamingEWC,
        "mas": StreamingMAS,
        "si": StreamingSI,
        "rwalk": StreamingRWalk,
    }
    titles = {"ewc": "S-EWC", "mas": "S-MAS", "si": "S-SI", "rwalk": "S-RWalk"}
    for key, cls in streaming.items():
        aliases: dict[str, dict[str, float]] = {f"streaming-{key}": {}}
        yield Row(f"s-{key}", titles[key], cls, cls.consolidation, aliases=aliases)


METHODS: Mapping[str, Row] = {row.name: row for row in _rows()}
"""All methods by name."""


def table() -> str:
    """All methods in a Markdown table, as the documentation has it."""
    lines = [
        "| name | in the paper | class | hyperparameters and defaults | keeps | needs |",
        "|---|---|---|---|---|---|",
    ]
    for row in METHODS.values():
        options = ", ".join(f"{k}={v!r}" for k, v in row.options.items())
        hyper = ", ".join(f"{k}={v}" for k, v in row.defaults.items())
        names = ", ".join(f"`{name}`" for name in (row.name, *row.aliases))
        keeps = ", ".join(row.states) or "-"
        needs = ", ".join(sorted(row.needs)) or "-"
        make = f"`{row.optimizer.__name__}({options})`"
        lines.append(f"| {names} | {row.title} | {make} | {hyper} | {keeps} | {needs} |")
    return "\n".join(lines)


def get(name: str) -> tuple[Row, dict[str, Any]]:
    """The row called `name` and its hyperparameters' defaults under that name.

    Example:
        >>> from upgd.optim.registry import get
        >>> row, defaults = get("UPGD-W")
        >>> row.name, defaults["weight_decay"]
        ('upgd', 0.001)
    """
    wanted = name.lower()
    for row in METHODS.values():
        if wanted == row.name:
            return row, row.defaults
        if wanted in row.aliases:
            return row, {**row.defaults, **row.aliases[wanted]}
    known = [n for row in METHODS.values() for n in (row.name, *row.aliases)]
    close = difflib.get_close_matches(wanted, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    raise KeyError(f"unknown method {name!r}{hint} Known: {', '.join(METHODS)}")


def scalars(name: str) -> dict[str, float]:
    """The defaults of the method called `name` as plain numbers: ``betas`` are two.

    Example:
        >>> from upgd.optim.registry import scalars
        >>> list(scalars("adam"))
        ['lr', 'weight_decay', 'beta1', 'beta2', 'eps']
    """
    return {key: float(number) for key, number in as_numbers(get(name)[1]).items()}
