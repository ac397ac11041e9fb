"""Which runs there are to do, running them on many cores, and the file that keeps the results."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import math
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ordinary.tasks import TASKS, Source, data_of, train
from upgd.optim import registry
from upgd.text import duration

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

TORCH = {
    "sgd": torch.optim.SGD,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
}
"""PyTorch's own optimizers by name; all other names are the registry's."""
SAVE_EVERY = 5.0  # seconds; a killed run loses at most these
Hyper = tuple[tuple[str, float], ...]


@dataclass(frozen=True, order=True)
class Run:
    """What one run is; `hyper` is sorted by name, and complete (:func:`complete`)."""

    task: str
    optimizer: str
    hyper: Hyper
    seed: int


@dataclass(frozen=True)
class Result:
    """What became of a run: its value is NaN if it diverged."""

    value: float
    seconds: float


# ----------------------------------------------------------------- settings and files
def complete(optimizer: str, given: Mapping[str, float]) -> Hyper:
    """A set of hyperparameters in the one form that is compared.

    The package's methods have all of theirs, what is not given at its default. PyTorch's have
    those that are not zero: all that is varied here is off at zero.
    """
    if optimizer in TORCH:
        return tuple(sorted((name, value) for name, value in given.items() if value != 0))
    return tuple(sorted({**registry.scalars(optimizer), **given}.items()))


def settings(path: Path) -> list[tuple[str, Hyper]]:
    """Optimizers with their sets of hyperparameters, each once, as a TOML file lists them."""
    found: dict[tuple[str, Hyper], None] = {}
    for optimizer, tables in tomllib.loads(path.read_text(encoding="utf-8")).items():
        for table in tables if isinstance(tables, list) else [tables]:
            lists = [value if isinstance(value, list) else [value] for value in table.values()]
            for values in itertools.product(*lists):
                given = dict(zip(table, map(float, values), strict=True))
                found[optimizer, complete(optimizer, given)] = None
    return list(found)


def make(optimizer: str, hyper: Hyper, seed: int, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer for all parameters of `model`."""
    given: dict[str, Any] = dict(hyper)
    if optimizer in TORCH:
        return TORCH[optimizer](model.parameters(), **given)
    if "beta1" in given:
        given["betas"] = (given.pop("beta1"), given.pop("beta2"))
    row = registry.get(optimizer)[0]
    fused = "fused" not in row.unsupported  # a step that draws noise takes a third of the time
    return row.make(model, seed=seed, fused=fused, **given)


FIRST, LAST = ("task", "optimizer"), ("seed", "value", "state", "seconds")


def rows_of(path: Path) -> list[dict[str, str]]:
    """A compressed table by rows, each with the table's column names."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read(path: Path) -> dict[Run, Result]:
    """The results in a file that :func:`write` made; none if there is no file."""
    return dict(map(parsed, rows_of(path))) if path.exists() else {}


def parsed(row: dict[str, str]) -> tuple[Run, Result]:
    numbers = {k: float(v) for k, v in row.items() if k not in (*FIRST, *LAST) and v}
    hyper = complete(row["optimizer"], numbers)
    value = float(row["value"]) if row["state"] == "done" else math.nan
    run = Run(row["task"], row["optimizer"], hyper, int(row["seed"]))
    return run, Result(value, float(row["seconds"]))


def write(path: Path, results: Mapping[Run, Result]) -> None:
    """All results, sorted, in a column per hyperparameter; whole or not at all."""
    names = sorted({name for run in results for name, _ in run.hyper})
    text = io.StringIO()
    rows = csv.DictWriter(text, [*FIRST, *names, *LAST], lineterminator="\n")
    rows.writeheader()
    for run, result in sorted(results.items(), key=lambda item: item[0]):
        diverged = math.isnan(result.value)
        rows.writerow(
            {name: repr(value) for name, value in run.hyper}
            | {"task": run.task, "optimizer": run.optimizer, "seed": run.seed}
            | {"value": "" if diverged else f"{result.value:.6g}"}
            | {"state": "diverged" if diverged else "done", "seconds": f"{result.seconds:.2f}"}
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    part.replace(path)


# --------------------------------------------------------------------------- running
def execute(run: Run, source: Source) -> Result:
    start = time.process_time()  # others may use the machine
    optimizers = partial(make, run.optimizer, run.hyper, run.seed)
    value = train(run.task, optimizers, run.seed, source)
    return Result(value, time.process_time() - start)


def results_of(runs: list[Run], source: Source, workers: int) -> Iterator[tuple[Run, Result]]:
    """Results as they come, from as many processes as there are workers."""
    if workers == 1:
        yield from ((run, execute(run, source)) for run in runs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, torch.set_num_threads, (1,)) as pool:
        futures = {pool.submit(execute, run, source): run for run in runs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:  # an interrupt too: nobody waits for what is under way
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def run_all(runs: Iterable[Run], source: Source, workers: int, output: Path) -> dict[Run, Result]:
    """Run what `output` lacks, longest tasks first, and add it; returns all of its results."""
    results = read(output)
    todo = sorted((r for r in runs if r not in results), key=lambda r: -TASKS[r.task].cost)
    for task in {run.task for run in todo}:
        data_of(task, source)  # a missing file is known here, before any process starts
    cost = sum(TASKS[run.task].cost for run in todo)
    start = saved = time.monotonic()
    spent = 0.0
    try:
        for count, (run, result) in enumerate(results_of(todo, source, workers), 1):
            results[run] = result
            spent += TASKS[run.task].cost
            if time.monotonic() - saved > SAVE_EVERY or count == len(todo):
                write(output, results)
                saved = time.monotonic()
                left = duration((saved - start) * (cost - spent) / spent)
                print(f"{count} of {len(todo)} runs, {left} left", file=sys.stderr, flush=True)
    finally:
        if todo:
            write(output, results)
    return results
