"""How float32 results are kept in 16 bits.

Arithmetic is done in float32. To be stored in 16 bits, a result is rounded: to the nearest number,
or *stochastically*, to one of its two neighbours with probabilities that make it right on average.
To the nearest, a step of less than half a unit in the last place is lost: a bfloat16 weight stands
still where ``|step| < 2⁻⁹·|w|``, and a trace with ``β > 0.998`` stops decaying.

The random bits are those of :mod:`upgd.kernels.philox` under keys of their own: for the weight, its
number among the parameters' weights and the step they are always the same, on every path. A word
of 32 bits serves two tensors: weights and the first state take the two halves of draw 0, the second
and the third state those of draw 1, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from upgd.optim.noise import PhiloxNoise

Rounding: TypeAlias = Literal["nearest", "stochastic"]

BITS = {torch.bfloat16: 16, torch.float16: 13}
"""The bits of a float32 that a 16-bit type drops."""
_LARGEST = {torch.bfloat16: 0x7F7F0000, torch.float16: 0x477FE000}
_INFINITE = {torch.bfloat16: 0x7F800000, torch.float16: 0x47800000}
_SMALLEST_NORMAL = 2.0**-14  # of float16; bfloat16 has float32's exponents


def stochastic(x: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 numbers to a 16-bit type, up or down at random.

    A number that the type has stays what it is; so do infinities and NaN. What lies beyond the
    type's largest number becomes that number, or infinity where rounding to the nearest overflows
    by more than one unit, too.

    Args:
        x: float32.
        bits: int32 numbers in [0, 2¹⁶), uniform.
        dtype: ``torch.bfloat16`` or ``torch.float16``.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 1.0 + 2**-9, -3.0e38])
        >>> low, high = torch.zeros(3, dtype=torch.int32), torch.full((3,), 65535).int()
        >>> stochastic(x, low, torch.bfloat16)[1] == 1, stochastic(x, high, torch.bfloat16)[1] > 1
        (tensor(True), tensor(True))
    """
    dropped = BITS[dtype]
    bits = bits >> (16 - dropped)
    shift: Tensor | None = None
    if dtype == torch.float16:  # below its normal numbers, neighbours are 2⁻²⁴ apart
        shift = torch.copysign(torch.full_like(x, _SMALLEST_NORMAL), x)
        shift = torch.where(x.abs() < _SMALLEST_NORMAL, shift, torch.zeros_like(x))
        x = x + shift
    pattern = x.view(torch.int32)
    kept = ~((1 << dropped) - 1)
    rounded = (pattern + bits) & kept
    magnitude = pattern & 0x7FFFFFFF
    over = ((rounded & 0x7FFFFFFF) > _LARGEST[dtype]) & (magnitude < _INFINITE[dtype])
    largest = (pattern & ~0x7FFFFFFF) | _LARGEST[dtype]
    rounded = torch.where(over, largest, rounded)
    # Infinities and NaN; for float16, finite numbers that overflow.
    rounded = torch.where(magnitude < _INFINITE[dtype], rounded, pattern)
    found = rounded.view(torch.float32)
    return (found if shift is None else found - shift).to(dtype)


def rounding_bits(
    source: PhiloxNoise,
    offsets: Sequence[int],
    slots: Iterable[int],
    *,
    seed: int,
    step: int | Tensor,
    device: torch.device,
) -> dict[int, Tensor]:
    """For each of `slots`, 16 bits for every weight of the parameters at `offsets`, end to end.

    Slot 0 is the weights', the next ones are those of the method's states in order.

    Args:
        source: Knows where the weights of all parameters are.
        offsets: As in :meth:`PhiloxNoise.draw`.
        slots: What is rounded.
        seed: From the optimizer's state dict.
        step: How many steps came before.
        device: Where the bits must be.
    """
    found: dict[int, Tensor] = {}
    draws: dict[int, Tensor] = {}
    for slot in slots:
        draw, half = divmod(slot, 2)
        if draw not in draws:
            draws[draw] = source.bits(offsets, draw, seed=seed, step=step, device=device)
        found[slot] = ((draws[draw] >> (16 * half)) & 0xFFFF).to(torch.int32)
    return found
