"""Exact Hessian and Gauss-Newton diagonals, one column at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def exact_diagonal(loss: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The Hessian diagonal of ``loss(*tensors)`` with respect to each tensor.

    Costs one Hessian-vector product per element, many of them in one call of ``vmap``.

    Example:
        >>> import torch
        >>> from tests.exact import exact_diagonal
        >>> exact_diagonal(lambda x: x.pow(3).sum(), [torch.tensor([1.0, 2.0])])
        [tensor([ 6., 12.])]
    """
    values = [t.detach() for t in tensors]
    diagonals = []
    for i, value in enumerate(values):

        def of_one(flat: Tensor, i: int = i, value: Tensor = value) -> Tensor:
            return loss(*values[:i], flat.reshape(value.shape), *values[i + 1 :])

        gradient = torch.func.grad(of_one)
        flat = value.flatten()

        def element(
            index: Tensor, gradient: Callable[..., Tensor] = gradient, flat: Tensor = flat
        ) -> Tensor:
            unit = (torch.arange(flat.numel(), device=flat.device) == index).to(flat.dtype)
            product: Tensor = (torch.func.jvp(gradient, (flat,), (unit,))[1] * unit).sum()
            return product

        indices = torch.arange(flat.numel(), device=flat.device)
        diagonal = torch.func.vmap(element, chunk_size=256)(indices)
        diagonals.append(diagonal.reshape(value.shape))
    return diagonals


def exact_ggn_diagonal(
    loss: Callable[[Tensor], Tensor],
    outputs: Callable[..., Tensor],
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    """The diagonal of ``Jᵀ·H·J``, the Gauss-Newton matrix of ``loss(outputs(*tensors))``.

    J is the Jacobian of all outputs, for the whole batch, with respect to each tensor, and H the
    loss's Hessian with respect to all outputs. Never negative, up to rounding, if the loss is
    convex. Costs one Jacobian-vector product per element, many of them in one call of ``vmap``.

    Example:
        >>> import torch
        >>> from tests.exact import exact_ggn_diagonal
        >>> def squares(y):
        ...     return y.square().sum()
        >>> x = torch.tensor([1.0, 2.0])
        >>> exact_ggn_diagonal(squares, torch.square, [x])  # 2·(2x)², without 2y·2
        [tensor([ 8., 32.])]
    """
    values = [t.detach() for t in tensors]
    slope = torch.func.grad(loss)
    diagonals = []
    for i, value in enumerate(values):

        def of_one(flat: Tensor, i: int = i, value: Tensor = value) -> Tensor:
            return outputs(*values[:i], flat.reshape(value.shape), *values[i + 1 :])

        flat = value.flatten()

        def element(
            index: Tensor, of_one: Callable[..., Tensor] = of_one, flat: Tensor = flat
        ) -> Tensor:
            unit = (torch.arange(flat.numel(), device=flat.device) == index).to(flat.dtype)
            output, column = torch.func.jvp(of_one, (flat,), (unit,))[:2]
            product: Tensor = (torch.func.jvp(slope, (output,), (column,))[1] * column).sum()
            return product

        indices = torch.arange(flat.numel(), device=flat.device)
        diagonal = torch.func.vmap(element, chunk_size=256)(indices)
        diagonals.append(diagonal.reshape(value.shape))
    return diagonals
