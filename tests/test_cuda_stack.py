"""Dense stacks by Triton kernels: on CUDA where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.cases import RULES
from tests.stacks import feed, gated_outputs, numbers, output_layer_after_sgd, plain, regress
from tests.stacks import small as classify
from tests.waiting import PATIENCE
from upgd.engine.dense import Learner
from upgd.engine.dense_cuda import GRAPH_STEPS, CudaStack, Tuning, can_launch_early
from upgd.kernels.layout import Layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 60 if DEVICE == "cuda" else 3
SIZES = (16, 7, 6, 10)


def make(
    learners: list[Learner], steps: int = STEPS, sizes: tuple[int, ...] = SIZES, **changes: Any
) -> CudaStack:
    settings: dict[str, Any] = {
        "activation": "relu",
        "loss": "cross_entropy",
        "steps": steps,
        "window": 3,
        "device": DEVICE,
        "dtype": torch.float64,
        **changes,
    }
    return CudaStack(Layout(sizes), learners, **settings)


def run(stack: CudaStack, learners: list[Learner], cuts: list[int], stream: Any = classify) -> None:
    samples = feed(learners, stream)
    tasks = [*range(5, cuts[-1], 5)] if stream is classify else []
    stops = sorted({*cuts, *tasks})  # a chunk reaches into the next task at most
    for start, stop in zip([0, *stops], stops, strict=False):
        stack.advance(samples.chunk(start, stop - start))


def check_against_plain(stack: CudaStack, stream: Any, steps: int, **network: Any) -> None:
    """Compare with the plain loop; what lies behind the biases, which nobody masks, stays zero."""
    padding = np.setdiff1d(np.arange(stack.layout.size), stack.layout.places)
    assert len(padding) > 0
    assert not stack.weights[:, padding].any()
    assert not any(states[..., padding].any() for states in stack.states)
    for i, learner in enumerate(stack.learners):
        trace = plain(learner, stream(learner.seed), steps, **network)
        weights = numbers(stack.weights[i])[stack.layout.places]
        np.testing.assert_allclose(weights, trace.weights, atol=1e-9, rtol=0, err_msg=str(learner))
        series = numbers(stack.series[i])
        for column, values in enumerate((trace.losses, trace.plasticity, trace.right)):
            expected = np.add.reduceat(values, np.arange(0, steps, stack.window))
            np.testing.assert_allclose(series[:, column], expected, atol=1e-8)


@pytest.mark.parametrize("part", range(4))
def test_every_method_equals_the_plain_loop(part: int) -> None:
    """Several methods beside each other in one stack, in float64; chunks end within a task."""
    names = list(RULES)
    if DEVICE == "cpu":  # the interpreter is slow: one of each kind
        names = ["upgd", "s-rwalk", "n-upgd-2nd-local", "sgdw", "feature-upgd-2nd", "ada-upgd"]
    learners = [Learner(name, {}, 3) for name in names[part::4]]
    stack = make(learners)
    run(stack, learners, [2, STEPS])
    check_against_plain(stack, classify, STEPS, sizes=SIZES)


def test_gates_of_output_layers() -> None:
    learners = gated_outputs(3)
    stack = make(learners, 1)
    run(stack, learners, [1])
    for i, learner in enumerate(stack.learners):
        expected = output_layer_after_sgd(learner, classify(3), SIZES)
        weights = numbers(stack.weights[i])[stack.layout.places][-len(expected) :]
        np.testing.assert_allclose(weights, expected, atol=1e-14, err_msg=str(learner))


TILES = Tuning(back_rows=4, back_columns=4, head_columns=8, head_tile=128)
"""So small that layers of a few units take several rounds, tiles and parts of a norm."""


@pytest.mark.parametrize(
    "sizes", [(16, 9, 14, 10), pytest.param((16, 18, 10), marks=pytest.mark.slow)]
)
def test_many_tiles(sizes: tuple[int, ...]) -> None:
    names = ("feature-upgd", "feature-n-upgd-2nd-local", "upgd-2nd")
    learners = [Learner(name, {}, 5) for name in names]
    stack = make(learners, 1, sizes, tuning=TILES)
    run(stack, learners, [1])
    check_against_plain(stack, classify, 1, sizes=sizes)


@pytest.mark.slow
def test_more_parts_of_a_norm_than_lanes() -> None:
    sizes = (16, 133, 3, 10)
    learner = Learner("feature-upgd-local", {}, 5)
    stack = make([learner], 1, sizes, tuning=TILES)
    run(stack, [learner], [1])
    check_against_plain(stack, classify, 1, sizes=sizes)


@pytest.mark.parametrize("method", ["adamw", "ada-upgd"])
def test_padding_survives_a_division_by_zero(method: str) -> None:
    """Without ε, what lies behind the biases would become 0/0."""
    learners = [Learner(method, {"eps": 0.0}, 3)]
    stack = make(learners, 2, activation="tanh")
    run(stack, learners, [2])
    assert np.isfinite(numbers(stack.weights)).all()
    check_against_plain(stack, classify, 2, sizes=SIZES, activation="tanh")


@pytest.mark.parametrize(
    "activation",
    ["tanh", *(pytest.param(a, marks=pytest.mark.slow) for a in ("leaky_relu", "linear"))],
)
def test_other_activations_and_squared_error(activation: str) -> None:
    learners = [Learner(name, {}, 5) for name in ("upgd-2nd", "feature-upgd-2nd-local")]
    sizes = (16, 9, 5, 1)
    steps = 4 if DEVICE == "cuda" else 2
    stack = CudaStack(
        Layout(sizes),
        learners,
        activation=activation,
        loss="squared_error",
        steps=steps,
        window=3,
        device=DEVICE,
        dtype=torch.float64,
    )
    run(stack, learners, [steps], regress)
    check_against_plain(stack, regress, steps, sizes=sizes, activation=activation)


@pytest.mark.parametrize(
    "sizes", [(16, 10), pytest.param((16, 5, 10), marks=pytest.mark.slow), (16, 6, 5, 4, 10)]
)
def test_any_depth(sizes: tuple[int, ...]) -> None:
    learners = [Learner("upgd", {"sigma": 0.1}, 2)]
    stack = CudaStack(
        Layout(sizes),
        learners,
        activation="relu",
        loss="cross_entropy",
        steps=3,
        window=3,
        device=DEVICE,
        dtype=torch.float64,
    )
    run(stack, learners, [3])
    check_against_plain(stack, classify, 3, sizes=sizes)


def test_a_single_linear_layer_with_squared_error() -> None:
    """The toys' baseline; other methods beside it take the same way."""
    learners = [Learner(name, {}, 5) for name in ("sgdw", "upgd-2nd-local", "pgd")]
    stack = make(learners, sizes=(16, 1), activation="linear", loss="squared_error", stride=2)
    run(stack, learners, [1, STEPS], regress)
    check_against_plain(stack, regress, STEPS, sizes=(16, 1), activation="linear")


