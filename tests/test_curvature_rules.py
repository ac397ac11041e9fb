"""Every curvature rule, one operation at a time, against exact second derivatives.

If the loss's Hessian with respect to an operation's output is diagonal, HesScale drops nothing:
what a rule says about the inputs and parameters of that operation must then be exact. So each
operation ``y = f(x, ...)`` is put under ``q(y) = Σ c·y + ½ Σ d·y²``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.cases import devices, every_device
from tests.exact import exact_diagonal
from upgd import curvature
from upgd.curvature.walk import operation, reachable

DOUBLE = torch.float64
Function = Callable[..., Tensor]
pytestmark = [  # of torch.func, which the exact side uses
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]


# ------------------------------------------------------------------------- the table
@dataclass(frozen=True)
class Case:
    """One operation.

    Attributes:
        build: Makes, on a device, the operation and the tensors it is differentiated by.
        count: How many tensors these are.
        exact: Makes the same function in operations that ``torch.func`` can differentiate, where
            the operation itself is random, changes buffers or lacks a formula.
        loss: Gauss-Newton keeps the operation's own curvature.
    """

    build: Callable[[str], tuple[Function, list[Tensor]]]
    count: int
    exact: Callable[[Function, list[Tensor]], Function] = lambda f, tensors: f
    loss: bool = False

    def make(self, device: str) -> tuple[Function, list[Tensor], Function]:
        torch.manual_seed(0)
        f, tensors = self.build(device)
        tensors = [t.detach().to(device, DOUBLE).requires_grad_() for t in tensors]
        return f, tensors, self.exact(f, tensors)


CASES: dict[str, Case] = {}


def function(name: str, f: Function, *shapes: Sequence[int], low: float = 0, **more: Any) -> None:
    """A function of normal tensors; with `low`, of tensors between `low` and `low` + 1."""

    def build(device: str) -> tuple[Function, list[Tensor]]:
        draw = torch.rand if low else torch.randn
        return f, [low + draw(list(shape)) if low else draw(list(shape)) for shape in shapes]

    CASES[name] = Case(build, len(shapes), **more)


def module(text: str, *shape: int, train: bool = False, **more: Any) -> None:
    """A module of ``torch.nn``, differentiated by its input and its parameters."""

    def build(device: str) -> tuple[Function, list[Tensor]]:
        m: nn.Module = eval(f"nn.{text}").to(device, DOUBLE).train(train)
        for key, buffer in m.named_buffers():  # statistics that are not 0 and 1
            if key.endswith("running_mean"):
                buffer.normal_()
            elif key.endswith("running_var"):
                buffer.uniform_(0.5, 2.0)
        names = [key for key, _ in m.named_parameters()]
        values = [p.detach() + 0.3 * torch.randn(p.shape).to(p) for p in m.parameters()]

        def f(x: Tensor, *params: Tensor) -> Tensor:
            given = dict(zip(names, params, strict=True))
            output: Tensor = torch.func.functional_call(m, given, (x,))
            return output

        return f, [torch.randn(*shape), *values]

    with torch.device("meta"):  # a look at it, without drawing random numbers
        count = len(list(eval(f"nn.{text}").parameters()))
    name = f"{text} on {shape}" + (" in training" if train else "")
    CASES[name] = Case(build, 1 + count, **more)


def same_mask(f: Function, tensors: list[Tensor]) -> Function:
    """The dropout that `f`, which seeds the generator, applies to a tensor of this shape."""
    mask = f(torch.ones_like(tensors[0])).detach()
    return lambda x: x * mask


def seeded(f: Function) -> Function:
    def with_seed(*args: Any) -> Tensor:
        torch.manual_seed(7)
        return f(*args)

    return with_seed


def weighted(pieces: Sequence[Tensor]) -> Tensor:
    """Each piece with another factor, in one vector, so that a swap would show."""
    return torch.cat([(k + 1) * piece.flatten() for k, piece in enumerate(pieces)])


INDEX = torch.tensor([[0, 2, 2], [1, 0, 3]])
CHOSEN = torch.tensor([2, 0, 2])
LABELS = torch.tensor([0, 2, 1, 2])


def on(like: Tensor, index: Tensor) -> Tensor:
    return index.to(like.device)


# Linear layers and products
module("Linear(4, 3)", 5, 4)
module("Linear(4, 3)", 1, 4)
module("Linear(4, 3)", 4)
module("Linear(4, 3)", 2, 3, 4)
module("Linear(4, 3, bias=False)", 5, 4)
module("Linear(4, 3, bias=False)", 4)
module("Linear(4, 3, bias=False)", 2, 3, 4)
module("Linear(1, 1)", 3, 1)
function("mm", torch.mm, (2, 3), (3, 4))
function("mm of transposed matrices", lambda a, b: torch.mm(a.t(), b.t()), (3, 2), (4, 3))
function("mv", torch.mv, (3, 4), (4,))
function("vector @ matrix", torch.matmul, (3,), (3, 4))
function("dot", torch.dot, (5,), (5,))
function("dot of a vector with itself", lambda x: torch.dot(x, x), (5,))
function("outer", torch.outer, (3,), (4,))
function("bmm", torch.bmm, (2, 3, 4), (2, 4, 2))
function("matmul of stacks", torch.matmul, (2, 3, 4), (4, 2))
function("matmul with a broadcast stack", torch.matmul, (2, 1, 3, 4), (3, 4, 2))
function("einsum", lambda a, b: torch.einsum("bij,bkj->bik", a, b), (2, 3, 4), (2, 2, 4))
function("einsum, outer", lambda a, b: torch.einsum("i,j->ij", a, b), (3,), (4,))
function(
    "baddbmm",
    lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=-2),
    *((2, 3, 2), (2, 3, 4), (2, 4, 2)),
)
function("baddbmm, bias broadcast", torch.baddbmm, (1, 3, 1), (2, 3, 4), (2, 4, 2))
for bias in ((), (1,), (5,), (1, 5), (3, 1), (1, 1), (3, 5)):
    function(
        f"addmm with a bias of shape {bias}",
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=-2),
        *(bias, (3, 4), (4, 5)),
    )
function("addmm of one row", torch.addmm, (5,), (1, 4), (4, 5))

# Convolutions
module("Conv1d(2, 3, 3, stride=2, padding=1)", 2, 2, 7)
module("Conv1d(4, 4, 2, groups=2, bias=False, dilation=2)", 2, 4, 6)
module("Conv2d(2, 3, 3)", 2, 2, 5, 4)
module("Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(0, 1))", 2, 2, 5, 4)
module("Conv2d(2, 2, 2, dilation=2, bias=False)", 2, 2, 5, 4)
module("Conv2d(4, 6, 3, groups=2, padding='same')", 1, 4, 3, 3)
module("Conv2d(3, 3, 2, groups=3)", 2, 3, 3, 3)
module("Conv2d(2, 3, 2)", 2, 4, 3)
module("Conv3d(2, 2, 2, stride=2, padding=1)", 1, 2, 3, 4, 3)
module("ConvTranspose1d(2, 3, 3, stride=2)", 2, 2, 4)
module("ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1)", 2, 2, 3, 3)
module("ConvTranspose2d(4, 2, 2, groups=2, bias=False)", 1, 4, 3, 3)

# Pooling
module("MaxPool1d(2)", 2, 3, 6)
module("MaxPool1d(3, stride=1, padding=1, ceil_mode=True)", 2, 3, 6)
module("MaxPool2d(2)", 2, 2, 4, 4)
module("MaxPool2d(3, stride=2, padding=1, dilation=1)", 2, 2, 5, 5)
module("MaxPool2d(2, ceil_mode=True)", 2, 5, 5)
module("MaxPool3d(2, stride=1)", 1, 2, 3, 3, 3)
module("AdaptiveMaxPool1d(3)", 2, 2, 7)
module("AdaptiveMaxPool2d((2, 3))", 2, 2, 5, 4)
module("AdaptiveMaxPool3d(2)", 1, 2, 3, 4, 3)
module("AvgPool1d(2)", 2, 3, 6)
module("AvgPool1d(3, stride=2, padding=1, ceil_mode=True)", 2, 3, 6)
module("AvgPool1d(3, stride=2, padding=1, count_include_pad=False)", 3, 6)
module("AvgPool2d(2)", 2, 2, 4, 4)
module("AvgPool2d((3, 2), stride=1)", 2, 2, 4, 4)
module("AvgPool2d(3, stride=2, padding=1)", 2, 2, 5, 4)
module("AvgPool2d(3, stride=2, padding=1, count_include_pad=False)", 2, 2, 5, 4)
module("AvgPool2d(2, ceil_mode=True)", 2, 2, 5, 3)
module("AvgPool2d(2, ceil_mode=True, count_include_pad=False, padding=1)", 2, 5, 3)
module("AvgPool2d(2, divisor_override=3)", 2, 2, 4, 4)
module("AvgPool2d(3, padding=1, stride=1, divisor_override=2)", 2, 3, 4)
module("AvgPool3d(2, stride=1)", 1, 2, 3, 3, 3)
module("AvgPool3d((2, 3, 2), padding=1, ceil_mode=True)", 2, 3, 4, 3)
module("AvgPool3d(2, padding=1, count_include_pad=False)", 1, 2, 3, 3, 3)
module("AvgPool3d(2, divisor_override=5)", 1, 1, 4, 4, 4)
module("AdaptiveAvgPool1d(3)", 2, 2, 7)
module("AdaptiveAvgPool1d(5)", 2, 2, 3)
module("AdaptiveAvgPool2d((2, 3))", 2, 2, 5, 4)
module("AdaptiveAvgPool2d(1)", 2, 2, 5, 4)
module("AdaptiveAvgPool2d(2)", 2, 5, 3)
module("AdaptiveAvgPool3d((2, 1, 3))", 1, 2, 3, 4, 4)

# Shapes, copies and choices of elements
module("Flatten()", 2, 3, 2)
module("Identity()", 2, 3)
module("Unflatten(1, (2, 3))", 2, 6)
function("reshape", lambda x: x.t().reshape(2, 6), (4, 3))
function("view", lambda x: x.view(6), (2, 3))
function("unsafe view", lambda x: torch.ops.aten._unsafe_view(x, [6]), (2, 3))
function("reshape alias", lambda x: torch.ops.aten._reshape_alias(x, [6], [1]), (2, 3))
function("alias", torch.ops.aten.alias, (2, 3))
function("permute", lambda x: x.permute(2, 0, 1), (2, 3, 4))
function("transpose", lambda x: x.transpose(0, 2), (2, 3, 4))
function("t", lambda x: x.t(), (2, 3))
function("unsqueeze and squeeze", lambda x: x.unsqueeze(1).squeeze(0), (1, 3))
function("expand", lambda x: x.expand(4, 2, 3), (2, 1))
function("repeat", lambda x: x.repeat(2, 3), (2, 3))
function("repeat_interleave", lambda x: x.repeat_interleave(2, 1), (2, 3))
function("diagonal", lambda x: x.diagonal(1), (3, 4))
function("as_strided, overlapping", lambda x: x.as_strided((3, 2), (1, 1)), (5,))
function("unfold, overlapping", lambda x: x.unfold(0, 3, 1), (5,))
function("select", lambda x: x[:, 1], (2, 3))
function("slice", lambda x: x[:, 1:6:2], (2, 7))
function("split", lambda x: weighted(x.split(2, 1)), (2, 5))
function("split into unequal parts", lambda x: weighted(x.split([1, 3], 1)), (2, 4))
function("unsafe_split", lambda x: weighted(torch.unsafe_split(x, 2, 1)), (2, 5))
function("one part of a split", lambda x: x.split(2)[1], (6,))
function("chunk", lambda x: weighted(x.chunk(3)), (7,))
function("unbind", lambda x: weighted(x.unbind(1)), (2, 3))
function("some of unbind", lambda x: weighted(x.unbind(1)[::2]), (2, 3))
function("cat", lambda x, y: torch.cat([x, y], 1), (2, 3), (2, 2))
function("cat of a tensor with itself", lambda x: torch.cat([x, x]), (3,))
function("stack", lambda x, y: torch.stack([x, y], 1), (2, 3), (2, 3))
function("clone", torch.clone, (3,))
function("copy", lambda x: torch.zeros_like(x).copy_(x), (3,))
function("copy, broadcast", lambda x: torch.zeros(2, 3).to(x).copy_(x), (3,))
function("flip", lambda x: x.flip(1), (2, 3))
function("roll", lambda x: x.roll(1, 0), (4,))
function("tril", torch.tril, (3, 3))
function("triu", torch.triu, (3, 3))
function("index", lambda x: x[on(x, CHOSEN)], (3, 2))
function("index by a mask", lambda x: x[on(x, LABELS) > 0], (4, 2))
function("index_select", lambda x: x.index_select(1, on(x, CHOSEN)), (2, 3))
function("gather", lambda x: x.gather(0, on(x, INDEX)), (4, 3))
function("take_along_dim", lambda x: x.take_along_dim(on(x, LABELS)[:, None], 1), (4, 3))
function("masked_fill", lambda x: x.masked_fill(on(x, LABELS) > 1, 3.0), (4,))
function("masked_fill, broadcast", lambda x: x.masked_fill(on(x, INDEX) > 1, 3.0), (1, 3))
function("masked_fill by a tensor", lambda x, v: x.masked_fill(on(x, LABELS) > 1, v), (4,), ())
function(
    "masked_select",
    lambda x: x.masked_select(on(x, LABELS) > 1),
    (4,),
    # Its own shape depends on values, which vmap refuses.
    exact=lambda f, tensors: lambda x: x[1::2],
)
function("where", lambda x, y: torch.where(on(x, LABELS) > 1, x, y), (4,), (4,))
function("where, broadcast", lambda x, y: torch.where(on(x, LABELS) > 1, x, y), (3, 1), (4,))
function("cumsum", lambda x: x.cumsum(1), (2, 4))
function("pad", lambda x: F.pad(x, (1, 2, 0, 1), value=2.0), (2, 3))
function("crop by a negative pad", lambda x: F.pad(x, (-1, 1)), (2, 3))
for mode in ("reflect", "replicate"):
    function(f"pad 1d, {mode}", lambda x, m=mode: F.pad(x, (1, 2), m), (2, 2, 4))
    function(f"pad 2d, {mode}", lambda x, m=mode: F.pad(x, (1, 2, 0, 1), m), (1, 2, 3, 4))
module("PixelShuffle(2)", 1, 4, 2, 3)
module("PixelUnshuffle(2)", 1, 2, 4, 2)
module("Upsample(scale_factor=2)", 1, 2, 3)
module("Upsample(scale_factor=2)", 1, 2, 3, 2)
function("embedding", lambda w: F.embedding(on(w, INDEX), w), (4, 3))
function("embedding with padding", lambda w: F.embedding(on(w, INDEX), w, padding_idx=2), (4, 3))

# Reductions
function("sum", torch.sum, (2, 3))
function("sum over a dimension", lambda x: x.sum(1), (2, 3))
function("sum, kept", lambda x: x.sum((0, 2), keepdim=True), (2, 3, 4))
function("mean", torch.mean, (2, 3))
function("mean over dimensions", lambda x: x.mean((0, 2)), (2, 3, 4))
function("max", torch.max, (2, 3))
function("max over a dimension", lambda x: x.max(1).values, (2, 3))
function("min over a dimension", lambda x: x.min(0).values, (2, 3))
function("amax", lambda x: x.amax((0, 2)), (2, 3, 4))
function("amin", lambda x: x.amin(1, keepdim=True), (2, 3))
function("maximum", torch.maximum, (3,), (2, 3))
function("minimum", torch.minimum, (2, 3), (2, 1))
function("logsumexp", lambda x: x.logsumexp(1), (2, 4), loss=True)
function("logsumexp of all, kept", lambda x: x.logsumexp((0, 1), True), (2, 3), loss=True)

# Arithmetic
function("x + y, broadcast", torch.add, (2, 3), (3,))
function("x + 3y", lambda x, y: torch.add(x, y, alpha=3), (2, 3), (2, 3))
function("x + 1", lambda x: x + 1, (3,))
function("x - y, broadcast", torch.sub, (3,), (2, 1))
function("x - 3y", lambda x, y: torch.sub(x, y, alpha=3), (2, 3), (3,))
function("1 - x", lambda x: 1 - x, (3,))
function("rsub with a factor", lambda x, y: torch.rsub(x, y, alpha=3), (3,), (3,))
function("-x", torch.neg, (3,))
function("3x", lambda x: 3 * x, (3,))
function("x·x", lambda x: x * x, (3,))
function("x·y", torch.mul, (2, 3), (2, 3))
function("x·y, broadcast", torch.mul, (2, 1, 3), (4, 1))
function("x·y, scalar", torch.mul, (), (2, 3))
function("x/3", lambda x: x / 3, (3,))
function("x/y", torch.div, (3,), (3,), low=0.5)
function("x/y, broadcast", torch.div, (3,), (2, 1), low=0.5)
function("x/y, fixed numerator", lambda y: torch.ones_like(y) / y, (3,), low=0.5)
function("1/x", lambda x: 1 / x, (3,), low=0.5)
function("x³", lambda x: x**3, (3,))
function("x²", torch.square, (3,))
function("x^2.5", lambda x: x**2.5, (3,), low=0.5)
function("x^y, broadcast", torch.pow, (3,), (2, 1), low=0.5)
function("2^x", lambda x: 2**x, (3,))

# Functions of one element; those that save their result once recursed forever
for f in (torch.exp, torch.expm1, torch.sin, torch.cos, torch.tan, torch.sinh, torch.cosh):
    function(f.__name__, f, (2, 3))
for f in (torch.atan, torch.erf, torch.tanh, torch.sigmoid, torch.abs):
    function(f.__name__, f, (2, 3))
for f in (torch.sqrt, torch.rsqrt, torch.reciprocal, torch.log, torch.log1p):
    function(f.__name__, f, (2, 3), low=0.5)
function("clamp", lambda x: x.clamp(-0.5, 0.5), (6,))
function("clamp by tensors", torch.clamp, (6,), (1,), (6,))
function("clamp_min", lambda x: x.clamp_min(0.1), (6,))
function("clamp_min by a tensor", torch.clamp_min, (2, 3), (3,))
function("clamp_max", lambda x: x.clamp_max(0.1), (6,))
for text in (
    *("ReLU()", "ReLU6()", "LeakyReLU(0.1)", "Hardtanh()", "Hardshrink()", "Softshrink()"),
    *("Threshold(0.1, 20)", "Tanh()", "Sigmoid()", "SiLU()", "GELU()", "GELU('tanh')", "Mish()"),
    *("Softplus()", "Softplus(2.0, 1.0)", "ELU()", "ELU(0.5)", "SELU()", "CELU(0.7)"),
    *("Hardswish()", "LogSigmoid()", "Softmax(1)", "Softmax(0)", "Softmin(-1)", "PReLU()"),
):
    module(text, 4, 3)
module("LogSoftmax(0)", 4, 3, loss=True)
module("LogSoftmax(-1)", 4, 3, loss=True)
module("Softmax2d()", 1, 3, 2, 2)
module("PReLU(3)", 2, 3, 2)
module(
    "Hardsigmoid()",
    *(4, 3),
    exact=lambda f, tensors: lambda x: (x / 6 + 0.5).clamp(0, 1),  # has no forward derivative
)

# Dropout
module("Dropout(0.4)", 2, 3)
function("dropout in training", seeded(nn.Dropout(0.4)), (4, 3), exact=same_mask)
function(
    "native dropout",
    seeded(lambda x: torch.native_dropout(x, 0.4, True)[0]),
    *((4, 3),),
    exact=same_mask,
)
function("dropout of channels", seeded(nn.Dropout2d(0.4)), (2, 3, 2, 2), exact=same_mask)

# Normalisation
module("BatchNorm1d(3)", 4, 3)
module("BatchNorm1d(3)", 2, 3, 4)
module("BatchNorm1d(3, affine=False)", 4, 3)
function(  # the module refuses eps=0 in some versions of PyTorch
    "batch norm with eps=0",
    lambda x, w, b: torch.native_batch_norm(
        x, w, b, TARGETS[0].to(x), TARGETS[1].to(x), False, 0.1, 0.0
    )[0],
    *((4, 3), (3,), (3,)),
)
module("BatchNorm2d(3)", 2, 3, 2, 2)
module("BatchNorm2d(3, affine=False)", 2, 3, 2, 2)
module("BatchNorm3d(2)", 2, 2, 2, 1, 2)


def plain_batch_norm(f: Function, tensors: list[Tensor]) -> Function:
    return lambda x, *affine: F.batch_norm(x, None, None, *affine, training=True)


for text, shape in (
    ("BatchNorm1d(3)", (5, 3)),
    ("BatchNorm1d(3)", (2, 3, 4)),
    ("BatchNorm1d(3, affine=False)", (5, 3)),
    ("BatchNorm1d(3, track_running_stats=False)", (5, 3)),
    ("BatchNorm2d(3)", (2, 3, 2, 2)),
    ("BatchNorm2d(3, affine=False)", (2, 3, 2, 2)),
):
    module(text, *shape, train=True, exact=plain_batch_norm)
module("LayerNorm(5)", 3, 5)
module("LayerNorm(5)", 5)
module("LayerNorm((2, 3))", 2, 2, 3)
module("LayerNorm(5, bias=False)", 3, 5)
module("LayerNorm(5, elementwise_affine=False)", 3, 5)
module("GroupNorm(2, 4)", 2, 4, 3)
module("GroupNorm(1, 4)", 2, 4)
module("GroupNorm(4, 4)", 2, 4, 2, 2)
module("GroupNorm(2, 4, affine=False)", 2, 4, 3)
module("InstanceNorm1d(3, affine=True)", 2, 3, 4)
module("InstanceNorm2d(3)", 2, 3, 2, 2)

# Losses, as operations; some lack forward derivatives, so their formulas are written out
TARGETS = torch.tensor([[0.1, 0.9, 0.3], [0.8, 0.2, 0.6], [0.5, 0.4, 0.7], [0.6, 0.1, 0.2]])


def huber(x: Tensor, t: Tensor, delta: float = 1.0) -> Tensor:
    error = (x - t).abs()
    return torch.where(error < delta, error**2 / 2, delta * (error - delta / 2))


ELEMENTWISE: dict[str, tuple[Function, Function]] = {
    "mse_loss": (F.mse_loss, lambda x, t: (x - t) ** 2),
    "huber_loss": (
        lambda x, t, **k: F.huber_loss(x, t, delta=0.7, **k),
        lambda x, t: huber(x, t, 0.7),
    ),
    "smooth_l1_loss": (
        lambda x, t, **k: F.smooth_l1_loss(x, t, beta=0.7, **k),
        lambda x, t: huber(x, t, 0.7) / 0.7,
    ),
    "soft_margin_loss": (
        lambda x, t, **k: F.soft_margin_loss(x, 2 * t.round() - 1, **k),
        lambda x, t: (1 + (-(2 * t.round() - 1) * x).exp()).log(),
    ),
    "binary_cross_entropy_with_logits": (
        F.binary_cross_entropy_with_logits,
        lambda x, t: (1 + x.exp()).log() - t * x,
    ),
    "binary_cross_entropy": (
        lambda x, t, **k: F.binary_cross_entropy(x / 2, t, **k),
        lambda x, t: -t * (x / 2).log() - (1 - t) * (1 - x / 2).log(),
    ),
}
REDUCTIONS = {"none": lambda t: t, "mean": torch.mean, "sum": torch.sum}
for name, (loss, formula) in ELEMENTWISE.items():
    for reduction, reduce in REDUCTIONS.items():
        function(
            f"{name}, {reduction}",
            lambda x, loss=loss, r=reduction: loss(x, TARGETS.to(x), reduction=r),
            *((4, 3),),
            low=0.5 if name == "binary_cross_entropy" else 0,
            exact=lambda f, tensors, formula=formula, r=reduce: (
                lambda x: r(formula(x, TARGETS.to(x)))
            ),
            loss=True,
        )
for reduction in REDUCTIONS:
    function(
        f"nll_loss, {reduction}",
        lambda x, r=reduction: F.nll_loss(x, on(x, LABELS), TARGETS[0].to(x), reduction=r),
        (4, 3),
    )
function("nll_loss 2d", lambda x: F.nll_loss(x, on(x, LABELS).view(1, 2, 2)), (1, 3, 2, 2))
function(
    "mse_loss by both arguments",
    F.mse_loss,
    *((2, 3), (2, 3)),
    exact=lambda f, tensors: lambda x, t: ((x - t) ** 2).mean(),
    loss=True,
)
function(
    "huber_loss by both arguments",
    F.huber_loss,
    *((2, 3), (2, 3)),
    exact=lambda f, tensors: lambda x, t: huber(x, t).mean(),
    loss=True,
)


ON_BOTH = {  # operations for which CUDA has other autograd nodes or other saved tensors
    *("Linear(4, 3) on (5, 4)", "Linear(4, 3) on (2, 3, 4)", "Linear(4, 3) on (4,)"),
    "Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(0, 1)) on (2, 2, 5, 4)",
    "ConvTranspose2d(4, 2, 2, groups=2, bias=False) on (1, 4, 3, 3)",
    "MaxPool2d(3, stride=2, padding=1, dilation=1) on (2, 2, 5, 5)",
    "AvgPool2d(3, stride=2, padding=1) on (2, 2, 5, 4)",
    "AdaptiveAvgPool2d((2, 3)) on (2, 2, 5, 4)",
    *("BatchNorm1d(3) on (4, 3)", "batch norm with eps=0"),
    *("BatchNorm2d(3) on (2, 3, 2, 2)", "BatchNorm2d(3, affine=False) on (2, 3, 2, 2)"),
    *("BatchNorm1d(3) on (5, 3) in training", "BatchNorm2d(3) on (2, 3, 2, 2) in training"),
    "BatchNorm2d(3, affine=False) on (2, 3, 2, 2) in training",
    *("LayerNorm(5) on (3, 5)", "LayerNorm(5, bias=False) on (3, 5)"),
    *("GroupNorm(2, 4) on (2, 4, 3)", "InstanceNorm1d(3, affine=True) on (2, 3, 4)"),
    *("dropout in training", "PReLU(3) on (2, 3, 2)", "GELU() on (4, 3)", "LogSigmoid() on (4, 3)"),
    *("Softmax(1) on (4, 3)", "LogSoftmax(-1) on (4, 3)", "logsumexp", "exp", "x^y, broadcast"),
    *("embedding", "gather", "baddbmm", "mv", "nll_loss, mean", "huber_loss, mean"),
    *("mse_loss, mean", "binary_cross_entropy_with_logits, mean"),
}
assert CASES.keys() >= ON_BOTH
every_case = pytest.mark.parametrize(
    ("name", "device"),
    [
        pytest.param(name, device, marks=getattr(entry, "marks", ()), id=f"{name}-{device}")
        for name in CASES
        for device, entry in zip(("cpu", "cuda"), devices(), strict=True)
        if device == "cpu" or name in ON_BOTH
    ],
)
several = pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.count > 1])


# ------------------------------------------------------------------------- the tests
def assert_exact(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    """To `tolerance` relative to 1 + the largest element; NaN is never exact."""
    for i, (h, e) in enumerate(zip(found, expected, strict=True)):
        assert h.shape == e.shape
        error, limit = float((h - e).abs().max()), tolerance * (1 + float(e.abs().max()))
        assert error <= limit, f"tensor {i} of shape {tuple(e.shape)} is off"


@every_case
def test_exact_below_a_diagonal_hessian(name: str, device: str) -> None:
    f, tensors, exact = CASES[name].make(device)
    y = f(*tensors)
    c, d = torch.randn_like(y), torch.randn_like(y)

    def q(y: Tensor) -> Tensor:
        return (c * y + d * y.square() / 2).sum()

    expected = exact_diagonal(lambda *ts: q(exact(*ts)), tensors)
    assert_exact(curvature.diagonal(q(y), tensors), expected, 1e-8)
    # The same rules beside PyTorch's own engine.
    gradients = torch.autograd.grad(q(y), tensors, retain_graph=True)
    curvature.backward(q(y))
    assert_exact([t.curvature for t in tensors], expected, 1e-8)  # type: ignore[attr-defined]
    assert all(torch.equal(t.grad, g) for t, g in zip(tensors, gradients, strict=True))


@every_case
def test_exact_below_a_linear_loss(name: str, device: str) -> None:
    """Nothing is inherited: what remains is the operation's own curvature."""
    f, tensors, exact = CASES[name].make(device)
    y = f(*tensors)
    c = torch.randn_like(y)
    found = curvature.diagonal((c * y).sum(), tensors)
    expected = exact_diagonal(lambda *ts: (c * exact(*ts)).sum(), tensors)
    assert_exact(found, expected, 1e-8)


