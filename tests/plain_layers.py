"""Layered methods as loops over plain arrays, written from their papers and equations.

Nothing of the package is used. A network is a list of weights and biases with one activation;
samples pass through it one by one, and derivatives are written out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SLOPES: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "tanh": (np.tanh, lambda h: 1 - h**2),
    "relu": (lambda z: np.maximum(z, 0), lambda h: (h > 0).astype(float)),
}


class PlainNetwork:
    """Weights, biases, and a method's memory of them."""

    def __init__(self, weights: list[Array], biases: list[Array], activation: str) -> None:
        self.weights, self.biases = [w.copy() for w in weights], [b.copy() for b in biases]
        self.activate, self.slope = SLOPES[activation]
        self.memory: dict[str, Any] = {}
        self.renewed = 0

    def derive(self, x: Array, y: Array) -> tuple[list[Array], list[Array]]:
        """Each layer's inputs [N, in], and derivatives [N, out] of a sample's squared error."""
        inputs, count = [x], len(self.weights)
        for layer in range(count):
            z = inputs[-1] @ self.weights[layer].T + self.biases[layer]
            inputs.append(self.activate(z) if layer < count - 1 else z)
        deltas = [2 * (inputs[-1] - y)]
        for layer in range(count - 1, 0, -1):
            back = deltas[0] @ self.weights[layer]
            deltas.insert(0, back * self.slope(inputs[layer]))
        return inputs[:-1], deltas

    @property
    def everything(self) -> list[Array]:
        pairs = zip(self.weights, self.biases, strict=True)
        return [array for pair in pairs for array in pair]


def _mean_and_spread(
    net: PlainNetwork, layer: int, x: Array, t: int, beta_mean: float
) -> tuple[Array, Array, Array, Array]:
    """Update μ and E of a layer; returns μ, and ‖x-μ‖², (x-μ)·μ and E of each sample."""
    mean = net.memory.setdefault(("mean", layer), np.zeros(x.shape[1]))
    energy = net.memory.setdefault(("energy", layer), 0.0)
    rate = max(1 - beta_mean, 1 / t)
    means = np.array([mean + rate * (sample - mean) for sample in x])
    powers = ((x - means) ** 2).sum(1)
    tilts = ((x - means) * means).sum(1)
    energies = energy + rate * (powers - energy)
    net.memory["mean", layer], net.memory["energy", layer] = means.mean(0), energies.mean()
    return means.mean(0), powers, tilts, energies


def centred_sgd(net: PlainNetwork, x: Array, y: Array, t: int, lr: Any, **hyper: float) -> None:
    inputs, deltas = net.derive(x, y)
    for layer, (x, d) in enumerate(zip(inputs, deltas, strict=True)):
        step = lr[layer] if isinstance(lr, list) else lr
        mean, _, tilts, energies = _mean_and_spread(net, layer, x, t, hyper["beta_mean"])
        shrink = 1 - step * hyper["weight_decay"]
        gradient = d.T @ x / len(x) - np.outer(d.mean(0), mean)
        share = max(1.0, hyper["bias_share"] * energies.mean()) - tilts.mean()
        net.weights[layer] = shrink * net.weights[layer] - step * gradient
        net.biases[layer] = shrink * net.biases[layer] - step * d.mean(0) * share


def _conditioned(
    net: PlainNetwork, layer: int, x: Array, t: int, hyper: dict[str, float]
) -> tuple[Array, Array, Array, Array, Array]:
    """Update μ, v, E of a layer; returns μ and s, and Σ s·(x-μ)², Σ s·(x-μ)·μ, E by sample."""
    memory, size = net.memory, x.shape[1]
    mean = memory.setdefault(("mean", layer), np.zeros(size))
    variance = memory.setdefault(("variance", layer), np.zeros(size))
    energy = memory.setdefault(("energy", layer), 0.0)
    quick, slow = (max(1 - hyper[beta], 1 / t) for beta in ("beta_mean", "beta_slow"))
    mean = mean + quick * (x.mean(0) - mean)
    variance = variance + slow * (((x - mean) ** 2).mean(0) - variance)
    scale = variance / max(variance.mean(), 1e-30)
    scale = 1 / (1 - hyper["whitening"] + hyper["whitening"] * scale)
    powers = (scale * (x - mean) ** 2).sum(1)
    tilts = (scale * (x - mean) * mean).sum(1)
    energies = energy + quick * (powers - energy)
    memory["mean", layer], memory["variance", layer] = mean, variance
    memory["energy", layer] = energies.mean()
    return mean, scale, powers, tilts, energies


