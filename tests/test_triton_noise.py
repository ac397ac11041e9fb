"""Kernels that draw normal numbers against plain versions."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
interpreted = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or interpreted):
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from upgd.kernels import philox as written  # noqa: E402
from upgd.kernels.triton_noise import fill_normal  # noqa: E402
from upgd.kernels.triton_random import four_normals  # noqa: E402

DEVICE = "cpu" if interpreted else "cuda"
MASK = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x32 with ten rounds, as published."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & MASK, (a >> 32) ^ c[3] ^ k[1], a & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def test_plain_philox_has_the_published_answers() -> None:
    """Known answers of Random123's philox4x32-10."""
    assert philox((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = (MASK,) * 4
    assert philox(ones, ones[:2]) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def uniform(x: int) -> float:
    signed = x - (1 << 32) if x >> 31 else x
    return float((-signed - 1 if signed < 0 else signed) * 4.6566127342e-10)


def expected(n: int, seed: int, step: int) -> np.ndarray:
    numbers: list[float] = []
    for i in range((n + 3) // 4):
        words = philox((i, 0, step & MASK, step >> 32), (seed & MASK, seed >> 32))
        for a, b in (words[:2], words[2:]):
            radius = math.sqrt(-2 * math.log(max(uniform(a), 1e-7)))
            angle = 2 * math.pi * uniform(b)
            numbers += [radius * math.cos(angle), radius * math.sin(angle)]
    return np.array(numbers[:n])


@pytest.mark.parametrize("seed", [0, 12345678901234567, 2**63 + 5])
@pytest.mark.parametrize("step", [0, 1, 2**33 + 7])
def test_kernel_equals_the_plain_version(seed: int, step: int) -> None:
    out = torch.full((1027,), torch.nan, device=DEVICE)
    fill_normal(out, seed, torch.tensor(step, device=DEVICE))
    np.testing.assert_allclose(out.cpu().numpy(), expected(1027, seed, step), rtol=2e-4, atol=2e-5)


@pytest.mark.skipif(interpreted, reason="the interpreter is too slow for a million numbers")
def test_kernel_is_standard_normal() -> None:
    stats = pytest.importorskip("scipy.stats")
    n = 10**6
    draws = []
    for step in (0, 1):
        out = torch.empty(n, device=DEVICE)
        fill_normal(out, 9, torch.tensor(step, device=DEVICE))
        draws.append(out.double().cpu())
        assert stats.kstest(draws[-1].numpy(), "norm").pvalue > 1e-4
        assert abs(float(draws[-1].mean())) < 4 / math.sqrt(n)
        assert abs(float(draws[-1].var()) - 1) < 4 * math.sqrt(2 / n)
    assert abs(float(torch.corrcoef(torch.stack(draws))[0, 1])) < 4.5 / math.sqrt(n)


# --------------------------------------------------------------- the written generator
@triton.jit  # type: ignore[untyped-decorator]
def _four_kernel(out, seeds, tensor, clock, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    quad = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    step = tl.load(clock) + (quad * 0).to(tl.int64)
    many = four_normals(tl.load(seeds), quad, (quad * 0 + tensor), step, tl.float32)
    tl.store(out + quad, many[0], mask=quad < n)
    tl.store(out + n + quad, many[1], mask=quad < n)
    tl.store(out + 2 * n + quad, many[2], mask=quad < n)
    tl.store(out + 3 * n + quad, many[3], mask=quad < n)


@pytest.mark.parametrize("step", [5, 2**33 + 7])
def test_the_written_generator_in_kernels(step: int) -> None:
    """To a few 1e-7, but near radius 0, where the special function unit's logarithm is coarse.

    Its error is at most 2⁻²² near 1, so that of the square of a radius r at most 4e-7 together with
    the rounding of the uniform number, and that of r about 2e-7 / r.
    """
    n = 1_000 if interpreted else 1_000_000
    out = torch.full((4, n), torch.nan, device=DEVICE)
    seed, clock = (torch.tensor([x], device=DEVICE) for x in (17, step))
    _four_kernel[(triton.cdiv(n, 256),)](out, seed, 3, clock, n, BLOCK=256)
    plain = written.normal((4, n), 17, 3, step, dtype=torch.float64)
    for pair in (slice(0, 2), slice(2, 4)):
        radius = plain[pair].square().sum(0).sqrt()
        error = (out[pair].cpu().double() - plain[pair]).abs().amax(0)
        assert float((error / (1e-6 * radius + 4e-7 / radius.clamp_min(1e-9))).max()) < 1
        assert float(error[radius > 1].max()) < 3e-6
