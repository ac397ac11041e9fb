"""One pass through the autograd graph beside the gradient's, propagating second derivatives.

PyTorch's graph of a loss contains every operation, branch and saved tensor, whatever modules or
functions made it. :class:`Walk` goes down that graph with the curvature `h` of each
operation's output: once all consumers of the output have sent theirs, the operation's rule turns
it into the curvature of its inputs, which is sent on. An operation that bends its inputs also
needs the gradient `g`: it waits for a hook that the engine calls on reaching it. Every
operation is passed once and nothing outlives its use, so time and memory are those of a second
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from upgd.curvature.graph import Edge, Node, apply, as_expected, operation, reachable

Curvatures: TypeAlias = "Tensor | Sequence[Tensor | None] | None"
Recursion: TypeAlias = Literal["hesscale", "ggn"]
T = TypeVar("T")

TAPS = "upgd.taps"
"""Key in a node's metadata: list of :class:`Tap` on that node's outputs."""


@dataclass(slots=True)
class Op:
    """One operation ``y = f(x, ...)``, as a rule sees it.

    Attributes:
        node: The operation's autograd node. ``node(v)`` is its vector-Jacobian product, and
            ``node._saved_...`` are the tensors it keeps.
        g: ``∂L/∂y``; None if it is zero or not wanted ("ggn").
        h: Curvature ``∂²L/∂y²``, elementwise; None if it is zero.
        gs, hs: The same for operations with several outputs.
        needs: For each input, whether its curvature is wanted.
        edges: For each input, the node (and its output) that made it.
    """

    node: Node
    gs: Sequence[Tensor | None]
    hs: Sequence[Tensor | None]
    needs: tuple[bool, ...]
    edges: tuple[Edge, ...]

    @property
    def g(self) -> Tensor | None:
        return self.gs[0]

    @property
    def h(self) -> Tensor | None:
        return self.hs[0]


def _always(node: Node) -> bool:
    return True


def _never(node: Node) -> bool:
    return False


@dataclass(frozen=True)
class Rule:
    """How an operation propagates curvature; see :func:`register`."""

    fn: Callable[[Op], Curvatures]
    linear: Callable[[Node], bool] = _never
    shaped: bool = False


_COMPILED = "CompiledFunction"  # what torch.compile makes of many operations
RULES: dict[str, Rule] = {}
"""Rules by operation, e.g. ``"Addmm"`` for the nodes ``AddmmBackward0``."""

CHECKS: dict[Callable[[Op], Curvatures], Callable[[Node], None]] = {}
"""For rules that do not serve every node, a check that raises."""


def register(
    *names: str, linear: bool | Callable[[Node], bool] = False, shaped: bool = False
) -> Callable[[Callable[[Op], Curvatures]], Callable[[Op], Curvatures]]:
    """Register a rule for an operation; :class:`Op` is what a rule receives.

    Args:
        names: Operations as the error for an unsupported one names them: ``"Sinc"``, or
            the autograd node's full name. An ``autograd.Function`` goes by its class name.
        linear: The operation is linear or piecewise linear: it needs no gradient, and where
            no curvature comes from above the rule is not called. May be a function of the
            node.
        shaped: The rule's results have the shapes of the inputs; spares a check. Without
            it they may have the output's shape and are summed over what was broadcast.

    Example:
        A sine has ``h_x = h·cos²x - g·sin x``. (:func:`elementwise` would work it out.)

        >>> from upgd import curvature
        >>> @curvature.register("Sin")
        ... def sine(op):
        ...     x = op.node._saved_self
        ...     inherited = 0 if op.h is None else op.h * x.cos() ** 2
        ...     own = 0 if op.g is None else op.g * x.sin()
        ...     return inherited - own
    """
    if isinstance(linear, bool):
        linear = _always if linear else _never

    def put(fn: Callable[[Op], Curvatures]) -> Callable[[Op], Curvatures]:
        for name in names:
            RULES[operation(name)] = Rule(fn, linear, shaped)
        return fn

    return put


class UnsupportedOperationError(NotImplementedError):
    """An operation between the loss and a parameter has no curvature rule."""


@dataclass(eq=False)
class Tap:
    """A request for the curvature of factors, fixed at 1, on the features of a tensor.

    It is kept in the metadata of the tensor's autograd node, and freed with the graph.
    """

    owner: Any  # made the request
    value: Tensor  # the tensor, detached
    output: int  # which of the node's outputs it is
    axis: int  # along which its features lie
    receive: Callable[[Tensor], None]  # takes the second derivative by each feature's factor

    def reduce(self, products: Tensor, factor: Tensor | None) -> None:
        """Pass on the sum over all elements of each feature, times `factor`."""
        products = products.expand_as(self.value).movedim(self.axis, 0)
        second = products.reshape(products.shape[0], -1).sum(1)
        self.receive(second if factor is None else second * factor.to(second.device))


class _Stop:
    """The state of a node during the walk."""

    rule: Rule | None = None
    waits = False  # for a gradient
    expected = 0  # how many consumers have not sent yet
    taps: Sequence[Tap] = ()
    edges: tuple[Edge, ...] = ()
    needs: tuple[bool, ...] = ()
    to: Sequence[tuple[_Stop, int] | None] = ()  # where each input's curvature goes

    def __init__(self, node: Node, needed: bool) -> None:
        self.node = node
        self.needed = needed
        self.arrived: dict[int, Tensor] = {}  # by output


class Walk:
    """Curvature of a loss with respect to chosen tensors, by one recursion.

    Args:
        loss: A one-element tensor with a graph.
        leaves: Leaf tensors whose curvature is wanted; None: all of them.
        method: ``"hesscale"``, or ``"ggn"``, which leaves out the second derivatives of
            everything but the loss, that is, but the first nonlinear operation on the way down.
        edges: Further places in the graph whose curvature is wanted.
        owners: Owners of the taps to serve.
        factor: Multiplies their curvatures.
    """

    def __init__(
        self,
        loss: Tensor,
        leaves: Iterable[Tensor] | None,
        method: Recursion,
        edges: Iterable[Edge] = (),
        owners: Iterable[Any] = (),
        factor: Tensor | None = None,
    ) -> None:
        self._ggn = method == "ggn"
        self._wanted = None if leaves is None else {id(p) for p in leaves}
        self._places = set(edges)
        self._owners = set(owners)
        self._factor = factor
        self._stops: dict[Node, _Stop] = {}
        self._leaves: list[_Stop] = []
        self._inner: list[_Stop] = []
        self._at_places: dict[Edge, Tensor] = {}
        self._root: Node = loss.grad_fn
        self._survey(self._root)

    @property
    def leaves(self) -> list[Tensor]:
        """The wanted leaves that the loss depends on."""
        return [stop.node.variable for stop in self._leaves]

    def found(self) -> list[Tensor | None]:
        """The curvature of each of :attr:`leaves`; None is zero."""
        return [stop.arrived.get(0) for stop in self._leaves]

    def found_at(self, edge: Edge) -> Tensor | None:
        """The curvature at one of the further places; None is zero."""
        return self._at_places.get(edge)

    # ------------------------------------------------------------------- before
    def _survey(self, root: Node) -> None:
        """Find the nodes between the loss and the targets, and their rules."""
        places = {node for node, _ in self._places}
        edges: dict[Node, tuple[Edge, ...]] = {}
        stops = self._stops
        stack = [root]
        while stack:
            node = stack[-1]
            if node not in edges:
                edges[node] = below = node.next_functions
                stack += [n for n, _ in below if n is not None and n not in edges]
                continue
            stack.pop()
            if node in stops:
                continue
            below = edges[node]
            if not below and hasattr(node, "variable"):
                needed = self._wanted is None or id(node.variable) in self._wanted
                stops[node] = stop = _Stop(node, needed)
                if needed:
                    self._leaves.append(stop)
                continue
            to = [(stops[n], i) if n is not None and stops[n].needed else None for n, i in below]
            taps = node.metadata.get(TAPS, ()) if self._owners else ()
            taps = [tap for tap in taps if tap.owner in self._owners]
            on_the_way = any(to)
            stop = stops[node] = _Stop(node, on_the_way or bool(taps) or node in places)
            if stop.needed:
                stop.taps = taps
                stop.edges = below
                stop.to = to
                stop.needs = tuple([target is not None for target in to])
                self._inner.append(stop)
            if on_the_way:
                stop.rule = _rule(node)
                stop.waits = not stop.rule.linear(node)
                for target in to:
                    if target is not None:
                        target[0].expected += 1

    # ------------------------------------------------------------------- during
    def run(self, backward: Callable[[], T]) -> T:
        """Call `backward`, which runs the engine from the loss, and walk along."""
        handles = [
            stop.node.register_prehook(partial(self._go_on, stop))
            for stop in self._inner
            if stop.waits
        ]
        try:
            root = self._stops[self._root]
            if root.needed and not root.waits:
                self._go_on(root)
            return backward()
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def run_alone(self, loss: Tensor) -> None:
        """Walk and compute gradients without the autograd engine: no hooks, no freed graph."""
        root = self._stops[self._root]
        if root.needed and not root.waits:
            self._go_on(root)
        gradients: dict[Edge, Tensor] = {(self._root, loss.output_nr): torch.ones_like(loss)}
        for stop in reversed(self._inner):  # consumers come before what they consume
            outputs = range(len(stop.node._input_metadata))
            grads = [gradients.pop((stop.node, i), None) for i in outputs]
            if stop.waits:
                self._go_on(stop, grads)
            if all(g is None for g in grads):
                continue
            for target, edge, g in zip(stop.to, stop.edges, apply(stop.node, *grads), strict=False):
                if target is not None and g is not None:
                    g = as_expected(g, edge)
                    gradients[edge] = g if edge not in gradients else gradients[edge] + g

    def _go_on(self, stop: _Stop, grads: Sequence[Tensor | None] = ()) -> None:
        """Process `stop`, and every complete node below it that needs no gradient."""
        self._pass(stop, grads)
        ready = [stop]
        while ready:
            for target in ready.pop().to:
                if target is not None:
                    below = target[0]
                    below.expected -= 1
                    if below.expected == 0 and not below.waits:
                        self._pass(below)
                        ready.append(below)

    def _pass(self, stop: _Stop, grads: Sequence[Tensor | None] = ()) -> None:
        """Pass curvature on: to taps, to requested edges, and through the rule to the inputs."""
        if not stop.edges:  # a leaf keeps it
            return
        node, rule = stop.node, stop.rule
        arrived, stop.arrived = stop.arrived, {}
        if not arrived and not stop.waits and not stop.taps:
            return
        grads = grads or [None] * len(node._input_metadata)
        hs = [arrived.get(i) for i in range(len(grads))]
        if self._places:
            here = {(node, i): h for i, h in arrived.items()}
            self._at_places.update((e, h) for e, h in here.items() if e in self._places)
        for tap in stop.taps:
            h = hs[tap.output]
            value = tap.value.to(wide(tap.value.dtype))
            tap.reduce(value.new_zeros(()) if h is None else value * value * h, self._factor)
        if rule is None or (not arrived and not stop.waits):
            return
        # Inside the network, second derivatives are dropped.
        if stop.waits and self._ggn and arrived:
            grads = [None] * len(grads)
        parts = rule.fn(Op(node, grads, hs, stop.needs, stop.edges))
        if stop.waits and self._ggn and not arrived:  # the loss, where it is convex
            parts = [parts] if parts is None or isinstance(parts, Tensor) else parts
            parts = [None if h is None else h.clamp_min(0) for h in parts]
        self._send(stop, parts)

    def _send(self, stop: _Stop, parts: Curvatures) -> None:
        if parts is None or isinstance(parts, Tensor):
            parts = (parts,)
        shaped = stop.rule is None or stop.rule.shaped
        for target, h in zip(stop.to, parts, strict=False):
            if target is None or h is None:
                continue
            below, output = target
            if not shaped:
                h = as_expected(h, (below.node, output))
            before = below.arrived.get(output)
            below.arrived[output] = h if before is None else before + h


def _rule(node: Node) -> Rule:
    name = node.name()
    rule = RULES.get(operation(name))
    if rule is None:
        raise UnsupportedOperationError(_unsupported(node, operation(name)))
    if rule.fn in CHECKS:
        CHECKS[rule.fn](node)
    return rule


def _unsupported(node: Node, name: str) -> str:
    near = _leaf_below(node)
    where = "" if near is None else f" on the way to a parameter of shape {tuple(near.shape)}"
    if name == _COMPILED:
        return (
            f"torch.compile hides the operations{where}; take curvature (order=2) of the model as "
            "it was before torch.compile. The optimizer's step may be compiled"
        )
    trace = node.metadata.get("traceback_")
    line = f"\nIt was made here:\n{''.join(trace[-2:])}" if trace else ""
    return (
        f"no curvature rule for the operation {name!r} ({node.name()}){where}. "
        "curvature='hutchinson' (in upgd.curvature: method='hutchinson') needs no rules; "
        "upgd.curvature.unsupported(model, inputs) tells which modules use the operation, and "
        f"upgd.curvature.register({name!r}) takes a rule for it (if it is elementwise: "
        f"upgd.curvature.register({name!r})(upgd.curvature.elementwise)){line}"
    )


def _leaf_below(node: Node) -> Tensor | None:
    return next((n.variable for n in reachable(node) if hasattr(n, "variable")), None)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type for squares and sums of half-precision values."""
    return torch.promote_types(dtype, torch.float32)
