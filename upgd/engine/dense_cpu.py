"""A stack of dense learners on CPUs, executed by numba."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd.engine.dense import COLUMNS, Learner, in_groups, initial, tables
from upgd.engine.feed import Chunk
from upgd.engine.layout import ALIGN, Layout

ACTIVATIONS = ("relu", "leaky_relu", "tanh", "linear")


def cores() -> int:
    """How many this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


class CpuStack:
    """R dense learners, each on a core of its own for a chunk; see :mod:`upgd.kernels.cpu_dense`.

    Args:
        layout: The network.
        learners: Methods, hyperparameters and seeds, in any order.
        activation: Of hidden layers.
        loss: ``"cross_entropy"`` or ``"squared_error"``.
        steps: How many will be run; the windows of metrics are allotted for them.
        window: Samples per window.
        stride: Take diagnostics every so many steps; 0 for never.
        dtype: float32, or float64 for tests.
        threads: How many learners run at a time; by default as many as there are cores. No
            result depends on it.

    Raises:
        ImportError: numba is not installed.
    """

    def __init__(
        self,
        layout: Layout,
        learners: Sequence[Learner],
        *,
        activation: str,
        loss: str,
        steps: int,
        window: int,
        stride: int = 0,
        dtype: Any = np.float32,
        threads: int | None = None,
    ) -> None:
        try:
            kernels = import_module("upgd.kernels.cpu_dense")
        except ImportError as error:
            if (error.name or "").split(".")[0] in ("numba", "llvmlite"):
                raise ImportError(
                    "the fused CPU engine needs numba: pip install 'upgd[fast]'", name=error.name
                ) from error
            raise
        self.layout = layout
        self.dtype = np.dtype(str(dtype).removeprefix("torch.") if "torch" in str(dtype) else dtype)
        self.order, self.groups = in_groups(learners)
        self.learners = [learners[i] for i in self.order]
        self.activation, self.squared = ACTIVATIONS.index(activation), loss == "squared_error"
        self.window, self.stride = window, stride
        self.windows = -(-steps // window)
        self.step = 0
        self.threads = min(threads or cores(), len(self.learners))
        self._allocate()
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="upgd-learner")
        self._learn = kernels.learner()
        self._rules = [kernels.row_functions(g.row, self.dtype.name) for g in self.groups]

    # ------------------------------------------------------------------------- memory
    def _allocate(self) -> None:
        runs, layout = len(self.learners), self.layout
        self.hyper, self.decays = tables(self.learners)
        self.corrections = np.zeros_like(self.decays)
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
        self.restart(0)

    def _zeros(self, *shape: int) -> NDArray[Any]:
        return np.zeros(shape, self.dtype)

    def restart(self, task: int) -> None:
        """Fresh weights and states for all."""
        for i, learner in enumerate(self.learners):
            self.weights[i] = initial(self.layout, learner.seed, task)
        for group, states in zip(self.groups, self.states, strict=True):
            states[:] = 0
            for k, name in enumerate(group.states):
                if name in group.row.method.starts_as_weight:
                    states[k] = self.weights[group.first : group.first + group.count]
        for utility in self.utilities:
            utility[:] = 0
        self.corrections[:] = 0

    def _group(self, run: int) -> tuple[int, int]:
        """The number of a run's group, and its number in there."""
        for number, group in enumerate(self.groups):
            if run < group.first + group.count:
                return number, run - group.first
        raise IndexError(f"there are {len(self.learners)} runs, none has number {run}")

    def state(self, run: int) -> dict[str, NDArray[Any]]:
        """Everything that the rest of run number `run` depends on, in the order of `learners`."""
        return {name: array.copy() for name, array in self._views(run).items()}

    def restore(self, run: int, saved: Mapping[str, NDArray[Any]]) -> None:
        """Continue run number `run` from what :meth:`state` returned."""
        views = self._views(run)
        for name, array in saved.items():
            views[name][...] = array

    def _views(self, run: int) -> dict[str, NDArray[Any]]:
        number, mine = self._group(run)
        group = self.groups[number]
        found = {
            "weights": self.weights[run],
            "corrections": self.corrections[run],
            "series": self.series[run],
            "diverged": self.diverged[run : run + 1].reshape(()),
        }
        if group.states:
            found["states"] = self.states[number][:, mine]
        if group.features:
            found["utility"] = self.utilities[number][mine]
        return found

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
        number, mine = self._group(run)
        group, states = self.groups[number], self.states[number]
        reduce = {None: 0, "max": 1, "row_norm": 2}[group.reduce]
        local_features = group.features and group.row.method.phases[0].reduce == "row_norm"
        return (
            *self._rules[number],
            *(reduce, group.features, local_features, group.second),
            *(self.activation, self.squared, self.layer_table, self.layout.activations),
            *(self.weights[run], states.reshape(-1), states.shape[1] * states.shape[2]),
            (mine if group.states else 0) * states.shape[2],
            self.utilities[number][mine if group.features else 0],
            *(self.hyper[run], self.decays[run], self.corrections[run]),
            np.uint64(self.learners[run].seed),
            *self._samples(self.order[run], chunk),
            *(self.step, chunk.steps, self.window, self.stride),
            *(self.series[run], self.diverged[run : run + 1]),
        )

    def _samples(self, run: int, chunk: Chunk) -> tuple[NDArray[Any], ...]:
        """One learner's part of a chunk; what there is not is empty or zero."""
        length = chunk.steps + 1
        if chunk.inputs is not None:
            rows, index = chunk.inputs[run], np.arange(length, dtype=np.int32)
        else:
            assert chunk.table is not None
            assert chunk.index is not None
            rows, index = chunk.table, chunk.index[run]
        permutation, slots = np.zeros((2, 0), np.int32), np.zeros(0, np.int32)
        if chunk.permutations is not None:
            assert chunk.slots is not None
            permutation, slots = chunk.permutations[:, run], chunk.slots
        labels = np.zeros(length, np.int32) if chunk.labels is None else chunk.labels[run]
        targets = np.zeros((length, 0), np.float32) if chunk.targets is None else chunk.targets[run]
        arrays = (rows, index, permutation, slots, labels, targets)
        return tuple(np.ascontiguousarray(array) for array in arrays)
