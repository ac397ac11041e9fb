"""What a monitor costs, as a ratio to the same training without one, in the same run.

    python benchmarks/monitor.py [--output docs/benchmarks/monitor.md]

Two copies of a model learn from the same batches, one of them with ``upgd.Monitor`` at the default
stride. Rounds of 100 steps, which hold one measurement, alternate between the two; a sink reads
every measurement. Two ratios are given: the median over rounds of ratios within a round, and that
of the fastest fifths of the rounds, since what else a machine does only adds time. Standard errors
are over resampled rounds. Goal: at most 2% more, by the median. On CPU it is processor time of one
thread; on CUDA it is time by the clock with the device waited for at the end of a round.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import networks
import torch
from torch import Tensor, nn

import upgd

GOAL = 1.02
STRIDE = 100
Times = list[tuple[float, float]]
Make = Callable[[], tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]]


def convolutional() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 100), nn.ReLU(), nn.Linear(100, 10)),
    )


def cases(device: str) -> dict[str, Make]:
    """Name: makes a model, its optimizer, inputs, labels."""

    def mlp(batch: int, make: Callable[..., torch.optim.Optimizer]) -> Make:
        def build() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
            torch.manual_seed(0)
            model = networks.mlp([784, 300, 150, 10]).to(device)
            x, y = torch.randn(batch, 784, device=device), torch.randint(10, (batch,)).to(device)
            return model, make(model.parameters()), x, y

        return build

    def conv(make: Callable[..., torch.optim.Optimizer]) -> Make:
        def build() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
            torch.manual_seed(0)
            model = convolutional().to(device)
            x, y = torch.randn(64, 1, 28, 28, device=device), torch.randint(10, (64,)).to(device)
            return model, make(model.parameters()), x, y

        return build

    def fused(params: object) -> torch.optim.Optimizer:
        return upgd.UPGD(params, fused=True)  # type: ignore[arg-type]

    return {
        "MLP 784-300-150-10, batch 1, UPGD": mlp(1, upgd.UPGD),
        "MLP 784-300-150-10, batch 1, UPGD(fused=True)": mlp(1, fused),
        "MLP 784-300-150-10, batch 1, SGD": mlp(1, torch.optim.SGD),
        "MLP 784-300-150-10, batch 64, Adam": mlp(64, torch.optim.Adam),
        "MLP 784-300-150-10, batch 64, UPGD": mlp(64, upgd.UPGD),
        "two convolutions, two linear layers, batch 64, Adam": conv(torch.optim.Adam),
        "two convolutions, two linear layers, batch 64, UPGD": conv(upgd.UPGD),
    }


def stepper(make: Make, watched: bool) -> Callable[[], None]:
    model, opt, x, y = make()
    if watched:
        monitor = upgd.Monitor(model, opt, every=STRIDE)
        monitor.on_measure(lambda step, scalars: None)

    def step() -> None:
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()

    return step


def seconds(step: Callable[[], None], device: str) -> float:
    """Of a round."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    start = clock()
    for _ in range(STRIDE):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def fastest(times: list[float]) -> float:
    """The mean of the fastest fifth."""
    return statistics.mean(sorted(times)[: -(-len(times) // 5)])


def median_of_ratios(times: Times) -> float:
    return statistics.median(b / a for a, b in times)


def ratio_of_fastest(times: Times) -> float:
    return fastest([b for _, b in times]) / fastest([a for a, _ in times])


def rows(device: str, rounds: int, chosen: str) -> dict[str, Times]:
    """Seconds of each round without and with a monitor, by name."""
    found = {}
    for name, make in cases(device).items():
        if chosen not in name:
            continue
        plain, watched = stepper(make, False), stepper(make, True)
        for step in (plain, watched):
            seconds(step, device)
        found[name] = []
        for n in range(rounds):  # who goes first alternates
            pair = (plain, watched) if n % 2 else (watched, plain)
            taken = {step: seconds(step, device) for step in pair}
            found[name].append((taken[plain], taken[watched]))
        print(f"{device}: {row(name, found[name])}", flush=True)
    return found


def row(name: str, times: Times) -> str:
    cells = [name, f"{1e3 * fastest([a for a, _ in times]) / STRIDE:.3f}"]
    for estimate in (median_of_ratios, ratio_of_fastest):
        draw = random.Random(0)
        error = statistics.stdev(estimate(draw.choices(times, k=len(times))) for _ in range(500))
        more = f"{100 * (estimate(times) - 1):+.1f} ± {100 * error:.1f}%".replace("-", "−")
        cells.append(more)
    cells.append("reached" if median_of_ratios(times) <= GOAL else "MISSED")
    return f"| {' | '.join(cells)} |"


def section(device: str, found: dict[str, Times], rounds: int) -> list[str]:
    where = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.machine()}, {torch.get_num_threads()} thread"
    )
    load = f", load {os.getloadavg()[1]:.1f} of {os.cpu_count()}" if device == "cpu" else ""
    lines = [f"## {device.upper()}: {where}", ""]
    lines += [f"torch {torch.__version__}, {rounds} rounds of {STRIDE} steps{load}.", ""]
    lines += ["| training | a step, ms | more, median | more, fastest fifth | goal 2% |"]
    lines += ["|---|---:|---:|---:|---|", *(row(name, times) for name, times in found.items())]
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--only", default="", help="part of the names of the cases to measure")
    parser.add_argument("--output", type=Path, help="write a page; another device's rows stay")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    found = section(args.device, rows(args.device, args.rounds, args.only), args.rounds)
    if args.output:
        head = ["# The cost of a monitor", "", "`python benchmarks/monitor.py`", ""]
        head += ["\n".join(__doc__.strip().splitlines()[4:]), ""]
        old = args.output.read_text() if args.output.exists() else ""
        kept = ["## " + part for part in old.split("\n## ")[1:]]
        kept = [part.rstrip() for part in kept if not part.startswith(f"## {args.device.upper()}")]
        parts = sorted([*kept, "\n".join(found).rstrip()])
        args.output.write_text("\n".join(head) + "\n" + "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
