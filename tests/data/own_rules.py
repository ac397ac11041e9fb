"""Rules as users write them, in a file of their own."""

from upgd.optim.custom import rule_row
from upgd.rules.ops import absolute, clip, exp, log, maximum, minimum, sigmoid, sign, sqrt


def l2_start(w, g, start, lr, kappa):
    """Regularise towards the initial weights."""
    return w - lr * (g + kappa * (w - start))


def clipped(w, g, lr, bound):
    """Gradient descent within a box."""
    return clip(w - lr * g, -bound, bound)


def worth_trace(w, g, worth, memory):
    """UPGD's utility under other names."""
    return memory * worth + (1 - memory) * (-g * w)


def guarded(w, g, worth, noise, eta, lr, shrink, sigma):
    """UPGD's update under other names."""
    return (1 - lr * shrink) * w - 2 * lr * ((g + sigma * noise) * sigmoid(worth / -eta))


def jitter(w, g, noise, lr, spread):
    """Noise without a hyperparameter called sigma."""
    return w - lr * (g + spread * noise)


def strength_trace(w, g, strength, memory, floor):
    """Not a utility: nothing is known about where it will lie."""
    return memory * strength + (1 - memory) * maximum(absolute(g) * absolute(w), floor)


def sharp(w, g, strength, noise, eta, lr, sigma, slope):
    """A gate far from one half."""
    return w - lr * (g + sigma * noise) * (1 - sigmoid(slope * strength / eta))


def everything(w, g, speed, energy, last, c_speed, c_energy, lr, drag, rest, low, high, gain):
    """Every function, two bias corrections, and a state that takes another's old value."""
    new_speed = drag * speed + (1 - drag) * g
    new_energy = rest * energy + (1 - rest) * g**2
    size = sqrt(new_energy / c_energy) + gain
    step = sign(new_speed) * minimum(absolute(new_speed / c_speed / size), 1.0)
    pull = 0.1 * (exp(minimum(w, high)) - log(1.7 + maximum(last, low) ** 2)) + 0.3 * maximum(g, w)
    return w - lr * (clip(step, low, high) + pull), new_speed, new_energy, speed


ROWS = [
    rule_row("l2-start", l2_start, states={"start": "weight"}, lr=0.01, kappa=0.01),
    rule_row("clipped", clipped, lr=0.05, bound=0.2),
    *(
        rule_row(
            f"guarded-{reduce.replace('_', '-')}",
            (worth_trace, guarded),
            states=("worth",),
            decays={"worth": "memory"},
            reduce=reduce,
            lr=0.05,
            shrink=0.01,
            sigma=0.1,
            memory=0.9,
        )
        for reduce in ("max", "row_norm")
    ),
    rule_row("jitter", jitter, lr=0.05, spread=0.3),
    *(
        rule_row(
            f"sharp-{reduce.replace('_', '-')}",
            (strength_trace, sharp),
            states=["strength"],
            reduce=reduce,
            slope=4.0,
            memory=0.9,
            floor=0.001,
            lr=0.05,
            sigma=0.1,
        )
        for reduce in ("max", "row_norm")
    ),
    rule_row(
        "everything",
        everything,
        states={"speed": "zero", "energy": 0, "last": "weight"},
        decays={"speed": "drag", "energy": "rest"},
        lr=0.02,
        gain=0.01,
        drag=0.8,
        rest=0.9,
        low=-0.25,
        high=0.75,
    ),
]
