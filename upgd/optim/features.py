"""Measures how much the loss depends on each hidden feature of an ordinary model.

The paper puts a gate, fixed at 1, on the output of every hidden feature and takes the
loss's derivative with respect to it. That derivative is ``Σ h · ∂L/∂h`` over the
samples of the batch (and the positions of a channel), so no gate has to be built into
the model: hooks see ``h`` in the forward and ``∂L/∂h`` in the backward pass.

Gates must belong to the same loss as ``.grad``. Many passes through a model do not fill
``.grad`` (``torch.autograd.grad``, ``torch.func.grad``), so a pass counts only when it
reaches the ``.grad`` of the layer's own parameters, and what was counted goes when that
``.grad`` goes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from upgd.curvature.freshness import drop_reset, is_reset, stale, stamp
from upgd.curvature.walk import TAPS, Tap
from upgd.optim.roles import CONVOLUTIONS, check_layers, is_layer, is_transposed, output_layers
from upgd.optim.shards import FSDP1
from upgd.optim.uncompiled import uncompiled

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
ACTIVATIONS: tuple[type[nn.Module], ...] = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU),
    *(nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Sigmoid),
    *(nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardshrink, nn.Softshrink),
    nn.Threshold,
)
"""Modules that are taken for the activation of the layer they directly follow."""
PASSED: tuple[type[nn.Module], ...] = (*_NORMS, nn.Identity, nn.modules.dropout._DropoutNd)
"""Modules that may stand between a layer and its activation."""
OUTSIDE = -1
"""The engine's number of a backward pass where there is none."""


@dataclass
class _Pass:
    """A backward pass that has not reached the layer's ``.grad`` yet."""

    reset: bool | Tensor  # whether ``.grad`` had been reset before it
    first: Tensor  # its part of ``∂L/∂gate``


