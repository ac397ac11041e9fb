"""``fused=True``: a step in compiled kernels, one launch per pass over all parameters.

:class:`FusedStep` does what :meth:`RuleOptimizer._gather` and :meth:`RuleOptimizer._advance` do for
the other paths. It keeps tables of addresses (:mod:`upgd.kernels.flat`) from step to step and
rewrites what has moved. There is one set of tables per *part*: parameters that share a dtype, a
rule and whether they are perturbed; nearly always there is one. A first pass over all parts finds η
and looks for weights and derivatives that are too large or not finite, a second one updates.
"""

from __future__ import annotations

import importlib.util
import math
import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from upgd.extras import install
from upgd.kernels import flat
from upgd.kernels.rules import STATES
from upgd.optim import checks
from upgd.optim.batch import Member, compute_dtype, refresh
from upgd.optim.checks import CLOCK, MASTER
from upgd.optim.noise import PhiloxNoise
from upgd.optim.rounding import BITS, stochastic
from upgd.optim.shards import Part, local, local_gradient
from upgd.rules.vocabulary import Method, as_numbers

if TYPE_CHECKING:
    from upgd.optim.base import RuleOptimizer

_EXTRAS = {"cpu": ("numba", "fast"), "cuda": ("triton", "triton")}


def refuse(opt: RuleOptimizer, foreach: bool | None) -> None:
    """Raise where ``fused=True`` cannot do what was asked for, and say what can."""
    owner = type(opt).__name__
    if any(phase.over == "features" for phase in opt.method.phases):
        raise ValueError(
            f"{owner}: fused=True updates weight by weight; features have no kernels, "
            "leave out fused=True"
        )
    if foreach:
        raise ValueError(f"{owner}: fused=True and foreach=True exclude each other; choose one")
    if not isinstance(opt.noise, PhiloxNoise):
        raise ValueError(
            f"{owner}: fused=True makes its noise in the kernel (upgd.optim.noise.PhiloxNoise); "
            "to bring your own, leave out fused=True"
        )
    if not any(importlib.util.find_spec(module) for module, _ in _EXTRAS.values()):
        raise ImportError(f"{owner}: {missing('cpu')}, or for CUDA {missing('cuda')}")


def missing(device: str) -> str:
    """What to install for ``fused=True`` on a kind of device."""
    module, extra = _EXTRAS[device]
    return f"fused=True on {device} needs {module} ({install(extra)})"


@dataclass
class FusedPart:
    """Parameters that one launch updates."""

    method: Method
    members: list[Member]
    states: list[list[Tensor]]  # of each member, in the method's order
    dtype: torch.dtype  # of the parameters as the kernels see them
    trace: torch.dtype  # of the states as the kernels see them
    rounds: bool  # whether weights of 16 bits are rounded stochastically
    table: NDArray[np.int64]  # a row of addresses and sizes per parameter
    rows: NDArray[np.int32]  # parameter and row of each norm; empty but for local scaling
    visitors: dict[int, Tensor]  # by place, copies that the kernels see instead of parameters
    shadows: list[list[Tensor]]  # like `states`, copies that they see; empty if states will do

    @cached_property
    def real(self) -> str:
        """The type of the arithmetic."""
        return "float64" if self.dtype == torch.float64 else "float32"

    @cached_property
    def limit(self) -> float:
        """The largest weight or derivative that a step may read."""
        return self.method.limit(compute_dtype(self.dtype))

    @cached_property
    def reduction(self) -> str | None:
        """How the first pass makes the second one's η."""
        return self.method.phases[0].reduce if flat.uses_eta(self.method) else None

    @cached_property
    def decays(self) -> list[int]:
        """For each state, the column of its decay, or -1."""
        found = [self.method.decays.get(state) for state in self.method.states]
        numbers = self.method.numbers
        places = [-1 if name is None else numbers.index(name) for name in found]
        return places + [-1] * (len(STATES) - len(places))

    @cached_property
    def period(self) -> int:
        """The column of the period, or -1."""
        name = self.method.period
        return -1 if name is None else self.method.numbers.index(name)

    @cached_property
    def second(self) -> bool:
        """Whether it reads curvature."""
        return "curvature" in self.method.needs

    @cached_property
    def noisy(self) -> bool:
        """Whether it is perturbed."""
        return "noise" in self.method.needs

    @cached_property
    def cut(self) -> bool:
        """Whether it has parts of parameters, whose noise is that of their place in the whole."""
        return bool((self.table[:, flat.FIRST] >= 0).any())

    @cached_property
    def weights(self) -> int:
        """How many weights there are."""
        return int(self.table[:, flat.TOTAL].sum())


