"""Measures weights, gradients, updates and utilities, and writes them into a reading."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from upgd.monitor.measures import stride
from upgd.monitor.reading import Reading
from upgd.optim.batch import row_norms, tiny
from upgd.optim.shards import local
from upgd.optim.upgd import UtilityOptimizer

SAMPLED = 1 << 12
"""The most elements of a tensor that are looked at for updates and utilities."""
PROTECTED = 0.55
"""The scaled utility Ū from which on a weight counts as protected: it takes at most 0.9 of a step
(``2·(1 - Ū)``)."""
BINS = 21
"""Of the histograms of Ū over [0, 1]; the middle one holds weights without utility."""


def optimizers_in(given: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    """The optimizers that a user named, out of frameworks' wrappers; TypeError for other things."""
    found = [] if given is None else [given] if isinstance(given, Optimizer) else list(given)
    for n, opt in enumerate(found):
        while isinstance(inner := getattr(opt, "optimizer", None), Optimizer):
            opt = inner
        if not isinstance(opt, Optimizer):
            raise TypeError(
                f"Monitor: opt must be a torch optimizer or several, got {type(opt).__name__}"
            )
        found[n] = opt
    return found


class Owned(NamedTuple):
    """A parameter and the layer that it belongs to."""

    layer: str
    param: Tensor


def trained(model: nn.Module) -> list[Owned]:
    """The parameters that require gradients, each once; of a sharded one, this process's part."""
    found: dict[int, Owned] = {}
    for name, module in model.named_modules():
        for p in module.parameters(recurse=False):
            if p.requires_grad and not is_lazy(p) and p.device.type != "meta":
                found.setdefault(id(p), Owned(name or type(module).__name__, p))
    return list(found.values())


def held(t: Tensor) -> Tensor:
    """What this process holds of a tensor; of a sparse one, its values."""
    part = local(t.detach())
    return part.coalesce().values() if part.is_sparse else part


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """The ℓ2 norm of each tensor, as a vector."""
    alike: dict[Any, list[int]] = {}
    for n, t in enumerate(tensors):
        alike.setdefault((t.device, t.dtype), []).append(n)
    found: dict[int, Tensor] = {}
    for (_, dtype), places in alike.items():
        wide = torch.promote_types(dtype, torch.float32)
        each = torch._foreach_norm([tensors[n] for n in places], 2, dtype=wide)
        found.update(zip(places, each, strict=True))
    return stack([found[n] for n in range(len(tensors))])


def take_weights(reading: Reading, params: Sequence[Owned]) -> None:
    """``weight_norm``, and ``weight_magnitude``, the mean absolute value."""
    if not params:
        return
    weights = [held(p) for _, p in params]
    owners = [(layer, w.numel()) for (layer, _), w in zip(params, weights, strict=True)]
    reading.add_norms("weight_norm", norms_of(weights), owners)
    some = gather(weights)
    reading.add_means("weight_magnitude", stack([x.abs().mean() for x in some]), owners, True)


def take_gradients(reading: Reading, params: Sequence[Owned]) -> None:
    """``gradient_norm`` of what is in ``.grad``."""
    found = [(layer, held(p.grad)) for layer, p in params if p.grad is not None]
    if found:
        owners = [(layer, g.numel()) for layer, g in found]
        reading.add_norms("gradient_norm", norms_of([g for _, g in found]), owners)


def sample(t: Tensor) -> Tensor:
    """At most :data:`SAMPLED` elements of a tensor, spread evenly."""
    flat = held(t).reshape(-1)
    return flat[:: stride(flat.numel(), SAMPLED)]


