"""The default noise: normal, fresh at every step, and a function of integers alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.cases import every_device
from upgd import UPGD
from upgd.optim.noise import GeneratorNoise, generator_seed, mix64

stats = pytest.importorskip("scipy.stats")

N = 10**6


def draw(n: int = N, seed: int = 0, step: int = 0, offset: int = 0, device: str = "cpu") -> Tensor:
    where = torch.device(device)
    source = GeneratorNoise()
    return source.draw([n], [offset], seed=seed, step=step, device=where, dtype=torch.float32)


@every_device
@pytest.mark.parametrize("seed", [0, 1, 2**62])
def test_is_standard_normal(seed: int, device: str) -> None:
    x = draw(seed=seed, step=12, device=device).cpu().double()
    assert stats.kstest(x.numpy(), "norm").pvalue > 1e-4
    assert abs(float(x.mean())) < 4 / math.sqrt(N)
    assert abs(float(x.var()) - 1) < 4 * math.sqrt(2 / N)
    assert abs(float((x**3).mean())) < 4 * math.sqrt(15 / N)


@every_device
def test_no_correlation_across_steps_parameters_or_seeds(device: str) -> None:
    base = draw(device=device).cpu().double()
    others = {
        "next step": draw(step=1, device=device),
        "far step": draw(step=10**6, device=device),
        "next seed": draw(seed=1, device=device),
        "other place": draw(offset=64, device=device),
        "shifted by one": torch.roll(base, 1),
        "shifted by sixteen": torch.roll(base, 16),
    }
    for name, other in others.items():
        correlation = torch.corrcoef(torch.stack([base, other.cpu().double()]))[0, 1]
        assert abs(float(correlation)) < 4.5 / math.sqrt(N), name


@every_device
def test_the_same_question_has_the_same_answer(device: str) -> None:
    assert torch.equal(draw(1000, 3, 4, 5, device), draw(1000, 3, 4, 5, device))


def test_steps_never_collide_within_a_run() -> None:
    """The CPU generator keeps 32 bits of its seed: they must be a bijection of the step."""
    steps = range(200_000)
    seeds = {generator_seed(17, step) & 0xFFFFFFFF for step in steps}
    assert len(seeds) == len(steps)
    keys = {generator_seed(seed, 0) >> 32 for seed in range(1000)}
    assert len(keys) == 1000
    assert len({mix64(x) for x in range(100_000)}) == 100_000


@pytest.mark.parametrize("count", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_runs_share_no_stretch_of_noise(count: int) -> None:
    """Two seeds may meet by chance at single steps, as any two draws of 32 bits do."""
    steps = range(1 << 16)
    runs = [{generator_seed(seed, t) & 0xFFFFFFFF for t in steps} for seed in range(40, 40 + count)]
    for i, a in enumerate(runs):
        for b in runs[:i]:
            assert len(a & b) < 20  # one is expected


@every_device
@pytest.mark.parametrize("foreach", [True, False])
def test_weights_receive_independent_noise(device: str, foreach: bool) -> None:
    """Through a whole step: with zero gradients and utilities, weights move by -α·ξ."""
    sizes = [(400, 500), (300,), (200, 100)]
    params = [torch.nn.Parameter(torch.zeros(s, device=device)) for s in sizes]
    opt = UPGD(params, lr=0.5, sigma=2.0, seed=5, foreach=foreach)
    moves = []
    for _ in range(2):
        for p in params:
            p.data.zero_()
            p.grad = torch.zeros_like(p)
        opt.step()
        moves.append(torch.cat([p.detach().flatten() for p in params]).cpu().double())
    for move in moves:  # the standard deviation is α·σ = 1
        assert stats.kstest(move.numpy(), "norm").pvalue > 1e-4
    count = moves[0].numel()
    assert abs(float(torch.corrcoef(torch.stack(moves))[0, 1])) < 4.5 / math.sqrt(count)
    a, b = moves[0][:20_000], moves[0][-20_000:]
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 4.5 / math.sqrt(20_000)
