"""The vocabulary in which a method is written: hyperparameters, phases, methods.

A *rule* is a plain function of scalars. It uses positional arguments, the operators
``+ - * /``, small whole powers and the functions of :mod:`upgd.rules.ops`, and returns
new values: it changes nothing in place and mentions no library. Its argument names say what it
reads:

========================  ==========================================================
``w``, ``g``              the weight and its gradient
``h``                     an estimate of the Hessian's diagonal (second order)
``f``, ``s``              first and second derivative with respect to a feature gate
``noise``                 a standard normal number; ``sigma * noise`` is the paper's ξ
a state's name            that state's value before this phase
``eta``                   the result of the previous phase's reduction (see
                          :class:`Phase`)
``c_<trace>``             the bias correction ``1 - decay ** t`` of that trace
``bound``                 ``1 / sqrt(fan_in)`` of the weight's layer, by which PyTorch
                          bounds first weights; a bias has its layer's
``due``                   1 at steps (counted from 1) that are multiples of the
                          hyperparameter :attr:`Method.period`, else 0
a hyperparameter's name   its value; ``betas`` arrives as ``beta1`` and ``beta2``
========================  ==========================================================

A *layered* method also sees the layers of the network it trains. Its phases run over places of a
network of linear layers ``z = W·x + b``, and read what lies there and what contains it:

==============  ============================================================================
``inputs``      each input of each layer: ``x``, the states kept there
``units``       each unit of each layer: ``d``, the loss's derivative by its sum z
``features``    each hidden unit: ``x``, its output; ``w_in`` and ``w_out``, the mean magnitude
                of the weights into and out of it; the states kept there
``layers``      each layer: the states kept there, what finer phases have summed up over it
``network``     once: the states kept there, what phases over layers have summed up
``weights``     each weight: ``w``, ``g``, ``noise``, its states, and everything of its unit, its
                input, its layer and the network
``biases``      the same for each bias, which has no input; without such a phase, a bias is a
                weight whose input ``x`` is 1
==============  ============================================================================

Everywhere: hyperparameters, of features those of the layer that reads them; ``t``, the number of
the step from 1 on; of a layer ``head`` and ``first``, 1 for the output and the first layer and else
0 (an only layer is the output), ``bound``, the largest initial weight ``1/√fan-in``. With several
samples, phases over inputs, units, features, layers and the network run for each sample; a state
that they write becomes the samples' mean, and so does a sum.

The same function runs on torch tensors (:mod:`upgd.optim.base`, the reference), on lists of
tensors through ``torch._foreach_*`` (:mod:`upgd.optim.program`), and as source that compilers
take (:mod:`upgd.kernels.rules`).
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch

Reduce = Literal["max", "row_norm"]
Place = Literal["inputs", "units", "features", "layers", "network", "weights", "biases"]
LAYERED: frozenset[str] = frozenset({"inputs", "units", "layers", "network", "biases"})
"""Places that only layered methods have phases over."""
_EXPONENTS = {torch.float32: 128, torch.float64: 1024}
"""The largest number is just below two to this power."""


@dataclass(frozen=True)
class Hyperparameter:
    """One word of the vocabulary: its symbol in the paper, its range, its meaning."""

    name: str
    symbol: str
    meaning: str
    low: float = 0.0
    high: float = math.inf
    pair: bool = False
    reaches_high: bool = False  # whether `high` itself is admitted

    @property
    def range(self) -> str:
        """The admitted values, in words that fit an error message."""
        if self.high == math.inf:
            return "a finite number" + (f" >= {self.low:g}" if self.low > -math.inf else "")
        text = f"in [{self.low:g}, {self.high:g}{']' if self.reaches_high else ')'}"
        return f"two numbers {text}" if self.pair else text

    def admits(self, value: float) -> bool:
        """Whether one number is within the range; no infinity is."""
        below = value <= self.high if self.reaches_high else value < self.high
        return math.isfinite(value) and self.low <= value and below

    def plain(self, value: Any) -> Any:
        """`value` as parameter groups keep it: Python's numbers, and a pair as a tuple.

        Whatever is no number, or no sequence of them, is left as it is for :meth:`check`.
        """
        if not self.pair:
            return _plain_number(value)
        if getattr(value, "ndim", None) == 1 and hasattr(value, "tolist"):
            value = value.tolist()  # of numpy or torch
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            return tuple(_plain_number(item) for item in value)
        return value

    def check(self, owner: str, value: Any) -> None:
        """Raise ``ValueError``/``TypeError`` naming the argument unless `value` is admitted."""
        values = [value]
        if self.pair:
            if not isinstance(value, tuple | list) or len(value) != 2:
                raise ValueError(f"{owner}: {self.name} must be {self.range}, got {value!r}")
            values = list(value)
        for item in values:
            if isinstance(item, torch.Tensor) and self.name == "lr" and not item.is_meta:
                if item.numel() != 1:
                    raise ValueError(f"{owner}: Tensor lr must be 1-element, got {item!r}")
                item = item.item()  # stops the device, once
            if isinstance(item, bool) or not isinstance(item, numbers.Real):
                raise TypeError(f"{owner}: {self.name} must be {self.range}, got {value!r}")
            if not self.admits(float(item)):
                raise ValueError(f"{owner}: {self.name} must be {self.range}, got {value!r}")


def _plain_number(value: Any) -> Any:
    """A number of Python, if `value` is another library's."""
    own = type(value) in (bool, int, float)
    return float(value) if isinstance(value, numbers.Real) and not own else value


