"""Dense stacks by numba: against the plain loop, and against themselves in other company."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from numba import njit

from tests.cases import RULES
from tests.stacks import classify, feed, gated_outputs, output_layer_after_sgd, plain, regress
from upgd.engine import EagerRun, Setting
from upgd.engine.dense import COLUMNS, Learner
from upgd.engine.dense_cpu import CpuStack
from upgd.kernels import cpu_functions, philox
from upgd.kernels.layout import Layout
from upgd.networks import build

SIZES = (64, 13, 6, 10)
STEPS = 64
CUTS = [3, 4, *range(9, STEPS, 5), STEPS]  # a chunk knows the permutations of two tasks


def make(learners: list[Learner], sizes: tuple[int, ...] = SIZES, **changes: Any) -> CpuStack:
    settings: dict[str, Any] = {
        "activation": "relu",
        "loss": "cross_entropy",
        "steps": STEPS,
        "window": 4,
        "dtype": np.float32,
        **changes,
    }
    return CpuStack(Layout(sizes), learners, **settings)


def run(
    stack: CpuStack, learners: list[Learner], cuts: list[int] = CUTS, stream: Any = classify
) -> CpuStack:
    samples = feed(learners, stream)
    for start, stop in zip([stack.step, *cuts], cuts, strict=False):
        stack.advance(samples.chunk(start, stop - start))
    return stack


def check_against_plain(stack: CpuStack, stream: Any, **network: Any) -> None:
    steps = stack.step
    for i, learner in enumerate(stack.learners):
        trace = plain(learner, stream(learner.seed), steps, **network)
        weights = stack.weights[i][stack.layout.places]
        np.testing.assert_allclose(weights, trace.weights, atol=1e-9, rtol=0, err_msg=str(learner))
        for column, values in enumerate((trace.losses, trace.plasticity, trace.right)):
            expected = np.add.reduceat(values, np.arange(0, steps, stack.window))
            np.testing.assert_allclose(
                stack.series[i, : len(expected), column], expected, atol=1e-8
            )


# --------------------------------------------------------------------------- equality
FAMILIES = (
    *("upgd", "n-upgd-2nd-local", "upgd-2nd", "feature-upgd", "feature-n-upgd-2nd-local"),
    *("ada-upgd", "sgdw", "shrink-and-perturb", "adamw", "s-mas", "s-si", "s-rwalk"),
)


@pytest.mark.parametrize(
    "names", [FAMILIES, pytest.param(tuple(RULES), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_methods_equal_the_plain_loop(names: tuple[str, ...]) -> None:
    """Beside each other in one stack, in float64."""
    learners = [Learner(name, {}, 3) for name in names]
    stack = run(make(learners, dtype=torch.float64), learners)
    assert stack.order != list(range(len(learners)))
    check_against_plain(stack, classify, sizes=SIZES)


def test_gates_of_output_layers() -> None:
    learners = gated_outputs(3)
    stack = run(make(learners, dtype=torch.float64), learners, [1])
    for i, learner in enumerate(stack.learners):
        expected = output_layer_after_sgd(learner, classify(3), SIZES)
        weights = stack.weights[i][stack.layout.places][-len(expected) :]
        np.testing.assert_allclose(weights, expected, atol=1e-14, err_msg=str(learner))


@pytest.mark.parametrize(
    "hyper",
    [
        {"sigma": 0.0},
        {"lr": 0.1, "sigma": 0.5, "weight_decay": 0.1, "beta_utility": 0.5},
        {"lr": 0.1, "beta_utility": 0.0},
    ],
    ids=str,
)
def test_hyperparameters(hyper: dict[str, float]) -> None:
    learners = [Learner(name, hyper, 4) for name in ("upgd", "upgd-2nd")]
    stack = run(make(learners, dtype=np.float64), learners, CUTS[:7])
    check_against_plain(stack, classify, sizes=SIZES)


@pytest.mark.parametrize("activation", ["leaky_relu", "tanh", "linear"])
def test_other_activations_and_squared_error(activation: str) -> None:
    learners = [Learner(n, {}, 5) for n in ("upgd-2nd", "feature-upgd-2nd-local", "adamw")]
    sizes = (16, 9, 5, 1)
    stack = make(learners, sizes, dtype=np.float64, activation=activation, loss="squared_error")
    run(stack, learners, [7, 30], regress)
    check_against_plain(stack, regress, sizes=sizes, activation=activation)


@pytest.mark.parametrize("sizes", [(64, 10), (64, 5, 10), (64, 16, 5, 8, 10)])
def test_any_depth(sizes: tuple[int, ...]) -> None:
    learners = [Learner(name, {"sigma": 0.1}, 2) for name in ("upgd", "upgd-local")]
    stack = run(make(learners, sizes, dtype=np.float64), learners, CUTS[:6])
    check_against_plain(stack, classify, sizes=sizes)


def test_a_single_linear_layer_with_squared_error() -> None:
    """The toys' baseline; other methods beside it take the same way."""
    learners = [Learner(name, {}, 5) for name in ("sgdw", "upgd-2nd-local", "pgd")]
    linear: dict[str, Any] = {"activation": "linear", "loss": "squared_error", "stride": 2}
    stack = make(learners, (16, 1), dtype=np.float64, **linear)
    run(stack, learners, [7, 30], regress)
    check_against_plain(stack, regress, sizes=(16, 1), activation="linear")


