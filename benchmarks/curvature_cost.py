"""Time and memory of gradient + curvature, as ratios to forward + backward in the same run.

    python benchmarks/curvature_cost.py [--device cuda] [--output table.md]

Peer: PyTorch's ``loss = f(model(x)); loss.backward()``. Goal: at most 2.2 with HesScale, for the
784-300-150-10 MLP at batch 32 and for ResNet-18 with batch normalisation in eval mode.

The floor. A linear or convolutional layer costs three products for its gradient (forward, input,
weight) and two more for its curvature, with squared operands: 5/3 where products dominate.
Elementwise operations are passed once more, squaring costs one pass over weights and inputs.
Where a step is as long as its launches, the floor is the number of launches: about 20 for the
MLP, against 25 for forward + backward.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

import networks
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from upgd import curvature
from upgd.timing import measure

GOAL = 2.2
METHODS = ["hesscale", "ggn", "hutchinson"]


def cases(device: str) -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    """Name: model, inputs, labels."""
    torch.manual_seed(0)
    found = {}
    large = device == "cuda"
    for batch in (1, 32):
        x, y = torch.randn(batch, 784), torch.randint(10, (batch,))
        found[f"MLP 784-300-150-10, batch {batch}"] = (networks.mlp([784, 300, 150, 10]), x, y)
    for batch in (32, 256) if large else (4, 16):
        model = networks.resnet([64, 128, 256, 512], 2, 10)
        x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
        networks.settle(model, x[:8])
        found[f"ResNet-18 (3×32×32), batch {batch}"] = (model, x, y)
    model = networks.Transformer(1000, 256, 4, 10)
    x, y = torch.randint(1000, (32 if large else 8, 64)), torch.randint(10, (32 if large else 8,))
    found[f"transformer block, width 256, {len(x)} × 64 tokens"] = (model, x, y)
    return {k: (m.to(device), x.to(device), y.to(device)) for k, (m, x, y) in found.items()}


def steps(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Callable[[], None]]:
    params = list(model.parameters())

    def loss_of() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # fused attention does not differentiate twice
            return nn.functional.cross_entropy(model(x), y)

    def gradient() -> None:
        model.zero_grad(set_to_none=True)
        loss_of().backward()

    def with_curvature(method: str) -> Callable[[], None]:
        def step() -> None:
            model.zero_grad(set_to_none=True)
            curvature.backward(loss_of(), params, method=method)

        return step

    return {"gradient": gradient, **{name: with_curvature(name) for name in METHODS}}


def time_table(device: str, rounds: int, target: float) -> list[str]:
    lines = [
        "| network | gradient, ms | " + " | ".join(f"{name} ÷ gradient" for name in METHODS) + " |",
        "|---|---:|" + "---:|" * len(METHODS),
    ]
    verdicts = []
    for name, (model, x, y) in cases(device).items():
        candidates = steps(model, x, y)
        times = measure(candidates, device, rounds, target)
        ratios = {
            key: statistics.median(
                a / b for a, b in zip(times[key], times["gradient"], strict=True)
            )
            for key in METHODS
        }
        cells = [f"{1e3 * statistics.median(times['gradient']):.2f}"]
        cells += [f"{ratios[key]:.2f}" for key in METHODS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
        if name.startswith("ResNet") or name.endswith("batch 32"):
            verdict = "reached" if ratios["hesscale"] <= GOAL else "MISSED"
            verdicts.append(f"- {name}: at most {GOAL}; {ratios['hesscale']:.2f}: {verdict}")
    return [*lines, "", *verdicts]


def memory_table() -> list[str]:
    """Peak memory on the GPU above the model itself, for ever larger networks."""
    lines = [
        "| parameters | activations | gradient, MiB | with HesScale, MiB | above gradient,"
        " floats per parameter and activation |",
        "|---:|---:|---:|---:|---:|",
    ]
    batch = 64
    for width in (512, 1024, 2048, 4096, 5000):
        torch.manual_seed(0)
        model = networks.mlp([width] * 5 + [10]).cuda()
        x = torch.randn(batch, width, device="cuda")
        y = torch.randint(10, (batch,), device="cuda")
        count = sum(p.numel() for p in model.parameters())
        activations = batch * (width * 9 + 10)
        peaks = {}
        for name, step in steps(model, x, y).items():
            if name in ("gradient", "hesscale"):
                step()
                model.zero_grad(set_to_none=True)
                for p in model.parameters():
                    p.__dict__.pop("curvature", None)
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                step()
                peaks[name] = torch.cuda.max_memory_allocated() - before
        extra = (peaks["hesscale"] - peaks["gradient"]) / 4 / (count + activations)
        lines.append(
            f"| {count:,} | {activations:,} | {peaks['gradient'] / 2**20:.0f} | "
            f"{peaks['hesscale'] / 2**20:.0f} | {extra:.2f} |"
        )
        print(lines[-1], flush=True)
        model = None
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--target", type=float, default=0.5, help="seconds per method and round")
    parser.add_argument("--output", type=Path, help="write a Markdown page here")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    where = (
        torch.cuda.get_device_name()
        if args.device == "cuda"
        else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    page = [
        f"# Gradient + curvature on {where}",
        "",
        f"`python benchmarks/curvature_cost.py --device {args.device}`, torch {torch.__version__}, "
        f"median of {args.rounds} rounds; ratios are taken within a round.",
        "",
        *time_table(args.device, args.rounds, args.target),
    ]
    if args.device == "cuda":
        page += ["", "## Memory", "", *memory_table()]
    print("\n".join(page))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text("\n".join(page) + "\n")


if __name__ == "__main__":
    main()
