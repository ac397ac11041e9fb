"""One answer from those of several networks, weighted by who was right."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd.stream.pickling import OwnsArrays

try:
    from upgd.kernels.cpu_mixing import mix_rows
except ImportError:  # without numba: the same in NumPy
    mix_rows = None

FLOOR = math.log(1e-6)
_NO_LABELS = np.zeros(0, np.int64)


class Product(OwnsArrays):
    """A product of experts: ``log p = Σ_k v_k·log p_k - log Z``.

    The weights ``v_k ≥ 0`` descend the gradient of the cross entropy of every answer, from equal
    ones with sum 1. A single answer is passed on.

    Args:
        members: Networks.
        rate: Step size of the weights.

    Attributes:
        weights: [members].
    """

    def __init__(self, members: int, rate: float = 0.02) -> None:
        self.weights = np.full(members, 1 / members)
        self.rate = rate

    def mix(
        self, answers: NDArray[np.float32], targets: NDArray[Any] | None = None
    ) -> NDArray[np.float64]:
        """Logarithms of probabilities, [T, classes].

        Args:
            answers: The networks' logits, [members, T, classes].
            targets: Classes [T]: the weights learn after every row.
        """
        learn = targets is not None and len(self.weights) > 1
        labels = np.asarray(targets, np.int64) if learn else _NO_LABELS
        mixed = np.empty(answers.shape[1:])
        if mix_rows is not None:
            mix_rows(answers, labels, self.weights, self.rate, FLOOR, mixed)
            return mixed
        for t in range(len(mixed)):
            z = np.maximum(logarithms(answers[:, t].astype(np.float64)), FLOOR)
            mixed[t] = logarithms(self.weights @ z)
            if learn:
                slope = z @ np.exp(mixed[t]) - z[:, labels[t]]
                self.weights[:] = np.maximum(0, self.weights - self.rate * slope)
        return mixed

    def state(self) -> dict[str, NDArray[np.float64]]:
        """What learning on depends on."""
        return {"weights": self.weights.copy()}

    def restore(self, saved: dict[str, NDArray[Any]]) -> None:
        """Continue from :meth:`state`."""
        self.weights[:] = saved["weights"]


def logarithms(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logits [..., classes] to logarithms of probabilities; all alike where one is not finite."""
    z = np.where(np.isfinite(z).all(-1, keepdims=True), z, 0)
    z = z - z.max(-1, keepdims=True)
    found: NDArray[np.float64] = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return found


class LeastSquares(OwnsArrays):
    """A weighted sum of numbers, ``y = Σ_k v_k·y_k``.

    The weights minimise the squared error of all answers so far, an error weighing less by
    ``1 - 1/horizon`` with each sample after it, and their squared distance from equal ones. A
    single answer is passed on.

    Args:
        members: Networks.
        horizon: Samples.
        ridge: What the distance from equal weights costs.
        furthest: Answers are kept within ± this; those that are not finite are zero.

    Attributes:
        weights: [members].
    """

    def __init__(
        self, members: int, horizon: float = 1000, ridge: float = 10.0, furthest: float = 10.0
    ) -> None:
        self.weights = np.full(members, 1 / members)
        self.decay, self.ridge, self.furthest = 1 - 1 / horizon, ridge, furthest
        self._products, self._wanted = np.zeros((members, members)), np.zeros(members)

    def mix(
        self, answers: NDArray[np.float32], targets: NDArray[Any] | None = None
    ) -> NDArray[np.float64]:
        """Numbers, [T, outputs].

        Args:
            answers: The networks', [members, T, outputs].
            targets: [T, outputs]: the weights learn after every row.
        """
        z = np.clip(np.nan_to_num(answers.astype(np.float64)), -self.furthest, self.furthest)
        members = len(self.weights)
        if targets is None or members == 1:
            return np.clip(self._sum(z), -self.furthest, self.furthest)
        mixed = np.empty(z.shape[1:])
        prior, ridge = np.full(members, self.ridge / members), self.ridge * np.eye(members)
        for t in range(len(mixed)):
            row = np.ascontiguousarray(z[:, t])
            mixed[t] = self._sum(row)
            self._products = self.decay * self._products + row @ row.T
            self._wanted = self.decay * self._wanted + row @ targets[t]
            self.weights = np.linalg.solve(self._products + ridge, self._wanted + prior)
        return np.clip(mixed, -self.furthest, self.furthest)

    def _sum(self, answers: NDArray[np.float64]) -> NDArray[np.float64]:
        """The weighted sum over members, in an order that does not depend on how many rows."""
        found: NDArray[np.float64] = self.weights[0] * answers[0]
        for weight, answer in zip(self.weights[1:], answers[1:], strict=True):
            found = found + weight * answer
        return found

    def state(self) -> dict[str, NDArray[np.float64]]:
        """What learning on depends on."""
        found = {"weights": self.weights, "products": self._products, "wanted": self._wanted}
        return {name: array.copy() for name, array in found.items()}

    def restore(self, saved: dict[str, NDArray[Any]]) -> None:
        """Continue from :meth:`state`."""
        self.weights, self._products = np.array(saved["weights"]), np.array(saved["products"])
        self._wanted = np.array(saved["wanted"])
