"""Dense networks that learn one sample at a time in compiled loops. Needs numba."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd.engine.dense import Learner
from upgd.engine.dense_cpu import CpuStack, OnCpu
from upgd.engine.layered_cpu import LayeredCpuStack
from upgd.kernels.layered import kept_names
from upgd.kernels.layout import Layer, Layout
from upgd.kernels.rules import LR
from upgd.optim.registry import get

_NO_LIMIT = 1 << 62  # one window for all steps
_NO_PERMUTATION = (np.zeros((2, 0), np.int32), np.zeros(0, np.int32))
_NO_IMPORTANCE = np.zeros(0, np.float32)


class DenseCore:
    """One learner of the laboratory's fused CPU engine, whose first and last layer can grow.

    The output layer begins with zeros: all classes are equally likely.

    Args:
        sizes: Units per layer, inputs and outputs included.
        method: A name of the registry.
        hyper: Hyperparameters; the rest have the registry's defaults.
        seed: Of initial weights and noise.
        squared: Whether the loss is the squared error; else it is the cross entropy.
        activation: Of hidden units.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        method: str,
        hyper: Mapping[str, Any],
        seed: int,
        squared: bool,
        activation: str = "relu",
    ) -> None:
        self._learner = Learner(method, hyper, seed)
        self._loss = "squared_error" if squared else "cross_entropy"
        self._activation = activation
        self.sizes = sizes
        self.restart()

    def restart(self) -> None:
        """Begin with nothing learned, with as many inputs and outputs as now."""
        self._build(self.sizes)
        self.matrices(self.stack.weights[0])[-1][:] = 0
        self._begin_states()

    def _begin_states(self) -> None:
        """Copy the weights into states that begin as they do."""
        stack = self.stack
        for k, name in enumerate(self.states):
            if name in stack.groups[0].row.method.starts_as_weight:
                stack.states[0][k, 0] = stack.weights[0]

    def _build(self, sizes: tuple[int, ...]) -> None:
        self.sizes, self.layout = sizes, Layout(sizes)
        self._begun = 0  # the step at which the last learning began
        common = {"loss": self._loss, "activation": self._activation, "threads": 1}
        common |= {"steps": _NO_LIMIT, "window": _NO_LIMIT}
        self.stack = stack = self._make_stack(common)
        self._lr = self._learner.values()["lr"]
        network = stack.activation, stack.layer_table, self.layout.activations, stack.weights[0]
        answer = import_module("upgd.kernels.cpu_dense").compiled("answer")
        self._answer = partial(answer, *network)

    def _make_stack(self, common: Mapping[str, Any]) -> OnCpu:
        """A stack of this learner alone; `_learn` is its compiled function."""
        kernels = import_module("upgd.kernels.cpu_dense")
        stack = CpuStack(self.layout, [self._learner], **common)
        self._bounds = stack.unknown_bounds()
        self._learn = partial(kernels.compiled("learn"), *stack.arguments(0))
        return stack

    def _results(self, answers: NDArray[np.float32]) -> tuple[Any, ...]:
        """The last arguments of the compiled function."""
        return False, self.stack.series[0], self.stack.diverged, self._bounds, answers

    def _forget_bounds(self) -> None:
        """Have bounds of weights and traces, which were changed, computed anew."""
        self._bounds[:] = -1

    # ----------------------------------------------------------------------- learning
    def learn(
        self,
        rows: NDArray[np.float32],
        targets: NDArray[Any],
        importance: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Learn from rows [T, inputs], one after the other.

        Args:
            rows: Inputs.
            targets: Classes as integers [T], or numbers [T, outputs].
            importance: [T], by which each row's loss is multiplied.

        Returns:
            The outputs [T, outputs] for each row just before it was learned.
        """
        count, stack = len(rows), self.stack
        # A step also looks at the sample that follows; behind the last one there is none.
        index = np.arange(count + 1, dtype=np.int32)
        index[count] = count - 1
        labels = np.zeros(count + 1, np.int32)
        numbers = np.zeros((count + 1, self.sizes[-1] if stack.squared else 0), np.float32)
        (numbers if stack.squared else labels)[:count] = targets
        answers = np.empty((count, self.sizes[-1]), np.float32)
        self._learn(
            *(rows, index, *_NO_PERMUTATION, labels, numbers),
            _NO_IMPORTANCE if importance is None else importance,
            *(stack.step, count, stack.window, stack.measured),
            *self._results(answers),
        )
        stack.step += count
        self._begun = stack.step - count
        return answers

    def answer(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """The outputs for rows of inputs."""
        answers = np.empty((len(rows), self.sizes[-1]), np.float32)
        self._answer(rows, answers)
        return answers

    @property
    def steps(self) -> int:
        """Samples learned so far."""
        return self.stack.step

    @property
    def diverged_at(self) -> int | None:
        """The first row of the last :meth:`learn` whose loss or derivatives were not finite."""
        step = int(self.stack.diverged[0])
        return None if step < 0 else max(0, step - self._begun)

    # ------------------------------------------------------------------------ growing
    def matrices(self, numbers: NDArray[Any]) -> list[NDArray[Any]]:
        """Views of a learner's numbers, layer by layer: [outputs, inputs + 1], the bias last."""
        return [
            numbers[each.base : each.base + each.outputs * each.stride]
            .reshape(each.outputs, each.stride)[:, : each.inputs + 1]
            for each in self.layout.layers
        ]  # fmt: skip

    def check_inputs(self, inputs: int) -> None:
        """Any number will do."""

    def grow(self, inputs: int, outputs: int) -> None:
        """Add inputs and outputs, whose weights and traces are zero; the others keep theirs."""
        old, old_layers, lr = self.stack, self.layout.layers, self.lr
        kept = [self.matrices(each) for each in self._numbers()]
        self._build((inputs, *self.sizes[1:-1], outputs))
        for numbers, matrices in zip(self._numbers(), kept, strict=True):
            numbers[:] = 0
            for new, past in zip(self.matrices(numbers), matrices, strict=True):
                new[: len(past), : past.shape[1] - 1] = past[:, :-1]
                new[: len(past), -1] = past[:, -1]
        for new_layer, layer in zip(self.layout.layers, old_layers, strict=True):
            self._carry(old, layer, new_layer)
        for name in ("corrections", "began", "series", "diverged"):
            getattr(self.stack, name)[:] = getattr(old, name)
        self.stack.step, self.lr = old.step, lr

    def _carry(self, old: OnCpu, layer: Layer, new: Layer) -> None:
        """Take over what belongs to a layer's units and inputs from the stack before it grew."""
        if self.stack.groups[0].features:
            mine = old.utilities[0][0, layer.row_at : layer.row_at + layer.outputs]
            self.stack.utilities[0][0, new.row_at : new.row_at + layer.outputs] = mine

    def load_weights(self, layers: Sequence[NDArray[Any]]) -> None:
        """See :class:`upgd.stream.committee.Core`."""
        for mine, given in zip(self.matrices(self.stack.weights[0]), layers, strict=True):
            mine[:] = given
        self._forget_bounds()
        self._begin_states()

    def _numbers(self) -> list[NDArray[Any]]:
        """Weights, and each of the method's states."""
        stack = self.stack
        return [stack.weights[0], *(stack.states[0][k, 0] for k in range(len(self.states)))]

    @property
    def states(self) -> tuple[str, ...]:
        """What the method keeps per weight."""
        return self.stack.groups[0].states

    @property
    def lr(self) -> float:
        """The step size, of layers whose role has none of its own."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        factor = value / self._lr if self._lr else 1.0
        steps = self.stack.hyper[0, :, LR]
        steps[:] = [value if lr == self._lr else lr * factor for lr in steps]
        self._lr = value

    # ------------------------------------------------------------------------- traces
    @property
    def _utility(self) -> int | None:
        """Which of the states is the trace of utility."""
        return self.states.index("utility") if "utility" in self.states else None

    def utilities(self) -> list[NDArray[np.float32]] | None:
        """See :class:`upgd.stream.committee.Core`."""
        if self._utility is None:
            return None
        corrections = self.stack.corrections[0, :, self._utility].astype(np.float32)
        traces = self.matrices(self.stack.states[0][self._utility, 0])
        return [each / (c or np.float32(1)) for each, c in zip(traces, corrections, strict=True)]

    def forget_utilities(self) -> None:
        """Set the traces of utility to zero."""
        if self._utility is not None:
            self.stack.states[0][self._utility, 0] = 0
            self._forget_bounds()
            self.stack.corrections[0, :, self._utility] = 0

    # -------------------------------------------------------------------------- state
    def __getstate__(self) -> dict[str, Any]:
        made = (self.sizes, self._learner, self._loss, self._activation)
        return {"made": made, "state": self.state()}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        sizes, self._learner, self._loss, self._activation = saved["made"]
        self._build(sizes)
        self.restore(*saved["state"])

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Everything that learning on depends on: arrays, and what fits into JSON."""
        return self.stack.state(0), {"step": self.stack.step, "lr": self.lr}

    def restore(self, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self.stack.restore(0, arrays)
        self._forget_bounds()
        self.stack.step, self.lr = int(facts["step"]), facts["lr"]


class LayeredCore(DenseCore):
    """The same with a method that sees its layers."""

    stack: LayeredCpuStack

    def _make_stack(self, common: Mapping[str, Any]) -> OnCpu:
        kernels = import_module("upgd.kernels.cpu_layered")
        stack = LayeredCpuStack(self.layout, [self._learner], **common)
        self._learn = partial(kernels.compiled(), *stack.arguments(0))
        return stack

    def _results(self, answers: NDArray[np.float32]) -> tuple[Any, ...]:
        return self.stack.series[0], self.stack.diverged, answers

    def _forget_bounds(self) -> None:
        """There are none."""

    def _carry(self, old: OnCpu, layer: Layer, new: Layer) -> None:
        assert isinstance(old, LayeredCpuStack)
        for place, name in kept_names(self._learner.row.method):
            mine, theirs = (
                stack.kept[0][0, stack.layouts[0].at(place, name, layer.number) :]
                for stack in (self.stack, old)
            )
            size = {"inputs": layer.inputs, "units": layer.outputs, "features": layer.outputs}
            mine[: size.get(place, 1)] = theirs[: size.get(place, 1)]


def compiled_core(sizes: tuple[int, ...], method: str, *rest: Any) -> DenseCore:
    """The core that has a method; its arguments are those of :class:`DenseCore`."""
    kind = LayeredCore if get(method)[0].method.layered else DenseCore
    return kind(sizes, method, *rest)
