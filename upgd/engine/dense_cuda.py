"""A stack of dense learners on CUDA, or on CPU tensors under Triton's interpreter."""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from upgd.engine.branches import Branches
from upgd.engine.dense import COLUMNS, DenseStack, Learner, MethodGroup, replay
from upgd.engine.feed import Chunk
from upgd.kernels import triton_sample as sample
from upgd.kernels import triton_update as update
from upgd.kernels.layout import Layout
from upgd.kernels.rules import TIMES, fills_padding
from upgd.kernels.triton_rules import compile_rules, compile_traces
from upgd.threads import no_garbage

GRAPH_STEPS = 50
"""Steps in a captured graph: many enough to hide its launch, few enough to be captured quickly."""
GRAPHS_LAUNCH_EARLY = 12_030
"""The version of CUDA, as drivers tell it, from which graphs have early launches."""
_NOTHING = np.zeros(1, np.int32)


@dataclass(frozen=True)
class Tuning:
    """Shapes of the kernels. They fix the order of sums, so they may not depend on the stack.

    Early launches change no sum: they may.

    Attributes:
        block, warps, stages: Columns at a time, warps, loads in flight of the updating pass.
        reduce_block, reduce_warps, reduce_stages: Of the pass that finds η.
        back_rows, back_columns, back_warps: The tile of a backward pass.
        back_registers: Of its threads: so 200 learners of the paper's network run at once.
        head_columns, head_tile, head_warp: Of the last layer's kernel: columns at a time, weights
            at a time (so fewer columns for many outputs), and weights per warp.
        feature_registers: Of a thread that updates by features' utilities, so that many fit;
            methods that keep states are faster with more.
        early_from: Bytes of weights from which a kernel is launched while the one before it ends.
        ahead: How many of its programs then read ahead into the cache, one at least.
    """

    block: int = 128
    warps: int = 1
    stages: int = 2
    reduce_block: int = 128
    reduce_warps: int = 1
    reduce_stages: int = 2
    back_rows: int = 32
    back_columns: int = 32
    back_warps: int = 1
    back_registers: int = 128
    head_columns: int = 128
    head_tile: int = 2048
    head_warp: int = 1024
    feature_registers: int = 64
    early_from: int = 100_000_000
    ahead: int = 250

    def head(self, outputs: int) -> tuple[int, int]:
        """Columns at a time and warps of the last layer's kernel, for so many outputs."""
        assert self.head_columns % self.back_columns == 0  # parts of a norm
        columns = min(self.head_columns, max(self.back_columns, self.head_tile // outputs))
        return columns, min(16, max(1, outputs * columns // self.head_warp))


def can_launch_early(device: torch.device) -> bool:
    """Whether device, driver and Triton know programmatic dependent launches, in graphs too."""
    if device.type != "cuda" or not hasattr(triton.language.extra.cuda, "gdc_wait"):
        return False
    new = torch.cuda.get_device_capability(device) >= (9, 0)
    return new and _driver_version() >= GRAPHS_LAUNCH_EARLY


def _driver_version() -> int:
    """The version of CUDA that the driver has, or 0. PyTorch tells that of the library alone."""
    found = ctypes.c_int(0)
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    return found.value


def scaling(group: MethodGroup) -> int:
    """What the utilities of a group's features are divided by, as kernels know it; 0 for none."""
    if not group.features:
        return 0
    local = group.row.method.phases[0].reduce == "row_norm"
    return int((sample.NORM if local else sample.LARGEST).value)


class CudaStack(DenseStack):
    """R dense learners in lock step; see :mod:`upgd.kernels.triton_update`.

    On CPU tensors it runs under Triton's interpreter; float64 is for tests.
    """

    def __init__(
        self,
        layout: Layout,
        learners: Sequence[Learner],
        *,
        device: torch.device | str = "cuda",
        dtype: torch.dtype = torch.float32,
        tuning: Tuning = Tuning(),  # noqa: B008 - it is frozen
        **common: Any,
    ) -> None:
        super().__init__(layout, learners, **common)
        self.tuning = tuning
        self.dtype, self.device = dtype, torch.device(device)
        self.second = any(group.second for group in self.groups)
        real = str(dtype).removeprefix("torch.")
        self._rules = [compile_rules(group.row.method, real) for group in self.groups]
        self._fills = [fills_padding(group.row.method) for group in self.groups]
        featured = [group for group in self.groups if group.features]
        self._trace, kinds = compile_traces([group.row.method for group in featured], real)
        self._kinds = {group.first: kind for group, kind in zip(featured, kinds, strict=True)}
        self._scaling = functools.reduce(operator.or_, map(scaling, self.groups), 0)
        self._allocate()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.early = self._how_early()
        self._branches = Branches(len(self.groups), self.device)
        self._table: NDArray[Any] | None = None
        self._fed: dict[str, Tensor] = {}  # a chunk, in the order of the kernels' arguments

    # ------------------------------------------------------------------------- memory
    def _allocate(self) -> None:
        runs, layout = len(self.learners), self.layout
        self.hyper, self.decays = (self._put(table) for table in self._tables())
        self.corrections = torch.zeros_like(self.decays)
        self.began = torch.zeros(runs, dtype=torch.int64, device=self.device)
        seeds = np.array([learner.seed for learner in self.learners], np.uint64).view(np.int64)
        self.seeds = self._put(seeds)
        self.layer_table = self._put(layout.layer_table)
        self.group_table = self._put(layout.group_table)
        self.weights = self._zeros(runs, layout.size)
        self.states = [
            self._zeros(max(1, len(g.states)), g.count if g.states else 1, layout.size)
            for g in self.groups
        ]
        self.utility = self._zeros(runs if self._kinds else 1, layout.units)
        self.utilities = [
            self.utility[g.first : g.first + g.count] if g.features else self.utility[:1]
            for g in self.groups
        ]
        self.squares = torch.zeros_like(self.utility, dtype=torch.float64)
        kinds = [self._kinds.get(g.first, -1) for g in self.groups for _ in range(g.count)]
        self.kinds = self._put(np.array(kinds, np.int32))
        self.acts = self._zeros(runs, layout.activations)
        for layer in layout.layers:
            ones = [layer.input_at + layer.inputs]
            if layer.number == 0:
                ones.append(ones[0] - layer.stride)
            self.acts[:, ones] = 1
        self.delta, self.hess, self.norms, self.biases = (
            self._zeros(runs, layout.units) for _ in range(4)
        )
        self.partial = self._zeros(runs)
        self.iota = torch.arange(self.tuning.block, dtype=torch.int32, device=self.device)
        self.pre = self._zeros(2, runs, layout.units)
        self.out_block = max(16, triton.next_power_of_2(layout.sizes[-1]))
        self.in_block = min(4096, triton.next_power_of_2(layout.sizes[0]))
        self.loss_before = self._zeros(runs)
        self.series = torch.zeros(
            runs, self.windows, len(COLUMNS), dtype=torch.float64, device=self.device
        )
        self.diverged = torch.full((runs,), -1, dtype=torch.int64, device=self.device)
        self._measured = self._put(self.measured)
        self.clock = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.restart(0)

    def _how_early(self) -> dict[str, Any]:
        """Options of early launches, where these are possible and pay."""
        one_after_another = len(self.groups) == 1
        pays = self.weights.nbytes >= self.tuning.early_from
        if not (one_after_another and pays and can_launch_early(self.device)):
            return {"EARLY": 0}
        return {"EARLY": max(1, self.tuning.ahead), "launch_pdl": True}

    def _at_most(self, registers: int) -> dict[str, Any]:
        """An option of kernels; the interpreter does not know it."""
        return {"maxnreg": registers} if self.device.type == "cuda" else {}

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _put(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _get(self, kept: Tensor) -> NDArray[Any]:
        return kept.cpu().numpy()

    # ------------------------------------------------------------------------ learning
    def advance(self, chunk: Chunk) -> None:
        """Learn from a chunk of samples, the last of which is only looked at beforehand."""
        self._feed(chunk)
        self._begin()
        if self.device.type == "cuda":
            replay(self._graphs, self._capture, chunk.steps, GRAPH_STEPS)
        else:
            for offset in range(chunk.steps):
                self._learn(offset)
            self.clock[0] += chunk.steps
        self._sample(0, forward=False)
        self.step += chunk.steps

    def _feed(self, chunk: Chunk) -> None:
        """Put a chunk's samples where the kernels look for them."""
        self.inputs = sample.TABLE if chunk.permutations is None else sample.PERMUTED
        self._put_into("data", chunk.table)
        for name in ("index", "labels", "targets"):
            array = getattr(chunk, name)
            self._put_into(name, None if array is None else array[self.order])
        permutations = None if chunk.permutations is None else chunk.permutations[:, self.order]
        self._put_into("permutations", permutations)
        self._put_into("slots", chunk.slots)
        self.length = chunk.steps + 1
        self.clock.copy_(torch.tensor([self.step, self.step]))

    def _put_into(self, name: str, array: NDArray[Any] | None) -> None:
        """Copy to the device, to the same place where it fits: graphs remember addresses."""
        if array is None:
            array = _NOTHING
        old = self._fed.get(name)
        if name == "data" and array is self._table:
            return
        new = torch.from_numpy(np.ascontiguousarray(array))
        if new.is_floating_point():
            new = new.to(self.dtype)
        if old is not None and old.shape == new.shape and old.dtype == new.dtype:
            old.copy_(new)
        else:
            self._fed[name] = new.to(self.device)
            self._graphs.clear()
        if name == "data":
            self._table = array

    def _begin(self) -> None:
        runs, layout = len(self.learners), self.layout
        sample.fetch_kernel[(runs,)](
            *(self.acts, self.layer_table),
            *(self._fed[name] for name in ("data", "index", "permutations", "slots")),
            *(self.clock, runs, layout.activations, self.length),
            INPUTS=self.inputs,
            IN=self.in_block,
        )
        for number, (start, count) in enumerate(layout.forward):
            update.product_kernel[(runs, count)](
                *(self.weights, self.acts, self.pre, self.group_table, start, self.clock),
                *(runs, layout.size, layout.activations, layout.units),
                HIDDEN=number > 0,
                ACTIVATION=self.activation,
                BLOCK=self.tuning.block,
                num_warps=self.tuning.warps,
            )

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        saved = [tensor.clone() for tensor in self._changing()]
        self._learn(0)  # compile outside the capture
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with no_garbage(), torch.cuda.graph(graph):
            for offset in range(size):
                self._learn(offset)
            self.clock[:1] += size
        for tensor, old in zip(self._changing(), saved, strict=True):
            tensor.copy_(old)
        return graph

    def _changing(self) -> list[Tensor]:
        return [
            *(self.weights, *self.states, self.utility, self.acts, self.pre),
            *(self.series, self.diverged, self.clock, self.corrections, self.loss_before),
        ]

    def _learn(self, offset: int) -> None:
        """One step of all learners: what they share, then each method beside the others."""
        self._sample(offset, forward=True)
        self._branches.each(lambda number: self._update(number, offset))

    def _sample(self, offset: int, forward: bool) -> None:
        """Finish the last sample; with `forward` predict the next one and go back."""
        runs, layout, t = len(self.learners), self.layout, self.tuning
        first, last = layout.layers[0], layout.layers[-1]
        columns, warps = t.head(self.out_block)
        common = {"ACTIVATION": self.activation, "SECOND": self.second}
        common |= {"FEATURES": self._scaling, "TRACE": self._trace}
        sample.head_kernel[(runs, 2 if forward else 1)](
            *(self.weights, self.acts, self.delta, self.hess, self.utility, self.squares),
            *(self.kinds, self.pre, self.loss_before, self.series, self.diverged, self.partial),
            *(self.corrections, self.decays, self.began, self.layer_table),
            *self._fed.values(),
            *(self.clock, offset, self.window, self.windows),
            *(runs, layout.size, layout.activations, layout.units, self.length),
            *(first.inputs, first.stride, first.input_at),
            *(last.inputs, last.outputs, last.stride, last.base),
            LAYERS=len(layout.layers),
            BC=columns,
            PART=t.back_columns,
            OUT=self.out_block,
            IN=self.in_block,
            SQUARED=self.squared,
            INPUTS=self.inputs,
            FORWARD=forward,
            DUES=any(group.row.method.period is not None for group in self.groups),
            APART=any(group.apart for group in self.groups),
            SLOTS=triton.next_power_of_2(TIMES * len(layout.layers)),
            **common,
            **(self.early if forward else {"EARLY": 0}),  # the last one follows PyTorch's kernels
            num_warps=warps,
        )
        if not forward:
            return
        for layer in reversed(layout.layers[1:-1]):
            sample.backward_kernel[(-(-layer.inputs // t.back_columns), runs)](
                *(self.weights, self.acts, self.delta, self.hess, self.utility, self.squares),
                *(self.kinds, self.decays, self.partial, self.diverged, self.clock, offset),
                *(layer.inputs, layer.outputs, layer.stride),
                *(layer.base, layer.input_at, layer.row_at),
                *(TIMES * (layer.number - 1), TIMES * len(layout.layers)),
                *(layout.size, layout.activations, layout.units),
                **common,
                BR=t.back_rows,
                BC=t.back_columns,
                num_warps=t.back_warps,
                **self.early,
                **self._at_most(t.back_registers),
            )
        if self.stride:
            sample.diagnose_kernel[(runs,)](
                *(self.acts, self.delta, self.series, self._measured, self.layer_table),
                *(self.clock, offset, self.window, self.windows),
                *(layout.activations, layout.units),
                LAYERS=len(layout.layers),
                BC=256,
                **self.early,
            )

    def _update(self, number: int, offset: int) -> None:
        """One group's passes over its weights."""
        group, states, rules = self.groups[number], self.states[number], self._rules[number]
        runs, layout, fills = len(self.learners), self.layout, self._fills[number]
        local = group.reduce == "row_norm"
        second = group.second and not group.features  # whose curvatures the backward pass has read
        common = {"SECOND": second, "LOCAL": local, "APART": group.apart, **self.early}
        common["LAYERS"] = len(layout.layers)
        if group.features:
            common |= self._at_most(self.tuning.feature_registers)
        if group.reduce is not None:
            update.reduce_kernel[(len(layout.group_table), group.count)](
                *(self.weights, states, self.acts, self.delta, self.hess, self.partial),
                *(self.norms, self.biases, self.hyper, self.corrections, self.group_table),
                *(self.clock, offset, group.first, layout.size, layout.activations, layout.units),
                RULE=rules.reduce,
                **common,
                BLOCK=self.tuning.reduce_block,
                STAGES=self.tuning.reduce_stages,
                num_warps=self.tuning.reduce_warps,
            )
        for number, (start, count) in enumerate(layout.launches):
            update.update_kernel[(count, group.count)](
                *(self.weights, states, self.acts, self.delta, self.hess, self.utility),
                *(self.squares, self.partial, self.norms, self.biases, self.pre, self.hyper),
                *(self.corrections, self.seeds, self.group_table, start, self.iota, self.clock),
                *(offset, group.first, group.count, runs),
                *(layout.size, layout.activations, layout.units),
                RULE=rules.update,
                STATES=len(group.states),
                GLOBAL=group.reduce == "max",
                FEATURES=scaling(group),
                PART=self.tuning.back_columns,
                FILLS=fills,
                NOISE=group.noise,
                HIDDEN=number > 0,
                ACTIVATION=self.activation,
                **common,
                BLOCK=self.tuning.block,
                STAGES=self.tuning.stages,
                num_warps=self.tuning.warps,
            )
