"""What stacks of learners that see their layers share, whatever executes them.

A layered stack takes dense networks at batch size 1, like :class:`~upgd.engine.dense.DenseStack`,
and besides it layered methods (:mod:`upgd.rules.vocabulary`) and networks with `layer_norm` or
`input_norm` (:func:`upgd.networks.mlp`). Each learner goes through a chunk of steps by itself, and
runs the phases of its method one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from upgd.engine.dense import DenseStack, Learner
from upgd.kernels.layered import KeptLayout
from upgd.kernels.layout import Layout


def unsupported(learner: Learner) -> str:
    """Why no layered stack can run a learner; empty if one can."""
    row = learner.row
    if row.eager_only:
        return row.eager_only
    if row.method.period is not None:
        return "stacks with layered methods, layer_norm or input_norm have no periods"
    if "curvature" in row.needs:
        return "stacks with layered methods, layer_norm or input_norm compute no curvature"
    if "gates" in row.needs:
        return "stacks with layered methods, layer_norm or input_norm measure no gates"
    if any(phase.reduce == "row_norm" for phase in row.method.phases):
        return "stacks with layered methods, layer_norm or input_norm compute no norms of rows"
    return ""


class LayeredStack(DenseStack):
    """Dense learners with layered methods, LayerNorm, or inputs normalised online.

    Besides what :class:`~upgd.engine.dense.Stack` lists, subclasses allocate `kept` of each group
    [count, numbers], the states at places other than weights (`layouts` say where), and
    `statistics` [R, 2, inputs], the running means and variances of inputs. Hyperparameters
    [R, L, 16], `decays` and `corrections` [R, L, 8] are those of each layer.

    Args:
        layout: Of the networks.
        learners: Methods, hyperparameters and seeds, in any order.
        activation: Of hidden units.
        layer_norm: Whether LayerNorm precedes each activation.
        input_norm: Whether inputs are normalised online (:class:`upgd.networks.OnlineNorm`).
        common: See :class:`~upgd.engine.dense.Stack`.
    """

    kept: list[Any]
    statistics: Any
    hyper: Any
    decays: Any

    def __init__(
        self,
        layout: Layout,
        learners: Sequence[Learner],
        *,
        activation: str,
        layer_norm: bool = False,
        input_norm: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(layout, learners, activation=activation, **common)
        self.layer_norm, self.input_norm = layer_norm, input_norm
        self.layouts = [KeptLayout(group.row.method, layout) for group in self.groups]

    def _unsupported(self, learner: Learner) -> str | None:
        return unsupported(learner) or None

    def _kept_shapes(self) -> list[tuple[int, int]]:
        """Those of each group's `kept`; kernels need an array even where nothing is kept."""
        sizes = zip(self.groups, self.layouts, strict=True)
        return [(group.count, max(1, kept.size)) for group, kept in sizes]

    @property
    def _statistics_shape(self) -> tuple[int, int, int]:
        return len(self.learners), 2, self.layout.sizes[0] if self.input_norm else 1

    def restart(self, task: int, runs: Sequence[int] | None = None) -> None:
        super().restart(task, runs)
        for run in range(len(self.learners)) if runs is None else runs:
            number, mine = self._group(run)
            kept = self.layouts[number]
            self.kept[number][mine, : kept.size] = self._put(kept.starts)
            self.statistics[run] = 0

    def _views(self, run: int) -> dict[str, Any]:
        number, mine = self._group(run)
        found = super()._views(run)
        found["kept"] = self.kept[number][mine]
        found["statistics"] = self.statistics[run]
        found["began"] = self.began[run : run + 1].reshape(())
        return found
