"""AdaUPGD (Adam's direction behind UPGD's gate) and the Adam rule itself."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, Unpack

from upgd.curvature import Curvature
from upgd.optim import growing
from upgd.optim.base import Common, Params, RuleOptimizer
from upgd.optim.upgd import Scaling, UtilityOptimizer, trace_first_order, trace_second_order
from upgd.rules.ops import sigmoid, sqrt
from upgd.rules.vocabulary import Method, Phase


# ------------------------------------------------------------------------ the rules
def moments(g: Any, first_moment: Any, second_moment: Any, beta1: Any, beta2: Any) -> Any:
    """M ← β₁·M + (1-β₁)·g,  V ← β₂·V + (1-β₂)·g²"""
    first_moment = beta1 * first_moment + (1 - beta1) * g
    second_moment = beta2 * second_moment + (1 - beta2) * (g * g)
    return first_moment, second_moment


# fmt: off
def update_protecting(
    w: Any, utility: Any, first_moment: Any, second_moment: Any, noise: Any, eta: Any,
    c_first_moment: Any, c_second_moment: Any, lr: Any, weight_decay: Any, sigma: Any, eps: Any,
) -> Any:
    """w ← (1-αλ)·w - 2α·(M̂/(√V̂+ε) + ξ)·(1-Ū)"""
    direction = first_moment / c_first_moment / (sqrt(second_moment / c_second_moment) + eps)
    gate = sigmoid(utility / -eta)
    return (1 - lr * weight_decay) * w - 2 * lr * ((direction + sigma * noise) * gate)


def update_non_protecting(
    w: Any, utility: Any, first_moment: Any, second_moment: Any, noise: Any, eta: Any,
    c_first_moment: Any, c_second_moment: Any, lr: Any, weight_decay: Any, sigma: Any, eps: Any,
) -> Any:
    """w ← (1-αλ)·w - α·(M̂/(√V̂+ε) + 2ξ·(1-Ū))"""
    direction = first_moment / c_first_moment / (sqrt(second_moment / c_second_moment) + eps)
    gate = sigmoid(utility / -eta)
    return (1 - lr * weight_decay) * w - lr * (direction + 2 * sigma * noise * gate)


def adamw(
    w: Any, g: Any, first_moment: Any, second_moment: Any,
    c_first_moment: Any, c_second_moment: Any,
    lr: Any, weight_decay: Any, beta1: Any, beta2: Any, eps: Any,
) -> Any:
    """w ← (1-αλ)·w - α·M̂/(√V̂+ε)"""
    first_moment, second_moment = moments(g, first_moment, second_moment, beta1, beta2)
    direction = first_moment / c_first_moment / (sqrt(second_moment / c_second_moment) + eps)
    return (1 - lr * weight_decay) * w - lr * direction, first_moment, second_moment


def traces_first_order(
    w: Any, g: Any, utility: Any, first_moment: Any, second_moment: Any,
    beta_utility: Any, beta1: Any, beta2: Any,
) -> Any:
    """The first-order utility trace and Adam's moments."""
    utility = trace_first_order(w, g, utility, beta_utility)
    return utility, *moments(g, first_moment, second_moment, beta1, beta2)


def traces_second_order(
    w: Any, g: Any, h: Any, utility: Any, first_moment: Any, second_moment: Any,
    beta_utility: Any, beta1: Any, beta2: Any,
) -> Any:
    """The second-order utility trace and Adam's moments."""
    utility = trace_second_order(w, g, h, utility, beta_utility)
    return utility, *moments(g, first_moment, second_moment, beta1, beta2)
# fmt: on


_DECAYS = {"first_moment": "beta1", "second_moment": "beta2"}

ADAMW = Method(
    hyper=("lr", "weight_decay", "betas", "eps"),
    states=("first_moment", "second_moment"),
    decays=_DECAYS,
    phases=(Phase(adamw, writes=("w", "first_moment", "second_moment")),),
)


@cache
def ada_upgd_method(scaling: Scaling = "global", order: int = 1, protect: bool = True) -> Method:
    """The method for these options."""
    return Method(
        hyper=("lr", "weight_decay", "sigma", "beta_utility", "betas", "eps"),
        states=("utility", "first_moment", "second_moment"),
        decays={"utility": "beta_utility", **_DECAYS},
        phases=(
            Phase(
                traces_second_order if order == 2 else traces_first_order,
                writes=("utility", "first_moment", "second_moment"),
                reduce="max" if scaling == "global" else "row_norm",
            ),
            Phase(update_protecting if protect else update_non_protecting, writes=("w",)),
        ),
        power=order + 1,
    )


