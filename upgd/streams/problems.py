"""The paper's problems, and two on embedded data, as rows of a table."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from functools import partial
from typing import Literal

from upgd.streams.datasets import load
from upgd.streams.files import DATASETS
from upgd.streams.stream import Loss, Permute, Stream, TaskStream, ToyKind, ToyStream


@dataclass(frozen=True)
class Problem:
    """A stream, the network that learns from it, and how long.

    Args:
        name: what ``upgd run`` calls it.
        dataset: name of the data for :func:`upgd.streams.load`; None if none are needed.
        network: units of each layer from inputs to outputs, or ``"cnn"``, the paper's
            convolutional network.
        activation: of hidden layers.
        task_length: samples per task; None if nothing changes.
        steps: samples of a full run.
        runs: seeds of a full study.
        window: samples per point of a figure.
        loss: what is minimised.
        permute: what a task permutes.
        toy: which toy stream this is, if one.

    Example:
        >>> stream = PROBLEMS["label-permuted-digits"].make(seed=0)
        >>> stream.at(0).x.shape
        (1, 64)
    """

    name: str
    dataset: str | None
    network: tuple[int, ...] | Literal["cnn"]
    task_length: int | None
    window: int
    activation: Literal["relu", "linear"] = "relu"
    steps: int = 1_000_000
    runs: int = 20
    loss: Loss = "cross_entropy"
    permute: Permute | None = None
    toy: ToyKind | None = None

    def make(
        self,
        seed: int,
        data_dir: str | os.PathLike[str] | None = None,
        download: bool = False,
    ) -> Stream:
        """The stream of one run. `data_dir` and `download` are those of :func:`load`."""
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
            flatten=self.network != "cnn",
        )


def _rows() -> list[Problem]:
    mnist, digits, toy = (784, 300, 150, 10), (64, 300, 150, 10), (16, 300, 150, 1)
    regression = partial(
        Problem,
        dataset=None,
        network=toy,
        task_length=200,
        window=20 * 200,
        activation="linear",
        loss="squared_error",
    )
    return [
        Problem("input-permuted-mnist", "mnist", mnist, 5_000, 5_000, permute="inputs"),
        Problem(
            "label-permuted-emnist",
            "emnist47",
            (784, 300, 150, 47),
            2_500,
            2_500,
            permute="labels",
        ),
        Problem(
            "label-permuted-cifar10", "cifar10", "cnn", 2_500, 2_500, runs=10, permute="labels"
        ),
        Problem(
            "label-permuted-mini-imagenet",
            "mini-imagenet",
            (2048, 300, 150, 100),
            2_500,
            2_500,
            permute="labels",
        ),
        Problem("stationary-mnist", "mnist", mnist, None, 10_000),
        regression("toy-changing-inputs", toy="changing-inputs"),
        regression("toy-changing-sign", toy="changing-sign"),
        Problem(
            "input-permuted-digits", "digits", digits, 2_500, 2_500, steps=100_000, permute="inputs"
        ),
        Problem(
            "label-permuted-digits", "digits", digits, 2_500, 2_500, steps=100_000, permute="labels"
        ),
    ]


PROBLEMS = {problem.name: problem for problem in _rows()}


def get(name: str) -> Problem:
    """A problem by name.

    Example:
        >>> get("toy-changing-sign").window
        4000
        >>> get("toys")
        Traceback (most recent call last):
        ValueError: unknown problem 'toys'; 'upgd list' shows all
    """
    if name in PROBLEMS:
        return PROBLEMS[name]
    part = [known for known in PROBLEMS if name and name in known]
    close = difflib.get_close_matches(name, PROBLEMS, 1, cutoff=0.5) or part
    hint = f" did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown problem {name!r};{hint} 'upgd list' shows all")
