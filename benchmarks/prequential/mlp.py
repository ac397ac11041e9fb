"""A plain loop of torch.optim's Adam or SGD at batch size 1, compiled.

The networks have PyTorch's layers and initial weights, and steps follow torch.optim's equations;
:func:`plain_loop` is the loop itself, which ``python benchmarks/stream.py check`` compares it with.
Compiled, a step of a small network takes microseconds, so that many seeds can be run.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import networks
import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor, nn

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


@njit(cache=True, fastmath=True, error_model="numpy")
def _forward(sizes, weights, values):  # type: ignore[no-untyped-def]
    """Values of all layers, end to end; the inputs are there already."""
    place, offset = 0, 0
    for layer in range(len(sizes) - 1):
        fan_in, fan_out = sizes[layer], sizes[layer + 1]
        biases = place + fan_in * fan_out
        below, above = values[offset : offset + fan_in], values[offset + fan_in :]
        for o in range(fan_out):
            total = weights[biases + o]
            row = weights[place + o * fan_in : place + (o + 1) * fan_in]
            for i in range(fan_in):
                total += row[i] * below[i]
            last = layer == len(sizes) - 2
            above[o] = total if last else max(total, np.float32(0))
        place, offset = biases + fan_out, offset + fan_in


@njit(cache=True, fastmath=True, error_model="numpy")
def _update(w, g, m, v, adam, lr, c1, c2):  # type: ignore[no-untyped-def]
    """A weight after its step, as torch.optim's; c1 = 1 - β₁ᵗ, c2 = √(1 - β₂ᵗ)."""
    if not adam:
        return w - lr * g, m, v
    m += np.float32(1 - BETA1) * (g - m)
    v = np.float32(BETA2) * v + np.float32(1 - BETA2) * g * g
    return w - lr / c1 * m / (np.sqrt(v) / c2 + np.float32(EPS)), m, v


@njit(cache=True, fastmath=True, error_model="numpy")
def _backward(sizes, weights, m, v, values, errors, adam, lr, c1, c2):  # type: ignore[no-untyped-def]
    """Update all weights; `errors` has the derivative by the outputs at the outputs' place."""
    place, offset = len(weights), len(values) - sizes[-1]
    for layer in range(len(sizes) - 2, -1, -1):
        fan_in, fan_out = sizes[layer], sizes[layer + 1]
        place -= (fan_in + 1) * fan_out
        biases = place + fan_in * fan_out
        below = values[offset - fan_in : offset]
        before, after = errors[offset - fan_in : offset], errors[offset : offset + fan_out]
        before[:] = 0
        for o in range(fan_out):
            error = after[o]
            if error == 0 and not adam:
                continue
            at = place + o * fan_in
            w, mw, vw = weights[at : at + fan_in], m[at : at + fan_in], v[at : at + fan_in]
            for i in range(fan_in):
                before[i] += w[i] * error
                w[i], mw[i], vw[i] = _update(w[i], error * below[i], mw[i], vw[i], adam, lr, c1, c2)
            b = biases + o
            weights[b], m[b], v[b] = _update(weights[b], error, m[b], v[b], adam, lr, c1, c2)
        if layer > 0:
            for i in range(fan_in):
                if below[i] <= 0:
                    before[i] = 0
        offset -= fan_in


@njit(cache=True)
def _standardise(x, count, mean, squares, out):  # type: ignore[no-untyped-def]
    """By mean and variance of all samples so far; 0 where there is no variance yet."""
    for i in range(len(x)):
        deviation = np.sqrt(squares[i] / count) if count > 0 else 0.0
        out[i] = (x[i] - mean[i]) / deviation if deviation > 0 else 0.0


@njit(cache=True)
def _observe(x, count, mean, squares):  # type: ignore[no-untyped-def]
    for i in range(len(x)):
        difference = x[i] - mean[i]
        mean[i] += difference / count
        squares[i] += difference * (x[i] - mean[i])


@njit(cache=True)
def _target_scale(count, mean, squares):  # type: ignore[no-untyped-def]
    deviation = np.sqrt(squares[0] / count) if count > 0 else 0.0
    return mean[0], deviation if deviation > 0 else 1.0


