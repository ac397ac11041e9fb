"""``fused=True`` of layered methods: all phases of a step in one compiled call, on the CPU.

Kernels see tensors by their addresses. What they cannot read in place, 16-bit or not contiguous, is
copied for the step. Units are renewed as on the plain path.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from upgd.optim import checks
from upgd.optim.batch import compute_dtype
from upgd.optim.fused import missing
from upgd.optim.layer_step import Layer, LayerStep
from upgd.rules.vocabulary import Method, Place

if TYPE_CHECKING:
    from upgd.optim.layered import LayerOptimizer


CPU_ALONE = "one model has kernels on the CPU alone; many runs at once have others (upgd.lab)"
"""Why layered methods are not fused on other devices."""


def refuse_missing(owner: str) -> None:
    """Raise where there is no compiler."""
    if importlib.util.find_spec("numba") is None:
        raise ImportError(f"{owner}: {missing('cpu')}")


def refuse(opt: LayerOptimizer, layers: list[Layer]) -> None:
    """Raise where kernels cannot run on the tensors of a step, and say what can."""
    owner = type(opt).__name__
    refuse_missing(owner)
    params = [opt.param_groups[0]["params"][0]]  # states of the network are with it
    params += [p for layer in layers for p in (layer.owner, *layer.active)]
    devices = sorted({str(p.device) for p in params if p.device.type != "cpu"})
    if devices:
        raise ValueError(
            f"{owner}: there is no fused=True on {', '.join(devices)}: {CPU_ALONE}; "
            "leave out fused=True"
        )
    if len({compute_dtype(p.dtype) for p in params}) > 1:
        found = ", ".join(sorted({str(p.dtype) for p in params}))
        raise ValueError(
            f"{owner}: fused=True computes all layers of a layered method in one precision; these "
            f"are {found}. Leave out fused=True"
        )
    _check_shapes(opt, layers, {p for p in params if p.grad is None})


def _check_shapes(opt: LayerOptimizer, layers: list[Layer], paused: set[Tensor]) -> None:
    """Raise where kernels, which trust the tables, would read beyond the end of a tensor.

    States of parameters that have a gradient are checked on all paths.
    """
    owner = type(opt).__name__
    for g, group in enumerate(opt.param_groups) if paused else ():
        for i, p in enumerate(group["params"]):
            if p in paused and "step" in opt.state.get(p, ()):
                checks.check_state(owner, group, i, g, opt.state[p], opt._state_shapes(p))
    for layer in layers:
        if layer.watched is None or layer.x is None or layer.d is None:
            continue
        outputs, inputs = layer.watched.weight.shape
        units = inputs if layer.before is None else layer.before.weight.shape[0]
        expected = ((len(layer.x), inputs), (len(layer.x), outputs), inputs)
        if (layer.x.shape, layer.d.shape, units) != expected:
            raise ValueError(
                f"{owner}: layer {layer.watched.name!r} was replaced or resized after its inputs "
                "were recorded; call zero_grad() and run backward() again, or opt.watch(model)"
            )


def within_limit(tensors: list[Tensor], limit: float) -> bool:
    """Whether all magnitudes are at most `limit`; no if kernels cannot read the tensors in place.

    Tensors have one dtype or need not be checked here.
    """
    from upgd.kernels.cpu_reductions import largest_read

    dtype = compute_dtype(tensors[0].dtype)
    if any(t.dtype != dtype or not t.is_contiguous() for t in tensors):
        return False
    addresses = np.array([t.data_ptr() for t in tensors], np.int64)
    sizes = np.array([t.numel() for t in tensors], np.int64)
    return bool(largest_read(addresses, sizes, getattr(np, _real(dtype))(0)) <= limit)


def _real(dtype: torch.dtype) -> str:
    return "float64" if dtype == torch.float64 else "float32"


class LayerKernels:
    """The compiled step of a method, and where it looks for what."""

    def __init__(self, method: Method, dtype: torch.dtype) -> None:
        from upgd.kernels import cpu_layer

        self.dtype = dtype
        self.columns, self.names = cpu_layer.columns(method), cpu_layer.numbers_of(method)
        self.advance = cpu_layer.step_function(method, _real(dtype))


class FusedLayerStep(LayerStep):
    """Runs the phases of an optimizer's method on some layers in one call, then renews units."""

    def __init__(self, opt: LayerOptimizer, layers: list[Layer]) -> None:
        super().__init__(opt, layers)
        self.dtype = compute_dtype(layers[0].owner.dtype)
        found: LayerKernels | None = opt.__dict__.get("_fused_step")
        if found is None or found.dtype != self.dtype:
            found = opt.__dict__["_fused_step"] = LayerKernels(self.method, self.dtype)
        self.columns, self.names, self.advance = found.columns, found.names, found.advance
        self.copies: dict[Tensor, Tensor] = {}  # of weights, which are written back
        self.read: list[Tensor] = []  # copies that must live as long as the call

    def _run_phases(self) -> None:
        from upgd.kernels import cpu_layer

        width = cpu_layer.STATES + len(self.columns)
        table = np.zeros((len(self.layers), width), np.int64)
        numbers = np.zeros((len(self.layers) + 1, 3, len(self.names)))
        for row, own, layer in zip(table, numbers, self.layers, strict=False):
            self._locate(row, layer)
            self._count(own, layer)
        first = self.opt.param_groups[0]["params"][0]
        last = max(self.counts[p] for layer in self.layers for p in layer.active)
        numbers[-1, 0] = self._row(first, last, 0.0)
        states = self._network_states().values()
        network = np.array([state.data_ptr() for state in states], np.int64)
        self.advance(table, numbers, network, self.alike)
        for p, copy in self.copies.items():
            p.copy_(copy)

    # --------------------------------------------------------------------------- tables
    def _locate(self, row: Any, layer: Layer) -> None:
        """A layer's sizes and addresses."""
        from upgd.kernels import cpu_layer as at

        weight, bias, watched = layer.weight, layer.bias, layer.watched
        if watched is None:
            row[at.OUTPUTS], row[at.SAMPLES] = layer.owner.numel(), 1
            row[at.D] = self._readable(layer.owner.grad)
        else:
            assert layer.x is not None
            row[at.OUTPUTS], row[at.INPUTS] = watched.weight.shape
            row[at.SAMPLES] = len(layer.x)
            row[at.X], row[at.D] = self._readable(layer.x), self._readable(layer.d)
        noisy = "noise" in self.method.needs
        places: list[tuple[Tensor | None, Place, tuple[int, int, int]]] = [
            (weight, "weights", (at.W, at.G, at.Z)),
            (bias, "biases", (at.B, at.BG, at.BZ)),
        ]
        for p, place, (w, g, z) in places:
            if p is not None:
                row[w], row[g] = self._writable(p), self._readable(p.grad)
                row[z] = self._readable(self._normal(p)) if noisy else 0
                state = self.opt.state[p]
                for name in self.method.states:
                    state[name] = state[name].contiguous()
                    row[self.columns[place, name]] = state[name].data_ptr()
        places_of: tuple[Place, ...] = ("inputs", "units", "layers")
        for place in (*places_of, "features") if layer.before is not None else places_of:
            for name, kept in self._kept(layer, place).items():
                if not kept.is_contiguous():
                    kept = self.opt.state[layer.owner][f"{place}.{name}"] = kept.contiguous()
                row[self.columns[place, name]] = kept.data_ptr()
        if watched is not None and layer.before is not None:
            row[at.BEFORE] = self._readable(layer.before.weight)
            row[at.BEFORE_INPUTS] = layer.before.weight.shape[1]
            row[at.AFTER] = self._readable(watched.weight)

    def _readable(self, t: Tensor | None) -> int:
        """Where the values of a tensor are, or of a copy."""
        assert t is not None
        if t.dtype != self.dtype or not t.is_contiguous():
            t = self.copies.get(t, t).to(self.dtype).contiguous()
        self.read.append(t)
        return t.data_ptr()

    def _writable(self, p: Tensor) -> int:
        if p.dtype == self.dtype and p.is_contiguous():
            return p.data_ptr()
        self.copies[p] = p.detach().to(self.dtype).contiguous()
        return self.copies[p].data_ptr()

    # -------------------------------------------------------------------------- numbers
    def _count(self, rows: Any, layer: Layer) -> None:
        """The numbers of a layer's owner, weight and bias."""
        bound = layer.constants["bound"]
        owner = max(self.counts[p] for p in layer.active)
        rows[0] = self._row(layer.owner, owner, bound)
        for row, p in zip(rows[1:], (layer.weight, layer.bias), strict=True):
            if p is not None:
                row[:] = self._row(p, self.counts[p], bound)
        rows[:, self.names["head"]] = layer.constants["head"]
        rows[:, self.names["first"]] = layer.constants["first"]
        if layer.watched is not None:
            rows[0, -1] = 1.0  # samples have their sign

    def _row(self, p: Tensor, t: float, bound: float) -> list[float]:
        group = self.groups[p]
        found = self.method.number_values({n: group[n] for n in self.method.hyper}, bound)
        for name in self.method.states:
            decay = self.method.decays.get(name)
            beta = found[self.names[decay]] if decay is not None else 0.0
            found.append(1 - beta**t)
        return [*found, t, 0.0, 0.0, -1.0 if group["maximize"] else 1.0]
