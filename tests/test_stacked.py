"""What is measured of a stack's networks between chunks is what each network has by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.cases import needs_cuda
from upgd.engine import Setting
from upgd.engine.batched import BatchedRun
from upgd.engine.feed import HeldOut
from upgd.engine.stacked import Networks
from upgd.monitor import measures
from upgd.networks import build
from upgd.streams import get

METHODS = ("upgd", "sgd", "s-ewc", "upgd", "adamw", "upgd", "sgd")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


def stack_of(methods: tuple[str, ...], device: str = "cpu") -> BatchedRun:
    """A run after some steps; runs of one method lie together, so that their order is another."""
    problem = get("label-permuted-digits")
    settings = [Setting(name, {"lr": 0.01}, seed, window=5) for seed, name in enumerate(methods)]
    streams = [problem.make(setting.seed) for setting in settings]
    run = BatchedRun(problem, settings, streams, steps=20, device=device)
    run.advance(20)
    return run


def models(run: BatchedRun) -> list[nn.Module]:
    """Each run's network, built of what a checkpoint has of it."""
    found = []
    for number in range(len(run.settings)):
        weights = torch.from_numpy(np.asarray(run.state(number)[0]["weights"]))
        if hasattr(run.stack, "layout"):
            weights = weights[torch.from_numpy(run.stack.layout.places)]
        model = build(run.problem.network, 0, run.problem.activation)
        nn.utils.vector_to_parameters(weights, model.parameters())
        found.append(model)
    return found


def samples(run: BatchedRun, count: int = 60) -> HeldOut:
    return run.feed.held_out(3, count)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("together", [1, 3, 7, 32])
def test_each_networks_own(together: int, device: str) -> None:
    run = stack_of(METHODS, device)
    networks = Networks(run.problem, run.stack, together)
    norms, ranks, shares = measured(networks, samples(run))
    for number, model in enumerate(models(run)):
        flat = nn.utils.parameters_to_vector(model.parameters()).detach().double()
        assert norms[number] == pytest.approx([float(flat.abs().sum()), float(flat.norm())])
        assert ranks[number] == pytest.approx(measures.mean_effective_rank(model), rel=1e-5)
        x, y = run.streams[number].held_out(3, 60)
        right = model(torch.from_numpy(x)).argmax(1).numpy() == y
        assert shares[number] == pytest.approx(right.mean())
    assert len(set(shares)) > 1
    assert networks.size == len(flat)


def measured(networks: Networks, held_out: HeldOut) -> tuple[Any, list[float], list[float]]:
    return networks.norms(), networks.ranks_later()(), networks.accuracy(held_out)


@pytest.mark.parametrize("device", DEVICES)
def test_no_bit_depends_on_the_size_of_the_stack(device: str) -> None:
    whole, part = stack_of(METHODS, device), stack_of(METHODS[:4], device)
    all_, some = (measured(run.networks, samples(run)) for run in (whole, part))
    for one, other in zip(all_, some, strict=True):
        assert list(map(tuple, np.atleast_2d(one[:4]))) == list(map(tuple, np.atleast_2d(other)))


def test_ranks_are_of_the_weights_at_the_time() -> None:
    run = stack_of(METHODS[:2])
    before, later = run.networks.ranks_later()(), run.networks.ranks_later()
    torch.as_tensor(run.stack.weights).zero_()
    assert later() == before
    assert run.networks.ranks_later()() == [0.0, 0.0]
