"""The evidence behind the defaults: optimizers on ordinary work, and what follows from it.

    python benchmarks/defaults.py run --seeds 0-4 --workers 15 --data-dir data \
        --output runs.csv.gz [--settings benchmarks/defaults.toml] [--tasks cnn vit]

``run`` trains every setting on every task with every seed, one thread a run. The settings are a
TOML file: a table (or an array of tables) by optimizer, lists of values expanded as a grid.
``sgd``, ``sgd-momentum`` and ``adam`` are PyTorch's; other names are methods of this package, and
what a table leaves out has the class's default. Runs that the output has already are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import itertools
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ordinary import TASKS, Source, data_of, train
from torch import nn

from upgd.cli.arguments import seed_list
from upgd.optim import registry
from upgd.text import duration

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

SETTINGS = Path(__file__).with_suffix(".toml")
TORCH = {
    "sgd": torch.optim.SGD,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
}
SAVE_EVERY = 5.0  # seconds; a killed run loses at most these
Hyper = tuple[tuple[str, float], ...]


@dataclass(frozen=True, order=True)
class Run:
    """What one run is; `hyper` is sorted by name."""

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
def settings(path: Path) -> list[tuple[str, Hyper]]:
    """Optimizers with their sets of hyperparameters, each once, as a TOML file lists them."""
    found: dict[tuple[str, Hyper], None] = {}
    for optimizer, tables in tomllib.loads(path.read_text(encoding="utf-8")).items():
        complete = {} if optimizer in TORCH else registry.scalars(optimizer)
        for table in tables if isinstance(tables, list) else [tables]:
            lists = [value if isinstance(value, list) else [value] for value in table.values()]
            for values in itertools.product(*lists):
                given = dict(zip(table, map(float, values), strict=True))
                found[optimizer, tuple(sorted({**complete, **given}.items()))] = None
    return list(found)


def make(optimizer: str, hyper: Hyper, seed: int, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer for all parameters of `model`."""
    given: dict[str, Any] = dict(hyper)
    if optimizer in TORCH:
        return TORCH[optimizer](model.parameters(), **given)
    if "beta1" in given:
        given["betas"] = (given.pop("beta1"), given.pop("beta2"))
    return registry.get(optimizer)[0].make(model, seed=seed, **given)


FIRST, LAST = ("task", "optimizer"), ("seed", "value", "state", "seconds")


def read(path: Path) -> dict[Run, Result]:
    """The results in a file that :func:`write` made; none if there is no file."""
    if not path.exists():
        return {}
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return dict(map(parsed, csv.DictReader(file)))


def parsed(row: dict[str, str]) -> tuple[Run, Result]:
    numbers = {k: float(v) for k, v in row.items() if k not in (*FIRST, *LAST) and v}
    run = Run(row["task"], row["optimizer"], tuple(sorted(numbers.items())), int(row["seed"]))
    value = float(row["value"]) if row["state"] == "done" else math.nan
    return run, Result(value, float(row["seconds"]))


def write(path: Path, results: dict[Run, Result]) -> None:
    """All results, sorted, in a column per hyperparameter; whole or not at all."""
    names = dict.fromkeys(name for run in sorted(results) for name, _ in run.hyper)
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
    """Results as they come, of as many processes as there are workers."""
    if workers == 1:
        yield from ((run, execute(run, source)) for run in runs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, torch.set_num_threads, (1,)) as pool:
        futures = {pool.submit(execute, run, source): run for run in runs}
        try:
            yield from ((futures[future], future.result()) for future in as_completed(futures))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


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
                print(f"{count} of {len(todo)} runs, {left} left", file=sys.stderr)
    finally:
        if todo:
            write(output, results)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train what the output lacks")
    run.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    run.add_argument("--settings", type=Path, default=SETTINGS, help="a TOML file of grids")
    run.add_argument("--seeds", type=seed_list, default=[0, 1, 2, 3, 4], help="as 0-4")
    run.add_argument("--workers", type=int, default=1, help="processes of one thread each")
    run.add_argument("--data-dir", help="where MNIST is")
    run.add_argument("--small", action="store_true", help="a few steps on data without files")
    run.add_argument("--output", type=Path, required=True, help="runs.csv.gz")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers
    torch.set_num_threads(1)
    runs = [
        Run(task, optimizer, hyper, seed)
        for optimizer, hyper in settings(args.settings)
        for task in args.tasks
        for seed in args.seeds
    ]
    run_all(runs, Source(args.data_dir, args.small), args.workers, args.output)


if __name__ == "__main__":
    main()
