"""benchmarks/self_tuned.py: each variant is the champion but for one part."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import test_layered_cuda as cuda
from tests import test_layered_stack as cpu
from tests.conftest import BENCHMARKS
from tests.layered_methods import compare
from tests.stacks import feed, plain, small
from upgd.arena import grids
from upgd.arena.protocol import Entrant
from upgd.engine.dense import Learner
from upgd.networks import build
from upgd.optim.registry import METHODS, get
from upgd.streams import TaskStream, load

CHAMPION = "self-tuned-sgd"
RULES = ["no-centring", "step-by-mean-only", "step-by-sample-only", "step-of-fixed-size"]
RULES += ["no-decay", "no-decay-in-first", "no-decay-in-head", "decay-in-hidden"]
RULES += ["decay-by-sign", "target-by-sign"]
SIZES = (16, 7, 6, 10)


@pytest.fixture(scope="module", autouse=True)
def file() -> Iterator[dict[str, Any]]:
    """The file's names, as ``--use`` runs it; what it registers goes with the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "GRIDS", dict(grids.GRIDS))
        patch.setattr(grids, "_METHODS", {})
        before = dict(METHODS)
        yield runpy.run_path(str(BENCHMARKS / "self_tuned.py"))
        METHODS.clear()
        METHODS.update(before)


def trained(name: str, steps: int, **changed: float) -> tuple[nn.Module, Any]:
    """A model and its optimizer after single samples, in float64."""
    row, defaults = get(name)
    model = build(SIZES, 3).double()
    optimizer = row.make(model, **{**defaults, **changed})
    for step in range(steps):
        x, y = (torch.from_numpy(part) for part in small(3).at(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        optimizer.step()
    return model, optimizer


def learned(name: str) -> torch.Tensor:
    return nn.utils.parameters_to_vector(trained(name, 15)[0].parameters()).detach()


def states(name: str, steps: int, **changed: float) -> list[dict[str, torch.Tensor]]:
    """What is kept of each layer; the first also has what is kept of the network."""
    model, optimizer = trained(name, steps, **changed)
    return [optimizer.state[weight] for weight in list(model.parameters())[::2]]


# ------------------------------------------------------------------------------- variants
def test_the_file_names_these_rules(file: dict[str, Any]) -> None:
    assert list(file["REPLACED"]) == RULES
    assert set(RULES) < set(grids.registered())


def test_nothing_replaced_is_the_champion(file: dict[str, Any]) -> None:
    file["register"]("whole")
    torch.testing.assert_close(learned("whole"), learned(CHAMPION), rtol=0, atol=0)
    file["register"]("shares", {"tune_decay": file["decay_where"]}, **file["WHERE"])
    torch.testing.assert_close(learned("shares"), learned(CHAMPION), rtol=0, atol=1e-12)
    for name in ("whole", "shares"):
        del METHODS[name], grids.GRIDS[name]


@pytest.mark.parametrize("name", RULES)
def test_every_replaced_function_matters(name: str) -> None:
    weights = learned(name)
    assert bool(weights.isfinite().all())
    assert float((weights - learned(CHAMPION)).abs().max()) > 1e-5


def test_every_other_constant_matters() -> None:
    """After more than 1/(1-β) steps of inputs so large that biases have a factor."""
    entrants = [Entrant.named(n) for n in grids.registered() if n not in (*RULES, CHAMPION)]
    assert len(entrants) == 19
    learners = [Learner(e.method, dict(e.sets[0]), 3) for e in entrants]
    learners.append(Learner(CHAMPION, {}, 3))
    digits = load("digits")
    large = replace(digits, inputs=digits.inputs.astype(np.float32))
    stack = cpu.make(learners, (64, 7, 6, 10), steps=120)
    samples = feed(learners, lambda seed: TaskStream(large, seed, 120, "inputs", flatten=True))
    cpu.run(stack, samples, (120,))
    weights = {number: stack.weights[place] for place, number in enumerate(stack.order)}
    for number, entrant in enumerate(entrants):
        assert np.isfinite(weights[number]).all(), entrant.name
        assert np.abs(weights[number] - weights[19]).max() > 1e-5, entrant.name


def test_every_variant_has_one_set() -> None:
    for name in grids.registered():
        entrant = Entrant.named(name)
        assert (entrant.name, len(entrant.sets)) == (name, 1)
        assert entrant.method == (name if name in RULES else CHAMPION)


# ------------------------------------------------------------------- what the parts do alone
def test_layers_decay_where_the_name_says() -> None:
    where = {
        CHAMPION: [1, 0, 1], "no-decay": [0, 0, 0], "no-decay-in-first": [0, 0, 1],
        "no-decay-in-head": [1, 0, 0], "decay-in-hidden": [1, 1, 1],
    }  # fmt: skip
    for name, expected in where.items():
        found = [int(kept["layers.shrink"].item() > 0) for kept in states(name, 3)]
        assert found == expected, name


def test_uncentred_layers_have_the_mean_square() -> None:
    first = states("no-centring", 2)[0]
    x = np.concatenate([small(3).at(step)[0] for step in range(2)]).astype(np.float64)
    assert not first["inputs.mean"].any()
    np.testing.assert_allclose(first["inputs.variance"].flatten(), (x**2).mean(0), atol=1e-12)


def test_signs_move_logarithms_by_their_pace() -> None:
    decays = [kept["layers.decay"].item() for kept in states("decay-by-sign", 1, pace=0.1)]
    np.testing.assert_allclose(np.abs(np.log(np.array(decays) / 0.01)), 0.1)
    # At the first step w is its slow copy, so that the target has no reason to move.
    for steps, moved in ((1, 0.0), (2, 0.1)):
        gain = states("target-by-sign", steps, pace_target=0.1)[0]["network.gain"].item()
        np.testing.assert_allclose(abs(math.log(gain)), moved, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("step-by-mean-only", lambda q, mean: 4 / mean),
        ("step-by-sample-only", lambda q, mean: 4 / q),
        ("step-of-fixed-size", lambda q, mean: 4.0),
    ],
)
def test_steps_have_the_size_that_the_name_says(
    name: str, size: Callable[[float, float], float]
) -> None:
    """At the second sample Q̄ is the mean of both Q."""
    demands = []
    for steps in (1, 2):
        kept = states(name, steps, pace_target=0.0, lr=4.0)[0]
        demands.append(kept["network.reach"].item() / kept["network.error"].item())
    mean = sum(demands) / 2
    assert demands[1] != pytest.approx(mean, rel=1e-3)
    np.testing.assert_allclose(kept["network.typical"].item(), mean)
    np.testing.assert_allclose(kept["network.step"].item(), size(demands[1], mean))


# ------------------------------------------------------------------------------ compiled
FAST = {"no-centring", "decay-by-sign"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in RULES]
)
def test_stacks_on_the_cpu_run_it(name: str) -> None:
    learner, steps = Learner(name, {}, 3), 60
    stack = cpu.make([learner], steps=steps)
    cpu.run(stack, feed([learner], cpu.digits), (1, 33, steps))
    kept: list[Any] = []
    trace = plain(learner, cpu.digits(3), steps, cpu.SIZES, kept=kept)
    compare(stack, trace, kept[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_stacks_by_triton_run_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cuda.CASES, name, {"sizes": (16, 5, 6, 10)})
    cuda.compare(name)
