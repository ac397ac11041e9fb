"""FADE: gradient descent with a weight decay per weight that is learned."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from upgd.curvature import Curvature
from upgd.optim.base import Common, Params, RuleOptimizer
from upgd.rules.ops import clip, exp, log, maximum, minimum
from upgd.rules.vocabulary import Method, Phase

LEAST, MOST = -15.0, 30.0
"""Between these the logarithm of a decay stays, relative to the one it starts from."""


# ------------------------------------------------------------------------ the rules
# fmt: off
def fade_second_order(
    w: Any, g: Any, h: Any, log_decay: Any, sensitivity: Any,
    lr: Any, weight_decay: Any, meta_lr: Any,
) -> Any:
    """γ ← γ - θ·g·H,  H ← [1 - αλ - αh]₀¹·H - αλ·w,  w ← (1-αλ)·w - α·g,  λ = λ₀·exp(γ)"""
    log_decay = clip(log_decay - meta_lr * (g * sensitivity), LEAST, MOST)
    share = lr * weight_decay * exp(log_decay)
    log_decay = log_decay - log(maximum(share, 1.0))  # a step takes the whole weight at most
    share = minimum(share, 1.0)
    sensitivity = clip(1 - share - lr * h, 0.0, 1.0) * sensitivity - share * w
    return w - share * w - lr * g, log_decay, sensitivity


def fade_first_order(
    w: Any, g: Any, log_decay: Any, sensitivity: Any, lr: Any, weight_decay: Any, meta_lr: Any
) -> Any:
    """The same with g², whose mean over the network's own labels is h, in place of h."""
    return fade_second_order(w, g, g * g, log_decay, sensitivity, lr, weight_decay, meta_lr)
# fmt: on


@cache
def fade_method(order: int = 2) -> Method:
    """The method with the curvature itself or with g² in its place."""
    return Method(
        hyper=("lr", "weight_decay", "meta_lr"),
        states=("log_decay", "sensitivity"),
        phases=(
            Phase(
                fade_second_order if order == 2 else fade_first_order,
                writes=("w", "log_decay", "sensitivity"),
            ),
        ),
    )


# -------------------------------------------------------------------- the optimizer
class FADE(RuleOptimizer):
    r"""Forgetting through adaptive decay: each weight learns its own weight decay.

    .. math::
        \gamma \leftarrow \gamma - \theta\, g\, H, \qquad \lambda = \lambda_0\, e^\gamma, \qquad
        H \leftarrow [1 - \alpha\lambda - \alpha h]_0^1\, H - \alpha\lambda\, w, \qquad
        w \leftarrow (1 - \alpha\lambda)\, w - \alpha\, g

    γ descends the loss by the trace H, which follows how the weight depends on γ; h is the
    Hessian's diagonal. Ramesh, Lewandowski and Schmidhuber, *Learning to Forget: Continual
    Learning with Adaptive Weight Decay* (2026), derive it for a linear model and use it for a
    network's last layer, with SGD or Adam below it. A layer with ``weight_decay=0`` takes plain SGD
    steps, so give a decay to the last layer alone.

    Their decay is not multiplied by the step size: it is ``lr * weight_decay`` here.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or parameter groups.
        lr: Step size α; a number or a one-element tensor.
        weight_decay: The decay λ₀ from which each weight starts; 0 switches decay and learning of
            it off.
        meta_lr: Step size θ of γ.
        order: 2 reads h: call ``opt.backward(loss)`` in place of ``loss.backward()``. For
            cross-entropy and squared errors HesScale's h is exact in the last layer. 1 takes g²
            in its place.
        curvature: How h is estimated with ``order=2``: ``"hesscale"``, ``"ggn"`` or
            ``"hutchinson"``.
        common: See :class:`~upgd.optim.base.RuleOptimizer`.

    Example:
        >>> import torch, upgd
        >>> body, head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        >>> groups = [
        ...     {"params": body.parameters(), "weight_decay": 0.0},
        ...     {"params": head.parameters(), "weight_decay": 0.1},
        ... ]
        >>> opt = upgd.FADE(groups, lr=0.01)
        >>> logits = head(body(torch.ones(1, 3)).relu())
        >>> loss = torch.nn.functional.cross_entropy(logits, torch.tensor([1]))
        >>> opt.backward(loss)
        >>> opt.step()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        weight_decay: float = 0.1,
        meta_lr: float = 0.01,
        order: int = 2,
        curvature: Curvature = "hesscale",
        **common: Unpack[Common],
    ) -> None:
        if order not in (1, 2):
            raise ValueError(f"{type(self).__name__}: order must be 1 or 2, got {order!r}")
        self.order, self.curvature = order, curvature
        hyper = {"lr": lr, "weight_decay": weight_decay, "meta_lr": meta_lr}
        super().__init__(params, fade_method(order), hyper, **common)
