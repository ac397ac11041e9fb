"""Networks with initial weights that are a function of a seed: the paper's, and users' own."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from upgd.kernels.layered import INPUT_DECAY, INPUT_FLOOR
from upgd.sources import digest
from upgd.streams import Problem, keyed
from upgd.text import error_line

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "leaky_relu": nn.LeakyReLU}
ACTIVATIONS |= {"tanh": nn.Tanh, "linear": nn.Identity}


class OnlineNorm(nn.Module):
    """Inputs less their running mean, by the root of their running variance, value by value.

    With step r_t = max(1 - decay, 1/t) for the t-th sample x, which counts before it is used:

        m ← m + r·(x - m),   v ← (1 - r)·(v + r·(x - m)²),   y = (x - m) / √max(v, floor)

    so that m and v are exact weighted moments of all samples so far: equally weighted at first,
    then by powers of `decay`. Since the sample itself counts, no output exceeds √(decay/(1-decay)).
    A batch counts as a whole, with r = max(1 - decayᴮ, B/t). In evaluation mode nothing is counted.

    Args:
        shape: Of one input.
        decay: How slowly statistics forget.
        floor: The least variance that is divided by; smaller ones are those of inputs that
            hardly ever change.

    Example:
        >>> norm = OnlineNorm(2)
        >>> for x in ([1.0, 5.0], [3.0, 5.0]):
        ...     y = norm(torch.tensor([x]))
        >>> y
        tensor([[1., 0.]])
    """

    count: torch.Tensor
    mean: torch.Tensor
    variance: torch.Tensor

    def __init__(
        self,
        shape: int | Sequence[int],
        decay: float = INPUT_DECAY,
        floor: float = INPUT_FLOOR,
    ) -> None:
        super().__init__()
        if not 0 <= decay < 1 or not floor > 0:
            raise ValueError(
                f"OnlineNorm: decay is in [0, 1) and floor above 0, got {decay} and {floor}"
            )
        self.decay, self.floor = decay, floor
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.zeros(size))

    @torch.no_grad()
    def _count(self, x: torch.Tensor) -> None:
        if len(x) == 0:
            return
        self.count += len(x)
        rate = (len(x) / self.count).clamp_min(1 - self.decay ** len(x))
        apart = x.mean(0) - self.mean
        spread = x.var(0, unbiased=False) if len(x) > 1 else 0.0
        self.variance.copy_((1 - rate) * (self.variance + rate * apart**2) + rate * spread)
        self.mean += rate * apart

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self._count(x.detach())
        return (x - self.mean) * self.variance.clamp_min(self.floor).rsqrt()

    def extra_repr(self) -> str:
        return f"{tuple(self.mean.shape)}, decay={self.decay}, floor={self.floor}"


def mlp(
    sizes: Sequence[int],
    activation: str = "relu",
    layer_norm: bool = False,
    input_norm: bool = False,
) -> nn.Sequential:
    """Linear layers with an activation between each two; inputs are flattened first.

    With `layer_norm` each activation is preceded by a LayerNorm without weights of its own; with
    `input_norm` inputs go through an :class:`OnlineNorm`. Neither adds parameters.

    Example:
        >>> [type(layer).__name__ for layer in mlp([784, 300, 10])]
        ['Flatten', 'Linear', 'ReLU', 'Linear']
    """
    if len(sizes) < 2 or any(size < 1 for size in sizes):
        raise ValueError(f"mlp: sizes are positive, inputs and outputs at least; got {sizes}")
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"mlp: activation must be one of {known}; got {activation!r}")
    layers: list[nn.Module] = [nn.Flatten()]
    if input_norm:
        layers.append(OnlineNorm(sizes[0]))
    for number, (fan_in, fan_out) in enumerate(pairwise(sizes), 2):
        layers.append(nn.Linear(fan_in, fan_out))
        if number < len(sizes):
            norm = [nn.LayerNorm(fan_out, elementwise_affine=False)] if layer_norm else []
            layers += [*norm, ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)


def cnn(classes: int = 10) -> nn.Sequential:
    """The paper's network for CIFAR-10: no activation after the convolutions."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)),
    )


