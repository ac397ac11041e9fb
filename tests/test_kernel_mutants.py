"""The comparisons bite in kernels: each deliberate error in a kernel's source is noticed.

A mutant changes the source of a kernel, or that of a method's rules as kernels have it. Rules are
compiled by numba and interpreted by Triton. Loops for numba are executed by Python
(:mod:`tests.plain_numba`), Triton's kernels by its interpreter. What is generated on the way goes
to a folder of the test.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("numba")

import upgd.kernels
from tests import plain_numba
from tests.stacks import Trace, feed, numbers, plain, small
from upgd.engine.dense import Learner
from upgd.engine.dense_cpu import CpuStack
from upgd.engine.general import GeneralStack
from upgd.kernels import cpu_rows, rules
from upgd.kernels.layout import Layout
from upgd.networks import build
from upgd.optim import fused
from upgd.optim.custom import rule_row
from upgd.optim.noise import PhiloxNoise
from upgd.optim.registry import METHODS, register

SIZES = (16, 11, 9, 10)
TWO_LAYERS = (16, 5, 10)
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
HYPER = {"lr": 0.1, "sigma": 0.1, "weight_decay": 0.1, "kappa": 2.0, "beta_utility": 0.9}
HEAD = {"head.weight_decay": 0.7}  # in stacks
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)


def skipping(w: Any, g: Any, lr: Any, due: Any) -> Any:
    """Gradient descent, but for every second step."""
    return w - lr * (1 - due) * g


@pytest.fixture(autouse=True)
def with_a_period() -> Iterator[None]:
    register(rule_row("skipping", skipping, period="every", lr=0.1, every=2))
    yield
    del METHODS["skipping"]


class Mutant(NamedTuple):
    """An error: what stands in the source, what takes its place, and a method that shows it."""

    old: str
    new: str
    method: str = "upgd"

    def __call__(self, text: str) -> str:
        assert text.count(self.old) == 1, f"{self.old!r} stands there {text.count(self.old)} times"
        return text.replace(self.old, self.new)


def as_it_is(text: str) -> str:
    return text


# ------------------------------------------------------------------------ against eager
def learner(name: str) -> Learner:
    given = {**HYPER, **HEAD}
    own = {k: v for k, v in given.items() if k.split(".")[-1] in METHODS[name].defaults}
    return Learner(name, own, 3)


@cache
def expected(name: str, steps: int) -> Trace:
    return plain(learner(name), small(3), steps, SIZES)


def compare(make: Callable[..., Any], name: str, cuts: tuple[int, ...]) -> None:
    """A stack of one in float64 against the plain loop: weights, loss, plasticity, guesses.

    They are compared at every cut, since most errors show at the first.
    """
    stack = make(
        Layout(SIZES),
        [learner(name)],
        activation="relu",
        loss="cross_entropy",
        steps=cuts[-1],
        window=1,
        dtype=torch.float64,
    )
    samples = feed([learner(name)], small)
    for start, stop in zip((0, *cuts), cuts, strict=False):
        stack.advance(samples.chunk(start, stop - start))
        trace = expected(name, stop)
        weights = numbers(stack.weights[0])[stack.layout.places]
        np.testing.assert_allclose(weights, trace.weights, atol=1e-9)
        for column, values in enumerate((trace.losses, trace.plasticity, trace.right)):
            found = numbers(stack.series[0, :stop, column])
            np.testing.assert_allclose(found, values, atol=1e-9)


def compare_on_cpu(name: str) -> None:
    compare(CpuStack, name, (3, 5, 8))


def compare_in_the_interpreter(name: str) -> None:
    from upgd.engine.dense_cuda import CudaStack, Tuning

    tiles = Tuning(back_rows=4, back_columns=4, head_columns=4)  # several rounds, tiles and parts
    given = {"device": "cpu", "tuning": tiles}
    compare(lambda *stack, **named: CudaStack(*stack, **named, **given), name, (1, 3))


def compare_stored(name: str, seeds: tuple[int, ...]) -> None:
    """Updates with stored gradients by Triton, learners beside each other, against the plain loop.

    The stack's own updates, which are tested by themselves, do not run.
    """
    from upgd.engine.general_cuda import FusedUpdates

    learners = [replace(learner(name), seed=seed) for seed in seeds]
    stack = GeneralStack(
        lambda seed, task: build(TWO_LAYERS, seed, "relu", task),
        learners,
        loss="cross_entropy",
        steps=2,
        window=1,
        shape=TWO_LAYERS[:1],
        dtype=torch.float64,
    )
    stack._fused = FusedUpdates(stack)
    stack.advance(feed(learners, small).chunk(0, 2))
    for run, each in enumerate(stack.learners):
        weights = plain(each, small(each.seed), 2, TWO_LAYERS).weights
        np.testing.assert_allclose(numbers(stack.weights[run]), weights, atol=1e-9)


def compare_fused(name: str) -> None:
    """Fused optimizer steps against the plain rule; one of them is not finite and left out."""
    row, results = METHODS[name], []
    for path in ({"fused": True}, {"foreach": False}):
        generator = torch.Generator().manual_seed(5)
        params = [nn.Parameter(draw((6, 3), generator)), nn.Parameter(draw((5,), generator))]
        noise = {} if "fused" in path else {"noise": PhiloxNoise()}
        groups = [{"params": params[:1]}, {"params": params[1:], "maximize": True}]
        given = {k: v for k, v in HYPER.items() if k in row.defaults}
        opt = row.optimizer(
            groups, **given, **row.options, **path, **noise, seed=3, nonfinite="skip"
        )
        for step in range(4):
            for p in params:
                p.grad = draw(p.shape, generator)
                if step == 0:  # all utilities are negative
                    p.grad = p.detach() * (1 if p.dim() == 2 else -1)
            if step == 2:
                assert params[0].grad is not None
                params[0].grad[1, 1] = torch.nan
            opt.step()
        states = [v for p in params for _, v in sorted(opt.state[p].items())]
        results.append([p.detach() for p in params] + states)
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11)


def draw(shape: Any, generator: torch.Generator) -> Any:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# -------------------------------------------------------------------------------- rules
RULES = {
    "the utility's sign": ("update", Mutant("t13 = -g", "t13 = g")),
    "useful weights are perturbed": ("update", Mutant("t17 = -eta", "t17 = eta")),
    "no noise": ("update", Mutant("t8 = g + t7", "t8 = g")),
    "noise not gated": ("update", Mutant("t21 = t8 * t20", "t21 = g * t20 + t7")),
    "half of the step": ("update", Mutant("t4 = 2.0 * lr", "t4 = lr")),
    "decay without step size": ("update", Mutant("t0 = lr * p0", "t0 = p0")),
    "decay after the update": ("update", Mutant("t23 = t3 - t22", "t23 = t2 * (w - t22)")),
    "eta of traces without decay": ("reduce", Mutant("t7 = t1 + t6", "t7 = s0 + t6")),
    "gradient gated too": ("update", Mutant("t21 = g + t20", "t21 = (g + t7) * t19", "n-upgd")),
    "no bias correction": ("update", Mutant("t23 = t20 * t22", "t23 = t20", "adamw")),
    "one decay for both moments": ("update", Mutant("1.0 - p2", "1.0 - p1", "adamw")),
    "anchor not corrected": ("update", Mutant("t20 = t17 * t19", "t20 = t17", "s-ewc")),
    "anchor pushes": ("update", Mutant("t21 = w - t20", "t21 = t20 - w", "s-ewc")),
}


def changed_source(stage: str, mutant: Mutant) -> Callable[..., str]:
    def source(method: Any, asked: Any, target: Any) -> str:
        text = rules.source(method, asked, target)
        return mutant(apart(text)) if asked == stage else text

    return source


def apart(text: str) -> str:
    """A rule with its fused products written as the products and sums that they are."""
    products = {tuple(pair): name for name, *pair in re.findall(r"(t\d+) = (\w+) \* (\w+)\n", text)}

    def plain_sum(match: re.Match[str]) -> str:
        minus, *pair, first = match.groups()
        return f"{first} {minus or '+'} {products[tuple(pair)]}"

    return re.sub(r"fused\((-?)(\w+), (\w+), (\w+)\)", plain_sum, text)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_rules_by_numba(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stage, mutant = RULES[name]
    compare_on_cpu(mutant.method)
    monkeypatch.setenv("UPGD_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_rows, "_rows_source", cpu_rows._rows_source.__wrapped__)
    monkeypatch.setattr(cpu_rows, "source", changed_source(stage, mutant))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare_on_cpu(mutant.method)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("name", RULES)
def test_rules_by_triton(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without errors they pass: :func:`test_the_flat_kernels_pass`."""
    from upgd.kernels import triton_flat, triton_rules
    from upgd.optim.fused_cuda import Cuda

    monkeypatch.setattr(fused, "_backend", lambda kind: Cuda)
    monkeypatch.setattr(triton_flat, "BLOCK", 32)
    stage, mutant = RULES[name]
    monkeypatch.setenv("UPGD_CACHE", str(tmp_path))
    monkeypatch.setattr(triton_rules, "source", changed_source(stage, mutant))
    with pytest.raises(AssertionError, match="not close"):
        compare_fused(mutant.method)


