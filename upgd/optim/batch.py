"""A batch: tensors that one rule updates together, and how it reads and writes them.

Parameters arrive as a list of tensors. A rule can run on them

- one tensor at a time, as it is written (``foreach=False``, the reference),
- as a list, through a foreach program that writes in place, or
- *packed*: laid end to end in one tensor. Where a flag on the device decides whether a
  step is applied, old values must survive until the flag is known. One packed tensor then
  needs one conditional write where a list needs one per parameter, and every reduction
  is a single call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from upgd.optim.features import FeatureLayer
from upgd.optim.program import Program, compiled
from upgd.optim.rounding import stochastic
from upgd.optim.shards import Part, local
from upgd.rules.vocabulary import Phase, rounded_period

BLOCK = 1 << 21
"""Elements that a program works on at a time on CPU. Temporaries the size of a large model would
be mapped and unmapped by the allocator at every step; much smaller blocks cost thread overhead."""

_HALF = (torch.float16, torch.bfloat16)
DTYPES = (*_HALF, torch.float32, torch.float64)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of traces and arithmetic for parameters of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest floating-point type of the device."""
    return torch.float32 if device.type == "mps" else torch.float64


def tiny(dtype: torch.dtype) -> float:
    """The smallest normal number; replaces a zero denominator."""
    return torch.finfo(dtype).tiny


class Member(NamedTuple):
    """A parameter and its position: group, place in the group, elements before it."""

    group: int
    place: int
    offset: int
    param: Tensor
    part: Part

    @property
    def local(self) -> Tensor:
        """What this process holds of the parameter."""
        return local(self.param)


class Packed(NamedTuple):
    """One tensor with the elements of several, and views of it shaped like each."""

    flat: Tensor
    views: list[Tensor]

    @classmethod
    def like(cls, tensors: list[Tensor], dtype: torch.dtype) -> Packed:
        """Uninitialised memory for `tensors`."""
        total = sum(t.numel() for t in tensors)
        flat = torch.empty(total, dtype=dtype, device=tensors[0].device)
        return cls(flat, unpack(flat, tensors))