@every_case
def test_gauss_newton(name: str, device: str) -> None:
    """``Σ d·(∂y/∂x)²`` for a loss with the Hessian d ≥ 0 at the output, and nothing else."""
    f, tensors, _ = CASES[name].make(device)
    y = f(*tensors)
    d, target = torch.rand_like(y), torch.randn_like(y)

    def q(target: Tensor) -> Tensor:
        return (d * F.mse_loss(y, target, reduction="none") / 2).sum()

    products = [torch.zeros_like(t) for t in tensors]
    for weight, output in zip(d.flatten(), y.flatten(), strict=True):
        rows = torch.autograd.grad(output, tensors, retain_graph=True, allow_unused=True)
        for product, row in zip(products, rows, strict=True):
            if row is not None:
                product += weight * row**2
    found = curvature.diagonal(q(target), tensors, method="ggn")
    for h in found:
        assert float(h.min()) >= -1e-12
    if not CASES[name].loss:
        assert_exact(found, products, 1e-10)
    # At the minimum the gradient is zero, and so is all that Gauss-Newton leaves out.
    minimum = q(y.detach())
    found = curvature.diagonal(minimum, tensors, method="ggn")
    assert_exact(found, products, 1e-10)
    assert_exact(curvature.diagonal(minimum, tensors), found, 1e-12)
    curvature.backward(minimum, method="ggn")
    assert_exact([t.curvature for t in tensors], found, 1e-12)  # type: ignore[attr-defined]


