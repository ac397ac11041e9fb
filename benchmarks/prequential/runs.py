"""Which runs there are to do, their scores, and the file that keeps them."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gzip
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prequential.learners import LEARNERS, Task
from prequential.streams import STREAMS, Block

KEEP = 10_000_000  # numbers
PACKAGES = ("river", "scikit-learn", "torch", "numpy", "numba")


@dataclass(frozen=True, order=True)
class Run:
    """What one run is; `hidden` is empty for learners without a network of the compared sizes."""

    stream: str
    learner: str
    samples: int
    seed: int
    hidden: tuple[int, ...] = ()


@dataclass(frozen=True)
class Result:
    """What became of a run.

    Args:
        windows: per window, hits of a classifier; a pair of sums, of squared and absolute errors,
            of a regressor.
        reference: the same of the running mean, for regression.
        scores: by name. None where a prediction was not finite.
        seconds: of processor time, all of it.
        versions: of the packages used.
    """

    windows: list[Any]
    reference: list[Any]
    scores: dict[str, float] | None
    seconds: float
    versions: dict[str, str]


def planned(
    streams: list[str],
    learners: list[str],
    seeds: list[int],
    hidden: tuple[int, ...],
    samples: int | None = None,
    unlimited: bool = False,
) -> list[Run]:
    """Runs in the order of streams, then seeds; one where seeds make no difference."""
    found: dict[Run, None] = {}
    for stream in streams:
        kind = STREAMS[stream]
        for seed in seeds:
            for learner in learners:
                entry = LEARNERS[learner]
                length = min(samples or kind.length, kind.length) if kind.fixed else samples
                limit = kind.length if unlimited else entry.limit(kind.features)
                count = int(min(length or kind.length, limit))
                known = entry.classifier if kind.classes else entry.regressor
                if known is None or count == 0:
                    continue
                chosen = 0 if kind.fixed and not entry.random else seed
                sizes = hidden if entry.hidden else ()
                found[Run(stream, learner, count, chosen, sizes)] = None
    return list(found)


def _blocks(stream: str, seed: int, samples: int, data_dir: str | None) -> Iterable[Block]:
    """The samples of a stream; those of the last one are kept if they are few."""
    kind = STREAMS[stream]
    if samples * kind.features > KEEP:
        return kind.blocks(seed, samples, data_dir)
    return _kept(stream, seed, samples, data_dir)


@functools.lru_cache(maxsize=1)
def _kept(stream: str, seed: int, samples: int, data_dir: str | None) -> list[Block]:
    return list(STREAMS[stream].blocks(seed, samples, data_dir))


def execute(run: Run, data_dir: str | None) -> Result:
    """Predict and learn every sample of a stream; what is predicted is scored."""
    kind = STREAMS[run.stream]
    learner = LEARNERS[run.learner].make(Task(kind.features, kind.classes, run.hidden, run.seed))
    assert learner is not None
    start = time.process_time()  # others may use the machine
    targets, predictions = [], []
    for x, y in _blocks(run.stream, run.seed, run.samples, data_dir):
        predictions.append(learner.predict_then_learn(x, y))
        targets.append(y)
    y, p = np.concatenate(targets), np.concatenate(predictions)
    taken = time.process_time() - start
    score = classification if kind.classes else regression
    windows, reference, scores = score(y, p, kind.window, kind.classes)
    versions = {name: metadata.version(name) for name in PACKAGES}
    if run.learner == "upgd":
        import upgd

        versions["upgd"] = upgd.__version__
    return Result(windows, reference, scores, round(taken, 2), versions)


# ----------------------------------------------------------------------------- scores
def _sums(values: NDArray[Any], window: int) -> list[float]:
    return [values[n : n + window].sum().item() for n in range(0, len(values), window)]


def classification(
    y: NDArray[Any], p: NDArray[Any], window: int, classes: int
) -> tuple[list[Any], list[Any], dict[str, float]]:
    """Accuracy, that of the last tenth, Cohen's kappa, and the mean recall of the classes."""
    hits = y == p
    counts = np.zeros((classes, classes + 1))  # the last column: no prediction, or another
    np.add.at(counts, (y, np.where((p >= 0) & (p < classes), p, classes)), 1)
    right, rows = np.diag(counts), counts.sum(1)
    chance = float((rows * counts[:, :classes].sum(0)).sum()) / len(y) ** 2
    accuracy = float(hits.mean())
    scores = {
        "accuracy": accuracy,
        "last": float(hits[-max(1, len(y) // 10) :].mean()),
        "kappa": (accuracy - chance) / (1 - chance) if chance < 1 else 0.0,
        "balanced": float((right[rows > 0] / rows[rows > 0]).mean()),
    }
    return _sums(hits, window), [], scores


def regression(
    y: NDArray[Any], p: NDArray[Any], window: int, classes: int = 0
) -> tuple[list[Any], list[Any], dict[str, float] | None]:
    """R² and the mean absolute error relative to the running mean's; without the first sample."""
    mean = np.cumsum(y)[:-1] / np.arange(1, len(y))
    y, p = y[1:], p[1:]
    with np.errstate(all="ignore"):
        errors, others = p - y, mean - y
        pair = [
            [list(s) for s in zip(_sums(e**2, window), _sums(np.abs(e), window), strict=True)]
            for e in (errors, others)
        ]
        if not np.isfinite(pair[0]).all():
            return [], pair[1], None
        tail = slice(-max(1, len(y) // 10), None)
        scores = {
            "r2": 1 - float((errors**2).sum() / (others**2).sum()),
            "last": 1 - float((errors[tail] ** 2).sum() / (others[tail] ** 2).sum()),
            "mae": float(np.abs(errors).mean()),
            "relative": float(np.abs(errors).sum() / np.abs(others).sum()),
        }
    rounded = [[[float(f"{s:.6g}") for s in sums] for sums in rows] for rows in pair]
    return rounded[0], rounded[1], scores


# ------------------------------------------------------------------------------- file
def read(path: Path) -> dict[Run, Result]:
    """The results in a file; none if there is no file."""
    if not path.exists():
        return {}
    found = {}
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        row = json.loads(line)
        run = Run(**{**row["run"], "hidden": tuple(row["run"]["hidden"])})
        found[run] = Result(**row["result"])
    return found


def write(path: Path, results: dict[Run, Result]) -> None:
    """All results, sorted, a line each; whole or not at all."""
    lines = [
        json.dumps({"run": asdict(run), "result": asdict(result)})
        for run, result in sorted(results.items(), key=lambda item: item[0])
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))
    part.replace(path)


def add(path: Path, run: Run, result: Result) -> None:
    """Add a result to a file that other processes may be adding to."""
    with _locked(path):
        write(path, {**read(path), run: result})


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
