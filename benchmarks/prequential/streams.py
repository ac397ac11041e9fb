"""Streams of named numbers with a class or a number to predict.

A stream of a fixed order has the same samples whatever the seed; there a seed is that of the
learner alone. All others are a function of the seed, and a shorter stream is the beginning of a
longer one.
"""

from __future__ import annotations

import csv
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from river import datasets
from river.datasets import synth

from upgd.streams import DataNotFoundError
from upgd.streams.datasets import load, search_path

Block = tuple[NDArray[np.float64], NDArray[Any]]
Pairs = Iterable[tuple[dict[Any, float], Any]]
ROWS = 1000  # of a block
LABEL_TASK, INPUT_TASK = 2500, 5000


@dataclass(frozen=True)
class Kind:
    """What a stream is.

    Args:
        about: one line for the page.
        length: samples if no other number is asked for; all there are if the order is fixed.
        window: samples that are scored together.
        make: the samples of a seed in blocks, without end unless the order is fixed. Takes the
            seed and the folder of data.
        classes: how many; 0 for regression.
        features: how many.
        changes: what changes, and when; empty if nothing is known to.
        fixed: the order is that of a file.
        task: samples from one change to the next of many, which a curve averages over.
    """

    about: str
    length: int
    window: int
    make: Callable[[int, str | None], Iterator[Block]]
    classes: int
    features: int
    changes: str = ""
    fixed: bool = False
    task: int = 0

    def blocks(self, seed: int, samples: int, data_dir: str | None) -> Iterator[Block]:
        """The first `samples`, in blocks of at most `ROWS`."""
        left = samples
        for x, y in self.make(seed, data_dir):
            yield x[:left], y[:left]
            left -= len(y)
            if left <= 0:
                return


def _blocks(pairs: Pairs, target: Callable[[Any], float]) -> Iterator[Block]:
    pairs = iter(pairs)
    while rows := list(itertools.islice(pairs, ROWS)):
        x = np.array([[float(value) for value in x.values()] for x, _ in rows])
        yield x, np.array([target(y) for _, y in rows])


def _slices(x: NDArray[Any], y: NDArray[Any]) -> Iterator[Block]:
    for start in range(0, len(y), ROWS):
        yield x[start : start + ROWS], y[start : start + ROWS]


