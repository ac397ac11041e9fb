"""Time of one optimizer step, as ratios to PyTorch's own optimizers in the same run.

    python benchmarks/optimizer_step.py [--device cuda] [--network paper] [--output table.md]
    python benchmarks/optimizer_step.py --fused --busy    # fused steps alone, on a shared machine
    python benchmarks/optimizer_step.py --docs      # put committed numbers into docs/optimizers.md

Networks: ``paper`` is the setting of the paper's computational-time figure
(784-1024-512-10, batch of 100 MNIST-shaped samples); ``stack`` is ten layers of 1024²;
``online``, which is not part of all, is 784-300-150-10 with single samples.
Peers: ``torch.optim.AdamW`` (foreach and fused) and ``SGD`` (foreach). Methods take turns
with their peers: each round times every optimizer once, and a ratio is the median over
rounds of ratios within a round, so that a machine that slows down slows down both sides.

The floor. One pass = reading or writing every parameter once. ``AdamW(foreach)`` makes 21
passes (mul 2, lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2, addcdiv 4, and 1 to spare).
UPGD's programs make 2 + 4 (trace) + 1 (maximum) + 2 + 2 (gate) + 3 (perturbed gradient) + 2 + 4
(update) = 20, and the noise 1. Where a flag on the device gates the step, packing weights and
gradients costs 4, the check 1, the two conditional writes 6, unpacking 2: 34 in all. Fused, UPGD
makes 8 (w, g, U to find η; w, g, U and two writes to update) and ``AdamW(fused)`` 7. For small
networks none of this matters: a step is then as long as its launches, about 25 for UPGD on CUDA
and 2 when fused.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import platform
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from upgd.optim.registry import METHODS, rules
from upgd.timing import Call as Step
from upgd.timing import measure

NETWORKS = {"paper": [784, 1024, 512, 10], "stack": [1024] * 11, "online": [784, 300, 150, 10]}
PAGES = ("paper", "stack")  # what all is
BATCHES = {"paper": 100, "stack": 100, "online": 1}
ROUNDS = 7
COMPILERS = {"cpu": "numba", "cuda": "triton"}
TINY_LR = 1e-7  # the weights must stay where they are for as long as the timing lasts


def network(name: str, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = NETWORKS[name]
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(device)


def fill_gradients(model: nn.Sequential, device: str, batch: int) -> Step:
    """Leave real gradients on the parameters; returns the forward-and-backward call."""
    inputs = model[0].in_features
    outputs = model[-1].out_features
    x = torch.randn(batch, inputs, device=device)
    y = torch.randint(outputs, (batch,), device=device)

    def forward_backward() -> None:
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()

    forward_backward()
    return forward_backward


def candidates(
    model: nn.Sequential, device: str, only: list[str], fused_alone: bool, forward_backward: Step
) -> dict[str, Step]:
    """Every optimizer's step by name: first the peers, then the registry."""
    params = list(model.parameters())
    total = sum(p.numel() for p in params)
    adamw = torch.optim.AdamW(params, lr=TINY_LR, foreach=True)
    steps: dict[str, Step] = {
        "AdamW(foreach)": adamw.step,
        "AdamW(fused)": torch.optim.AdamW(params, lr=TINY_LR, fused=True).step,
        "SGD(foreach)": torch.optim.SGD(params, lr=TINY_LR, foreach=True).step,
        "AdamW(foreach) + randn": lambda: (adamw.step(), torch.randn(total, device=device)),
    }

    def made(row: Any, arguments: dict[str, Any]) -> Step:
        return method_step(model, row, arguments, forward_backward)

    for name, row in METHODS.items():
        if only and name not in only:
            continue
        if not fused_alone:
            steps[name] = made(row, {"lr": TINY_LR})
        if "noise" in row.needs and not fused_alone:
            steps[f"{name}, sigma=0"] = made(row, {"lr": TINY_LR, "sigma": 0.0})
        lacks = {"fused", f"fused_{device}"} & row.unsupported.keys()
        if not lacks and importlib.util.find_spec(COMPILERS[device]):
            fused = {"lr": TINY_LR, "fused": True}
            steps[f"{name}, fused"] = made(row, fused)
            if "noise" in row.needs:
                steps[f"{name}, fused, sigma=0"] = made(row, {**fused, "sigma": 0.0})
    return steps