def gather(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """A copy of a sample of each tensor, all in one piece of memory."""
    some = [sample(t) for t in tensors]
    if len({(t.device, t.dtype) for t in some}) > 1:
        some = [t.to(some[0].device, torch.float32) for t in some]
    flat = torch.cat(some)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return tuple(torch.split(flat, [len(t) for t in some]))


class Before(NamedTuple):
    """Samples of parameters before a step."""

    params: Sequence[Owned]
    some: Sequence[Tensor]


def before_step(params: Sequence[Owned]) -> Before | None:
    """What :func:`take_updates` compares with."""
    return Before(params, gather(p for _, p in params)) if params else None


def take_updates(reading: Reading, before: Before | None) -> None:
    """``update_ratio``: the norm of the step's change divided by that of the weights before it."""
    if before is None:
        return
    params, olds = before
    news = gather(p for _, p in params)
    if [len(new) for new in news] == [len(old) for old in olds]:  # else parameters grew
        owners = [(layer, len(old)) for (layer, _), old in zip(params, olds, strict=True)]
        moved = norms_of([new - old for new, old in zip(news, olds, strict=True)])
        reading.add_ratios("update_ratio", moved, norms_of(olds), owners)


def take_utilities(
    reading: Reading, params: Sequence[Owned], optimizers: Iterable[Optimizer]
) -> None:
    """``protected``, ``eta`` (with global scaling) and histograms of scaled utilities.

    Of several optimizers with utilities, ``eta`` is that of the first.
    """
    owners: list[tuple[str, int]] = []
    many: list[Tensor] = []
    some: list[Tensor] = []
    least = math.log(PROTECTED / (1 - PROTECTED))  # Û/η of a weight with this Ū
    for opt in optimizers:
        if not isinstance(opt, UtilityOptimizer):
            continue
        owned = [(layer, p) for layer, p in params if "utility" in opt.state.get(p, {})]
        traces = [(layer, opt._traced(p)) for layer, p in owned]
        traces = [(layer, trace) for layer, trace in traces if trace[0].numel()]
        if not traces:
            continue
        units = _units(None if owners else reading, opt, [trace for _, trace in traces])
        owners += [(layer, u.numel()) for layer, (u, _) in traces]
        for (_, (u, _)), unit in zip(traces, units, strict=True):
            if unit.dim():  # one per row
                u, unit = u / unit, torch.ones((), dtype=u.dtype, device=u.device)
            many.append(_count(u, least * unit))
            some.append(sample(u) / unit)
    if owners:
        reading.add_means("protected", stack(many), owners)
        reading.add_histograms("utility", histograms(some), owners)


def _count(values: Tensor, least: Tensor) -> Tensor:
    """How many values are at least so large."""
    if values.device.type == "cpu":  # where numpy compares ten times as fast
        return torch.tensor(np.count_nonzero(values.numpy() >= least.numpy()))
    return torch.count_nonzero(values >= least)


def _units(
    reading: Reading | None, opt: UtilityOptimizer, traces: list[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """What each trace is divided by to give Û/η: a number, or one per row with local scaling.

    η is added to `reading`. Utilities that other processes hold do not count here.
    """
    if opt.scaling == "global":
        eta = stack([u.amax() / correction for u, correction in traces]).amax().abs()
        if reading is not None:
            reading.add("eta", eta)
        return [(eta.to(c) * c).clamp_min(tiny(c.dtype)) for _, c in traces]
    rows = [u.reshape(u.shape[0] if u.dim() > 1 else 1, -1) for u, _ in traces]
    norms = [row_norms([r]) for r in rows]
    return [n.reshape(-1, *[1] * (u.dim() - 1)) for n, (u, _) in zip(norms, traces, strict=True)]


def histograms(scaled: Sequence[Tensor]) -> Tensor:
    """How many of φ(x) lie in each of :data:`BINS` equal parts of [0, 1], for each tensor.

    Example:
        >>> histograms([torch.tensor([-50.0, 0.0, 0.0, 50.0])]).nonzero()[:, 1]
        tensor([ 0, 10, 20])
    """
    home, sizes = scaled[0].device, [len(x) for x in scaled]
    flat = torch.cat([x.to(home) for x in scaled]).sigmoid().mul_(BINS).long().clamp_(0, BINS - 1)
    for n, part in enumerate(flat.split(sizes)):
        part.add_(BINS * n)
    if home.type == "cpu":
        counts = torch.bincount(flat, minlength=BINS * len(sizes))
    else:  # where bincount would wait for the device
        edges = torch.arange(BINS * len(sizes) + 1, device=home)
        counts = torch.searchsorted(flat.sort().values, edges).diff()
    return counts.view(-1, BINS)


def take_skipped(reading: Reading, optimizers: Iterable[Optimizer]) -> None:
    """``skipped_steps`` of our optimizers."""
    found = [s for s in (getattr(o, "skipped_steps", None) for o in optimizers) if s is not None]
    if found:
        counts = [s if isinstance(s, Tensor) else torch.tensor(float(s)) for s in found]
        reading.add("skipped_steps", stack([c.float() for c in counts]).amax())


def stack(values: Sequence[Tensor]) -> Tensor:
    """Zero-dimensional tensors of any devices as a vector on the first one's."""
    if len({v.device for v in values}) > 1:
        values = [v.to(values[0].device, non_blocking=True) for v in values]
    return torch.stack(list(values))
