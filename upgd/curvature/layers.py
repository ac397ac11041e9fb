"""Rules for layers: products, convolutions, pooling, normalisation, attention."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from upgd.curvature.graph import Node
from upgd.curvature.rules import softmax, vjp
from upgd.curvature.walk import Curvatures, Op, UnsupportedOperationError, register


# -------------------------------------------------------------------------- products
def _product(op: Op, a: Tensor | None, b: Tensor | None, need_a: bool, need_b: bool) -> Any:
    """``y = a @ b``: each factor with the other one fixed and squared.

    `a` may be missing where `b` needs nothing, and the other way round.
    """
    h = op.h
    assert h is not None
    h_a = h @ (b * b).transpose(-1, -2) if need_a and b is not None else None
    # A weight is a transposed matrix here; the transposed product comes out contiguous.
    h_b = (h.transpose(-1, -2) @ (a * a)).transpose(-1, -2) if need_b and a is not None else None
    return h_a, h_b


@register("Addmm", linear=True, shaped=True)
def addmm(op: Op) -> Curvatures:
    """``y = β·bias + α·(a @ b)``: a linear layer."""
    node = op.node
    alpha, beta = node._saved_alpha, node._saved_beta
    h_a, h_b = _product(op, node._saved_mat1, node._saved_mat2, op.needs[1], op.needs[2])
    bias = None
    if op.needs[0]:
        below, output = op.edges[0]
        bias = op.h.sum_to_size(below._input_metadata[output].shape)  # type: ignore[union-attr]
    return _times(bias, beta), _times(h_a, alpha), _times(h_b, alpha)


@register("Baddbmm", linear=True)
def baddbmm(op: Op) -> Curvatures:
    """``y = β·bias + α·(a @ b)``, a stack of them."""
    node = op.node
    alpha, beta = node._saved_alpha, node._saved_beta
    h_a, h_b = _product(op, node._saved_batch1, node._saved_batch2, op.needs[1], op.needs[2])
    return _times(op.h, beta), _times(h_a, alpha), _times(h_b, alpha)


def _times(h: Tensor | None, factor: float) -> Tensor | None:
    return h if h is None or factor == 1 else h * factor**2


@register("Mm", "Bmm", linear=True, shaped=True)
def mm(op: Op) -> Curvatures:
    """``y = a @ b``"""
    a, b = op.node._saved_self, op.node._saved_mat2
    result: Curvatures = _product(op, a, b, *op.needs)
    return result


@register("Mv", linear=True)
def mv(op: Op) -> Curvatures:
    """``y = a @ v``"""
    a, v = op.node._saved_self, op.node._saved_vec
    assert op.h is not None
    h_a = torch.outer(op.h, v * v) if op.needs[0] else None
    return h_a, (a * a).t() @ op.h if op.needs[1] else None


# ---------------------------------------------------------------------- convolutions
@register("Convolution", linear=True, shaped=True)
def convolution(op: Op) -> Curvatures:
    """The gradient's own formula with squared inputs and squared weights."""
    node = op.node
    x, weight = node._saved_input, node._saved_weight
    sizes = node._saved_bias_sym_sizes_opt
    h_x, h_weight, h_bias = torch.ops.aten.convolution_backward(
        op.h,
        x * x if op.needs[1] else x,
        weight * weight if op.needs[0] else weight,
        sizes,
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
        op.needs,
    )
    return h_x, h_weight, h_bias