@several
def test_each_tensor_alone(name: str) -> None:
    """Where the others need no gradient, autograd may not even keep what they would need."""
    f, tensors, _ = CASES[name].make("cpu")
    c = torch.randn_like(f(*tensors))
    together = curvature.diagonal((c * f(*tensors).square()).sum(), tensors)
    for i, (t, h) in enumerate(zip(tensors, together, strict=True)):
        alone = [u if u is t else u.detach() for u in tensors]
        found = curvature.diagonal((c * f(*alone).square()).sum(), [alone[i]])
        assert_exact(found, [h], 1e-12)


ELSEWHERE = {  # CUDA's own names, and what is tested below
    "CudnnBatchNorm",
    "ScaledDotProductCudnnAttention",
    "ScaledDotProductEfficientAttention",
    "ScaledDotProductFlashAttention",
    "ScaledDotProductFlashAttentionForCpu",
    "SafeSoftmax",
    "ToCopy",
}


def test_every_rule_has_a_case() -> None:
    seen = set()
    for case in CASES.values():
        f, tensors, _ = case.make("cpu")
        node = f(*tensors).grad_fn
        seen |= set() if node is None else {operation(n.name()) for n in reachable(node)}
    without = set(RULES_AT_START) - seen - ELSEWHERE
    assert not without, f"no case for the rules {sorted(without)}"


