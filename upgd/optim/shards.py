"""Parameters of which this process holds a part: FSDP2's and tensor parallelism's, and FSDP1's.

Rules run on what is held here, :func:`local`. What depends on a weight's place in the whole
parameter (its noise, the row it belongs to) asks its :class:`Part`.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)
FSDP1 = "_fsdp_flattened"
"""How FSDP1 marks the parameters that it has taken over."""


def is_dtensor(t: Tensor) -> bool:
    """Whether a tensor is a ``DTensor``; does not import what defines it."""
    if type(t) in _PLAIN:
        return False
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(t, loaded.DTensor)


def is_cut(p: Tensor) -> bool:
    """Whether processes share a parameter, or it is flattened."""
    return is_dtensor(p) or bool(getattr(p, FSDP1, False))


def local(t: Tensor) -> Tensor:
    """What this process holds of a tensor: the tensor itself unless it is a ``DTensor``."""
    if type(t) in _PLAIN or not is_dtensor(t):
        return t
    return t._local_tensor  # type: ignore[attr-defined,no-any-return]


def local_gradient(p: Tensor) -> Tensor:
    """The gradient of what this process holds of a parameter."""
    grad = p.grad
    assert grad is not None
    if is_dtensor(p) and grad.placements != p.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return local(grad)


def like(p: Tensor, values: Tensor) -> Tensor:
    """`values` of the weights that are held here, as a tensor of the kind of `p`."""
    if not is_dtensor(p):
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        values,
        p.device_mesh,  # type: ignore[attr-defined]
        p.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=p.shape,
        stride=p.stride(),
    )


def place_like(p: Tensor, values: Tensor) -> Tensor:
    """A tensor with the shape of the whole `p`, cut as `p` is; all processes have the whole."""
    if not is_dtensor(p) or is_dtensor(values) or values.shape != p.shape:
        return values
    part = part_of(p, 0)
    held = values.reshape(-1)[part.indices().to(values.device)]
    return like(p, held.view(part.size).to(p.device))


@dataclass(frozen=True)
class Part:
    """The block of a parameter that this process holds.

    Attributes:
        number: The parameter's place among all parameters of the model.
        shape: Of the whole parameter.
        start: The block's first index in each dimension; or, of a flattened parameter, in its
            elements in order.
        size: The block's shape.
    """

    number: int
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def flat(self) -> bool:
        """Whether it is a stretch of the flattened parameter, as FSDP1's are."""
        return len(self.start) != len(self.shape)

    @property
    def whole(self) -> bool:
        """Whether this process holds all of it, in its shape."""
        return self.size == self.shape

    @property
    def rows(self) -> int:
        """The rows of the whole parameter: one per output unit; a vector is a single row."""
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def splits_rows(self) -> bool:
        """Whether a row may lie on several processes."""
        if self.flat:
            return True
        first = 1 if len(self.shape) > 1 else 0
        return self.size[first:] != self.shape[first:]

    @property
    def first(self) -> int | None:
        """The number of its first element, if its elements follow each other in the whole."""
        if self.flat:
            return self.start[0]
        if self.size[1:] != self.shape[1:]:
            return None
        return self.start[0] * math.prod(self.shape[1:]) if self.shape else 0

    def indices(self) -> Tensor:
        """The numbers of its elements in the whole, in their order here."""
        if self.flat:
            return torch.arange(self.start[0], self.start[0] + self.size[0])
        found = torch.zeros((), dtype=torch.int64)
        for length, begin, count in zip(self.shape, self.start, self.size, strict=True):
            found = found.unsqueeze(-1) * length + torch.arange(begin, begin + count)
        return found.reshape(-1)


def part_of(p: Tensor, number: int) -> Part:
    """The part of a ``DTensor`` or of a plain parameter that is held here."""
    shape = tuple(p.shape)
    if not is_dtensor(p):
        return Part(number, shape, (0,) * len(shape), shape)
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    strange = [q for q in placements if not q.is_replicate() and type(q) is not Shard]
    if strange:
        raise TypeError(
            f"a parameter of shape {shape} is placed as {strange[0]}; parameters may be sharded or "
            "replicated. FSDP2 over tensor parallelism makes such shards along one dimension: "
            "let fully_shard cut another one (shard_placement_fn)"
        )
    size, start = compute_local_shape_and_global_offset(shape, mesh, placements)
    if math.prod(size) == 0:
        start = (0,) * len(shape)
    return Part(number, shape, tuple(start), tuple(size))


def parts_of(params: Sequence[Tensor], everything: Sequence[Tensor]) -> list[Part]:
    """The parts of `params` that are held here, numbered by their place in `everything`.

    Raises:
        TypeError: A parameter is cut in a way that rules cannot follow.
    """
    numbers = {id(p): n for n, p in enumerate(everything)}
    if any(getattr(p, "_is_flat_param", False) for p in params):
        raise TypeError(
            "FSDP has laid several parameters end to end in one, so that what belongs to a "
            "parameter, and its padding, cannot be told; use fully_shard (FSDP2), or "
            "FullyShardedDataParallel(use_orig_params=True)"
        )
    flattened = _flattened() if any(getattr(p, FSDP1, False) for p in params) else {}
    found = []
    for p in params:
        number = numbers[id(p)]
        if id(p) in flattened:
            shape, start = flattened[id(p)]
            # Under NO_SHARD parameters are whole, and have their shape.
            size = (p.numel(),)
            part = Part(number, shape, (start,), size)
            found.append(part_of(p, number) if tuple(p.shape) == shape else part)
        elif getattr(p, FSDP1, False):
            raise TypeError(
                f"FSDP1 has flattened a parameter of which {tuple(p.shape)} is here, and what that "
                "is a part of cannot be found (after gc.freeze() it cannot); use fully_shard "
                "(FSDP2), or freeze later"
            )
        else:
            found.append(part_of(p, number))
    return found


def _flattened() -> dict[int, tuple[tuple[int, ...], int]]:
    """By id, the shape of each of FSDP1's parameters and where the stretch held here begins.

    Only FSDP's own flat parameters know. They are not reachable from the parameters that an
    optimizer gets, so they are looked up among all objects, once.
    """
    found: dict[int, tuple[tuple[int, ...], int]] = {}
    for flat in gc.get_objects():
        if type(flat) is nn.Parameter and getattr(flat, "_is_flat_param", False):
            known: Any = flat
            rows = zip(known._params or (), known._shapes, known._shard_param_infos, strict=False)
            for p, shape, info in rows:
                found[id(p)] = tuple(shape), info.intra_param_start_idx or 0
    return found