@dataclass(eq=False)
class FeatureLayer:
    """The features of one layer and what leads into them.

    Attributes:
        name: The layer's name in the model.
        module: A linear or convolutional layer.
        params: Parameters into the features, the weight first; each has one entry per
            feature along dimension 0, the weight along dimension 1 where `transposed`.
        transposed: Whether the weight is [inputs, outputs], as of Transformers' ``Conv1D``.
        gated: Name of the module on whose output the gates sit, known after a forward
            pass.
        first: ``∂L/∂gate`` per feature, summed over the backward passes that the layer's
            ``.grad`` is the sum of; None before one.
        second: ``∂²L/∂gate²`` per feature, filled by ``optimizer.backward(loss)`` or
            :func:`upgd.curvature.backward`; None otherwise.
    """

    name: str
    module: nn.Module
    params: list[Tensor]
    transposed: bool = False
    gated: str = ""
    first: Tensor | None = None
    second: Tensor | None = None
    _passes: dict[int, _Pass] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of features."""
        return self.params[0].shape[1 if self.transposed else 0]

    @property
    def own(self) -> list[Tensor]:
        """The layer's weight and bias, without what a normalisation added."""
        return self.params[: 1 if self.module.bias is None else 2]

    def add(self, h: Tensor, gradient: Tensor) -> None:
        """Add to the current backward pass: `h` and ``∂L/∂h`` of the same shape."""
        # In half precision the products of a scaled loss overflow where gradients do not.
        product = (h.to(self._dtype) * gradient.to(self._dtype)).movedim(self.axis(h), 0)
        product = product.reshape(self.size, product.numel() // max(1, self.size)).sum(1)
        task = torch._C._current_graph_task_id()
        if task in self._passes:
            self._passes[task].first = self._passes[task].first + product
        else:
            self._passes[task] = _Pass(is_reset(self.own), product)
            if task != OUTSIDE:
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(partial(self._end_of_pass, task))

    def count(self) -> None:
        """Count the current backward pass: it has reached the layer's ``.grad``."""
        self._count(torch._C._current_graph_task_id())

    def _count(self, task: int) -> None:
        this = self._passes.pop(task, None)
        if this is not None:
            before = drop_reset(self.first, this.reset)
            self.first = this.first if before is None else before + this.first

    def _end_of_pass(self, task: int) -> None:
        """Drop a pass that did not reach ``.grad``; no step reads the gates of a frozen layer."""
        if any(p.requires_grad for p in self.own):
            self._passes.pop(task, None)
        else:
            self._count(task)

    def add_second(self, second: Tensor) -> None:
        """Add one backward pass's ``∂²L/∂gate²``."""
        second = second.to(self._dtype)
        self.second = second if self.second is None else self.second + second

    def begin(self) -> None:
        """Forget what belongs to a ``.grad`` that has been reset: a backward pass begins."""
        reset = is_reset(self.own)
        self.first = drop_reset(self.first, reset)
        self.second = None if self.stale() else drop_reset(self.second, reset)

    def end(self) -> None:
        """Note which ``.grad`` the second derivatives belong to: the pass is over."""
        if self.second is not None:
            stamp(self.second, self.params[0])

    def stale(self) -> str | None:
        """Why the second derivatives are not those of ``.grad``; None if they may be."""
        return None if self.second is None else stale(self.params[0], self.second)

    def reset(self) -> None:
        """Forget the derivatives recorded so far."""
        self.first = self.second = None
        self._passes.clear()

    def axis(self, h: Tensor) -> int:
        """The dimension of `h` along which the features lie."""
        return feature_axis(self.module, h)

    @property
    def _dtype(self) -> torch.dtype:
        double = self.params[0].dtype == torch.float64
        return torch.float64 if double else torch.float32


def feature_axis(module: nn.Module, h: Tensor) -> int:
    """The dimension of a layer's output `h` along which its units or channels lie."""
    if isinstance(module, CONVOLUTIONS):
        return h.dim() - 1 - len(module.kernel_size)
    return h.dim() - 1


@dataclass
class _Tap:
    """The gate's place in one forward pass: the latest output that still is the feature."""

    layer: FeatureLayer
    handle: Any = None
    curvature: list[Tap] | None = None
    version: int = 0
    moved: bool = False


def _count(layer: FeatureLayer, _: Tensor) -> None:
    layer.count()  # a function of this module, so that a watched model can be pickled


def has_features(module: nn.Module) -> bool:
    """Whether a module is a linear or convolutional layer whose hooks are called."""
    # Attention calls its output projection's weight itself: no hook would ever see it.
    inside_attention = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return is_layer(module) and not inside_attention


def _is_activation(module: nn.Module) -> bool:
    return isinstance(module, ACTIVATIONS) or type(module).__module__ == "transformers.activations"


class Features:
    """The hidden features of a model, watched by hooks.

    *Which outputs count.* Every unit of ``nn.Linear`` or of Transformers' ``Conv1D`` and every
    channel of ``nn.Conv1d/2d/3d`` is a feature, except those of the output layer. Its gate sits
    on the output of the activation module (one of PyTorch's or of Transformers') that directly
    follows the layer; a normalisation or dropout module in
    between is passed, and a normalisation's scale and shift count as leading into the
    features. Where no activation module follows (there is none, or it is a function such as
    ``F.relu``), the gate sits on the layer's own output, which is the same thing for
    activations with ``σ'(a)·a = σ(a)``, such as ReLU and LeakyReLU, and is not for others:
    use modules there. ``print(features)`` tells what was found.

    *What the output layer is.* The last linear or convolutional layer in the order of
    ``model.modules()``, unless `output` names one or several.

    Derivatives are recorded only while gradients are enabled. They are those of ``.grad``:
    summed over the backward passes that filled it, and reset with it, by the optimizer's or the
    model's ``zero_grad()`` or by hand. ``torch.autograd.grad`` and ``torch.func`` leave them
    alone. The optimizer's ``zero_grad()`` resets its `Features`: give every optimizer its own.
    In a loss that contains gradients (a gradient penalty) they are exact for activations that
    are piecewise linear; for others a term of the activation's second derivative is added.

    Args:
        model: Any module; it is not changed, only observed.
        output: Name or names of the output layers.
        layers: Names of the layers whose units are features; by default all others.

    Example:
        >>> import torch, upgd
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> upgd.Features(model)
        Features(
          0: 8 features, gates on the output of ... (known after a forward pass)
          output: 2
        )
    """

    def __init__(
        self,
        model: nn.Module,
        output: str | Iterable[str] | None = None,
        layers: Iterable[str] | None = None,
    ) -> None:
        model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
        modules = dict(model.named_modules())
        candidates = [n for n, m in modules.items() if has_features(m)]
        outputs = output_layers("Features", candidates, output)
        chosen = [n for n in candidates if n not in outputs] if layers is None else layers
        names = list(dict.fromkeys([chosen] if isinstance(chosen, str) else chosen))
        check_layers("Features", candidates, names)
        both = set(outputs) & set(names)
        if both:
            raise ValueError(f"Features: {sorted(both)} cannot be both feature and output layers")
        if not names:
            raise ValueError(
                f"Features: {outputs[0]!r} is the output and there is no other layer, "
                "so there are no hidden features"
            )
        self.output = tuple(outputs)
        self.layers = [self._layer(name, modules[name]) for name in names]
        self._of: dict[Tensor, FeatureLayer] = {}
        for layer in self.layers:
            for p in layer.params:
                if p in self._of:
                    raise ValueError(
                        f"Features: layers {self._of[p].name!r} and {layer.name!r} share a "
                        "parameter that leads into two features; name one of them in `layers`"
                    )
                self._of[p] = layer
        for name in self.output:
            for p in modules[name].parameters(recurse=False):
                if p in self._of:
                    raise ValueError(
                        f"Features: output layer {name!r} and layer {self._of[p].name!r} share a "
                        "parameter; leave that layer out of `layers`"
                    )
        self._mark = f"_upgd_tap_{id(self)}"  # several may watch one model
        self._handles: list[Any] = []
        self._counting: dict[Tensor, Any] = {}
        self._model = model
        self._attach()

    def _attach(self) -> None:
        """Put hooks on the modules of the model."""
        modules = dict(self._model.named_modules())
        self._names = {module: name for name, module in modules.items()}
        for layer in self.layers:
            layer.module = modules[layer.name]
            self._handles.append(layer.module.register_forward_hook(self._on_layer))
        self._by_module = {layer.module: layer for layer in self.layers}
        for module in modules.values():
            if isinstance(module, PASSED) or _is_activation(module):
                self._handles.append(module.register_forward_hook(self._on_follower))

    @staticmethod
    def _layer(name: str, module: nn.Module) -> FeatureLayer:
        params = [p for p in (module.weight, module.bias) if p is not None]
        if not all(isinstance(p, nn.Parameter) for p in params):
            raise ValueError(
                f"Features: the weight of layer {name!r} is computed from other parameters "
                "(a parametrization); leave it out of `layers`"
            )
        return FeatureLayer(name, module, params, is_transposed(module))  # type: ignore[arg-type]

    def of(self, p: Tensor) -> FeatureLayer | None:
        """The layer whose features `p` leads into; None for an output layer's parameter."""
        return self._of.get(p)

    @property
    def count(self) -> int:
        """The number of parameters that lead into features; a forward pass may find more."""
        return len(self._of)

    def check_new(self, p: Tensor) -> None:
        """Raise unless `p` is a parameter of the model as it is now."""
        if not any(q is p for q in self._model.parameters()):
            raise ValueError(
                f"Features: the new parameter of shape {tuple(p.shape)} is not in the model that "
                "is watched; put it there first"
            )

    def replace(self, old: Tensor, new: Tensor) -> None:
        """Watch `new` in the place of `old`, in the same module or in one of the same name.

        An optimizer's :meth:`~upgd.FeatureUPGD.replace` calls it. Derivatives recorded so far are
        forgotten.
        """
        layer = self._of.pop(old, None)
        if layer is not None:
            self._of[new] = layer
            layer.params[next(i for i, p in enumerate(layer.params) if p is old)] = new
        self.remove()
        self._attach()
        self.reset()

    def reset(self) -> None:
        """Forget the derivatives recorded so far."""
        for layer in self.layers:
            layer.reset()

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in (*self._handles, *self._counting.values()):
            handle.remove()
        self._handles.clear()
        self._counting.clear()

    # -------------------------------------------------------------------- hooks
    # A compiled model must leave its graphs for them: they watch tensors and their nodes.
    @uncompiled
    def _on_layer(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and isinstance(output, Tensor) and output.requires_grad:
            layer = self._by_module[module]
            self._await_gradients(layer, module)
            self._sit(_Tap(layer), module, output)

    def _await_gradients(self, layer: FeatureLayer, module: nn.Module) -> None:
        """Have backward passes counted when they reach ``.grad``.

        Not once for all: parameters may be unfrozen, and a copy of the model lacks such hooks.
        The module's parameters are not the layer's while FSDP has gathered them.
        """
        if getattr(layer.params[0], FSDP1, False):
            raise TypeError(
                f"Features: FSDP1 has flattened the weight of layer {layer.name!r}, whose rows "
                "lead into features; use fully_shard (FSDP2), DDP or ZeRO"
            )
        for p in (module.weight, module.bias):
            if isinstance(p, Tensor) and p.requires_grad:
                handle, hooks = self._counting.get(p), p._post_accumulate_grad_hooks or {}
                if handle is None or handle.id not in hooks:
                    hook = p.register_post_accumulate_grad_hook(partial(_count, layer))
                    self._counting[p] = hook

    @uncompiled
    def _on_follower(self, module: nn.Module, args: Any, output: Any) -> None:
        tap = getattr(args[0], self._mark, None) if args else None
        if not isinstance(tap, _Tap) or not isinstance(output, Tensor) or not output.requires_grad:
            return
        in_place = output is args[0]
        if args[0]._version != tap.version + in_place:
            return  # something else, such as a residual, was added to the feature meanwhile
        if isinstance(module, _NORMS):
            self._adopt(tap.layer, module)
        if not tap.moved:  # a second consumer of the same output adds a gate of its own
            tap.handle.remove()
            if tap.curvature is not None:
                tap.curvature[:] = [t for t in tap.curvature if t.owner is not tap.layer]
            tap.moved = True
        self._sit(_Tap(tap.layer), module, output, final=_is_activation(module))

    def _sit(self, tap: _Tap, module: nn.Module, h: Tensor, final: bool = False) -> None:
        """Put the gate on `h`; let a following module move it unless this is its last place."""
        value = h.detach()
        version = tap.version = h._version
        layer = tap.layer
        layer.gated = self._names[module]

        def on_backward(gradient: Tensor) -> None:
            if value._version != version:
                raise RuntimeError(
                    f"Features: the output of {self._names[module]!r} was changed in place after "
                    "it was recorded; use the out-of-place version of the module that follows it"
                )
            seen = gradient.detach()
            layer.add(value, seen)
            if gradient.requires_grad:
                # A later pass differentiates this one (a gradient penalty): there, the gate also
                # multiplies this gradient.
                gradient.register_hook(lambda above: layer.add(seen, above.detach()))

        tap.handle = h.register_hook(on_backward)
        if h.grad_fn is not None:
            metadata: dict[str, Any] = h.grad_fn.metadata  # type: ignore[assignment]
            tap.curvature = metadata.setdefault(TAPS, [])
            place = Tap(layer, value, h.output_nr, layer.axis(value), layer.add_second)
            tap.curvature.append(place)
        setattr(h, self._mark, None if final else tap)

    def _adopt(self, layer: FeatureLayer, norm: nn.Module) -> None:
        for p in (norm.weight, norm.bias):
            if isinstance(p, Tensor) and p.shape == (layer.size,) and p not in self._of:
                layer.params.append(p)
                self._of[p] = layer

    @classmethod
    def nothing(cls) -> Features:
        """Features of no model, until one is watched."""
        found = cls.__new__(cls)
        found.layers, found.output, found._of = [], (), {}
        found._handles, found._counting = [], {}
        return found

    def __repr__(self) -> str:
        lines = [
            f"  {layer.name}: {layer.size} features, gates on the output of "
            f"{layer.gated or '... (known after a forward pass)'}"
            for layer in self.layers
        ]
        return "\n".join(["Features(", *lines, f"  output: {', '.join(self.output)}", ")"])
