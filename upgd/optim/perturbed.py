"""Gradient descent with decay and with noise that no utility gates: SGDW, PGD, S&P."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from upgd.optim.base import Common, Params, RuleOptimizer
from upgd.rules.vocabulary import Method, Phase


# ------------------------------------------------------------------------ the rules
def sgdw(w: Any, g: Any, lr: Any, weight_decay: Any) -> Any:
    """w ← (1-αλ)·w - α·g"""
    return (1 - lr * weight_decay) * w - lr * g


def pgd(w: Any, g: Any, noise: Any, lr: Any, sigma: Any) -> Any:
    """w ← w - α·(g + ξ)"""
    return w - lr * (g + sigma * noise)


def shrink_and_perturb(w: Any, g: Any, noise: Any, lr: Any, weight_decay: Any, sigma: Any) -> Any:
    """w ← (1-αλ)·w - α·(g + ξ)"""
    return (1 - lr * weight_decay) * w - lr * (g + sigma * noise)


SGDW_METHOD = Method(hyper=("lr", "weight_decay"), phases=(Phase(sgdw, writes=("w",)),))
PGD_METHOD = Method(hyper=("lr", "sigma"), phases=(Phase(pgd, writes=("w",)),))
SHRINK_AND_PERTURB_METHOD = Method(
    hyper=("lr", "weight_decay", "sigma"), phases=(Phase(shrink_and_perturb, writes=("w",)),)
)


# -------------------------------------------------------------------- the optimizers
class SGDW(RuleOptimizer):
    r"""Stochastic gradient descent with decoupled weight decay.

    .. math:: w \leftarrow (1 - \alpha\lambda)\, w - \alpha\, g

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or parameter groups.
        lr: Step size α; a number or a one-element tensor.
        weight_decay: Decoupled weight decay λ; 0 is plain SGD.
        common: See :class:`~upgd.optim.base.RuleOptimizer`.

    Example:
        >>> import torch, upgd
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = upgd.SGDW(model.parameters(), lr=0.01, weight_decay=0.001)
        >>> model(torch.ones(4, 3)).square().mean().backward()
        >>> opt.step()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        weight_decay: float = 0.001,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(params, SGDW_METHOD, {"lr": lr, "weight_decay": weight_decay}, **common)


class PGD(RuleOptimizer):
    r"""Perturbed gradient descent.

    .. math:: w \leftarrow w - \alpha\, (g + \xi), \qquad \xi \sim \mathcal N(0, \sigma^2)

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or parameter groups.
        lr: Step size α; a number or a one-element tensor.
        sigma: Standard deviation σ of the perturbation.
        common: See :class:`~upgd.optim.base.RuleOptimizer`.

    Example:
        >>> import torch, upgd
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = upgd.PGD(model.parameters(), lr=0.01, sigma=0.01)
        >>> model(torch.ones(4, 3)).square().mean().backward()
        >>> opt.step()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        sigma: float = 0.01,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(params, PGD_METHOD, {"lr": lr, "sigma": sigma}, **common)


class ShrinkAndPerturb(RuleOptimizer):
    r"""Shrink and perturb: gradient descent with weight decay and noise.

    .. math:: w \leftarrow (1 - \alpha\lambda)\, w - \alpha\, (g + \xi)

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or parameter groups.
        lr: Step size α; a number or a one-element tensor.
        weight_decay: Decoupled weight decay λ.
        sigma: Standard deviation σ of the perturbation.
        common: See :class:`~upgd.optim.base.RuleOptimizer`.

    Example:
        >>> import torch, upgd
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = upgd.ShrinkAndPerturb(model.parameters(), sigma=0.01, weight_decay=0.001)
        >>> model(torch.ones(4, 3)).square().mean().backward()
        >>> opt.step()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        weight_decay: float = 0.001,
        sigma: float = 0.01,
        **common: Unpack[Common],
    ) -> None:
        hyper = {"lr": lr, "weight_decay": weight_decay, "sigma": sigma}
        super().__init__(params, SHRINK_AND_PERTURB_METHOD, hyper, **common)