@dataclass(frozen=True)
class Network:
    """A network of the user's, made by ``factory()`` or ``factory(inputs, outputs)``."""

    name: str
    factory: Callable[..., nn.Module] = field(compare=False)
    source: str

    def make(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A module for inputs of `shape`, which is given as a number if it has one dimension.

        Raises:
            ValueError: The factory raises, or does not return a module.
        """
        arguments = (shape[0] if len(shape) == 1 else shape, outputs)
        try:
            found = self.factory(*arguments[: _takes(self.factory)])
        except Exception as error:
            what = f"inputs {arguments[0]} and {outputs} outputs: {error_line(error)}"
            raise ValueError(f"network {self.name!r} cannot be made for {what}") from error
        if not isinstance(found, nn.Module):
            raise ValueError(f"network {self.name!r} is a {type(found).__name__}, not a nn.Module")
        return found


NETWORKS: dict[str, Network] = {}  # users' networks by name


def register(name: str, factory: Callable[..., nn.Module]) -> Network:
    """Add a network of your own, in place of an earlier one with the same name.

    Args:
        name: Of letters, digits and ``-_.``; ``"cnn"`` is the paper's.
        factory: A function or a class that makes an ``nn.Module``. If it takes two arguments, it
            is given the inputs (their number, or their shape where they have more dimensions)
            and the number of outputs.

    Raises:
        ValueError: The name cannot be used, or `factory` cannot be called.

    Example:
        >>> register("shallow", lambda inputs, outputs: nn.Linear(inputs, outputs)).name
        'shallow'
        >>> del NETWORKS["shallow"]
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", name) or name in ("cnn", "none"):
        rule = "begins with a letter, has letters, digits and -_. and is not 'cnn' or 'none'"
        raise ValueError(f"a network's name {rule}; got {name!r}")
    if isinstance(factory, nn.Module) or not callable(factory):
        wrong = f"a function that makes a module expected, got a {type(factory).__name__}"
        raise ValueError(f"network {name!r}: {wrong}; every seed has initial weights of its own")
    _takes(factory, name)
    NETWORKS[name] = Network(name, factory, digest(factory))
    return NETWORKS[name]


def _takes(factory: Callable[..., nn.Module], name: str = "") -> int:
    """How many of inputs and outputs a factory takes: none or both."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (ValueError, TypeError):  # of a built-in
        return 2
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in parameters if p.default is p.empty and p in positional]
    required += [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if not required:
        return 0
    if len(required) > 2 or len(positional) < 2 or set(required) - set(positional[:2]):
        wrong = f"this one requires {', '.join(p.name for p in required)}"
        rule = "a factory takes nothing, or inputs and outputs"
        raise ValueError(f"network {name!r}: {rule}; {wrong}")
    return 2


def get(name: str) -> Network:
    """A user's network; raises ValueError if there is none with that name."""
    if name not in NETWORKS:
        close = difflib.get_close_matches(name, [*NETWORKS, "cnn"], 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(['cnn', *NETWORKS])}"
        raise ValueError(f"unknown network {name!r}; {hint}")
    return NETWORKS[name]


def build(
    network: Sequence[int] | str,
    seed: int,
    activation: str = "relu",
    task: int = 0,
    shape: tuple[int, ...] = (),
    outputs: int = 0,
    layer_norm: bool = False,
    input_norm: bool = False,
) -> nn.Module:
    """A network whose initial weights are a function of `seed` and `task` alone.

    `network` is the sizes of an MLP's layers, ``"cnn"``, or the name of a registered network, which
    needs the `shape` of one input and the number of `outputs`. A learner that restarts with every
    `task` has other weights each time. `layer_norm` and `input_norm` are those of :func:`mlp` and
    change no initial weight. PyTorch's global generator is left as it is.

    Example:
        >>> a, b = (build([4, 3, 2], seed=1) for _ in range(2))
        >>> torch.equal(a[1].weight, b[1].weight)
        True
    """
    with torch.random.fork_rng(devices=_devices()):
        if isinstance(network, str) and network != "cnn":
            # Its layers draw their own weights, from PyTorch's generators.
            word = int(keyed.bits(1, seed, keyed.Purpose.WEIGHTS, task)[0]) >> 1
            torch.default_generator.manual_seed(word)
            if _devices():
                torch.cuda.manual_seed_all(word)
            return get(network).make(shape, outputs)
        norms = layer_norm, input_norm
        model = cnn() if isinstance(network, str) else mlp(network, activation, *norms)
    begin(model, seed, task)
    return model


def _devices() -> list[int]:
    """GPUs whose generators are in use."""
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def build_for(problem: Problem, seed: int, task: int = 0) -> nn.Module:
    """The network of a problem, see :func:`build`."""
    shape, outputs = problem.interface
    norms = problem.layer_norm, problem.input_norm
    return build(problem.network, seed, problem.activation, task, shape, outputs, *norms)


def check(problem: Problem, batch: int = 1) -> None:
    """Raise ValueError unless the problem's network has parameters and the right outputs.

    And unless it is one of dense layers, where it shall be normalised.
    """
    if isinstance(problem.network, str) and (problem.layer_norm or problem.input_norm):
        raise ValueError(
            f"layer_norm and input_norm are of dense networks; {problem.name} has the network "
            f"{problem.network!r}, which can have layers of its own (upgd.networks.OnlineNorm)"
        )
    if isinstance(problem.network, str) and problem.network != "cnn":
        _check(get(problem.network), *problem.interface, batch)


@functools.lru_cache(64)
def _check(own: Network, shape: tuple[int, ...], outputs: int, batch: int) -> None:
    model = build(own.name, 0, shape=shape, outputs=outputs)
    if not any(p.requires_grad for p in model.parameters()):
        what = "parameters that require a gradient" if list(model.parameters()) else "parameters"
        raise ValueError(f"network {own.name!r} has no {what}: there is nothing to learn")
    with torch.random.fork_rng(devices=_devices()):
        try:
            found = model(torch.zeros(batch, *shape))
        except Exception as error:
            what = f"inputs of shape {(batch, *shape)}: {error_line(error)}"
            raise ValueError(f"network {own.name!r} cannot take {what}") from error
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"network {own.name!r} returns a {type(found).__name__}, not a tensor")
    if tuple(found.shape) != (batch, outputs):
        wrong = f"gives outputs of shape {tuple(found.shape)} for {batch} inputs"
        raise ValueError(f"network {own.name!r} {wrong}; {(batch, outputs)} expected")


@torch.no_grad()
def begin(model: nn.Module, seed: int, task: int = 0) -> None:
    """Give every linear and convolutional layer its initial weights."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    tensors = [t for layer in layers for t in (layer.weight, layer.bias) if t is not None]
    values = initial_weights([tuple(t.shape) for t in tensors], seed, task)
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(torch.from_numpy(value))


def initial_weights(
    shapes: Sequence[tuple[int, ...]], seed: int, task: int = 0
) -> list[NDArray[np.float32]]:
    """PyTorch's distribution for layers (uniform within ±1/√fan-in) from our own random words.

    `shapes` are those of each layer's weight and bias, in turn; `task` is that of :func:`build`.
    A layer without inputs, which may get some later, has biases within ±1.
    """
    found = []
    for number, shape in enumerate(shapes):
        weight = shapes[number - number % 2]
        bound = 1 / math.sqrt(max(1, math.prod(weight[1:])))
        u = keyed.uniform(math.prod(shape), seed, keyed.Purpose.WEIGHTS, task, number)
        found.append(((2 * u - 1) * bound).astype(np.float32).reshape(shape))
    return found
