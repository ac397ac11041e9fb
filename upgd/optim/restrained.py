"""Descent with weights that are kept near others: L2 Init, Hare and Tortoise, weight clipping."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from upgd.optim.ada_upgd import adamw
from upgd.optim.base import Common, Params, RuleOptimizer
from upgd.rules import ops
from upgd.rules.vocabulary import Method, Phase


# ------------------------------------------------------------------------ the rules
def l2_init(w: Any, g: Any, start: Any, lr: Any, weight_decay: Any) -> Any:
    """w ← w - α·[g + λ·(w - w₀)]"""
    return w - lr * (g + weight_decay * (w - start))


# fmt: off
def hare_tortoise(
    w: Any, g: Any, slow: Any, due: Any, lr: Any, weight_decay: Any, beta_weight: Any
) -> Any:
    """w ← (1-αλ)·w - α·g,  w̄ ← β·w̄ + (1-β)·w,  every k steps w ← w̄"""
    fast = (1 - lr * weight_decay) * w - lr * g
    slow = beta_weight * slow + (1 - beta_weight) * fast
    return (1 - due) * fast + due * slow, slow


def clipped_sgd(w: Any, g: Any, bound: Any, lr: Any, clip: Any) -> Any:
    """w ← [w - α·g], cut off at ±c/√fan-in"""
    most = clip * bound
    return ops.clip(w - lr * g, -most, most)


def clipped_adam(
    w: Any, g: Any, first_moment: Any, second_moment: Any,
    c_first_moment: Any, c_second_moment: Any,
    bound: Any, lr: Any, beta1: Any, beta2: Any, eps: Any, clip: Any,
) -> Any:
    """w ← [w - α·M̂/(√V̂+ε)], cut off at ±c/√fan-in"""
    moved, first_moment, second_moment = adamw(
        w, g, first_moment, second_moment, c_first_moment, c_second_moment,
        lr, 0.0, beta1, beta2, eps,
    )
    most = clip * bound
    return ops.clip(moved, -most, most), first_moment, second_moment
# fmt: on


L2_INIT = Method(
    hyper=("lr", "weight_decay"),
    states=("start",),
    starts_as_weight=frozenset({"start"}),
    phases=(Phase(l2_init, writes=("w",)),),
)
HARE_TORTOISE = Method(
    hyper=("lr", "weight_decay", "beta_weight", "period"),
    states=("slow",),
    starts_as_weight=frozenset({"slow"}),
    phases=(Phase(hare_tortoise, writes=("w", "slow")),),
    period="period",
)
CLIPPED_SGD = Method(hyper=("lr", "clip"), phases=(Phase(clipped_sgd, writes=("w",)),))
CLIPPED_ADAM = Method(
    hyper=("lr", "betas", "eps", "clip"),
    states=("first_moment", "second_moment"),
    decays={"first_moment": "beta1", "second_moment": "beta2"},
    phases=(Phase(clipped_adam, writes=("w", "first_moment", "second_moment")),),
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


class HareTortoise(RuleOptimizer):
    r"""Hare and Tortoise: fast weights that return to a slow copy of themselves now and then.

    .. math::
        w \leftarrow (1 - \alpha\lambda)\, w - \alpha\, g, \qquad
        \bar w \leftarrow \beta_w\, \bar w + (1 - \beta_w)\, w, \qquad
        \text{every } k \text{ steps } w \leftarrow \bar w

    The slow copy starts as the weights and has no bias correction. Lee and others, *Slow and Steady
    Wins the Race: Maintaining Plasticity with Hare and Tortoise Networks* (ICML 2024), count k in
    epochs and reset AdamW's weights; they evaluate both copies after training. A learner that
    predicts while it learns does so with the fast weights; ``opt.state[p]["slow"]`` has the others.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or parameter groups.
        lr: Step size α; a number or a one-element tensor.
        weight_decay: Decoupled weight decay λ of the fast weights.
        beta_weight: Decay β_w of the slow weights.
        period: Steps k from one reset to the next; 1 keeps the weights almost where they are.
        common: See :class:`~upgd.optim.base.RuleOptimizer`.

    Example:
        >>> import torch, upgd
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = upgd.HareTortoise(model.parameters(), lr=0.01, period=1000)
        >>> model(torch.ones(4, 3)).square().mean().backward()
        >>> opt.step()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        weight_decay: float = 0.0,
        beta_weight: float = 0.999,
        period: float = 1000,
        **common: Unpack[Common],
    ) -> None:
        hyper = {"lr": lr, "weight_decay": weight_decay}
        hyper |= {"beta_weight": beta_weight, "period": period}
        super().__init__(params, HARE_TORTOISE, hyper, **common)


class WeightClipping(RuleOptimizer):
    r"""SGD whose weights are cut off at a multiple of the bound of PyTorch's first weights.

    .. math:: w \leftarrow \min(\max(w - \alpha\, g, -c\,b), c\,b), \qquad b = 1 / \sqrt{n}

    with n the number of inputs of the weight's layer; a bias has its layer's bound. Elsayed, Lan,
    Lyle and Mahmood, *Weight Clipping for Deep Continual and Reinforcement Learning* (2024). Biases
    find their layer by their place: in each group, a bias stands right after its weight, as in
    ``model.parameters()``.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or parameter groups.
        lr: Step size α; a number or a one-element tensor.
        clip: The factor c (the paper's κ), usually 1 to 5; a large number for layers that are not
            to be clipped.
        common: See :class:`~upgd.optim.base.RuleOptimizer`.

    Example:
        >>> import torch, upgd
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = upgd.WeightClipping(model.parameters(), lr=0.01, clip=2.0)
        >>> model(torch.ones(4, 3)).square().mean().backward()
        >>> opt.step()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        clip: float = 2.0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(params, CLIPPED_SGD, {"lr": lr, "clip": clip}, **common)


class WeightClippingAdam(RuleOptimizer):
    r"""Adam with the clipping of :class:`~upgd.WeightClipping`.

    .. math::
        w \leftarrow \min(\max(w - \alpha\, \hat M / (\sqrt{\hat V} + \epsilon), -c\,b), c\,b)

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or parameter groups.
        lr: Step size α; a number or a one-element tensor.
        betas: Decays of Adam's moments.
        eps: Added to Adam's denominator.
        clip: The factor c of the bound b.
        common: See :class:`~upgd.optim.base.RuleOptimizer`.

    Example:
        >>> import torch, upgd
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = upgd.WeightClippingAdam(model.parameters(), lr=1e-3, clip=2.0)
        >>> model(torch.ones(4, 3)).square().mean().backward()
        >>> opt.step()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        clip: float = 2.0,
        **common: Unpack[Common],
    ) -> None:
        hyper = {"lr": lr, "betas": betas, "eps": eps, "clip": clip}
        super().__init__(params, CLIPPED_ADAM, hyper, **common)
