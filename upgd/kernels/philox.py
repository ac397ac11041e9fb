"""Random numbers of a run: the specification of the generator, and its reference version.

Every perturbation is a function of four integers, so it does not matter which engine draws it,
in which order, or how often a run was interrupted. Engines have their own versions; tests compare
them with this one.

**Bits.** Philox4x32 with seven rounds [1]_, the fewest that pass every test of TestU01's BigCrush
there. The key is the run's seed, low word first. The counter is
``(quad, tensor, step, step >> 32)``. Four words come out.

**Which number.** A parameter tensor with ``n`` rows (its first dimension) of ``m`` values each is
cut into four spans of ``ceil(n / 4)`` rows. Value ``quad`` of span ``lane`` takes number ``lane``
of the four that the counter ``quad`` gives. So a kernel works on four rows at once and discards no
numbers, and padding does not change a number.

**Normals.** Words 0 and 1 make the numbers 0 and 1 by Box and Muller's transform, words 2 and 3
the other two: ``u = (word + ½) / 2³²`` for the radius ``sqrt(-2 log u)``, the other word as an
angle in units of 2⁻³² turns. Logarithm, sine and cosine are the polynomials below, in the
arithmetic of the run (float32 or float64), so they vectorise. Their errors, at most 3e-8, are
below float32's rounding. The largest number is 6.8.

**Rounding.** Draw ``d`` of random bits has the key of the run's seed with ``ROUNDING + d`` added to
its high word; number ``lane`` of a counter is word ``lane`` as it is.

.. [1] Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3. SC 2011.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDING = 0x5EED0B17
"""See **Rounding** above."""
_MASK = 0xFFFFFFFF

LOG = (
    *(-0.49999982, 0.33333933, -0.25002584, 0.19963478),
    *(-0.16551788, 0.14883684, -0.14426877, 0.08979523),
)
"""``log(1+m) ≈ m + m²·Σ LOG[k]·mᵏ`` for √½ ≤ 1+m ≤ √2, to 3e-8 of m."""
SIN = (-0.16666654943681805, 0.008332178145231477, -0.00019517298882254283)
"""``sin a ≈ a + a³·Σ SIN[k]·a²ᵏ`` for ``|a| ≤ π/4``."""
COS = (-0.49999894781196713, 0.0416562945702492, -0.0013597823021786362)
"""``cos a ≈ 1 + a²·Σ COS[k]·a²ᵏ`` for ``|a| ≤ π/4``."""
ROUND_EXPONENT = 0x004AFB0D
"""Added to a float32's bits, carries into the exponent where the mantissa exceeds √2."""


AHEAD = 64
"""Steps whose numbers are drawn at once at most: for few weights the calls take all the time."""
MOST_AHEAD = 1 << 17
"""Numbers that are drawn at once, unless a step has more."""


def steps_ahead(numbers: int) -> int:
    """How many steps of so many numbers are drawn at once.

    >>> steps_ahead(100), steps_ahead(50_000), steps_ahead(10**7)
    (64, 2, 1)
    """
    return max(1, min(AHEAD, MOST_AHEAD // max(1, numbers)))


def philox4x32(
    counter: Sequence[Tensor], key: tuple[Any, Any], rounds: int = ROUNDS
) -> list[Tensor]:
    """Four words for each counter; int64 tensors that hold 32-bit words.

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [f"{int(word):08x}" for word in philox4x32([zero] * 4, (0, 0))]
    ['5f6fb709', '0d893f64', '4f121f81', '4f730a48']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # The product wraps around as signed 64 bits; its two halves are still correct.
        low, high = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            ((high >> 32) & _MASK) ^ c1 ^ k0,
            high & _MASK,
            ((low >> 32) & _MASK) ^ c3 ^ k1,
            low & _MASK,
        )
        k0, k1 = (k0 + WEYL[0]) & _MASK, (k1 + WEYL[1]) & _MASK
    return [c0, c1, c2, c3]


def box_muller(radius: Tensor, angle: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two normal numbers for each pair of words."""
    # u = m·2ᵉ⁻³² with the exponent from the bits of a float32, whatever the dtype.
    bits = (radius.to(torch.float32) + 0.5).view(torch.int32)
    exponent = ((bits + ROUND_EXPONENT) >> 23) - 127
    scale = ((127 - exponent) << 23).view(torch.float32).to(dtype)
    m = (radius.to(dtype) + 0.5) * scale - 1
    logarithm = (exponent - 32).to(dtype) * math.log(2) + (m + m * m * _polynomial(LOG, m))
    length = (-2 * logarithm).clamp_min(0).sqrt()
    # An angle is a number of quarter turns and a rest of at most an eighth turn.
    quarter = ((angle + (1 << 29)) >> 30) & 3
    rest = angle - (quarter << 30)
    rest = torch.where(rest >= 1 << 31, rest - (1 << 32), rest)
    a = rest.to(dtype) * (2 * math.pi / 2**32)
    square = a * a
    sine = a + a * square * _polynomial(SIN, square)
    cosine = 1 + square * _polynomial(COS, square)
    odd = (quarter & 1) == 1
    first, second = torch.where(odd, sine, cosine), torch.where(odd, cosine, sine)
    first = torch.where((quarter == 1) | (quarter == 2), -first, first)
    second = torch.where(quarter >= 2, -second, second)
    return length * first, length * second


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value


def normal(
    shape: Sequence[int],
    seed: int | Tensor,
    tensor: int,
    step: int | Tensor,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The perturbations of one parameter tensor at one step, standard normal.

    Args:
        shape: Of the parameter.
        seed: Of the run, in [0, 2⁶⁴); or an int64 tensor of R seeds, for R times `shape`.
        tensor: The parameter's number in its model.
        step: From 0 on; with R seeds, it may be a tensor [R, 1].
        device: Where the numbers are made.
        dtype: float32 or float64.

    >>> normal((5, 3), seed=1, tensor=0, step=7).shape
    torch.Size([5, 3])
    """
    rows = shape[0] if len(shape) else 1
    width = math.prod(shape[1:])
    quad = torch.arange(-(-rows // 4) * width, device=device)
    many = isinstance(seed, Tensor)
    if isinstance(seed, Tensor):
        quad, seed = quad.unsqueeze(0), seed.unsqueeze(1)
    zero = torch.zeros_like(quad)
    counter = [quad, zero + tensor, zero + (step & _MASK), zero + ((step >> 32) & _MASK)]
    a, b, c, d = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
    numbers = (*box_muller(a, b, dtype), *box_muller(c, d, dtype))
    found = torch.cat(numbers, dim=-1)[..., : rows * width]
    return found.reshape((*found.shape[:-1], *shape) if many else tuple(shape))