def method_step(
    model: nn.Sequential, row: Any, arguments: dict[str, Any], forward_backward: Step
) -> Step:
    """One step, with gates, curvature and samples provided (that is not timed here)."""
    opt = row.make(model, **arguments)
    if "layers" in row.needs:
        forward_backward()  # hooks see the samples
        opt.layers.remove()  # leave the model's forward pass to the others
    curvature = [torch.rand_like(p) for p in model.parameters()]
    gates = []
    if "gates" in row.needs:
        opt.features.remove()  # leave the model's forward pass to the others
        device = curvature[0].device
        gates = [(layer, torch.randn(layer.size, device=device)) for layer in opt.features.layers]
    pairs = list(zip(model.parameters(), curvature, strict=True))
    second = "curvature" in row.needs and not gates

    def step() -> None:
        for layer, values in gates:
            layer.first = layer.second = values
        if second:
            for p, h in pairs:
                p.curvature = h
        opt.step()

    return step


def ratio(times: dict[str, list[float]], name: str, peer: str) -> float:
    return statistics.median(a / b for a, b in zip(times[name], times[peer], strict=True))


def table(times: dict[str, list[float]]) -> str:
    peers = ["AdamW(foreach)", "AdamW(fused)", "SGD(foreach)", "AdamW(foreach) + randn"]
    lines = [
        "| optimizer | µs a step | " + " | ".join(f"÷ {peer}" for peer in peers) + " |",
        "|---|---:|" + "---:|" * len(peers),
    ]
    for name, values in times.items():
        cells = [f"{ratio(times, name, peer):.2f}" for peer in peers]
        lines.append(
            f"| {name} | {1e6 * statistics.median(values):.0f} | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines)


def goals(times: dict[str, list[float]], device: str) -> list[str]:
    """The project's goals, each with its worst method."""
    lines = []

    def worst(names: list[str], peer: str, limit: float, what: str) -> None:
        value, name = max((ratio(times, n, peer), n) for n in names)
        verdict = "reached" if value <= limit else "MISSED"
        lines.append(f"- {what}: at most {limit}; worst {value:.2f} ({name}): {verdict}")

    known = rules()
    noisy = [n for n in times if n in known and "noise" in known[n].needs]
    quiet = [n for n in times if n.endswith("sigma=0") and "fused" not in n] + [
        n for n in times if n in known and "noise" not in known[n].needs
    ]
    for family, keep in (
        ("UPGD", lambda n: n.split(",")[0] == "upgd"),
        ("all methods", lambda n: True),
    ):
        some, others = [n for n in noisy if keep(n)], [n for n in quiet if keep(n)]
        if not some or not others:
            continue
        if device == "cuda":
            worst(some + others, "AdamW(foreach)", 3.0, f"{family} ÷ AdamW(foreach)")
        else:
            worst(others, "AdamW(foreach)", 4.0, f"{family} without noise ÷ AdamW(foreach)")
            worst(
                some,
                "AdamW(foreach) + randn",
                1.3,
                f"{family} with noise ÷ (AdamW(foreach) + randn)",
            )
    limits = {"cpu": (1.5, 3.5), "cuda": (1.3, 1.3)}[device]
    for name, limit in zip(("upgd, fused, sigma=0", "upgd, fused"), limits, strict=True):
        if name in times:
            worst([name], "AdamW(fused)", limit, f"{name} ÷ AdamW(fused)")
    layered = [f"{name}, fused" for name, row in METHODS.items() if row.method.layered]
    layered = [name for name in layered if name in times]
    if layered and "upgd, fused" in times:
        worst(layered, "upgd, fused", 1.5, "layered methods, fused ÷ upgd, fused")
    return lines


def fill_in() -> None:
    """Copy the ratios to AdamW(foreach) from the committed pages into docs/optimizers.md."""
    root = Path(__file__).parents[1]
    guide = root / "docs" / "optimizers.md"
    lines = ["", "| optimizer | 784-1024-512-10 | 10 × 1024² |", "|---|---:|---:|"]
    for device, names in (
        ("CUDA", ["upgd", "ada-upgd", "s-ewc", "upgd, fused"]),
        ("CPU", ["upgd", "upgd, sigma=0", "upgd, fused", "upgd, fused, sigma=0"]),
    ):
        for name in names:
            kind = f"fused_{device.lower()}" if "fused" in name else device.lower()
            page = (root / f"docs/benchmarks/optimizer_step_{kind}.md").read_text()
            cells = re.findall(rf"^\| {re.escape(name)} \| \d+ \| ([\d.]+) \|", page, re.M)
            lines.append(f"| {device}, `{name}` | " + " | ".join(cells) + " |")
    body = "\n".join([*lines, ""])
    pattern = r"(<!-- speed[^\n]*-->).*?(<!-- /speed -->)"
    guide.write_text(re.sub(pattern, rf"\1\n{body}\n\2", guide.read_text(), flags=re.S))


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--network", choices=[*NETWORKS, "all"], default="all")
    parser.add_argument("--methods", nargs="*", default=[], help="these alone, by name")
    parser.add_argument("--fused", action="store_true", help="time fused steps alone")
    parser.add_argument(
        "--busy", action="store_true", help="one thread, and its own time: others use the CPU"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--target", type=float, default=0.05, help="seconds per optimizer and round"
    )
    parser.add_argument("--output", type=Path, help="write a Markdown page here")
    parser.add_argument("--raw", type=Path, help="write all times here as JSON")
    parser.add_argument("--docs", action="store_true", help="update docs/optimizers.md and stop")
    args = parser.parse_args()
    if args.docs:
        fill_in()
        return
    if args.busy:
        torch.set_num_threads(1)
    clock = time.process_time if args.busy else time.perf_counter

    pages, raw = [], {}
    for name in PAGES if args.network == "all" else [args.network]:
        model = network(name, args.device)
        forward_backward = fill_gradients(model, args.device, BATCHES[name])
        steps = {"forward + backward": forward_backward} if name == "paper" else {}
        times = measure(
            {**steps, **candidates(model, args.device, args.methods, args.fused, forward_backward)},
            args.device,
            args.rounds,
            args.target,
            clock,
        )
        raw[name] = times
        sizes = "-".join(map(str, NETWORKS[name]))
        count = sum(p.numel() for p in model.parameters())
        pages.append(
            f"## {name}: {sizes}, {count:,} parameters\n\n{table(times)}\n\n"
            + "\n".join(goals(times, args.device))
        )
        print(pages[-1] + "\n", flush=True)
    flags = f"--device {args.device}" + " --fused" * args.fused + " --busy" * args.busy
    flags += f" --rounds {args.rounds}" if args.rounds != ROUNDS else ""
    shared = "Others used the machine: processor time of one thread.\n" if args.busy else ""
    head = (
        f"# One optimizer step on {machine(args.device)}\n\n"
        f"`python benchmarks/optimizer_step.py {flags}`, torch {torch.__version__}, "
        f"median of {args.rounds} rounds; ratios are taken within a round.\n{shared}"
        "Curvature (`-2nd`), gates (`feature-`) and samples of layers are given, not computed.\n"
    )
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text("\n\n".join([head, *pages]) + "\n")
    if args.raw:
        args.raw.write_text(json.dumps(raw))


if __name__ == "__main__":
    main()
