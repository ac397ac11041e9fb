"""Where the perturbations come from.

A noise source is asked for standard normal numbers and told the seed, the step and the
position of each parameter; it must return the same numbers for the same question. So
the integers in an optimizer's state dict determine every perturbation: nothing has to
be saved from a generator, and a run that is stopped and resumed is the run that was
never stopped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from upgd.kernels.philox import ROUNDING, box_muller, philox4x32, steps_ahead
from upgd.optim.shards import Part

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


class NoiseSource(Protocol):
    """What an optimizer asks of a noise source."""

    def draw(
        self,
        sizes: Sequence[int],
        offsets: Sequence[int],
        *,
        seed: int,
        step: int | Tensor,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        """Independent standard normal numbers, ``sum(sizes)`` of them end to end.

        Args:
            sizes: How many each parameter needs that is perturbed at this step.
            offsets: Where each begins in the optimizer's parameters laid end to end.
            seed: From the optimizer's state dict.
            step: How many draws came before; a tensor on `device` where the host does
                not know it (``capturable``).
            device: Where the numbers must be. The caller may overwrite them.
            dtype: ``float32`` or ``float64``.
        """
        ...


def mix64(x: int) -> int:
    """A bijection of 64-bit integers that scatters neighbours (splitmix64's finaliser)."""
    x &= _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def generator_seed(seed: int, step: int, offset: int = 0) -> int:
    """The seed of the generator for one step.

    PyTorch's CPU generator uses the low 32 bits alone. They are a permutation of the step (a
    small Feistel network under a key from `seed`), so no two of a run's first 2³² steps share
    their noise, and two runs share no stretch of it. `offset` keeps devices apart.
    """
    key = mix64(mix64(seed + 0x9E3779B97F4A7C15) ^ offset)
    left, right = (step >> 16) & 0xFFFF, step & 0xFFFF
    for round_ in range(4):
        left, right = right, left ^ (mix64(key + (right << 8) + round_) & 0xFFFF)
    return (key & ~_MASK32 & _MASK64) | (left << 16) | right


class GeneratorNoise:
    """The default: PyTorch's generator of the device, seeded afresh for every step.

    One call fills the noise of all parameters. Where the step is a tensor (CUDA with
    ``capturable=True``) a counter-based Triton kernel takes over, since a captured
    generator cannot be seeded by a number on the device.
    """

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> GeneratorNoise:
        return GeneratorNoise()  # it remembers nothing

    def __reduce__(self) -> tuple[type[GeneratorNoise], tuple[()]]:
        return GeneratorNoise, ()

    def draw(
        self,
        sizes: Sequence[int],
        offsets: Sequence[int],
        *,
        seed: int,
        step: int | Tensor,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        """See :meth:`NoiseSource.draw`."""
        flat = torch.empty(sum(sizes), device=device, dtype=dtype)
        if isinstance(step, Tensor):
            from upgd.kernels.triton_noise import fill_normal

            fill_normal(flat, generator_seed(seed, 0, offsets[0]), step)
        else:
            generator = self._generators.get(device)
            if generator is None:
                generator = self._generators[device] = torch.Generator(device)
            generator.manual_seed(generator_seed(seed, step, offsets[0]))
            flat.normal_(generator=generator)
        return flat


class PhiloxNoise:
    """The written generator of :mod:`upgd.kernels.philox`: every engine draws the same numbers.

    A number is determined by the seed, the step, the parameter's place among the optimizer's
    parameters, and the weight's place in it. ``fused=True`` draws these numbers in its kernels;
    this class gives them to the other paths.

    Args:
        shapes: Of all parameters in order; the optimizer fills them in where they are left out.
        first: What to add to the optimizer's steps: where it begins in a longer run.
    """

    def __init__(self, shapes: Sequence[Sequence[int]] = (), first: int = 0) -> None:
        self.first = first
        whole = [tuple(shape) for shape in shapes]
        self.describe([Part(n, shape, (0,) * len(shape), shape) for n, shape in enumerate(whole)])

    def describe(self, parts: Sequence[Part]) -> None:
        """Tell what is held of all parameters; an optimizer calls it whenever that changes."""
        self.parts = list(parts)
        self._tables: dict[Any, tuple[Tensor, Tensor, Tensor]] = {}
        self._ahead: tuple[Any, int, Tensor] = (None, 0, torch.empty(0))
        self._places: dict[int, Part] = {}
        offset = 0
        for part in self.parts:
            size = math.prod(part.shape)
            if size:
                self._places[offset] = part
            offset += size

    def _table(self, offsets: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Quad and tensor of each counter, and where each weight's number will be.

        Numbers come lane by lane, each lane as long as there are counters.
        """
        key = (tuple(offsets), device)
        if key not in self._tables:
            parts = [self._places[offset] for offset in offsets]
            quads, lanes, which = zip(*map(_quads, parts), strict=True)
            begins = itertools.accumulate([0, *map(len, quads)])
            total = sum(map(len, quads))
            where = [
                lane * total + begin + place
                for lane, begin, place in zip(lanes, begins, which, strict=False)
            ]
            numbers = [torch.full_like(q, p.number) for q, p in zip(quads, parts, strict=True)]
            found = [torch.cat(some).to(device) for some in (quads, numbers, where)]
            self._tables = {key: (found[0], found[1], found[2])}
        return self._tables[key]

    def draw(
        self,
        sizes: Sequence[int],
        offsets: Sequence[int],
        *,
        seed: int,
        step: int | Tensor,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        """See :meth:`NoiseSource.draw`."""
        if isinstance(step, Tensor):
            return self._draw(offsets, seed, step, device, dtype)
        key = (seed, tuple(offsets), device, dtype)
        known, first, block = self._ahead
        if known != key or not 0 <= step - first < len(block):
            steps = torch.arange(step, step + steps_ahead(sum(sizes)), device=device)
            block = self._draw(offsets, seed, steps.unsqueeze(1), device, dtype)
            self._ahead = key, step, block
        return block[step - self._ahead[1]].clone()

    def _draw(
        self,
        offsets: Sequence[int],
        seed: int,
        step: Tensor,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        """The numbers of one step, or of T steps, given as [T, 1]."""
        key = (seed & _MASK32, (seed >> 32) & _MASK32)
        a, b, c, d = self._words(offsets, key, step, device)
        even, odd = box_muller(torch.cat((a, c), -1), torch.cat((b, d), -1), dtype)
        (even, later), (odd, last) = even.chunk(2, -1), odd.chunk(2, -1)
        lanes = torch.cat((even, odd, later, last), -1)
        return lanes.index_select(-1, self._table(offsets, device)[2])

    def _words(
        self, offsets: Sequence[int], key: tuple[int, int], step: Tensor, device: torch.device
    ) -> list[Tensor]:
        """The four words of each counter."""
        quads, tensors, _ = self._table(offsets, device)
        count = step.to(device) + self.first
        time = [count & _MASK32, (count >> 32) & _MASK32]
        counter = [quads, tensors, *[t.expand(*t.shape[:-1], len(quads)) for t in time]]
        return philox4x32(counter, key)

    def bits(
        self,
        offsets: Sequence[int],
        draw: int,
        *,
        seed: int,
        step: int | Tensor,
        device: torch.device,
    ) -> Tensor:
        """32 random bits for every weight, which rounding uses (:mod:`upgd.optim.rounding`).

        Args:
            offsets: Of the parameters, as in :meth:`draw`.
            draw: Which bits: another number gives others, and none has to do with the normals.
            seed: From the optimizer's state dict.
            step: How many steps came before.
            device: Where they must be.

        Returns:
            int64 numbers in [0, 2³²), end to end.
        """
        count = step if isinstance(step, Tensor) else torch.full((1,), step, device=device)
        key = (seed & _MASK32, ((seed >> 32) + ROUNDING + draw) & _MASK32)
        words = self._words(offsets, key, count, device)
        return torch.cat(words, -1).index_select(-1, self._table(offsets, device)[2])


def _quads(part: Part) -> tuple[Tensor, Tensor, Tensor]:
    """The quads of a part's weights; then, of each weight, its lane and which quad is its own."""
    rows = part.shape[0] if part.shape else 1
    span = -(-rows // 4) * math.prod(part.shape[1:])
    elements = part.indices()
    lanes, quads = elements // span, elements % span
    if part.whole:
        return torch.arange(span), lanes, quads
    found, which = quads.unique(return_inverse=True)
    return found, lanes, which