RULES_AT_START = tuple(curvature.RULES)  # other tests register rules of their own


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_scalar_on_another_device_cuda() -> None:
    """PyTorch lets a number on the CPU multiply a tensor on the GPU; its curvature stays there."""
    torch.manual_seed(0)
    x, s = torch.randn(5, device="cuda"), torch.randn((), requires_grad=True)
    curvature.backward((s * x).square().sum())
    (found,) = curvature.diagonal((s * x).square().sum(), [s])
    for h in (s.curvature, found):  # type: ignore[attr-defined]
        assert h.device == s.device
        torch.testing.assert_close(h, 2 * x.cpu().square().sum())


@every_device
def test_conversion(device: str) -> None:
    """Curvature has its tensor's precision, whatever lies above it."""
    torch.manual_seed(0)
    x, d = torch.randn(2, 5, device=device)
    x.requires_grad_()
    (found,) = curvature.diagonal((d.double() * x.double().square()).sum(), [x])
    assert found.dtype == torch.float32
    assert torch.equal(found, 2 * d)


@every_device
@pytest.mark.parametrize("x", [-4.0, -3.0 + 1e-6, 0.3, 2.9, 4.0])
def test_hardsigmoid_is_piecewise_linear(x: float, device: str) -> None:
    t = torch.tensor([x], dtype=DOUBLE, device=device, requires_grad=True)
    slope = 1 / 6 if abs(x) < 3 else 0.0
    y = F.hardsigmoid(t)
    assert float(curvature.diagonal(y.sum(), [t])[0]) == 0
    found = curvature.diagonal(y.square().sum() + y.sum(), [t])[0]
    assert float(found) == pytest.approx(2 * slope**2, abs=1e-8)  # PyTorch's 1/6 is a float32