# ---------------------------------------------------------------------- loops for numba
LOOPS = {
    "a dead unit passes gradients": Mutant(
        "k = k if h > 0 else h * _as(w, 0)", "k = k if h >= 0 else h * _as(w, 0)"
    ),
    "softmax without the maximum": Mutant("math.exp(z[i] - top)", "math.exp(z[i])"),
    "the guess for the label": Mutant(
        "first[i] = p - _as(z, 1) if i == label", "first[i] = p - _as(z, 1) if i == best"
    ),
    "the next step's noise": Mutant("_U(2 * layer), step, key", "_U(2 * layer), step + 1, key"),
    "biases with weights' noise": Mutant("_U(2 * layer + 1), step", "_U(2 * layer), step"),
    "spans' noise in another order": Mutant(
        "numbers = lane * (len(z) // 4)", "numbers = (3 - lane) * (len(z) // 4)"
    ),
    "eta of one row": Mutant("for turn in range(2):", "for turn in range(1):"),
    "biases not in the maximum": Mutant(
        'else "    inside = less(lanes(), last + np.uint32(1))\\n"',
        'else "    inside = less(lanes(), last)\\n"',
    ),
    "no bias at odd steps": Mutant(
        "acts[one - layers[0, PITCH]] = 1", "acts[one - layers[0, PITCH]] = 0"
    ),
    "biases scaled by their row": Mutant(
        '"choose(equal(lanes(), last), spread(eta_bias), spread(eta))"', '"eta"', "upgd-local"
    ),
    "weights not squared": Mutant("row * row * q", "row * q", "upgd-2nd"),
    "a wrong correction": Mutant("+ (1.0 - decays[k])", "+ decays[k]", "adamw"),
    "plasticity of the next sample": Mutant("pre[0, unit] = out[0]", "pre[0, unit] = out[1]"),
    "the first layer's numbers": Mutant(
        "bias_etas[layer], address(hyper, layer * MOST_NUMBERS)",
        "bias_etas[layer], address(hyper, 0)",
    ),
    "due a step later": Mutant("step - began[0] + 1", "step - began[0]", "skipping"),
    "another layer is spared": Mutant(
        "if spare_last and layer == len(layers) - 1:", "if spare_last and layer == 0:",
        "feature-upgd",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({m.method for m in LOOPS.values()}))
def test_the_loops_pass(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain_numba.execute(monkeypatch, "cpu_dense", as_it_is, tmp_path)
    compare_on_cpu(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain_numba.execute(monkeypatch, "cpu_dense", LOOPS[name], tmp_path)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare_on_cpu(LOOPS[name].method)


FLAT_LOOPS = {
    "the next step's noise": Mutant("t[NUMBER]), step, seed)", "t[NUMBER]), step + 1, seed)"),
    "all spans with one noise": Mutant(
        '_AT_ONCE = """\n            stretch(t, m, first, end - first, z[lane], eta)',
        '_AT_ONCE = """\n            stretch(t, m, first, end - first, z[0], eta)',
    ),
    "half the spans left out of eta": Mutant(
        "if n > 0:\n                one, two", "if n > 0 and lane < 2:\n                one, two"
    ),
    "maximize forgotten": Mutant('"g": "factor * G[i]"', '"g": "G[i]"'),
    "not finite and not noticed": Mutant(
        "partial[k, 2] = largest, read, magnitude", "partial[k, 2] = largest, zero, magnitude"
    ),
    "a norm for several rows": Mutant(
        "until = min(end, (row + 1) * t[LENGTH])", "until = end", "upgd-local"
    ),
    "another norm": Mutant("total += u * u", "total += abs(u)", "upgd-local"),
    "not finite and not checked": Mutant(
        "maximum(largest, {magnitude})\n    return", "zero\n    return", "adamw"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({m.method for m in FLAT_LOOPS.values()}))
def test_the_flat_loops_pass(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain_numba.execute(monkeypatch, "cpu_flat", as_it_is, tmp_path)
    compare_fused(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAT_LOOPS)
def test_flat_loops(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain_numba.execute(monkeypatch, "cpu_flat", FLAT_LOOPS[name], tmp_path)
    with pytest.raises(AssertionError, match="not close"):
        compare_fused(FLAT_LOOPS[name].method)


# --------------------------------------------------------------------- Triton's kernels
def load(module: str, change: Callable[[str], str], folder: Path) -> ModuleType:
    """A module of kernels with its source changed, from a file: Triton reads that again."""
    text = change(Path(upgd.kernels.__path__[0], f"{module}.py").read_text())
    path = folder / f"{module}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"changed_{module}", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


UPDATES = {
    "biases not in the maximum": Mutant(
        "largest = tl.maximum(largest, tl.where(col <= inputs,",
        "largest = tl.maximum(largest, tl.where(col < inputs,",
    ),
    "two spans left out of eta": Mutant(
        "tl.where(col <= inputs, tl.maximum(u0, u2), none)", "tl.where(col <= inputs, u2, none)"
    ),
    "the next step's noise": Mutant(
        "four_normals(seed, quad, tensor, step, real)",
        "four_normals(seed, quad, tensor, step + 1, real)",
    ),
    "biases with weights' noise": Mutant(
        "tl.where(here == inputs, 2 * layer + 1, 2 * layer)", "(2 * layer + 0 * here)"
    ),
    "biases are padding": Mutant("tl.where(here <= inputs, sigma", "tl.where(here < inputs, sigma"),
    "features' utilities not scaled": Mutant("n1 * scale", "n1", "feature-upgd"),
    "another layer is spared": Mutant("free = layer == LAYERS - 1", "free = layer == 0",
        "feature-upgd",
    ),
    "a part left out of the norm": Mutant(
        "mask=lanes < count, other", "mask=lanes < count - 1, other", "feature-upgd-local"
    ),
    "biases scaled by their row": Mutant(
        "eta = tl.where(bias, eta_bias, n)", "eta = n", "upgd-local"
    ),
    "the first layer's numbers": Mutant(
        "(run * LAYERS + layer) * NUMBERS\n    )\n    seed",
        "run * LAYERS * NUMBERS\n    )\n    seed",
    ),
}  # fmt: skip
SAMPLES = {
    "due a step later": Mutant(
        "age = step - tl.load(began + run) + 1", "age = step - tl.load(began + run)", "skipping"
    ),
    "a dead unit passes gradients": Mutant(
        "d = tl.where(h > 0, d, h * 0.0)", "d = tl.where(h >= 0, d, h * 0.0)"
    ),
    "softmax without the maximum": Mutant("e = tl.exp(z - largest)", "e = tl.exp(z)"),
    "no derivative by the label": Mutant("first = tl.where(mine, p - 1.0, p)", "first = p"),
    "no slope": Mutant("tl.store(delta + place, back * k,", "tl.store(delta + place, back,"),
    "another sample": Mutant(
        "tl.load(index + run * LENGTH + here)", "tl.load(index + run * LENGTH)"
    ),
    "a round of rows left out": Mutant(
        "for r in range(BR, units + BR, BR):", "for r in range(BR, units, BR):"
    ),
    "the first rows again": Mutant("w, d = next_w, next_d", "d = next_d"),
    "the first derivatives again": Mutant("w, d = next_w, next_d", "w = next_w"),
    "the first of the outputs' weights again": Mutant(
        "w, h, u = next_w, next_h, next_u", "h, u = next_h, next_u"
    ),
    "the first of the utilities again": Mutant(
        "w, h, u = next_w, next_h, next_u", "w, h = next_w, next_h", "feature-upgd"
    ),
    "one part of the norm for all": Mutant(
        "part = c // PART + tl.arange(0, parts)", "part = tl.arange(0, parts)", "feature-upgd-local"
    ),
    "a round of outputs' weights left out": Mutant(
        "for c in range(BC, pitch + BC, BC):", "for c in range(BC, inputs, BC):"
    ),
    "units not in features' utilities": Mutant("f = back * h\n", "f = back\n", "feature-upgd"),
    "utilities not kept": Mutant(
        "tl.store(utility + place + c + columns, u,", "tl.store(utility + place + c + columns, f,",
        "feature-upgd",
    ),
    "the smallest for the largest": Mutant(
        'top = tl.max(tl.where(inside, u, float("-inf")), 0)',
        'top = tl.max(tl.where(inside, -u, float("-inf")), 0)', "feature-upgd",
    ),
    "another norm of features": Mutant(
        "tl.reshape(wide * wide, [parts, PART])", "tl.reshape(tl.abs(wide), [parts, PART])",
        "feature-upgd-local",
    ),
}  # fmt: skip
FLAT = {
    "eta keeps its sign": Mutant(
        "eta = tl.maximum(tl.abs(eta.to(REAL)), tiny)", "eta = tl.maximum(eta.to(REAL), tiny)"
    ),
    "what lies behind the end in the maximum": Mutant(
        't = tl.where(mask, t, float("-inf"))', "t = tl.where(mask, t, 0.0)"
    ),
    "not finite and not noticed": Mutant(
        'tl.where(g == g, tl.abs(g), float("inf"))', "tl.where(g == g, tl.abs(g), 0.0)"
    ),
    "steps left out are counted": Mutant("tl.load(taken) + ok.to(tl.int64)", "tl.load(taken) + 1"),
    "two spans with one noise": Mutant("h1, z1, x10", "h1, z0, x10"),
    "another norm": Mutant("squares += t * t", "squares += tl.abs(t)", "upgd-local"),
    "no bias correction": Mutant("c = 1.0 - tl.exp(", "c = 1.0 + 0.0 * tl.exp(", "adamw"),
    "due a step later": Mutant("age % every == 0", "(age - 1) % every == 0", "skipping"),
}
STORED = {
    "the first layer's numbers": Mutant("run * TENSORS + tensor\n", "run * TENSORS\n"),
    "no bias in the maximum": Mutant(
        "largest = tl.maximum(largest, tl.where(mask, u,",
        "largest = tl.maximum(largest, tl.where(mask & (count > 10), u,",
    ),
    "a span left out of eta": Mutant(
        'largest = tl.full([BLOCK], float("-inf"), real)\n    for lane in tl.static_range(4):',
        'largest = tl.full([BLOCK], float("-inf"), real)\n    for lane in tl.static_range(3):',
    ),
    "eta of another run": Mutant("tl.load(partial + run)", "tl.load(partial)"),
    "the next step's noise": Mutant("tl.load(clock), real,", "tl.load(clock) + 1, real,"),
    "noise of another run": Mutant("tl.load(seeds + run)", "tl.load(seeds)"),
    "all tensors with one noise": Mutant("(tensor + place * 0)", "(place * 0)"),
    "two spans with one noise": Mutant("            z = z3\n", "            z = z2\n"),
    "a norm for several rows": Mutant("norms + e // width", "norms + 0 * e", "upgd-local"),
    "another norm": Mutant("squares += wide * wide", "squares += tl.abs(wide)", "upgd-local"),
    "states of another run": Mutant("S += own * P + base\n", "S += base\n", "s-si"),
    "corrections of another kind": Mutant(
        "tl.load(corrections), tl.load(corrections + 1)",
        "tl.load(corrections), tl.load(corrections)", "adamw",
    ),
}  # fmt: skip
STACKS = [("update", name) for name in UPDATES] + [("sample", name) for name in SAMPLES]


@pytest.mark.slow  # tests/test_cuda_stack.py has the same kernels
@interpreted
@pytest.mark.parametrize("name", ["upgd-local", "feature-upgd", "upgd", "feature-upgd-local"])
def test_the_kernels_pass(name: str) -> None:
    compare_in_the_interpreter(name)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(("part", "name"), STACKS)
def test_kernels(part: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from upgd.engine import dense_cuda

    mutant = (UPDATES if part == "update" else SAMPLES)[name]
    monkeypatch.setattr(dense_cuda, part, load(f"triton_{part}", mutant, tmp_path))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare_in_the_interpreter(mutant.method)


@interpreted
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "s-rwalk"))
        for name in ("s-rwalk", "upgd-local", "ada-upgd", "upgd", "s-si", "adamw")
    ],
)
def test_the_stored_kernels_pass(name: str) -> None:
    compare_stored(name, (3, 4, 5))


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("name", STORED)
def test_stored_kernels(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from upgd.engine import general_cuda

    module = load("triton_stored", STORED[name], tmp_path)
    monkeypatch.setattr(general_cuda, "kernels", module)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare_stored(STORED[name].method, (3, 4))


@interpreted
def test_the_stored_kernels_update_convolutions() -> None:
    """Several methods beside each other; rows of a convolution's weights are its channels."""
    from upgd.engine.general_cuda import FusedUpdates

    learners = [learner(name) for name in ("upgd", "upgd-local", "s-mas")]
    found = []
    for kernels in (False, True):
        stack = GeneralStack(
            convolutional,
            learners,
            loss="cross_entropy",
            steps=2,
            window=1,
            shape=(1, 4, 4),
            dtype=torch.float64,
        )
        stack._fused = FusedUpdates(stack) if kernels else None
        stack.advance(feed(learners, small).chunk(0, 2))
        found.append([stack.weights, *stack.states])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)


def convolutional(seed: int, task: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 10)]
        return nn.Sequential(*layers).double()


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("name", FLAT)
def test_flat_kernels(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from upgd.optim.fused_cuda import Cuda

    monkeypatch.setattr(fused, "_backend", lambda kind: Cuda)
    module = flat_kernels(FLAT[name], tmp_path)
    monkeypatch.setattr(upgd.kernels, "triton_flat", module, raising=False)
    with pytest.raises(AssertionError, match="not close"):
        compare_fused(FLAT[name].method)


@interpreted
@pytest.mark.parametrize(
    "name", sorted({m.method for m in (*FLAT.values(), *(rule for _, rule in RULES.values()))})
)
def test_the_flat_kernels_pass(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from upgd.optim.fused_cuda import Cuda

    monkeypatch.setattr(fused, "_backend", lambda kind: Cuda)
    module = flat_kernels(as_it_is, tmp_path)
    monkeypatch.setattr(upgd.kernels, "triton_flat", module, raising=False)
    compare_fused(name)


def flat_kernels(change: Callable[[str], str], folder: Path) -> ModuleType:
    """With small blocks, for the interpreter's sake."""
    module = load("triton_flat", change, folder)
    module.BLOCK = 32  # type: ignore[attr-defined]
    return module


def test_the_page_tells_how_many_there_are() -> None:
    count = 2 * len(RULES) + sum(map(len, (LOOPS, FLAT_LOOPS, UPDATES, SAMPLES, STORED, FLAT)))
    page = Path(__file__).parents[1] / "docs" / "batched.md"
    assert f"{count} mutants of the kernels must fail" in page.read_text()
