"""Every method by name, with what there is to know about it.

Tests, benchmarks, documentation and the command line go through this table: a method
that has a row here is tested, timed, listed and documented. Users' methods join it by
:func:`register`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

from upgd.optim.ada_upgd import ADAMW, AdamW, AdaUPGD, ada_upgd_method
from upgd.optim.base import Params, RuleOptimizer
from upgd.optim.centred import CENTRED_SGD, CentredSGD
from upgd.optim.consolidation import StreamingEWC, StreamingMAS, StreamingRWalk, StreamingSI
from upgd.optim.fade import FADE, fade_method
from upgd.optim.feature_upgd import FeatureUPGD, feature_upgd_method
from upgd.optim.features import Features
from upgd.optim.gated_upgd import GATED_UPGD, GatedUPGD
from upgd.optim.layered import LACKS, LayerOptimizer
from upgd.optim.layers import Layers
from upgd.optim.perturbed import (
    PGD,
    PGD_METHOD,
    SGDW,
    SGDW_METHOD,
    SHRINK_AND_PERTURB_METHOD,
    ShrinkAndPerturb,
)
from upgd.optim.recycling import ContinualBackprop, ReDo, continual_backprop_method, redo_method
from upgd.optim.restrained import (
    CLIPPED_ADAM,
    CLIPPED_SGD,
    HARE_TORTOISE,
    L2_INIT,
    HareTortoise,
    L2Init,
    WeightClipping,
    WeightClippingAdam,
)
from upgd.optim.roles import ordered_groups
from upgd.optim.self_tuned import SELF_TUNED_SGD, SelfTunedSGD
from upgd.optim.upgd import UPGD, upgd_method
from upgd.rules.vocabulary import Hyperparameter, Method, as_numbers, split_roles
from upgd.sources import digest

HARMLESS = frozenset(
    {"__init__", "__init_subclass__", "__repr__", "__getstate__", "__setstate__"}
    | {"state_dict", "load_state_dict"}
)
"""What a class may override without changing its updates: stacks keep states themselves."""


@dataclass(frozen=True, eq=False)
class Row:
    """One method; equal to itself alone.

    Attributes:
        name: Its name on the command line and in results.
        title: Its name in the paper.
        optimizer: The class that runs it.
        method: The rule.
        options: Constructor arguments that make it this method.
        aliases: Other names; each may change defaults (UPGD-W is UPGD with decay), also those of
            one role's layers (``head.weight_decay``).
        unsupported: Features it lacks, each with the reason.
        source: 16 digits that change with the code of a user's method; empty for the package's.
    """

    name: str
    title: str
    optimizer: type[RuleOptimizer] | type[LayerOptimizer]
    method: Method
    options: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unsupported: Mapping[str, str] = field(default_factory=dict)
    source: str = ""

    @property
    def hyper(self) -> dict[str, Hyperparameter]:
        """Its hyperparameters with their ranges."""
        return self.method.hyperparameters

    @property
    def defaults(self) -> dict[str, Any]:
        """The default value of each hyperparameter, as the options or the constructor have it."""
        own = {name: parameter.default for name, parameter in self._parameters.items()}
        return {name: self.options.get(name, own[name]) for name in self.method.hyper}

    @functools.cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.optimizer.__init__).parameters

    @property
    def states(self) -> tuple[str, ...]:
        """What it keeps per weight (or per feature)."""
        return self.method.states

    @property
    def needs(self) -> frozenset[str]:
        """What it reads besides gradients: ``noise``, ``curvature``, ``gates``, ``layers``."""
        return self.method.needs

    def make(self, model: nn.Module, **arguments: Any) -> Any:
        """An optimizer for all parameters of `model`; ``head.lr`` is that of its last layer."""
        watching: dict[str, Layers | Features] = {}
        if "layers" in self.needs and "layers" not in arguments:
            watching["layers"] = Layers(model)
        if "gates" in self.needs and "features" not in arguments:
            watching["features"] = Features(model)
        try:
            plain, own = split_roles(arguments)
            params = ordered_groups(model, own) if own else model.parameters()
            return self.optimizer(params, **{**self.options, **watching, **plain})
        except Exception:
            for each in watching.values():
                each.remove()  # its hooks
            raise

    @functools.cached_property
    def eager_only(self) -> str:
        """Why a stack, which executes `method` itself, would not do what the optimizer does.

        Empty if it would. A class of the package is its method's by construction; what a class
        outside of it overrides is not executed by a stack.
        """
        if type(self).make is not Row.make:
            return f"{type(self).__name__} overrides make()"
        name = self.optimizer.__name__
        if not issubclass(self.optimizer, RuleOptimizer | LayerOptimizer):
            return f"{name} is an optimizer of its own, not a rule"
        overridden = _overridden(self.optimizer)
        if overridden:
            return f"{name} overrides {', '.join(overridden)}"
        return _differs(self)


def _overridden(cls: type[RuleOptimizer] | type[LayerOptimizer]) -> list[str]:
    """What classes below the package's override of it, apart from what is harmless."""
    mro = cls.__mro__
    first = next(
        i for i, each in enumerate(mro) if str(each.__module__).partition(".")[0] == "upgd"
    )
    base = mro[first]
    names = {name for each in mro[:first] for name in vars(each)} - HARMLESS - _BOOKKEEPING
    return sorted(
        f"{name}()" if callable(getattr(base, name)) else name
        for name in names
        # PyTorch wraps step() of every class that is used, in the class itself.
        if hasattr(base, name) and _bare(getattr(cls, name)) is not _bare(getattr(base, name))
    )


