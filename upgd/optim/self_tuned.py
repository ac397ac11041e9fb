"""Gradient descent about the mean input whose step size and decays tune themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from upgd.optim.centred import spread
from upgd.optim.layered import LayerOptimizer
from upgd.rules.ops import absolute, clip, exp, maximum, mean, minimum, sqrt
from upgd.rules.vocabulary import Method, Metric, Phase


# ------------------------------------------------------------------------- the rule
def centre(x: Any, mean: Any, variance: Any, t: Any, beta_mean: Any, beta_slow: Any) -> Any:
    """μ ← μ + max(1-β, 1/t)·(x - μ), v likewise with β_s from (x-μ)²; sums v"""
    mean = mean + maximum(1 - beta_mean, 1 / t) * (x - mean)
    variance = variance + maximum(1 - beta_slow, 1 / t) * ((x - mean) ** 2 - variance)
    return mean, variance, variance


def level(total: Any, bound: Any) -> Any:
    """v̄, the mean of v over a layer's inputs, whose number is 1/bound²"""
    return maximum(total * bound**2, 1e-30)


def condition(x: Any, mean: Any, variance: Any, level: Any, whitening: Any) -> Any:
    """s = 1 / (1-ω + ω·v/v̄); sums s·(x-μ)² and s·(x-μ)·μ"""
    scale = 1 / (1 - whitening + whitening * variance / level)
    return scale, scale * (x - mean) ** 2, scale * (x - mean) * mean


def force(d: Any) -> Any:
    """Sums ‖δ‖² of a layer."""
    return d**2


def leverage(
    power: Any, force: Any, energy: Any, head: Any, beta_mean: Any, bias_share: Any, t: Any
) -> Any:
    """c = max(1, κ·E); sums how far the outputs move for a step of 1, and the error."""
    energy = spread(power, energy, beta_mean, t)
    factor = maximum(bias_share * energy, 1.0)
    return energy, factor, force * (power + factor), force * head


def aim(reach: Any, error: Any, typical: Any, gain: Any, lr: Any, beta_mean: Any, t: Any) -> Any:
    """α = η·q / max(Q, Q̄), Q = Σ‖δ_l‖²·(Σ s·(x_l-μ_l)² + c_l) / ‖δ_L‖²"""
    demand = reach / maximum(error, 1e-30)
    typical = spread(demand, typical, beta_mean, t)
    return typical, minimum(lr * gain / maximum(maximum(demand, typical), 1e-30), 100.0)


def root_mean_square(size: Any, value: Any) -> Any:
    """r² ← 0.999·r² + 0.001·v², without squares that overflow; r grows a millionfold at most."""
    ratio = clip(value / size, -1e6, 1e6)
    return maximum(size * sqrt(0.999 + 0.001 * ratio**2), 1e-30)


# fmt: off
def move_weight(
    w: Any, g: Any, d: Any, mean: Any, scale: Any, slow: Any, step: Any, shrink: Any,
    beta_slow: Any,
) -> Any:
    """w ← (1-ρ)·w - α·s·(g - d·μ), w̄ ← β·w̄ + (1-β)·w; sums g·w̄ and g·(w - w̄)"""
    hold, lead = g * slow, g * (w - slow)
    w = (1 - shrink) * w - step * scale * (g - d * mean)
    return w, beta_slow * slow + (1 - beta_slow) * w, hold, lead


def move_bias(
    w: Any, d: Any, slow: Any, step: Any, shrink: Any, factor: Any, tilt: Any, beta_slow: Any
) -> Any:
    """b ← (1-ρ)·b - α·d·(c - Σ s·(x-μ)·μ), b̄ as w̄; sums as those of weights"""
    hold, lead = d * slow, d * (w - slow)
    w = (1 - shrink) * w - step * d * (factor - tilt)
    return w, beta_slow * slow + (1 - beta_slow) * w, hold, lead


def tune_decay(
    decay: Any, hold_size: Any, hold: Any, hold_bias: Any, lead: Any, lead_bias: Any, head: Any,
    first: Any, pace: Any,
) -> Any:
    """ln λ += θ·⟨g, w̄⟩/rms, of the first layer and the head; sums ⟨g, w - w̄⟩"""
    hold = hold + hold_bias
    hold_size = root_mean_square(hold_size, hold)
    decay = clip(decay * exp(pace * clip(hold / hold_size, -3.0, 3.0)), 1e-5, 1.0)
    return decay, hold_size, 0.01 * decay * maximum(head, first), lead + lead_bias


def tune_gain(gain: Any, lead_size: Any, leads: Any, pace_target: Any) -> Any:
    """ln q -= θ·⟨g, w - w̄⟩/rms"""
    lead_size = root_mean_square(lead_size, leads)
    change = clip(leads / lead_size, -3.0, 3.0)
    return clip(gain * exp(-pace_target * change), 0.05, 20.0), lead_size
# fmt: on


