"""How long a learner for a stream takes for one sample, on one core, as ratios in the same run.

    python benchmarks/stream_speed.py [--rounds 20] [--output docs/benchmarks/stream_speed.md]

Learners of ten classes see the same samples of normal noise with a linear rule, in rounds that
alternate between them; the order within a round changes. *Learn one*, *predict one*: microseconds
for a sample given as a dict of names and numbers, what it takes to make an array of it included;
p50 and p99 over all samples of all rounds. *Rows*: samples a second learned from a matrix, by one
call where a learner learns row by row inside it, else by a loop. Ratios are to the first learner:
the median over rounds of ratios within a round. Learners have seen some samples before; a tree
takes longer as it grows.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy reads it

import importlib
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import networks
import numpy as np
import torch
from numpy.typing import NDArray
from river import linear_model, preprocessing, tree
from sklearn.neural_network import MLPClassifier

CLASSES, HIDDEN = 10, (128, 64)
PACKAGES = ("river", "scikit-learn", "torch", "numpy")
Sample = dict[str, float]


class Model(Protocol):
    """A learner as its users call it."""

    def learn_one(self, x: Sample, y: int) -> Any: ...

    def predict_one(self, x: Sample) -> Any: ...

    def learn_rows(self, x: NDArray[Any], y: NDArray[Any]) -> None: ...


class Ours:
    """``upgd.stream.Classifier`` with its defaults; one learns dicts, another one rows."""

    def __init__(self, features: int) -> None:
        make = importlib.import_module("upgd.stream").Classifier
        self._model, named = make(), make()
        self.learn_one, self.predict_one = named.learn_one, named.predict_one

    def learn_rows(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        self._model.partial_fit(x, y)


class OursOfRows(Ours):
    """The same, each row predicted before it is learned, in one call."""

    def learn_rows(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        self._model.predict_then_learn(x, y)


class River:
    """One of river's models; rows become dicts."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.learn_one, self.predict_one = model.learn_one, model.predict_one

    def learn_rows(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        names = [f"x{i}" for i in range(x.shape[1])]
        for row, target in zip(x.tolist(), y.tolist(), strict=True):
            self._model.learn_one(dict(zip(names, row, strict=True)), target)


class ScikitLearn:
    """MLPClassifier; a matrix is learned row by row in one call (batch_size=1, no shuffling)."""

    def __init__(self, features: int) -> None:
        self._model = MLPClassifier(HIDDEN, batch_size=1, shuffle=False, random_state=0)
        x = np.zeros((1, features))
        self._model.partial_fit(x, np.zeros(1, np.int64), classes=np.arange(CLASSES))

    def learn_one(self, x: Sample, y: int) -> None:
        self._model.partial_fit(np.array([[*x.values()]]), np.array([y]))

    def predict_one(self, x: Sample) -> int:
        return int(self._model.predict(np.array([[*x.values()]]))[0])

    def learn_rows(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        self._model.partial_fit(x, y)


class Torch:
    """A plain loop with Adam."""

    def __init__(self, features: int) -> None:
        torch.manual_seed(0)
        self._net = networks.mlp([features, *HIDDEN, CLASSES])
        self._optimizer = torch.optim.Adam(self._net.parameters())

    def _learn(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self._optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self._net(x), y).backward()
        self._optimizer.step()

    def learn_one(self, x: Sample, y: int) -> None:
        self._learn(torch.tensor([[*x.values()]]), torch.tensor([y]))

    def predict_one(self, x: Sample) -> int:
        with torch.no_grad():
            return int(self._net(torch.tensor([[*x.values()]])).argmax())

    def learn_rows(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        inputs, targets = torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y)
        for n in range(len(y)):
            self._learn(inputs[n : n + 1], targets[n : n + 1])


def linear(features: int) -> Model:
    return River(preprocessing.StandardScaler() | linear_model.SoftmaxRegression())


MODELS: dict[str, Callable[[int], Model]] = {
    "upgd.stream.Classifier": Ours,
    "upgd.stream.Classifier, rows predicted too": OursOfRows,
    "scikit-learn MLPClassifier.partial_fit": ScikitLearn,
    "PyTorch, a plain loop with Adam": Torch,
    "river StandardScaler and SoftmaxRegression": linear,
    "river HoeffdingTreeClassifier": lambda features: River(tree.HoeffdingTreeClassifier()),
}


class Times:
    """What was measured of one learner: a list a round."""

    def __init__(self) -> None:
        self.learn: list[list[float]] = []
        self.predict: list[list[float]] = []
        self.rows: list[float] = []

    def microseconds(self, what: str, percent: float) -> float:
        rounds: list[list[float]] = getattr(self, what)
        return 1e6 * float(np.percentile([t for times in rounds for t in times], percent))

    def ratio(self, what: str, other: Times) -> float:
        """How many times as long as `other` this takes."""
        mine, others = getattr(self, what), getattr(other, what)
        middle = statistics.median
        if what != "rows":
            return middle(middle(a) / middle(b) for a, b in zip(mine, others, strict=True))
        return middle(a / b for a, b in zip(mine, others, strict=True))


def timed(call: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def measured(features: int, rounds: int, each: int, rows: int, warm: int) -> dict[str, Times]:
    """Times of all learners that are there; `each` samples and `rows` rows a round."""
    draw = np.random.default_rng(0)
    rule = draw.normal(size=(features, CLASSES))
    models: dict[str, Model] = {}
    for name, make in MODELS.items():
        try:
            models[name] = make(features)
        except ModuleNotFoundError as error:
            print(f"skipped {name}: {error}")
    found = {name: Times() for name in models}

    def samples(count: int) -> tuple[NDArray[Any], NDArray[Any], list[Sample]]:
        x = draw.normal(size=(count, features))
        named = [{f"x{i}": value for i, value in enumerate(row)} for row in x.tolist()]
        return x, (x @ rule).argmax(1), named

    names = list(models)
    x, y, named = samples(warm)
    for model in models.values():
        model.learn_rows(x, y)
        for sample, target in zip(named, y.tolist(), strict=True):
            model.learn_one(sample, target)
    for n in range(rounds + 1):  # the first is not counted
        x, y, named = samples(each)
        many, targets, _ = samples(rows)
        for name in names[n % len(names) :] + names[: n % len(names)]:
            model = models[name]
            learn = [timed(model.learn_one, s, int(t)) for s, t in zip(named, y, strict=True)]
            predict = [timed(model.predict_one, s) for s in named]
            taken = timed(model.learn_rows, many, targets) / rows
            if n:
                found[name].learn.append(learn)
                found[name].predict.append(predict)
                found[name].rows.append(taken)
    return found


def section(features: int, found: dict[str, Times]) -> list[str]:
    first = next(iter(found.values()))
    lines = [f"## {features} inputs", ""]
    lines += ["| learner | learn one, µs: p50 | p99 | ratio | predict one, µs: p50 | p99 | ratio |"]
    lines[-1] += " rows a second | ratio of times |"
    lines += ["|---|" + "---:|" * 8]
    for name, times in found.items():
        cells = [name]
        for what in ("learn", "predict"):
            cells += [f"{times.microseconds(what, percent):.0f}" for percent in (50, 99)]
            cells += [f"{times.ratio(what, first):.2f}"]
        cells += [f"{1 / statistics.median(times.rows):.0f}", f"{times.ratio('rows', first):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--each", type=int, default=100, help="samples of a round, one by one")
    parser.add_argument("--rows", type=int, default=100, help="rows of a round")
    parser.add_argument("--warm", type=int, default=250, help="rows seen before, and dicts")
    parser.add_argument("--features", nargs="+", type=int, default=[10, 784])
    parser.add_argument("--output", type=Path, help="a Markdown page; printed if not given")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    lines = ["# Learners for a stream: time for one sample", ""]
    lines += ["`python benchmarks/stream_speed.py`", ""]
    lines += ["\n".join(__doc__.strip().splitlines()[4:]), ""]
    lines += [f"{platform.machine()}, one thread, {packages}; {args.rounds} rounds of {args.each}"]
    lines[-1] += f" samples and {args.rows} rows after {args.warm} of each; peers' networks have"
    lines[-1] += f" {'-'.join(map(str, HIDDEN))} hidden units;"
    lines[-1] += f" load {os.getloadavg()[0]:.1f} of {os.cpu_count()}."
    lines += [""]
    for features in args.features:
        found = measured(features, args.rounds, args.each, args.rows, args.warm)
        lines += section(features, found)
    text = "\n".join(lines).rstrip() + "\n"
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
