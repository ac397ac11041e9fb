"""Records what hidden units put out in the forward passes of training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from upgd.monitor.measures import mean_magnitude, products, some_rows
from upgd.optim.features import ACTIVATIONS, PASSED, feature_axis, has_features
from upgd.optim.shards import is_dtensor

Activation = Callable[[Tensor], Tensor]


@dataclass(eq=False, slots=True)
class Seen:
    """One output of a layer; first its own, then that of the modules that follow it."""

    rows: int
    value: Tensor
    kept: int  # the version of `value` when it was seen
    at: nn.Module  # whose output it is
    version: int = 0  # of the output itself


@dataclass(eq=False)
class Layer:
    """A layer whose units are watched."""

    name: str
    module: nn.Module
    units: int = 0  # known after a forward pass
    activated: bool = False  # whether an activation module follows it
    copies: bool = False  # its outputs are changed in place later on, so they are copied
    rows: int = 0
    seen: deque[Seen] = field(default_factory=deque)

    @property
    def label(self) -> str:
        """Its name; a model that is a single layer has none."""
        return self.name or type(self.module).__name__

    def add(self, h: Tensor, at: nn.Module, samples: int) -> Seen:
        """Note an output of `at`, and keep the newest that have `samples` rows together."""
        shape = h.shape
        if len(shape) == 2:  # the quick way: a stream of single samples comes here at every pass
            rows, self.units = shape
        else:
            self.units = shape[feature_axis(self.module, h)]
            rows = h.numel() // max(1, self.units)
        value = h.detach()
        if self.copies:
            value = value.clone()
        seen = Seen(rows, value, value._version, at, h._version)
        self.seen.append(seen)
        self.rows += rows
        while self.rows - self.seen[0].rows >= samples:
            self.rows -= self.seen.popleft().rows
        return seen

    def move(self, seen: Seen, h: Tensor, at: nn.Module) -> None:
        """The output goes through `at`."""
        seen.value = h.detach().clone() if self.copies else h.detach()
        seen.kept, seen.version, seen.at = seen.value._version, h._version, at

    def forget(self) -> None:
        """Drop what was recorded."""
        self.rows = 0
        self.seen.clear()

    def matrix(self, activation: Activation | None) -> Tensor | None:
        """What its units put out, [..., units]; None if it was overwritten meanwhile."""
        if any(seen.value._version != seen.kept for seen in self.seen):
            self.copies = True  # from the next time on
            return None
        values = [seen.value for seen in self.seen]
        if any(v.dim() != 2 for v in values):  # else units are the last dimension already
            values = [v.movedim(feature_axis(self.module, v), -1) for v in values]
        if len(values) > 1:
            values = [v if v.dim() == 2 else v.reshape(-1, self.units) for v in values]
        h = torch.cat(values) if len(values) > 1 else values[0]
        return h if self.activated or activation is None else activation(h)


class Hook:
    """A forward hook that copies and pickles of the model do without."""

    def __init__(self, call: Callable[[nn.Module, Any, Any], None]) -> None:
        self.call = call

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """What a module calls; compiled code leaves it out."""
        if not torch.compiler.is_compiling():
            self.call(module, args, output)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _no_hook, ()


def no_hook(module: nn.Module, args: Any, output: Any) -> None:
    """Stands for a :class:`Hook` in copies of a model."""


def _no_hook() -> Callable[..., None]:
    return no_hook


class Recorder:
    """Hooks on a model's layers and activations; they are there only while it is open.

    While it is open for the first time it finds out where each layer's units are: behind the
    activation module that directly follows, whatever normalisation or dropout is in between.
    Layers that none follows are left out, unless no layer has one. From then on only those
    modules have hooks, and layers that no pass has used yet (an actor that waits for its critic).

    Args:
        model: Any module.
        output: Names of layers that are not hidden; the last one by default.
        samples: The newest outputs that have so many rows (samples, positions) are kept.
        activation: Applied to outputs where no activation module was found.
        failed: Called where a hook fails; the forward pass goes on.
    """

    def __init__(
        self,
        model: nn.Module,
        output: Iterable[str] | None,
        samples: int,
        activation: Activation | None,
        failed: Callable[[Exception], None],
    ) -> None:
        modules = dict(model.named_modules())
        names = [name for name, module in modules.items() if has_features(module)]
        outputs = names[-1:] if output is None else list(output)
        for name in outputs:
            if name not in names:
                raise ValueError(
                    f"Monitor: output {name!r} is not a linear or convolutional layer of the "
                    f"model; these are: {', '.join(names) or 'none'}"
                )
        self.samples, self.activation = samples, activation
        self.layers = [Layer(name, modules[name]) for name in names if name not in outputs]
        self.failed = failed
        self._modules = modules
        self._by_module = {layer.module: layer for layer in self.layers}
        self._followers = [m for m in modules.values() if _follows(m)] if self.layers else []
        self._places: dict[nn.Module, Layer] = {}  # known after a pass, if no module has two
        self._settled: set[Layer] = set()  # layers that have a place, or are left out
        self._mark = f"_upgd_monitor_{id(self)}"
        self._handles: list[Any] = []
        self.always = False  # record without gradients, too

    def watches(self, model: nn.Module) -> bool:
        """Whether a model still has the modules that it had."""
        return dict(model.named_modules()) == self._modules

    # --------------------------------------------------------------------- recording
    def open(self) -> None:
        """Record from now on."""
        self.forget()
        if not self._handles:
            hooks: dict[Any, Iterable[nn.Module]] = {self._on_place: self._places}
            unknown = [layer.module for layer in self.layers if layer not in self._settled]
            if unknown:
                followers = [m for m in self._followers if m not in self._places]
                hooks |= {self._on_layer: unknown, self._on_follower: followers}
            for call, modules in hooks.items():
                hook = Hook(call)
                self._handles += [module.register_forward_hook(hook) for module in modules]

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

    def _counts(self, module: nn.Module) -> bool:
        return self.always or (torch.is_grad_enabled() and module.training)

    def _on_place(self, module: nn.Module, args: Any, output: Any) -> None:
        try:
            if self._counts(module) and _is_plain(output):
                self._places[module].add(output, module, self.samples)
        except Exception as error:
            self.failed(error)

    def _on_layer(self, module: nn.Module, args: Any, output: Any) -> None:
        try:
            if self._counts(module) and _is_plain(output):
                layer = self._by_module[module]
                seen = layer.add(output, module, self.samples)
                setattr(output, self._mark, (layer, seen))
        except Exception as error:
            self.failed(error)

    def _on_follower(self, module: nn.Module, args: Any, output: Any) -> None:
        try:
            tap = getattr(args[0], self._mark, None) if args else None
            if tap is None or not _is_plain(output):
                return
            layer, seen = tap
            in_place = output is args[0]
            if output.shape != seen.value.shape or args[0]._version != seen.version + in_place:
                return  # pooled, or something else, such as a residual, was added to it
            layer.move(seen, output, module)
            final = not isinstance(module, PASSED)
            layer.activated |= final
            setattr(output, self._mark, None if final else tap)
        except Exception as error:
            self.failed(error)

    def settle(self) -> None:
        """Find out where the units of each layer are, if passes were seen."""
        known = [layer for layer in self.layers if layer.seen and layer not in self._settled]
        if not known:
            return
        chosen = [layer for layer in known if layer.activated]
        if not chosen and not self._places:
            chosen = known
        places = {layer: {seen.at for seen in layer.seen} for layer in chosen}
        every = [at for each in places.values() for at in each] + list(self._places)
        if all(len(each) == 1 for each in places.values()) and len({*every}) == len(every):
            self._places |= {at: layer for layer, each in places.items() for at in each}
            self._settled |= {*known}
        self.close()

    # --------------------------------------------------------------------- measuring
    @property
    def measured(self) -> list[Layer]:
        """The layers that count, of those that were seen."""
        known = [layer for layer in self.layers if layer.seen]
        return [layer for layer in known if layer.activated] or known

    @torch.no_grad()
    def measure(self, layer: Layer) -> tuple[Tensor, Tensor] | None:
        """The mean magnitudes of a layer's units, and the products of some rows of outputs."""
        h = layer.matrix(self.activation)
        if h is None:
            return None
        return mean_magnitude(h), products(some_rows(h, self.samples))

    def __repr__(self) -> str:
        return "\n".join(f"{layer.label}: {self._told(layer)}" for layer in self.layers)

    def _told(self, layer: Layer) -> str:
        if not layer.units:
            return "no forward pass in training mode yet"
        if not layer.activated and any(other.activated for other in self.layers):
            return f"{layer.units} units, left out: no activation module follows"
        place = {module: name for name, module in self._modules.items()}
        at = next((place[m] for m, each in self._places.items() if each is layer), "its activation")
        if layer.activated:
            return f"{layer.units} units behind {at!r}"
        name = getattr(self.activation, "__name__", str(self.activation))
        return f"{layer.units} units, no activation module found; {name} of the layer's output"


def _follows(module: nn.Module) -> bool:
    """Whether a module may be a layer's activation, or stand between the two."""
    if isinstance(module, (*ACTIVATIONS, *PASSED)):
        return True
    own = (module.parameters(), module.buffers(), module.children())
    return all(next(iter(each), None) is None for each in own)  # another library's activation


def _is_plain(output: Any) -> bool:
    """Whether an output is an ordinary tensor, not one of a transform or spread over devices."""
    if type(output) is not Tensor and (not isinstance(output, Tensor) or is_dtensor(output)):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(output)
