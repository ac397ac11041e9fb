"""Rules that serve many operations, and the operations they serve.

An operation ``y = f(x)`` passes curvature on as

    ``h_x[i] = Σ_k h_y[k]·(∂y_k/∂x_i)² + Σ_k g_k·∂²y_k/∂x_i²``

which is exact if the loss's Hessian with respect to `y` is diagonal; HesScale drops its
off-diagonal elements wherever they arise. Most operations need no formula: their autograd
node computes vector-Jacobian products, and for the three kinds below those are enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

from upgd.curvature.graph import Edge, Node, apply, derivative, operation
from upgd.curvature.walk import CHECKS, Curvatures, Op, UnsupportedOperationError, register


def vjp(op: Op, *vectors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The operation's vector-Jacobian products, one per input."""
    return apply(op.node, *vectors)


def selection(op: Op) -> Curvatures:
    """All coefficients are 0 or 1, so that squaring them changes nothing: ``Jᵀh``."""
    return vjp(op, *op.hs)


def scaling(op: Op) -> Curvatures:
    """Linear, and an element of the input enters one element of the output: ``Jᵀh · Jᵀ1``."""
    if op.h is None:
        return None
    parts = zip(vjp(op, op.h), vjp(op, torch.ones_like(op.h)), strict=True)
    return [None if a is None or b is None else a * b for a, b in parts]


def elementwise(op: Op) -> Curvatures:
    """An element of each input enters one element of the output, linearly or not.

    Inputs must have the output's shape or be broadcast to it, unless the output is a scalar, such
    as a loss; anything else is refused before the walk begins. The second derivative comes from
    differentiating the node once more, so any elementwise operation that can be differentiated
    twice is served. A tensor that enters twice (``x * x``) is treated as one input; different
    inputs are each treated with the others fixed.
    """
    places: dict[Edge, list[int]] = {}
    for i, (edge, need) in enumerate(zip(op.edges, op.needs, strict=True)):
        if need:
            places.setdefault(edge, []).append(i)
    found: list[Tensor | None] = [None] * len(op.edges)
    for edge, indices in places.items():
        if op.h is not None:
            slopes = [vjp(op, v) for v in (op.h, torch.ones_like(op.h))]
            down, slope = (_total([each[i] for i in indices]) for each in slopes)
            found[indices[0]] = None if down is None or slope is None else down * slope
        if op.g is not None:
            with torch.enable_grad():
                first = _total([vjp(op, op.g)[i] for i in indices])
            second = None if first is None else derivative(first, edge, op.edges)
            found[indices[0]] = _sum(found[indices[0]], second)
    return found


def _check_elementwise(node: Node) -> None:
    """Raise if the shapes show that an operation is not elementwise."""
    output = tuple(node._input_metadata[0].shape)
    edges = [(below, i) for below, i in node.next_functions if below is not None]
    shapes = [tuple(below._input_metadata[i].shape) for below, i in edges]
    wrong = [shape for shape in shapes if output and not _is_broadcast(shape, output)]
    if wrong:
        raise UnsupportedOperationError(
            f"{operation(node.name())!r} is registered as elementwise and is not: it makes an "
            f"output of shape {output} of an input of shape {wrong[0]}; curvature='hutchinson' "
            "needs no rules"
        )


def _is_broadcast(shape: tuple[int, ...], output: tuple[int, ...]) -> bool:
    padded = (1,) * (len(output) - len(shape)) + shape
    return len(padded) == len(output) and all(
        a in (1, b) for a, b in zip(padded, output, strict=True)
    )


CHECKS[elementwise] = _check_elementwise


def _total(parts: list[Tensor | None]) -> Tensor | None:
    total = None
    for part in parts:
        total = part if total is None else total if part is None else total + part
    return total


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """`b` has the input's shape; `a` may still have the output's."""
    if a is None or b is None:
        return b if a is None else a
    return a.sum_to_size(b.shape) + b


_VIEWS = (
    "Alias AsStrided Diagonal Expand Permute ReshapeAlias Select Slice Split SplitWithSizes "
    "Squeeze T Transpose Unbind Unfold UnsafeSplit UnsafeView Unsqueeze View"
)
_COPIES = (
    "Cat Clone ConstantPadNd Cumsum Embedding Flip Gather Index IndexSelect MaskedSelect "
    "PixelShuffle PixelUnshuffle ReflectionPad1D ReflectionPad2D Repeat ReplicationPad1D "
    "ReplicationPad2D Roll Stack Sum ToCopy Tril Triu UpsampleNearest1D UpsampleNearest2D"
)
_CHOICES = (
    "AdaptiveMaxPool2D AdaptiveMaxPool3D Hardtanh Hardshrink Max MaxPool2DWithIndices "
    "MaxPool3DWithIndices Min Relu Threshold"
)
_MAY_BROADCAST = "Clamp ClampMax ClampMin Copy MaskedFill Where"
_SCALINGS = (
    "Abs Amax Amin Hardsigmoid LeakyRelu Maximum Mean Minimum NativeDropout Neg NllLoss NllLoss2D "
    "PreluKernel Rsub Softshrink Sub"
)
_FUNCTIONS = (
    "Atan Celu Cos Cosh Elu Erf Exp Expm1 Gelu Hardswish Log Log1P LogSigmoid Mish Pow "
    "Reciprocal Rsqrt Silu Sin Sinh Softplus Sqrt Tan"
)
_LOSSES = "BinaryCrossEntropy BinaryCrossEntropyWithLogits HuberLoss SmoothL1Loss SoftMarginLoss"

