"""A study of 10 000 small runs: the ledger's size, and the time to write, list, filter and plot.

    python benchmarks/ledger.py [--runs 10000] [--output docs/benchmarks/ledger.md]

The study has 10 methods with 20 settings each and 50 seeds; each run has three metrics over 400
windows. Commands are timed inside one process that has upgd imported, and one of them as a
process of its own. The peer is what people do without a ledger: one JSON file per run, in
folders named after the hyperparameters, read and grouped by a script. The floor of the size is
the series themselves as float32.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from upgd.cli import app
from upgd.ledger import Ledger, Result, RunSpec, Series

PROBLEM = "label-permuted-digits"
METHODS = (
    "upgd",
    "upgd-w",
    "n-upgd",
    "sgd",
    "pgd",
    "shrink-and-perturb",
    "adam",
    "adamw",
    "s-ewc",
    "s-mas",
)
SETTINGS, WINDOWS, WINDOW = 20, 400, 100
METRICS = ("accuracy", "loss", "plasticity")
GOAL = 5.0  # seconds for each command
PAGE_HEAD = """# A study of {runs:,} runs in a ledger

`python benchmarks/ledger.py`, {machine}, SQLite {sqlite}, Python {python}. {methods} methods ×
{settings} settings × {seeds} seeds; {metrics} metrics × {windows} windows each. Times are medians
of {rounds} rounds in one process, caches warm.
"""


def specs(runs: int) -> Iterator[RunSpec]:
    seeds = max(1, runs // (len(METHODS) * SETTINGS))
    for method in METHODS:
        for setting in range(SETTINGS):
            hyper = {"lr": 0.1 / 2 ** (setting % 5), "sigma": 0.01 / 2 ** (setting // 5)}
            for seed in range(seeds):
                steps = WINDOWS * WINDOW
                yield RunSpec(PROBLEM, method, hyper, seed, steps, {"window": WINDOW})


def series_of(spec: RunSpec) -> dict[str, np.ndarray[Any, Any]]:
    """Curves of the right shape: they rise to a level of the setting, with noise."""
    rng = np.random.default_rng([spec.seed, *spec.key.encode()])
    level = 0.3 + 0.05 * METHODS.index(spec.name) + 0.2 * spec.hyper["sigma"] / 0.01
    rise = level * (1 - np.exp(-np.arange(1, WINDOWS + 1) / (400 * spec.hyper["lr"] + 10)))
    noise = rng.normal(0, 0.02, (3, WINDOWS))
    accuracy, loss, plasticity = rise + noise[0], 2.3 - 2 * rise + noise[1], 0.5 + noise[2]
    values = zip(METRICS, (accuracy, loss, plasticity), strict=True)
    return {name: value.astype(np.float32) for name, value in values}


def fill_ledger(folder: Path, todo: list[RunSpec]) -> tuple[float, float]:
    """Seconds to add the runs, and to claim and finish them one by one."""
    made = {spec.key: series_of(spec) for spec in todo}
    with Ledger.open(folder) as ledger:
        start = time.perf_counter()
        ledger.add(todo)
        added = time.perf_counter()
        while claims := ledger.claim("benchmark", 600):
            [claim] = claims
            values = made[claim.spec.key]
            ledger.finish(
                claim,
                Result(
                    "eager",
                    versions={"upgd": "0", "torch": "2.6.0", "numpy": np.__version__},
                    host={"machine": platform.machine(), "system": platform.system()},
                    summary={name: float(array.mean()) for name, array in values.items()},
                    series={name: Series(array, WINDOW) for name, array in values.items()},
                ),
            )
        return added - start, time.perf_counter() - added


def fill_folders(folder: Path, todo: list[RunSpec]) -> float:
    """The same as JSON files; not synced to the disk one by one, as the ledger is."""
    made = {spec.key: series_of(spec) for spec in todo}
    start = time.perf_counter()
    for spec in todo:
        hyper = "_".join(f"{name}_{value}" for name, value in spec.hyper.items())
        place = folder / spec.problem / spec.name / hyper
        place.mkdir(parents=True, exist_ok=True)
        content: dict[str, Any] = {name: v.tolist() for name, v in made[spec.key].items()}
        content |= {"seed": spec.seed, "n_samples": spec.steps, **spec.hyper}
        (place / f"{spec.seed}.json").write_text(json.dumps(content))
    return time.perf_counter() - start


def read_folders(folder: Path, method: str = "*") -> dict[str, Any]:
    """Mean and standard error of every setting's curve, and its mean accuracy."""
    groups: dict[str, list[Any]] = defaultdict(list)
    for file in sorted(folder.glob(f"*/{method}/*/*.json")):
        groups[str(file.parent)].append(json.loads(file.read_text())["accuracy"])
    found = {}
    for name, rows in groups.items():
        table = np.array(rows)
        error = table.std(0, ddof=1) / np.sqrt(len(table)) if len(table) > 1 else None
        found[name] = (table.mean(), table.mean(0), error)
    return found