def test_float32_stays_close_to_float64() -> None:
    """Its polynomials are others."""
    learners = [Learner(name, {}, 3) for name in ("upgd", "ada-upgd", "upgd-local", "s-rwalk")]
    single = run(make(learners), learners)
    double = run(make(learners, dtype=np.float64), learners)
    np.testing.assert_allclose(single.weights, double.weights, atol=3e-5)
    np.testing.assert_allclose(single.series[..., :3], double.series[..., :3], atol=1e-3)


# ------------------------------------------------------------------------ independence
def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.tobytes() == other[name].tobytes(), name


KINDS = ("upgd", "upgd-2nd-local", "feature-upgd", "ada-upgd", "s-si", "pgd")


def test_chunks_may_end_anywhere() -> None:
    learners = [Learner(name, {"lr": 0.05}, 6) for name in KINDS]
    few = run(make(learners, stride=3), learners)
    many = run(make(learners, stride=3), learners, list(range(1, STEPS + 1)))
    for i in range(len(learners)):
        same(few.state(i), many.state(i))


def test_a_run_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit, whatever their number, on any thread, and even if one diverges."""
    mine = [Learner(name, {"lr": 0.05}, 7) for name in KINDS]
    wild = Learner("upgd", {"lr": 1e30}, 8)
    others = [Learner("upgd", {}, 1), Learner("sgdw", {}, 2), Learner("upgd", {"lr": 0.1}, 4)]
    beside = [wild, *mine[:3], *others, *mine[3:]]
    stack = run(make(beside, threads=3), beside, list(range(1, STEPS + 1)))
    assert 0 < stack.diverged[stack.learners.index(wild)] < STEPS
    assert not np.isfinite(stack.weights[stack.learners.index(wild)]).all()
    for learner in mine:
        alone = run(make([learner], threads=1), [learner])
        place = stack.learners.index(learner)
        assert stack.diverged[place] == -1
        same(stack.state(place), alone.state(0))


def test_a_restored_run_goes_on_bit_for_bit() -> None:
    learners = [Learner("s-si", {}, 1), Learner("feature-upgd", {}, 2), Learner("upgd", {}, 3)]
    whole = run(make(learners, stride=2), learners)
    first = run(make(learners, stride=2), learners, CUTS[:3])
    second = make(learners, stride=2)
    for i in range(len(learners)):
        second.restore(i, first.state(i))
    second.step = first.step
    run(second, learners, CUTS[3:])
    for i in range(len(learners)):
        same(whole.state(i), second.state(i))


def test_a_restart_begins_afresh() -> None:
    learners = [Learner("upgd", {}, 3), Learner("s-si", {}, 3)]
    stack = run(make(learners), learners, [3])
    stack.restart(1)
    again = build(SIZES, 3, task=1)
    expected = torch.cat([p.detach().flatten() for p in again.parameters()]).numpy()
    for i in range(2):
        np.testing.assert_array_equal(stack.weights[i][stack.layout.places], expected)
    assert not stack.corrections.any()
    upgd = next(i for i, group in enumerate(stack.groups) if group.row.name == "upgd")
    assert not stack.states[upgd].any()


# ----------------------------------------------------------------------------- metrics
def test_metrics_are_those_of_the_eager_engine() -> None:
    stream = classify(9)
    learner = Learner("sgdw", {"lr": 0.05}, 9)
    stack = run(make([learner], window=8, stride=2), [learner])
    setting = Setting("sgdw", {"lr": 0.05}, 9, window=8, stride=2)
    eager = EagerRun(stream, lambda seed, task: build(SIZES, seed, task=task), setting)
    eager.advance(STEPS)
    sums = dict(zip(COLUMNS, stack.series[0].T, strict=True))
    assert (sums["measured"] == 4).all()
    for name in COLUMNS[:3]:
        np.testing.assert_allclose(sums[name] / 8, eager.meter.series(name), atol=1e-5)
    for name in COLUMNS[3:-1]:
        mean = sums[name] / sums["measured"]
        np.testing.assert_allclose(mean, eager.meter.series(name), rtol=1e-3, atol=1e-5)


# -------------------------------------------------------------------------- randomness
@njit
def _words(counter: Any, key: Any, out: Any) -> None:
    quad = cpu_functions.lanes() * np.uint32(0) + counter[0]
    a, b, c, d = cpu_functions.philox_words(
        quad, counter[1], counter[2], counter[3], key[0], key[1]
    )
    for i, word in enumerate((a, b, c, d)):
        cpu_functions.store(out, i * cpu_functions.LANES, word)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
        ),
    ],
)
def test_known_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    """Random123's, for seven rounds."""
    out = np.zeros(4 * cpu_functions.LANES, np.uint32)
    _words(np.array(counter, np.uint32), np.array(key, np.uint32), out)
    np.testing.assert_array_equal(
        out.reshape(4, -1), np.array(answer)[:, None].repeat(cpu_functions.LANES, 1)
    )