# ------------------------------------------------------------------------------ files
@functools.cache
def _read(name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """One of river's datasets; classes are numbered in alphabetical order."""
    pairs = list(getattr(datasets, name)())
    x = np.array([[float(value) for value in x.values()] for x, _ in pairs])
    targets = [y for _, y in pairs]
    if isinstance(targets[0], float) or len(set(targets)) > 100:
        return x, np.array(targets, dtype=float)
    classes = sorted(set(targets))
    return x, np.array([classes.index(target) for target in targets])


def _bundled(name: str) -> Callable[[int, str | None], Iterator[Block]]:
    return lambda seed, data_dir: _slices(*_read(name))


@functools.cache
def _read_csv(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    dropped = [header.index(name) for name in ("date", "day") if name in header]
    kept = [i for i in range(len(header) - 1) if i not in dropped]
    x = np.array([[float(row[i]) for i in kept] for row in rows])
    classes = sorted({row[-1] for row in rows})
    return x, np.array([classes.index(row[-1]) for row in rows])


def _file(*names: str) -> Callable[[int, str | None], Iterator[Block]]:
    """A CSV file of `names` in the folders of data; the class is in the last column."""

    def make(seed: int, data_dir: str | None) -> Iterator[Block]:
        folders = search_path(data_dir)
        for path in (folder / name for folder in folders for name in names):
            if path.is_file():
                return _slices(*_read_csv(path))
        where = ", ".join(map(str, folders))
        raise DataNotFoundError(f"no {' or '.join(names)} in {where}; name its folder with --data")

    return make


# ------------------------------------------------------------------------- generators
def _in_turn(make: Callable[[int, int], Pairs], concepts: list[int], every: int) -> Any:
    """Concepts that alternate abruptly: `make` takes a concept and a seed."""

    def blocks(seed: int, data_dir: str | None) -> Iterator[Block]:
        def pairs() -> Iterator[tuple[dict[Any, float], Any]]:
            for n in itertools.count():
                generator = make(concepts[n % len(concepts)], 1000 * seed + n)
                yield from itertools.islice(iter(generator), every)

        return _blocks(pairs(), float)

    return _with_integers(blocks)


def _endless(make: Callable[[int], Pairs], integers: bool = True) -> Any:
    def blocks(seed: int, data_dir: str | None) -> Iterator[Block]:
        return _blocks(make(seed), float)

    return _with_integers(blocks) if integers else blocks


def _with_integers(blocks: Callable[[int, str | None], Iterator[Block]]) -> Any:
    def make(seed: int, data_dir: str | None) -> Iterator[Block]:
        return ((x, y.astype(np.int64)) for x, y in blocks(seed, data_dir))

    return make


def _sea(concept: int, seed: int) -> Pairs:
    return synth.SEA(variant=concept, noise=0.1, seed=seed)


def _led(concept: int, seed: int) -> Pairs:
    return synth.LEDDrift(
        seed=seed, noise_percentage=0.1, irrelevant_features=True, n_drift_features=concept
    )


def _agrawal(seed: int) -> Pairs:
    """Functions 0, 3, 6 and 8, each gradually replaced by the next after some 5000 samples."""
    functions = [synth.Agrawal(f, seed=1000 * seed + f, perturbation=0.05) for f in (0, 3, 6, 8)]
    joined: Any = functions[-1]
    for n, function in enumerate(reversed(functions[:-1])):
        joined = synth.ConceptDriftStream(
            function, joined, seed=seed + n, position=5000, width=1000
        )
    return joined


def _rbf(seed: int) -> Pairs:
    return synth.RandomRBFDrift(
        *(seed, seed + 1), n_classes=5, n_features=10, n_centroids=50, change_speed=0.001
    )


def _hyperplane(seed: int) -> Pairs:
    return synth.Hyperplane(seed=seed, n_features=10, n_drift_features=10, mag_change=0.001)


def _sine(concept: int, seed: int) -> Pairs:
    return synth.Sine(concept, seed=seed, balance_classes=False)


def _mixed(concept: int, seed: int) -> Pairs:
    return synth.Mixed(concept, seed=seed)


def _waveform(seed: int) -> Pairs:
    return synth.Waveform(seed=seed, has_noise=True)


def _random_tree(seed: int) -> Pairs:
    return synth.RandomTree(seed, seed + 1, n_classes=3, max_tree_depth=7)


def _friedman(kind: str, position: tuple[int, ...]) -> Callable[[int], Pairs]:
    def make(seed: int) -> Pairs:
        return synth.FriedmanDrift(kind, position=position, transition_window=2000, seed=seed)

    return make


# --------------------------------------------------------------------------- permuted
def _permuted(name: str, inputs: bool, every: int) -> Callable[[int, str | None], Iterator[Block]]:
    """Images drawn at random; pixels or labels get a new random permutation every so often."""

    def make(seed: int, data_dir: str | None) -> Iterator[Block]:
        data = load(name, data_dir=data_dir)
        images, labels = data.inputs.reshape(len(data), -1), data.labels

        def blocks() -> Iterator[Block]:
            draw = np.random.default_rng([seed, every, int(inputs)])
            while True:
                order = draw.permutation(images.shape[1] if inputs else data.classes)
                for start in range(0, every, ROWS):
                    chosen = draw.integers(len(data), size=min(ROWS, every - start))
                    x, y = images[chosen] / data.top, labels[chosen]
                    yield (x[:, order], y) if inputs else (x, order[y])

        return blocks()

    return make


def _image_streams(name: str, title: str, length: int, features: int) -> dict[str, Kind]:
    window = 500
    return {
        f"{name}-labels": Kind(
            f"{title}, labels permuted",
            *(length, window, _permuted(name, False, LABEL_TASK), 10, features),
            changes=f"labels, every {LABEL_TASK}",
            task=LABEL_TASK,
        ),
        f"{name}-inputs": Kind(
            f"{title}, pixels permuted",
            *(length, window, _permuted(name, True, INPUT_TASK), 10, features),
            changes=f"inputs, every {INPUT_TASK}",
            task=INPUT_TASK,
        ),
    }


STREAMS: dict[str, Kind] = {
    "phishing": Kind("web pages", 1250, 50, _bundled("Phishing"), 2, 9, fixed=True),
    "image-segments": Kind(
        "regions of photographs", 2310, 50, _bundled("ImageSegments"), 7, 18, fixed=True
    ),
    "bananas": Kind("two bent clusters", 5300, 100, _bundled("Bananas"), 2, 2, fixed=True),
    "shuttle": Kind(
        "sensors of a shuttle, 7% anomalies", 49_097, 500, _bundled("Shuttle"), 2, 9, fixed=True
    ),
    "elec2": Kind(
        "electricity prices go up or down; without date and day",
        *(45_312, 500, _file("electricity.csv", "elec.csv"), 2, 6),
        changes="as the market did",
        fixed=True,
    ),
    "weather": Kind(
        "rain at an air base, 50 years",
        *(18_159, 250, _file("weather.csv"), 2, 8),
        changes="as the climate did",
        fixed=True,
    ),
    "sea": Kind(
        "SEA, 10% noise",
        *(20_000, 250, _in_turn(_sea, [0, 1, 2, 3], 5000), 2, 3),
        changes="threshold, every 5000",
    ),
    "agrawal": Kind(
        "Agrawal's loans, 5% perturbation",
        *(20_000, 250, _endless(_agrawal), 2, 9),
        changes="function, gradually, about every 5000",
    ),
    "led": Kind(
        "seven-segment display, 17 irrelevant inputs, 10% noise",
        *(20_000, 250, _in_turn(_led, [1, 3, 5, 7], 5000), 10, 24),
        changes="1, 3, 5, 7 inputs swapped, every 5000",
    ),
    "rbf": Kind(
        "50 moving centroids, speed 0.001",
        *(20_000, 250, _endless(_rbf), 5, 10),
        changes="inputs, always",
    ),
    "hyperplane": Kind(
        "rotating hyperplane, 5% noise",
        *(20_000, 250, _endless(_hyperplane), 2, 10),
        changes="weights, always",
    ),
    "sine": Kind(
        "points above or below a curve",
        *(20_000, 250, _in_turn(_sine, [0, 1, 2, 3], 5000), 2, 2),
        changes="curve and side, every 5000",
    ),
    "mixed": Kind(
        "two booleans, two numbers",
        *(20_000, 250, _in_turn(_mixed, [0, 1], 2500), 2, 4),
        changes="classes swapped, every 2500",
    ),
    "waveform": Kind("three waves, 19 inputs of noise", 20_000, 250, _endless(_waveform), 3, 40),
    "random-tree": Kind("leaves of a random tree", 20_000, 250, _endless(_random_tree), 3, 10),
    **_image_streams("digits", "scikit-learn's digits", 100_000, 64),
    **_image_streams("mnist", "MNIST", 100_000, 784),
    "chick-weights": Kind("weights of chicks", 578, 50, _bundled("ChickWeights"), 0, 3, fixed=True),
    "trump-approval": Kind(
        "approval from five polls", 1001, 50, _bundled("TrumpApproval"), 0, 6, fixed=True
    ),
    "friedman-abrupt": Kind(
        "Friedman's function, global recurring abrupt drift",
        *(20_000, 250, _endless(_friedman("gra", (7000, 14_000)), False), 0, 10),
        changes="function, at 7000 and back at 14 000",
    ),
    "friedman-gradual": Kind(
        "Friedman's function, global slow gradual drift",
        *(20_000, 250, _endless(_friedman("gsg", (7000, 14_000)), False), 0, 10),
        changes="function, slowly from 7000 and 14 000",
    ),
}
