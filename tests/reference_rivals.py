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
    "fade": partial(fade, second_order=True),
    "fade-1st": partial(fade, second_order=False),
    "gated-upgd": gated_upgd,
}
