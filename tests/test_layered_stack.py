"""Stacks of layered learners against the plain optimizer, and their bits against each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from tests import layered_methods
from tests.layered_methods import compare
from tests.stacks import feed, plain, regress, small
from upgd.engine import EagerRun, Setting
from upgd.engine.batched import BatchedRun, kind_of, why_eager
from upgd.engine.dense import Learner
from upgd.engine.layered import LayeredStack
from upgd.engine.layered_cpu import LayeredCpuStack
from upgd.kernels.cpu_recycle import choose_units
from upgd.kernels.layout import Layout
from upgd.networks import build, build_for
from upgd.streams import get

SIZES = (16, 7, 6, 10)
STEPS, TASK = 200, 100


@pytest.fixture(autouse=True)
def methods() -> None:
    layered_methods.add()


def digits(seed: int) -> Any:
    return small(seed, TASK)


def make(learners: Sequence[Learner], sizes: Sequence[int] = SIZES, **options: Any) -> Any:
    common: dict[str, Any] = {"activation": "relu", "loss": "cross_entropy", "dtype": np.float64}
    common |= {"steps": STEPS, "window": 1}
    return LayeredCpuStack(Layout(tuple(sizes)), learners, **{**common, **options})


def run(stack: LayeredStack, samples: Any, cuts: Sequence[int]) -> None:
    for start, stop in zip((0, *cuts), cuts, strict=False):
        stack.advance(samples.chunk(start, stop - start))


# --------------------------------------------------------------------- the plain version
CASES: dict[str, dict[str, Any]] = {
    "centred-sgd": {},
    "everywhere": {},
    "biases-after": {"activation": "tanh", "steps": 60},
    "anchored": {},
    "recycled": {},
    "dormant": {"activation": "tanh", "hyper": {"period": 6.5}},
    "centred-sgd, one layer": {"sizes": (16, 10), "steps": 60},
    "everywhere, one layer": {"sizes": (16, 10), "steps": 60},
    "everywhere, two layers, both norms": {
        "sizes": (16, 5, 10), "activation": "tanh", "layer_norm": True, "input_norm": True,
        "steps": 60,
    },
    "normalised": {"steps": 60},
    "recycled, layer norm": {"layer_norm": True, "steps": 60},
    "everywhere, regression": {"sizes": (16, 9, 1), "loss": "squared_error", "steps": 60},
    "sgdw, layer norm": {"layer_norm": True, "activation": "leaky_relu"},
    "upgd, both norms": {"layer_norm": True, "input_norm": True},
    "upgd, decays apart": {"layer_norm": True, "steps": 60, "hyper": {"head.beta_utility": 0.5}},
    "adamw, input norm": {"input_norm": True},
}  # fmt: skip


SOME = {"centred-sgd", "everywhere", "recycled", "dormant", "upgd, both norms"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in SOME)) for c in CASES]
)
def test_equals_the_plain_optimizer(case: str) -> None:
    options = {"steps": STEPS, **CASES[case]}
    steps, sizes = options["steps"], options.pop("sizes", SIZES)
    norms = {k: options.get(k, False) for k in ("layer_norm", "input_norm")}
    learner = Learner(case.split(",")[0], options.pop("hyper", {}), 3)
    stream = regress if "regression" in case else digits
    stack = make([learner], sizes, **options)
    run(stack, feed([learner], stream), (1, 33, 34, *range(TASK, steps, TASK), steps))
    model = build(sizes, 3, options.get("activation", "relu"), **norms)
    kept: list[Any] = []
    trace = plain(learner, stream(3), steps, sizes, model=model, kept=kept)
    compare(stack, trace, kept[0])


def test_units_are_recycled() -> None:
    """Else the comparisons above compare nothing."""
    for name in ("recycled", "dormant"):
        learner = Learner(name, {}, 3)
        stack = make([learner])
        run(stack, feed([learner], digits), (TASK, STEPS))
        ages = stack.layouts[0].at("features", "age")
        assert stack.kept[0][0, ages : ages + 13].min() < STEPS


def test_shares_of_units_add_up_as_in_the_plain_optimizer() -> None:
    """In float32, where rounding decides in which step a whole unit is reached."""
    for count, share in itertools.product((10, 50, 90, 160, 250), (1e-5, 1e-4, 1e-3, 1e-2)):
        kept, chosen = np.ones(2 * count + 1, np.float32), np.zeros(count, np.float32)
        kept[-1], owed = 0, torch.zeros(())
        for _ in range(1000):
            choose_units(0, count, 2 * count, count, True, share, 0.0, kept, chosen)
            owed += share * count  # as upgd.optim.layer_step
            assert chosen.sum() == int(owed)
            owed -= int(owed)


# ---------------------------------------------------------------------------------- bits
GROUP = [Learner("recycled", {}, 0), Learner("centred-sgd", {}, 1), Learner("everywhere", {}, 2)]
GROUP += [Learner("upgd", {"lr": 0.1}, 3), Learner("centred-sgd", {"lr": 0.1}, 4)]
NORMS = {"layer_norm": True, "input_norm": True, "stride": 3, "window": 20}


def bits(stack: LayeredStack, number: int) -> dict[str, Any]:
    return stack.state(stack.order.index(number))


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def test_bits_depend_neither_on_others_nor_on_chunks_nor_on_threads() -> None:
    together = make(GROUP, threads=2, **NORMS)
    run(together, feed(GROUP, digits), (7, 8, 60))
    for number, learner in enumerate(GROUP):
        alone = make([learner], threads=1, **NORMS)
        run(alone, feed([learner], digits), (30, 60))
        same(bits(alone, 0), bits(together, number))


def test_resumes_bit_for_bit() -> None:
    whole, first, rest = (make(GROUP, **NORMS) for _ in range(3))
    samples = feed(GROUP, digits)
    for stack in (whole, first):
        run(stack, samples, (20,))
        stack.restart(1, [2])  # whose steps count from 1 again
        stack.advance(samples.chunk(20, 15))
    for number in range(len(GROUP)):
        rest.restore(number, first.state(number))
    rest.step = first.step
    for stack in (whole, rest):
        stack.advance(samples.chunk(35, 25))
    for number in range(len(GROUP)):
        same(whole.state(number), rest.state(number))
    assert whole.began.tolist() == [0, 0, 20, 0, 0]


# -------------------------------------------------------------------------------- engine
BOTH = {"network": (64, 9, 8, 10), "layer_norm": True, "input_norm": True, "task_length": 25}


@pytest.mark.parametrize("method", ["centred-sgd", "upgd"])
def test_runs_equal_eager_ones(method: str) -> None:
    """In float32, with restarts, diagnostics and held-out samples."""
    problem = replace(get("input-permuted-digits"), **BOTH)
    hyper = {"sigma": 0.001} if method == "upgd" else {}
    common: dict[str, Any] = {"window": 10, "held_out": 40, "stride": 2}
    for restart in (False, True):
        setting = Setting(method, hyper, 1, restart=restart, **common)
        assert kind_of(problem, setting, "cpu") == "layered"
        stacked = BatchedRun(problem, [setting], [problem.make(1)], 50)
        stacked.advance(50)
        eager = EagerRun(problem.make(1), partial(build_for, problem), setting)
        eager.advance(50)
        assert stacked.offline[0] == eager.offline
        for name, values in stacked.series(0).items():
            np.testing.assert_allclose(values, eager.meter.series(name), 2e-4, 1e-5, err_msg=name)


def test_which_stack() -> None:
    plain_problem = get("label-permuted-digits")
    normed, online = (replace(plain_problem, **{k: True}) for k in ("layer_norm", "input_norm"))

    def kind(problem: Any, method: str) -> str | None:
        return kind_of(problem, Setting(method, {}, 0, 5), "cpu")

    assert [kind(plain_problem, m) for m in ("sgd", "centred-sgd")] == ["dense", "layered"]
    assert [kind(normed, m) for m in ("sgd", "upgd", "upgd-local")] == ["layered"] * 2 + ["general"]
    assert kind(online, "adam") == "layered"
    reasons = {"upgd-2nd": "curvature", "feature-upgd": "gates", "upgd-local": "norms of rows"}
    for method, reason in reasons.items():
        assert kind(online, method) is None
        assert reason in why_eager(online, Setting(method, {}, 0, 5), "cpu")
        with pytest.raises(ValueError, match=reason):
            make([Learner(method, {}, 0)])
    settings = [Setting(method, {}, 0, 5) for method in ("sgd", "centred-sgd")]
    with pytest.raises(ValueError, match="different stacks: dense, layered"):
        BatchedRun(plain_problem, settings, [plain_problem.make(0)] * 2, 10)