@njit(cache=True, error_model="numpy")
def _run(x, y, sizes, weights, m, v, counts, stats, target, adam, lr, scaled, classes, found):  # type: ignore[no-untyped-def]
    """Predict, then learn, row by row."""
    values = np.zeros(sizes.sum(), np.float32)
    errors = np.zeros_like(values)
    first, outputs = sizes[0], values[len(values) - sizes[-1] :]
    slopes = errors[len(values) - sizes[-1] :]
    shown = np.zeros(1)
    for n in range(len(y)):
        count = counts[0]
        if scaled:
            _standardise(x[n], count, stats[0], stats[1], values[:first])
        else:
            values[:first] = x[n]
        _forward(sizes, weights, values)
        if classes:
            found[n] = np.argmax(outputs)
        else:
            mean, deviation = _target_scale(count, target[0], target[1]) if scaled else (0.0, 1.0)
            found[n] = mean + deviation * outputs[0]
        counts[0] = count = count + 1
        if scaled:
            _observe(x[n], count, stats[0], stats[1])
            _standardise(x[n], count, stats[0], stats[1], values[:first])
            _forward(sizes, weights, values)
        if classes:
            highest = outputs.max()
            total = np.float32(0)
            for o in range(classes):
                slopes[o] = np.exp(outputs[o] - highest)
                total += slopes[o]
            for o in range(classes):
                slopes[o] /= total
            slopes[int(y[n])] -= 1
        else:
            mean, deviation = 0.0, 1.0
            if scaled:
                shown[0] = y[n]
                _observe(shown, count, target[0], target[1])
                mean, deviation = _target_scale(count, target[0], target[1])
            slopes[0] = 2 * (outputs[0] - (y[n] - mean) / deviation)
        c1, c2 = np.float32(1 - BETA1**count), np.float32(np.sqrt(1 - BETA2**count))
        _backward(sizes, weights, m, v, values, errors, adam, lr, c1, c2)


class TorchLoop:
    """Adam or SGD, with or without inputs (and a target to regress) standardised online.

    Standardised by the mean and variance of all samples so far: those before a sample when it is
    predicted, with the sample when it is learned, as river's pipelines do.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        hidden: tuple[int, ...],
        seed: int,
        adam: bool,
        lr: float,
        scaled: bool,
    ) -> None:
        torch.manual_seed(seed)
        sizes = [features, *hidden, classes or 1]
        self._net = networks.mlp(sizes)
        parts = [p.detach().numpy().ravel() for p in self._net.parameters()]
        weights = np.concatenate(parts).astype(np.float32)
        self.weights = weights
        moments = np.zeros_like(weights), np.zeros_like(weights)
        self._state = (weights, *moments, np.zeros(1, np.int64), np.zeros((2, features)))
        self._sizes, self._classes = np.array(sizes), classes
        self._how = (adam, np.float32(lr), scaled, classes)
        self._target = np.zeros((2, 1))

    def predict_then_learn(self, x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
        found = np.zeros(len(y))
        torch.set_flush_denormal(True)  # of this thread
        _run(x, y.astype(float), self._sizes, *self._state, self._target, *self._how, found)
        torch.set_flush_denormal(False)
        return found.astype(np.int64) if self._classes else found


def plain_loop(
    net: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> list[float]:
    """The loop that is meant, without standardising; y is of integers for classification."""
    found = []
    for row, target in zip(x, y, strict=True):
        output = net(row)
        if y.dtype == torch.int64:
            found.append(output.argmax().item())
            loss = nn.functional.cross_entropy(output, target)
        else:
            found.append(output.item())
            loss = nn.functional.mse_loss(output[0], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found


def check(adam: bool, lr: float, classes: int) -> tuple[float, float]:
    """Agreement with :func:`plain_loop` over 500 samples.

    Returns:
        The share of equal predictions (or 1 minus the largest error of one, relative to the
        largest prediction), and the largest difference of a weight.
    """
    draw = np.random.default_rng(0)
    x = draw.normal(size=(500, 12)).astype(np.float32)
    y = (x[:, :1] + x[:, 1:2] > 0)[:, 0].astype(np.int64) if classes else x[:, 0] * x[:, 1]
    loop = TorchLoop(12, classes, (32, 16), 3, adam, lr, scaled=False)
    torch.manual_seed(3)
    net = networks.mlp([12, 32, 16, classes or 1])
    make = torch.optim.Adam if adam else torch.optim.SGD
    wanted = np.array(plain_loop(net, make(net.parameters(), lr=lr), *map(torch.as_tensor, (x, y))))
    found = loop.predict_then_learn(x.astype(float), y)
    end = np.concatenate([p.detach().numpy().ravel() for p in net.parameters()])
    furthest = float(np.abs(end - loop.weights).max())
    if classes:
        return float((found == wanted).mean()), furthest
    return 1 - float(np.abs(found - wanted).max() / np.abs(wanted).max()), furthest


def parameters(sizes: list[int]) -> int:
    """Weights and biases of a network."""
    return sum((a + 1) * b for a, b in pairwise(sizes))
