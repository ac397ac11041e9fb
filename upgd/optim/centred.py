"""Gradient descent about the mean of each layer's input."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from upgd.optim.layered import LayerOptimizer
from upgd.rules.ops import maximum
from upgd.rules.vocabulary import Method, Phase


# ------------------------------------------------------------------------- the rule
def centre(x: Any, mean: Any, t: Any, beta_mean: Any) -> Any:
    """μ ← μ + max(1-β, 1/t)·(x - μ); sums ‖x-μ‖² and (x-μ)·μ"""
    mean = mean + maximum(1 - beta_mean, 1 / t) * (x - mean)
    return mean, (x - mean) ** 2, (x - mean) * mean


def spread(power: Any, energy: Any, beta_mean: Any, t: Any) -> Any:
    """E ← E + max(1-β, 1/t)·(‖x-μ‖² - E)"""
    return energy + maximum(1 - beta_mean, 1 / t) * (power - energy)


def move_weight(w: Any, g: Any, d: Any, mean: Any, lr: Any, weight_decay: Any) -> Any:
    """w ← (1-αλ)·w - α·(g - d·μ)"""
    return (1 - lr * weight_decay) * w - lr * (g - d * mean)


def move_bias(
    w: Any, d: Any, energy: Any, tilt: Any, lr: Any, weight_decay: Any, bias_share: Any
) -> Any:
    """b ← (1-αλ)·b - α·d·(max(1, κ·E) - (x-μ)·μ)"""
    return (1 - lr * weight_decay) * w - lr * d * (maximum(bias_share * energy, 1.0) - tilt)


CENTRED_SGD = Method(
    hyper=("lr", "weight_decay", "beta_mean", "bias_share"),
    phases=(
        Phase(centre, writes=("mean",), over="inputs", sums=("power", "tilt")),
        Phase(spread, writes=("energy",), over="layers"),
        Phase(move_weight, writes=("w",), over="weights"),
        Phase(move_bias, writes=("w",), over="biases"),
    ),
    kept={"inputs": ("mean",), "layers": ("energy",)},
    power=3,
)


# --------------------------------------------------------------------- the optimizer
class CentredSGD(LayerOptimizer):
    r"""Gradient descent in which each linear layer is written about the mean of its input.

    With μ the running mean of a layer's input x, the layer is :math:`W(x-\mu) + b'`: the gradient
    by W loses the part that all inputs share, and the bias takes it over.

    .. math::
        \mu &\leftarrow \mu + r\,(x - \mu), \quad r = \max(1-\beta, 1/t) \\
        E &\leftarrow E + r\,(\lVert x - \mu \rVert^2 - E) \\
        W &\leftarrow (1 - \alpha\lambda)\,W - \alpha\,\delta\,(x - \mu)^\top \\
        b &\leftarrow (1 - \alpha\lambda)\,b
            - \alpha\,\delta\,(\max(1, \kappa E) - (x-\mu)^\top\mu)

    where δ is the loss's derivative by :math:`Wx + b`. Of several samples μ, E and
    :math:`(x-\mu)^\top\mu` are means, and so are δ and :math:`\delta x^\top`.

    Args:
        params: A model, or its parameters with ``layers=upgd.Layers(model)``.
        lr: Step size α.
        weight_decay: Decoupled weight decay λ.
        beta_mean: Decay of the running mean.
        bias_share: Steps of biases are larger by this share of the centred input's mean square
            norm, where that exceeds 1.
        common: See :class:`~upgd.optim.layered.LayerOptimizer`.

    Example:
        >>> import torch, upgd
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> opt = upgd.CentredSGD(model, lr=0.01)
        >>> model(torch.ones(4, 3)).square().mean().backward()
        >>> opt.step()
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 0.01,
        weight_decay: float = 0.01,
        beta_mean: float = 0.99,
        bias_share: float = 0.1,
        **common: Any,
    ) -> None:
        hyper = {"lr": lr, "weight_decay": weight_decay, "beta_mean": beta_mean}
        super().__init__(params, CENTRED_SGD, {**hyper, "bias_share": bias_share}, **common)
