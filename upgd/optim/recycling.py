"""Methods that re-initialise hidden units of little use: continual backprop and ReDo."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, Literal

from torch import Tensor, nn

from upgd.optim.ada_upgd import ADAMW
from upgd.optim.layered import LayerOptimizer
from upgd.optim.perturbed import SGDW_METHOD
from upgd.rules.ops import absolute, maximum
from upgd.rules.vocabulary import Method, Phase, Recycle

Base = Literal["sgd", "adam"]


# ------------------------------------------------------------------------ the rules
# fmt: off
def contribution(
    x: Any, w_in: Any, w_out: Any, output_trace: Any, utility: Any, correction: Any,
    beta_utility: Any,
) -> Any:
    """h̄ ← β·h̄ + (1-β)·h,  u ← β·u + (1-β)·|w_out|·|h - h̄/c|/|w_in|,  c = 1 - βᵃ of age a"""
    correction = beta_utility * correction + (1 - beta_utility)
    output_trace = beta_utility * output_trace + (1 - beta_utility) * x
    average = output_trace / correction
    contributed = w_out * absolute(x - average) / maximum(w_in, 1e-15)
    utility = beta_utility * utility + (1 - beta_utility) * contributed
    return output_trace, utility, correction, average, utility / correction


def activity(x: Any, size: Any, correction: Any, score: Any, beta_utility: Any) -> Any:
    """s ← β·s + (1-β)·|h|, corrected by 1 - βᵃ of age a"""
    correction = beta_utility * correction + (1 - beta_utility)
    size = beta_utility * size + (1 - beta_utility) * absolute(x)
    return size, correction, size / correction
# fmt: on


def _on(base: Base, phase: Phase, kept: tuple[str, ...], recycle: Recycle, *hyper: str) -> Method:
    """A base's rule, then the features' phase."""
    own = {"sgd": SGDW_METHOD, "adam": ADAMW}[base]
    return Method(
        hyper=(*own.hyper, *hyper),
        phases=(*own.phases, phase),
        states=own.states,
        decays=own.decays,
        kept={"features": kept},
        recycle=recycle,
        power=max(own.power, 3),
    )


@cache
def continual_backprop_method(base: Base = "sgd") -> Method:
    """Continual backprop on a base optimizer."""
    kept = ("output_trace", "utility", "correction", "average", "score")
    recycle = Recycle("score", share="replacement_rate", mature="maturity", average="average")
    phase = Phase(contribution, writes=kept, over="features")
    return _on(base, phase, kept, recycle, "beta_utility", "replacement_rate", "maturity")


@cache
def redo_method(base: Base = "sgd") -> Method:
    """ReDo on a base optimizer."""
    kept = ("size", "correction", "score")
    recycle = Recycle("score", threshold="threshold", every="period")
    phase = Phase(activity, writes=kept, over="features")
    return _on(base, phase, kept, recycle, "beta_utility", "threshold", "period")


# -------------------------------------------------------------------- the optimizers
class ContinualBackprop(LayerOptimizer):
    r"""Continual backprop: renews the mature hidden units that contribute least to their layer.

    .. math::
        u_i \leftarrow \beta u_i + (1-\beta)\,
        \frac{\overline{|w^{out}_i|}\; |h_i - \hat{\bar h}_i|}{\overline{|w^{in}_i|}}

    Each step :math:`\rho n` of a layer's n units older than m steps are due, the lowest corrected u
    first. Dohare et al., Loss of plasticity in deep continual learning, Nature 2024.

    Args:
        params: A model, or its parameters with ``layers=upgd.Layers(model)``; hidden layers must
            be linear.
        lr: Step size α of the base; 0.001 is usual for ``base="adam"``.
        weight_decay: Decoupled weight decay λ of the base.
        beta_utility: Decay β of the two traces.
        replacement_rate: Share ρ of a layer's mature units that is renewed each step.
        maturity: Age m in steps.
        betas, eps: Of ``base="adam"``.
        base: ``"sgd"`` or ``"adam"``.
        common: See :class:`~upgd.optim.layered.LayerOptimizer`.

    Example:
        >>> import upgd
        >>> from torch import nn, ones
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> opt = upgd.ContinualBackprop(model, lr=0.01)
        >>> model(ones(4, 3)).square().mean().backward()
        >>> opt.step()
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 0.01,
        weight_decay: float = 0.0,
        beta_utility: float = 0.99,
        replacement_rate: float = 1e-4,
        maturity: float = 1000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        base: Base = "sgd",
        **common: Any,
    ) -> None:
        given: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        given |= {"beta_utility": beta_utility, "replacement_rate": replacement_rate}
        given["maturity"] = maturity
        method = continual_backprop_method(_checked(base))
        super().__init__(params, method, {n: given[n] for n in method.hyper}, **common)


class ReDo(LayerOptimizer):
    r"""ReDo: hidden units whose activity is a small share of their layer's mean are renewed.

    .. math::
        s_i \leftarrow \beta s_i + (1-\beta)\,|h_i|

    Every `period` steps those units with :math:`\hat s_i \le \tau\,\frac1n\sum_k \hat s_k` go, by
    the trace corrected for its age: the authors average over a batch, which single samples do not
    have.
    Sokar et al., The dormant neuron phenomenon in deep reinforcement learning, ICML 2023.

    Args:
        params: A model, or its parameters with ``layers=upgd.Layers(model)``; hidden layers must
            be linear.
        lr: Step size α of the base; 0.001 is usual for ``base="adam"``.
        weight_decay: Decoupled weight decay λ of the base.
        beta_utility: Decay of the trace.
        threshold: τ.
        period: Steps from one look to the next.
        betas, eps: Of ``base="adam"``.
        base: ``"sgd"`` or ``"adam"``.
        common: See :class:`~upgd.optim.layered.LayerOptimizer`.

    Example:
        >>> import upgd
        >>> from torch import nn, ones
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> opt = upgd.ReDo(model, lr=0.01)
        >>> model(ones(4, 3)).square().mean().backward()
        >>> opt.step()
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 0.01,
        weight_decay: float = 0.0,
        beta_utility: float = 0.99,
        threshold: float = 0.025,
        period: float = 1000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        base: Base = "sgd",
        **common: Any,
    ) -> None:
        given: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        given |= {"beta_utility": beta_utility, "threshold": threshold, "period": period}
        method = redo_method(_checked(base))
        super().__init__(params, method, {n: given[n] for n in method.hyper}, **common)


def _checked(base: Base) -> Base:
    if base not in ("sgd", "adam"):
        raise ValueError(f"base must be 'sgd' or 'adam', got {base!r}")
    return base
