"""How well two utilities agree: Spearman's rank correlation."""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch
from torch import Tensor

from upgd.utility.common import Scope, Utilities


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's rank correlation with average ranks, over the last dimension.

    NaN where it is undefined: where either side is constant, shorter than two, or not finite.

    Example:
        >>> import torch
        >>> from upgd.utility import spearman
        >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 30.0, 20.0]))
        tensor(0.5000, dtype=torch.float64)
    """
    if a.shape != b.shape:
        raise ValueError(f"spearman: shapes {tuple(a.shape)} and {tuple(b.shape)} differ")
    ranks = [_ranks(x) for x in (a, b)]
    x, y = (r - r.mean(-1, keepdim=True) for r in ranks)
    scale = (x * x).sum(-1).sqrt() * (y * y).sum(-1).sqrt()
    value = (x * y).sum(-1) / scale
    finite = a.isfinite().all(-1) & b.isfinite().all(-1)
    return torch.where((scale > 0) & finite, value, torch.nan)


def _ranks(x: Tensor) -> Tensor:
    """Ranks from 1, ties sharing their average."""
    ordered = x.contiguous().sort(-1).values
    below = torch.searchsorted(ordered, x.contiguous(), right=False)
    through = torch.searchsorted(ordered, x.contiguous(), right=True)
    return (below + through + 1).double() / 2


class Correlation(NamedTuple):
    """A rank correlation, and the number of tensors for which it is undefined."""

    value: Tensor
    undefined: Tensor


def rank_correlation(
    true: Utilities, approximated: Utilities, scope: Scope = "global", *, stacked: bool = False
) -> Correlation:
    """Spearman's correlation between two utilities.

    ``"global"`` ranks all elements together; ``"local"`` is the mean over tensors of more than
    one element of the correlation within each. Undefined values are left out and counted.

    Example:
        >>> import torch
        >>> from upgd.utility import rank_correlation
        >>> true = {"w": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([0.0])}
        >>> rank_correlation(true, {"w": torch.tensor([1.0, 2.0, 4.0]), "b": torch.tensor([1.0])})
        Correlation(value=tensor(0.9487, dtype=torch.float64), undefined=tensor(0))
    """
    if scope not in get_args(Scope):
        raise ValueError(f"scope must be 'global' or 'local', got {scope!r}")
    if true.keys() != approximated.keys():
        raise ValueError(
            f"rank_correlation: different names: {sorted(true)} and {sorted(approximated)}"
        )
    start = 1 if stacked else 0
    pairs = [(true[n].flatten(start), approximated[n].flatten(start)) for n in true]
    if scope == "global":
        pairs = [(torch.cat([a for a, _ in pairs], -1), torch.cat([b for _, b in pairs], -1))]
    else:
        pairs = [(a, b) for a, b in pairs if a.shape[-1] > 1]
    values = torch.stack([spearman(a, b) for a, b in pairs])
    return Correlation(values.nanmean(0), values.isnan().sum(0))