def _demand(inputs: list[Array], deltas: list[Array], found: Any, factors: list[Array]) -> float:
    """How far outputs move for a step of 1, relative to the error: by products of samples."""
    products = np.zeros((len(deltas[0]), len(deltas[0])))
    own = np.zeros(len(products))
    for x, d, (mean, scale, powers, *_), factor in zip(inputs, deltas, found, factors, strict=True):
        for n, m in np.ndindex(*products.shape):
            between = (scale * (x[n] - mean) * (x[m] - mean)).sum() + factor.mean()
            products[n, m] += d[n] @ d[m] * between
        own += (d**2).sum(1) * (powers + factor)
    errors = (deltas[-1] ** 2).sum(1)
    along = products.mean(1)
    together: float = (along**2 / errors).mean() / along.mean()
    return max(together, (own / errors).mean() / len(errors))


def _size(size: float, value: float) -> float:
    """A running root mean square, of values up to a million times as large."""
    most = 1e6 * size
    return float(np.sqrt(0.999 * size**2 + 0.001 * min(abs(value), most) ** 2))


def self_tuned_sgd(
    net: PlainNetwork, x: Array, y: Array, t: int, lr: float, **hyper: float
) -> None:
    inputs, deltas = net.derive(x, y)
    memory, last = net.memory, len(inputs) - 1
    if not memory:
        memory.update({"slow": [w.copy() for w in net.everything], "typical": 0.0, "gain": 1.0})
        memory.update({"leads": 1e-30, "lambda": [0.01] * (last + 1)})
        memory["holds"] = [1e-30] * (last + 1)
        memory["shrink"] = [0.0] * (last + 1)
    found = [_conditioned(net, i, x, t, hyper) for i, x in enumerate(inputs)]
    # The step size: how far the outputs move for a step of 1, relative to the error.
    factors = [np.maximum(1.0, hyper["bias_share"] * energies) for *_, energies in found]
    demand = _demand(inputs, deltas, found, factors)
    memory["typical"] += max(1 - hyper["beta_mean"], 1 / t) * (demand - memory["typical"])
    step = min(lr * memory["gain"] / max(demand, memory["typical"]), 100)
    leads, beta = 0.0, hyper["beta_slow"]
    for layer, (x, d) in enumerate(zip(inputs, deltas, strict=True)):
        mean, scale, _, tilts, _ = found[layer]
        slow = memory["slow"][2 * layer : 2 * layer + 2]
        own = [net.weights[layer], net.biases[layer]]
        gradients = [d.T @ x / len(x), d.mean(0)]
        moves = [
            (gradients[0] - np.outer(d.mean(0), mean)) * scale,
            d.mean(0) * factors[layer].mean() - (d * tilts[:, None]).mean(0),
        ]
        hold = sum((g * s).sum() for g, s in zip(gradients, slow, strict=True))
        leads += sum((g * (w - s)).sum() for g, w, s in zip(gradients, own, slow, strict=True))
        kept = 1 - memory["shrink"][layer]
        own = [kept * w - step * move for w, move in zip(own, moves, strict=True)]
        net.weights[layer], net.biases[layer] = own
        memory["slow"][2 * layer : 2 * layer + 2] = [
            beta * s + (1 - beta) * w for s, w in zip(slow, own, strict=True)
        ]
        memory["holds"][layer] = _size(memory["holds"][layer], hold)
        change = np.clip(hold / memory["holds"][layer], -3, 3)
        raised = memory["lambda"][layer] * np.exp(hyper["pace"] * change)
        memory["lambda"][layer] = min(max(raised, 1e-5), 1.0)
        at_an_end = layer in (0, last)
        memory["shrink"][layer] = 0.01 * memory["lambda"][layer] if at_an_end else 0.0
    memory["leads"] = _size(memory["leads"], leads)
    change = np.clip(leads / memory["leads"], -3, 3)
    memory["gain"] = min(max(memory["gain"] * np.exp(-hyper["pace_target"] * change), 0.05), 20.0)