@pytest.mark.parametrize("f", ["x / y", "x ** y"])
def test_inputs_that_depend_on_each_other_are_told_apart(f: str) -> None:
    """In x / (1 + |x|) each input has its own part; the mixed one is off the diagonal."""
    torch.manual_seed(0)
    x = (torch.rand(5, dtype=DOUBLE) + 0.5).requires_grad_()
    c = torch.randn(5, dtype=DOUBLE)

    def q(x: Tensor, y: Tensor) -> Tensor:
        return (c * (x / y if f == "x / y" else x**y)).square().sum()

    apart = [x.detach().requires_grad_(), (1 + x.abs()).detach().requires_grad_()]
    h_x, h_y = exact_diagonal(q, apart)
    found = curvature.diagonal(q(x, 1 + x.abs()), [x])
    assert_exact(found, [h_x + h_y], 1e-10)


# ------------------------------------------------------------------------- attention
def attended(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, backend: Any, **options: Any
) -> tuple[list[Tensor], set[str]]:
    """Curvature of queries, keys and values (and mask), and the operations in the graph."""
    tensors = [t.detach().requires_grad_() for t in (q, k, v)]
    attn_mask = mask
    if mask is not None and mask.requires_grad:
        attn_mask = mask.detach().requires_grad_()
        tensors.append(attn_mask)
    with nullcontext() if backend is None else sdpa_kernel(backend):
        y = F.scaled_dot_product_attention(*tensors[:3], attn_mask=attn_mask, **options)
    generator = torch.Generator().manual_seed(1)
    c, d = (torch.randn(y.shape, generator=generator, dtype=DOUBLE).to(y) for _ in range(2))
    names = {operation(node.name()) for node in reachable(y.grad_fn)}
    return curvature.diagonal((c * y + d * y.square()).sum(), tensors), names