register(*_VIEWS.split(), *_COPIES.split(), *_CHOICES.split(), linear=True, shaped=True)(selection)
register(*_MAY_BROADCAST.split(), linear=True)(selection)
register(*_SCALINGS.split(), linear=True)(scaling)
register(*_FUNCTIONS.split())(elementwise)
register(*_LOSSES.split())(elementwise)


# ---------------------------------------------------------------- frequent functions
@register("Tanh", shaped=True)
def tanh(op: Op) -> Curvatures:
    """σ' = 1 - y², σ'' = -2·y·σ'"""
    y = op.node._saved_result
    first = 1 - y * y
    inner = None if op.h is None else op.h * first
    if op.g is not None:
        inner = torch.mul(op.g, y).mul_(-2) if inner is None else inner.addcmul_(op.g, y, value=-2)
    return None if inner is None else inner * first


@register("Sigmoid", shaped=True)
def sigmoid(op: Op) -> Curvatures:
    """σ' = y·(1-y), σ'' = σ'·(1-2y)"""
    y = op.node._saved_result
    first = y * (1 - y)
    inner = None if op.h is None else op.h * first
    if op.g is not None:
        inner = _sum(inner, op.g * (1 - 2 * y))
    return None if inner is None else inner * first


# ------------------------------------------------------------------------ arithmetic
def _two_inputs(node: Node) -> bool:
    edges = node.next_functions
    return len(edges) < 2 or edges[0] != edges[1]


@register("Add", linear=True)
def add(op: Op) -> Curvatures:
    """A sum passes its curvature to every term; x + x is one term."""
    if not _two_inputs(op.node):
        return elementwise(op)
    return (op.h, op.h) if getattr(op.node, "_saved_alpha", 1) == 1 else scaling(op)


@register("Mul", "Dot", linear=_two_inputs)
def mul(op: Op) -> Curvatures:
    """Each factor with the other one fixed; x·x is a square."""
    return scaling(op) if _two_inputs(op.node) else elementwise(op)


def _fixed_denominator(node: Node) -> bool:
    edges = node.next_functions
    return len(edges) < 2 or edges[1][0] is None


@register("Div", linear=_fixed_denominator)
def div(op: Op) -> Curvatures:
    """A quotient is linear in its numerator."""
    return scaling(op) if _fixed_denominator(op.node) else elementwise(op)


# -------------------------------------------------------------------------- softmax
@register("Softmax", "SafeSoftmax", shaped=True)
def softmax(op: Op) -> Curvatures:
    """Along a dimension."""
    y, dim = op.node._saved_result, _dim(op)
    parts = []
    if op.h is not None:
        hyy = op.h * y * y
        parts.append(hyy * (1 - 2 * y) + y * y * hyy.sum(dim, keepdim=True))
    if op.g is not None:
        mean = (op.g * y).sum(dim, keepdim=True)
        parts.append(y * (1 - 2 * y) * (op.g - mean))
    return sum(parts) if parts else None


@register("LogSoftmax", shaped=True)
def log_softmax(op: Op) -> Curvatures:
    """y = log q: with cross-entropy on top, which is linear in y, h_x = q - q² is exact."""
    dim = _dim(op)
    q = op.node._saved_result.exp()
    out = None
    if op.g is not None:
        out = torch.addcmul(q, q, q, value=-1).mul_(-op.g.sum(dim, keepdim=True))
    if op.h is not None:
        out = _sum(out, op.h * (1 - 2 * q) + q * q * op.h.sum(dim, keepdim=True))
    return out


@register("Logsumexp")
def logsumexp(op: Op) -> Curvatures:
    """y = log Σ exp x, with derivatives q and q - q²."""
    q = vjp(op, torch.ones_like(op.gs[0] if op.h is None else op.h))[0]  # type: ignore[arg-type]
    assert q is not None
    parts = []
    if op.h is not None:
        inherited = vjp(op, op.h)[0]
        parts.append(inherited * q)  # type: ignore[operator]
    if op.g is not None:
        weighted = vjp(op, op.g)[0]
        parts.append(weighted * (1 - q))  # type: ignore[operator]
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]


@register("MseLoss")
def mse_loss(op: Op) -> Curvatures:
    """L = c·Σ(x - t)² has the curvature 2·c."""
    x = op.node._saved_self
    parts: list[Tensor | None] = list(scaling(op) or (None, None))
    if op.g is not None:
        c = 2 / x.numel() if op.node._saved_reduction == 1 else 2.0
        own = (op.g * c).expand_as(x)
        parts = [_sum(part, own) for part in parts]
    return parts


def _dim(op: Op) -> int:
    """The saved dimension; autograd keeps -1 as an unsigned number."""
    dim: int = op.node._saved_dim
    return dim - 2**64 if dim >= 2**63 else dim