# ------------------------------------------------------------------------------ recycling
def _base_step(net: PlainNetwork, x: Array, y: Array, t: int, hyper: dict[str, Any]) -> list[Array]:
    """SGD or Adam with decoupled decay; returns the layers' inputs before it."""
    inputs, deltas = net.derive(x, y)
    lr, shrink = hyper["lr"], 1 - hyper["lr"] * hyper["weight_decay"]
    for layer, (x, d) in enumerate(zip(inputs, deltas, strict=True)):
        for arrays, g in ((net.weights, d.T @ x / len(x)), (net.biases, d.mean(0))):
            move = g
            if "betas" in hyper:
                moments = moments_of(net, arrays[layer])
                for k, value in enumerate((g, g**2)):
                    moments[k] *= hyper["betas"][k]
                    moments[k] += (1 - hyper["betas"][k]) * value
                first, second = (
                    m / (1 - b**t) for m, b in zip(moments, hyper["betas"], strict=True)
                )
                move = first / (np.sqrt(second) + hyper["eps"])
            arrays[layer] *= shrink  # in place: moments belong to this array
            arrays[layer] -= lr * move
    return inputs


def moments_of(net: PlainNetwork, array: Array) -> list[Array]:
    key = ("moments", id(array))
    return net.memory.setdefault(key, [np.zeros_like(array), np.zeros_like(array)])  # type: ignore[no-any-return]


def _renew(net: PlainNetwork, layer: int, units: list[int], fresh: Array) -> None:
    """New weights into units of a hidden layer, none out of them, and no moments."""
    net.weights[layer][units] = fresh[units] / np.sqrt(3 * net.weights[layer].shape[1])
    net.biases[layer][units] = 0
    net.weights[layer + 1][:, units] = 0
    for moment in moments_of(net, net.weights[layer]) + moments_of(net, net.biases[layer]):
        moment[units] = 0
    for moment in moments_of(net, net.weights[layer + 1]):
        moment[:, units] = 0
    net.renewed += len(units)


Fresh = Callable[[int, int], Array]
"""The normal numbers of a step, from 0 on, shaped like a layer's weight."""


def continual_backprop(
    net: PlainNetwork, x: Array, y: Array, t: int, fresh: Fresh, **hyper: Any
) -> None:
    outputs = _base_step(net, x, y, t, hyper)[1:]
    beta, due = hyper["beta_utility"], []
    for layer, h in enumerate(outputs):  # hidden units of this layer
        size = h.shape[1]
        empty = {"age": np.zeros(size), "mean": np.zeros(size), "u": np.zeros(size), "owed": 0.0}
        kept = net.memory.setdefault(("units", layer), empty)
        kept["age"] += 1
        correction = 1 - beta ** kept["age"]
        means = beta * kept["mean"] + (1 - beta) * h
        into = np.abs(net.weights[layer]).mean(1)
        out = np.abs(net.weights[layer + 1]).mean(0)
        utilities = beta * kept["u"] + (1 - beta) * out * np.abs(h - means / correction) / into
        kept["mean"], kept["u"] = means.mean(0), utilities.mean(0)
        kept["correction"] = correction
        mature = [i for i in range(size) if kept["age"][i] > hyper["maturity"]]
        kept["owed"] += hyper["replacement_rate"] * len(mature)
        count = int(kept["owed"])
        kept["owed"] -= count
        scores = kept["u"] / correction
        due.append(sorted(mature, key=lambda i, scores=scores: (scores[i], i))[:count])
    for layer, units in enumerate(due):
        kept = net.memory["units", layer]
        average = kept["mean"][units] / kept["correction"][units]
        net.biases[layer + 1] += net.weights[layer + 1][:, units] @ average
        _renew(net, layer, units, fresh(t - 1, layer))
        for name in ("age", "mean", "u"):
            kept[name][units] = 0


def redo(net: PlainNetwork, x: Array, y: Array, t: int, fresh: Fresh, **hyper: Any) -> None:
    outputs = _base_step(net, x, y, t, hyper)[1:]
    beta = hyper["beta_utility"]
    for layer, h in enumerate(outputs):
        empty = {"age": np.zeros(h.shape[1]), "size": np.zeros(h.shape[1])}
        kept = net.memory.setdefault(("units", layer), empty)
        kept["age"] += 1
        kept["size"] = beta * kept["size"] + (1 - beta) * np.abs(h).mean(0)
        if t % int(hyper["period"] + 0.5) == 0:
            scores = kept["size"] / (1 - beta ** kept["age"])
            units = np.flatnonzero(scores <= hyper["threshold"] * scores.mean()).tolist()
            _renew(net, layer, units, fresh(t - 1, layer))
            kept["age"][units] = kept["size"][units] = 0
