"""Streaming versions of EWC, MAS, SI and RWalk: pull important weights to their average.

All four share ``w ← w - α·[g + κ·Ω·(w - w̄)]`` with ``w̄`` the bias-corrected trace of the
weights, and differ in the importance Ω. Traces take this step's gradient and the
weights before this step's update, and are then used. Δ is the weight before the
previous update minus the weight now.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from upgd.optim.base import Common, Params, RuleOptimizer
from upgd.rules.ops import absolute
from upgd.rules.vocabulary import Method, Phase

DAMPING = 1e-3
"""The paper's ε in the importance of S-SI and S-RWalk."""


# ------------------------------------------------------------------------ the rules
def consolidate(
    w: Any, g: Any, importance: Any, weight_trace: Any, c_weight_trace: Any, lr: Any, kappa: Any
) -> Any:
    """w ← w - α·[g + κ·Ω·(w - w̄)]"""
    return w - lr * (g + kappa * (importance * (w - weight_trace / c_weight_trace)))


# fmt: off
def ewc(
    w: Any, g: Any, fisher: Any, weight_trace: Any, c_fisher: Any, c_weight_trace: Any,
    lr: Any, kappa: Any, beta_importance: Any, beta_weight: Any,
) -> Any:
    """Ω = trace of g²"""
    fisher = beta_importance * fisher + (1 - beta_importance) * (g * g)
    weight_trace = beta_weight * weight_trace + (1 - beta_weight) * w
    w = consolidate(w, g, fisher / c_fisher, weight_trace, c_weight_trace, lr, kappa)
    return w, fisher, weight_trace


def mas(
    w: Any, g: Any, sensitivity: Any, weight_trace: Any, c_sensitivity: Any, c_weight_trace: Any,
    lr: Any, kappa: Any, beta_importance: Any, beta_weight: Any,
) -> Any:
    """Ω = trace of |g|"""
    sensitivity = beta_importance * sensitivity + (1 - beta_importance) * absolute(g)
    weight_trace = beta_weight * weight_trace + (1 - beta_weight) * w
    w = consolidate(w, g, sensitivity / c_sensitivity, weight_trace, c_weight_trace, lr, kappa)
    return w, sensitivity, weight_trace


def si(
    w: Any, g: Any, path: Any, change: Any, previous_weight: Any, weight_trace: Any,
    c_path: Any, c_change: Any, c_weight_trace: Any,
    lr: Any, kappa: Any, beta_importance: Any, beta_weight: Any,
) -> Any:
    """Ω = ω̃ / (Δ̃² + ε),  ω = g·Δ"""
    delta = previous_weight - w
    path = beta_importance * path + (1 - beta_importance) * (g * delta)
    change = beta_importance * change + (1 - beta_importance) * delta
    weight_trace = beta_weight * weight_trace + (1 - beta_weight) * w
    corrected = change / c_change
    importance = path / c_path / (corrected * corrected + DAMPING)
    new = consolidate(w, g, importance, weight_trace, c_weight_trace, lr, kappa)
    return new, path, change, w, weight_trace


def rwalk(
    w: Any, g: Any, path: Any, fisher: Any, score: Any, previous_weight: Any, weight_trace: Any,
    c_path: Any, c_fisher: Any, c_weight_trace: Any,
    lr: Any, kappa: Any, beta_importance: Any, beta_weight: Any,
) -> Any:
    """Ω = s̃ + F̃,  s = ω̃ / (½·F̃·Δ² + ε),  s̃ ← ½·s̃ + ½·s,  F̃ = trace of g²"""
    delta = previous_weight - w
    path = beta_importance * path + (1 - beta_importance) * (g * delta)
    fisher = beta_importance * fisher + (1 - beta_importance) * (g * g)
    weight_trace = beta_weight * weight_trace + (1 - beta_weight) * w
    corrected = fisher / c_fisher
    score = 0.5 * score + 0.5 * (path / c_path / (0.5 * corrected * (delta * delta) + DAMPING))
    new = consolidate(w, g, score + corrected, weight_trace, c_weight_trace, lr, kappa)
    return new, path, fisher, score, w, weight_trace
