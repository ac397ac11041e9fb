"""Randomness that is a function of integers and of nothing else.

Streams must give the same numbers in every process, after every resumption and under every
version of NumPy. So they draw from a counter-based generator, Philox4x64-10 [1]_, of which only
the raw 64-bit words are used: NumPy promises that those never change, unlike the values of its
distributions. Integers go into Philox's 128-bit key and 256-bit counter by position, without a
hash, so different integers never share a block of numbers::

    key     = (seed, purpose + 2³² · number of index integers)
    counter = (block, index[0], index[1], index[2])        absent ones are 0

A block is four words, and NumPy advances the counter before it makes one. `purpose` says what
numbers are for (:class:`Purpose`), `index` which ones of that purpose, such as the task.

.. [1] Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3. SC 2011.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_WORDS = 4  # in a block
_LIMIT = 1 << 64


class Purpose(IntEnum):
    """What random numbers are for. Values are part of every result: never reuse or renumber."""

    INPUT_PERMUTATION = 1
    LABEL_PERMUTATION = 2
    ORDER = 3
    HELD_OUT = 4
    TOY_INPUTS = 5
    DRIFT = 6
    WEIGHTS = 7
    REPLAY = 8


def bits(count: int, seed: int, purpose: int, *index: int, start: int = 0) -> NDArray[np.uint64]:
    """Random 64-bit words number `start` to `start + count` of a sequence; skipping takes no time.

    `seed` is in [0, 2⁶⁴), `purpose` in [0, 2³²); up to three integers `index` in [0, 2⁶⁴) pick the
    sequence.

    Example:
        >>> sequence = bits(10, 0, Purpose.ORDER, 7)
        >>> bool((bits(3, 0, Purpose.ORDER, 7, start=5) == sequence[5:8]).all())
        True
    """
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    if len(index) > 3:
        raise ValueError(f"at most three index integers, got {len(index)}: {index}")
    for name, value in (("seed", seed), ("start", start), *(("index", i) for i in index)):
        if not 0 <= value < _LIMIT:
            raise ValueError(f"{name} must be in [0, 2**64), got {value}")
    if not 0 <= purpose < 1 << 32:
        raise ValueError(f"purpose must be in [0, 2**32), got {purpose}")
    block, skip = divmod(start, _WORDS)
    key = np.array([seed, purpose + (len(index) << 32)], dtype=np.uint64)
    counter = np.zeros(4, dtype=np.uint64)
    counter[: 1 + len(index)] = (block, *index)
    words = np.random.Philox(key=key, counter=counter).random_raw(skip + count)
    return np.asarray(words, dtype=np.uint64)[skip:]


def permutation(
    n: int, seed: int, purpose: int, *index: int, first: int | None = None
) -> NDArray[np.int64]:
    """A uniformly drawn permutation of ``0 … n-1``: the stable sorting order of `n` words.

    Two equal words among them, which would favour the identity, have probability n²/2⁶⁵. `seed`,
    `purpose` and `index` are those of :func:`bits`; with `first` only so many entries are returned,
    in less time.
    """
    words = bits(n, seed, purpose, *index)
    if first is None or first >= n // 2:
        return np.argsort(words, kind="stable").astype(np.int64)[:first]
    if first == 0:
        return np.zeros(0, np.int64)
    # What is not larger than the last wanted word, in the order in which it stands: its stable
    # order is that of all.
    chosen = np.flatnonzero(words <= np.partition(words, first - 1)[first - 1])
    return chosen[np.argsort(words[chosen], kind="stable")].astype(np.int64)[:first]


def uniform(
    count: int, seed: int, purpose: int, *index: int, start: int = 0
) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), multiples of 2⁻⁵³: the upper 53 bits of each word."""
    words = bits(count, seed, purpose, *index, start=start)
    return np.asarray((words >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


def normal(count: int, seed: int, purpose: int, *index: int, start: int = 0) -> NDArray[np.float64]:
    """Standard normal numbers by Box and Muller's transform of pairs of our own uniforms.

    Exact up to the last digits of the platform's ``log``, ``cos`` and ``sin``.
    """
    first = start - start % 2  # a pair of uniforms makes a pair of normals
    pairs = -(-(start + count - first) // 2)
    u = uniform(2 * pairs, seed, purpose, *index, start=first)
    radius = np.sqrt(-2.0 * np.log(1.0 - u[0::2]))  # 1-u is in (0, 1]
    angle = 2.0 * np.pi * u[1::2]
    z = np.empty(2 * pairs)
    z[0::2] = radius * np.cos(angle)
    z[1::2] = radius * np.sin(angle)
    return z[start - first :][:count]
