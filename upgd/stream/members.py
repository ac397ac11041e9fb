"""The networks of a learner: the mixtures that there are by name, and how networks are made."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from upgd.engine.dense import Learner
from upgd.networks import ACTIVATIONS, initial_weights, mlp
from upgd.stream.committee import Core
from upgd.stream.module import ModuleCore

SIZES = {"small": 32, "medium": 128, "large": 512}
MANY = 64  # inputs
OPTIMIZER = "upgd"  # of a single network
SELF_TUNED = "self-tuned-sgd"
SELF_TUNED_FOR = {False: {"lr": 4.0}, True: {"lr": 0.25}}
"""Its `lr` goes with the loss: the cross entropy, or the squared error."""


@dataclass(frozen=True)
class Member:
    """One network: its hidden layers, or a module, and how it learns."""

    hidden: tuple[int, ...] | nn.Module | Callable[[int, int], nn.Module]
    optimizer: str
    hyper: Mapping[str, Any] = field(default_factory=dict)
    scales: bool = False  # whether its step size is for up to MANY inputs, and smaller for more
    activation: str = "relu"  # of hidden units

    def step(self, inputs: int) -> float:
        """By which its step size is multiplied where there are so many inputs."""
        return math.sqrt(min(1.0, MANY / max(1, inputs))) if self.scales else 1.0

    def hyper_for(self, inputs: int) -> dict[str, Any]:
        """Its hyperparameters where there are so many inputs."""
        if self.step(inputs) == 1.0:
            return dict(self.hyper)
        return {**self.hyper, "lr": self.hyper["lr"] * self.step(inputs)}


def mixture(units: int, squared: bool) -> list[Member]:
    """The members of a mixture, each of which is best on some streams; see docs/stream.md.

    AdaUPGD has no momentum: single samples of a stream often resemble those before them, and
    momentum then goes on where they went. Noise is left out: drawing it takes half of a step's
    time, and no stream was found on which it pays for that. Scaled inputs have a squared length
    of about their number, so that more of them need smaller steps. SelfTunedSGD finds its own. New
    members come last: files of older learners have those before them.
    """
    half, fast = units // 2, 0.01 if squared else 0.03
    ada = {"betas": (0.0, 0.999), "beta_utility": 0.999, "sigma": 0.0}
    return [
        Member((), "sgd", {"lr": fast}, True),
        Member((), "sgd", {"lr": fast / 10}, True),
        Member((half, half), "upgd", {"lr": 0.02 if squared else 0.03, "sigma": 0.0}, True),
        Member((units,), "ada-upgd", {"lr": 0.003, **ada}, True),
        Member((units, units), "ada-upgd", {"lr": 0.001, **ada}, True),
        Member((units, units), SELF_TUNED, SELF_TUNED_FOR[squared]),
    ]


def chosen(
    network: Any,
    optimizer: str | None,
    hyper: Mapping[str, Any] | None,
    squared: bool,
    activation: str = "relu",
) -> list[Member]:
    """The members that a learner's parameters ask for.

    Raises:
        ValueError: They cannot be understood, or do not go together.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if activation != "relu" and not isinstance(network, list | tuple):
        raise ValueError(
            f"activation={activation!r} is for one network that is given by its hidden units, "
            f"network=(128,), not for network={network!r}"
        )
    if isinstance(network, str):
        if network not in SIZES:
            known = ", ".join(map(repr, SIZES))
            raise ValueError(
                f"network {network!r} is unknown; it is {known}, a tuple of hidden units, a "
                "module, or a function of inputs and outputs that makes one"
            )
        if optimizer is not None or hyper:
            raise ValueError(
                f"network={network!r} is a mixture whose members have optimizers of their own; "
                "for one network with this optimizer give its hidden units, network=(128,)"
            )
        return mixture(SIZES[network], squared)
    if isinstance(network, list | tuple):
        if not all(isinstance(n, int) and n > 0 for n in network):
            raise ValueError(f"hidden units are positive integers, got {network!r}")
        network = tuple(network)
    elif not callable(network):
        raise ValueError(f"network cannot be {network!r}; give a size, hidden units or a module")
    optimizer, given = optimizer or OPTIMIZER, dict(hyper or {})
    if optimizer == SELF_TUNED:
        given = {**SELF_TUNED_FOR[squared], **given}
    member = Member(network, optimizer, given, activation=activation)
    try:
        Learner(member.optimizer, member.hyper, 0).values()
    except KeyError as error:
        raise ValueError(error.args[0]) from None
    return [member]


@cache
def has_compiled_core() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


def make_core(
    member: Member, inputs: int, outputs: int, seed: int, squared: bool, batch: int
) -> Core:
    """A member's network: compiled where it is dense and learns from single samples."""
    hidden, hyper = member.hidden, member.hyper_for(inputs)
    common = (member.optimizer, hyper, seed, squared)
    if isinstance(hidden, tuple):
        sizes = (inputs, *hidden, outputs)
        if batch == 1 and has_compiled_core():
            from upgd.stream.dense import compiled_core

            return compiled_core(sizes, *common, member.activation)
        dense = dense_module(sizes, seed, member.activation)
        return ModuleCore(dense, inputs, outputs, *common, batch)
    if isinstance(hidden, nn.Module):
        return ModuleCore(hidden, inputs, outputs, *common, batch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = hidden(inputs, outputs)
    if not isinstance(module, nn.Module):
        raise ValueError(f"network made a {type(module).__name__}, not a module")
    return ModuleCore(module, inputs, outputs, *common, batch)


def dense_module(sizes: tuple[int, ...], seed: int, activation: str = "relu") -> nn.Sequential:
    """The network of a :class:`~upgd.stream.dense.DenseCore` as a module, at its beginning."""
    module = mlp(sizes, activation)
    parameters = list(module.parameters())
    values = initial_weights([tuple(p.shape) for p in parameters], seed)
    with torch.no_grad():
        for p, value in zip(parameters, values, strict=True):
            p.copy_(torch.from_numpy(value))
        for p in parameters[-2:]:
            p.zero_()
    return module