@pytest.mark.slow
def test_a_run_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit, whatever their number and methods, and even if some diverge."""
    names = ("upgd", "feature-upgd", "feature-n-upgd-2nd-local")
    mine = [Learner(name, {"sigma": 0.1}, 7) for name in names]
    wild = [Learner(name, {"lr": 1e30}, 8) for name in names]
    plain = ["pgd", "sgdw"] if DEVICE == "cuda" else ["pgd"]
    beside = [*wild, *(Learner(name, {}, 4) for name in plain), *mine]
    stack = make(beside, dtype=torch.float32)
    run(stack, beside, [1, STEPS])
    for learner in mine:
        alone = make([learner], dtype=torch.float32)
        run(alone, [learner], [STEPS])
        place = stack.learners.index(learner)
        assert torch.equal(stack.weights[place], alone.weights[0])
        assert torch.equal(stack.series[place], alone.series[0])
        assert int(stack.diverged[place]) == -1
    for learner in wild:
        assert 0 < int(stack.diverged[stack.learners.index(learner)]) < STEPS


def test_a_restored_run_goes_on_bit_for_bit() -> None:
    learners = [Learner("s-si", {}, 1), Learner("feature-upgd", {}, 2)]
    whole = make(learners, dtype=torch.float32, stride=2)
    run(whole, learners, [2, STEPS])
    first = make(learners, dtype=torch.float32, stride=2)
    samples = feed(learners, classify)
    first.advance(samples.chunk(0, 2))
    second = make(learners, dtype=torch.float32, stride=2)
    for i in range(2):
        second.restore(i, first.state(i))
    second.step = 2
    for start in [2, *range(5, STEPS, 5)]:
        second.advance(samples.chunk(start, min(STEPS, 5 * (start // 5 + 1)) - start))
    assert torch.equal(second.weights, whole.weights)
    assert torch.equal(second.series, whole.series)


def test_several_learners_of_a_method_with_one_pass() -> None:
    """Which are gone through forwards and backwards in turn."""
    learners = [Learner("pgd", {}, seed) for seed in (3, 4)]
    stack = make(learners)
    run(stack, learners, [2, STEPS])
    check_against_plain(stack, classify, STEPS, sizes=SIZES)


EARLY_STEPS = 2 * GRAPH_STEPS + 1


EARLY_METHODS = ("pgd", "upgd", "s-rwalk", "n-upgd-local", "feature-upgd", "feature-upgd-2nd-local")
EARLY_CASES = [
    *((method, (300, 150), 0) for method in EARLY_METHODS),
    *((method, (300, 150), 5) for method in EARLY_METHODS[-3:]),
    *((m, hidden, 0) for m in ("pgd", "feature-upgd") for hidden in ((300,), (40, 30, 20))),
    *(("upgd", hidden, 5) for hidden in ((), (300,), (40, 30, 20))),
]


@pytest.mark.skipif(
    not can_launch_early(torch.device(DEVICE)),
    reason="this device, its driver or Triton has no early launches",
)
@pytest.mark.parametrize(("method", "hidden", "stride"), EARLY_CASES)
def test_early_launches_change_no_bit(method: str, hidden: tuple[int, ...], stride: int) -> None:
    """A kernel that begins while the one before it ends reads what it would have read."""
    learners = [Learner(method, {"lr": 0.01}, seed) for seed in range(40)]
    chunk = feed(learners, lambda seed: classify(seed, 2 * EARLY_STEPS)).chunk(0, EARLY_STEPS)
    found = []
    for first in (0, 1 << 60):
        tuning = Tuning(early_from=first)
        stack = make(
            *(learners, EARLY_STEPS, (16, *hidden, 10)),
            **{"stride": stride, "dtype": torch.float32, "tuning": tuning},
        )
        assert bool(stack.early["EARLY"]) == (first == 0)
        stack.advance(chunk)
        kept = (stack.weights, stack.series, *stack.states, *stack.utilities)
        found.append([numbers(tensor) for tensor in kept])
    assert np.isfinite(found[0][0]).all()
    for early, late in zip(*found, strict=True):
        np.testing.assert_array_equal(early, late)


def test_gradient_norms_are_those_of_the_gradient() -> None:
    learner = Learner("sgdw", {"lr": 0.5, "weight_decay": 0.0}, 3)
    stack = make([learner], steps=1, stride=1, window=1)
    run(stack, [learner], [1])
    from upgd.networks import build

    before = torch.cat([p.detach().flatten() for p in build(SIZES, 3).parameters()]).double()
    after = numbers(stack.weights[0])[stack.layout.places]
    gradient = (before.numpy() - after) / 0.5
    measured = numbers(stack.series[0, 0])
    assert measured[7] == 1
    assert measured[5] == pytest.approx(np.abs(gradient).sum(), abs=1e-6)
    assert measured[6] == pytest.approx(np.linalg.norm(gradient), abs=1e-6)
    assert measured[4] == pytest.approx((np.abs(gradient) > 1e-9).mean(), abs=0.01)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile them")
def test_the_kernels_compile_for_hopper() -> None:
    """All kernels become machine code for sm_90 on a machine without a GPU."""
    script = [sys.executable, "-m", "tests.compile_kernels"]
    plain = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        script, capture_output=True, text=True, timeout=PATIENCE, check=False, env=plain
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "update_kernel upgd" in done.stdout