# --------------------------------------------------------------------------- pooling
@register("AvgPool2D", "AvgPool3D", linear=True)
def average_pool(op: Op) -> Curvatures:
    """``Σ x/d`` over a window has the coefficients 1/d; one comes with the gradient's formula."""
    assert op.h is not None
    node = op.node
    dims = 2 if "2D" in node.name() else 3
    sizes = list(node._saved_kernel_size) * (dims // len(node._saved_kernel_size))
    plain = not any(node._saved_padding) and not node._saved_ceil_mode
    if plain and node._saved_divisor_override is None:
        return vjp(op, op.h / torch.Size(sizes).numel())
    pool: Any = F.avg_pool2d if dims == 2 else F.avg_pool3d
    x = node._saved_self
    ones = torch.ones((1, 1, *x.shape[-dims:]), dtype=x.dtype, device=x.device)[0]
    window = (
        *(sizes, list(node._saved_stride) or sizes, list(node._saved_padding)),
        *(node._saved_ceil_mode, node._saved_count_include_pad),
    )
    share = pool(ones, *window, node._saved_divisor_override)
    return vjp(op, op.h * share / pool(ones, *window, 1))


@register("AdaptiveAvgPool2D", "AdaptiveAvgPool3D", linear=True)
def adaptive_average_pool(op: Op) -> Curvatures:
    """As average pooling, with windows of unequal sizes."""
    assert op.h is not None
    dims = 2 if "2D" in op.node.name() else 3
    h = op.h
    for axis in range(-dims, 0):
        size, windows = op.node._saved_self.shape[axis], h.shape[axis]
        index = torch.arange(windows, device=h.device)
        stop = ((index + 1) * size + windows - 1) // windows
        length = (stop - index * size // windows).to(h.dtype)
        h = h / length.reshape(-1, *[1] * (-axis - 1))
    return vjp(op, h)


# --------------------------------------------------------------------- normalisation
def _normalised(
    z: Tensor, rstd: Tensor, h: Tensor | None, g: Tensor | None, dims: tuple[int, ...]
) -> Tensor | None:
    """Curvature below ``z = (x - mean)·rstd``, both statistics taken over `dims` of x.

    Exact for a diagonal Hessian above: ∂z_k/∂x_i = rstd·(δ_ki - (1 + z_k·z_i)/n), and its
    own second derivative is -(rstd²/n)·(2·z_i·D_ki + z_k·D_ii) with D the bracket.
    """
    n = 1
    for dim in dims:
        n *= z.shape[dim]
    zz = z * z
    total = None
    if h is not None:
        sums = [t.sum(dims, keepdim=True) for t in (h, h * z, h * zz)]
        total = h * (1 - (2 / n) * (1 + zz)) + (sums[0] + 2 * z * sums[1] + zz * sums[2]) / n**2
    if g is not None:
        mean, tilt = g.mean(dims, keepdim=True), (g * z).mean(dims, keepdim=True)
        own = (2 * z * (g - mean - z * tilt) + tilt * (n - 1 - zz)) / n
        total = -own if total is None else total - own
    return None if total is None else total * rstd * rstd


def _affine(
    op: Op, z: Tensor, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Below ``y = z·weight + bias``: (h of z, g of z, h of the weight, h of the bias)."""
    h = op.h if op.h is None or weight is None else op.h * weight * weight
    g = op.g if op.g is None or weight is None else op.g * weight
    h_weight = op.h * z * z if op.h is not None and op.needs[1] else None
    return h, g, h_weight, op.h.to(z.dtype) if op.h is not None and op.needs[2] else None


@register("NativeLayerNorm")
def layer_norm(op: Op) -> Curvatures:
    """Normalised over the last dimensions of each sample."""
    node = op.node
    x, rstd = node._saved_input, node._saved_result2
    z = (x - node._saved_result1) * rstd
    h, g, h_weight, h_bias = _affine(op, z, node._saved_weight)
    dims = tuple(range(-len(node._saved_normalized_shape), 0))
    return _normalised(z, rstd, h, g, dims) if op.needs[0] else None, h_weight, h_bias


@register("NativeGroupNorm")
def group_norm(op: Op) -> Curvatures:
    """Normalised over the channels of a group and all positions."""
    node = op.node
    x = node._saved_input
    parts = (node._saved_N, node._saved_group, -1)
    mean, rstd = (t.reshape(*parts[:2], 1) for t in (node._saved_result1, node._saved_result2))
    z = ((x.reshape(parts) - mean) * rstd).reshape(x.shape)
    shape = (1, -1, *[1] * (x.dim() - 2))
    weight = None if node._saved_weight is None else node._saved_weight.reshape(shape)
    h, g, h_weight, h_bias = _affine(op, z, weight)
    h, g = (None if t is None else t.reshape(parts) for t in (h, g))
    below = _normalised(z.reshape(parts), rstd, h, g, (2,)) if op.needs[0] else None
    return None if below is None else below.reshape(x.shape), *_per_channel(h_weight, h_bias)


def _is_fixed(node: Node) -> bool:
    return not getattr(node, "_saved_training", True)


@register("NativeBatchNorm", "CudnnBatchNorm", linear=_is_fixed, shaped=True)
def batch_norm(op: Op) -> Curvatures:
    """In eval mode an affine map per channel; in training normalised over the batch too."""
    node = op.node
    if not _is_fixed(node):
        return _batch_norm_training(op)
    # The gradient's own kernel with other arguments: with mean 0 and variance 1
    # it forms h·weight and Σ h·input.
    x, weight = node._saved_input, node._saved_weight
    mean, variance = node._saved_running_mean, node._saved_running_var
    eps = node._saved_eps if hasattr(node, "_saved_eps") else node._saved_epsilon  # cuDNN's
    variance = variance + eps
    squared = 1 / variance if weight is None else (weight * weight).div_(variance)
    if op.needs[1]:
        x = x - mean.view(-1, *[1] * (x.dim() - 2))
        x.mul_(x)
    h = op.h.to(x.dtype)  # type: ignore[union-attr]  # under autocast they differ
    zeros, ones = _constants(mean.shape[0], mean.dtype, mean.device)
    h_x, h_weight, h_bias = torch.ops.aten.native_batch_norm_backward(
        *(h, x, squared, zeros, ones, zeros, ones, False, 0.0, op.needs)
    )
    if op.needs[0]:
        h_x = h_x.to(op.h.dtype)  # type: ignore[union-attr]
    return h_x, h_weight.div_(variance) if op.needs[1] else None, h_bias


@lru_cache(maxsize=64)
def _constants(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros(size, dtype=dtype, device=device)
    return zeros, torch.ones_like(zeros)


def _batch_norm_training(op: Op) -> Curvatures:
    node = op.node
    x, weight = node._saved_input, node._saved_weight
    dims = (0, *range(2, x.dim()))
    shape = (1, -1, *[1] * (x.dim() - 2))
    mean, rstd = node._saved_result1.reshape(shape), node._saved_result2.reshape(shape)
    z = (x - mean) * rstd
    h, g, h_weight, h_bias = _affine(op, z, None if weight is None else weight.reshape(shape))
    below = _normalised(z, rstd, h, g, dims) if op.needs[0] else None
    return None if below is None else below.to(x.dtype), *_per_channel(h_weight, h_bias)


def _per_channel(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.sum((0, *range(2, t.dim()))) for t in tensors]


# ------------------------------------------------------------------------- attention
@register(
    "ScaledDotProductFlashAttentionForCpu",
    "ScaledDotProductFlashAttention",
    "ScaledDotProductEfficientAttention",
    "ScaledDotProductCudnnAttention",
)
def attention(op: Op) -> Curvatures:
    """Fused attention, as the two products and the softmax that it stands for.

    The attention weights are recomputed, so memory grows with the square of the length.
    """
    node = op.node
    q, k, v = node._saved_query, node._saved_key, node._saved_value
    if node._saved_dropout_p or q.shape[-3] != k.shape[-3]:
        raise UnsupportedOperationError(
            "no curvature rule for fused attention with dropout or with fewer keys than queries; "
            "run the forward pass under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )
    scale = node._saved_scale or q.shape[-1] ** -0.5
    scores = (q @ k.transpose(-1, -2)) * scale
    mask = getattr(node, "_saved_attn_mask", getattr(node, "_saved_attn_bias", None))
    if mask is not None:
        scores = scores + mask
    if node._saved_is_causal:
        blocked = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(blocked, -torch.inf)
    p = scores.softmax(-1).nan_to_num()  # 0 for a query whose keys are all masked
    g_p = None if op.g is None else op.g @ v.transpose(-1, -2)
    h_p = None if op.h is None else op.h @ (v * v).transpose(-1, -2)
    h_scores = softmax(Op(_Softmax(p), [g_p], [h_p], (True,), ()))
    h_v = None if op.h is None else (p * p).transpose(-1, -2) @ op.h
    if not isinstance(h_scores, Tensor):
        return None, None, h_v
    h_product = h_scores * scale**2
    return h_product @ (k * k), h_product.transpose(-1, -2) @ (q * q), h_v, h_scores


class _Softmax:
    """A substitute for the node that fused attention does not have."""

    _saved_dim = -1

    def __init__(self, result: Tensor) -> None:
        self._saved_result = result
