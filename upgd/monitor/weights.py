"""Measures weights, gradients, updates and utilities, and writes them into a reading."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from upgd.monitor.measures import spread
from upgd.monitor.reading import Reading
from upgd.optim.batch import row_norms, tiny
from upgd.optim.upgd import UtilityOptimizer

SAMPLED = 1 << 14
"""The most elements of a tensor that are looked at for updates and utilities."""
PROTECTED = 0.55
"""The scaled utility Ū from which on a weight counts as protected: it takes at most 0.9 of a step
(``2·(1 - Ū)``)."""
BINS = 21
"""Of the histograms of Ū over [0, 1]; the middle one holds weights without utility."""


class Owned(NamedTuple):
    """A parameter and the layer that it belongs to."""

    layer: str
    param: Tensor

    @property
    def size(self) -> tuple[str, int]:
        """The layer and the number of elements."""
        return self.layer, self.param.numel()


def trained(model: nn.Module) -> list[Owned]:
    """The parameters that require gradients, each once; of a sharded one, this process's part."""
    found: dict[int, Owned] = {}
    for name, module in model.named_modules():
        for p in module.parameters(recurse=False):
            if p.requires_grad and not is_lazy(p) and p.device.type != "meta":
                found.setdefault(id(p), Owned(name or type(module).__name__, p))
    return list(found.values())


def local(t: Tensor) -> Tensor:
    """The part of a tensor that this process holds, dense."""
    t = t.detach()
    part: Any = getattr(t, "to_local", None)
    t = t if part is None else part()
    return t.coalesce().values() if t.is_sparse else t


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
    weights = [local(p) for _, p in params]
    owners = [(layer, w.numel()) for (layer, _), w in zip(params, weights, strict=True)]
    reading.add_norms("weight_norm", norms_of(weights), owners)
    sums = [w.abs().sum(dtype=torch.promote_types(w.dtype, torch.float32)) for w in weights]
    reading.add_means("weight_magnitude", stack(sums), owners)


def take_gradients(reading: Reading, params: Sequence[Owned]) -> None:
    """``gradient_norm`` of what is in ``.grad``."""
    held = [(layer, local(p.grad)) for layer, p in params if p.grad is not None]
    if held:
        owners = [(layer, g.numel()) for layer, g in held]
        reading.add_norms("gradient_norm", norms_of([g for _, g in held]), owners)


def sample(t: Tensor) -> Tensor:
    """At most :data:`SAMPLED` elements of a tensor, spread evenly."""
    flat = local(t).reshape(-1)
    if flat.numel() <= SAMPLED:
        return flat
    return flat[spread(flat.numel(), SAMPLED, flat.device)]


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
    """``protected``, ``eta`` (global scaling) and histograms of scaled utilities."""
    for opt in optimizers:
        if not isinstance(opt, UtilityOptimizer):
            continue
        held = [(layer, p) for layer, p in params if "utility" in opt.state.get(p, {})]
        if not held:
            continue
        utilities = [local(opt.utility(p)) for _, p in held]
        if opt.scaling == "global":
            eta = stack([u.amax() for u in utilities]).amax().abs()
            reading.add("eta", eta)
            some = [sample(u) for u in utilities]
            eta = eta.clamp_min(tiny(eta.dtype))
            scaled = [torch.sigmoid(u / eta.to(u)) for u in some]
        else:
            rows = [u.reshape(u.shape[0] if u.dim() > 1 else 1, -1) for u in utilities]
            parts = [r / row_norms([r]).unsqueeze(1) for r in rows]
            scaled = [torch.sigmoid(sample(part)) for part in parts]
        sizes = [u.numel() for u in utilities]
        counts = [
            (s >= PROTECTED).sum() * (size / s.numel())
            for s, size in zip(scaled, sizes, strict=True)
        ]
        layers = [layer for layer, _ in held]
        owners = list(zip(layers, sizes, strict=True))
        reading.add_means("protected", stack(counts), owners)
        _take_histograms(reading, layers, scaled, sizes)
        return  # of several such optimizers, the first


def _take_histograms(
    reading: Reading, layers: Sequence[str], scaled: Sequence[Tensor], sizes: Sequence[int]
) -> None:
    found: dict[str, Tensor] = {}
    for layer, s, size in zip(layers, scaled, sizes, strict=True):
        counts = histogram(s) * (size / s.numel())
        for each in ("utility", f"utility/{layer}"):
            found[each] = found[each] + counts.to(found[each]) if each in found else counts
    for name, counts in found.items():
        reading.add(name, counts, "histogram")


def histogram(values: Tensor) -> Tensor:
    """How many of some values lie in each of :data:`BINS` equal parts of [0, 1].

    Example:
        >>> histogram(torch.tensor([0.0, 0.5, 0.5, 1.0])).nonzero().flatten()
        tensor([ 0, 10, 20])
    """
    # Not torch.histc: on CUDA it has no deterministic form.
    places = (values * BINS).long().clamp(0, BINS - 1)
    return torch.stack([(places == n).sum() for n in range(BINS)]).to(torch.float32)


def take_skipped(reading: Reading, optimizers: Iterable[Optimizer]) -> None:
    """``skipped_steps`` of our optimizers."""
    found = [s for s in (getattr(o, "skipped_steps", None) for o in optimizers) if s is not None]
    if found:
        counts = [s if isinstance(s, Tensor) else torch.tensor(float(s)) for s in found]
        reading.add("skipped_steps", stack([c.float() for c in counts]).amax())


def stack(values: Sequence[Tensor]) -> Tensor:
    """Zero-dimensional tensors of any devices as a vector on the first one's."""
    return torch.stack([v.to(values[0].device, non_blocking=True) for v in values])
