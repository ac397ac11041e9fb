"""What a monitor costs, as a ratio to the same training without one, in the same run.

    python benchmarks/monitor.py [--output docs/benchmarks/monitor.md]

Two copies of a model learn from the same batches, one of them with ``upgd.Monitor`` at the default
stride. Rounds of 100 steps, which hold one measurement, alternate between the two; the ratio is the
median over rounds of ratios within a round. Sinks read every measurement, as a CSV file does.
Goal: at most 2% more. On CPU it is processor time, since others may use the machine; on CUDA it is
time by the clock with the device waited for at the end of a round.
"""

from __future__ import annotations

import argparse
import platform
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


def rows(device: str, rounds: int, chosen: str) -> list[tuple[str, float, float, float]]:
    """Name, milliseconds of a step without a monitor, ratio, standard error of its median."""
    found = []
    for name, make in cases(device).items():
        if chosen not in name:
            continue
        plain, watched = stepper(make, False), stepper(make, True)
        for step in (plain, watched):
            seconds(step, device)
        times = []
        for n in range(rounds):  # who goes first alternates
            pair = (plain, watched) if n % 2 else (watched, plain)
            taken = {step: seconds(step, device) for step in pair}
            times.append((taken[plain], taken[watched]))
        ratios = [b / a for a, b in times]
        error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5
        base = 1e3 * statistics.median(a for a, _ in times) / STRIDE
        found.append((name, base, statistics.median(ratios), error))
        print(f"{device}: {name}: {base:.3f} ms, {found[-1][2]:.4f} ± {error:.4f}", flush=True)
    return found


def section(device: str, found: list[tuple[str, float, float, float]], rounds: int) -> list[str]:
    where = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    lines = [f"## {device.upper()}: {where}", ""]
    lines += [f"torch {torch.__version__}, {rounds} rounds of {STRIDE} steps.", ""]
    lines += ["| training | a step, ms | with a monitor | goal 2% |", "|---|---:|---:|---|"]
    for name, base, ratio, error in found:
        verdict = "reached" if ratio <= GOAL else "MISSED"
        more = f"{100 * (ratio - 1):+.1f} ± {100 * error:.1f}%".replace("-", "−")
        lines.append(f"| {name} | {base:.3f} | {more} | {verdict} |")
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
        args.output.write_text("\n".join(head) + "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
