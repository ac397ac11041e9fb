"""Measures weights, gradients, updates and utilities, and writes them into a reading."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

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
    home = found[0]
    return torch.stack([found[n].to(home, non_blocking=True) for n in range(len(tensors))])


def take_weights(reading: Reading, params: Sequence[Owned]) -> None:
    """``weight_norm``, and ``weight_magnitude``, the mean absolute value."""
    if not params:
        return
    weights = [held(p) for _, p in params]
    owners = [(layer, w.numel()) for (layer, _), w in zip(params, weights, strict=True)]
    reading.add_norms("weight_norm", norms_of(weights), owners)
    sums = [w.abs().sum(dtype=torch.promote_types(w.dtype, torch.float32)) for w in weights]
    reading.add_means("weight_magnitude", stack(sums), owners)


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


def before_step(params: Iterable[Owned]) -> list[tuple[Owned, Tensor]]:
    """A sample of each parameter, copied."""
    return [(owned, sample(owned.param).clone()) for owned in params]


def take_updates(reading: Reading, before: Sequence[tuple[Owned, Tensor]]) -> None:
    """``update_ratio``: the norm of the step's change divided by that of the weights before it."""
    kept = [(owned.layer, old, sample(owned.param)) for owned, old in before]
    kept = [(layer, old, new) for layer, old, new in kept if old.shape == new.shape]
    if kept:
        olds, news = [old for _, old, _ in kept], [new for _, _, new in kept]
        moved = norms_of([new - old for new, old in zip(news, olds, strict=True)])
        owners = [(layer, old.numel()) for layer, old, _ in kept]
        reading.add_ratios("update_ratio", moved, norms_of(olds), owners)


def take_utilities(
    reading: Reading, params: Sequence[Owned], optimizers: Iterable[Optimizer]
) -> None:
    """``protected``, ``eta`` (with global scaling) and histograms of scaled utilities.

    Of several optimizers with utilities, those of the first.
    """
    for opt in optimizers:
        if not isinstance(opt, UtilityOptimizer):
            continue
        owned = [(layer, p) for layer, p in params if "utility" in opt.state.get(p, {})]
        traces = [(layer, opt._traced(p)) for layer, p in owned]
        traces = [(layer, trace) for layer, trace in traces if trace[0].numel()]
        if traces:
            owners = [(layer, u.numel()) for layer, (u, _) in traces]
            units = _units(reading, opt, [trace for _, trace in traces])
            least = math.log(PROTECTED / (1 - PROTECTED))  # Û/η of a weight with this Ū
            many, some = [], []
            for (_, (u, _)), unit in zip(traces, units, strict=True):
                scaled = u / unit if unit.dim() else u
                many.append(torch.count_nonzero(scaled >= least * (1 if unit.dim() else unit)))
                some.append(sample(scaled) / (1 if unit.dim() else unit))
            reading.add_means("protected", stack(many), owners)
            reading.add_histograms("utility", histograms([x.sigmoid() for x in some]), owners)
            return


def _units(
    reading: Reading, opt: UtilityOptimizer, traces: list[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """What each trace is divided by to give Û/η: a number, or one per row with local scaling.

    Utilities that other processes hold do not count here.
    """
    if opt.scaling == "global":
        eta = stack([u.amax() / correction for u, correction in traces]).amax().abs()
        reading.add("eta", eta)
        return [(eta.to(c) * c).clamp_min(tiny(c.dtype)) for _, c in traces]
    rows = [u.reshape(u.shape[0] if u.dim() > 1 else 1, -1) for u, _ in traces]
    norms = [row_norms([r]) for r in rows]
    return [n.reshape(-1, *[1] * (u.dim() - 1)) for n, (u, _) in zip(norms, traces, strict=True)]


def histograms(values: Sequence[Tensor]) -> Tensor:
    """How many of each tensor's elements lie in each of :data:`BINS` equal parts of [0, 1].

    Example:
        >>> histograms([torch.tensor([0.0, 0.5, 0.5, 1.0])]).nonzero()[:, 1]
        tensor([ 0, 10, 20])
    """
    home = values[0].device
    places = [
        (v.to(home) * BINS).long().clamp_(0, BINS - 1) + BINS * n for n, v in enumerate(values)
    ]
    flat, bins = torch.cat(places), BINS * len(values)
    if home.type == "cpu":
        counts = torch.bincount(flat, minlength=bins)
    else:  # where bincount would wait for the device
        edges = torch.arange(bins + 1, device=home)
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
    return torch.stack([v.to(values[0].device, non_blocking=True) for v in values])