def _bare(value: Any) -> Any:
    return inspect.unwrap(value) if callable(value) else value


_BOOKKEEPING = {
    *("__module__", "__doc__", "__qualname__", "__hash__", "__parameters__", "__annotations__"),
    *("__dict__", "__weakref__", "__orig_bases__", "__static_attributes__", "__firstlineno__"),
    *("__annotate__", "__slots__"),
}


def _differs(row: Row) -> str:
    """What an optimizer made for a small network has that a stack would not know of."""
    with torch.random.fork_rng(devices=[]):
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    opt = row.make(model, seed=0)
    name, group = row.optimizer.__name__, opt.param_groups[0]
    if opt.method != row.method:
        return f"{name} runs another rule than its row says"
    if any(key in vars(opt) for key in ("step", "_update", "backward")):
        return f"{name} replaces its own methods"
    if opt._optimizer_step_pre_hooks or opt._optimizer_step_post_hooks:
        return f"{name} has hooks around step()"
    if len(opt.param_groups) > 1:
        return f"{name} splits the parameters into groups"
    if group["maximize"]:
        return f"{name} maximises"
    curvature = getattr(opt, "curvature", None)
    if "curvature" in row.needs and curvature != RuleOptimizer.curvature:
        return f"{name} estimates curvature by {curvature!r}"
    for key, value in row.defaults.items():
        if group[key] != value:
            return f"{name} turns {key}={value} into {group[key]}"
    return ""


_UNKNOWN_SCALE = (
    "gates see the scaled loss; scaler.step() hands the scale over, unscale_() does not"
)
_HEAD_DECAY = {"weight_decay": 0.0, "head.weight_decay": 0.1}
_NO_KERNELS = "kernels update weight by weight, and gates belong to features"


