"""The linear layers of a model, watched by hooks: what goes in, and how the loss depends on it.

What is recorded must belong to the same loss as ``.grad``, as the gates of
:mod:`upgd.optim.features` must: a backward pass counts when it reaches the ``.grad`` of a layer's
parameters, and what was counted goes when that ``.grad`` goes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from upgd.curvature.freshness import is_reset
from upgd.optim.batch import compute_dtype
from upgd.optim.features import OUTSIDE, has_features
from upgd.optim.roles import bound
from upgd.optim.uncompiled import uncompiled

_Samples = tuple[Tensor, Tensor]


@dataclass(eq=False)
class WatchedLayer:
    """A linear layer ``z = W·x + b``, and the samples that its ``.grad`` is the sum of.

    A sample is a row of the layer's input: one of the batch, or one position of a sequence.
    """

    name: str
    module: nn.Linear
    role: str
    before: WatchedLayer | None = None  # whose units are this layer's inputs
    _records: list[_Samples] = field(default_factory=list)
    _passes: dict[int, tuple[bool, list[_Samples]]] = field(default_factory=dict)

    @property
    def weight(self) -> Tensor:
        return self.module.weight

    @property
    def bias(self) -> Tensor | None:
        return self.module.bias

    @property
    def own(self) -> list[Tensor]:
        """Its weight and, if it has one, its bias."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def bound(self) -> float:
        """The largest initial weight."""
        return bound(self.weight.shape)

    def samples(self) -> _Samples | None:
        """Inputs [N, in] and derivatives of each sample's loss by the sums [N, out]; None for none.

        The loss is taken to be the samples' mean.
        """
        if not self._records:
            return None
        dtype = compute_dtype(self.weight.dtype)
        x, d = (torch.cat(parts).to(dtype) for parts in zip(*self._records, strict=True))
        return x, d * len(d)

    def unscale(self, scale: Tensor) -> None:
        """Divide the derivatives by a loss scale."""
        self._records = [(x, d / scale.to(d.device)) for x, d in self._records]

    def reset(self) -> None:
        """Forget the samples."""
        self._records.clear()
        self._passes.clear()

    def add(self, x: Tensor, d: Tensor) -> None:
        """Add an input and the loss's derivative by the output to the current backward pass."""
        dtype = compute_dtype(self.weight.dtype)
        x, d = (t.flatten(0, -2).to(dtype, copy=True) for t in (x, d))
        task = torch._C._current_graph_task_id()
        if task not in self._passes:
            self._passes[task] = bool(is_reset(self.own)), []
            if task != OUTSIDE:
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(partial(self._end_of_pass, task))
        self._passes[task][1].append((x, d))

    def _end_of_pass(self, task: int) -> None:
        """Drop a pass that did not reach ``.grad``."""
        self._passes.pop(task, None)

    def count(self) -> None:
        """Count the current backward pass: it has reached the layer's ``.grad``."""
        reset, found = self._passes.pop(torch._C._current_graph_task_id(), (False, []))
        self._records = found if reset else self._records + found


def _count(layer: WatchedLayer, _: Tensor) -> None:
    layer.count()  # a function of this module, so that a watched model can be pickled


class Layers:
    """The linear layers of a model in their order, watched by hooks.

    Inputs and derivatives are recorded while gradients are enabled. They are those of ``.grad``:
    of the backward passes that filled it, and reset with it. The optimizer's ``zero_grad()`` resets
    its `Layers`: give every optimizer its own.

    The inputs of a layer are taken to be the units of the layer before it in the order of
    ``model.modules()`` if there are as many.

    Args:
        model: Any module; it is only observed.
        output: Name or names of the output layers; by default the last linear layer.

    Example:
        >>> from upgd.optim.layers import Layers
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> Layers(model)
        Layers(0: input, 2: head)
    """

    def __init__(self, model: nn.Module, output: str | Iterable[str] | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"Layers: expected a model, got {type(model).__name__}")
        model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
        found = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and has_features(module)
        }
        if not found:
            raise ValueError("Layers: the model has no linear layer")
        outputs = [output] if isinstance(output, str) else list(output or [list(found)[-1]])
        for name in outputs:
            if name not in found:
                known = ", ".join(found)
                raise ValueError(
                    f"Layers: {name!r} is no linear layer of the model; these are: {known}"
                )
        _refuse_shared(found)
        self.all: list[WatchedLayer] = []
        others = [name for name in found if name not in outputs]
        for name, module in found.items():
            role = "head" if name in outputs else "input" if name == others[0] else "hidden"
            last = self.all[-1] if self.all else None
            chained = last is not None and last.module.out_features == module.in_features
            self.all.append(WatchedLayer(name, module, role, last if chained else None))
        self._by_module = {layer.module: layer for layer in self.all}
        self._counting: dict[Tensor, Any] = {}
        self._handles = [layer.module.register_forward_hook(self._on_forward) for layer in self.all]

    @classmethod
    def nothing(cls) -> Layers:
        """Layers of no model, until one is watched."""
        found = cls.__new__(cls)
        found.all, found._by_module, found._counting, found._handles = [], {}, {}, []
        return found

    def of(self, p: Tensor) -> WatchedLayer | None:
        """The layer whose weight or bias `p` is."""
        return next((layer for layer in self.all if any(p is q for q in layer.own)), None)

    @uncompiled
    def _on_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not (torch.is_grad_enabled() and isinstance(output, Tensor) and output.requires_grad):
            return
        layer = self._by_module[module]  # type: ignore[index]
        x = args[0].detach()
        x = x.unsqueeze(0) if x.dim() == 1 else x
        shape = (*x.shape[:-1], output.shape[-1])
        output.register_hook(lambda d: layer.add(x, d.detach().reshape(shape)))
        # Not once for all: parameters may be unfrozen, and a copy of the model lacks these hooks.
        for p in layer.own:
            if p.requires_grad and p.is_leaf:
                handle, hooks = self._counting.get(p), p._post_accumulate_grad_hooks or {}
                if handle is None or handle.id not in hooks:
                    hook = p.register_post_accumulate_grad_hook(partial(_count, layer))
                    self._counting[p] = hook

    def reset(self) -> None:
        """Forget all samples."""
        for layer in self.all:
            layer.reset()

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in (*self._handles, *self._counting.values()):
            handle.remove()
        self._handles.clear()
        self._counting.clear()

    def __repr__(self) -> str:
        return f"Layers({', '.join(f'{layer.name}: {layer.role}' for layer in self.all)})"


def _refuse_shared(found: dict[str, nn.Linear]) -> None:
    """Raise if two layers have a parameter in common, whose gradient is of both."""
    owners: dict[Tensor, str] = {}
    for name, module in found.items():
        for p in (module.weight, module.bias):
            if p is not None and owners.setdefault(p, name) != name:
                raise ValueError(
                    f"Layers: layers {owners[p]!r} and {name!r} share a parameter, which has the "
                    "inputs of both; layered methods need a layer for each parameter"
                )
