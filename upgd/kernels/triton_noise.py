"""Counter-based normal numbers on a CUDA device, for steps that only the device knows.

Number ``4 * i + j`` at step ``t`` is the ``j``-th normal that Philox4x32 and Box-Muller
make of the counter ``(i, 0, t, t >> 32)`` under the key `seed`. The step is read from
device memory when the kernel runs, so each replay of a CUDA graph sees its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from upgd.caches import use_triton_cache

use_triton_cache()
BLOCK = 256


@triton.jit  # type: ignore[untyped-decorator]
def _normal_kernel(out, step, seed, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    quad = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.load(step).to(tl.int64)
    zero = quad * 0
    t_low = (t & 0xFFFFFFFF).to(tl.uint32) + zero.to(tl.uint32)
    t_high = (t >> 32).to(tl.uint32) + zero.to(tl.uint32)
    a, b, c, d = tl.philox(seed, quad.to(tl.uint32), zero.to(tl.uint32), t_low, t_high)
    n1, n2 = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(a), tl.uint_to_uniform_float(b))
    n3, n4 = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(c), tl.uint_to_uniform_float(d))
    base = quad.to(tl.int64) * 4
    tl.store(out + base, n1, mask=base < n)
    tl.store(out + base + 1, n2, mask=base + 1 < n)
    tl.store(out + base + 2, n3, mask=base + 2 < n)
    tl.store(out + base + 3, n4, mask=base + 3 < n)


def fill_normal(out: Tensor, seed: int, step: Tensor) -> None:
    """Fill the one-dimensional `out` with the normals of `seed` at ``int(step)``."""
    if out.numel() > 2**34:
        raise ValueError(f"at most 2**34 numbers a draw, asked for {out.numel()}")
    signed = seed - (1 << 64) if seed >> 63 else seed
    grid = (triton.cdiv(out.numel(), 4 * BLOCK),)
    with torch.cuda.device_of(out):
        _normal_kernel[grid](out, step, signed, out.numel(), BLOCK=BLOCK)
