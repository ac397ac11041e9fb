"""UPGD with its gate taken apart: each half of it with a strength of its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from upgd.optim.base import Common, Params, RuleOptimizer
from upgd.optim.upgd import trace_first_order
from upgd.rules.ops import maximum, minimum, sigmoid
from upgd.rules.vocabulary import Method, Phase


# ------------------------------------------------------------------------- the rule
# fmt: off
def update_gated(
    w: Any, g: Any, utility: Any, noise: Any, eta: Any,
    lr: Any, weight_decay: Any, sigma: Any, sharpness: Any, protecting: Any, undoing: Any,
) -> Any:
    """w ← (1-αλ)·w - α·(g + ξ)·[1 - p·(1 - 2φ(-k·Û⁺/η)) + r·(2φ(-k·Û⁻/η) - 1)]"""
    width = -eta / sharpness
    slower = 1 - 2 * sigmoid(maximum(utility, 0.0) / width)
    faster = 2 * sigmoid(minimum(utility, 0.0) / width) - 1
    gate = 1 - protecting * slower + undoing * faster
    return (1 - lr * weight_decay) * w - lr * ((g + sigma * noise) * gate)
# fmt: on


GATED_UPGD = Method(
    hyper=(
        *("lr", "weight_decay", "sigma", "beta_utility"),
        *("sharpness", "protecting", "undoing"),
    ),
    states=("utility",),
    decays={"utility": "beta_utility"},
    phases=(
        Phase(trace_first_order, writes=("utility",), reduce="max"),
        Phase(update_gated, writes=("w",)),
    ),
)


# -------------------------------------------------------------------- the optimizer
class GatedUPGD(RuleOptimizer):
    r"""UPGD whose gate can be weakened, sharpened and halved, for ablations.

    .. math::
        w \leftarrow (1 - \alpha\lambda)\, w - \alpha\,(g + \xi)\,
        \big[1 - p\,\tanh(k\,\hat U^+ / 2\eta) - r\,\tanh(k\,\hat U^- / 2\eta)\big]

    with the utility :math:`\hat U` and its maximum :math:`\eta` over all weights as in
    :class:`~upgd.UPGD`, :math:`\hat U^+ = \max(\hat U, 0)`, :math:`\hat U^- = \min(\hat U, 0)`. A
    weight without utility takes the whole step; p slows useful weights down, r speeds harmful ones
    up. With p = r = k = 1 it is UPGD, since :math:`1 - \tanh(x/2) = 2\,(1 - \phi(x))`; with
    p = r = 0 it has no gate (shrink and perturb). Numbers per layer say where the gate is: η is
    taken over all weights, whether they are gated or not.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or parameter groups.
        lr: Step size α; a number or a one-element tensor.
        weight_decay: Decoupled weight decay λ.
        beta_utility: Decay β_u of the utility trace.
        sigma: Standard deviation σ of the perturbation.
        sharpness: Factor k > 0 of the scaled utility.
        protecting: Strength p of the half that slows useful weights down, 0 to 1.
        undoing: Strength r of the half that speeds harmful weights up, 0 to 1.
        common: See :class:`~upgd.optim.base.RuleOptimizer`.

    Example:
        >>> import torch, upgd
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = upgd.GatedUPGD(model.parameters(), lr=0.01, protecting=0.0)
        >>> model(torch.ones(4, 3)).square().mean().backward()
        >>> opt.step()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        weight_decay: float = 0.0,
        beta_utility: float = 0.99,
        sigma: float = 0.001,
        sharpness: float = 1.0,
        protecting: float = 1.0,
        undoing: float = 1.0,
        **common: Unpack[Common],
    ) -> None:
        hyper: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "sigma": sigma}
        hyper |= {"beta_utility": beta_utility, "sharpness": sharpness}
        hyper |= {"protecting": protecting, "undoing": undoing}
        super().__init__(params, GATED_UPGD, hyper, **common)
