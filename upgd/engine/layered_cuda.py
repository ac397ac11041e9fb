"""A stack of learners that see their layers on CUDA, or on CPU tensors in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from upgd.engine.branches import Branches
from upgd.engine.dense import COLUMNS, Learner
from upgd.engine.feed import Chunk
from upgd.engine.layered import LayeredStack
from upgd.kernels.layout import Layout
from upgd.kernels.triton_layered import compile_program
from upgd.kernels.triton_program import Program, Tiles

_NOTHING = np.zeros(1, np.int32)


class LayeredCudaStack(LayeredStack):
    """R learners, a program each, which goes through a chunk by itself.

    See :mod:`upgd.kernels.triton_layered`. float64 is for tests.
    """

    def __init__(
        self,
        layout: Layout,
        learners: Sequence[Learner],
        *,
        device: torch.device | str = "cuda",
        dtype: torch.dtype = torch.float32,
        tiles: Tiles = Tiles(),  # noqa: B008 - it is frozen
        **common: Any,
    ) -> None:
        super().__init__(layout, learners, **common)
        self.dtype, self.device, self.tiles = dtype, torch.device(device), tiles
        self._kernels: dict[tuple[int, bool], Any] = {}
        self._branches = Branches(len(self.groups), self.device)
        self._table: NDArray[Any] | None = None
        self._data = self._put(_NOTHING)
        self._allocate()

    # ------------------------------------------------------------------------- memory
    def _allocate(self) -> None:
        runs, size = len(self.learners), self.layout.size
        self.hyper, self.decays = (self._put(table) for table in self._tables())
        self.corrections = torch.zeros_like(self.decays)
        seeds = np.array([learner.seed for learner in self.learners], np.uint64).view(np.int64)
        self.seeds = self._put(seeds)
        self.weights = self._zeros(runs, size)
        self.states = [
            self._zeros(max(1, len(g.states)), g.count if g.states else 1, size)
            for g in self.groups
        ]
        self.kept = [self._zeros(*shape) for shape in self._kept_shapes()]
        self.statistics = self._zeros(*self._statistics_shape)
        self.scratch = [
            self._zeros(group.count, self._program(number, False).scratch["size"])
            for number, group in enumerate(self.groups)
        ]
        self.series = torch.zeros(
            runs, self.windows, len(COLUMNS), dtype=torch.float64, device=self.device
        )
        self.diverged = torch.full((runs,), -1, dtype=torch.int64, device=self.device)
        self.began = torch.zeros(runs, dtype=torch.int64, device=self.device)
        self._measured = self._put(self.measured if self.stride else _NOTHING)
        self.restart(0)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _put(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _get(self, kept: Tensor) -> NDArray[Any]:
        return np.array(kept.cpu().numpy())

    # ------------------------------------------------------------------------ learning
    def advance(self, chunk: Chunk) -> None:
        """Learn from a chunk of samples, the last of which is only looked at beforehand."""
        samples = self._samples(chunk)
        permuted = chunk.permutations is not None
        self._branches.each(lambda number: self._launch(number, permuted, samples, chunk.steps))
        self.step += chunk.steps

    def _samples(self, chunk: Chunk) -> tuple[Tensor, ...]:
        """A chunk's samples on the device, in the order of the kernel's arguments."""
        if chunk.table is not self._table:
            self._table, self._data = chunk.table, self._put(chunk.table).to(self.dtype)
        order = self.order
        permutations = None if chunk.permutations is None else chunk.permutations[:, order]
        arrays = [chunk.index[order], permutations, chunk.slots]
        arrays.append(None if chunk.labels is None else chunk.labels[order])
        targets = None if chunk.targets is None else chunk.targets[order]
        found = [self._put(_NOTHING if array is None else array) for array in arrays]
        found.append(self._put(_NOTHING if targets is None else targets).to(self.dtype))
        return (self._data, *found)

    def _program(self, number: int, permuted: bool) -> Program:
        group = self.groups[number]
        return Program(
            method=group.row.method,
            layout=self.layout,
            real=str(self.dtype).removeprefix("torch."),
            activation=self.activation,
            squared=self.squared,
            layer_norm=self.layer_norm,
            input_norm=self.input_norm,
            noisy=group.noise,
            permuted=permuted,
            diagnosed=self.stride > 0,
            slots=self.decays.shape[-1],
            tiles=self.tiles,
        )

    def _launch(self, number: int, permuted: bool, samples: tuple[Tensor, ...], steps: int) -> None:
        """Run one group through a chunk."""
        group = self.groups[number]
        if (number, permuted) not in self._kernels:
            self._kernels[number, permuted] = compile_program(self._program(number, permuted))
        self._kernels[number, permuted][(group.count,)](
            *(self.weights, self.states[number], self.kept[number], self.statistics),
            *(self.hyper, self.decays, self.corrections, self.seeds, self.began),
            *(self.scratch[number], *samples, self.series, self.diverged),
            *(self._measured, self.step, steps, self.window, self.windows),
            *(group.first, group.count, len(self.learners), steps + 1),
            num_warps=self.tiles.warps,
            num_stages=1,
            **({"maxnreg": self.tiles.registers} if self.device.type == "cuda" else {}),
        )