def _rows() -> Iterator[Row]:
    for local, second, protect in itertools.product((False, True), (False, True), (True, False)):
        options = {
            "scaling": "local" if local else "global",
            "order": 2 if second else 1,
            "protect": protect,
        }
        tail = ("-2nd" if second else "") + ("-local" if local else "")
        head = "" if protect else "n-"
        title = f"{head.upper()}UPGD{', 2nd order' * second}{', local' * local}"
        decayed = {"weight_decay": 0.001}
        aliases = {f"{head}upgd-w{tail}": decayed}
        yield Row(f"{head}upgd{tail}", title, UPGD, upgd_method(**options), options, aliases)
        method, aliases = feature_upgd_method(**options), {f"feature-{head}upgd-w{tail}": decayed}
        lacks = {"unscale_": _UNKNOWN_SCALE, "fused": _NO_KERNELS}
        name, title = f"feature-{head}upgd{tail}", f"Feature-wise {title}"
        yield Row(name, title, FeatureUPGD, method, options, aliases, lacks)
    rule = upgd_method(momentum=True)
    yield Row("upgd-momentum", "UPGD, momentum", UPGD, rule, {"momentum": 0.9})
    first, second_order = ada_upgd_method(), ada_upgd_method(order=2)
    yield Row("ada-upgd", "AdaUPGD", AdaUPGD, first, aliases={"adaupgd": {}})
    name, title, aliases = "ada-upgd-2nd", "AdaUPGD, 2nd order", {"adaupgd-2nd": {}}
    yield Row(name, title, AdaUPGD, second_order, {"order": 2}, aliases)
    aliases = {"sgd": {"weight_decay": 0.0}, "sgd-head-decay": _HEAD_DECAY}
    yield Row("sgdw", "SGDW", SGDW, SGDW_METHOD, aliases=aliases)
    yield Row("pgd", "PGD", PGD, PGD_METHOD)
    title = "Self-tuned SGD"
    yield Row("centred-sgd", "Centred SGD", CentredSGD, CENTRED_SGD, unsupported=LACKS)
    yield Row("self-tuned-sgd", title, SelfTunedSGD, SELF_TUNED_SGD, unsupported=LACKS)
    recycling: dict[str, dict[str, Any]] = {"SGD": {"base": "sgd"}}
    recycling["Adam"] = {"base": "adam", "lr": 1e-3}
    for kind, given in recycling.items():
        base, tail = given["base"], "-adam" if kind == "Adam" else ""
        name, title = f"continual-backprop{tail}", f"Continual backprop ({kind})"
        method = continual_backprop_method(base)
        yield Row(name, title, ContinualBackprop, method, given, unsupported=LACKS)
        name, title, method = f"redo{tail}", f"ReDo ({kind})", redo_method(base)
        yield Row(name, title, ReDo, method, given, unsupported=LACKS)
    rule, aliases = SHRINK_AND_PERTURB_METHOD, {"s&p": {}, "sp": {}}
    yield Row("shrink-and-perturb", "S&P", ShrinkAndPerturb, rule, aliases=aliases)
    adam: dict[str, dict[str, Any]] = {"adam": {"weight_decay": 0.0}}
    adam |= {"adam-head-decay": _HEAD_DECAY, "adam-equal-betas": {"betas": (0.99, 0.99)}}
    yield Row("adamw", "AdamW", AdamW, ADAMW, aliases=adam)
    for title, cls in {
        "EWC": StreamingEWC, "MAS": StreamingMAS, "SI": StreamingSI, "RWalk": StreamingRWalk
    }.items():  # fmt: skip
        aliases = {f"streaming-{title.lower()}": {}}
        yield Row(f"s-{title.lower()}", f"S-{title}", cls, cls.consolidation, aliases=aliases)
    yield from _rivals()


def _rivals() -> Iterator[Row]:
    """Methods of other papers, and UPGD's gate taken apart."""
    yield Row("l2-init", "L2 Init", L2Init, L2_INIT)
    yield Row("hare-tortoise", "Hare and Tortoise", HareTortoise, HARE_TORTOISE)
    yield Row("weight-clipping", "Weight clipping", WeightClipping, CLIPPED_SGD)
    name, title = "weight-clipping-adam", "Adam, weight clipping"
    yield Row(name, title, WeightClippingAdam, CLIPPED_ADAM)
    for name, title, order in (("fade", "FADE", 2), ("fade-1st", "FADE, 1st order", 1)):
        options, aliases = {"order": order}, {f"{name}-head": _HEAD_DECAY}
        yield Row(name, title, FADE, fade_method(order), options, aliases)
    yield Row("gated-upgd", "UPGD, gate in parts", GatedUPGD, GATED_UPGD, aliases=dict(_gates()))


def _gates() -> Iterator[tuple[str, dict[str, float]]]:
    """Parts of UPGD's gate: all layers, the head or those before it, by the gate's halves."""
    halves = {"": (1.0, 1.0), "-protecting": (1.0, 0.0), "-undoing": (0.0, 1.0)}
    for (half, on), where in itertools.product(halves.items(), ("", "-head", "-body")):
        off, names = (0.0, 0.0), ("protecting", "undoing")
        body, head = {"": (on, on), "-head": (off, on), "-body": (on, off)}[where]
        changed = dict(zip(names, body, strict=True))
        for name, value in zip(names, head, strict=True):
            if value != changed[name]:
                changed[f"head.{name}"] = value
        if where or half:
            yield f"upgd{where}{half}", changed
    yield "upgd-ungated", {"protecting": 0.0, "undoing": 0.0}


