"""The paper's problems, others with the same data and networks, and users' own, as a table.

``HOW-WHAT-permuted-DATA`` is a problem for every HOW (nothing, ``gradual``: tasks mix over the last
half of each; ``recurring``: five tasks in turn), WHAT (``input``, ``label``, ``both``) and DATA
(``mnist``, ``emnist``, ``mini-imagenet``, ``flat-cifar10``, ``digits``); in ``stationary-DATA``
nothing changes. ``label-permuted-cifar10`` is the paper's, with a convolutional network.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from upgd.sources import digest
from upgd.streams.datasets import load
from upgd.streams.files import DATASETS
from upgd.streams.schedules import Drift, Recurring, Schedule
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
        schedule: makes the schedule from the task length; by default a new task each time.
        toy: which toy stream this is, if one.
        shape, outputs: of one input, and their number, where `network` does not tell.
        stream: makes the stream of a user's problem from the problem and a seed.
        source: 16 digits that change with the code and data of a user's problem.
        layer_norm, input_norm: of a dense network, see :func:`upgd.networks.mlp`.

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
    schedule: Callable[[int], Schedule] | None = None
    shape: tuple[int, ...] | None = None
    outputs: int | None = None
    stream: Callable[[Problem, int], Stream] | None = None
    source: str = ""
    layer_norm: bool = False
    input_norm: bool = False

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
        length = self.task_length
        return TaskStream(
            load(self.dataset, "train", data_dir, download),
            seed,
            length,
            self.permute,
            schedule=self.schedule(length) if self.schedule and length else None,
            test=partial(load, self.dataset, "test", data_dir, download)
            if self.dataset not in DATASETS or DATASETS[self.dataset].has_test
            else None,
            flatten=len(self.interface[0]) == 1,
        )


def _gradual(length: int) -> Drift:
    return Drift(length, length // 2)


_LONG, _SHORT = 5_000, 2_500  # samples of a task where inputs change, and elsewhere
_DATA: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "mnist": ("mnist", (784, 300, 150, 10)),
    "emnist": ("emnist47", (784, 300, 150, 47)),
    "mini-imagenet": ("mini-imagenet", (2048, 300, 150, 100)),
    "flat-cifar10": ("cifar10", (3072, 300, 150, 10)),
    "digits": ("digits", (64, 300, 150, 10)),
}
"""By its name in problems, a dataset and the network that learns from it."""
_WHAT: Mapping[str, Permute] = {"input": "inputs", "label": "labels", "both": "both"}
_HOW: Mapping[str, Callable[[int], Schedule] | None] = {
    "": None,
    "gradual-": _gradual,
    "recurring-": partial(Recurring, tasks=5),
}


def _rows() -> list[Problem]:
    mnist, digits, emnist, features = (
        _DATA[name][1] for name in ("mnist", "digits", "emnist", "mini-imagenet")
    )
    short = _SHORT
    inputs: Any = partial(Problem, permute="inputs")
    labels: Any = partial(Problem, task_length=short, window=short, permute="labels")
    toy: Any = partial(
        Problem, dataset=None, network=(16, 300, 150, 1), task_length=200, window=20 * 200
    )
    toy = partial(toy, activation="linear", loss="squared_error")
    return [
        inputs("input-permuted-mnist", "mnist", mnist, _LONG, _LONG),
        labels("label-permuted-emnist", "emnist47", emnist),
        labels("label-permuted-cifar10", "cifar10", "cnn", runs=10),
        labels("label-permuted-mini-imagenet", "mini-imagenet", features),
        Problem("stationary-mnist", "mnist", mnist, None, 10_000),
        toy("toy-changing-inputs", toy="changing-inputs"),
        toy("toy-changing-sign", toy="changing-sign"),
        inputs("input-permuted-digits", "digits", digits, short, short, steps=100_000),
        labels("label-permuted-digits", "digits", digits, steps=100_000),
    ]


def _others() -> Iterator[Problem]:
    """Every combination of data, change and schedule, besides those above."""
    for data, (dataset, network) in _DATA.items():
        steps = 100_000 if data == "digits" else 1_000_000
        make: Any = partial(Problem, dataset=dataset, network=network, steps=steps)
        yield make(f"stationary-{data}", task_length=None, window=2 * _LONG)
        for how, schedule in _HOW.items():
            for what, permute in _WHAT.items():
                length = _SHORT if what == "label" or data == "digits" else _LONG
                name = f"{how}{what}-permuted-{data}"
                yield make(
                    name, task_length=length, window=length, permute=permute, schedule=schedule
                )


PROBLEMS = {problem.name: problem for problem in (*_rows(), *_others())}
PROBLEMS |= {problem.name: problem for problem in _rows()}  # those that are in both
_BUILT_IN = frozenset(PROBLEMS)


def families() -> dict[str, list[str]]:
    """Names of problems by family; in some, DATA stands for each name that the last one lists.

    Example:
        >>> families()["stationary"]
        ['stationary-DATA']
    """
    paper = [problem.name for problem in _rows() if problem.dataset != "digits"]
    changes = {how: [f"{how}{what}-permuted-DATA" for what in _WHAT] for how in _HOW}
    found = {
        "the paper's": paper,
        "sudden": changes[""],
        "gradual": changes["gradual-"],
        "recurring": changes["recurring-"],
        "stationary": ["stationary-DATA"],
        "your own": [name for name in PROBLEMS if name not in _BUILT_IN],
        "DATA": list(_DATA),
    }
    return {family: names for family, names in found.items() if names}


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
    later = ("schedule", "layer_norm", "input_norm")  # problems without them keep their digits
    parts += [part for part in later if getattr(problem, part)]
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
    raise ValueError(f"unknown problem {name!r};{hint} 'upgd list problems' shows all")
