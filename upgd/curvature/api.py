"""The public functions: gradients and Hessian diagonals of a loss in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from upgd.curvature.freshness import drop_reset, is_reset, stale, stamp
from upgd.curvature.graph import Edge, Node, operation, reachable
from upgd.curvature.hutchinson import hutchinson
from upgd.curvature.walk import RULES, TAPS, Walk

Curvature: TypeAlias = Literal["hesscale", "ggn", "hutchinson"]


def backward(
    loss: Tensor,
    params: Iterable[Tensor] | None = None,
    *,
    method: Curvature = "hesscale",
    features: Any = None,
    scaler: Any = None,
    retain_graph: bool = False,
    samples: int = 1,
    seed: int | None = None,
) -> None:
    """Do what ``loss.backward()`` does, and also store a Hessian diagonal on the parameters.

    Every parameter that gets a ``.grad`` gets a ``.curvature`` of its shape, which
    second-order optimizers read once. Like gradients, curvatures of several calls accumulate
    until the optimizer's ``step()`` or ``zero_grad()``; a curvature whose gradient has been
    reset by other means is replaced.

    Args:
        loss: A one-element tensor.
        params: Store curvature on these only (all leaves get gradients); by default on all
            leaves of the graph.
        method: ``"hesscale"``, an approximation that is exact wherever Hessians with respect
            to activations are diagonal; ``"ggn"``, the same recursion without the second
            derivatives of the network (Gauss-Newton; the first nonlinear operation below the
            loss counts as part of it), never negative; ``"hutchinson"``, unbiased and noisy, for
            graphs with any operations.
        features: A :class:`~upgd.Features`: fill ``first`` and ``second`` of its layers.
        scaler: A ``GradScaler``: gradients are those of the scaled loss, as its ``step``
            expects, and curvature that of the loss itself.
        retain_graph: As in ``loss.backward``.
        samples: How many random vectors ``"hutchinson"`` averages over.
        seed: Determines those vectors; by default PyTorch's global generator does.

    Raises:
        UnsupportedOperationError: The graph contains an operation without a rule. Nothing has
            been changed.

    Example:
        >>> import torch
        >>> from upgd import curvature
        >>> model = torch.nn.Linear(3, 1)
        >>> curvature.backward(model(torch.ones(5, 3)).square().mean())
        >>> model.weight.curvature  # d²/dw² of the mean of (w·x + b)² is 2·x²
        tensor([[2., 2., 2.]])
    """
    _check(loss, method, samples)
    wanted = None if params is None else list(params)
    layers = () if features is None else tuple(features.layers)
    for layer in layers:
        layer.begin()
    scale = None
    if scaler is not None:
        scaled = scaler.scale(loss)
        scale = scaler.scale(torch.ones((), device=loss.device))
    else:
        scaled = loss
    factor = None if scale is None else 1 / scale
    if method == "hutchinson":
        options = {"samples": samples, "seed": seed, "retain_graph": retain_graph}
        found = _hutchinson_backward(scaled, wanted, layers, factor, **options)
    else:
        walk = Walk(scaled, wanted, method, owners=layers, factor=factor)
        for p in walk.leaves:
            _drop_stale(p)
        with _explained():
            walk.run(lambda: scaled.backward(retain_graph=retain_graph))
        found = list(zip(walk.leaves, walk.found(), strict=True))
    seen: set[int] = set()
    for p, h in found:
        if p.grad is not None:
            if h is None:
                h = torch.zeros_like(p)
            elif h.data_ptr() in seen or 0 in h.stride():  # parameters must not share memory
                h = h.clone()
            seen.add(h.data_ptr())
            _leave(p, h, factor)
    for layer in layers:
        layer.end()


def diagonal(
    loss: Tensor,
    tensors: Sequence[Tensor],
    *,
    method: Curvature = "hesscale",
    samples: int = 1,
    seed: int | None = None,
) -> list[Tensor]:
    """The Hessian diagonal of `loss` with respect to `tensors`, without side effects.

    The counterpart of ``torch.autograd.grad``: `tensors` may be parameters or intermediate
    results. The graph is kept, and no hooks run (except with ``"hutchinson"``).
    Arguments as in :func:`backward`.

    Example:
        >>> import torch
        >>> from upgd import curvature
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> a = 3 * x
        >>> curvature.diagonal(a.pow(3).sum(), [x, a])
        [tensor([162., 324.]), tensor([18., 36.])]
    """
    _check(loss, method, samples)
    edges = [_edge(t) for t in tensors]
    if method == "hutchinson":
        targets = [GradientEdge(*edge) for edge in edges]
        _, found = hutchinson(loss, targets, [None] * len(edges), samples, seed, True)
    else:
        inner = [edge for t, edge in zip(tensors, edges, strict=True) if t.grad_fn is not None]
        walk = Walk(loss, tensors, method, inner)
        walk.run_alone(loss)
        of_leaf = {id(p): h for p, h in zip(walk.leaves, walk.found(), strict=True)}
        found = [
            of_leaf.get(id(t)) if t.grad_fn is None else walk.found_at(edge)
            for t, edge in zip(tensors, edges, strict=True)
        ]
    return [
        torch.zeros_like(t) if h is None else h.detach().expand_as(t)
        for t, h in zip(tensors, found, strict=True)
    ]


def unsupported(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
    """Which modules of `model` use operations that have no curvature rule.

    Runs ``model(*args, **kwargs)`` once. The keys are the modules' names and classes, the
    values the operations that need a rule (:func:`register`).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from upgd import curvature
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.GLU(), nn.Linear(2, 2))
        >>> curvature.unsupported(model, torch.ones(1, 4))
        {'1 (GLU)': ['Glu']}
    """
    census = _Census(model)
    with torch.enable_grad():
        output = census.call(*args, **kwargs)
    del output
    found: dict[str, list[str]] = {}
    for node, owner in census.owners.items():
        name = operation(node.name())
        if not hasattr(node, "variable") and name not in RULES:
            found.setdefault(owner, []).append(name)
    return {owner: sorted(set(names)) for owner, names in found.items()}


# ------------------------------------------------------------------------- internals
def _check(loss: Tensor, method: str, samples: int) -> None:
    if method not in get_args(Curvature):
        known = ", ".join(map(repr, get_args(Curvature)))
        raise ValueError(f"curvature must be one of {known}; got {method!r}")
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples!r}")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"the loss must be a tensor with one element, got {shape}")
    if loss.grad_fn is None:
        raise ValueError(
            "the loss has no graph: it does not depend on a parameter, or was computed under "
            "torch.no_grad()"
        )


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise RuntimeError(
            "checkpointed blocks provide their activations once, and curvature needs them again; "
            "call curvature.diagonal(loss, params) first, which does not free them, store the "
            "results on the parameters as p.curvature, and call loss.backward()"
        ) from error


def _edge(t: Tensor) -> Edge:
    node, output = get_gradient_edge(t)[:2]
    return node, output


def _drop_stale(p: Tensor) -> None:
    """Remove a curvature whose gradient has been reset since."""
    kept: Tensor | None = p.__dict__.pop("curvature", None)
    if kept is None or stale(p, kept) is not None:
        return
    kept = drop_reset(kept, is_reset([p]))
    if kept is not None:
        p.curvature = kept  # type: ignore[attr-defined]


def _leave(p: Tensor, h: Tensor, factor: Tensor | None) -> None:
    """Store `h` on `p`, adding to the result of an earlier call in the same step."""
    if factor is not None:
        h = h * factor.to(h.device, h.dtype)
    before: Tensor | None = p.__dict__.get("curvature")
    if before is not None:
        h = before + h
    stamp(h, p)
    p.curvature = h  # type: ignore[attr-defined]


def _hutchinson_backward(
    loss: Tensor,
    wanted: list[Tensor] | None,
    layers: tuple[Any, ...],
    factor: Tensor | None,
    **options: Any,
) -> list[tuple[Tensor, Tensor | None]]:
    """Store gradients on all leaves and curvature in the taps; return that of the leaves."""
    nodes = list(reachable(loss.grad_fn))
    leaves = [node for node in nodes if hasattr(node, "variable")]
    if wanted is not None:  # leaves that only get a gradient come last
        chosen = {id(p) for p in wanted}
        leaves.sort(key=lambda node: id(node.variable) not in chosen)
        count = sum(id(node.variable) in chosen for node in leaves)
    else:
        count = len(leaves)
    tapped = [
        (node, tap)
        for node in (nodes if layers else ())
        for tap in node.metadata.get(TAPS, ())
        if tap.owner in layers
    ]
    edges = [GradientEdge(node, tap.output) for node, tap in tapped]
    edges += [GradientEdge(leaf, 0) for leaf in leaves]
    taps = [*(tap for _, tap in tapped), *[None] * count]
    gradients, curvatures = hutchinson(loss, edges, taps, **options)
    for (_, tap), g in zip(tapped, gradients, strict=False):
        if g is not None:
            tap.owner.add(tap.value, g)
    for layer in layers:
        layer.count()
    for tap, h in zip(taps, curvatures, strict=False):
        if tap is not None:
            tap.reduce(tap.value.new_zeros(()) if h is None else h, factor)
    params = [leaf.variable for leaf in leaves]
    given = [(p, g) for p, g in zip(params, gradients[len(tapped) :], strict=True) if g is not None]
    for p, g in given:
        _drop_stale(p)
        if p._backward_hooks:  # they have run on this gradient already
            p.grad = g.clone() if p.grad is None else p.grad.add_(g)
            for hook in (p._post_accumulate_grad_hooks or {}).values():
                hook(p)
    rest = [(p, g) for p, g in given if not p._backward_hooks]
    if rest:
        torch.autograd.backward([p for p, _ in rest], [g for _, g in rest])
    return list(zip(params, curvatures[len(tapped) :], strict=False))[:count]


class _Census:
    """Finds out which module made which node of the graph."""

    def __init__(self, model: nn.Module) -> None:
        self.owners: dict[Node, str] = {}
        self._model = model
        self._stack = [f"({type(model).__name__})"]

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model and record the innermost module of every node."""
        handles = []
        for name, module in self._model.named_modules():
            if module is not self._model:
                label = f"{name} ({type(module).__name__})"
                handles.append(module.register_forward_pre_hook(partial(self._enter, label)))
                handles.append(module.register_forward_hook(self._leave))
        try:
            output = self._model(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        self._claim(output)
        return output

    def _enter(self, label: str, module: nn.Module, args: Any) -> None:
        self._claim(args)  # operations on the inputs belong to outer modules
        self._stack.append(label)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._claim(output)
        self._stack.pop()

    def _claim(self, values: Any) -> None:
        tensors = [t for t in tree_leaves(values) if isinstance(t, Tensor)]
        roots = [t.grad_fn for t in tensors if t.grad_fn is not None]
        for node in list(reachable(*roots, seen=self.owners)):
            self.owners[node] = self._stack[-1]
