"""Layered methods on CUDA: learner-steps per second against the floor of memory traffic.

    python benchmarks/layered.py [--runs 264,528,1056] [--methods centred-sgd] [--tune]

The peer, in the same run, is the stack for methods that do not see layers (`CudaStack`) with SGD,
whose floor is that of a method without states. Bandwidth is that of a copy measured here. With
``--tune`` one method runs with several shapes of tiles; the shape of the other rows is given by
``--rows``, ``--columns`` and so on. With ``TRITON_INTERPRET=1`` tiny shapes run on the CPU, to see
that it works.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

import upgd.engine.dense
from upgd.engine.dense import Learner
from upgd.engine.dense_cuda import CudaStack
from upgd.engine.feed import Chunk
from upgd.engine.layered import unsupported
from upgd.engine.layered_cuda import LayeredCudaStack
from upgd.engine.roofline import bandwidth, passes, share
from upgd.kernels.layout import Layout
from upgd.kernels.triton_program import Tiles
from upgd.optim.registry import METHODS

QUICK = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if QUICK else "cuda"
SIZES = (20, 8, 6, 10) if QUICK else (784, 300, 150, 10)
SAMPLES = 50 if QUICK else 2_000
RNG = np.random.default_rng(0)
TABLE = RNG.uniform(-1, 1, (SAMPLES, SIZES[0])).astype(np.float32)
TRIED: tuple[dict[str, int], ...] = (
    {},
    {"registers": 168},
    {"registers": 255},
    {"stages": 1},
    {"stages": 2},
    {"stages": 4},
    {"rows": 32},
    {"columns": 256},
    {"rows": 8, "columns": 256},
    {"warps": 8},
    {"rows": 32, "warps": 8},
    {"rows": 32, "warps": 8, "registers": 64},
    {"rows": 16, "columns": 256, "warps": 8, "back_columns": 512},
    {"back_rows": 16, "back_columns": 128},
)
"""Tiles that differ from those given by so much."""


def one_weight_initialisation() -> None:
    """Give all learners the same first weights: making others takes longer than measuring."""
    module: Any = upgd.engine.dense
    numbers = module.initial(Layout(SIZES), 0)
    module.initial = lambda layout, seed, task=0: numbers


def chunk(runs: int, steps: int) -> Chunk:
    """Random samples, their inputs permuted: speed does not depend on what they are."""
    one = np.stack([RNG.permutation(SIZES[0]) for _ in range(runs)])
    return Chunk(
        steps,
        table=TABLE,
        index=RNG.integers(0, SAMPLES, (runs, steps + 1)).astype(np.int32),
        labels=RNG.integers(0, SIZES[-1], (runs, steps + 1)).astype(np.int32),
        permutations=np.stack([one, one]).astype(np.int32),
        slots=np.zeros(steps + 1, np.int32),
    )


def rate(kind: Any, method: str, runs: int, steps: int, rounds: int, **options: Any) -> float:
    """Learner-steps per second of whole steps, metrics included; the best of several rounds."""
    stack = kind(
        Layout(SIZES),
        [Learner(method, {}, seed) for seed in range(runs)],
        **{"activation": "relu", "loss": "cross_entropy", "window": 5_000, "device": DEVICE},
        steps=steps * (rounds + 1),
        **options,
    )
    samples, found = chunk(runs, steps), []
    for _ in range(rounds + 1):  # the first one compiles
        start = time.perf_counter()
        stack.advance(samples)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return runs * steps / min(found[1:])


def layered_methods() -> list[str]:
    """The registry's methods that see layers and run here."""
    names = [name for name, row in METHODS.items() if row.method.layered]
    return [name for name in names if not unsupported(Learner(name, {}, 0))]


def shapes(tiles: Tiles) -> Iterator[tuple[str, Tiles]]:
    """What is tried, with a name."""
    for change in TRIED:
        text = ", ".join(f"{name} {value}" for name, value in change.items())
        yield text or "as given", replace(tiles, **change)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", default="2" if QUICK else "264,528,1056")
    parser.add_argument("--methods", default=",".join([*layered_methods(), "sgdw"]))
    parser.add_argument("--steps", type=int, default=2 if QUICK else 400)
    parser.add_argument("--rounds", type=int, default=1 if QUICK else 3)
    parser.add_argument("--tune", action="store_true", help="try shapes with the first method")
    for field in fields(Tiles):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    given = parser.parse_args()
    tiles = Tiles(**{field.name: getattr(given, field.name) for field in fields(Tiles)})
    counts, methods = [int(runs) for runs in given.runs.split(",")], given.methods.split(",")
    one_weight_initialisation()
    speed = bandwidth(DEVICE) or 1.0
    parameters = Layout(SIZES).parameters
    name = "Triton's interpreter" if QUICK else torch.cuda.get_device_name()
    print(f"{'-'.join(map(str, SIZES))} on {name}, a copy moves {speed / 1e12:.2f} TB/s; {tiles}\n")
    print("| learners | R | learner-steps/s | share of the floor |\n|---|---|---|---|")

    def row(label: str, kind: Any, method: str, runs: int, **options: Any) -> None:
        try:
            found = rate(kind, method, runs, given.steps, given.rounds, **options)
        except Exception as error:  # too large for the GPU: others are still measured
            print(f"| {label} | {runs} | {type(error).__name__}: {error} | |", flush=True)
            return
        reached = share(found, passes(method) * 4 * parameters, speed)
        print(f"| {label} | {runs} | {found:,.0f} | {reached:.1%} |", flush=True)

    for runs in counts:
        row("sgdw, not layered", CudaStack, "sgdw", runs)
        for method in methods:
            row(method, LayeredCudaStack, method, runs, tiles=tiles)
    for label, shape in shapes(tiles) if given.tune else ():
        for runs in counts:
            row(f"{methods[0]}: {label}", LayeredCudaStack, methods[0], runs, tiles=shape)


if __name__ == "__main__":
    main()