def masks(device: str, dtype: torch.dtype) -> dict[str, Tensor | None]:
    torch.manual_seed(2)
    keep = torch.rand(4, 6) < 0.6
    keep[:, 0] = True
    blind = keep.clone()
    blind[2] = False
    bias = torch.randn(2, 1, 4, 6)
    return {
        "none": None,
        "boolean": keep.to(device),
        "with a blind query": blind.to(device),
        "additive": bias.to(device, dtype),
        "learnt": bias.to(device, dtype).requires_grad_(),
    }


@every_device
@pytest.mark.parametrize("mask", ["none", "boolean", "with a blind query", "additive", "learnt"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_fused_attention_is_its_two_products_and_softmax(
    mask: str, scale: float | None, device: str
) -> None:
    torch.manual_seed(0)
    dtype = DOUBLE if device == "cpu" else torch.float32  # CUDA's kernels know no float64
    q = torch.randn(2, 3, 4, 8).to(device, dtype)
    k, v = (torch.randn(2, 3, 6, 8).to(device, dtype) for _ in range(2))
    given = masks(device, dtype)[mask]
    plain, names = attended(q, k, v, given, SDPBackend.MATH, scale=scale)
    assert not any("Attention" in name for name in names)
    fused, names = attended(q, k, v, given, None, scale=scale)
    if mask != "learnt" or device == "cuda":
        assert any("Attention" in name for name in names)
    assert_exact(fused, plain, 1e-10 if device == "cpu" else 1e-4)
    assert all(bool(h.isfinite().all()) for h in fused)


@every_device
@pytest.mark.parametrize("keys", [5, 3, 8])
def test_fused_causal_attention(keys: int, device: str) -> None:
    torch.manual_seed(0)
    dtype = DOUBLE if device == "cpu" else torch.float32
    q = torch.randn(2, 3, 5, 8).to(device, dtype)
    k, v = (torch.randn(2, 3, keys, 8).to(device, dtype) for _ in range(2))
    plain, _ = attended(q, k, v, None, SDPBackend.MATH, is_causal=True)
    fused, names = attended(q, k, v, None, None, is_causal=True)
    assert any("Attention" in name for name in names)
    assert_exact(fused, plain, 1e-10 if device == "cpu" else 1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("head", [16, 20])
@pytest.mark.filterwarnings("ignore")  # PyTorch says at length which kernels it cannot use
def test_half_precision_attention_on_cuda(backend: str, head: int) -> None:
    """Head sizes that are no multiple of 8 are padded by some kernels."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 8, head, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    wide = [t.to(DOUBLE) for t in (q, k, v)]
    plain, _ = attended(*wide, None, SDPBackend.MATH, is_causal=True)
    try:
        fused, names = attended(q, k, v, None, getattr(SDPBackend, backend), is_causal=True)
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        pytest.skip(f"no {backend} kernel for this")
    assert any("Attention" in name for name in names)
    assert_exact([h.to(DOUBLE) for h in fused], plain, 0.05)


def test_attention_values_are_exact() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 4, 5, dtype=DOUBLE) for _ in range(3))
    v.requires_grad_()
    y = F.scaled_dot_product_attention(q, k, v)
    d = torch.rand_like(y)
    found = curvature.diagonal((d * y.square()).sum(), [v])

    def loss(v: Tensor) -> Tensor:
        return (d * ((q @ k.transpose(-1, -2) / 5**0.5).softmax(-1) @ v).square()).sum()

    assert_exact(found, exact_diagonal(loss, [v]), 1e-10)


@every_device
def test_grouped_queries_are_refused_when_fused(device: str) -> None:
    """Fewer heads of keys than of queries: written out they work, fused they say how."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q = torch.randn(1, 4, 4, 8, device=device, dtype=dtype, requires_grad=True)
    k = torch.randn(1, 2, 4, 8, device=device, dtype=dtype, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    assert all(bool(h.isfinite().all()) for h in curvature.diagonal(y.sum(), [q, k]))
    y = F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    if operation(y.grad_fn.name()).startswith("ScaledDotProduct"):
        with pytest.raises(curvature.UnsupportedOperationError, match=r"SDPBackend\.MATH"):
            curvature.diagonal(y.sum(), [q, k])
