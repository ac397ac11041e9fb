"""Several networks that learn side by side, and the mixture of their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from upgd.stream.mixing import LeastSquares, Product

Arrays = dict[str, NDArray[Any]]
CALM = 10
"""Copies without divergence after which a halved step size is doubled."""


class Core(Protocol):
    """A network that learns from rows of numbers."""

    sizes: tuple[int, ...]  # units per layer, inputs and outputs included
    lr: float  # step size

    def learn(
        self,
        rows: NDArray[np.float32],
        targets: NDArray[Any],
        importance: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Learn from rows, one after the other; the outputs for each before it was learned.

        Args:
            rows: [T, inputs].
            targets: Classes as integers [T], or numbers [T, outputs].
            importance: [T], by which each row's loss is multiplied.
        """

    def answer(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """The outputs [T, outputs] for rows of inputs."""

    def grow(self, inputs: int, outputs: int) -> None:
        """Add inputs and outputs, whose weights and traces are zero; the others keep theirs."""

    def load_weights(self, layers: Sequence[NDArray[Any]]) -> None:
        """Set all linear layers' weights, [outputs, inputs + 1], biases last; before any step."""

    def check_inputs(self, inputs: int) -> None:
        """Raise ValueError if :meth:`grow` cannot add inputs up to so many."""

    @property
    def diverged_at(self) -> int | None:
        """The first row of the last :meth:`learn` whose loss or derivatives were not finite."""

    def restart(self) -> None:
        """Begin with nothing learned, with as many inputs and outputs as now."""

    def utilities(self) -> list[NDArray[np.float32]] | None:
        """Bias-corrected utilities of linear layers' weights, [outputs, inputs + 1], biases last.

        None where there is no utility per weight.
        """

    def forget_utilities(self) -> None:
        """Set the traces of utility to zero."""

    def state(self) -> tuple[Arrays, dict[str, Any]]:
        """Everything that learning on depends on: arrays, and what fits into JSON."""

    def restore(self, arrays: Arrays, facts: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""


class Committee:
    """Networks that learn from the same rows.

    Every `every` rows each network is copied. One that diverges returns to its copy, once: the copy
    may have been made when the harm was done already, and without one the network begins again. It
    goes on with half the step size, which is doubled again after ten copies. `restarts` counts.
    """

    def __init__(self, cores: Sequence[Core], squared: bool, every: int = 1000) -> None:
        self.cores = list(cores)
        kind = LeastSquares if squared else Product
        self.mixture = kind(len(self.cores))
        self.restarts, self.every = 0, every
        self._copies: list[tuple[Arrays, dict[str, Any]] | None] = [None] * len(self.cores)
        self._full_lr = [core.lr for core in self.cores]
        self._calm = [0] * len(self.cores)  # copies since a network diverged
        self._until_copies = 0  # rows

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs and outputs; the last network is the last to grow."""
        return self.cores[-1].sizes[0], self.cores[-1].sizes[-1]

    def learn(
        self,
        rows: NDArray[np.float32],
        targets: NDArray[Any],
        importance: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float64]:
        """As :meth:`Core.learn`, mixed; the mixture's weights learn too."""
        answers = self._room(rows)
        begin = 0
        while begin < len(rows):
            if self._until_copies == 0:
                self._calm_down()
                self.keep_copies()
            end = min(len(rows), begin + self._until_copies)
            weights = None if importance is None else importance[begin:end]
            for number in range(len(self.cores)):
                part = answers[number, begin:end]
                self._learn(number, rows[begin:end], targets[begin:end], weights, part)
            self._until_copies -= end - begin
            begin = end
        return self.mixture.mix(answers, targets)

    def _learn(
        self,
        number: int,
        rows: NDArray[np.float32],
        targets: NDArray[Any],
        importance: NDArray[np.float32] | None,
        answers: NDArray[np.float32],
    ) -> None:
        """Have a network learn; where it diverges, it goes on behind that row."""
        core, begin = self.cores[number], 0
        answers[:] = core.learn(rows, targets, importance)
        while (end := core.diverged_at) is not None:  # what follows was learned in vain
            self.restarts += 1
            slower, copy = core.lr / 2, self._copies[number]
            core.restart() if copy is None else core.restore(*copy)
            core.lr = slower
            self._copies[number], self._calm[number] = None, 0
            begin += end + 1
            if begin == len(rows):
                break
            weights = None if importance is None else importance[begin:]
            answers[begin:] = core.learn(rows[begin:], targets[begin:], weights)

    def _calm_down(self) -> None:
        """Double step sizes that were halved, where nothing has diverged for long."""
        for number, core in enumerate(self.cores):
            self._calm[number] += 1
            if self._calm[number] >= CALM and core.lr < self._full_lr[number]:
                core.lr, self._calm[number] = min(2 * core.lr, self._full_lr[number]), 0

    def keep_copies(self) -> None:
        """Copy the networks, to return to if they diverge."""
        self._copies = [core.state() for core in self.cores]
        self._until_copies = self.every

    def answer(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """Mixed logarithms of probabilities, or values, for rows of inputs."""
        answers = self._room(rows)
        for place, core in zip(answers, self.cores, strict=True):
            place[:] = core.answer(rows)
        return self.mixture.mix(answers)

    def _room(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.empty((len(self.cores), len(rows), self.shape[1]), np.float32)

    def grow(self, inputs: int, outputs: int, steps: Sequence[float] | None = None) -> None:
        """As :meth:`Core.grow`, where there are more than now.

        Args:
            inputs: How many.
            outputs: How many.
            steps: By which each network's step size is multiplied then.
        """
        if (inputs, outputs) == self.shape:
            return
        for number, core in enumerate(self.cores):
            if (core.sizes[0], core.sizes[-1]) != (inputs, outputs):
                core.grow(inputs, outputs)
                if steps is not None:
                    core.lr *= steps[number]
                    self._full_lr[number] *= steps[number]
        self.keep_copies()

    def check_inputs(self, inputs: int) -> None:
        """As :meth:`Core.check_inputs`, where there are more than now."""
        if inputs != self.shape[0]:
            for core in self.cores:
                core.check_inputs(inputs)

    def state(self) -> tuple[Arrays, dict[str, Any]]:
        """Of all members, their copies, and of the mixture."""
        arrays = {f"mixture/{name}": array for name, array in self.mixture.state().items()}
        facts = []
        for number, core in enumerate(self.cores):
            mine, fact = core.state()
            arrays |= {f"{number}/{name}": array for name, array in mine.items()}
            kept, copy = self._copies[number], None
            if kept is not None:
                arrays |= {f"copy/{number}/{name}": array for name, array in kept[0].items()}
                copy = kept[1]
            rest = {"full_lr": self._full_lr[number], "calm": self._calm[number]}
            facts.append({"now": fact, "copy": copy, **rest})
        shape = list(self.shape)
        return arrays, {"members": facts, "shape": shape, "until_copies": self._until_copies}

    def restore(self, arrays: Mapping[str, NDArray[Any]], facts: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self.grow(*facts["shape"])
        self.mixture.restore(below("mixture/", arrays))
        for number, (core, fact) in enumerate(zip(self.cores, facts["members"], strict=True)):
            core.restore(below(f"{number}/", arrays), fact["now"])
            copy = fact["copy"]
            kept = None if copy is None else (below(f"copy/{number}/", arrays), copy)
            self._copies[number] = kept
            self._full_lr[number], self._calm[number] = fact["full_lr"], fact["calm"]
        self._until_copies = facts["until_copies"]


def below(start: str, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    """Arrays whose names begin with `start`, named by the rest."""
    return {name[len(start) :]: v for name, v in arrays.items() if name.startswith(start)}