HYPERPARAMETERS: Mapping[str, Hyperparameter] = {
    each.name: each
    for each in (
        Hyperparameter("lr", "α", "step size"),
        Hyperparameter(
            "weight_decay", "λ", "decoupled weight decay: w shrinks by lr * weight_decay"
        ),
        Hyperparameter("sigma", "σ", "standard deviation of the perturbation"),
        Hyperparameter("beta_utility", "β_u", "decay of the utility trace", high=1.0),
        Hyperparameter(
            *("output_gate", "γ", "factor of the output layer's steps; the paper's is 2"),
            high=2.0,
            reaches_high=True,
        ),
        Hyperparameter("momentum", "μ", "decay of the velocity", high=1.0),
        Hyperparameter("kappa", "κ", "strength of the pull towards the weight trace"),
        Hyperparameter("beta_importance", "β_I", "decay of the importance traces", high=1.0),
        Hyperparameter("beta_weight", "β_w", "decay of the weight trace", high=1.0),
        Hyperparameter("betas", "β₁, β₂", "decays of Adam's two moments", high=1.0, pair=True),
        Hyperparameter("eps", "ε", "added to Adam's denominator"),
        Hyperparameter("beta_mean", "β_μ", "decay of the mean inputs of layers", high=1.0),
        Hyperparameter("bias_share", "κ_b", "share of the inputs' spread that biases' steps take"),
        Hyperparameter(
            *("whitening", "ω", "how far the variances of a layer's inputs are made equal"),
            high=1.0,
        ),
        Hyperparameter("beta_slow", "β_s", "decay of the slow copy of the weights", high=1.0),
        Hyperparameter("pace", "θ_λ", "change of the logarithm of the weight decay in a step"),
        Hyperparameter("pace_target", "θ_q", "change of the step size's logarithm in a step"),
        Hyperparameter(
            *("replacement_rate", "ρ", "share of mature units that is renewed in a step"),
            high=1.0,
            reaches_high=True,
        ),
        Hyperparameter("maturity", "m", "steps before a unit may be renewed"),
        Hyperparameter("threshold", "τ", "share of the mean activity that renewed units have"),
        Hyperparameter("meta_lr", "θ", "step size of a learned weight decay"),
        Hyperparameter("clip", "c", "largest weight, in units of the layer's first bound"),
        Hyperparameter("period", "k", "steps from one reset or look to the next", low=1.0),
        Hyperparameter("sharpness", "k", "factor of the scaled utility in a gate", low=1e-3),
        Hyperparameter(
            *("protecting", "p", "strength of the gate's half for useful weights"),
            high=1.0,
            reaches_high=True,
        ),
        Hyperparameter(
            *("undoing", "r", "strength of the gate's half for harmful weights"),
            high=1.0,
            reaches_high=True,
        ),
    )
}
"""The project's own words, by name; a rule may bring others (:func:`hyperparameter`)."""


def hyperparameter(name: str, decay: bool = False) -> Hyperparameter:
    """The range of the hyperparameter called `name`: any finite number if the name is a user's.

    Args:
        name: Of a method's hyperparameter.
        decay: Whether a trace decays by it, so that it must be in [0, 1).
    """
    found = HYPERPARAMETERS.get(name)
    if found is None:
        found = Hyperparameter(name, name, "of a rule of one's own", low=-math.inf)
    return replace(found, low=max(0.0, found.low), high=1.0) if decay else found


ROLES = ("input", "hidden", "head")
"""The roles of layers: the first one's, those of layers between, the last one's; of an only layer
the last. A hyperparameter of a role's layers is called, for example, ``head.weight_decay``."""


