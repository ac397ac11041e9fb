"""Layered methods that together use all that a method may use; how stacks are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.stacks import Trace, numbers
from upgd.engine.layered import LayeredStack
from upgd.kernels.layered import kept_names
from upgd.optim.layered import LayerOptimizer
from upgd.optim.registry import Row, register
from upgd.rules.ops import absolute, maximum, sqrt
from upgd.rules.vocabulary import Method, Phase, Recycle


# ------------------------------------------------------------------ a phase for every place
def inputs(x: Any, mean: Any, t: Any, scale: Any, rate: Any) -> Any:
    mean = mean + maximum(rate, 1 / t) * (x - mean)
    return mean, (x - mean) ** 2 * scale


def units(d: Any, trace: Any, rate: Any, first: Any, bound: Any) -> Any:
    trace = (1 - rate) * trace + rate * d
    return trace, absolute(trace) * (bound + first)


def energy_of(power: Any, slope: Any, energy: Any, head: Any, pull: Any, rate: Any) -> Any:
    energy = (1 - rate) * energy + rate * (power + slope)
    return energy, sqrt(energy) * (2 - head) + pull


def pull_of(load: Any, pull: Any, t: Any, rate: Any) -> Any:
    return pull + rate * (load / (1 + load) - pull) / t


def weights(
    w: Any, g: Any, noise: Any, x: Any, d: Any, mean: Any, trace: Any, energy: Any, pull: Any,
    moment: Any, lr: Any, sigma: Any, bound: Any, head: Any,
) -> Any:  # fmt: skip
    moment = 0.9 * moment + g - trace * mean
    step = moment / (1 + energy) + sigma * noise * (1 - head) + 0.01 * d * x * pull
    return w - lr * step, moment, absolute(step) * bound


def quiet_weights(
    w: Any, g: Any, mean: Any, trace: Any, energy: Any, pull: Any, moment: Any, lr: Any
) -> Any:
    moment = 0.9 * moment + g - trace * mean
    return w - lr * moment / (1 + energy * pull), moment, absolute(moment)


def biases(
    w: Any, g: Any, noise: Any, trace: Any, energy: Any, moment: Any, lr: Any, sigma: Any
) -> Any:
    moment = 0.8 * moment + g + 0.1 * trace
    return w - lr * (moment / (2 + energy) + sigma * noise), moment, moment * w


def biases_after(w: Any, d: Any, moved: Any, trace: Any, moment: Any, lr: Any) -> Any:
    """They read what the weights have summed up in the same step."""
    return w - lr * d / (1 + moved), moment + trace, d * d


def features(x: Any, w_in: Any, w_out: Any, worth: Any, energy: Any, rate: Any) -> Any:
    return worth + rate * (absolute(x) * w_out / w_in + 0.1 * energy - worth)


def scale_of(moved: Any, shift: Any, scale: Any, rate: Any) -> Any:
    return scale + rate * ((1 + absolute(shift)) / (1 + moved) - scale)


def everywhere(weight: Any, bias: Any, *more: str) -> Method:
    """A phase for every place, and `more` hyperparameters."""
    return Method(
        hyper=("lr", "rate", *more),
        phases=(
            Phase(inputs, writes=("mean",), over="inputs", sums=("power",)),
            Phase(units, writes=("trace",), over="units", sums=("slope",)),
            Phase(energy_of, writes=("energy",), over="layers", sums=("load",)),
            Phase(pull_of, writes=("pull",), over="network"),
            Phase(weight, writes=("w", "moment"), sums=("moved",)),
            Phase(bias, writes=("w", "moment"), over="biases", sums=("shift",)),
            Phase(features, writes=("worth",), over="features"),
            Phase(scale_of, writes=("scale",), over="layers"),
        ),
        states=("moment",),
        kept={
            "inputs": ("mean",), "units": ("trace",), "features": ("worth",),
            "layers": ("energy", "scale"), "network": ("pull",),
        },
        starts={"mean": 0.1, "energy": 1.0, "scale": 0.5, "pull": 0.3, "worth": 0.2},
    )  # fmt: skip


# ------------------------------------------------------------------- biases are weights
def towards(w: Any, g: Any, slow: Any, drift: Any, lr: Any, rate: Any) -> Any:
    slow = slow + rate * (w - slow)
    return w - lr * (g + 0.1 * (w - slow) * drift), slow, (w - slow) ** 2


def drift_of(distance: Any, drift: Any, rate: Any) -> Any:
    return drift + rate * (1 / (1 + distance) - drift)


ANCHORED = Method(
    hyper=("lr", "rate"),
    phases=(
        Phase(towards, writes=("w", "slow"), sums=("distance",)),
        Phase(drift_of, writes=("drift",), over="layers"),
    ),
    states=("slow",),
    starts_as_weight=frozenset({"slow"}),
    kept={"layers": ("drift",)},
    starts={"drift": 1.0},
)


# ----------------------------------------------------------------------------- recycling
def contribution(x: Any, w_out: Any, worth: Any, average: Any, rate: Any) -> Any:
    worth = worth + rate * (absolute(x) * w_out - worth)
    return worth, average + rate * (x - average)


def activity(x: Any, worth: Any, rate: Any) -> Any:
    return worth + rate * (absolute(x) - worth)


def descend(w: Any, g: Any, moment: Any, lr: Any) -> Any:
    moment = 0.9 * moment + g
    return w - lr * moment, moment


RECYCLED = Method(
    hyper=("lr", "rate", "maturity"),
    phases=(
        Phase(descend, writes=("w", "moment")),
        Phase(contribution, writes=("worth", "average"), over="features"),
    ),
    states=("moment",),
    kept={"features": ("worth", "average")},
    starts={"worth": 0.5},
    recycle=Recycle("worth", share="rate", mature="maturity", average="average"),
)
DORMANT = Method(
    hyper=("lr", "rate", "tau", "period"),
    phases=(
        Phase(activity, writes=("worth",), over="features"),
        Phase(towards, writes=("w", "slow"), sums=("distance",)),
    ),
    states=("slow",),
    starts_as_weight=frozenset({"slow"}),
    kept={"features": ("worth",), "layers": ("drift",)},
    starts={"drift": 1.0},
    recycle=Recycle("worth", threshold="tau", every="period"),
)


# ------------------------------------------------------------ a first phase that writes nothing
def square(x: Any) -> Any:
    return x**2


def normalised(w: Any, g: Any, power: Any, lr: Any) -> Any:
    return w - lr * g / (1 + power)


NORMALISED = Method(
    hyper=("lr",),
    phases=(Phase(square, over="inputs", sums=("power",)), Phase(normalised, writes=("w",))),
)

METHODS = {
    "normalised": NORMALISED,
    "everywhere": everywhere(weights, biases, "sigma"),
    "biases-after": everywhere(quiet_weights, biases_after),
    "anchored": ANCHORED,
    "recycled": RECYCLED,
    "dormant": DORMANT,
}


def add() -> None:
    """Put them into the registry."""
    for name, method in METHODS.items():

        class Own(LayerOptimizer):
            rule = method

            def __init__(
                self, params: Any, lr: float = 0.03, sigma: float = 0.05, rate: float = 0.1,
                maturity: float = 5.0, period: float = 7.0, tau: float = 0.6, **common: Any,
            ) -> None:  # fmt: skip
                given = {"lr": lr, "sigma": sigma, "rate": rate, "maturity": maturity}
                given |= {"period": period, "tau": tau}
                hyper = {name: given[name] for name in self.rule.hyper}
                super().__init__(params, self.rule, hyper, **common)

        register(Row(name, name, Own, method))


# ----------------------------------------------------------------------------- comparing
def compare(stack: LayeredStack, trace: Trace, optimizer: Any) -> None:
    """Weights, metrics, and all that the optimizer keeps."""
    close(stack.weights[0][stack.layout.places], trace.weights)
    for column, values in enumerate((trace.losses, trace.plasticity, trace.right)):
        close(stack.series[0, :, column], values)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    method = stack.groups[0].row.method
    for k, name in enumerate(method.states):
        states = torch.cat([optimizer.state[p][name].flatten() for p in params])
        close(stack.states[0][k, 0][stack.layout.places], states)
    for place, name in kept_names(method):
        for layer in stack.layout.layers:
            at = stack.layouts[0].at(place, name, layer.number)
            owner = params[2 * layer.number + (2 if place == "features" else 0) :][:1]
            if place == "network":
                owner = params[:1]
            if owner:
                expected = optimizer.state[owner[0]][f"{place}.{name}"].reshape(-1)
                close(numbers(stack.kept[0][0])[at : at + len(expected)], expected)


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(numbers(found), numbers(expected), atol=1e-9)
