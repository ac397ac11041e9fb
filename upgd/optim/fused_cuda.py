"""The CUDA half of :mod:`upgd.optim.fused`: tables on the device, Triton kernels."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from upgd.kernels import flat
from upgd.kernels.rules import LR
from upgd.optim.batch import compute_dtype
from upgd.threads import no_garbage

if TYPE_CHECKING:
    from upgd.optim.base import RuleOptimizer
    from upgd.optim.fused import FusedPart, FusedPlan


class CudaPart:
    """What the kernels of one part are launched with."""

    def __init__(self, part: FusedPart, plan: FusedPlan, device: torch.device) -> None:
        from upgd.kernels import triton_flat as kernels
        from upgd.kernels.triton_rules import compile_rules
        from upgd.optim.fused import items_of

        rules = compile_rules(part.method, part.real)
        real, kind = kernels.TYPES[compute_dtype(part.dtype)], kernels.TYPES[part.dtype]
        items = items_of(part, kernels.BLOCK, np.int32)
        self.table = torch.zeros(part.table.shape, dtype=torch.int64, device=device)
        self.items = upload(items, device)
        self.rows = upload(part.rows, device)
        self.norms = torch.ones(max(1, len(part.rows)), device=device).to(compute_dtype(part.dtype))
        self.grid = (len(items),)
        common = {"SECOND": part.second, "KIND": kind, "REAL": real, "BLOCK": kernels.BLOCK}
        trace = {"TRACE": kernels.TYPES[part.trace]}
        common["num_warps"] = kernels.WARPS
        written = part.method.phases[0].writes[0]
        places = part.decays
        decay = -1 if plan.cancels else places[part.method.states.index(written)] if places else -1
        self.check = {**common, "LIMIT": part.limit}
        self.norm = {**self.check, **trace, "RULE": getattr(rules, "reduce", None)}
        self.reduce = {**self.norm, "DECAY": decay}
        self.update = {
            **common,
            "RULE": rules.update,
            **trace,
            "ROUND": part.rounds,
            "STATES": len(part.method.states),
            "NOISE": part.noisy,
            "CUT": part.cut,
            "GLOBAL": part.reduction == "max",
            "LOCAL": part.reduction == "row_norm",
            "DECAY": decay,
            **{f"D{k}": place for k, place in enumerate(places)},
            "PERIOD": part.period,
        }


class Cuda:
    """Kernels compiled by Triton. Nothing is read back unless ``nonfinite="raise"`` asks for it.

    All that changes from step to step lies on the device, so the launches are the same every time.
    From the second step on they are replayed as a CUDA graph: preparing them anew costs the host
    more than the device needs to execute them.
    """

    reads_half = True

    def __init__(self, plan: FusedPlan, device: torch.device) -> None:
        from upgd.kernels import triton_flat

        self.device, self.kernels = device, triton_flat
        self.parts = [(part, CudaPart(part, plan, device)) for part in plan.parts]
        self.slots = torch.empty(2, dtype=torch.float64, device=device)
        self.done = torch.zeros(1, dtype=torch.int32, device=device)
        self.draw = torch.zeros(2, dtype=torch.int64, device=device)
        self.drawn = [0, 0]  # the draw and the seed that lie there, as far as the host knows
        self.iota = torch.arange(triton_flat.BLOCK, dtype=torch.int32, device=device)
        clocks = [[c["step"].data_ptr(), c["attempts"].data_ptr()] for c in plan.clocks]
        self.clocks = upload(np.array(clocks, np.int64), device)
        shape = (len(plan.groups), flat.NUMBERS)
        self.numbers = torch.zeros(shape, dtype=torch.float64, device=device)
        self.signs = torch.ones(len(plan.groups), dtype=torch.float64, device=device)
        self.values: list[Any] = []
        self.stages: list[Tensor] = []
        self.captured: list[Tensor] = []  # what graphs copy from at every replay
        self.compiled = self.capturing = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.reset()

    def reset(self) -> None:
        """Forget a first pass that no second one follows."""
        self.slots[0].fill_(-math.inf)
        self.slots[1].fill_(0.0)

    # -------------------------------------------------------------------- tables
    def begin(
        self, opt: RuleOptimizer, plan: FusedPlan, moved: bool, scale: Any, found_inf: Any
    ) -> None:
        """Bring the tables up to date."""
        from upgd.optim.fused import ELSEWHERE, first_draw, number_values

        self.capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if moved:
            for part, mine in self.parts:
                self._send(mine.table, part.table)
        signs = [-1.0 if group["maximize"] else 1.0 for group in plan.groups]
        rows = zip(plan.groups, plan.bounds, strict=True)
        values = [number_values(opt.method, group, bound, wait=False) for group, bound in rows]
        if [*values, signs] != self.values or scale is not None:
            table = np.zeros(self.numbers.shape)
            table[:, : len(opt.method.numbers)] = values
            table[:, flat.FACTOR] = table[:, flat.SIGN] = signs
            table[:, flat.AGE] = plan.ages
            self._send(self.numbers, table)
            self.values = [*values, signs] if scale is None else []
        for row, group in enumerate(plan.groups):
            if values[row][LR] == ELSEWHERE:
                self.numbers[row, LR].copy_(group["lr"].reshape(()), non_blocking=True)
        if scale is not None:
            factor = self.numbers[:, flat.SIGN] / scale.to(self.device, torch.float64).reshape(())
            self.numbers[:, flat.FACTOR].copy_(factor)
        if found_inf is not None:
            self.slots[1].add_(found_inf.to(self.device).reshape(()))
        step = opt._noise_step(self.device)
        if isinstance(step, Tensor):
            self.draw[0].copy_(step + first_draw(opt))
            self.drawn[0] = -1
        elif self.drawn[0] != step + first_draw(opt):
            self.drawn[0] = step + first_draw(opt)
            self.draw[0].fill_(self.drawn[0])
        if self.drawn[1] != opt.param_groups[0]["seed"]:
            self.drawn[1] = opt.param_groups[0]["seed"]
            self.draw[1].fill_(self.drawn[1])

    def _send(self, target: Tensor, table: NDArray[Any]) -> None:
        """Copy a table to the device without waiting for it."""
        host = torch.from_numpy(table)
        if self.device.type != "cuda":
            target.copy_(host)
        elif self.capturing:
            # Pinned memory of its own, made before: a graph reads it at every replay.
            stage = self._stage(host)
            stage.copy_(host)
            target.copy_(stage, non_blocking=True)
        else:
            target.copy_(host.pin_memory(), non_blocking=True)

    def _stage(self, host: Tensor) -> Tensor:
        for i, stage in enumerate(self.stages):
            if stage.shape == host.shape and stage.dtype == host.dtype:
                self.captured.append(self.stages.pop(i))
                return stage
        raise RuntimeError(
            "fused=True: run a step without capture between two captures of the same optimizer"
        )

    def _prepare_capture(self) -> None:
        """Have pinned memory ready for a capture."""
        wanted = [self.numbers, *(mine.table for _, mine in self.parts)]
        if len(self.stages) < len(wanted):
            self.stages = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in wanted]

    # -------------------------------------------------------------------- passes
    def replay(self, opt: RuleOptimizer, plan: FusedPlan) -> bool:
        """Perform both passes as recorded; False where the host has a say between them."""
        shards = opt._ranks.sharded
        if self.device.type != "cuda" or not self.compiled or self.capturing or shards:
            return False
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            side = torch.cuda.stream(torch.cuda.Stream(self.device))
            with no_garbage(), self._here(), side:
                self.graph.capture_begin(capture_error_mode="thread_local")
                self.first_pass(opt, plan)
                self._update(plan)
                self.graph.capture_end()
        self.graph.replay()
        self._finish(opt)
        return True

    def first_pass(self, opt: RuleOptimizer, plan: FusedPlan) -> None:
        """Find η, and whether all weights and derivatives are within their limit."""
        from upgd.optim.fused import rows_of

        with self._here():
            for part, mine in self.parts:
                tables = (mine.table, mine.items, self.numbers, self.slots)
                if part.reduction == "max":
                    self.kernels.reduce_kernel[mine.grid](*tables, self.clocks, **mine.reduce)
                elif part.reduction == "row_norm":
                    self.kernels.norms_kernel[(len(part.rows),)](
                        mine.table, mine.rows, self.numbers, self.slots, mine.norms, **mine.norm
                    )
                else:
                    self.kernels.check_kernel[mine.grid](*tables, **mine.check)
        if opt._ranks.sharded:
            self.slots[1].copy_(opt._combine_finite(self.slots[1] == 0).logical_not())
        if opt._ranks.sharded and opt.method.phases[0].reduce == "max":
            self.slots[0].copy_(opt._combine(self.slots[0].clone()))
        elif opt._ranks.sharded and opt.method.phases[0].reduce == "row_norm":
            opt._combine_rows([x for part, mine in self.parts for x in rows_of(part, mine.norms)])

    def finite(self) -> bool:
        """Whether the step counts; waits for the device."""
        return bool(self.slots[1] == 0)

    def second_pass(self, opt: RuleOptimizer, plan: FusedPlan) -> None:
        """Update and count."""
        with self._here():
            self._update(plan)
        self._finish(opt)

    def _update(self, plan: FusedPlan) -> None:
        for i, (_, mine) in enumerate(self.parts):
            last = i == len(self.parts) - 1
            self.kernels.update_kernel[mine.grid](
                *(mine.table, mine.items, self.numbers, self.slots, mine.norms, self.clocks),
                *(self.done, self.iota, self.draw, len(plan.clocks) if last else 0),
                **mine.update,
            )

    def _finish(self, opt: RuleOptimizer) -> None:
        self.compiled = True
        self.drawn[0] += 1  # as the kernel did
        capturable = any(group["capturable"] for group in opt.param_groups)
        if capturable and self.device.type == "cuda" and not self.capturing:
            self._prepare_capture()

    def _here(self) -> Any:
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            return contextlib.nullcontext()
        return torch.cuda.device(self.device)


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """A NumPy array on the device."""
    if device.type != "cuda":
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)