def split_roles(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Hyperparameters of all layers, and by role those that its layers have instead.

    Raises:
        ValueError: There is no such role.

    >>> split_roles({"lr": 0.1, "head.lr": 0.01})
    ({'lr': 0.1}, {'head': {'lr': 0.01}})
    """
    plain: dict[str, Any] = {}
    own: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        role, dot, name = key.partition(".")
        if not dot:
            plain[key] = value
        elif role in ROLES:
            own.setdefault(role, {})[name] = value
        else:
            raise ValueError(f"unknown role {role!r} in {key!r}; roles are {', '.join(ROLES)}")
    return plain, own


def setting(values: Mapping[str, Any], key: str) -> Any:
    """What a hyperparameter is among `values`: a role's is that of all layers if not given.

    >>> setting({"lr": 0.1}, "head.lr")
    0.1
    """
    return values[key] if key in values else values.get(key.partition(".")[2])


def as_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters as rules read them: ``betas`` are ``beta1`` and ``beta2``."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name == "betas":
            found["beta1"], found["beta2"] = value
        else:
            found[name] = value
    return found


def rounded_period(value: float) -> int:
    """A period as a whole number of steps, 1 or more; halves are rounded up."""
    return max(1, math.floor(value + 0.5))


@dataclass(frozen=True)
class Phase:
    """One elementwise pass of a method over the weights (or over the features).

    Attributes:
        fn: The rule. Returns one value per name in `writes`.
        writes: States, or ``"w"``, that receive the results.
        reduce: What the pass leaves behind for the next one as ``eta``, computed from
            the trace `writes[0]`: ``"max"`` is the guarded maximum of the
            bias-corrected trace over everything the optimizer holds, times this
            trace's own correction, so that ``trace / eta`` is the paper's Û/η;
            ``"row_norm"`` is the guarded norm of each row (the correction cancels).
        over: What one element is.
        sums: Of a layered method: names of further results of `fn`, after those in `writes`. Each
            is summed up, over the layer or, of phases over layers, over the network, and is a
            state there: later phases read it, and until it is written the sum of the step before.
    """

    fn: Callable[..., Any]
    writes: tuple[str, ...] = ()
    reduce: Reduce | None = None
    over: Place = "weights"
    sums: tuple[str, ...] = ()
    reads: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", tuple(inspect.signature(self.fn).parameters))


@dataclass(frozen=True)
class Recycle:
    """Which hidden units a layered method re-initialises after a step; names are the method's.

    The weights into such a unit become normal numbers with the variance of initial weights, its
    bias and the weights out of it zero; all states of these and of the unit begin anew.

    Attributes:
        score: A state of features.
        share: The hyperparameter that says how large a share of a layer's mature units goes each
            step, those of the lowest score first; what is less than a unit adds up over steps.
        threshold: Instead of `share`, the hyperparameter τ: units go whose score is at most τ
            times the layer's mean score.
        mature: The hyperparameter that says how many steps old a unit must be.
        every: The hyperparameter that says after how many steps units are looked at; or each step.
        average: A state of features with the unit's mean output, which the biases of the next
            layer take over.
    """

    score: str
    share: str | None = None
    threshold: str | None = None
    mature: str | None = None
    every: str | None = None
    average: str | None = None


@dataclass(frozen=True)
class Metric:
    """An inner product of the gradients of two samples; names are a layered method's states.

    In a layer it is ``d·d' · (Σ scale·(x-mean)·(x'-mean) + factor)``.

    Attributes:
        mean: A state of inputs.
        scale: A state of inputs.
        factor: A state of layers.
    """

    mean: str
    scale: str
    factor: str


@dataclass(frozen=True)
class Method:
    """An update rule with what it keeps and what it needs.

    Attributes:
        hyper: Names of its hyperparameters: those of :data:`HYPERPARAMETERS`, or its own.
        phases: Run in order, each over all parameters before the next begins.
        states: What is kept per element, besides the step count.
        decays: For each trace that is bias-corrected, its decay as the rules name it.
        starts_as_weight: States that begin as a copy of the weights instead of zero.
        added: Hyperparameters that the first release did not have. A state dict without them is an
            older one; without others it is another optimizer's.
        kept: Of a layered method, the states at places other than weights.
        starts: Values at which these begin, if not zero.
        recycle: Which units it re-initialises, if any.
        power: How many weights and derivatives its rules multiply with each other at most, at
            least 2; it decides how large these may be (:meth:`limit`).
        period: The hyperparameter, rounded to a whole number of steps, after which ``due`` is 1;
            a rule that reads ``due`` needs it.
        several: Of a layered method, the one that runs instead where a layer has several samples
            (:mod:`upgd.optim.batch_step`); it has the same hyperparameters and what is kept here.
        metric: Of a method for several samples, what makes the inner product of two gradients.
    """

    hyper: tuple[str, ...]
    phases: tuple[Phase, ...]
    states: tuple[str, ...] = ()
    decays: Mapping[str, str] = field(default_factory=dict)
    starts_as_weight: frozenset[str] = frozenset()
    added: frozenset[str] = frozenset()
    kept: Mapping[Place, tuple[str, ...]] = field(default_factory=dict)
    starts: Mapping[str, float] = field(default_factory=dict)
    recycle: Recycle | None = None
    power: int = 2
    period: str | None = None
    several: Method | None = None
    metric: Metric | None = None

    def __post_init__(self) -> None:
        if self.period is not None and self.period not in self.hyper:
            raise ValueError(f"the period {self.period!r} is no hyperparameter of the method")
        if self.reads("due"):
            if self.period is None:
                raise ValueError("a rule reads 'due', and the method has no period")
            if any("due" in phase.reads for phase in self.phases if phase.reduce is not None):
                raise ValueError("the rule that makes eta may not read 'due'")

    @cached_property
    def hyperparameters(self) -> dict[str, Hyperparameter]:
        """Its hyperparameters with their ranges."""
        decays = set(self.decays.values())
        return {name: hyperparameter(name, decay=name in decays) for name in self.hyper}

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        """The names of its numbers in the order in which kernels keep them.

        Kernels know two by their place, ``lr`` and ``sigma``, which come first whether a method has
        them or not. The others are in the method's own order; ``bound`` comes last, where a rule
        reads it.
        """
        own = as_numbers({name: (name, name) for name in self.hyper})
        others = [name for name in own if name not in ("lr", "sigma")]
        return ("lr", "sigma", *others, *["bound"] * self.reads("bound"))

    def reads(self, name: str) -> bool:
        """Whether one of its rules reads this word, which is not a name of the method's own."""
        own = name in self.hyper or name in self.states
        return not own and any(name in phase.reads for phase in self.phases)

    def every(self, values: Mapping[str, Any]) -> int:
        """After how many steps ``due`` is 1, under these hyperparameters; 0 for never."""
        return 0 if self.period is None else rounded_period(as_numbers(values)[self.period])

    def number_values(self, values: Mapping[str, Any], bound: float = 0.0) -> list[float]:
        """Values of its numbers in their order, from those of its hyperparameters; or 0."""
        given = {"bound": bound, **as_numbers(values)}
        return [float(given.get(name, 0.0)) for name in self.numbers]

    def is_perturbed(self, values: Mapping[str, Any]) -> bool:
        """Whether these hyperparameters draw noise: all do but ``sigma = 0``."""
        return "noise" in self.needs and ("sigma" not in self.hyper or values["sigma"] != 0)

    def limit(self, dtype: torch.dtype) -> float:
        """The largest weight or derivative that a step may read, so that it stays finite.

        A power of two: products of `power` such numbers leave sixteen bits of the exponent to sums
        and factors.
        """
        return 2.0 ** ((_EXPONENTS[dtype] - 16) // self.power)

    @cached_property
    def layered(self) -> bool:
        """Whether it sees layers, so that it must know the network."""
        return self.recycle is not None or any(phase.over in LAYERED for phase in self.phases)

    def states_of(self, place: Place) -> tuple[str, ...]:
        """All that a layered method keeps for each element of a place, sums included."""
        return self._states_of[place]

    @cached_property
    def state_names(self) -> tuple[str, ...]:
        """All that it keeps, as optimizers call it, such as ``slow`` and ``inputs.mean``."""
        kept = {place: names for place, names in self._states_of.items() if names}
        own = [place for place in kept if place not in ("weights", "biases")]
        names = [*self.states, *(f"{place}.{name}" for place in own for name in kept[place])]
        return tuple(dict.fromkeys([*names, *(self.several.state_names if self.several else ())]))

    @cached_property
    def _states_of(self) -> dict[Place, tuple[str, ...]]:
        return {place: self._found_states(place) for place in get_args(Place)}

    def _found_states(self, place: Place) -> tuple[str, ...]:
        if place in ("weights", "biases"):
            return self.states
        over: tuple[str, ...] = {
            "layers": ("inputs", "units", "weights", "biases"), "network": ("layers",)
        }.get(place, ())  # fmt: skip
        sums = [name for phase in self.phases if phase.over in over for name in phase.sums]
        own = list(self.kept.get(place, ()))
        if self.recycle is not None:
            own += {"features": ["age"], "layers": ["owed"]}.get(place, [])
        return tuple(dict.fromkeys([*own, *sums]))

    @cached_property
    def needs(self) -> frozenset[str]:
        """What a caller must provide besides gradients: noise, curvature, gates, layers."""
        reads = {name for phase in self.phases for name in phase.reads}
        provided = {"noise": {"noise"}, "curvature": {"h", "s"}, "gates": {"f"}}
        found = {need for need, names in provided.items() if reads & names}
        return frozenset(found | {"layers"} if self.layered else found)