# ------------------------------------------------------------ the rule for several samples
def settle(x: Any, mean: Any, t: Any, beta_mean: Any) -> Any:
    """μ ← μ + max(1-β, 1/t)·(x - μ)"""
    return spread(x, mean, beta_mean, t)


def vary(x: Any, mean: Any, variance: Any, t: Any, beta_slow: Any) -> Any:
    """v ← v + max(1-β_s, 1/t)·((x-μ)² - v), about the mean that samples share"""
    return spread((x - mean) ** 2, variance, beta_slow, t)


def add_up(variance: Any) -> Any:
    """Sums v."""
    return variance


def lean(d: Any, tilt: Any) -> Any:
    """The mean of δ·Σ s·(x-μ)·μ"""
    return d * tilt


# fmt: off
def couple(
    overlap: Any, force: Any, power: Any, factor: Any, positions: Any, outside: Any
) -> Any:
    """Sums ⟨g_n, ḡ⟩ and ‖g_n‖², as if positions were unlike, of linear layers; ‖ḡ‖² of all else."""
    own = (1 - outside) * force * (power + factor) / positions
    return overlap, own, outside * force * factor


def aim_together(
    error: Any, along: Any, own: Any, beyond: Any, typical: Any, gain: Any, lr: Any,
    beta_mean: Any, t: Any, samples: Any,
) -> Any:
    """α as above; Q = mean(⟨g_n, ḡ⟩² / ‖δ_L,n‖²) / ‖ḡ‖², at least mean(‖g_n‖² / ‖δ_L,n‖²) / N"""
    rounding = 1e-5 * mean(absolute(along))
    share = maximum(maximum(mean(along), rounding), 1e-30)
    error = maximum(error, 1e-30)
    demand = mean((along / sqrt(share) / sqrt(error)) ** 2)
    demand = maximum(demand, mean(own / error) / samples) * (1 + minimum(beyond / share, 1e6))
    typical = spread(demand, typical, beta_mean, t)
    return typical, minimum(lr * gain / maximum(maximum(demand, typical), 1e-30), 100.0)


def move_together(
    w: Any, d: Any, slow: Any, step: Any, shrink: Any, factor: Any, pull: Any, beta_slow: Any
) -> Any:
    """b ← (1-ρ)·b - α·(d·c - mean(δ·Σ s·(x-μ)·μ)), the rest as above"""
    hold, lead = d * slow, d * (w - slow)
    w = (1 - shrink) * w - step * (d * factor - pull)
    return w, beta_slow * slow + (1 - beta_slow) * w, hold, lead
# fmt: on


_TOGETHER = Method(
    hyper=("lr", "beta_mean", "bias_share", "whitening", "beta_slow", "pace", "pace_target"),
    phases=(
        Phase(settle, writes=("mean",), over="inputs"),
        Phase(vary, writes=("variance",), over="inputs"),
        Phase(add_up, over="inputs", sums=("total",)),
        Phase(level, writes=("level",), over="layers"),
        Phase(condition, writes=("scale",), over="inputs", sums=("power", "tilt")),
        Phase(force, over="units", sums=("force",)),
        Phase(lean, writes=("pull",), over="units"),
        Phase(leverage, writes=("energy", "factor"), over="layers", sums=("reach", "error")),
        Phase(couple, over="layers", sums=("along", "own", "beyond")),
        Phase(aim_together, writes=("typical", "step"), over="network"),
        Phase(move_weight, writes=("w", "slow"), sums=("hold", "lead")),
        Phase(move_together, writes=("w", "slow"), over="biases", sums=("hold_bias", "lead_bias")),
        Phase(tune_decay, writes=("decay", "hold_size", "shrink"), over="layers", sums=("leads",)),
        Phase(tune_gain, writes=("gain", "lead_size"), over="network"),
    ),
    states=("slow",),
    starts_as_weight=frozenset({"slow"}),
    kept={
        "inputs": ("mean", "variance", "scale"),
        "units": ("pull",),
        "layers": ("level", "energy", "factor", "decay", "hold_size", "shrink"),
        "network": ("typical", "step", "gain", "lead_size"),
    },
    starts={"decay": 0.01, "gain": 1.0, "hold_size": 1e-30, "lead_size": 1e-30},
    power=4,
    metric=Metric("mean", "scale", "factor"),
)
SELF_TUNED_SGD = replace(
    _TOGETHER,
    phases=(
        Phase(centre, writes=("mean", "variance"), over="inputs", sums=("total",)),
        Phase(level, writes=("level",), over="layers"),
        Phase(condition, writes=("scale",), over="inputs", sums=("power", "tilt")),
        Phase(force, over="units", sums=("force",)),
        Phase(leverage, writes=("energy", "factor"), over="layers", sums=("reach", "error")),
        Phase(aim, writes=("typical", "step"), over="network"),
        Phase(move_weight, writes=("w", "slow"), sums=("hold", "lead")),
        Phase(move_bias, writes=("w", "slow"), over="biases", sums=("hold_bias", "lead_bias")),
        *_TOGETHER.phases[-2:],
    ),
    kept={place: names for place, names in _TOGETHER.kept.items() if place != "units"},
    metric=None,
    several=_TOGETHER,
)


