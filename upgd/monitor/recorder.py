"""Records what hidden units put out in the forward passes of training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from upgd.monitor.measures import dormancy_scores, mean_magnitude, products, some_rows
from upgd.optim.features import ACTIVATIONS, PASSED, feature_axis, has_features

Activation = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Seen:
    """One output of a layer: first its own, then that of the module that follows."""

    layer: Layer
    rows: int
    value: Tensor
    version: int = 0  # of the output when it was seen
    kept: int = 0  # of `value` then
    activated: bool = False


@dataclass(eq=False)
class Layer:
    """A layer whose units are watched."""

    name: str
    module: nn.Module
    units: int = 0  # known after a forward pass
    activated: bool | None = None  # whether an activation module follows it; None before a pass
    copies: bool = False  # its outputs are changed in place later on, so they are copied
    rows: int = 0
    seen: deque[Seen] = field(default_factory=deque)

    def add(self, seen: Seen, samples: int) -> None:
        """Keep the newest outputs that have `samples` rows together."""
        self.seen.append(seen)
        self.rows += seen.rows
        while self.rows - self.seen[0].rows >= samples:
            self.rows -= self.seen.popleft().rows

    def forget(self) -> None:
        """Drop what was recorded."""
        self.rows = 0
        self.seen.clear()


class Hook:
    """A forward hook that copies and pickles of the model do without."""

    def __init__(self, call: Callable[[nn.Module, Any, Any], None]) -> None:
        self.call = call

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """What a module calls."""
        self.call(module, args, output)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> str:
        return "no_hook"


def no_hook(module: nn.Module, args: Any, output: Any) -> None:
    """Stands for a :class:`Hook` in copies of a model."""


class Recorder:
    """Hooks on a model's layers and activations; they are there only while it is open.

    Args:
        model: Any module.
        output: Name or names of layers that are not hidden; the last one by default.
        samples: The newest outputs that have so many rows (samples, positions) are kept.
        activation: Applied to the outputs of layers that no activation module follows.
    """

    def __init__(
        self,
        model: nn.Module,
        output: str | Iterable[str] | None,
        samples: int,
        activation: Activation | None,
    ) -> None:
        modules = dict(model.named_modules())
        names = [name for name, module in modules.items() if has_features(module)]
        given = names[-1:] if output is None else [output] if isinstance(output, str) else output
        outputs = list(given)
        for name in outputs:
            if name not in names:
                raise ValueError(
                    f"Monitor: output {name!r} is not a linear or convolutional layer of the "
                    f"model; these are: {', '.join(names) or 'none'}"
                )
        self.samples, self.activation = samples, activation
        hidden = [name for name in names if name not in outputs]
        self.layers = [Layer(name, modules[name]) for name in hidden]
        self._by_module = {layer.module: layer for layer in self.layers}
        self._followers = [m for m in modules.values() if _follows(m)] if self.layers else []
        self._mark = f"_upgd_monitor_{id(self)}"
        self._handles: list[Any] = []
        self.failed: Callable[[Exception], None] = _raise

    # --------------------------------------------------------------------- recording
    def open(self) -> None:
        """Record from now on."""
        self.forget()
        if not self._handles:
            layer_hook, follower_hook = Hook(self._on_layer), Hook(self._on_follower)
            for layer in self.layers:
                self._handles.append(layer.module.register_forward_hook(layer_hook))
            for module in self._followers:
                self._handles.append(module.register_forward_hook(follower_hook))

    def close(self) -> None:
        """Take the hooks off the model; what was recorded stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forget(self) -> None:
        """Drop what was recorded."""
        for layer in self.layers:
            layer.forget()

    @property
    def passes(self) -> int:
        """How many forward passes have the rows that are needed; 0 if none was seen."""
        each = [layer.seen[-1].rows for layer in self.layers if layer.seen]
        return -(-self.samples // max(1, min(each))) if each else 0

    def _on_layer(self, module: nn.Module, args: Any, output: Any) -> None:
        try:
            if not (torch.is_grad_enabled() and module.training and _is_plain(output)):
                return
            layer = self._by_module[module]
            layer.units = output.shape[feature_axis(module, output)]
            seen = Seen(layer, output.numel() // max(1, layer.units), output)
            self._sit(seen, output, final=False)
            layer.add(seen, self.samples)
        except Exception as error:
            self.failed(error)

    def _on_follower(self, module: nn.Module, args: Any, output: Any) -> None:
        try:
            seen = getattr(args[0], self._mark, None) if args else None
            if seen is None or not _is_plain(output) or output.shape != seen.value.shape:
                return
            in_place = output is args[0]
            if args[0]._version != seen.version + in_place:
                return  # something else, such as a residual, was added to it meanwhile
            seen.activated = not isinstance(module, PASSED)
            self._sit(seen, output, final=seen.activated)
        except Exception as error:
            self.failed(error)

    def _sit(self, seen: Seen, h: Tensor, final: bool) -> None:
        seen.value = h.detach().clone() if seen.layer.copies else h.detach()
        seen.version, seen.kept = h._version, seen.value._version
        setattr(h, self._mark, None if final else seen)

    # --------------------------------------------------------------------- measuring
    @property
    def measured(self) -> list[Layer]:
        """The layers that count: those that an activation follows, or all if none is followed."""
        known = [layer for layer in self.layers if layer.rows]
        for layer in known:
            layer.activated = any(seen.activated for seen in layer.seen)
        return [layer for layer in known if layer.activated] or known

    def matrix(self, layer: Layer) -> Tensor | None:
        """What a layer's units put out, [..., units]; None if it was overwritten meanwhile."""
        found = []
        for seen in layer.seen:
            if seen.value._version != seen.kept:
                layer.copies = True  # from the next time on
                return None
            value = seen.value
            if not seen.activated and self.activation is not None:
                value = self.activation(value)
            found.append(value.movedim(feature_axis(layer.module, value), -1))
        if len(found) == 1:
            return found[0]
        return torch.cat([value.reshape(-1, layer.units) for value in found])

    @torch.no_grad()
    def measure(self, layer: Layer) -> tuple[Tensor, Tensor, Tensor] | None:
        """A layer's scores of dormancy, which units are dead, and the products of some rows."""
        h = self.matrix(layer)
        if h is None:
            return None
        magnitudes = mean_magnitude(h)
        return dormancy_scores(magnitudes), magnitudes == 0, products(some_rows(h, self.samples))


def _follows(module: nn.Module) -> bool:
    """Whether a module may be a layer's activation, or stand between the two."""
    if isinstance(module, (*ACTIVATIONS, *PASSED)):
        return True
    return _is_leaf(module)  # another library's activation, if it keeps the shape


def _is_leaf(module: nn.Module) -> bool:
    own = (module.parameters(), module.buffers(), module.children())
    return all(next(iter(each), None) is None for each in own)


def _is_plain(output: Any) -> bool:
    """Whether an output is an ordinary tensor, not one of a transform or spread over devices."""
    if not isinstance(output, Tensor) or hasattr(output, "to_local"):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(output)


def _raise(error: Exception) -> None:
    raise error
