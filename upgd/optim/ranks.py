"""What the processes of one training run tell each other.

Where a ``torch.distributed`` process group exists, the first step begins with a meeting: every
process tells which parameters its optimizer holds, and all take the seed of the first. Processes
that hold the same whole parameters are *replicas* (DDP): they see the same gradients, so their
steps are equal without another word. Where each holds a part of the model (FSDP, tensor
parallelism, ZeRO, pipelines), η is the largest over all, and a step is skipped by all or by none.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from upgd.optim.shards import Part, is_dtensor, parts_of
from upgd.optim.uncompiled import uncompiled

if TYPE_CHECKING:
    from upgd.optim.collective import CollectiveOptimizer


@dataclass
class Ranks:
    """The processes that take a step together.

    Attributes:
        params: The optimizer's parameters.
        parts: What this process holds of each of them.
        group: Their process group; None for a process of its own.
        size: How many there are.
        sharded: Whether each holds only a part of the model.
        others: All parameters of an optimizer that gave this one its share.
        copies: How many processes hold a part, by what tells it from others.
        split: For parameters whose rows lie on several processes, their number and rows.
    """

    params: list[Tensor]
    parts: list[Part]
    group: Any = None
    size: int = 1
    sharded: bool = False
    others: list[Tensor] = field(default_factory=list)
    copies: Counter[Part] = field(default_factory=Counter)
    split: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shapes = [p.shape for p in self.params]

    @property
    def device(self) -> torch.device:
        """Where this process talks to the others; it may hold no parameter."""
        known = self.params or self.others
        return known[0].device if known else torch.device("cpu")

    def holds(self, params: list[Tensor]) -> bool:
        """Whether it was found out for these parameters, with these shapes."""
        same = len(params) == len(self.params) and all(map(operator.is_, params, self.params))
        return same and [p.shape for p in params] == self._shapes

    def maximum(self, values: Tensor) -> Tensor:
        """The largest of each value over all processes; NaN where one is."""
        return self._reduced(values, "MAX")

    def total(self, values: Tensor) -> Tensor:
        """The sum of each value over all processes."""
        return self._reduced(values, "SUM")

    def mean(self, values: Tensor) -> Tensor:
        """The mean of each value over all processes."""
        return self.total(values) / self.size

    def agree(self, ok: Tensor) -> Tensor:
        """Whether a flag is set in all processes."""
        return self._reduced(ok.to(torch.int32), "MIN").bool()

    def _reduced(self, values: Tensor, how: str) -> Tensor:
        return values if self.size == 1 else _reduced(values, how, self.group)

    def whole_rows(self, held: list[tuple[Part, Tensor]]) -> None:
        """Turn norms of what is held of each row into those of whole rows, in place.

        Args:
            held: Parts with the norm of each of their rows, as far as it is held.
        """
        if self.size == 1 or not self.split:
            return
        held = [(part, values) for part, values in held if part.number in self.split]
        ends = list(accumulate(self.split.values()))
        begins = dict(zip(self.split, [0, *ends], strict=False))
        device = held[0][1].device if held else self.device
        norms = torch.zeros(ends[-1], dtype=torch.float64, device=device)
        weights = torch.ones_like(norms)
        places = []
        for part, values in held:
            first = begins[part.number] + (part.start[0] if part.rows > 1 else 0)
            places.append(slice(first, first + len(values)))
            norms[places[-1]] = values.double()
            weights[places[-1]] = 1 / max(1, self.copies[part])
        largest = self.maximum(norms)
        scale = torch.where(largest > 0, largest, 1.0)  # squares of small utilities would underflow
        norms = self.total((norms / scale).square() * weights).sqrt() * scale
        for (_, values), place in zip(held, places, strict=True):
            values.copy_(norms[place])


@uncompiled
def _reduced(values: Tensor, how: str, group: Any) -> Tensor:
    values = values.clone()
    torch.distributed.all_reduce(values, getattr(torch.distributed.ReduceOp, how), group=group)
    return values


def process_group(choice: Any) -> Any:
    """The process group that an optimizer's argument stands for; None if there is none."""
    if choice is False or not torch.distributed.is_available():
        return None
    if not torch.distributed.is_initialized():
        return None
    return torch.distributed.group.WORLD if choice is None else choice


