"""SelfTunedSGD without each of its parts, and with other constants: what matters, and how much.

    upgd arena --use benchmarks/self_tuned.py --baseline self-tuned-sgd --scale quick --alone \
        --device cuda --results docs/results/arena/self-tuned

Every variant enters the arena with one set. Parts that a hyperparameter turns off are other values
of it; for others one function of the rule is replaced by one below. docs/arena.md says what names
mean.
"""

from upgd import lab
from upgd.arena import grids
from upgd.lab import clip, exp, maximum, minimum, sign
from upgd.optim.centred import spread
from upgd.optim.registry import METHODS
from upgd.optim.self_tuned import SELF_TUNED_SGD, root_mean_square

NAME = "self-tuned-sgd"


# ------------------------------------------------------------------ parts without their function
def uncentred(x, mean, variance, t, beta_mean, beta_slow):
    """μ stays 0, and v is the mean of x²."""
    variance = variance + maximum(1 - beta_slow, 1 / t) * (x**2 - variance)
    return mean, variance, variance


def mean_demand(reach, error, typical, gain, lr, beta_mean, t):
    """α = η·q / Q̄"""
    typical = spread(reach / maximum(error, 1e-30), typical, beta_mean, t)
    return typical, minimum(lr * gain / maximum(typical, 1e-30), 100.0)


def own_demand(reach, error, typical, gain, lr, beta_mean, t):
    """α = η·q / Q"""
    demand = reach / maximum(error, 1e-30)
    typical = spread(demand, typical, beta_mean, t)
    return typical, minimum(lr * gain / maximum(demand, 1e-30), 100.0)


def no_demand(reach, error, typical, gain, lr, beta_mean, t):
    """α = η·q"""
    typical = spread(reach / maximum(error, 1e-30), typical, beta_mean, t)
    return typical, lr * gain


# fmt: off
def decay_where(
    decay, hold_size, hold, hold_bias, lead, lead_bias, head, first, pace, of_first, of_head,
    of_hidden,
):
    """Layers decay by these shares of λ."""
    hold = hold + hold_bias
    hold_size = root_mean_square(hold_size, hold)
    decay = clip(decay * exp(pace * clip(hold / hold_size, -3.0, 3.0)), 1e-5, 1.0)
    share = of_head * head + of_first * first + of_hidden * (1 - head - first)
    return decay, hold_size, 0.01 * decay * share, lead + lead_bias


def decay_by_sign(
    decay, hold_size, hold, hold_bias, lead, lead_bias, head, first, pace
):
    """ln λ += θ·sign⟨g, w̄⟩"""
    hold = hold + hold_bias
    decay = clip(decay * exp(pace * sign(hold)), 1e-5, 1.0)
    return decay, hold_size, 0.01 * decay * maximum(head, first), lead + lead_bias
# fmt: on


def gain_by_sign(gain, lead_size, leads, pace_target):
    """ln q -= θ·sign⟨g, w - w̄⟩"""
    return clip(gain * exp(-pace_target * sign(leads)), 0.05, 20.0), lead_size


# ------------------------------------------------------------------------------------ the rules
def register(name, replaced=None, **changed):
    """The rule with other functions in place of those of these names, as a method of one set."""
    phases = [
        lab.Phase((replaced or {}).get(p.fn.__name__, p.fn), p.writes, over=p.over, sums=p.sums)
        for p in SELF_TUNED_SGD.phases
    ]
    lab.layered_method(
        name,
        phases,
        states=dict.fromkeys(SELF_TUNED_SGD.states, "weight"),
        kept=SELF_TUNED_SGD.kept,
        starts=SELF_TUNED_SGD.starts,
        power=SELF_TUNED_SGD.power,
        **{**METHODS[NAME].defaults, **changed},
    )
    grids.register(name, [{}])


WHERE = {"of_first": 1.0, "of_head": 1.0, "of_hidden": 0.0}
REPLACED = {
    "no-centring": ({"centre": uncentred}, {}),
    "step-by-mean-only": ({"aim": mean_demand}, {}),
    "step-by-sample-only": ({"aim": own_demand}, {}),
    "step-of-fixed-size": ({"aim": no_demand}, {"lr": 0.01}),
    "no-decay": ({"tune_decay": decay_where}, {**WHERE, "of_first": 0.0, "of_head": 0.0}),
    "no-decay-in-first": ({"tune_decay": decay_where}, {**WHERE, "of_first": 0.0}),
    "no-decay-in-head": ({"tune_decay": decay_where}, {**WHERE, "of_head": 0.0}),
    "decay-in-hidden": ({"tune_decay": decay_where}, {**WHERE, "of_hidden": 1.0}),
    "decay-by-sign": ({"tune_decay": decay_by_sign}, {}),
    "target-by-sign": ({"tune_gain": gain_by_sign}, {}),
}
"""By name: which functions are replaced, and hyperparameters that are new or others."""

OFF = {
    "no-whitening": {"whitening": 0.0},
    "decay-fixed": {"pace": 0.0},
    "target-fixed": {"pace_target": 0.0},
    "no-bias-factor": {"bias_share": 0.0},
    "short-memory": {"beta_slow": 0.999},
}
"""Parts that a hyperparameter turns off. `short-memory` is of the slow copy and of variances."""

OTHERS = {
    "lr": (1.3, 12.0),
    "beta_mean": (0.97, 0.997),
    "bias_share": (0.01, 0.09),
    "whitening": (0.5, 0.95),
    "beta_slow": (0.9997, 0.99997),
    "pace": (0.0007, 0.006),
    "pace_target": (3e-5, 3e-4),
}
"""A third of each constant and three times as much; of decays, of 1 - β."""

grids.register(NAME, [{}])
for name, hyper in OFF.items():
    grids.register(name, [hyper], method=NAME)
for name, (functions, hyper) in REPLACED.items():
    register(name, functions, **hyper)
for constant, values in OTHERS.items():
    for value in values:
        grids.register(f"{constant}={value:g}", [{constant: value}], method=NAME)