@dataclass
class FusedPlan:
    """What holds from step to step."""

    params: list[Tensor]  # all of the optimizer's
    options: Any  # what the parts depend on in the groups
    kinds: list[Any]  # and in the parameters
    owned: list[Any]  # the states and the tensors in them
    tensors: list[Tensor]  # those that the tables point to
    memory: list[Any]  # and where each of them is, with its shape and type
    parts: list[FusedPart]
    groups: list[dict[str, Any]]  # for each row of numbers, its parameter group
    clocks: list[dict[str, Tensor]]  # each has ``step`` and ``attempts``
    ages: list[int]  # for each row of numbers, its clock
    bounds: list[float]  # and the bound of its layers
    members: list[Member]  # the parameters that are updated
    cancels: bool = False  # whether all traces have one age and decay, so that Û/η = U/max U
    places: list[Any] = field(default_factory=list)  # of weights and gradients in the tables
    numbers: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, flat.NUMBERS)))
    kept: list[Any] = field(default_factory=list)  # copies of what kernels cannot read in place


class FusedStep:
    """The steps of one optimizer in fused kernels."""

    def __init__(self, opt: RuleOptimizer) -> None:
        self.opt = opt
        self.plan: FusedPlan | None = None
        self.backend: Any = None

    # --------------------------------------------------------------------- plan
    def __call__(self) -> None:
        """Perform one update."""
        opt = self.opt
        params = [p for group in opt.param_groups for p in group["params"]]
        options = [
            (id(g), opt.method.is_perturbed(g), g.get("protect"), _decay(opt, g))
            for g in opt.param_groups
        ]
        # Kernels trust the tables, so all that these rest on is compared at every step.
        places, kinds = _layout(params)
        plan = self.plan
        if (
            plan is None
            or plan.options != options
            or not _same(plan.params, params)
            or plan.kinds != kinds
            or not _same(plan.owned, _owned(opt))
            or plan.memory != _memory(plan.tensors)
        ):
            plan = self._plan(params, options, kinds)
            if plan is None:
                return
        elif plan.places != places:
            for m in plan.members:  # what has moved may have moved to too little memory
                group = opt.param_groups[m.group]
                checks.check_gradient(type(opt).__name__, group, m.place, m.group)
        self._run(plan, places)

    def _plan(self, params: list[Tensor], options: Any, kinds: list[Any]) -> FusedPlan | None:
        opt, owner = self.opt, type(self.opt).__name__
        all_ = opt._members_with_gradient()
        members = [m for m in all_ if m.local.numel()]
        if not members:
            self.plan = None
            opt._take_part(all_, raises=opt._nonfinite_mode(all_) == "raise")
            return None
        devices = {m.param.device for m in members}
        kind = next(iter(devices)).type
        if len(devices) > 1 or kind not in _EXTRAS:
            found = ", ".join(sorted(map(str, devices)))
            raise ValueError(
                f"{owner}: fused=True wants all parameters on the CPU or on one CUDA device; "
                f"these are on {found}. foreach=True goes anywhere"
            )
        if importlib.util.find_spec(_EXTRAS[kind][0]) is None:
            raise ImportError(f"{owner}: {missing(kind)}")
        if kind == "cuda":
            opt._refuse_capture()
        opt._ensure_state([m.param for m in all_])
        opt._describe_noise()
        backend = _backend(kind)
        clocks: dict[int, int] = {}
        plan = FusedPlan(params, options, kinds, [], [], [], [], [], [], [], [], members)
        rows: dict[Any, int] = {}
        bounds = opt._bounds()
        row_of: dict[Tensor, int] = {}
        sets: dict[Any, list[Member]] = defaultdict(list)
        for m in all_:
            state = opt.state[m.param]
            if id(state["step"]) not in clocks:
                clocks[id(state["step"])] = len(plan.clocks)
                plan.clocks.append(state)
        for m in members:
            state = opt.state[m.param]
            for name in (n for n in (*opt.method.states, MASTER) if n in state):
                state[name] = state[name].contiguous()
            age, bound = clocks[id(state["step"])], bounds[m.group][m.place]
            if (m.group, age, bound) not in rows:
                rows[m.group, age, bound] = len(plan.groups)
                plan.groups.append(opt.param_groups[m.group])
                plan.ages.append(age)
                plan.bounds.append(bound)
            row_of[m.param] = rows[m.group, age, bound]
            group = opt.param_groups[m.group]
            quiet = not opt.method.is_perturbed(group)
            sets[m.param.dtype, opt._phases(group), quiet].append(m)
        for (dtype, phases, quiet), some in sets.items():
            method = replace(opt.method, phases=phases)
            method = flat.without_noise(method) if quiet else method
            if not backend.reads_half or opt.master_weights:
                dtype = compute_dtype(dtype)
            at = [row_of[m.param] for m in some]
            plan.parts.append(_part(opt, method, some, dtype, backend.reads_half, at))
        plan.cancels = (
            len(plan.clocks) == 1
            and len({_decay(opt, g) for g in plan.groups}) == 1
            and len({part.real for part in plan.parts}) == 1
            and not opt._ranks.sharded
        )
        plan.owned = _owned(opt)
        plan.tensors = [t for part in plan.parts for states in part.states for t in states]
        plan.tensors += [copy for part in plan.parts for copy in part.visitors.values()]
        plan.tensors += [clock[name] for clock in plan.clocks for name in CLOCK]
        plan.memory = _memory(plan.tensors)
        device = next(iter(devices))
        self.backend = backend(plan, device)
        self.plan = plan
        return plan

    # ---------------------------------------------------------------------- run
    def _run(self, plan: FusedPlan, places: list[Any]) -> None:
        opt, backend = self.opt, self.backend
        mode = opt._nonfinite_mode(plan.members)
        curved = plan.parts[0].second
        moved = plan.places != places or bool(plan.kept) or curved
        if moved or any(part.visitors or part.shadows for part in plan.parts):
            self._locate(plan, curved)
            plan.places = places
        scaler = getattr(opt, "grad_scale", None), getattr(opt, "found_inf", None)
        backend.begin(opt, plan, moved, *scaler)
        if mode == "raise" or not backend.replay(opt, plan):
            backend.first_pass(opt, plan)
            if mode == "raise" and not backend.finite():
                backend.reset()
                opt._raise_nonfinite(plan.members)
                raise FloatingPointError(f"{type(opt).__name__}: a step may not stay finite")
            backend.second_pass(opt, plan)
        if curved:  # good for one step
            for m in plan.members:
                m.param.__dict__.pop("curvature", None)
        for part in plan.parts:
            self._return(part)
        for group in opt.param_groups:
            group["noise_step"] += 1

    def _return(self, part: FusedPart) -> None:
        """Round what the kernels have written to copies into weights and states."""
        opt = self.opt
        copies = [("w", i, part.members[i].local, copy) for i, copy in part.visitors.items()]
        for i, shadows in enumerate(part.shadows):
            named = zip(part.method.states, part.states[i], shadows, strict=True)
            copies += [(name, i, state, shadow) for name, state, shadow in named]
        narrow = {name for name, _, target, copy in copies if target.dtype != copy.dtype}
        rounded = opt._rounded(narrow) if opt._rounds else {}
        bits = {}
        if rounded:
            offsets = [m.offset for m in part.members]
            bits = opt._draw_bits(offsets, rounded.values(), copies[0][3].device)
        ends = np.cumsum(part.table[:, flat.TOTAL])
        for name, i, target, copy in copies:
            if name in rounded:
                own = bits[rounded[name]][ends[i] - copy.numel() : ends[i]]
                copy = stochastic(copy, own.view(copy.shape), target.dtype)
            target.copy_(copy)

    def _locate(self, plan: FusedPlan, curved: bool) -> None:
        """Write down where weights, gradients and curvatures are."""
        plan.kept = []
        for part in plan.parts:
            for place, m in enumerate(part.members):
                p, row = m.param, part.table[place]
                grad = p.grad
                assert grad is not None
                if place in part.visitors:
                    if self.opt.master_weights and MASTER in self.opt.state[p]:
                        refresh([part.visitors[place]], [m.local])
                    else:
                        part.visitors[place].copy_(m.local)
                    row[flat.W] = part.visitors[place].data_ptr()
                else:
                    row[flat.W] = m.local.data_ptr()
                given = [(flat.G, local_gradient(p))]
                if curved:
                    given.append((flat.H, self.opt._curvature(m)))
                for column, tensor in given:
                    if tensor.dtype != part.dtype or not tensor.is_contiguous():
                        tensor = tensor.to(part.dtype).contiguous()
                        plan.kept.append(tensor)
                    elif column == flat.H or tensor is not local(grad):
                        plan.kept.append(tensor)
                    row[column] = tensor.data_ptr()
            for states, shadows in zip(part.states, part.shadows, strict=False):
                torch._foreach_copy_(shadows, states)
            pointers = part.table[:, : flat.STATE + len(part.method.states)]
            sizes = part.table[:, [flat.TOTAL, flat.SPAN]]
            least = max(4, 16 // min(part.dtype.itemsize, part.trace.itemsize))
            even = (pointers % 16 == 0).all(1) & (sizes % least == 0).all(1)
            part.table[:, flat.ALIGNED] = even


def _layout(params: list[Tensor]) -> tuple[list[Any], list[Any]]:
    """Where weights and gradients are, and what a plan depends on besides."""
    places: list[Any] = []
    kinds: list[Any] = []
    for p in params:
        g = p.grad
        if g is None:
            places.append(None)
            kinds.append(None)
        else:
            p, g = local(p), local(g)
            strided = g.layout is torch.strided
            places += (p.data_ptr(), g.data_ptr() if strided else None, g.dtype, g.is_contiguous())
            kinds += (p.dtype, p.device, p.shape, p.is_contiguous(), g.shape)
    return places, kinds


def _memory(tensors: list[Tensor]) -> list[Any]:
    """Where states are, and what the tables say about them."""
    return [(t.data_ptr(), t.shape, t.dtype, t.is_contiguous()) for t in tensors]


def _owned(opt: RuleOptimizer) -> list[Any]:
    """The states of all parameters and the tensors in them."""
    found: list[Any] = []
    for state in opt.state.values():
        found.append(state)
        found += state.values()
    return found


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _part(
    opt: RuleOptimizer,
    method: Method,
    members: list[Member],
    dtype: torch.dtype,
    reads_half: bool,
    rows: list[int],
) -> FusedPart:
    states = [[local(opt.state[m.param][name]) for name in method.states] for m in members]
    kept = states[0][0].dtype if method.states else compute_dtype(dtype)
    trace = kept if reads_half else compute_dtype(dtype)
    shadows = []
    if trace != kept:
        shadows = [[torch.empty_like(s, dtype=trace) for s in some] for some in states]
    table = np.zeros((len(members), flat.COLUMNS), np.int64)
    norms: list[tuple[int, int]] = []
    visitors = {}
    by_row = any(phase.reduce == "row_norm" for phase in method.phases)
    for i, m in enumerate(members):
        p, row = m.local, table[i]
        for k, state in enumerate((shadows or states)[i]):
            row[flat.STATE + k] = state.data_ptr()
        count = p.shape[0] if p.dim() else 1
        row[flat.TOTAL] = p.numel()
        row[flat.SPAN] = -(-count // 4) * (p.numel() // count)
        row[flat.NUMBER], row[flat.GROUP] = m.part.number, rows[i]
        first = m.part.first
        if first is None:
            raise ValueError(
                "fused=True: a parameter is cut across its rows; shard dimension 0 or leave out "
                "fused=True"
            )
        row[flat.FIRST] = -1 if m.part.whole else first
        whole = m.part.shape[0] if m.part.shape else 1
        row[flat.WHOLE_SPAN] = -(-whole // 4) * math.prod(m.part.shape[1:])
        lines = count if p.dim() > 1 else 1
        row[flat.LENGTH] = p.numel() // lines
        row[flat.ROW] = len(norms)
        if by_row:
            norms += [(i, line) for line in range(lines)]
        if MASTER in opt.state[m.param]:
            visitors[i] = local(opt.state[m.param][MASTER])
        elif p.dtype != dtype or not p.is_contiguous():
            visitors[i] = torch.empty_like(p, dtype=dtype, memory_format=torch.contiguous_format)
    table_of_rows = np.array(norms, np.int32).reshape(-1, 2)
    rounds = opt.rounding == "stochastic" and dtype in BITS
    return FusedPart(
        method, members, states, dtype, trace, rounds, table, table_of_rows, visitors, shadows
    )


ELSEWHERE = -1.0
"""Stands for a step size that lies on the device, in the host's copy of the numbers."""


def number_values(method: Method, group: dict[str, Any], bound: float, wait: bool) -> list[float]:
    """A group's hyperparameters in the order of the method's numbers.

    A step size on an accelerator is read if the caller may `wait`, else it is ELSEWHERE.
    """
    lr = group["lr"]
    here = wait or not isinstance(lr, Tensor) or lr.device.type == "cpu"
    given = {name: group[name] for name in method.hyper}
    return method.number_values({**given, "lr": lr if here else ELSEWHERE}, bound)


def _decay(opt: RuleOptimizer, group: dict[str, Any]) -> float | None:
    """The decay of the trace that makes η, if one does."""
    name = opt.method.decays.get(opt.method.phases[0].writes[0])
    if name is None:
        return None
    return float(group[name] if name in group else as_numbers(group)[name])


def first_draw(opt: RuleOptimizer) -> int:
    """What the noise source adds to the optimizer's count of draws."""
    assert isinstance(opt.noise, PhiloxNoise)
    return opt.noise.first


# ------------------------------------------------------------------------------- CPU
@dataclass
class _CpuPart:
    kernels: Any
    items: NDArray[np.int64]
    rows: NDArray[np.int64]
    partial: NDArray[np.float64]
    norms: NDArray[Any]
    quads: int


class _Cpu:
    """Kernels compiled by numba, which knows no 16-bit numbers."""

    reads_half = False

    def __init__(self, plan: FusedPlan, device: torch.device) -> None:
        from upgd.kernels import cpu_flat

        if any(part.cut and part.noisy for part in plan.parts):
            raise ValueError(
                "fused=True on the CPU cannot perturb parts of parameters; leave out fused=True, "
                "or pass sigma=0"
            )
        self.launch: Callable[..., None] = cpu_flat.launch
        self.parts: list[tuple[FusedPart, _CpuPart]] = []
        for part in plan.parts:
            kernels = cpu_flat.kernels(part.method, part.real)
            quads = cpu_flat.quads(part.weights)
            items = items_of(part, quads, np.int64)
            rows = _row_items(part, 4 * quads)
            partial = np.zeros((max(len(items), len(rows)), 3))
            norms = np.ones(max(1, len(part.rows)), part.real)
            mine = _CpuPart(kernels, items, rows, partial, norms, quads)
            self.parts.append((part, mine))
        plan.numbers = np.zeros((len(plan.groups), flat.NUMBERS))
        self.ok = True

    def begin(
        self, opt: RuleOptimizer, plan: FusedPlan, moved: bool, scale: Any, found_inf: Any
    ) -> None:
        """This step's numbers."""
        ages = [int(clock["step"]) + 1 for clock in plan.clocks]
        self.found_inf = found_inf is not None and bool(found_inf)
        rows = zip(plan.numbers, plan.groups, plan.ages, plan.bounds, strict=True)
        for row, group, age, bound in rows:
            numbers = opt.method.numbers
            row[: len(numbers)] = number_values(opt.method, group, bound, wait=True)
            if opt.method.period is not None:
                row[flat.DUE] = float(ages[age] % opt.method.every(group) == 0)
            for k, state in enumerate(opt.method.states):
                decay = opt.method.decays.get(state)
                beta = row[numbers.index(decay)] if decay else 0.0
                row[flat.CORRECTION + k] = 1 - beta ** ages[age]
            row[flat.SIGN] = -1.0 if group["maximize"] else 1.0
            row[flat.FACTOR] = row[flat.SIGN] if scale is None else row[flat.SIGN] / float(scale)

    def first_pass(self, opt: RuleOptimizer, plan: FusedPlan) -> None:
        """Find η, and whether all weights and derivatives are within their limit."""
        for part, mine in self.parts:
            by_row = part.reduction == "row_norm"
            self.launch(
                *(mine.kernels.first, mine.rows if by_row else mine.items, part.weights),
                *(part.table, plan.numbers, mine.partial, mine.norms if by_row else mine.quads),
            )
        small = [np.max(mine.partial[:, 1]) <= part.limit for part, mine in self.parts]
        self.ok = not self.found_inf and all(map(bool, small))  # NaN is not small
        if opt._ranks.sharded:
            self.ok = bool(opt._combine_finite(torch.tensor(self.ok)))
        self._find_eta(opt, plan)
        if opt._ranks.sharded and opt.method.phases[0].reduce == "row_norm":
            opt._combine_rows([x for part, mine in self.parts for x in rows_of(part, mine.norms)])

    def _find_eta(self, opt: RuleOptimizer, plan: FusedPlan) -> None:
        if opt.method.phases[0].reduce != "max":
            return
        shares = []
        column = flat.CORRECTION + opt.method.states.index(opt.method.phases[0].writes[0])
        for part, mine in self.parts:
            if part.reduction != "max":
                continue
            row_of = part.table[mine.items[:, 0], flat.GROUP]
            found = mine.partial[: len(mine.items), 0]
            shares.append(np.max(found if plan.cancels else found / plan.numbers[row_of, column]))
        if not shares and not opt._ranks.sharded:
            return
        eta = float(np.max(shares)) if shares else -math.inf
        if opt._ranks.sharded:
            eta = float(opt._combine(torch.tensor(eta, dtype=torch.float64)))
        for row in plan.numbers:
            own = abs(eta if plan.cancels else eta * row[column])
            row[flat.ETA] = math.inf if math.isnan(own) else own

    def finite(self) -> bool:
        """Whether the step counts."""
        return self.ok

    def reset(self) -> None:
        """Forget a first pass that no second one follows."""

    def replay(self, opt: RuleOptimizer, plan: FusedPlan) -> bool:
        """Nothing is recorded on the CPU."""
        return False

    def second_pass(self, opt: RuleOptimizer, plan: FusedPlan) -> None:
        """Update."""
        for clock in plan.clocks:
            clock["attempts"].add_(1)
        if not self.ok:
            return
        for clock in plan.clocks:
            clock["step"].add_(1)
        group = opt.param_groups[0]
        for part, mine in self.parts:
            self.launch(
                *(mine.kernels.update, mine.items, part.weights, part.table, plan.numbers),
                *(mine.partial, mine.norms, group["seed"], group["noise_step"] + first_draw(opt)),
                mine.quads,
            )


def rows_of(part: FusedPart, norms: Any) -> list[tuple[Part, Tensor]]:
    """The norms of rows of each parameter."""
    if part.reduction != "row_norm":
        return []
    found = []
    for m, row in zip(part.members, part.table, strict=True):
        begin, count = int(row[flat.ROW]), int(row[flat.TOTAL] // row[flat.LENGTH])
        found.append((m.part, torch.as_tensor(norms)[begin : begin + count]))
    return found


def items_of(part: FusedPart, quads: int, dtype: Any) -> NDArray[Any]:
    """Pieces of `quads` quads of a part's tensors: tensor and first quad."""
    pieces = []
    for i, span in enumerate(part.table[:, flat.SPAN]):
        starts = np.arange(0, span, quads)
        pieces.append(np.stack([np.full_like(starts, i), starts], 1))
    return np.ascontiguousarray(np.concatenate(pieces).astype(dtype))


def _row_items(part: FusedPart, weights: int) -> NDArray[np.int64]:
    """Rows in stretches of about `weights` weights: tensor, first row, last row."""
    found = []
    if len(part.rows):
        for i, (total, length) in enumerate(part.table[:, [flat.TOTAL, flat.LENGTH]].tolist()):
            many = max(1, weights // length)
            count = total // length
            found += [(i, k, min(k + many, count)) for k in range(0, count, many)]
    return np.array(found, np.int64).reshape(-1, 3)


def _backend(kind: str) -> Any:
    if kind == "cpu":
        return _Cpu
    from upgd.optim.fused_cuda import Cuda

    return Cuda
