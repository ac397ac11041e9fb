"""The learners of a stack as networks, to be measured between chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, vmap

from upgd.engine.feed import HeldOut
from upgd.metrics import UTILITIES
from upgd.monitor.measures import AT_A_TIME, effective_ranks_later, histogram
from upgd.networks import OnlineNorm, build_for
from upgd.optim.batch import tiny
from upgd.streams import Problem
from upgd.threads import one_thread


class Networks:
    """The networks of all runs, in the runs' order.

    A GPU works on :data:`~upgd.monitor.measures.AT_A_TIME` of them `together`, always as many,
    since how sums are taken depends on that: what is measured of a run must not depend on the
    size of its stack. A CPU takes one at a time.
    """

    def __init__(self, problem: Problem, stack: Any, together: int | None = None) -> None:
        self._model = build_for(problem, 0).eval()
        self._names = [name for name, _ in self._model.named_parameters()]
        self._shapes = [tuple(p.shape) for p in self._model.parameters()]
        self._counts = [math.prod(shape) for shape in self._shapes]
        self._stack, self._runs = stack, len(stack.order)
        place = {run: place for place, run in enumerate(stack.order)}
        self._order = [place[run] for run in range(self._runs)]
        self._columns: Tensor | None = None  # of the parameters, where the stack pads them
        device = self._weights().device
        self._model.to(self._weights())
        if hasattr(stack, "layout"):
            self._columns = torch.from_numpy(stack.layout.places).to(device)
        self._together = together or (AT_A_TIME if device.type == "cuda" else 1)

    @property
    def size(self) -> int:
        """How many parameters a network has."""
        return sum(self._counts)

    def norms(self) -> NDArray[np.float64]:
        """ℓ1 and ℓ2 norms of each run's weights: [R, 2]."""
        found = []
        for _, flat in self._groups():
            wide = flat.double()
            found.append(torch.stack([wide.abs().sum(1), wide.norm(dim=1)], 1))
        return np.asarray(torch.cat(found)[: self._runs].cpu())

    def utilities(self) -> NDArray[np.float64]:
        """The histogram of each run's scaled utilities: [R, 9]; NaN where it has none."""
        found = np.full((self._runs, len(UTILITIES)), np.nan)
        for group, states in zip(self._stack.groups, self._stack.states, strict=True):
            if not self._stack.learners[group.first].has_utilities:
                continue
            place = group.states.index("utility")
            own = slice(group.first, group.first + group.count)
            traces = torch.as_tensor(states)[place].split(self._together)
            corrections = torch.as_tensor(self._stack.corrections)[own, :, place]
            shares = [
                histogram(self._scaled(some, by.to(some), group.reduce == "row_norm"))
                for some, by in zip(traces, corrections.split(self._together), strict=True)
            ]
            found[self._stack.order[own]] = torch.cat(shares).cpu()
        return found

    def _scaled(self, traces: Tensor, corrections: Tensor, local: bool) -> Tensor:
        """The scaled utilities of some networks, [R, weights], from their traces."""
        flat = traces if self._columns is None else traces[:, self._columns]
        # Dense stacks have corrections for each layer, which is a weight and a bias.
        layers, tensors = corrections.shape[1], len(self._counts)
        parts = [
            part / corrections[:, tensor * layers // tensors, None]
            for tensor, part in enumerate(flat.split(self._counts, 1))
        ]
        if not local:
            whole = torch.cat(parts, 1)
            return (whole / _some(whole.amax(1, keepdim=True).abs())).sigmoid()
        counts = [shape[0] if len(shape) > 1 else 1 for shape in self._shapes]
        rows = [x.reshape(len(x), n, -1) for x, n in zip(parts, counts, strict=True)]
        norms = [x.double().norm(dim=2, keepdim=True).to(x) for x in rows]
        scaled = [(x / _some(n)).flatten(1) for x, n in zip(rows, norms, strict=True)]
        return torch.cat(scaled, 1).sigmoid()

    def ranks_later(self) -> Callable[[], list[float]]:
        """Gives each run's mean effective rank, of the weights as they are now."""
        waiting = [
            [effective_ranks_later(part) for part in parts.values() if part.dim() > 2]
            for parts in (self._parts(flat) for _, flat in self._groups())
        ]

        def ranks() -> list[float]:
            with one_thread():  # others have work to do
                every = [zip(*[layer() for layer in group], strict=True) for group in waiting]
            if not waiting[0]:  # no matrices
                return [math.nan] * self._runs
            return [float(np.mean(one)) for group in every for one in group][: self._runs]

        return ranks

    @torch.no_grad()
    def accuracy(self, samples: HeldOut) -> list[float]:
        """Each run's share of right predictions."""
        weights = self._weights()
        x = torch.from_numpy(samples.x).to(weights)
        y = torch.from_numpy(samples.y).to(weights.device)
        predict = vmap(lambda own, x: functional_call(self._model, own, (x,)).argmax(1))
        found = []
        for runs, flat in self._groups():
            of = torch.from_numpy(samples.of[runs]).to(weights.device)
            own = self._parts(flat) | self._statistics(runs)
            found.append((predict(own, x[of]) == y[of]).double().mean(1))
        shares: list[float] = torch.cat(found)[: self._runs].tolist()
        return shares

    def _statistics(self, runs: list[int]) -> dict[str, Tensor]:
        """The running means and variances of inputs, where networks normalise them."""
        online = [n for n, m in self._model.named_modules() if isinstance(m, OnlineNorm)]
        if not online:
            return {}
        kept = torch.as_tensor(self._stack.statistics)[[self._order[run] for run in runs]]
        return {f"{online[0]}.mean": kept[:, 0], f"{online[0]}.variance": kept[:, 1]}

    def _groups(self) -> Iterator[tuple[list[int], Tensor]]:
        """Some runs and their weights, flat; the last run stands in for what is missing."""
        weights, size = self._weights(), self._together
        for first in range(0, self._runs, size):
            runs = [min(run, self._runs - 1) for run in range(first, first + size)]
            flat = weights[torch.tensor([self._order[run] for run in runs], device=weights.device)]
            yield runs, flat if self._columns is None else flat[:, self._columns]

    def _weights(self) -> Tensor:
        return torch.as_tensor(self._stack.weights)

    def _parts(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters of some networks by name."""
        parts = zip(self._names, flat.split(self._counts, 1), self._shapes, strict=True)
        return {name: part.view(-1, *shape) for name, part, shape in parts}


def _some(eta: Tensor) -> Tensor:
    """What utilities are divided by, never zero."""
    return eta.clamp_min(tiny(torch.float32))
