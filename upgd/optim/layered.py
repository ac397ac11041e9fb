"""The optimizer that every layered rule shares.

:class:`LayerOptimizer` knows no method. It finds the layers that have gradients and the samples of
which these are made, decides what to do about non-finite ones, counts steps and keeps states; a
:class:`~upgd.optim.layer_step.LayerStep`, the reference, runs the phases, or, with ``fused=True``,
a :class:`~upgd.optim.fused_layers.FusedLayerStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from upgd.optim import checks, fused_layers
from upgd.optim.batch import compute_dtype
from upgd.optim.batch_step import BatchStep, has_several
from upgd.optim.checks import parameter_name
from upgd.optim.configured import Nonfinite
from upgd.optim.growing import GrowingOptimizer
from upgd.optim.layer_step import Layer, LayerStep, place_shape
from upgd.optim.layers import Layers, WatchedLayer
from upgd.optim.noise import GeneratorNoise, NoiseSource, PhiloxNoise
from upgd.optim.ranks import process_group as processes_of
from upgd.optim.rounding import Rounding
from upgd.optim.shards import Part, is_dtensor
from upgd.optim.uncompiled import uncompiled
from upgd.rules.vocabulary import Method

LACKS: Mapping[str, str] = {
    "foreach": "a layered method reads each layer by itself",
    "fused_cuda": fused_layers.CPU_ALONE,
    "capturable": "it reads the number of the step and what is not finite from the device",
    "rounding": "it rounds 16-bit weights to the nearest number",
    "trace_dtype": "it keeps states in 32 or 64 bits",
    "master_weights": "it keeps no second copy of 16-bit weights",
    "unscale_": "samples see the scaled loss; scaler.step() hands the scale over, unscale_() "
    "does not",
    "processes": "each process sees samples of its own, and replicas would part",
    "compile": "it reads values back; a compiled step runs as it is",
}
"""What layered methods do not have, each with the reason."""
_PATHS = ("foreach", "capturable")


class LayerOptimizer(GrowingOptimizer):
    """Base class: runs a layered :class:`~upgd.rules.vocabulary.Method` as a PyTorch optimizer.

    Backward passes must go through the model's own layers, so that hooks see their inputs. Samples
    are those of ``.grad``: they add up and are reset with it. What changes ``.grad`` afterwards
    (clipping) does not change them; a layer without a bias takes d from its samples.

    Args:
        params: A model; or parameters, ``(name, parameter)`` pairs or groups of them, with `layers`
            or, before the first forward pass, :meth:`watch`.
        method: The rule to run.
        hyper: Values of the method's hyperparameters; groups may override them.
        layers: The layers of the model whose parameters these are.
        seed: Determines noise and fresh weights, together with the step. By default it is drawn
            from PyTorch's global generator.
        noise: Where they come from (default: :class:`~upgd.optim.noise.GeneratorNoise`).
        maximize: Ascend instead of descend: the gradient is negated before anything else.
        fused: Run all phases in one compiled call, by numba on the CPU; there alone. A rule for
            several samples (:class:`~upgd.SelfTunedSGD`) runs as without it.
        nonfinite: What happens to a step that reads a NaN, an infinity or a magnitude from which it
            may not stay finite (:meth:`Method.limit`), as a weight, a derivative or a layer's
            input. ``"raise"`` raises :class:`FloatingPointError` before anything changes;
            ``"skip"`` leaves out the step and counts it (:attr:`skipped_steps`). By default
            ``"raise"`` on CPU and ``"skip"`` on accelerators.
        process_group: False for a process that trains a model of its own; processes cannot train
            one model together.
        lacking: ``foreach`` and ``capturable`` may be given, but not True.
    """

    fused = False
    rounding: Rounding = "nearest"
    trace_dtype: torch.dtype | None = None
    master_weights = False
    _step_supports_amp_scaling = True  # samples see the scaled loss, so the scale must be known

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        method: Method,
        hyper: Mapping[str, Any],
        *,
        layers: Layers | None = None,
        seed: int | None = None,
        noise: NoiseSource | None = None,
        maximize: bool = False,
        fused: bool = False,
        nonfinite: Nonfinite | None = None,
        process_group: Any = None,
        **lacking: Any,
    ) -> None:
        owner = type(self).__name__
        given = {"noise": noise, "nonfinite": nonfinite, "fused": fused}
        given["process_group"] = process_group
        paths = {name: lacking.pop(name) for name in _PATHS if name in lacking}
        for name in _PATHS:
            if paths.get(name):
                raise ValueError(f"{owner}: there is no {name}: {LACKS[name]}")
        for name in lacking.keys() & LACKS.keys():
            raise TypeError(f"{owner}: there is no {name}: {LACKS[name]}")
        checks.check_arguments(owner, self._arguments(), given, lacking)
        if fused:
            fused_layers.refuse_missing(owner)
        if layers is not None and not isinstance(layers, Layers):
            raise TypeError(f"{owner}: layers must be upgd.Layers(model), got {layers!r}")
        self.method, self.nonfinite, self.process_group = method, nonfinite, process_group
        self.fused = fused
        self.noise: NoiseSource = noise if noise is not None else GeneratorNoise()
        defaults = {**hyper, **checks.plain(hyper, method.hyperparameters), "maximize": maximize}
        defaults |= {"foreach": None, "capturable": False}
        defaults |= {"seed": checks.checked_seed(owner, seed), "noise_step": 0}
        model = params if isinstance(params, nn.Module) else None
        self.layers = layers if layers is not None else Layers.nothing()
        super().__init__(params.parameters() if isinstance(params, nn.Module) else params, defaults)
        if layers is not None:
            self._refuse_others(layers)
        elif model is not None:
            self.layers = Layers(model)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        for name in _PATHS:
            if group.get(name):
                raise ValueError(f"{type(self).__name__}: there is no {name}: {LACKS[name]}")

    def _refuse_others(self, layers: Layers) -> None:
        held = {p for group in self.param_groups for p in group["params"]}
        if not any(p in held for layer in layers.all for p in layer.own):
            raise ValueError(
                f"{type(self).__name__}: none of the parameters is of a layer of `layers`; it must "
                "watch the model whose parameters these are, not another one or a copy"
            )

    def watch(self, model: nn.Module, output: str | Iterable[str] | None = None) -> Layers:
        """Watch the layers of `model`: for an optimizer that was made from parameters alone.

        Call it before the first forward pass whose gradients a step reads. A state dict may have
        been loaded before. Watching again, as after a model was wrapped, replaces the hooks.

        Args:
            model: The model whose parameters these are.
            output: Name or names of the output layers; by default the last linear layer.

        Example:
            >>> import upgd
            >>> from torch import nn
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            >>> opt = upgd.CentredSGD(model.parameters(), lr=0.1)  # as a framework does
            >>> opt.watch(model)
            Layers(0: input, 2: head)
        """
        layers = Layers(model, output)
        try:
            self._refuse_others(layers)
        except ValueError:
            layers.remove()
            raise
        with self._lock:
            self.layers.remove()
            self.layers = layers
        return layers

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients and what was recorded of layers' inputs."""
        super().zero_grad(set_to_none)
        self.layers.reset()

    def backward(self, loss: Tensor, *, scaler: Any = None, retain_graph: bool = False) -> None:
        """Do what ``loss.backward()`` does, with the loss scaled by a ``GradScaler`` if given."""
        (loss if scaler is None else scaler.scale(loss)).backward(retain_graph=retain_graph)

    # --------------------------------------------------------------------------- step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one update; with `closure`, evaluate it first and return its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._lock:
            self._update()
        return loss

    @uncompiled
    @torch.no_grad()
    def _update(self) -> None:
        self._refuse_step()
        self._unscale()
        layers = self._gather()
        if not layers:
            return
        if self.fused:
            fused_layers.refuse(self, layers)
        finite = self._is_finite(layers)
        active = [p for layer in layers for p in layer.active]
        self._ensure_state(active)
        kept = {layer.owner for layer in layers} | {self.param_groups[0]["params"][0]}
        self._ensure_state([p for p in kept if not any(p is q for q in active)])
        for clock in {id(s["step"]): s for s in (self.state[p] for p in active)}.values():
            clock["attempts"].add_(1)
            clock["step"].add_(finite)
        if finite:
            self._describe_noise()
            self._kind_of_step(layers)(self, layers).run()
        for group in self.param_groups:
            group["noise_step"] += 1

    def _kind_of_step(self, layers: list[Layer]) -> type[LayerStep]:
        if self.method.several is not None and has_several(layers):
            return BatchStep
        return fused_layers.FusedLayerStep if self.fused else LayerStep

    def _refuse_step(self) -> None:
        """Raise where a step would be wrong."""
        owner = type(self).__name__
        if not self.layers.all:
            raise RuntimeError(
                f"{owner}: no model is watched, so inputs of layers are not seen; give the model "
                "itself, layers=upgd.Layers(model), or call opt.watch(model) before the first "
                "forward pass"
            )
        group = processes_of(self.process_group)
        together = group is not None and torch.distributed.get_world_size(group) > 1
        if together or any(is_dtensor(p) for g in self.param_groups for p in g["params"]):
            raise TypeError(f"{owner}: processes cannot train together: {LACKS['processes']}")

    def _unscale(self) -> None:
        """Undo the scale of a loss that ``GradScaler`` has scaled, of gradients and samples."""
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            for layer in self.layers.all:
                layer.unscale(scale.reshape(()))
            for p in (p for group in self.param_groups for p in group["params"]):
                if p.grad is not None:
                    p.grad.div_(scale.reshape(()).to(p.grad.device))
        elif getattr(self, "found_inf", None) is not None:
            raise RuntimeError(
                f"{type(self).__name__}: after scaler.unscale_() the loss scale that samples saw "
                "is not known; leave the unscaling to scaler.step()"
            )

    def _gather(self) -> list[Layer]:
        """The layers that have gradients, in the model's order; then all other parameters."""
        owner = type(self).__name__
        held: dict[Tensor, dict[str, Any]] = {}
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                held[p] = group
                if p.grad is not None and p.numel() > 0:
                    checks.check_gradient(owner, group, i, g)
                    if "step" in self.state.get(p, ()):
                        shapes = self._state_shapes(p)
                        checks.check_state(owner, group, i, g, self.state[p], shapes)
        active = [p for p in held if p.grad is not None and p.numel() > 0]
        if len({p.device for p in active}) > 1:
            raise ValueError(f"{owner}: the parameters are on several devices; keep them on one")
        found = []
        for watched in self.layers.all:
            mine = [p for p in watched.own if p in held]
            if any(p is q for p in mine for q in active):
                found.append(self._sampled(watched, mine, held[mine[0]]))
        seen = {p for layer in found for p in layer.active}
        return found + [Layer(p, [p]) for p in active if p not in seen]

    def _sampled(self, watched: WatchedLayer, mine: list[Tensor], group: dict[str, Any]) -> Layer:
        """A layer with its samples."""
        samples = watched.samples()
        if samples is None and float(group["lr"]) == 0:
            # Distributed checkpoints set up state by such a step, without a forward pass.
            zeros = watched.weight.new_zeros(1, 1, dtype=compute_dtype(watched.weight.dtype))
            samples = zeros.expand(1, watched.weight.shape[1]), zeros.expand(1, len(watched.weight))
        if samples is None:
            raise RuntimeError(
                f"{type(self).__name__}: layer {watched.name!r} has a gradient, but its input was "
                "not seen; call the model itself, so that its hooks are called, after the "
                "optimizer was made"
            )
        layer = Layer(mine[0], [p for p in mine if p.grad is not None], watched)
        layer.x, layer.d = samples[0], -samples[1] if group["maximize"] else samples[1]
        return layer

    # ----------------------------------------------------------------------- nonfinite
    def _is_finite(self, layers: list[Layer]) -> bool:
        """Whether the step stays finite; raises instead of a no where that is wished."""
        found_inf = getattr(self, "found_inf", None)
        device = layers[0].owner.device.type
        raises = (self.nonfinite or ("raise" if device == "cpu" else "skip")) == "raise"
        if self.fused and self._is_small(layers):
            return found_inf is None or float(found_inf) == 0
        for whose, what, t in self._read(layers):
            limit = self.method.limit(compute_dtype(t.dtype))
            largest = float(torch.linalg.vector_norm(t, torch.inf)) if t.numel() else 0.0
            if largest <= limit:
                continue
            if found_inf is None and raises:
                finite = largest < torch.inf
                wrong = f"reaches {largest:.3g}, over the limit {limit:.3g}"
                raise FloatingPointError(
                    f"{type(self).__name__}: the {what} of {whose} "
                    f"{wrong if finite else 'is not finite'}; nothing was updated. "
                    "nonfinite='skip' leaves such steps out instead"
                )
            return False
        return found_inf is None or float(found_inf) == 0

    def _is_small(self, layers: list[Layer]) -> bool:
        """Whether all that a step reads is within its limit; if in doubt, no."""
        read = [t for layer in layers for p in layer.active for t in (p, p.grad)]
        read += [t for layer in layers for t in (layer.x, layer.d)]
        limit = self.method.limit(compute_dtype(layers[0].owner.dtype))
        return fused_layers.within_limit([t for t in read if t is not None], limit)

    def _read(self, layers: list[Layer]) -> Iterator[tuple[str, str, Tensor]]:
        """The tensors that a step reads, whose they are and what."""
        active = {p for layer in layers for p in layer.active}
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                if p in active:
                    yield parameter_name(group, i, g), "gradient", p.grad
                    yield parameter_name(group, i, g), "weight", p.detach()
        for layer in layers:
            if layer.watched is not None and layer.x is not None and layer.d is not None:
                yield f"layer {layer.watched.name!r}", "input", layer.x
                yield f"layer {layer.watched.name!r}", "derivative by the output", layer.d

    # --------------------------------------------------------------------------- state
    def _state_names(self) -> tuple[str, ...]:
        return self.method.state_names

    def _state_shape(self, p: Tensor, name: str) -> torch.Size | None:
        place = name.rpartition(".")[0]
        if not place:
            return p.shape
        if place in ("layers", "network"):
            return torch.Size(())
        return torch.Size(place_shape(p, self.layers.of(p), place)) if self.layers.all else None

    def _fresh(self, p: Tensor, name: str) -> Tensor:
        place, _, kept = name.rpartition(".")
        if not place:
            return super()._fresh(p, name)
        shape = place_shape(p, self.layers.of(p), place)
        start = self.method.starts.get(kept, 0.0)
        return torch.full(shape, start, dtype=self._state_dtype(p, name), device=p.device)

    def _row_states(self) -> tuple[str, ...]:
        units = (name for name in self.method.state_names if name.startswith("units."))
        return (*super()._row_states(), *units)

    def _check_new(self, old: Tensor, new: Tensor) -> None:
        super()._check_new(old, new)
        inputs = (t for key, t in self.state.get(old, {}).items() if key.startswith("inputs."))
        was_layer = self.layers.of(old) is not None or any(t.numel() for t in inputs)
        if was_layer and self.layers.of(new) is None:
            raise ValueError(
                f"{type(self).__name__}: what replaces a layer's parameter must be in its place "
                "already, since states belong to layers: set layer.weight and layer.bias first; "
                "after a layer itself was replaced, call opt.watch(model)"
            )

    def _describe_noise(self) -> None:
        if isinstance(self.noise, PhiloxNoise):
            shapes = [tuple(p.shape) for group in self.param_groups for p in group["params"]]
            if [part.shape for part in self.noise.parts] != shapes:
                each = enumerate(shapes)
                self.noise.describe([Part(n, s, (0,) * len(s), s) for n, s in each])
