"""The paper's problems, two on embedded data, and users' own, as rows of a table."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from upgd.sources import digest
from upgd.streams.datasets import load
from upgd.streams.files import DATASETS
from upgd.streams.stream import Loss, Permute, Stream, TaskStream, ToyKind, ToyStream


@dataclass(frozen=True)
class Problem:
    """A stream, the network that learns from it, and how long.

    Args:
        name: what ``upgd run`` calls it.
        dataset: name of the data for :func:`upgd.streams.load`; None if none are needed.
        network: units of each layer from inputs to outputs, ``"cnn"``, the paper's
            convolutional network, or the name of a network in :mod:`upgd.networks`.
        task_length: samples per task; None if nothing changes.
        window: samples per point of a figure.
        activation: of hidden layers.
        steps: samples of a full run.
        runs: seeds of a full study.
        loss: what is minimised.
        permute: what a task permutes.
        toy: which toy stream this is, if one.
        shape, outputs: of one input, and their number, where `network` does not tell.
        stream: makes the stream of a user's problem from the problem and a seed.
        source: 16 digits that change with the code and data of a user's problem.

    Example:
        >>> PROBLEMS["label-permuted-digits"].make(seed=0).at(0).x.shape
        (1, 64)
    """

    name: str
    dataset: str | None
    network: tuple[int, ...] | str
    task_length: int | None
    window: int
    activation: Literal["relu", "leaky_relu", "tanh", "linear"] = "relu"
    steps: int = 1_000_000
    runs: int = 20
    loss: Loss = "cross_entropy"
    permute: Permute | None = None
    toy: ToyKind | None = None
    shape: tuple[int, ...] | None = None
    outputs: int | None = None
    stream: Callable[[Problem, int], Stream] | None = None
    source: str = ""

    @property
    def interface(self) -> tuple[tuple[int, ...], int]:
        """The shape of one input, and the number of outputs."""
        if self.shape is not None and self.outputs is not None:
            return self.shape, self.outputs
        if isinstance(self.network, str):
            return (3, 32, 32), 10
        return (self.network[0],), self.network[-1]

    def with_network(self, network: tuple[int, ...] | str) -> Problem:
        """The same problem with another network; inputs and outputs stay as they are."""
        shape, outputs = self.interface
        return replace(self, network=network, shape=shape, outputs=outputs)

    def make(
        self, seed: int, data_dir: str | os.PathLike[str] | None = None, download: bool = False
    ) -> Stream:
        """The stream of one run. `data_dir` and `download` are those of :func:`load`."""
        if self.stream is not None:
            return self.stream(self, seed)
        if self.toy is not None:
            assert self.task_length is not None
            return ToyStream(self.toy, seed, self.task_length)
        assert self.dataset is not None
        return TaskStream(
            load(self.dataset, "train", data_dir, download),
            seed,
            self.task_length,
            self.permute,
            test=partial(load, self.dataset, "test", data_dir, download)
            if self.dataset not in DATASETS or DATASETS[self.dataset].has_test
            else None,
            flatten=len(self.interface[0]) == 1,
        )


def _rows() -> list[Problem]:
    mnist, digits, emnist = (784, 300, 150, 10), (64, 300, 150, 10), (784, 300, 150, 47)
    features, short = (2048, 300, 150, 100), 2_500
    inputs: Any = partial(Problem, permute="inputs")
    labels: Any = partial(Problem, task_length=short, window=short, permute="labels")
    toy: Any = partial(
        Problem, dataset=None, network=(16, 300, 150, 1), task_length=200, window=20 * 200
    )
    toy = partial(toy, activation="linear", loss="squared_error")
    return [
        inputs("input-permuted-mnist", "mnist", mnist, 5_000, 5_000),
        labels("label-permuted-emnist", "emnist47", emnist),
        labels("label-permuted-cifar10", "cifar10", "cnn", runs=10),
        labels("label-permuted-mini-imagenet", "mini-imagenet", features),
        Problem("stationary-mnist", "mnist", mnist, None, 10_000),
        toy("toy-changing-inputs", toy="changing-inputs"),
        toy("toy-changing-sign", toy="changing-sign"),
        inputs("input-permuted-digits", "digits", digits, short, short, steps=100_000),
        labels("label-permuted-digits", "digits", digits, steps=100_000),
    ]


PROBLEMS = {problem.name: problem for problem in _rows()}
_BUILT_IN = frozenset(PROBLEMS)


def register(problem: Problem) -> Problem:
    """Add a user's problem, or replace it; returns it with a `source`.

    Raises:
        ValueError: The name is one of this package's problems, or cannot be a name.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", problem.name):
        raise ValueError(f"a problem's name is letters, digits and -_.+; got {problem.name!r}")
    if problem.name in _BUILT_IN:
        raise ValueError(f"{problem.name!r} is this package's; give the problem another name")
    if not problem.source:
        problem = replace(problem, source=source_of(problem))
    PROBLEMS[problem.name] = problem
    return problem


def source_of(problem: Problem) -> str:
    """16 digits that change with what a run depends on and its specification does not hold."""
    parts = ["dataset", "toy", "stream", "network", "activation", "task_length", "window", "loss"]
    parts += ["permute", "shape", "outputs"]
    return digest({part: getattr(problem, part) for part in parts})


def get(name: str) -> Problem:
    """A problem by name; raises ValueError with a hint for an unknown one.

    Example:
        >>> get("toy-changing-sign").window
        4000
    """
    if name in PROBLEMS:
        return PROBLEMS[name]
    part = [known for known in PROBLEMS if name and name in known]
    close = difflib.get_close_matches(name, PROBLEMS, 1, cutoff=0.5) or part
    hint = f" did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown problem {name!r};{hint} 'upgd list' shows all")