class Told(NamedTuple):
    """What a process tells the others."""

    owner: str
    seed: int
    draws: int
    wrapped: bool  # whether another optimizer gave it a share of its parameters
    cut: bool  # whether it holds parts of parameters
    parts: list[Part]
    names: list[str]


def meet(opt: CollectiveOptimizer, params: list[Tensor]) -> Ranks:
    """Find out what the other processes hold, and take the first one's seed."""
    owner = type(opt).__name__
    group = process_group(opt.process_group)
    size = 1 if group is None else torch.distributed.get_world_size(group)
    everything = params if size == 1 else _of_the_caller(opt, params)
    try:
        parts = parts_of(params, everything)
    except TypeError as error:
        raise TypeError(f"{owner}: {error}") from None
    _refuse_absent(owner, params, parts, size)
    cut = any(not part.whole for part in parts) or any(map(is_dtensor, params))
    if size == 1:
        return Ranks(params, parts, group, 1, cut)
    names = [name for g in opt.param_groups for name in g.get("param_names", ())]
    first = opt.param_groups[0]
    wrapped = everything is not params
    mine = Told(owner, first["seed"], first["noise_step"], wrapped, cut, parts, names)
    all_: list[Any] = [None] * size
    torch.distributed.all_gather_object(all_, mine, group=group)
    for what, found in (
        ("class", [told.owner for told in all_]),
        ("number of draws (noise_step)", [told.draws for told in all_]),
    ):
        if len(set(found)) > 1:
            raise RuntimeError(
                f"{owner}: the processes of this group have optimizers of different {what}: "
                f"{found}. For optimizers that have nothing to do with each other, pass "
                "process_group=False"
            )
    for g in opt.param_groups:
        g["seed"] = all_[0].seed
    held, apart = _numbered(all_)
    copies = Counter(part for each in held for part in each)
    split = {part.number: part.rows for part in copies if part.splits_rows}
    sharded = apart or any(told.cut for told in all_)
    parts = held[torch.distributed.get_rank(group)]
    rows = dict(sorted(split.items()))
    return Ranks(params, parts, group, size, sharded, everything, copies, rows)


def _numbered(all_: list[Told]) -> tuple[list[list[Part]], bool]:
    """What each process holds, numbered in the whole model; whether some hold other parameters."""
    models = [([(part.number, part.shape) for part in t.parts], t.names) for t in all_]
    held = [told.parts for told in all_]
    if all(model == models[0] for model in models):
        return held, False
    if any(told.wrapped for told in all_):
        return held, True
    # Each process has parameters of its own, as the stages of a pipeline do.
    found = []
    for parts, model in zip(held, models, strict=True):
        earlier = models[: models.index(model)]
        before = sum(len(m[0]) for i, m in enumerate(earlier) if m not in earlier[:i])
        found.append([replace(part, number=part.number + before) for part in parts])
    return found, True


def _refuse_absent(owner: str, params: list[Tensor], parts: list[Part], size: int) -> None:
    """Raise if processes outside of the group hold parts of these parameters."""
    wide = [p.device_mesh.size() for p in params if is_dtensor(p)]  # type: ignore[attr-defined]
    if max(wide, default=1) > size or (size == 1 and not all(part.whole for part in parts)):
        raise TypeError(
            f"{owner}: other processes hold parts of these parameters, and process_group= leaves "
            "them out; leave out process_group, or pass the group of all of them"
        )


def _of_the_caller(opt: Optimizer, params: list[Tensor]) -> list[Tensor]:
    """All parameters of the optimizer that called this one, or `params`.

    ``ZeroRedundancyOptimizer`` makes an optimizer for the share of each process and tells it
    nothing else. A parameter's noise is that of its place among all parameters, so they are looked
    up where its ``step()`` is running.
    """
    mine = set(map(id, params))
    frame: Any = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Optimizer) and caller is not opt:
            found = [p for group in caller.param_groups for p in group["params"]]
            if len(found) > len(mine) and mine <= set(map(id, found)):
                return found
        frame = frame.f_back
    return params