# -------------------------------------------------------------------- the optimizers
class AdaUPGD(UtilityOptimizer):
    r"""Adaptive UPGD: Adam's direction, perturbed and gated by utility.

    .. math::
        w \leftarrow (1 - \alpha\lambda)\, w
            - 2\alpha \Big(\frac{\hat M}{\sqrt{\hat V} + \epsilon} + \xi\Big)(1 - \bar U)

    with Adam's bias-corrected moments :math:`\hat M, \hat V` and the scaled utility
    :math:`\bar U` of :class:`~upgd.UPGD`. A weight without utility takes Adam's step at the same
    step size. The first four arguments are those of :class:`torch.optim.Adam`;
    ``weight_decay`` is decoupled as in :class:`torch.optim.AdamW`. The paper's algorithm has
    ``weight_decay=0`` and half of its α as ``lr``; its PPO experiments use ``eps=1e-5``.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or parameter groups.
        lr: Step size α, as Adam's; a number or a one-element tensor.
        betas: Decays of Adam's moments.
        eps: Added to Adam's denominator.
        weight_decay: Decoupled weight decay λ.
        beta_utility: Decay β_u of the utility trace.
        sigma: Standard deviation σ of the perturbation, beside steps of size about 1.
        scaling, order, protect, curvature: See :class:`~upgd.UPGD`.
        common: ``seed``, ``noise``, ``maximize``, ``foreach``, ``fused``, ``capturable``,
            ``nonfinite``, ``rounding``, ``trace_dtype`` and ``master_weights`` of
            :class:`~upgd.optim.base.RuleOptimizer`.

    Example:
        >>> import torch, upgd
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = upgd.AdaUPGD(model.parameters(), lr=1e-3, betas=(0.9, 0.999))
        >>> model(torch.ones(4, 3)).square().mean().backward()
        >>> opt.step()
    """

    build = staticmethod(ada_upgd_method)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        beta_utility: float = 0.99,
        sigma: float = 0.1,
        scaling: Scaling = "global",
        order: int = 1,
        protect: bool = True,
        curvature: Curvature = "hesscale",
        **common: Unpack[Common],
    ) -> None:
        hyper: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "sigma": sigma}
        hyper |= {"beta_utility": beta_utility, "betas": betas, "eps": eps}
        super().__init__(params, hyper, scaling, order, protect, curvature, **common)

    @classmethod
    def from_optimizer(cls, adam: torch.optim.Adam | torch.optim.AdamW, **arguments: Any) -> Self:
        """Go on where Adam or AdamW stopped: its groups, moments and step counts.

        Utilities begin at zero, so the next step is Adam's times each weight's gate.

        Args:
            adam: Without ``amsgrad``. Plain Adam's ``weight_decay`` must be 0: it is part of the
                moments, here decay is AdamW's.
            arguments: Of the constructor; those that groups have, such as ``lr``, replace theirs.

        Example:
            >>> import torch, upgd
            >>> model = torch.nn.Linear(3, 1)
            >>> adam = torch.optim.AdamW(model.parameters(), lr=2e-3)
            >>> model(torch.ones(4, 3)).square().mean().backward()
            >>> adam.step()
            >>> opt = upgd.AdaUPGD.from_optimizer(adam, sigma=0.05)
            >>> opt.param_groups[0]["lr"], int(opt.state[model.weight]["step"])
            (0.002, 1)
        """
        opt = cls(growing.groups_of_adam(cls.__name__, adam, arguments), **arguments)
        names = {"first_moment": "exp_avg", "second_moment": "exp_avg_sq"}
        growing.take_states(opt, adam, names, counted=True)
        return opt


class AdamW(RuleOptimizer):
    r"""The AdamW rule, for stacks of learners and comparisons.

    .. math::
        w \leftarrow (1 - \alpha\lambda)\, w - \alpha\, \hat M / (\sqrt{\hat V} + \epsilon)

    It computes what :class:`torch.optim.AdamW` computes; outside the laboratory, use
    that one. Arguments as in :class:`~upgd.AdaUPGD`.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **common: Unpack[Common],
    ) -> None:
        hyper = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(params, ADAMW, hyper, **common)
