"""The updates of a general stack as Triton kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from upgd.engine.branches import Branches
from upgd.kernels import triton_stored as kernels
from upgd.kernels.triton_rules import compile_rules

if TYPE_CHECKING:
    from upgd.engine.general import GeneralStack

BLOCK = 256


class FusedUpdates:
    """All groups' updates of a :class:`~upgd.engine.general.GeneralStack`, when called."""

    def __init__(self, stack: GeneralStack) -> None:
        self.stack = stack
        real = str(stack.dtype).removeprefix("torch.")
        self._rules = [compile_rules(group.row.method, real) for group in stack.groups]
        items: list[tuple[int, ...]] = []
        rows: list[tuple[int, int, int]] = []
        base = 0
        for number, shape in enumerate(stack.shapes):
            count = math.prod(shape)
            first = shape[0] if shape else 1
            span = -(-first // 4) * (count // first)
            height = shape[0] if len(shape) > 1 else 1
            width = count // height
            entry = (base, count, span, number, width, len(rows))
            items += [(*entry, start) for start in range(0, span, BLOCK)]
            rows += [(base + i * width, width, number) for i in range(height)]
            base += count
        device, runs = stack.device, len(stack.learners)
        self.items = torch.from_numpy(np.array(items, np.int32)).to(device)
        self.rows = torch.from_numpy(np.array(rows, np.int32)).to(device)
        self.iota = torch.arange(BLOCK, dtype=torch.int32, device=device)
        self.partial = torch.zeros(runs, dtype=stack.dtype, device=device)
        self.norms = torch.zeros(runs, len(rows), dtype=stack.dtype, device=device)
        self._branches = Branches(len(stack.groups), device)

    def __call__(self) -> None:
        """Update every group."""
        self.partial.fill_(-math.inf)
        self._branches.each(self._update)

    def _update(self, number: int) -> None:
        stack = self.stack
        group, states, rules = stack.groups[number], stack.states[number], self._rules[number]
        size, rows, tensors = stack.weights.shape[1], len(self.rows), len(stack.shapes)
        first = states if group.states else stack.weights
        arrays = (stack.weights, first, stack.gradients)
        if group.reduce == "max":
            kernels.reduce_kernel[(len(self.items), group.count)](
                *(*arrays, self.partial, self.items, stack.hyper, stack.corrections),
                *(group.first, size, tensors),
                RULE=rules.reduce,
                APART=group.apart,
                BLOCK=BLOCK,
            )
        elif group.reduce == "row_norm":
            kernels.norm_kernel[(rows, group.count)](
                *(*arrays, self.norms, self.rows, stack.hyper, group.first, size, rows, tensors),
                RULE=rules.reduce,
                BLOCK=BLOCK,
            )
        kernels.update_kernel[(len(self.items), group.count)](
            *(*arrays, self.partial, self.norms, self.items, self.iota, stack.hyper),
            *(stack.corrections, stack.seeds, stack.clock, group.first, group.count),
            *(size, rows, tensors),
            RULE=rules.update,
            STATES=len(group.states),
            GLOBAL=group.reduce == "max",
            LOCAL=group.reduce == "row_norm",
            APART=group.apart,
            NOISE=group.noise,
            BLOCK=BLOCK,
        )
