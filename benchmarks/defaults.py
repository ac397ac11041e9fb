"""The evidence behind the defaults: optimizers on ordinary work, and what follows from it.

    python benchmarks/defaults.py run --seeds 0-4 --workers 15 --data-dir data \
        --output runs.csv.gz [--settings benchmarks/defaults.toml] [--tasks cnn vit]
    python benchmarks/defaults.py table search.csv.gz [streams.csv.gz ...] \
        [--fresh runs.csv.gz ...] --output docs/benchmarks/defaults.md
    python benchmarks/defaults.py streams studies/* --output streams.csv.gz

``run`` trains every setting on every task with every seed, one thread a run. The settings are a
TOML file: a table (or an array of tables) by optimizer, lists of values expanded as a grid.
``sgd``, ``sgd-momentum`` and ``adam`` are PyTorch's; other names are methods of this package, and
what a table leaves out has the class's default. Runs that the output has already are not repeated.

``streams`` writes what studies of ``upgd sweep`` and ``upgd run`` have, as such a file.

``table`` writes a page and its figure. Sets are ranked by the search; the defaults are compared
with PyTorch's optimizers on fresh seeds, if there are any.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import torch
from ordinary.evidence import collect
from ordinary.page import figure, page
from ordinary.runs import Run, run_all, settings
from ordinary.streams import write as write_streams
from ordinary.tasks import TASKS, Source

from upgd.cli.arguments import seed_list
from upgd.streams import DataNotFoundError

SETTINGS = Path(__file__).with_suffix(".toml")


def run(args: argparse.Namespace) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that results are saved
    runs = [
        Run(task, optimizer, hyper, seed)
        for optimizer, hyper in settings(args.settings)
        for task in args.tasks
        for seed in args.seeds
    ]
    try:
        run_all(runs, Source(args.data_dir, args.small), args.workers, args.output)
    except DataNotFoundError as error:
        raise SystemExit(str(error)) from None


def table(args: argparse.Namespace) -> None:
    rows = collect(args.results)
    fresh = collect(args.fresh) if args.fresh else rows
    files = [path.name for path in args.results]
    files += ["--fresh", *(path.name for path in args.fresh)] if args.fresh else []
    command = " ".join(["python benchmarks/defaults.py table", *files])
    args.output.parent.mkdir(parents=True, exist_ok=True)
    picture = args.output.with_suffix(".png")
    figure(rows, picture)
    text = page(rows, fresh, command, picture.name, args.machine)
    args.output.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="train what the output lacks")
    runs.set_defaults(do=run)
    runs.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    runs.add_argument("--settings", type=Path, default=SETTINGS, help="a TOML file of grids")
    runs.add_argument("--seeds", type=seed_list, default=[0, 1, 2, 3, 4], help="as 0-4")
    runs.add_argument("--workers", type=int, default=1, help="processes of one thread each")
    runs.add_argument("--data-dir", help="where MNIST is")
    runs.add_argument("--small", action="store_true", help="a few steps on data without files")
    runs.add_argument("--output", type=Path, required=True, help="runs.csv.gz")
    streams = commands.add_parser("streams", help="means of the runs of studies")
    streams.set_defaults(do=lambda args: write_streams(args.studies, args.output))
    streams.add_argument("studies", nargs="+", type=Path)
    streams.add_argument("--output", type=Path, required=True, help="streams.csv.gz")
    tables = commands.add_parser("table", help="write the page and its figure")
    tables.set_defaults(do=table)
    tables.add_argument("results", nargs="+", type=Path, help="files of `run` and of streams")
    tables.add_argument("--fresh", nargs="+", type=Path, help="results of seeds not searched with")
    tables.add_argument("--output", type=Path, required=True, help="a Markdown page")
    tables.add_argument("--machine", default="", help="where the runs were made, for the page")
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
