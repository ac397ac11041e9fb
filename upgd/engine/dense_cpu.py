"""A stack of dense learners on CPUs, executed by numba."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd.engine.dense import COLUMNS, DenseStack, Learner
from upgd.engine.feed import Chunk
from upgd.extras import install
from upgd.kernels.layout import ALIGN, Layout
from upgd.kernels.rules import traces_utility


def cores() -> int:
    """How many this process may use; the variable ``UPGD_THREADS`` can say less."""
    told = os.environ.get("UPGD_THREADS", "")
    if told.isdecimal() and int(told):
        return int(told)
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def compiled_modules(*names: str) -> list[ModuleType]:
    """Modules of kernels; raises ImportError without numba."""
    try:
        return [import_module(f"upgd.kernels.{name}") for name in names]
    except ImportError as error:
        if (error.name or "").split(".")[0] in ("numba", "llvmlite"):
            raise ImportError(
                f"the fused CPU engine needs numba: {install('fast')}", name=error.name
            ) from error
        raise


class OnCpu(DenseStack):
    """R dense learners, each on a core of its own for a chunk.

    `threads` learners run at a time, by default one per core; no result depends on it. `dtype` is
    float32, or float64 for tests. Subclasses have a compiled function `_learn` and its arguments.
    """

    _learn: Any

    def __init__(
        self,
        layout: Layout,
        learners: Sequence[Learner],
        *,
        dtype: Any = np.float32,
        threads: int | None = None,
        **common: Any,
    ) -> None:
        super().__init__(layout, learners, **common)
        self.dtype = np.dtype(str(dtype).removeprefix("torch.") if "torch" in str(dtype) else dtype)
        self.threads = min(threads or cores(), len(self.learners))
        self._allocate()
        self.restart(0)
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="upgd-learner")
        self._noisy = [learner.is_perturbed for learner in self.learners]

    # ------------------------------------------------------------------------- memory
    def _allocate(self) -> None:
        runs, layout = len(self.learners), self.layout
        self.hyper, self.decays = self._tables()
        self.corrections = np.zeros_like(self.decays)
        self.began = np.zeros(runs, np.int64)
        self.layer_table = layout.layer_table.astype(np.int64) * [1, 1, ALIGN, ALIGN, ALIGN, 1]
        self.weights = self._zeros(runs, layout.size)
        self.states = [
            self._zeros(max(1, len(g.states)), g.count if g.states else 1, layout.size)
            for g in self.groups
        ]
        self.utilities = [
            self._zeros(g.count if g.features else 1, layout.units) for g in self.groups
        ]
        self.series = np.zeros((runs, self.windows, len(COLUMNS)))
        self.diverged = np.full(runs, -1, np.int64)

    def _zeros(self, *shape: int) -> NDArray[Any]:
        return np.zeros(shape, self.dtype)

    def _get(self, kept: NDArray[Any]) -> NDArray[Any]:
        return np.array(kept)

    # ------------------------------------------------------------------------ learning
    def advance(self, chunk: Chunk) -> None:
        """Learn from a chunk of samples, the last of which is only looked at beforehand."""
        learn = self._learn
        calls = [self._call(run, chunk) for run in range(len(self.learners))]
        if self.threads == 1:
            for call in calls:
                learn(*call)
        else:
            for future in [self._pool.submit(learn, *call) for call in calls]:
                future.result()
        self.step += chunk.steps

    def _call(self, run: int, chunk: Chunk) -> tuple[Any, ...]:
        """The arguments with which a learner is run through a chunk."""
        raise NotImplementedError

    def _samples(self, run: int, chunk: Chunk) -> tuple[NDArray[Any], ...]:
        """One learner's part of a chunk; what there is not is empty or zero."""
        length = chunk.steps + 1
        permutation, slots = np.zeros((2, 0), np.int32), np.zeros(0, np.int32)
        if chunk.permutations is not None:
            assert chunk.slots is not None
            permutation, slots = chunk.permutations[:, run], chunk.slots
        labels = np.zeros(length, np.int32) if chunk.labels is None else chunk.labels[run]
        targets = np.zeros((length, 0), np.float32) if chunk.targets is None else chunk.targets[run]
        arrays = (chunk.table, chunk.index[run], permutation, slots, labels, targets)
        return tuple(np.ascontiguousarray(array) for array in arrays)


class CpuStack(OnCpu):
    """See :class:`OnCpu` and :mod:`upgd.kernels.cpu_dense`. Raises ImportError without numba."""

    def __init__(self, layout: Layout, learners: Sequence[Learner], **common: Any) -> None:
        kernels, rows = compiled_modules("cpu_dense", "cpu_rows")
        super().__init__(layout, learners, **common)
        self._learn = kernels.compiled("learn")
        self._bounded = [traces_utility(g.row.method) for g in self.groups]
        self._rules = [rows.row_functions(g.row, self.dtype.name) for g in self.groups]

    def _call(self, run: int, chunk: Chunk) -> tuple[Any, ...]:
        return (
            *self.arguments(run),
            *self._samples(self.order[run], chunk),
            self._zeros(0),
            *(self.step, chunk.steps, self.window, self.measured, True),
            *(self.series[run], self.diverged[run : run + 1], self.unknown_bounds()),
            self._zeros(0, 0),
        )

    def unknown_bounds(self) -> NDArray[Any]:
        """Bounds of :func:`upgd.kernels.cpu_dense.learn` that it computes itself."""
        return np.full((3, self.layout.units), -1, self.dtype)

    def arguments(self, run: int) -> tuple[Any, ...]:
        """Those of :func:`upgd.kernels.cpu_dense.learn` that stay the same, up to the key."""
        number, mine = self._group(run)
        group, states = self.groups[number], self.states[number]
        reduce = {None: 0, "max": 1, "row_norm": 2}[group.reduce]
        local_features = group.features and group.row.method.phases[0].reduce == "row_norm"
        return (
            *self._rules[number],
            *(reduce, self._bounded[number], group.features, local_features, group.second),
            self._noisy[run],
            *(self.activation, self.squared, self.layer_table, self.layout.activations),
            *(self.weights[run], states.reshape(-1), states.shape[1] * states.shape[2]),
            (mine if group.states else 0) * states.shape[2],
            self.utilities[number][mine if group.features else 0],
            *(table[run].reshape(-1) for table in (self.hyper, self.decays, self.corrections)),
            self.began[run : run + 1],
            np.uint64(self.learners[run].seed),
        )