def size_of(folder: Path) -> tuple[int, int]:
    """Bytes of content, and bytes of the disk."""
    files = [file.stat() for file in folder.rglob("*") if file.is_file()]
    return sum(f.st_size for f in files), sum(512 * f.st_blocks for f in files)


def command(*arguments: str) -> Callable[[], Any]:
    def call() -> None:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 0, result.output

    return call


def seconds(call: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def alone(*arguments: str) -> float:
    """Seconds of a command as a process of its own, with all it imports."""
    start = time.perf_counter()
    quiet = {"stdout": subprocess.DEVNULL, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    subprocess.run([sys.executable, "-m", "upgd.cli", *arguments], check=True, **quiet)
    return time.perf_counter() - start


def report(folder: Path, runs: int, rounds: int) -> str:
    todo = list(specs(runs))
    study, files = folder / "study", folder / "files"
    files.mkdir()
    adding, finishing = fill_ledger(study, todo)
    writing = fill_folders(files, todo)
    floor = len(todo) * len(METRICS) * WINDOWS * 4
    (ledger_size, _), (json_size, json_disk) = size_of(study), size_of(files)
    name = str(study)
    calls = {
        "list: `upgd show`": (("show", name), lambda: read_folders(files)),
        "filter: `upgd show --method`": (
            ("show", name, "--method", "upgd"),
            lambda: read_folders(files, "upgd"),
        ),
        "plot: `upgd plot`, each method's best setting": (("plot", name), None),
        "plot: `upgd plot --all`, 200 lines": (("plot", name, "--all"), None),
        "export: `upgd export`, a row per run": (("export", name), None),
        "export: `upgd export --metric`, a row per window": (
            ("export", name, "--metric", "accuracy"),
            None,
        ),
    }
    head = PAGE_HEAD.format(
        runs=len(todo),
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        sqlite=sqlite3.sqlite_version,
        python=platform.python_version(),
        methods=len(METHODS),
        settings=SETTINGS,
        seeds=len(todo) // len(METHODS) // SETTINGS,
        metrics=len(METRICS),
        windows=WINDOWS,
        rounds=rounds,
    )
    per_run = [f"{size / len(todo):,.0f}" for size in (ledger_size, json_size, json_disk)]
    lines = [
        head,
        "| | ledger | JSON files | ratio |",
        "|---|---:|---:|---:|",
        f"| size | {ledger_size / 1e6:.1f} MB | {json_size / 1e6:.1f} MB | "
        f"{json_size / ledger_size:.1f} |",
        f"| bytes a run (floor {floor // len(todo):,}) | {per_run[0]} | {per_run[1]} "
        f"({per_run[2]} of the disk) | |",
        f"| add {len(todo):,} runs | {adding:.2f} s | | |",
        f"| finish a run (ledger: claimed, synced; files: not synced) | "
        f"{1e3 * finishing / len(todo):.2f} ms | {1e3 * writing / len(todo):.2f} ms | "
        f"{writing / finishing:.1f} |",
    ]
    slowest = 0.0
    for what, (arguments, peer) in calls.items():
        mine = seconds(command(*arguments), rounds)
        theirs = seconds(peer, rounds) if peer else None
        slowest = max(slowest, mine if "window" not in what and "200" not in what else 0.0)
        ratio = f"{theirs:.2f} s | {theirs / mine:.1f}" if theirs is not None else "| "
        lines.append(f"| {what} | {mine:.2f} s | {ratio} |")
        print(lines[-1], flush=True)
    whole = {what: alone(what, name) for what in ("show", "plot")}
    verdict = "reached" if slowest <= GOAL else "MISSED"
    lines += [
        "",
        f"- Goal: list, filter, plot and export a row per run in at most {GOAL:.0f} s each; "
        f"slowest {slowest:.2f} s: {verdict}.",
        f"- As processes of their own, with imports: `upgd show` {whole['show']:.1f} s, "
        f"`upgd plot` {whole['plot']:.1f} s.",
        f"- The ledger is {ledger_size / floor:.2f} times its floor: specifications, results and "
        "indexes, and pages of 4 KiB that hold two series each.",
        "- The peer reads one metric's curves and groups them; it draws nothing, has no intervals "
        "and knows no run that is missing.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write a Markdown page here")
    parser.add_argument("--keep", type=Path, help="keep the study in this folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = report(Path(folder), args.runs, args.rounds)
        if args.keep:
            shutil.copytree(Path(folder) / "study", args.keep)
    print(page)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(page)


if __name__ == "__main__":
    main()
