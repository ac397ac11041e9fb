"""The written generator: published answers, distinct counters, the normal distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from upgd.kernels.philox import box_muller, normal, philox4x32
from upgd.optim.noise import PhiloxNoise

MASK = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)


@pytest.mark.parametrize(
    ("rounds", "inputs", "answer"),
    [
        (7, (0,) * 6, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (7, (MASK,) * 6, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (7, PI, "4dfccaba 190a87f0 c47362ba b6b5242a"),
        (10, (0,) * 6, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (10, (MASK,) * 6, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (10, PI, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_published_answers(rounds: int, inputs: tuple[int, ...], answer: str) -> None:
    """Random123's known answers for philox4x32."""
    counter = [torch.tensor(word) for word in inputs[:4]]
    words = philox4x32(counter, (inputs[4], inputs[5]), rounds)
    assert " ".join(f"{int(word):08x}" for word in words) == answer


def test_box_muller_is_the_transform_it_approximates() -> None:
    words = torch.arange(0, 2**32, 2**18 + 1)
    radius, angle = words, words.flip(0)
    u = (radius.double() + 0.5) / 2**32
    length, turn = (-2 * u.log()).sqrt(), angle.double() / 2**32 * 2 * math.pi
    first, second = box_muller(radius, angle, torch.float64)
    assert (first - length * turn.cos()).abs().max() < 2e-7
    assert (second - length * turn.sin()).abs().max() < 2e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_words_give_finite_numbers(dtype: torch.dtype) -> None:
    words = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])
    a, b = (x.flatten() for x in torch.meshgrid(words, words, indexing="ij"))
    for numbers in box_muller(a, b, dtype):
        assert numbers.isfinite().all()
        assert numbers.abs().max() < 6.8


def test_float32_is_float64_rounded() -> None:
    narrow, wide = (normal((400, 50), 1, 0, 9, dtype=d) for d in (torch.float32, torch.float64))
    assert (narrow.double() - wide).abs().max() < 1e-4  # near u = 1 the radius has few digits
    assert (narrow.double() - wide).abs().mean() < 1e-7


@pytest.mark.parametrize("shape", [(), (1,), (5,), (8, 3), (10, 7), (3, 2, 5, 5)])
def test_every_weight_has_a_counter_of_its_own(shape: tuple[int, ...]) -> None:
    """Written from the specification, weight by weight; no two share word and counter."""
    rows, width = (shape[0] if shape else 1), math.prod(shape[1:])
    span = -(-rows // 4) * width
    found = normal(shape, seed=5, tensor=2, step=2**33 + 1, dtype=torch.float64).flatten()
    used = set()
    for e in range(rows * width):
        lane, quad = divmod(e, span)
        used.add((lane, quad))
        counter = [torch.tensor(w) for w in (quad, 2, 1, 2)]
        words = philox4x32(counter, (5, 0))
        pair = words[:2] if lane < 2 else words[2:]
        assert float(box_muller(*pair, torch.float64)[lane % 2]) == float(found[e])
    assert len(used) == rows * width


def test_numbers_are_normal() -> None:
    """Ten million of them against the distribution function."""
    numbers = torch.cat([normal((2000, 1000), 3, 1, s).flatten() for s in range(5)]).numpy()
    sample = np.sort(numbers.astype(np.float64))
    positions = np.arange(1, len(sample) + 1) / len(sample)
    statistic = np.abs(stats.norm.cdf(sample) - positions).max()
    assert stats.kstwobign.sf(statistic * math.sqrt(len(sample))) > 1e-3
    assert abs(stats.kurtosis(sample)) < 0.02
    # Wrong numbers would be noticed: a hundredth too wide.
    wide = np.abs(stats.norm.cdf(1.01 * sample) - positions).max()
    assert stats.kstwobign.sf(wide * math.sqrt(len(sample))) < 1e-6


def test_steps_parameters_and_seeds_are_uncorrelated() -> None:
    base = {"seed": 11, "tensor": 0, "step": 1000}
    others = [{**base, k: v} for k, v in (("seed", 12), ("seed", 11 + 2**32), ("tensor", 1))]
    others += [{**base, "step": s} for s in (999, 1001, 1000 + 2**32)]
    count = 300_000
    first = normal((4, count // 4), **base).flatten().numpy()
    for other in others:
        second = normal((4, count // 4), **other).flatten().numpy()
        correlation = float(np.corrcoef(first, second)[0, 1])
        assert abs(correlation) < 5 / math.sqrt(count), other
    shifted = float(np.corrcoef(first[1:], first[:-1])[0, 1])
    assert abs(shifted) < 5 / math.sqrt(count)


def test_many_seeds_at_once_are_each_alone() -> None:
    seeds = torch.tensor([0, 7, 2**62])
    together = normal((6, 4), seeds, 3, torch.tensor(17))
    for row, seed in zip(together, seeds.tolist(), strict=True):
        assert torch.equal(row, normal((6, 4), seed, 3, 17))


def test_an_optimizers_noise_is_the_generators() -> None:
    shapes = [(5, 3), (5,), (2, 5), (2,)]
    sizes = [15, 5, 10, 2]
    noise = PhiloxNoise(shapes, first=100)
    drawn = noise.draw(
        [10, 5], [20, 15], seed=4, step=3, device=torch.device("cpu"), dtype=torch.float32
    )
    expected = [normal((2, 5), 4, 2, 103).flatten(), normal((5,), 4, 1, 103)]
    assert torch.equal(drawn, torch.cat(expected))
    assert sum(sizes) == 32


def test_numbers_drawn_ahead_are_those_of_each_step() -> None:
    """Whatever the order of the steps, and whatever was done with the numbers before."""
    noise = PhiloxNoise([(5, 3), (4,)], first=2)
    device = torch.device("cpu")
    for dtype in (torch.float32, torch.float64):
        for seed, step in ((9, 3), (9, 4), (9, 3), (8, 4), (9, 200), (9, 66), (9, 2**33)):
            args = {"seed": seed, "step": step, "device": device, "dtype": dtype}
            drawn = noise.draw([15, 4], [0, 15], **args)
            parts = [
                normal(s, seed, i, step + 2, dtype=dtype) for i, s in enumerate([(5, 3), (4,)])
            ]
            assert torch.equal(drawn, torch.cat([part.flatten() for part in parts]))
            tensor = noise.draw([15, 4], [0, 15], **{**args, "step": torch.tensor(step)})
            assert torch.equal(drawn, tensor)
            drawn.zero_()


def test_steps_of_many_seeds_at_once() -> None:
    seeds, steps = torch.tensor([3, 4, 3]), torch.tensor([[7], [7], [2**32]])
    together = normal((6, 4), seeds, 3, steps)
    for row, seed, step in zip(together, seeds.tolist(), steps.flatten().tolist(), strict=True):
        assert torch.equal(row, normal((6, 4), seed, 3, step))