@pytest.mark.parametrize(("count", "first"), [(1, 0), (13, 5), (1001, 4004), (512, 2**20 + 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_normals_are_the_plain_ones(dtype: Any, count: int, first: int) -> None:
    """Those of dense stacks, of fused optimizers and of agents."""
    pitch, seed, step = 1024, (5 << 32) + 7, (3 << 32) + 11
    z, words = np.zeros(4 * pitch, dtype), np.zeros(4 * pitch, np.uint32)
    table = cpu_functions.COEFFICIENTS.copy()
    cpu_functions.normals(z, words, table, pitch, count, first, np.uint32(6), step, seed)
    quad = torch.arange(first, first + count)
    rest = [torch.full_like(quad, v) for v in (6, step & 0xFFFFFFFF, step >> 32)]
    a, b, c, d = philox.philox4x32([quad, *rest], (seed & 0xFFFFFFFF, seed >> 32))
    kind = torch.float32 if dtype == np.float32 else torch.float64
    expected = torch.stack((*philox.box_muller(a, b, kind), *philox.box_muller(c, d, kind)))
    close = 1e-14 if dtype == np.float64 else 1.5e-6
    np.testing.assert_allclose(z.reshape(4, -1)[:, :count], expected.numpy(), atol=close)
    whole = -(-count // cpu_functions.LANES) * cpu_functions.LANES
    assert not z.reshape(4, -1)[:, whole:].any()


@njit
def _pairs(words: Any, z: Any, table: Any) -> None:
    for j in range(0, len(z) // 2, cpu_functions.LANES):
        x, y = cpu_functions.box_muller(
            cpu_functions.load(words, j), cpu_functions.load(words, len(z) // 2 + j), z, table
        )
        cpu_functions.store(z, j, x)
        cpu_functions.store(z, len(z) // 2 + j, y)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_normals_at_the_edges(dtype: Any) -> None:
    """Finite and right where words begin and end, and where quarter turns do."""
    edges = [e + d for e in (0, 1 << 29, 1 << 30, 3 << 29, 1 << 31, 3 << 30) for d in (-1, 0, 1)]
    edges += [5 << 29, 7 << 29, 3_037_000_499, 2, 255]
    words = np.array([(a % 2**32, b % 2**32) for a in edges for b in edges], np.int64)
    words = words[: len(words) // cpu_functions.LANES * cpu_functions.LANES]
    z = np.zeros(2 * len(words), dtype)
    _pairs(words.T.astype(np.uint32).ravel(), z, cpu_functions.COEFFICIENTS.copy())
    kind = torch.float32 if dtype == np.float32 else torch.float64
    radius, angle = torch.from_numpy(words).unbind(1)
    expected = torch.cat(philox.box_muller(radius, angle, kind)).numpy()
    assert np.isfinite(z).all()
    np.testing.assert_allclose(z, expected, atol=1e-14 if dtype == np.float64 else 2e-6)


@njit
def _gates(x: Any, far: Any, near: Any) -> None:
    for j in range(0, len(x), cpu_functions.LANES):
        cpu_functions.store(far, j, cpu_functions.sigmoid(cpu_functions.load(x, j)))
        cpu_functions.store(near, j, cpu_functions.near_sigmoid(cpu_functions.load(x, j)))


def test_sigmoids() -> None:
    x = np.concatenate([np.linspace(-1, 1, 2000), np.linspace(-90, 90, 2000)]).astype(np.float32)
    x[-8:] = [np.inf, -np.inf, np.nan, 1e30, -1e30, 0, -0.0, 1e-30]
    far, near = np.zeros_like(x), np.zeros_like(x)
    _gates(x, far, near)
    with np.errstate(over="ignore"):
        expected = 1 / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(far[:2000], expected[:2000], rtol=3e-7)
    np.testing.assert_allclose(far, expected, rtol=1e-5, atol=2e-38)  # as float32 has e⁻ˣ
    np.testing.assert_allclose(near[:2000], expected[:2000], rtol=2e-7)


# ------------------------------------------------------------------------------ without
def test_without_numba_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in ("cpu_dense", "cpu_rows", "cpu_functions", "vectors"):
        monkeypatch.delitem(sys.modules, f"upgd.kernels.{name}", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'numba"):
        make([Learner("sgdw", {}, 0)])
