"""The batched engine on CUDA: learner-steps per second against the floor of memory traffic.

    python benchmarks/batched.py [--output docs/benchmarks/batched.md]
    python benchmarks/batched.py --arena [--output docs/benchmarks/batched_arena.md]

Everything is a ratio within this run: bandwidth is that of a copy measured here, the peer is the
authors' optimizer re-created plainly (a Python loop over parameters, twice), one learner at a time
on the same device. With ``TRITON_INTERPRET=1`` tiny shapes run on the CPU, to see that it works.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from own_rule import own_upgd
from torch.nn import functional as F

import upgd
from upgd.arena import grids
from upgd.engine.dense import Learner
from upgd.engine.dense_cuda import CudaStack
from upgd.engine.feed import Chunk
from upgd.engine.general import GeneralStack
from upgd.engine.layered import unsupported
from upgd.engine.layered_cuda import LayeredCudaStack
from upgd.engine.roofline import bandwidth, passes, share
from upgd.kernels.layout import Layout
from upgd.networks import build, mlp
from upgd.optim.registry import rules
from upgd.paper.sets import METHODS as PAPER
from upgd.report.plotting import canvas, label_ends, look, save, styled

QUICK = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if QUICK else "cuda"
SIZES = (20, 8, 6, 10) if QUICK else (784, 300, 150, 10)
SAMPLES = 50 if QUICK else 2_000
STEPS = 2 if QUICK else 50
REPEATS = 1 if QUICK else 8
ROUNDS = 3 if QUICK else 5
RNG = np.random.default_rng(0)
TABLES: dict[int, Any] = {}


# ------------------------------------------------------------------------------- the peer
class PlainUPGD(torch.optim.Optimizer):
    """The authors' optimizer as they wrote it: two loops over parameters, tensor by tensor."""

    def __init__(self, params: Any, lr: float, weight_decay: float, beta: float, sigma: float):
        defaults = {"lr": lr, "weight_decay": weight_decay, "beta": beta, "sigma": sigma}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        largest = torch.tensor(-torch.inf, device=DEVICE)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["utility"] = 0, torch.zeros_like(p)
                state["step"] += 1
                utility = state["utility"]
                utility.mul_(group["beta"]).add_(-p.grad * p, alpha=1 - group["beta"])
                top = utility.max()
                if top > largest:
                    largest = top
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                correction = 1 - group["beta"] ** state["step"]
                noise = torch.randn_like(p) * group["sigma"]
                scaled = torch.sigmoid(state["utility"] / correction / largest)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((p.grad + noise) * (1 - scaled), alpha=-2 * group["lr"])


def plain_steps_per_second() -> float:
    """One learner, one sample at a time, with the loss read after every step, as in the paper."""
    model = mlp(SIZES).to(DEVICE)
    optimizer = PlainUPGD(model.parameters(), 0.01, 0.001, 0.999, 0.01)
    x = torch.randn(SAMPLES, SIZES[0], device=DEVICE)
    y = torch.randint(0, SIZES[-1], (SAMPLES,), device=DEVICE)
    best = 0.0
    for _ in range(3 if QUICK else 10):
        count = 5 if QUICK else 400
        synchronize()
        start = time.perf_counter()
        for i in range(count):
            loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        synchronize()
        best = max(best, count / (time.perf_counter() - start))
    return best


# ---------------------------------------------------------------------------- measuring
def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds(do: Callable[[], Any]) -> float:
    """The best of several."""
    found = []
    for _ in range(ROUNDS):
        synchronize()
        start = time.perf_counter()
        do()
        synchronize()
        found.append(time.perf_counter() - start)
    return min(found)


def chunk(runs: int, steps: int, features: int, permute: bool = True) -> Chunk:
    """Random samples: speed does not depend on what they are."""
    if features not in TABLES:
        TABLES[features] = RNG.uniform(-1, 1, (SAMPLES, features)).astype(np.float32)
    labels = RNG.integers(0, 10, (runs, steps + 1)).astype(np.int32)
    index = RNG.integers(0, SAMPLES, (runs, steps + 1)).astype(np.int32)
    if not permute:
        return Chunk(steps, labels=labels, table=TABLES[features], index=index)
    one = np.stack([RNG.permutation(features) for _ in range(runs)])
    both = np.stack([one, one]).astype(np.int32)
    slots = np.zeros(steps + 1, np.int32)
    return Chunk(
        steps,
        labels=labels,
        table=TABLES[features],
        index=index,
        permutations=both,
        slots=slots,
    )