# fmt: on


def _method(rule: Any, states: tuple[str, ...]) -> Method:
    """`states` in the order in which the rule returns them, after the weight."""
    uncorrected = {"previous_weight", "score"}
    decays = {
        state: "beta_weight" if state == "weight_trace" else "beta_importance"
        for state in states
        if state not in uncorrected
    }
    return Method(
        hyper=("lr", "kappa", "beta_importance", "beta_weight"),
        states=states,
        decays=decays,
        starts_as_weight=frozenset({"previous_weight"} & set(states)),
        phases=(Phase(rule, writes=("w", *states)),),
        power=3,
    )


EWC_METHOD = _method(ewc, ("fisher", "weight_trace"))
MAS_METHOD = _method(mas, ("sensitivity", "weight_trace"))
SI_METHOD = _method(si, ("path", "change", "previous_weight", "weight_trace"))
RWALK_METHOD = _method(rwalk, ("path", "fisher", "score", "previous_weight", "weight_trace"))


# -------------------------------------------------------------------- the optimizers
class Consolidation(RuleOptimizer):
    """Base class of the four; each sets its method."""

    consolidation: Method

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        kappa: float = 0.1,
        beta_importance: float = 0.99,
        beta_weight: float = 0.999,
        **common: Unpack[Common],
    ) -> None:
        hyper = {"lr": lr, "kappa": kappa}
        hyper |= {"beta_importance": beta_importance, "beta_weight": beta_weight}
        super().__init__(params, self.consolidation, hyper, **common)

    def __init_subclass__(cls) -> None:
        cls.__doc__ = (cls.__doc__ or "") + _ARGUMENTS.format(name=cls.__name__)


_ARGUMENTS = """
    Args:
        params: Parameters, ``(name, parameter)`` pairs, or parameter groups.
        lr: Step size α; a number or a one-element tensor.
        kappa: Strength κ of the pull.
        beta_importance: Decay β_I of the traces that make up the importance.
        beta_weight: Decay β_w of the weight trace.
        common: See :class:`~upgd.optim.base.RuleOptimizer`.

    Example:
        >>> import torch, upgd
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = upgd.{name}(model.parameters(), lr=0.01, kappa=1.0)
        >>> model(torch.ones(4, 3)).square().mean().backward()
        >>> opt.step()
    """


class StreamingEWC(Consolidation):
    r"""Elastic weight consolidation without task boundaries (S-EWC).

    .. math:: w \leftarrow w - \alpha\,[g + \kappa\,\Omega\,(w - \bar w)]

    with :math:`\Omega` the trace of :math:`g^2` and :math:`\bar w` that of the weights.
    """

    consolidation = EWC_METHOD


class StreamingMAS(Consolidation):
    r"""Memory-aware synapses without task boundaries (S-MAS).

    .. math:: w \leftarrow w - \alpha\,[g + \kappa\,\Omega\,(w - \bar w)]

    with :math:`\Omega` the trace of :math:`|g|` and :math:`\bar w` that of the weights.
    """

    consolidation = MAS_METHOD


class StreamingSI(Consolidation):
    r"""Synaptic intelligence without task boundaries (S-SI).

    .. math:: w \leftarrow w - \alpha\,[g + \kappa\,\Omega\,(w - \bar w)], \qquad
        \Omega = \tilde\omega / (\tilde\Delta^2 + 10^{-3})

    with traces of :math:`\omega = g\Delta` and of :math:`\Delta`, the weight before the
    previous update minus the weight now.
    """

    consolidation = SI_METHOD


class StreamingRWalk(Consolidation):
    r"""Riemannian walk without task boundaries (S-RWalk).

    .. math:: w \leftarrow w - \alpha\,[g + \kappa\,\Omega\,(w - \bar w)], \qquad
        \Omega = \tilde s + \tilde F, \quad
        s = \tilde\omega / (\tfrac12 \tilde F \Delta^2 + 10^{-3})

    with :math:`\tilde F` the trace of :math:`g^2` and :math:`\tilde s` a fast trace
    (decay ½, not bias-corrected) of the score. Negative scores are kept.
    """

    consolidation = RWALK_METHOD
