"""One measurement: taken on the device, copied to the host without waiting, read when asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from upgd.metrics import sample_plasticity
from upgd.monitor.measures import dormancy_scores, ranks_of_products
from upgd.optim.batch import wide_dtype

Array = NDArray[np.float64]


class Reading:
    """Numbers of one step by name; they stay on the device until :meth:`send`.

    Args:
        step: The step after which they are taken.
        tau: The largest score of a dormant unit.

    Example:
        >>> reading = Reading(100, tau=0.025)
        >>> reading.add("eta", torch.tensor(0.5))
        >>> reading.send()
        >>> reading.scalars()
        {'eta': 0.5}
    """

    def __init__(self, step: int, tau: float) -> None:
        self.step, self.tau = step, tau
        self.histograms: dict[str, Array] = {}
        self._parts: list[tuple[str, str, tuple[int, ...]]] = []
        self._tensors: list[Tensor] = []
        self._host: Tensor | None = None
        self._event: Any = None
        self._owners: dict[str, Sequence[tuple[str, int]]] = {}

    # ------------------------------------------------------------------------ taking
    def add(self, name: str, value: Tensor, kind: str = "scalar") -> None:
        """Add a number, or what numbers are made from on the host.

        Args:
            name: Its name in :meth:`scalars`.
            value: A tensor on any device.
            kind: ``"scalar"``; ``"magnitudes"`` of a layer's units, which say whether they are
                dormant; ``"products"``, of which ranks are taken; ``"losses"``, a row before a
                step and a row after it.
        """
        self._parts.append((kind, name, tuple(value.shape)))
        self._tensors.append(value.detach().reshape(-1))

    def add_norms(self, name: str, values: Tensor, owners: Sequence[tuple[str, int]]) -> None:
        """Add ℓ2 norms of tensors; each has a layer and a size.

        :meth:`scalars` has the norm of each layer and of all layers.
        """
        self._owners[name] = owners
        self.add(name, values, "norms")

    def add_means(
        self, name: str, values: Tensor, owners: Sequence[tuple[str, int]], means: bool = False
    ) -> None:
        """Add sums (or means) of tensors; :meth:`scalars` has the means of layers and of all."""
        self._owners[name] = owners
        self.add(name, values, "means" if means else "sums")

    def add_ratios(
        self, name: str, above: Tensor, below: Tensor, owners: Sequence[tuple[str, int]]
    ) -> None:
        """Add two ℓ2 norms of each tensor; :meth:`scalars` has ratios of layers and of all."""
        self._owners[name] = owners
        self.add(name, torch.stack([above, below]), "ratios")

    def add_histograms(self, name: str, counts: Tensor, owners: Sequence[tuple[str, int]]) -> None:
        """Add a histogram of a sample of each tensor; :attr:`histograms` has those of layers."""
        self._owners[name] = owners
        self.add(name, counts, "histograms")

    def send(self) -> None:
        """Start copying to the host; nobody waits for it."""
        if not self._tensors:
            self._host = torch.zeros(0)
            return
        home = next(
            (t.device for t in self._tensors if t.device.type != "cpu"), torch.device("cpu")
        )
        dtype = wide_dtype(home)
        flat = torch.cat([t.to(home, dtype, non_blocking=True) for t in self._tensors])
        self._tensors.clear()
        if home.type == "cuda":
            self._host = flat.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = flat

    # ----------------------------------------------------------------------- reading
    @property
    def is_sent(self) -> bool:
        """Whether :meth:`send` was called."""
        return self._host is not None

    @property
    def on_host(self) -> bool:
        """Whether reading it waits for no device."""
        if self._host is None:
            return False
        return self._host.device.type == "cpu" and (self._event is None or self._event.query())

    def scalars(self) -> dict[str, float]:
        """All numbers by name; waits until they are on the host. Sets :attr:`histograms`."""
        assert self._host is not None, "send() first"
        if self._event is not None:
            self._event.synchronize()
        values = np.asarray(self._host.cpu(), np.float64)
        found: dict[str, float] = {}
        alike: dict[int, list[tuple[str, Array]]] = {}  # products of the same size
        units: dict[str, tuple[int, int, int]] = {}  # dormant, dead and all of each layer
        first = 0
        for kind, name, shape in self._parts:
            size = math.prod(shape)
            part = values[first : first + size].reshape(shape)
            first += size
            if kind == "scalar":
                found[name] = float(part)
            elif kind == "magnitudes":
                dormant = dormancy_scores(torch.from_numpy(part)) <= self.tau
                units[name] = (int(dormant.sum()), int((part == 0).sum()), size)
            elif kind == "products":
                alike.setdefault(size, []).append((name, part))
                found[f"effective_rank/{name}"] = found[f"stable_rank/{name}"] = math.nan
            elif kind == "histograms":
                for (layer, size), counts in zip(self._owners[name], part, strict=True):
                    for key in (name, f"{name}/{layer}"):
                        whole = counts * size / counts.sum()
                        self.histograms[key] = self.histograms.get(key, 0) + whole
            elif kind == "losses":
                found["loss"] = float(part[0].mean())
                found[name] = float(sample_plasticity(part[0], part[1]).mean())
            else:
                found |= self._by_layer(kind, name, part)
        for place, measure in enumerate(("dormant", "dead") if units else ()):
            found[measure] = sum(u[place] for u in units.values()) / sum(
                u[2] for u in units.values()
            )
            found |= {f"{measure}/{name}": u[place] / max(1, u[2]) for name, u in units.items()}
        for some in alike.values():
            ranks = ranks_of_products(torch.from_numpy(np.stack([part for _, part in some])))
            for (name, _), effective, stable in zip(
                some, *(r.tolist() for r in ranks), strict=True
            ):
                found[f"effective_rank/{name}"], found[f"stable_rank/{name}"] = effective, stable
        return found

    def _by_layer(self, kind: str, name: str, part: Array) -> dict[str, float]:
        if kind == "ratios":
            above, below = (self._by_layer("norms", name, each) for each in part)
            return {key: above[key] / below[key] if below[key] else math.nan for key in above}
        power = 2 if kind == "norms" else 1
        sums: dict[str, float] = {"": 0.0}
        sizes: dict[str, int] = {"": 0}
        if kind == "means":
            part = part * [size for _, size in self._owners[name]]
        for value, (layer, size) in zip(part**power, self._owners[name], strict=True):
            for each in ("", layer):
                sums[each] = sums.get(each, 0.0) + float(value)
                sizes[each] = sizes.get(each, 0) + size
        if kind == "norms":
            found = {layer: math.sqrt(total) for layer, total in sums.items()}
        else:
            found = {layer: total / max(1, sizes[layer]) for layer, total in sums.items()}
        return {f"{name}/{layer}" if layer else name: value for layer, value in found.items()}
