"""What is measured of a network: plain definitions, as functions of tensors.

The monitor, the laboratory's engines and the agents take their numbers from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from upgd.metrics import UTILITIES

AT_A_TIME = 32  # matrices, or networks, per batch on a GPU


class Norms(NamedTuple):
    """Norms of stacked tensors; ``l0`` is the fraction of non-zero elements."""

    l0: float
    l1: float
    l2: float


@torch.no_grad()
def norms(tensors: Iterable[Tensor]) -> Norms:
    """ℓ0 (as a fraction), ℓ1 and ℓ2 norms of all tensors stacked into one vector.

    Example:
        >>> norms([torch.tensor([3.0, 0.0]), torch.tensor([-4.0, 0.0])])
        Norms(l0=0.5, l1=7.0, l2=5.0)
    """
    flat = [t.detach().double().flatten() for t in tensors]
    stacked = torch.cat(flat) if flat else torch.zeros(0)
    share = float((stacked != 0).double().mean()) if len(stacked) else float("nan")
    return Norms(share, float(stacked.abs().sum()), float(stacked.square().sum().sqrt()))


@torch.no_grad()
def effective_rank(matrix: Tensor) -> float:
    """The exponential of the entropy of the normalised singular values.

    A tensor of more dimensions is reshaped to one row per output unit.

    Example:
        >>> round(effective_rank(torch.eye(4)), 6), effective_rank(torch.ones(4, 4))
        (4.0, 1.0)
    """
    rows = matrix.detach().double().reshape(matrix.shape[0], -1)
    return float(_effective_ranks(torch.linalg.svdvals(rows)))


@torch.no_grad()
def effective_ranks_later(matrices: Tensor) -> Callable[[], list[float]]:
    """Returns a function that gives the :func:`effective_rank` of each of R matrices [R, ...].

    The function uses only the CPU and may run in another thread; the matrices may change meanwhile.
    Exact on CPU. For matrices on CUDA, the products of rows are copied to the CPU and give the
    singular values; ranks then have a relative error of up to 1e-5. A matrix that is not finite
    has rank NaN, and no rank depends on the other matrices.
    """
    found: list[tuple[Tensor, Tensor]] = []
    for some in matrices.detach().reshape(*matrices.shape[:2], -1).split(AT_A_TIME):
        rows = some.double()
        finite = rows.isfinite().flatten(1).all(1)
        other = torch.eye(*rows.shape[1:], dtype=rows.dtype, device=rows.device)
        rows = torch.where(finite[:, None, None], rows, other)
        found.append((_products(rows).cpu() if rows.is_cuda else rows, finite.cpu()))

    def ranks() -> list[float]:
        all_: list[float] = []
        for rows, finite in found:
            values = _from_products(rows) if matrices.is_cuda else torch.linalg.svdvals(rows)
            all_ += _effective_ranks(values).where(finite, math.nan).tolist()
        return all_

    return ranks


def _products(rows: Tensor) -> Tensor:
    """The products of each matrix's rows, or of its columns if they are fewer."""
    # A fixed batch size: the algorithm, and so the rounding, depends on it.
    filled = torch.cat([rows, rows[-1:].expand(AT_A_TIME - len(rows), -1, -1)])
    if filled.shape[1] > filled.shape[2]:
        filled = filled.mT
    return (filled @ filled.mT)[: len(rows)]


def _from_products(products: Tensor) -> Tensor:
    """Singular values; those below 1e-8 of the largest are lost in rounding."""
    values: Tensor = torch.linalg.eigvalsh(products).clamp(min=0).sqrt().flip(-1)
    return values


def _effective_ranks(singular_values: Tensor) -> Tensor:
    total = singular_values.sum(-1, keepdim=True)
    shares = torch.where(total > 0, singular_values / total, 0)
    shares = torch.where(shares > 1e-12, shares, 0)
    ranks = (-torch.special.xlogy(shares, shares).sum(-1)).exp().round(decimals=12)
    return torch.where(total[..., 0] > 0, ranks, 0)


def mean_effective_rank(model: nn.Module) -> float:
    """The mean of :func:`effective_rank` over all weights of two dimensions or more."""
    ranks = [effective_rank(p) for p in model.parameters() if p.dim() > 1]
    return float(np.mean(ranks)) if ranks else float("nan")