def rate(stack: Any, features: int, permute: bool = True) -> float:
    """Learner-steps per second of whole steps, metrics included, samples on the device."""
    runs = len(stack.learners)
    stack.advance(chunk(runs, STEPS, features, permute))
    samples = chunk(runs, STEPS * (ROUNDS * REPEATS + 1), features, permute)
    stack._feed(samples)
    if hasattr(stack, "_begin"):
        stack._begin()

    def some() -> None:
        if DEVICE == "cuda":
            for _ in range(REPEATS):
                stack._replay(STEPS)
        else:
            for i in range(STEPS):
                stack._learn(i) if isinstance(stack, CudaStack) else stack._learn()

    return runs * STEPS * REPEATS / seconds(some)


def dense(
    methods: tuple[str, ...], runs: int, sizes: tuple[int, ...] = SIZES, stride: int = 0
) -> float:
    """The rate of a stack of dense learners."""
    learners = [Learner(m, {}, seed) for m in methods for seed in range(runs // len(methods))]
    stack = CudaStack(
        Layout(sizes),
        learners,
        activation="relu",
        loss="cross_entropy",
        steps=10_000,
        window=5_000,
        stride=stride,
        device=DEVICE,
    )
    return rate(stack, sizes[0])


def seeing_layers(name: str, runs: int) -> float:
    """The rate of a stack of an entrant of the arena that sees layers or normalises."""
    wanted = grids.parse(name)
    stack = LayeredCudaStack(
        Layout(SIZES),
        [Learner(wanted.method, {}, seed) for seed in range(runs)],
        activation="relu",
        loss="cross_entropy",
        steps=100_000,
        window=5_000,
        device=DEVICE,
        **wanted.options,
    )
    samples = chunk(runs, STEPS * REPEATS, SIZES[0])
    stack.advance(samples)  # compiles
    return runs * STEPS * REPEATS / seconds(lambda: stack.advance(samples))


def entrants_that_see_layers() -> list[str]:
    """Those of the arena that stacks for methods of single weights cannot run."""
    found = []
    for name in grids.GRIDS:
        wanted = grids.parse(name)
        learner = Learner(wanted.method, {}, 0)
        if (learner.row.method.layered or wanted.options) and not unsupported(learner):
            found.append(name)
    return found


def convolutional(method: str, runs: int) -> float:
    """The rate of a stack of the paper's convolutional networks."""
    stack = GeneralStack(
        lambda seed, task: build("cnn", 0, "relu", 0),
        [Learner(method, {}, seed) for seed in range(runs)],
        loss="cross_entropy",
        steps=10_000,
        window=2_500,
        shape=(3, 32, 32),
        device=DEVICE,
    )
    return rate(stack, 3072, permute=False)


def one_weight_initialisation() -> None:
    """Give all learners the same first weights: making others takes longer than measuring."""
    import upgd.engine.dense as module

    original = module.initial
    known: dict[Any, Any] = {}

    def same(layout: Layout, seed: int, task: int = 0) -> Any:
        if layout.sizes not in known:
            known[layout.sizes] = original(layout, 0, 0)
        return known[layout.sizes]

    module.initial = same


# -------------------------------------------------------------------------------- report
class Page:
    """Lines that are printed, and written at once, so that a cut run keeps what it has."""

    def __init__(self, output: Path | None, title: str, arguments: str = "") -> None:
        self.output = output
        self.lines: list[str] = []
        self.parameters = sum(p.numel() for p in mlp(SIZES).parameters())
        self.speed = max(bandwidth.__wrapped__(DEVICE) or 0.0 for _ in range(1 if QUICK else 20))
        self.plain = plain_steps_per_second()
        name = "Triton's interpreter" if QUICK else torch.cuda.get_device_name()
        shape, copied = "-".join(map(str, SIZES)), f"{self.speed / 1e12:.2f} TB/s"
        self.say(f"# {title}")
        self.say()
        self.say(f"`python benchmarks/batched.py{arguments}` on {name}, torch {torch.__version__},")
        self.say(
            f"upgd {upgd.__version__}. Network {shape}, {self.parameters} parameters, batch 1."
        )
        self.say(f"A copy moves {copied}. The peer, the authors' optimizer as they wrote it,")
        self.say(f"takes {self.plain:.0f} steps/s with one learner. It should take 400: below 360")
        self.say("something slows it down and no ratio counts; above 440 the host is faster, the")
        self.say("ratios are smaller.")
        self.say()
        self.say("| stack | learner-steps/s | times the peer | share of the floor |")
        self.say("|---|---|---|---|")

    def say(self, text: str = "") -> None:
        """Add a line."""
        print(text, flush=True)
        self.lines.append(text)
        if self.output:
            self.output.write_text("\n".join(self.lines) + "\n")

    def row(self, label: str, found: float, moved: float) -> None:
        """Add a rate; `moved` numbers per weight and step are its floor."""
        reached = f"{share(found, moved * 4 * self.parameters, self.speed):.1%}" if moved else "-"
        self.say(f"| {label} | {found:,.0f} | {found / self.plain:,.0f} | {reached} |")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--arena", action="store_true", help="what sees layers or normalises")
    parser.add_argument("--methods", default="", help="these alone, comma-separated")
    arguments = parser.parse_args()
    one_weight_initialisation()
    if arguments.arena:
        arena_page(arguments.output, arguments.methods)
    else:
        engine_page(arguments.output, arguments.methods)


def arena_page(output: Path | None, methods: str) -> None:
    """Entrants of the arena whose rules see layers, or whose networks normalise."""
    page, many = Page(output, "Methods that see layers, on CUDA", " --arena"), 2 if QUICK else 528
    page.row(f"UPGD-W, R = {many}", dense(("upgd",), many), passes("upgd"))
    for name in methods.split(",") if methods else entrants_that_see_layers():
        page.row(f"{name}, R = {many}", seeing_layers(name, many), passes(grids.parse(name).method))
    page.say()
    page.say("Whole steps; samples are copied to the device in this time. The floor counts each")
    page.say("method's reads and writes of weights and states, at the copy's speed.")


def engine_page(output: Path | None, methods: str) -> None:
    """All methods of single weights, and what learners and parameters cost."""
    page, (many, few) = Page(output, "The batched engine on CUDA"), (2, 1) if QUICK else (200, 20)
    page.row(f"UPGD-W with noise, R = {many}", dense(("upgd",), many), passes("upgd"))
    page.row(f"the same as a user's rule, R = {many}", dense((own_upgd(),), many), passes("upgd"))
    page.row(f"UPGD-W with noise, R = {few}", dense(("upgd",), few), passes("upgd"))
    label = f"the same, diagnostics at stride 100, R = {many}"
    page.row(label, dense(("upgd",), many, stride=100), 6)
    every = [*PAPER, *(name for name in rules() if name not in PAPER)]
    for method in methods.split(",") if methods else PAPER if QUICK else every:
        if method != "upgd":
            page.row(f"{method}, R = {many}", dense((method,), many), passes(method))
    if not QUICK:
        mixed = sum(passes(m) for m in PAPER) / len(PAPER)
        page.row(f"the paper's ten methods together, R = {many}", dense(PAPER, many), mixed)
    page.row(f"CIFAR-10 network, UPGD-W, R = {many // 2}", convolutional("upgd", many // 2), 0)
    page.say()
    page.say("Whole steps, metrics included, of samples that lie on the device already.")
    page.say("The floor counts each method's reads and writes of weights and states, at the copy's")
    page.say("speed: UPGD six, S-SI ten, S-RWalk twelve. Where all learners fit into the cache of")
    page.say("the GPU together, the share may exceed one.")
    page.say()
    page.say("| R | µs per step | sizes | µs per step (R = 100) |")
    page.say("|---|---|---|---|")
    counts = (1, 2) if QUICK else (10, 20, 50, 100, 200, 400)
    widths: list[tuple[int, ...]] = [(784, w, w // 2, 10) for w in (75, 150, 300, 600, 1200)]
    depths: list[tuple[int, ...]] = [(784, *[300] * depth, 10) for depth in (1, 2, 4, 8)]
    if QUICK:
        widths, depths = [(20, 8, 10)], [(20, 8, 8, 10)]
    base = 1 if QUICK else 100
    costs = {
        "R": {r: 1e6 * r / dense(("upgd",), r) for r in counts},
        "width": {s: 1e6 * base / dense(("upgd",), base, s) for s in widths},
        "depth": {s: 1e6 * base / dense(("upgd",), base, s) for s in depths},
    }
    left = [f"{r} | {cost:.1f}" for r, cost in costs["R"].items()]
    shaped = {**costs["width"], **costs["depth"]}
    right = [f"{'-'.join(map(str, s))} | {cost:.1f}" for s, cost in shaped.items()]
    for a, b in zip_longest(left, right, fillvalue=" | "):
        page.say(f"| {a} | {b} |")
    if output:
        picture = output.with_suffix(".png")
        draw(costs, picture)
        page.say()
        page.say(f"![cost against R and against parameters]({picture.name})")


@styled()
def draw(costs: dict[str, dict[Any, float]], path: Path) -> None:
    """Time per step against the number of learners, and against that of parameters."""
    figure, [[a, b]] = canvas(1, 2, (8, 3))
    a.plot(list(costs["R"]), list(costs["R"].values()), marker="o", **look(0))
    a.set(xlabel="Learners R", ylabel="µs per step of all learners", xlim=0, ylim=0)
    for number, name in enumerate(("width", "depth")):
        sizes = [sum(p.numel() for p in mlp(s).parameters()) / 1e3 for s in costs[name]]
        times = list(costs[name].values())
        b.plot(sizes, times, marker="o", **look(number), label=f"growing {name}")
    b.set(xlabel="Thousand parameters per learner", ylabel="µs per step, R = 100", xlim=0, ylim=0)
    label_ends(figure, b)
    save(figure, path, path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
