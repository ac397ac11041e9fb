"""Descent towards other weights: the first ones (L2 Init), a slow copy (Hare and Tortoise)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from upgd.optim.base import Common, Params, RuleOptimizer
from upgd.rules.vocabulary import Method, Phase


# ------------------------------------------------------------------------ the rules
def l2_init(w: Any, g: Any, start: Any, lr: Any, weight_decay: Any) -> Any:
    """w ← w - α·[g + λ·(w - w₀)]"""
    return w - lr * (g + weight_decay * (w - start))


L2_INIT = Method(
    hyper=("lr", "weight_decay"),
    states=("start",),
    starts_as_weight=frozenset({"start"}),
    phases=(Phase(l2_init, writes=("w",)),),
)


# -------------------------------------------------------------------- the optimizers
class L2Init(RuleOptimizer):
    r"""L2 Init, or regenerative regularisation: decay towards the first weights.

    .. math:: w \leftarrow w - \alpha\,[g + \lambda\,(w - w_0)]

    with :math:`w_0` the weight before the first step. Kumar, Marklund and Van Roy,
    *Maintaining Plasticity in Continual Learning via Regenerative Regularization* (2023), write the
    pull as a penalty :math:`\lambda' \lVert w - w_0 \rVert^2`, so :math:`\lambda = 2\lambda'`.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or parameter groups.
        lr: Step size α; a number or a one-element tensor.
        weight_decay: Strength λ: w - w₀ shrinks by ``lr * weight_decay``. Usual are 0.001 to 0.01.
        common: See :class:`~upgd.optim.base.RuleOptimizer`.

    Example:
        >>> import torch, upgd
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = upgd.L2Init(model.parameters(), lr=0.01, weight_decay=0.01)
        >>> model(torch.ones(4, 3)).square().mean().backward()
        >>> opt.step()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        weight_decay: float = 0.01,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(params, L2_INIT, {"lr": lr, "weight_decay": weight_decay}, **common)
