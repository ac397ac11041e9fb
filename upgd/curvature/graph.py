"""Helpers for PyTorch's autograd graph."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Container, Iterator, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

Node: TypeAlias = Any  # torch.autograd.graph.Node, whose saved tensors have no static type
Edge: TypeAlias = tuple[Node, int]


@cache
def operation(name: str) -> str:
    """``"AddmmBackward0"`` → ``"Addmm"``."""
    return re.sub(r"(Backward|Backwards)\d*$", "", name.rsplit("::", 1)[-1])


def reachable(*roots: Node, seen: Container[Node] = ()) -> Iterator[Node]:
    """The nodes below `roots`, themselves included, nearest first; not past those in `seen`."""
    queue = deque(dict.fromkeys(root for root in roots if root not in seen))
    known = set(queue)
    while queue:
        node = queue.popleft()
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in known and below not in seen:
                known.add(below)
                queue.append(below)


# --------------------------------------------------------------------- using a node's formula
def apply(node: Node, *vectors: Tensor | None) -> tuple[Tensor | None, ...]:
    """A node's vector-Jacobian products, one per input; no hooks are run."""
    if callable(node):
        result = node(*vectors)
    else:  # the context of an autograd.Function, which expects zeros and not None
        full = zip(vectors, node._input_metadata, strict=True)
        result = node.apply(*[_zeros(meta) if v is None else v for v, meta in full])
    return result if isinstance(result, tuple) else (result,)


def _zeros(meta: Any) -> Tensor:
    return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)


def as_expected(t: Tensor, edge: Edge) -> Tensor:
    """Sum over broadcast dimensions, move and cast, as the autograd engine does."""
    meta = edge[0]._input_metadata[edge[1]]
    t = t if list(t.shape) == meta.shape else t.sum_to_size(meta.shape)
    return t.to(meta.device, meta.dtype)


@torch.no_grad()
def derivative(of: Tensor, edge: Edge, stops: Sequence[Edge]) -> Tensor | None:
    """The gradient of ``of.sum()`` at `edge`, with everything else at `stops` held fixed.

    A small engine for the few nodes in between: it runs no hooks, visits no other part of the
    graph, and may be used inside a backward pass.
    """
    if of.grad_fn is None:
        return None
    ends = set(stops)
    order: list[Node] = []
    stack, seen = [(of.grad_fn, False)], set()
    while stack:  # children first
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(n, False) for n, i in node.next_functions if n and (n, i) not in ends]
    arrived: dict[Edge, Tensor] = {(of.grad_fn, of.output_nr): torch.ones_like(of)}
    for node in reversed(order):
        outputs = [arrived.pop((node, i), None) for i in range(len(node._input_metadata))]
        if hasattr(node, "variable") or all(v is None for v in outputs):
            continue
        for below, part in zip(node.next_functions, apply(node, *outputs), strict=False):
            if below[0] is not None and part is not None:
                part = as_expected(part, below)
                arrived[below] = part + arrived[below] if below in arrived else part
    return arrived.get(edge)
