"""The comparison with the plain loop bites: each deliberate error in a stack is noticed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.stacks import Trace, feed, plain, small
from upgd.engine import feed as feed_module
from upgd.engine import general
from upgd.engine.dense import Learner
from upgd.engine.general import GeneralStack
from upgd.kernels import philox
from upgd.networks import build
from upgd.rules.vocabulary import Method

Patch = Callable[[pytest.MonkeyPatch], None]
SIZES = (16, 5, 4, 10)
STEPS = 8
METHODS = ("upgd", "upgd-local", "s-si", "adamw", "n-upgd")
HYPER = {"upgd": {"sigma": 0.1, "weight_decay": 0.1}, "n-upgd": {"sigma": 0.1}}


@cache
def expected() -> list[Trace]:
    return [plain(learner, small(3), STEPS, SIZES) for learner in learners()]


def learners() -> list[Learner]:
    return [Learner(name, HYPER.get(name, {}), 3) for name in METHODS]


def compare() -> None:
    """A stack in float64 against the plain loop: weights, loss, plasticity, right guesses."""
    traces = expected()
    mine = learners()
    stack = GeneralStack(
        lambda seed, task: build(SIZES, seed, "relu", task),
        mine,
        loss="cross_entropy",
        steps=STEPS,
        window=1,
        shape=(16,),
        dtype=torch.float64,
    )
    samples = feed(mine, small)
    for start, steps in ((0, 3), (3, 2), (5, 3)):
        stack.advance(samples.chunk(start, steps))
    for place, run in enumerate(stack.order):
        trace = traces[run]
        np.testing.assert_allclose(stack.weights[place].numpy(), trace.weights, atol=1e-9)
        for column, values in enumerate((trace.losses, trace.plasticity, trace.right)):
            np.testing.assert_allclose(stack.series[place, :, column], values, atol=1e-9)


def columns(change: Callable[[Any, Any], tuple[Any, Any]]) -> Patch:
    """Another table of hyperparameters and decays."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        original = general.tables
        patch.setattr(general, "tables", lambda *given: change(*original(*given)))

    return apply


def swapped(hyper: Any, decays: Any) -> tuple[Any, Any]:
    hyper[..., [0, 1]] = hyper[..., [1, 0]]
    return hyper, decays


def uncorrected(hyper: Any, decays: Any) -> tuple[Any, Any]:
    return hyper, decays * 0


def first_decay_for_all(hyper: Any, decays: Any) -> tuple[Any, Any]:
    return hyper, np.repeat(decays[..., :1], decays.shape[-1], -1)


def another_runs(hyper: Any, decays: Any) -> tuple[Any, Any]:
    return np.roll(hyper, 1, 0), decays


def noise(**changes: Callable[[Any], Any]) -> Patch:
    """The numbers of another seed, tensor or step."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        original = philox.normal

        def other(shape: Any, seed: Any, tensor: Any, step: Any, *rest: Any) -> Any:
            asked = {"seed": seed, "tensor": tensor, "step": step}
            asked = {name: changes.get(name, lambda v: v)(value) for name, value in asked.items()}
            return original(shape, asked["seed"], asked["tensor"], asked["step"], *rest)

        patch.setattr(general.philox, "normal", other)

    return apply


def scale(change: Callable[[Any, Any, Any], Any]) -> Patch:
    """Another η."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        original = GeneralStack._eta

        def other(self: Any, phase: Any, trace: Any) -> Any:
            return change(phase, trace, original(self, phase, trace))

        patch.setattr(GeneralStack, "_eta", other)

    return apply


def bias_rows(patch: pytest.MonkeyPatch) -> None:
    """Each bias a row of its own."""

    def other(shapes: Any, device: Any) -> torch.Tensor:
        return torch.cat(
            [
                1000 * i + torch.arange(s[0]).repeat_interleave(int(np.prod(s[1:])))
                for i, s in enumerate(shapes)
            ]
        )

    patch.setattr(general, "_row_numbers", other)


def samples(change: Callable[[Any], dict[str, Any]]) -> Patch:
    """Another chunk."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        from dataclasses import replace

        original = feed_module.Feed.chunk

        def other(self: Any, start: int, steps: int) -> Any:
            chunk = original(self, start, steps)
            return replace(chunk, **change(chunk))

        patch.setattr(feed_module.Feed, "chunk", other)

    return apply


def begins_at_zero(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Method, "starts_as_weight", frozenset(), raising=False)
    original = GeneralStack.restart

    def other(self: Any, task: int) -> None:
        original(self, task)
        for states in self.states:
            states.zero_()

    patch.setattr(GeneralStack, "restart", other)


def clock_stands_still(patch: pytest.MonkeyPatch) -> None:
    original = GeneralStack._learn

    def other(self: Any, measured: bool = False) -> None:
        original(self, measured)
        self.clock[0] -= self.clock[0] % 2

    patch.setattr(GeneralStack, "_learn", other)


def updates_twice(patch: pytest.MonkeyPatch) -> None:
    original = GeneralStack._update

    def other(self: Any, group: Any, states: Any) -> None:
        original(self, group, states)
        if group.row.name == "adamw":
            original(self, group, states)

    patch.setattr(GeneralStack, "_update", other)


def a_neighbours_gradient(patch: pytest.MonkeyPatch) -> None:
    original = torch.autograd.grad

    def other(*args: Any, **kwargs: Any) -> Any:
        return [g.roll(1, 0) for g in original(*args, **kwargs)]

    patch.setattr(general.torch.autograd, "grad", other)


MUTANTS: dict[str, Patch] = {
    "hyperparameters swapped": columns(swapped),
    "hyperparameters of another run": columns(another_runs),
    "no bias correction": columns(uncorrected),
    "one decay for all states": columns(first_decay_for_all),
    "noise of another seed": noise(seed=lambda s: s + 1),
    "noise of another step": noise(step=lambda s: s + 1),
    "noise of the first tensor everywhere": noise(tensor=lambda t: 0),
    "eta halved": scale(lambda phase, trace, eta: eta / 2),
    "eta over all runs": scale(
        lambda phase, trace, eta: eta.amax().expand_as(eta) if phase.reduce == "max" else eta * 2
    ),
    "eta of the smallest": scale(
        lambda phase, trace, eta: (
            trace.amin(1, keepdim=True).abs() if phase.reduce == "max" else eta
        )
    ),
    "a row per bias": bias_rows,
    "the sample before": samples(lambda c: {"index": np.roll(c.index, 1, 1)}),
    "the label after": samples(lambda c: {"labels": np.roll(c.labels, -1, 1)}),
    "the other task's permutation": samples(lambda c: {"slots": 1 - c.slots}),
    "no permutation": samples(lambda c: {"permutations": np.sort(c.permutations, -1)}),
    "states begin at zero": begins_at_zero,
    "the clock stands still": clock_stands_still,
    "one update too many": updates_twice,
    "a neighbour's gradient": a_neighbours_gradient,
}


def test_the_stack_passes() -> None:
    compare()


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected()  # before anything is broken
    MUTANTS[name](monkeypatch)
    with pytest.raises(AssertionError):
        compare()