METHODS: dict[str, Row] = {row.name: row for row in _rows()}
"""All methods by name."""
_BUILT_IN = {name: row for row in METHODS.values() for name in (row.name, *row.aliases)}
_NAME = re.compile(r"[a-z0-9][a-z0-9&+._-]*")
_AnyRow = TypeVar("_AnyRow", bound=Row)


def register(row: _AnyRow) -> _AnyRow:
    """Add a user's method, in place of an earlier one of the user's with the same name.

    Returns:
        The row as it stands in :data:`METHODS`: its name in lower case, and with a `source`.

    Raises:
        ValueError: A name is the package's or another method's, or cannot be a name.

    Example:
        >>> from upgd import UPGD
        >>> from upgd.optim.registry import METHODS, Row, register
        >>> row = register(Row("Mine", "Mine", UPGD, METHODS["upgd"].method))
        >>> row.name, len(row.source), row.eager_only
        ('mine', 16, '')
        >>> del METHODS["mine"]
    """
    row = replace(row, name=row.name.lower())
    others = {n: r for r in METHODS.values() if r.name != row.name for n in (r.name, *r.aliases)}
    for name in (row.name, *row.aliases):
        if not _NAME.fullmatch(name):
            raise ValueError(f"a method's name is letters, digits and -_.+&; got {name!r}")
        taken = _BUILT_IN.get(name) or others.get(name)
        if taken is not None:
            whose = "this package's" if taken.name in _BUILT_IN else "another method's"
            raise ValueError(f"{name!r} is {whose} ({taken.title}); give the method another name")
    if not row.source:
        parts = (row.optimizer, row.method, row.options, row.aliases, row.defaults)
        row = replace(row, source=digest(*parts))
    METHODS[row.name] = row
    return row


def rules() -> dict[str, Row]:
    """The methods of single weights or features, without those that need layers."""
    return {name: row for name, row in METHODS.items() if "layers" not in row.needs}


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
        places = row.method.kept.items()
        kept = [f"{', '.join(each)} per {place.removesuffix('s')}" for place, each in places]
        keeps = ", ".join([*row.states, *kept]) or "-"
        needs = ", ".join(sorted(row.needs)) or "-"
        make = f"`{getattr(row.optimizer, '__name__', row.title)}({options})`"
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


def create(name: str, params: nn.Module | Params, **arguments: Any) -> Any:
    """An optimizer by the name of its method, as on the command line and in configuration files.

    Args:
        name: Of a method or an alias, in upper or lower case; ``upgd list methods`` shows all. An
            alias may change defaults: ``"upgd-w"`` is ``"upgd"`` with weight decay.
        params: A model, or what the class takes. Feature-wise and layered methods watch a model;
            where they get parameters only, call ``opt.watch(model)`` before the first step.
        arguments: Of the class.

    Raises:
        KeyError: There is no such method; the message has the names.
        ValueError: The alias is about a role's layers, and `params` is no model.

    Example:
        >>> import torch, upgd
        >>> model = torch.nn.Linear(3, 1)
        >>> type(upgd.create("ada-upgd", model, lr=1e-3)).__name__
        'AdaUPGD'
        >>> upgd.create("UPGD-W", model.parameters()).defaults["weight_decay"]
        0.001
    """
    row, defaults = get(name)
    changed = {k: v for k, v in defaults.items() if k not in row.defaults or v != row.defaults[k]}
    if isinstance(params, nn.Module):
        return row.make(params, **{**changed, **arguments})
    if split_roles(changed)[1]:
        raise ValueError(f"{name} has hyperparameters for layers by role; pass the model itself")
    return row.optimizer(params, **{**row.options, **changed, **arguments})


def scalars(name: str) -> dict[str, float]:
    """The defaults of the method called `name` as plain numbers: ``betas`` are two.

    Example:
        >>> from upgd.optim.registry import scalars
        >>> list(scalars("adam"))
        ['lr', 'weight_decay', 'beta1', 'beta2', 'eps']
    """
    return {key: float(number) for key, number in as_numbers(get(name)[1]).items()}
