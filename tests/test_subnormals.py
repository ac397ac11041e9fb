"""Compiled CPU kernels take subnormal numbers for zero where that is what makes them slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("numba")

from upgd import UPGD
from upgd.engine.dense import Learner
from upgd.engine.dense_cpu import CpuStack
from upgd.engine.feed import Chunk
from upgd.kernels.layout import Layout
from upgd.kernels.subnormals import HAS_SWITCH
from upgd.optim.ada_upgd import AdamW

STEPS = 136  # 2⁻¹²⁶ is the least normal number, 2⁻¹⁴⁹ the least
TINY = np.finfo(np.float32).tiny
HALVED = {"beta_utility": 0.5}


def step_until_traces_fade(
    kind: type[Any] = UPGD, fused: bool = True, **options: Any
) -> np.ndarray:
    """A method's traces, which are halved at each step, after one gradient."""
    weights = nn.Parameter(torch.linspace(0.5, 0.9, 64).reshape(4, 16))
    optimizer = kind([weights], lr=1e-3, fused=fused, **options)
    for step in range(STEPS):
        weights.grad = torch.full_like(weights, float(step == 0))
        optimizer.step()
    states = optimizer.state[weights].values()
    return np.stack([state.numpy() for state in states if state.shape == weights.shape])


def learn_until_traces_fade() -> np.ndarray:
    """Traces of the first layer, whose inputs are zero but for the first sample's."""
    layout = Layout((16, 5, 3))
    stack = CpuStack(
        layout,
        [Learner("upgd", {"lr": 1e-3, "sigma": 0.0, "beta_utility": 0.5}, 0)],
        activation="relu",
        loss="cross_entropy",
        steps=STEPS,
        window=STEPS,
        threads=1,
    )
    index = np.ones((1, STEPS + 1), np.int32)
    index[0, 0] = 0
    inputs = np.stack([np.ones(16), np.zeros(16)]).astype(np.float32)
    labels = np.zeros((1, STEPS + 1), np.int32)
    stack.advance(Chunk(STEPS, labels=labels, table=inputs, index=index))
    return stack.states[0]


def subnormal(values: np.ndarray) -> int:
    bits = np.ascontiguousarray(values).view(np.uint32) & 0x7FFFFFFF  # no arithmetic
    return int(((bits > 0) & (bits < 0x00800000)).sum())


def flushes() -> bool:
    """Whether this thread takes such numbers for zero now."""
    return bool(np.float32(TINY) * np.float32(0.5) == 0)


WORKS: dict[str, Callable[[], np.ndarray]] = {
    "step": lambda: step_until_traces_fade(sigma=0.0, **HALVED),
    "step with noise": lambda: step_until_traces_fade(sigma=0.1, **HALVED),
    "step, local": lambda: step_until_traces_fade(sigma=0.0, scaling="local", **HALVED),
    "step without η": lambda: step_until_traces_fade(AdamW, betas=(0.5, 0.5)),
    "learner": learn_until_traces_fade,
}


@pytest.fixture(params=[False, True], ids=["ieee", "flushing"])
def setting(request: pytest.FixtureRequest) -> Iterator[bool]:
    """What a user has chosen for this thread."""
    if not torch.set_flush_denormal(request.param) and request.param:
        pytest.skip("this processor has no such setting")
    yield request.param
    torch.set_flush_denormal(False)


def test_plain_steps_have_such_traces() -> None:
    assert subnormal(step_until_traces_fade(fused=False, sigma=0.0, **HALVED)) == 64


@pytest.mark.parametrize("name", WORKS)
def test_traces_that_fade_become_zero(name: str) -> None:
    values = WORKS[name]()
    assert (subnormal(values) == 0) is HAS_SWITCH
    assert np.isfinite(values).all()


@pytest.mark.parametrize("name", WORKS)
def test_a_users_setting_is_given_back(name: str, setting: bool) -> None:
    assert flushes() is setting
    WORKS[name]()
    assert flushes() is setting
