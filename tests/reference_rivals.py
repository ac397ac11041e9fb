"""The rules of other papers in plain NumPy float64, as :mod:`tests.reference` has the paper's.

Each function takes weights, steps and hyperparameters as `simulate` does, and returns the weights
after each step. A parameter whose gradient is None pauses: its states and its clock stand still.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from tests.reference import (
    Array,
    Hyper,
    Step,
    adam_betas,
    bias_corrected,
    entry,
    guarded_divide,
    has_gradient,
    number,
    update_trace,
)


def l2_init(weights: list[Array], steps: list[Step], hyper: list[Hyper]) -> list[list[Array]]:
    """loss + lambda/2*||w - w0||^2, so w <- w - alpha*g - alpha*lambda*w + alpha*lambda*w0."""
    w = list(weights)
    result = []
    for step in steps:
        for i in range(len(w)):
            if has_gradient(step, i):
                alpha, lam = number(hyper[i], "lr"), number(hyper[i], "weight_decay")
                g = entry(step, "g", i, w[i].shape)
                w[i] = w[i] - alpha * g - alpha * lam * w[i] + alpha * lam * weights[i]
        result.append(list(w))
    return result


def hare_tortoise(weights: list[Array], steps: list[Step], hyper: list[Hyper]) -> list[list[Array]]:
    """SGD with decay; slow <- beta*slow + (1 - beta)*fast; after every k-th step fast <- slow."""
    w = list(weights)
    slow = list(weights)
    t = [0 for _ in w]
    result = []
    for step in steps:
        for i in range(len(w)):
            if has_gradient(step, i):
                alpha, lam = number(hyper[i], "lr"), number(hyper[i], "weight_decay")
                beta = number(hyper[i], "beta_weight")
                t[i] += 1
                w[i] = w[i] - alpha * lam * w[i] - alpha * entry(step, "g", i, w[i].shape)
                slow[i] = update_trace(slow[i], w[i], beta)
                if t[i] % int(number(hyper[i], "period")) == 0:
                    w[i] = slow[i]
        result.append(list(w))
    return result


def first_bounds(weights: list[Array], hyper: list[Hyper]) -> list[float]:
    """1/sqrt(fan-in); a bias has that of the weight before it in its group, or 1.

    Parameters of one group have one dictionary of hyperparameters.
    """
    result = []
    for i, w in enumerate(weights):
        group = [j for j in range(i + 1) if hyper[j] is hyper[i]]
        owner = w if w.ndim > 1 else weights[group[-2]] if len(group) > 1 else w
        result.append(1 / math.sqrt(owner[0].size) if owner.ndim > 1 else 1.0)
    return result


def clipped(
    weights: list[Array], steps: list[Step], hyper: list[Hyper], adam: bool
) -> list[list[Array]]:
    """A step of SGD or Adam, then each weight to the nearest number in [-c*b, c*b]."""
    w = list(weights)
    m = [np.zeros_like(x) for x in w]
    v = [np.zeros_like(x) for x in w]
    t = [0 for _ in w]
    bound = first_bounds(weights, hyper)
    result = []
    for step in steps:
        for i in range(len(w)):
            if not has_gradient(step, i):
                continue
            change = entry(step, "g", i, w[i].shape)
            if adam:
                beta_1, beta_2 = adam_betas(hyper[i])
                t[i] += 1
                m[i] = update_trace(m[i], change, beta_1)
                v[i] = update_trace(v[i], change**2, beta_2)
                root = np.sqrt(bias_corrected(v[i], beta_2, t[i]))
                change = bias_corrected(m[i], beta_1, t[i]) / (root + number(hyper[i], "eps"))
            most = number(hyper[i], "clip") * bound[i]
            moved = w[i] - number(hyper[i], "lr") * change
            w[i] = np.where(np.abs(moved) > most, most * np.sign(moved), moved)
        result.append(list(w))
    return result


def fade(
    weights: list[Array], steps: list[Step], hyper: list[Hyper], second_order: bool
) -> list[list[Array]]:
    """FADE with decay rho = exp(gamma), and x^2 (h, or g^2) as in the derivation for SGD.

    gamma starts at ln(alpha*lambda) and is kept between that - 15 and min(that + 30, 0);
    without decay the rule is SGD.

    gamma <- gamma - theta*g*H
    H     <- H*max(0, min(1, 1 - rho - alpha*h)) - rho*w
    w     <- w - rho*w - alpha*g
    """
    w = list(weights)
    gamma: list[Array | None] = [None for _ in w]
    trace = [np.zeros_like(x) for x in w]
    result = []
    for step in steps:
        for i in range(len(w)):
            if not has_gradient(step, i):
                continue
            alpha, lam = number(hyper[i], "lr"), number(hyper[i], "weight_decay")
            g = entry(step, "g", i, w[i].shape)
            h = entry(step, "h", i, w[i].shape) if second_order else g**2
            if alpha * lam == 0:
                w[i] = w[i] - alpha * g
                continue
            start = math.log(alpha * lam)
            here = gamma[i] if gamma[i] is not None else np.full_like(w[i], start)
            here = here - number(hyper[i], "meta_lr") * g * trace[i]
            here = np.clip(here, start - 15, min(start + 30, 0.0))
            rho = np.exp(here)
            gamma[i] = here
            kept = np.clip(1 - rho - alpha * h, 0, 1)
            trace[i] = kept * trace[i] - rho * w[i]
            w[i] = w[i] - rho * w[i] - alpha * g
        result.append(list(w))
    return result


def gated_upgd(weights: list[Array], steps: list[Step], hyper: list[Hyper]) -> list[list[Array]]:
    """UPGD with factor 1 - p*tanh(k*max(Uhat, 0)/(2 eta)) - r*tanh(k*min(Uhat, 0)/(2 eta))."""
    w = list(weights)
    u = [np.zeros_like(x) for x in w]
    t = [0 for _ in w]
    result = []
    for step in steps:
        active = [i for i in range(len(w)) if has_gradient(step, i)]
        u_hat: dict[int, Array] = {}
        for i in active:
            beta = number(hyper[i], "beta_utility")
            t[i] += 1
            u[i] = update_trace(u[i], -entry(step, "g", i, w[i].shape) * w[i], beta)
            u_hat[i] = bias_corrected(u[i], beta, t[i])
        eta = max((float(x.max()) for x in u_hat.values()), default=-math.inf)
        for i in active:
            alpha, lam = number(hyper[i], "lr"), number(hyper[i], "weight_decay")
            scaled = number(hyper[i], "sharpness") * guarded_divide(u_hat[i], abs(eta)) / 2
            slower = number(hyper[i], "protecting") * np.tanh(np.maximum(scaled, 0))
            faster = number(hyper[i], "undoing") * np.tanh(np.maximum(-scaled, 0))
            xi = number(hyper[i], "sigma") * entry(step, "noise", i, w[i].shape)
            change = (entry(step, "g", i, w[i].shape) + xi) * (1 - slower + faster)
            w[i] = (1 - alpha * lam) * w[i] - alpha * change
        result.append(list(w))
    return result


Simulation = Callable[[list[Array], list[Step], list[Hyper]], list[list[Array]]]
METHODS: dict[str, Simulation] = {
    "l2-init": l2_init,
    "hare-tortoise": hare_tortoise,
    "weight-clipping": partial(clipped, adam=False),
    "weight-clipping-adam": partial(clipped, adam=True),
    "fade": partial(fade, second_order=True),
    "fade-1st": partial(fade, second_order=False),
    "gated-upgd": gated_upgd,
}