# --------------------------------------------------------------------- the optimizer
class SelfTunedSGD(LayerOptimizer):
    r"""Gradient descent that tunes its step size and its weight decays itself.

    Linear layers are written about the mean μ of their input, as in :class:`~upgd.CentredSGD`, and
    their inputs' variances v are made more equal. The step size moves the outputs by η times the
    error, and the first and the last layer decay by λ. A factor q of η and the decays λ follow the
    loss's derivative by them, estimated from a slow copy of the weights: weights that should shrink
    raise λ, weights that should go back lower q.

    .. math::
        s_i &= 1 / (1 - \omega + \omega v_i / \bar v), \quad
        Q = \sum_l \lVert\delta_l\rVert^2 \Bigl(\sum_i s_{li} (x_{li}-\mu_{li})^2 + c_l\Bigr)
            \,/\, \lVert\delta_L\rVert^2 \\
        \alpha &= \min(\eta q / \max(Q, \bar Q),\, 100) \\
        W_l &\leftarrow (1 - \lambda_l/100)\,W_l
            - \alpha\,\delta_l\,\bigl(s_l \odot (x_l-\mu_l)\bigr)^\top, \quad
        b_l \leftarrow (1 - \lambda_l/100)\,b_l
            - \alpha\,\delta_l\,\bigl(c_l - (s_l \odot (x_l-\mu_l))^\top\mu_l\bigr) \\
        \ln\lambda_l &\leftarrow \ln\lambda_l
            + \theta_\lambda \langle g_l, \bar w_l\rangle
            / \operatorname{rms}\langle g_l, \bar w_l\rangle, \quad
        \ln q \leftarrow \ln q - \theta_q \langle g, w - \bar w\rangle
            / \operatorname{rms}\langle g, w - \bar w\rangle

    with g the gradient, :math:`\bar w` the slow copy of the weights before the step, and
    :math:`\bar Q` the running mean of Q. The factor of biases is :math:`c_l = \max(1, \kappa E_l)`,
    E the running mean of :math:`\sum_i s_i (x_i-\mu_i)^2`. The last line has running means of decay
    0.999 and quotients within [-3, 3]; λ is within [1e-5, 1], and 0 between the first and the last
    layer; q is within [0.05, 20].

    Of several samples μ and v are updated by the samples' means and the step is the mean of theirs,
    by one α. Along the mean gradient :math:`\bar g`, a step of 1 changes the loss of sample n by
    :math:`\langle g_n, \bar g\rangle`, which is the change of its outputs times its error; in the
    inner product by which Q is :math:`\lVert g_n\rVert^2 / \lVert\delta_{L,n}\rVert^2`. The step
    that is best for the outputs of all N of them along their errors has

    .. math::
        Q = \max\Bigl(
            \frac1N \sum_n \frac{\langle g_n, \bar g\rangle^2}{\lVert\delta_{L,n}\rVert^2}
            \,/\, \lVert\bar g\rVert^2, \
            \frac1{N^2} \sum_n \frac{\lVert g_n\rVert^2}{\lVert\delta_{L,n}\rVert^2}\Bigr)

    so N equal samples are one, a batch whose gradients cancel takes at most N times the step of a
    sample, and a gradient that vanishes while errors do not has no larger steps. Parameters outside
    of linear layers enlarge Q in proportion to their part of :math:`\lVert\bar g\rVert^2`.

    Args:
        params: A model, or its parameters with ``layers=upgd.Layers(model)``.
        lr: η, how far a step moves the outputs, in units of the loss's derivative by them. It goes
            with the loss: 4 with cross-entropy; with the mean squared error 0.25, since a step
            that moves outputs by half the derivative meets the target.
        beta_mean: Decay of the running means.
        bias_share: See :class:`~upgd.CentredSGD`.
        whitening: How far variances are made equal: 0 for not at all.
        beta_slow: Decay of the slow copy and of the variances.
        pace: By how much ln λ changes in a step.
        pace_target: By how much ln q changes in a step.
        common: See :class:`~upgd.optim.layered.LayerOptimizer`.

    Example:
        >>> import upgd
        >>> from torch import nn, ones
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> opt = upgd.SelfTunedSGD(model, lr=0.25)
        >>> model(ones(4, 3)).square().mean().backward()
        >>> opt.step()
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 4.0,
        beta_mean: float = 0.99,
        bias_share: float = 0.03,
        whitening: float = 0.8,
        beta_slow: float = 0.9999,
        pace: float = 0.002,
        pace_target: float = 0.0001,
        **common: Any,
    ) -> None:
        hyper = {"lr": lr, "beta_mean": beta_mean, "bias_share": bias_share}
        hyper |= {"whitening": whitening, "beta_slow": beta_slow}
        hyper |= {"pace": pace, "pace_target": pace_target}
        super().__init__(params, SELF_TUNED_SGD, hyper, **common)