# -------------------------------------------------------------------------- hidden units
def mean_magnitude(h: Tensor) -> Tensor:
    """E_x|h_i(x)| of each unit: the mean over all dimensions of `h` but the last.

    Example:
        >>> mean_magnitude(torch.tensor([[1.0, -2.0], [3.0, 0.0]]))
        tensor([2., 1.])
    """
    rows = max(1, math.prod(h.shape[:-1]))
    dims, dtype = tuple(range(h.dim() - 1)), torch.promote_types(h.dtype, torch.float32)
    return h.to(dtype).abs().sum(dims) / rows


def dormancy_scores(magnitudes: Tensor) -> Tensor:
    """ReDo's score of each unit of a layer: ``E|h_i| / mean_k E|h_k|``; 0 if all are 0.

    Sokar et al., "The dormant neuron phenomenon in deep reinforcement learning" (2023), call a
    unit τ-dormant if its score is at most τ.

    Args:
        magnitudes: :func:`mean_magnitude` of the layer's outputs.

    Example:
        >>> dormancy_scores(torch.tensor([0.0, 1.0, 3.0]))
        tensor([0.0000, 0.7500, 2.2500])
    """
    mean = magnitudes.mean()
    return torch.where(mean == 0, 0, magnitudes / mean)


def saturated_share(h: Tensor, limit: float) -> Tensor:
    """The share of activations with a magnitude beyond `limit`.

    Example:
        >>> saturated_share(torch.tensor([0.5, -1.0, 1.0, 0.0]), 0.99)
        tensor(0.5000, dtype=torch.float64)
    """
    return (h.abs() > limit).double().mean()


def pooled_share(layers: Sequence[Tensor]) -> Tensor:
    """The share of True among all elements of several layers: a layer counts by its size.

    Args:
        layers: Boolean tensors [..., elements] of equal leading dimensions, which stay.

    Example:
        >>> wide, narrow = torch.tensor([0.5, 0.0, 0.0, 0.0, 1.0]), torch.tensor([0.0])
        >>> pooled_share([wide == 0, narrow == 0])
        tensor(0.6667, dtype=torch.float64)
    """
    return torch.cat(list(layers), -1).double().mean(-1)


def histogram(scaled: Tensor) -> Tensor:
    """The shares of scaled utilities [..., weights] in each ninth of [0, 1]: [..., 9].

    Example:
        >>> (9 * histogram(torch.linspace(0, 1, 9))).tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    bins = (scaled * len(UTILITIES)).floor().clamp(0, len(UTILITIES) - 1)  # NaN is in none
    return torch.stack([(bins == k).double().mean(-1) for k in range(len(UTILITIES))], -1)


def stride(total: int, count: int) -> int:
    """The least distance at which at most `count` of `total` elements lie.

    It has no common divisor with `total`, so that no row or column of a tensor of that many
    elements is preferred.

    Example:
        >>> stride(6, 6), stride(784 * 300, 4096)
        (1, 59)
    """
    found = max(1, -(-total // count))
    while math.gcd(found, total) != 1:
        found += 1
    return found


def some_rows(h: Tensor, count: int) -> Tensor:
    """At most `count` rows of a tensor [..., units] as a matrix, spread over all dimensions."""
    *lead, units = h.shape
    total = math.prod(lead)
    if total <= count:
        return h.reshape(total, units)
    index, places = torch.arange(count, device=h.device) * stride(total, count) % total, []
    for size in reversed(lead):
        places.append(index % size)
        index = index // size
    return h[tuple(reversed(places))]


def products(rows: Tensor) -> Tensor:
    """The products of a matrix's rows, or of its columns if they are fewer, in double precision."""
    wide = rows.to(torch.float32 if rows.device.type == "mps" else torch.float64)
    return wide @ wide.mT if wide.shape[0] <= wide.shape[1] else wide.mT @ wide


@torch.no_grad()
def ranks_of_products(found: Tensor) -> tuple[Tensor, Tensor]:
    """Effective and stable ranks of matrices whose :func:`products` these are: [R, n, n], on CPU.

    The effective rank is that of :func:`effective_rank`; the stable rank is the sum of the squared
    singular values, divided by the largest. Singular values below 1e-8 of the largest are lost
    in rounding. NaN where a product is not finite; 0 for a matrix of zeros.

    Example:
        >>> h = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
        >>> effective, stable = ranks_of_products(products(h)[None])
        >>> round(float(effective), 3), float(stable)
        (1.89, 1.25)
    """
    finite = found.isfinite().flatten(1).all(1)
    values = _from_products(torch.where(finite[:, None, None], found, 0))
    squares = values.square()
    stable = torch.where(squares[:, 0] > 0, squares.sum(1) / squares[:, 0], 0)
    return tuple(x.where(finite, math.nan) for x in (_effective_ranks(values), stable))  # type: ignore[return-value]
