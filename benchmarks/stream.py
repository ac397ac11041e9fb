"""Learners for a stream compared, every sample predicted before it is learned (prequential).

    python benchmarks/stream.py run [--streams sea rbf] [--learners upgd forest] [--seeds 0-4] \
        [--samples 1000000] [--data FOLDER] --output docs/benchmarks/stream_runs.jsonl.gz
    python benchmarks/stream.py table docs/benchmarks/stream_runs.jsonl.gz \
        --output docs/benchmarks/stream.md
    python benchmarks/stream.py figure docs/benchmarks/stream_runs.jsonl.gz \
        --output docs/benchmarks/stream.png
    python benchmarks/stream.py check

``run`` appends every result as soon as it is there; what the output has already is not repeated.
``elec2`` and ``weather`` are read from ``elec.csv`` (or river's ``electricity.csv``) and
``weather.csv`` in a folder of data, MNIST as everywhere in this package; what is not found is
skipped. ``check`` compares the compiled loops with PyTorch's and scikit-learn's own steps.
Needs river.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy reads it

import sys
import time
from pathlib import Path

import torch
from prequential import mlp
from prequential.learners import LEARNERS, check_scikit_learn
from prequential.page import figure, page
from prequential.runs import Result, Run, add, execute, planned, read
from prequential.streams import STREAMS

from upgd.cli.arguments import seed_list
from upgd.streams import DataNotFoundError
from upgd.text import duration

HIDDEN = (128, 64)


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    plan = planned(
        args.streams, args.learners, args.seeds, tuple(args.hidden), args.samples, args.unlimited
    )
    done, skipped = read(args.output), dict[str, str]()
    todo = [run for run in plan if args.again or run not in done]
    print(f"{len(plan)} runs, {len(todo)} to do", flush=True)
    for run in todo:
        if run.stream in skipped:
            continue
        start = time.monotonic()
        try:
            result = execute(run, args.data)
        except DataNotFoundError as error:
            skipped[run.stream] = str(error)
        else:
            add(args.output, run, result)
            print(line(run, result), duration(time.monotonic() - start), flush=True)
    for name, why in skipped.items():
        print(f"skipped {name}: {why}", file=sys.stderr)


def line(run: Run, result: Result) -> str:
    scores = result.scores or {"diverged": float("nan")}
    numbers = " ".join(f"{name} {value:.4f}" for name, value in scores.items())
    return f"{run.stream} {run.learner} seed {run.seed} samples {run.samples}: {numbers}"


def collected(paths: list[Path]) -> dict[Run, Result]:
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise SystemExit(f"no file {', '.join(missing)}; `run` writes it")
    return {run: result for path in paths for run, result in read(path).items()}


def table(args: argparse.Namespace) -> None:
    text = page(collected(args.results), tuple(args.hidden), args.picture)
    if args.output is None:
        print(text)
    else:
        args.output.write_text(text, encoding="utf-8")


def check(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for adam, lr in ((True, 1e-3), (False, 0.01)):
        for classes in (2, 0):
            share, furthest = mlp.check(adam, lr, classes)
            name = f"{'Adam' if adam else 'SGD'}, {classes or 'no'} classes"
            print(f"{name}: predictions {share:.6f} equal, weights within {furthest:.1e}")
            if share < 0.99 or furthest > 1e-4:
                raise SystemExit(f"{name}: the compiled loop is not PyTorch's")
    for classes in (2, 3, 0):
        furthest = check_scikit_learn(classes)
        print(f"scikit-learn, {classes or 'no'} classes: weights within {furthest:.1e}")
        if furthest > 1e-9:
            raise SystemExit("the fast way is not partial_fit's: scikit-learn has changed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="run what the output lacks")
    runs.set_defaults(do=run)
    runs.add_argument("--streams", nargs="+", choices=list(STREAMS), default=list(STREAMS))
    runs.add_argument("--learners", nargs="+", choices=list(LEARNERS), default=list(LEARNERS))
    runs.add_argument("--seeds", type=seed_list, default=[0, 1, 2, 3, 4], help="as 0-4")
    runs.add_argument("--samples", type=int, help="of each stream, if it has as many")
    runs.add_argument("--again", action="store_true", help="repeat and replace what is there")
    runs.add_argument("--unlimited", action="store_true", help="slow learners get all samples too")
    runs.add_argument("--data", help="a folder with elec.csv, weather.csv, mnist")
    runs.add_argument("--output", type=Path, required=True, help="runs.jsonl.gz")
    tables = commands.add_parser("table", help="write the page")
    tables.set_defaults(do=table)
    tables.add_argument("results", nargs="+", type=Path)
    tables.add_argument("--output", type=Path, help="a Markdown page; printed if not given")
    tables.add_argument("--picture", default="stream.png", help="beside the page")
    figures = commands.add_parser("figure", help="draw accuracy over time")
    figures.set_defaults(do=lambda args: figure(collected(args.results), args.hidden, args.output))
    figures.add_argument("results", nargs="+", type=Path)
    figures.add_argument("--output", type=Path, required=True, help="a PNG")
    for command in (runs, tables, figures):
        command.add_argument("--hidden", nargs="+", type=int, default=HIDDEN, help="layer sizes")
    commands.add_parser("check", help="compare compiled loops with plain ones").set_defaults(
        do=check
    )
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