def unpack(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of `flat`, one for each tensor of `like` and of its shape."""
    parts = flat.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


@dataclass
class Batch:
    """What a phase reads and writes. Reused between steps while nothing structural changes."""

    group: dict[str, Any]
    members: list[Member]  # empty in a batch of features
    step: Tensor  # with `attempts`, the clock that its parameters share
    attempts: Tensor
    dtype: torch.dtype  # of the arithmetic
    limit: float  # the largest weight or derivative that a step may read
    phases: tuple[Phase | None, ...]  # None where this batch skips one
    # What receives results: the parameters for "w", else the states; one tensor per parameter, or
    # one vector per layer of features.
    targets: dict[str, list[Tensor]]
    row_counts: list[int]  # of each parameter
    row_names: frozenset[str]  # arguments with one value per row instead of one per weight
    gated: bool  # whether writes obey a flag on the device
    foreach: bool  # whether to use foreach programs instead of the plain rule
    # What this step's rules read for every weight: a tensor per parameter, or one if packed.
    lists: dict[str, list[Tensor] | Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)  # this step's scalar arguments
    spare: set[str] = field(default_factory=set)  # lists of this step that may be overwritten
    absent: set[str] = field(default_factory=set)  # list arguments that count as zero this step
    layers: list[FeatureLayer] = field(default_factory=list)  # in a batch of features
    # For each parameter, which of all batches' layers it leads into.
    feature_index: list[int] = field(default_factory=list)
    # This step's random bits for targets that are rounded stochastically, like `lists`.
    bits: dict[str, Any] = field(default_factory=dict)
    copies: list[Tensor] = field(default_factory=list)  # parameters whose master copies "w" are
    bound: float = 0.0  # of its layers' first weights, where a rule reads it

    def __post_init__(self) -> None:
        self.packed = self.gated and self.foreach
        self._rooms: dict[str, Packed] = {}
        self._reads: frozenset[str] | None = None
        self._row_of_weight: Tensor | None = None
        self._row_runs: list[tuple[int, int]] = []
        self._programs: list[Program | None] = []
        self._programs_for: Any = None
        self.decay_values: list[float] = []
        self.decays: Tensor | None = None
        # Targets of fewer bits: rules read and write copies, which are rounded into them.
        self.narrow = {n for n, ts in self.targets.items() if ts[0].dtype != self.dtype}
        self._on_device: dict[str, tuple[float, Tensor]] = {}
        if self.packed:
            for name, tensors in self.targets.items():
                if name == "w" or name not in self.narrow:
                    room = self._rooms[name] = Packed.like(tensors, self.dtype)
                if name != "w" and name not in self.narrow:  # they move in for good, others visit
                    torch._foreach_copy_(room.views, tensors)
                    self.targets[name] = room.views

    @property
    def device(self) -> torch.device:
        return self.step.device

    def reads(self, name: str) -> bool:
        """Whether some phase of this batch has an argument called `name`."""
        if self._reads is None:
            self._reads = frozenset(n for phase in self.phases if phase for n in phase.reads)
        return name in self._reads

    # --------------------------------------------------------------------- read
    def begin(self) -> None:
        """Reset for a new step and read the targets again."""
        self.spare = set() if self.gated else set(self.targets)
        self.absent = set()
        self.lists = {}
        if self.copies:
            refresh(self.targets["w"], self.copies)
        for name, tensors in self.targets.items():
            if name == "w" or not self.packed or name in self.narrow:
                self.load(name, tensors)
            else:
                self.lists[name] = self._rooms[name].flat
        if self.packed and self.row_names and self._row_of_weight is None:
            self._row_of_weight = _row_of_weight(self.targets["w"], self.row_counts)
        if self.packed and self.row_counts and not self._row_runs:
            tensors = next(iter(self.targets.values()))
            self._row_runs = _row_runs(tensors, self.row_counts)

    def load(self, name: str, tensors: list[Tensor]) -> None:
        """Make `tensors` the rules' argument `name`, in this batch's dtype and layout."""
        if self.packed:
            if name not in self._rooms:
                self._rooms[name] = Packed.like(tensors, self.dtype)
            room = self._rooms[name]
            torch._foreach_copy_(room.views, tensors)
            self.lists[name] = room.flat
        elif all(t.dtype == self.dtype for t in tensors):
            self.lists[name] = tensors
        else:
            self.lists[name] = [t.to(self.dtype) for t in tensors]

    def load_derivatives(self, given: dict[str, tuple[list[Tensor], float | Tensor]]) -> None:
        """Load several lists of derivatives, each multiplied by its factor."""
        if self.packed:  # in one buffer: one call copies and one call checks them all
            everything = [t for tensors, _ in given.values() for t in tensors]
            self.load("derivatives", everything)
            flat = self._rooms["derivatives"].flat
            parts = flat.chunk(len(given)) if len(given) > 1 else [flat]
        for i, (name, (tensors, factor)) in enumerate(given.items()):
            if self.packed:
                self.lists[name] = parts[i]
            else:
                self.load(name, tensors)
            loaded = self.lists[name]
            if isinstance(factor, Tensor) or factor != 1.0:
                if isinstance(loaded, Tensor):
                    loaded.mul_(factor)
                else:
                    self.lists[name] = list(torch._foreach_mul(loaded, factor))
            if self.lists[name] is not tensors:
                self.spare.add(name)

    def load_flat(self, name: str, flat: Tensor) -> None:
        """Load numbers that are laid end to end already and may be overwritten."""
        flat = flat.to(self.dtype)
        self.lists[name] = flat if self.packed else unpack(flat, self.targets["w"])
        self.spare.add(name)

    def load_bits(self, name: str, flat: Tensor) -> None:
        """Load the random bits for what is stored as `name`, laid end to end."""
        self.bits[name] = flat if self.packed else unpack(flat, self.targets["w"])

    def load_rows(self, name: str, rows: Tensor) -> None:
        """Load `rows`, for all parameters end to end a value per row."""
        rows = rows.to(self.dtype)
        if self.packed:
            assert self._row_of_weight is not None
            self.lists[name] = rows.index_select(0, self._row_of_weight)
        else:
            shapes = [(-1, *[1] * (p.dim() - 1)) if p.dim() else () for p in self.targets["w"]]
            parts = rows.split(self.row_counts)
            self.lists[name] = [r.view(shape) for r, shape in zip(parts, shapes, strict=True)]

    # ---------------------------------------------------------------------- run
    def compile(self) -> None:
        """Find the programs for what this step reads."""
        if not self.foreach:
            return
        tensors = tuple(n for n, value in self.scalars.items() if isinstance(value, Tensor))
        key = (frozenset(self.spare), frozenset(self.absent), tensors)
        if key != self._programs_for:
            self._programs_for = key
            self._programs = [self._program(i) for i in range(len(self.phases))]

    def _program(self, index: int) -> Program | None:
        phase = self.phases[index]
        if phase is None:
            return None
        reads = set(phase.reads)
        later = {n for other in self.phases[index + 1 :] if other for n in other.reads}
        spare = (self.spare - later - self.targets.keys()) | (self.spare & set(phase.writes))
        lists = self.lists.keys() | self.row_names
        return compiled(
            phase.fn,
            phase.reads,
            phase.writes,
            lists=frozenset(reads & lists),
            on_device=frozenset(n for n in reads - lists if self._is_device_scalar(n)),
            absent=frozenset(reads & self.absent),
            broadcast=frozenset() if self.packed else frozenset(reads & self.row_names),
            owned=frozenset(reads & spare),
            packed=self.packed,
        )

    def _is_device_scalar(self, name: str) -> bool:
        late = name == "eta" or name.startswith("c_") or name not in self.scalars
        return late or isinstance(self.scalars[name], Tensor)

    def run(self, index: int, ok: Tensor | None) -> None:
        """Run one phase and store its results, if `ok` is set or None."""
        phase = self.phases[index]
        if phase is None:
            return
        program = self._programs[index] if self.foreach else None
        if program is not None and ok is None and not self.row_names and self.device.type == "cpu":
            for lists, targets, bits in self._blocks(phase):
                self._store(program({**lists, **self.scalars}), lists, targets, bits)
            self._copy_out(phase)
            return
        values = {**self.lists, **self.scalars}
        results = program(values) if program is not None else self._plain(phase, values)
        if ok is None:
            self._store(results, self.lists, self.targets, self.bits)
        else:
            for name, new in _weights_last(_apart(results, self.lists)):
                self._store_if(ok, name, new)
        self._copy_out(phase)

    def _copy_out(self, phase: Phase) -> None:
        """Round master copies into the parameters."""
        if self.copies and "w" in phase.writes:
            torch._foreach_copy_(self.copies, self.targets["w"])

    def _blocks(
        self, phase: Phase
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
        """Lists, targets and bits, split into blocks so that temporaries stay small."""
        names = [name for name in (*phase.reads, *phase.writes) if name in self.lists]
        lists: dict[str, Any] = {name: self.lists[name] for name in names}
        targets: dict[str, Any] = {name: self.targets[name] for name in phase.writes}
        bits: dict[str, Any] = {name: self.bits[name] for name in phase.writes if name in self.bits}
        everything = [*lists.values(), *targets.values(), *bits.values()]
        sizes = [t.numel() for t in everything[0]]
        small = sum(sizes) <= 2 * BLOCK or torch.compiler.is_compiling()
        if small or not all(t.is_contiguous() for ts in everything for t in ts):
            yield self.lists, targets, bits
            return
        for pieces in _cut(sizes):

            def cut(ts: list[Tensor], pieces: list[tuple[int, int, int]] = pieces) -> list[Tensor]:
                return [ts[i].view(-1)[a:b] for i, a, b in pieces]

            block = {name: cut(ts) for name, ts in lists.items()}
            # Where a result replaces what was read, both must be one list: see _store.
            out = {
                name: block[name] if lists.get(name) is ts else cut(ts)
                for name, ts in targets.items()
            }
            yield block, out, {name: cut(ts) for name, ts in bits.items()}

    def _store(
        self,
        results: list[tuple[str, Any]],
        lists: dict[str, Any],
        targets: dict[str, Any],
        bits: dict[str, Any],
    ) -> None:
        for name, new in _weights_last(_apart(results, {**targets, **lists})):
            if new is targets[name]:
                continue
            _write(targets[name], new, bits.get(name))
            if name in self.narrow and name != "w":  # later phases read it before it was rounded
                if lists is self.lists:
                    lists[name] = new
                elif new is not lists[name]:
                    torch._foreach_copy_(lists[name], new)

    def end(self) -> None:
        """Forget the copies of what is kept in fewer bits."""
        self.bits = {}
        for name in self.narrow:
            self.lists.pop(name, None)
            if name != "w":
                self._rooms.pop(name, None)

    def _plain(self, phase: Phase, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """The rule as it is written, one tensor at a time: the reference for the faster paths."""
        columns: list[list[Tensor]] = [[] for _ in phase.writes]
        for i in range(len(self.targets[phase.writes[0]])):
            arguments: list[Any] = []
            for name in phase.reads:
                value = 0.0 if name in self.absent else values[name]
                arguments.append(value[i] if isinstance(value, list) else value)
            result = phase.fn(*arguments)
            results = result if isinstance(result, tuple) else (result,)
            for column, one in zip(columns, results, strict=True):
                column.append(one)
        return list(zip(phase.writes, columns, strict=True))

    def _store_if(self, ok: Tensor, name: str, new: Any) -> None:
        """Write `new` if the flag is set, else the old values; nothing is read back."""
        targets, old = self.targets[name], self.lists[name]
        if isinstance(old, Tensor):
            torch.where(ok, new, old, out=old)
            if name == "w" or name in self.narrow:
                values, bits = self._rooms[name].views, self.bits.get(name)
                if bits is not None:  # numbers that the type has are not changed by it
                    values = unpack(stochastic(old, bits, targets[0].dtype), targets)
                torch._foreach_copy_(targets, values)
        else:
            kept = [torch.where(ok, n, o) for n, o in zip(new, old, strict=True)]
            _write(targets, kept, self.bits.get(name))
            if name in self.narrow:
                self.lists[name] = kept

    # ------------------------------------------------------------------ scalars
    def load_decays(self, values: list[float]) -> None:
        """Create `values` on the device without a copy from the host."""
        if values and values != self.decay_values:
            dtype = wide_dtype(self.device)
            full = [torch.full((), v, dtype=dtype, device=self.device) for v in values]
            self.decays, self.decay_values = torch.stack(full), values

    def put_scalars(self) -> None:
        """Replace scalar arguments by tensors, in double precision until they are used."""
        for name, value in self.scalars.items():
            if not isinstance(value, Tensor):
                known, tensor = self._on_device.get(name, (None, None))
                if tensor is None:
                    tensor = torch.empty((), dtype=wide_dtype(self.device), device=self.device)
                if value != known:
                    self._on_device[name] = value, tensor.fill_(value)
                self.scalars[name] = tensor

    def corrections(self) -> list[Tensor]:
        """``1 - decay ** t`` of each decay, in double precision until it is used."""
        assert self.decays is not None
        return list((1 - torch.pow(self.decays, self.step)).to(self.dtype).unbind())

    def due(self, period: float | Tensor) -> Tensor:
        """1 if this step is a multiple of `period`, rounded, else 0."""
        if isinstance(period, Tensor):
            every = (period + 0.5).floor().clamp_min(1).to(self.step.dtype)
            return (self.step % every == 0).to(self.dtype)
        return (self.step % rounded_period(period) == 0).to(self.dtype)

    # ------------------------------------------------------------------- reduce
    def largest(self, name: str) -> Tensor:
        """The largest element of a state, on the device."""
        return _largest(self.lists[name])

    def row_norms(self, name: str) -> Tensor:
        """The norms of all rows of a state, end to end; never zero."""
        states = self.lists[name]
        if isinstance(states, Tensor):
            parts = states.split([rows * length for rows, length in self._row_runs])
            runs = [part.view(run) for part, run in zip(parts, self._row_runs, strict=True)]
        else:
            runs = [
                u.reshape(n, u.numel() // max(1, n))
                for u, n in zip(states, self.row_counts, strict=True)
            ]
        return row_norms(runs)

    def largest_read(self) -> list[Tensor]:
        """The largest magnitudes of the weights and derivatives of this step; NaN where one is."""
        derivatives = ("derivatives",) if "derivatives" in self.lists else ("g", "h", "f", "s")
        names = [name for name in ("w", *derivatives) if name in self.lists]
        return [_largest_magnitude(self.lists[name]) for name in names]


def _write(targets: list[Tensor], new: list[Tensor], bits: list[Tensor] | None) -> None:
    """Write results to their targets, rounded stochastically where there are `bits`."""
    if bits is not None:
        pairs = zip(new, bits, strict=True)
        new = [stochastic(n, b, t.dtype) for t, (n, b) in zip(targets, pairs, strict=True)]
    torch._foreach_copy_(targets, new)


def refresh(masters: list[Tensor], copies: list[Tensor]) -> None:
    """Take over what was written to the 16-bit copies of `masters` since they were rounded."""
    for master, copy in zip(masters, copies, strict=True):
        torch.where(copy == master.to(copy.dtype), master, copy.to(master.dtype), out=master)


def _apart(results: list[tuple[str, Any]], held: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Results, with a copy of each that is the old value of another state: that is overwritten."""
    states = [name for name, _ in results if name != "w"]
    return [
        (name, _copied(new))
        if any(_is_one(new, held[other]) for other in states if other != name)
        else (name, new)
        for name, new in results
    ]


def _is_one(new: Any, old: Any) -> bool:
    """Whether two lists, or packed tensors, are the same memory."""
    return new is old or (isinstance(new, list) and bool(new) and new[0] is old[0])


def _copied(new: Any) -> Any:
    return new.clone() if isinstance(new, Tensor) else [t.clone() for t in new]


def _weights_last(results: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Weights are stored last: a state may be a copy of the weights as they were."""
    return sorted(results, key=lambda result: result[0] == "w")


def _cut(sizes: list[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Blocks of about BLOCK elements: lists of ``(tensor, begin, end)``."""
    block: list[tuple[int, int, int]] = []
    room = BLOCK
    for i, size in enumerate(sizes):
        begin = 0
        while begin < size:
            end = min(size, begin + room)
            block.append((i, begin, end))
            room -= end - begin
            begin = end
            if room == 0:
                yield block
                block, room = [], BLOCK
    if block:
        yield block


def row_norms(runs: list[Tensor]) -> Tensor:
    """The norm of every row of every matrix in `runs`, end to end; never zero."""
    norms = [_row_norms(rows) for rows in runs]
    together = torch.cat(norms) if len(norms) > 1 else norms[0]
    return together.to(runs[0].dtype).clamp_min(tiny(runs[0].dtype))


def _row_norms(rows: Tensor) -> Tensor:
    """Norms that do not underflow where squares of small utilities would."""
    wide = wide_dtype(rows.device)
    norms: Tensor
    if rows.numel() == 0:
        norms = rows.new_zeros(len(rows), dtype=wide)
    elif rows.dtype != wide:
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=wide)
    else:
        largest = torch.linalg.vector_norm(rows, math.inf, dim=1).clamp_min(tiny(wide))
        norms = torch.linalg.vector_norm(rows / largest.unsqueeze(1), dim=1) * largest
    return norms


def _largest(tensors: list[Tensor] | Tensor) -> Tensor:
    if isinstance(tensors, Tensor):
        return tensors.amax() if tensors.numel() else tensors.new_full((), -math.inf)
    found = [t for t in tensors if t.numel()]  # other processes may hold all of a parameter
    if not found:
        return tensors[0].new_full((), -math.inf)
    if torch.compiler.is_compiling():  # torch.compile cannot trace _foreach_max
        return torch.stack([t.amax() for t in found]).amax()
    return torch.stack(torch._foreach_max(found)).amax()


def _largest_magnitude(tensors: list[Tensor] | Tensor) -> Tensor:
    if isinstance(tensors, Tensor):
        norm: Tensor = torch.linalg.vector_norm(tensors, math.inf if tensors.numel() else 2)
        return norm
    found = [t for t in tensors if t.numel()]
    if not found:
        return tensors[0].new_zeros(())
    return torch.stack(torch._foreach_norm(found, math.inf)).amax()


def _row_runs(tensors: list[Tensor], row_counts: list[int]) -> list[tuple[int, int]]:
    """Rows and row length of each run of neighbours whose rows have one length."""
    lengths = [t.numel() // max(1, n) for t, n in zip(tensors, row_counts, strict=True)]
    pairs = groupby(zip(lengths, row_counts, strict=True), itemgetter(0))
    return [(sum(n for _, n in run), length) for length, run in pairs]


def _row_of_weight(params: list[Tensor], row_counts: list[int]) -> Tensor:
    """For every weight of the packed parameters, the number of its row."""
    device = params[0].device
    pieces, first = [], 0
    for p, rows in zip(params, row_counts, strict=True):
        numbers = torch.arange(first, first + rows, dtype=torch.int32, device=device)
        pieces.append(numbers.repeat_interleave(p.numel() // max(1, rows), output_size=p.numel()))
        first += rows
    return torch.cat(pieces)
