"""The linear layers of a model, watched by hooks: what goes in, and how the loss depends on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from upgd.optim.features import has_features
from upgd.optim.uncompiled import uncompiled


@dataclass(eq=False)
class WatchedLayer:
    """A linear layer ``z = W·x + b``, and its samples since gradients were last set to zero.

    A sample is a row of the layer's input: one of the batch, or one position of a sequence.
    """

    name: str
    module: nn.Linear
    role: str
    before: WatchedLayer | None = None  # whose units are this layer's inputs
    _records: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def weight(self) -> Tensor:
        return self.module.weight

    @property
    def bias(self) -> Tensor | None:
        return self.module.bias

    @property
    def bound(self) -> float:
        """The largest initial weight."""
        return float(max(1, self.module.in_features) ** -0.5)

    def samples(self) -> tuple[Tensor, Tensor] | None:
        """Inputs [N, in] and derivatives of each sample's loss by the sums [N, out]; None for none.

        The loss is taken to be the samples' mean.
        """
        if not self._records:
            return None
        x, d = (torch.cat(parts) for parts in zip(*self._records, strict=True))
        return x, d * len(d)

    def reset(self) -> None:
        """Forget the samples."""
        self._records.clear()

    def add(self, x: Tensor, d: Tensor) -> None:
        """Record a layer's input and the loss's derivative by its output."""
        double = self.weight.dtype == torch.float64
        dtype = torch.float64 if double else torch.float32
        x, d = x.flatten(0, -2).to(dtype), d.flatten(0, -2).to(dtype)
        self._records.append((x, d))


class Layers:
    """The linear layers of a model in their order, watched by hooks.

    Derivatives are recorded while gradients are enabled, and belong to ``.grad``: an optimizer that
    reads them forgets them with each step and with ``zero_grad()``.

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
        self.all: list[WatchedLayer] = []
        for number, (name, module) in enumerate(found.items()):
            role = "head" if name in outputs else "hidden" if number else "input"
            last = self.all[-1] if self.all else None
            chained = last is not None and last.module.out_features == module.in_features
            self.all.append(WatchedLayer(name, module, role, last if chained else None))
        self._handles = [
            layer.module.register_forward_hook(self._hook(layer)) for layer in self.all
        ]

    @staticmethod
    def _hook(layer: WatchedLayer) -> Any:
        @uncompiled
        def on_forward(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled() and isinstance(output, Tensor) and output.requires_grad:
                x = args[0].detach()
                if x.dim() == 1:
                    x = x.unsqueeze(0)
                output.register_hook(lambda d: layer.add(x, d.detach().reshape(*x.shape[:-1], -1)))

        return on_forward

    def reset(self) -> None:
        """Forget all samples."""
        for layer in self.all:
            layer.reset()

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __repr__(self) -> str:
        return f"Layers({', '.join(f'{layer.name}: {layer.role}' for layer in self.all)})"
