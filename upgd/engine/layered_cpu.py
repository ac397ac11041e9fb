"""A stack of layered learners on CPUs, executed by numba."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from upgd.engine.dense import Learner
from upgd.engine.dense_cpu import OnCpu, compiled_modules
from upgd.engine.feed import Chunk
from upgd.engine.layered import LayeredStack
from upgd.kernels.layout import Layout


class LayeredCpuStack(OnCpu, LayeredStack):
    """See :class:`~upgd.engine.dense_cpu.OnCpu`, :mod:`upgd.kernels.cpu_layered`.

    Raises ImportError without numba.
    """

    def __init__(self, layout: Layout, learners: Sequence[Learner], **common: Any) -> None:
        kernels, phases = compiled_modules("cpu_layered", "cpu_phases")
        super().__init__(layout, learners, **common)
        self._learn = kernels.compiled()
        self._advance = [phases.advance_function(g.row, self.dtype.name) for g in self.groups]

    def _allocate(self) -> None:
        super()._allocate()
        self.kept = [self._zeros(*shape) for shape in self._kept_shapes()]
        self.statistics = self._zeros(*self._statistics_shape)

    def _call(self, run: int, chunk: Chunk) -> tuple[Any, ...]:
        return (
            *self.arguments(run),
            *self._samples(self.order[run], chunk),
            self._zeros(0),
            *(self.step, chunk.steps, self.window, self.measured),
            *(self.series[run], self.diverged[run : run + 1], self._zeros(0, 0)),
        )

    def arguments(self, run: int) -> tuple[Any, ...]:
        """Those of :func:`upgd.kernels.cpu_layered.learn` that stay the same, up to the key."""
        number, mine = self._group(run)
        group, states = self.groups[number], self.states[number]
        return (
            *(self._advance[number], self.activation, self.squared),
            *(self.layer_norm, self.input_norm, self._noisy[run]),
            *(self.layer_table, self.layout.activations, self.layouts[number].blocks),
            *(self.weights[run], states.reshape(-1), states.shape[1] * states.shape[2]),
            *((mine if group.states else 0) * states.shape[2], self.kept[number][mine]),
            *(self.statistics[run], self.hyper[run].reshape(-1)),
            *(self.decays[run], self.corrections[run], self.began[run : run + 1]),
            np.uint64(self.learners[run].seed),
        )
