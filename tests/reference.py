"""The update rules in plain NumPy float64: the ground truth of the optimizer tests.

This is a transcription of the equations, written without looking at the library. It is meant to
be ticked off line by line against them, so it is slow and repetitive on purpose.

Notation of the docstrings, and the names in the code:

    w         weight                              g     gradient
    h         Hessian-diagonal estimate           xi    noise, xi ~ N(0, sigma^2)
    f, s      first and second gate derivative    t     step count, from 1
    m         instantaneous utility               phi   the sigmoid
    U         utility trace                 (u)
    Uhat      bias-corrected utility trace  (u_hat)
    Ubar      scaled utility                (the code holds 1 - Ubar, as `gate`)
    alpha     step size (lr)                lambda   weight decay (wd)

A weight without utility has Ubar = 1/2 and takes the whole step alpha. The paper's equations, with
alpha', lambda' and sigma', have half of it: they are these with alpha = alpha'/2 and
lambda = 2*lambda', and in non-protecting methods with sigma = sigma'/2.
"""

import math
from typing import Any

import numpy as np

Array = np.ndarray
Hyper = dict[str, float | tuple[float, float] | bool]
Step = dict[str, list[Any]]

TINY = float(np.finfo(np.float64).tiny)
"""The smallest normal float: the guard of every divisor."""

SYNAPTIC_EPS = 1e-3
"""The 10^-3 in the denominators of S-SI and S-RWalk."""


def simulate(
    method: str,
    weights: list[Array],
    steps: list[Step],
    hyper: list[Hyper],
    into: list[int | None] | None = None,
    maximize: bool = False,
) -> list[list[Array]]:
    """Weights after each step: result[t][i] is parameter i after step t (0-based).

    `steps[t]` holds, per parameter, "g" (None: the parameter pauses), "noise" (standard normal;
    xi = sigma * noise) and "h" (second order, weight-wise), and, per feature layer, "f" and "s"
    (feature-wise). `into[i]` is the feature layer that parameter i leads into, None in the output
    layer (feature-wise). `maximize` negates every derivative before everything else.
    """
    from tests import reference_rivals  # which uses the helpers below

    weights = [np.array(w, dtype=np.float64) for w in weights]  # copies: the caller keeps theirs
    assert len(hyper) == len(weights)
    if maximize:
        steps = [negate_derivatives(step) for step in steps]

    if method in reference_rivals.METHODS:
        result = reference_rivals.METHODS[method](weights, steps, hyper)
    elif method in ("sgdw", "pgd", "shrink-and-perturb", "adamw"):
        result = simulate_baseline(method, weights, steps, hyper)
    elif method in ("s-ewc", "s-mas", "s-si", "s-rwalk"):
        result = simulate_synaptic(method, weights, steps, hyper)
    elif method in ("ada-upgd", "ada-upgd-2nd"):
        result = simulate_ada_upgd(weights, steps, hyper, second_order=method.endswith("-2nd"))
    else:
        feature_wise, protecting, second_order, local = parse_upgd_name(
            method.removesuffix("-momentum")
        )
        if feature_wise:
            assert into is not None, "feature-wise methods need `into`"
            result = simulate_feature_upgd(
                weights, steps, hyper, into, protecting, second_order, local
            )
        else:
            result = simulate_upgd(weights, steps, hyper, protecting, second_order, local)
    return [[w.copy() for w in after_step] for after_step in result]


def parse_upgd_name(method: str) -> tuple[bool, bool, bool, bool]:
    """[feature-][n-]upgd[-2nd][-local] -> (feature-wise, protecting, second order, local)."""
    rest = method
    feature_wise = rest.startswith("feature-")
    rest = rest.removeprefix("feature-")
    protecting = not rest.startswith("n-")
    rest = rest.removeprefix("n-")
    local = rest.endswith("-local")
    rest = rest.removesuffix("-local")
    second_order = rest.endswith("-2nd")
    rest = rest.removesuffix("-2nd")
    if rest != "upgd":
        raise ValueError(f"unknown method: {method!r}")
    return feature_wise, protecting, second_order, local


# --------------------------------------------------------------------------------------------------
# Small helpers
# --------------------------------------------------------------------------------------------------


def negate_derivatives(step: Step) -> Step:
    """`maximize`: g, h, f and s become derivatives of the negated objective; noise stays."""
    negated = dict(step)
    for name in ("g", "h", "f", "s"):
        if step.get(name) is not None:
            negated[name] = [None if x is None else -np.asarray(x, np.float64) for x in step[name]]
    return negated


def entry(step: Step, name: str, i: int, shape: tuple[int, ...]) -> Array:
    """Item i of steps[t][name] in float64, which must have exactly the given shape."""
    value = np.asarray(step[name][i], dtype=np.float64)
    assert value.shape == shape, f"{name}[{i}] has shape {value.shape}, expected {shape}"
    return value


def has_gradient(step: Step, i: int) -> bool:
    """Whether parameter i takes part in this step."""
    return step["g"][i] is not None


def number(hp: Hyper, name: str) -> float:
    """Return a scalar hyperparameter as a float."""
    value = hp[name]
    assert isinstance(value, (int, float))
    return float(value)


def weight_decay(hp: Hyper) -> float:
    """lambda, which is 0 where it is not given (UPGD is UPGD-W with lambda = 0)."""
    return number(hp, "weight_decay") if "weight_decay" in hp else 0.0


def adam_betas(hp: Hyper) -> tuple[float, float]:
    """(beta_1, beta_2)."""
    betas = hp["betas"]
    assert isinstance(betas, (tuple, list))
    beta1, beta2 = betas
    return float(beta1), float(beta2)


def sigmoid(x: Array) -> Array:
    """phi(x) = 1 / (1 + exp(-x)) = exp(x) / (1 + exp(x)).

    The first form is taken for x >= 0 and the second for x < 0: exp never overflows, and the tail
    at -infinity keeps its relative accuracy.
    """
    z = np.exp(-np.abs(x))
    value: Array = np.where(x >= 0, 1.0 / (1.0 + z), z / (1.0 + z))
    return value


def one_minus_sigmoid(x: Array) -> Array:
    """1 - phi(x) = phi(-x), without the cancellation of the left-hand side for large x."""
    return sigmoid(-x)


def update_trace(trace: Array, value: Array, beta: float) -> Array:
    """U <- beta*U + (1 - beta)*m."""
    return beta * trace + (1.0 - beta) * value


def bias_corrected(trace: Array, beta: float, t: int) -> Array:
    """Uhat = U / (1 - beta^t)."""
    return trace / (1.0 - beta**t)


def guarded_divide(u_hat: Array, divisor: float) -> Array:
    """Uhat / max(divisor, tiny); the quotient may overflow to an infinity."""
    with np.errstate(over="ignore"):
        return u_hat / max(divisor, TINY)


def norm(x: Array) -> float:
    """||x||, the Euclidean norm of all elements (hypot: the squares can not under- or overflow)."""
    return math.hypot(*x.ravel().tolist())


def global_gate(u_hat: Array, eta: float) -> Array:
    """1 - Ubar with Ubar = phi(Uhat / max(|eta|, tiny))."""
    return one_minus_sigmoid(guarded_divide(u_hat, abs(eta)))


def local_gate_of_weights(u_hat: Array) -> Array:
    """1 - Ubar with Ubar = phi(Uhat / max(||Uhat_row||, tiny)).

    One row is everything with the same index along axis 0; a 1-d array (a bias) is one row.
    """
    if u_hat.ndim == 1:
        return one_minus_sigmoid(guarded_divide(u_hat, norm(u_hat)))
    gate = np.empty_like(u_hat)
    for j in range(u_hat.shape[0]):
        gate[j] = one_minus_sigmoid(guarded_divide(u_hat[j], norm(u_hat[j])))
    return gate


def local_gate_of_features(u_hat: Array) -> Array:
    """1 - ubar with ubar = phi(uhat_l / max(||uhat_l||, tiny)), over the layer's vector."""
    return one_minus_sigmoid(guarded_divide(u_hat, norm(u_hat)))


# --------------------------------------------------------------------------------------------------
# Weight-wise UPGD
# --------------------------------------------------------------------------------------------------


def simulate_upgd(
    weights: list[Array],
    steps: list[Step],
    hyper: list[Hyper],
    protecting: bool,
    second_order: bool,
    local: bool,
) -> list[list[Array]]:
    """Weight-wise UPGD-W and non-protecting UPGD-W.

    first order         m = -g*w
    second order        m = 1/2*h*w^2 - g*w
    trace               U <- beta*U + (1 - beta)*m,  Uhat = U / (1 - beta^t)
    global scaling      Ubar = phi(Uhat / max(|eta|, tiny)),  eta = max Uhat over all weights
    local scaling       Ubar = phi(Uhat / max(||Uhat_row||, tiny))
    protecting          w <- (1 - alpha*lambda)*w - 2*alpha*(g + xi)*(1 - Ubar)
    non-protecting      w <- (1 - alpha*lambda)*w - alpha*(g + 2*xi*(1 - Ubar))
    momentum            V <- mu*V + g takes the place of g in the update, not in the utility
    """
    w = list(weights)
    u = [np.zeros_like(x) for x in w]
    v = [np.zeros_like(x) for x in w]
    t = [0 for _ in w]
    result = []
    for step in steps:
        active = [i for i in range(len(w)) if has_gradient(step, i)]

        # Utilities, their traces, and eta: all at the weights before this step's update.
        u_hat: dict[int, Array] = {}
        eta = -math.inf
        for i in active:
            beta = number(hyper[i], "beta_utility")
            g = entry(step, "g", i, w[i].shape)
            if second_order:
                h = entry(step, "h", i, w[i].shape)
                m = 0.5 * h * w[i] ** 2 - g * w[i]
            else:
                m = -g * w[i]
            t[i] += 1
            u[i] = update_trace(u[i], m, beta)
            u_hat[i] = bias_corrected(u[i], beta, t[i])
            eta = max(eta, float(u_hat[i].max()))

        # The update.
        for i in active:
            alpha = number(hyper[i], "lr")
            lam = weight_decay(hyper[i])
            g = entry(step, "g", i, w[i].shape)
            if "momentum" in hyper[i]:
                v[i] = number(hyper[i], "momentum") * v[i] + g
                g = v[i]
            xi = number(hyper[i], "sigma") * entry(step, "noise", i, w[i].shape)
            gate = local_gate_of_weights(u_hat[i]) if local else global_gate(u_hat[i], eta)
            if hyper[i].get("protect", protecting):
                w[i] = (1.0 - alpha * lam) * w[i] - 2.0 * alpha * (g + xi) * gate
            else:
                w[i] = (1.0 - alpha * lam) * w[i] - alpha * (g + 2.0 * xi * gate)
        result.append(list(w))
    return result


# --------------------------------------------------------------------------------------------------
# Feature-wise UPGD
# --------------------------------------------------------------------------------------------------


def simulate_feature_upgd(
    weights: list[Array],
    steps: list[Step],
    hyper: list[Hyper],
    into: list[int | None],
    protecting: bool,
    second_order: bool,
    local: bool,
) -> list[list[Array]]:
    """Feature-wise UPGD-W and non-protecting UPGD-W.

    first order         m = -f
    second order        m = 1/2*s - f
    trace               u <- beta*u + (1 - beta)*m,  uhat = u / (1 - beta^t)
    global scaling      ubar = phi(uhat / max(|eta|, tiny)),  eta = max uhat over all layers
    local scaling       ubar = phi(uhat_l / max(||uhat_l||, tiny))
    protecting          w <- (1 - alpha*lambda)*w - 2*alpha*(g + xi)*(1 - ubar_j)
    non-protecting      w <- (1 - alpha*lambda)*w - alpha*(g + 2*xi*(1 - ubar_j))
    output layer        w <- (1 - alpha*lambda)*w - alpha*gamma*g,  gamma = 1 if non-protecting

    where w is any weight or bias into feature j: index j along axis 0.
    """
    w = list(weights)
    assert len(into) == len(w)

    # The parameters into each layer, in order; the first one gives the trace's beta.
    members: dict[int, list[int]] = {}
    for i, layer in enumerate(into):
        if layer is not None:
            members.setdefault(layer, []).append(i)
    u = {layer: np.zeros(w[params[0]].shape[0]) for layer, params in members.items()}
    t = dict.fromkeys(members, 0)

    result = []
    for step in steps:
        # A layer is active when at least one parameter into it has a gradient.
        active_layers = [
            layer for layer, params in members.items() if any(has_gradient(step, i) for i in params)
        ]

        # Utilities, their traces, and eta.
        u_hat: dict[int, Array] = {}
        eta = -math.inf
        for layer in active_layers:
            beta = number(hyper[members[layer][0]], "beta_utility")
            f = entry(step, "f", layer, u[layer].shape)
            if second_order:
                s = entry(step, "s", layer, u[layer].shape)
                m = 0.5 * s - f
            else:
                m = -f
            t[layer] += 1
            u[layer] = update_trace(u[layer], m, beta)
            u_hat[layer] = bias_corrected(u[layer], beta, t[layer])
            eta = max(eta, float(u_hat[layer].max()))

        # The update.
        for i in range(len(w)):
            if not has_gradient(step, i):
                continue
            alpha = number(hyper[i], "lr")
            lam = weight_decay(hyper[i])
            g = entry(step, "g", i, w[i].shape)
            layer_of_i = into[i]
            if layer_of_i is None:  # the output layer
                protects = hyper[i].get("protect", protecting)
                gamma = number(hyper[i], "output_gate") if protects else 1.0
                w[i] = (1.0 - alpha * lam) * w[i] - alpha * gamma * g
                continue
            xi = number(hyper[i], "sigma") * entry(step, "noise", i, w[i].shape)
            if local:
                gate_of_features = local_gate_of_features(u_hat[layer_of_i])
            else:
                gate_of_features = global_gate(u_hat[layer_of_i], eta)
            assert gate_of_features.shape == (w[i].shape[0],)
            gate = np.empty_like(w[i])
            for j in range(w[i].shape[0]):
                gate[j] = gate_of_features[j]
            if hyper[i].get("protect", protecting):
                w[i] = (1.0 - alpha * lam) * w[i] - 2.0 * alpha * (g + xi) * gate
            else:
                w[i] = (1.0 - alpha * lam) * w[i] - alpha * (g + 2.0 * xi * gate)
        result.append(list(w))
    return result


# --------------------------------------------------------------------------------------------------
# AdaUPGD
# --------------------------------------------------------------------------------------------------


def simulate_ada_upgd(
    weights: list[Array],
    steps: list[Step],
    hyper: list[Hyper],
    second_order: bool,
) -> list[list[Array]]:
    """AdaUPGD (global scaling; the utility takes the raw gradient).

    utility     R = -g*w,  or  R = 1/2*h*w^2 - g*w  (second order)
    traces      U <- beta_u*U + (1 - beta_u)*R,   Uhat = U / (1 - beta_u^t)
                M <- beta_1*M + (1 - beta_1)*g,   Mhat = M / (1 - beta_1^t)
                V <- beta_2*V + (1 - beta_2)*g^2, Vhat = V / (1 - beta_2^t)
    scaling     Ubar = phi(Uhat / max(|eta|, tiny)),  eta = max Uhat over all weights
    update      w <- (1 - alpha*lambda)*w - 2*alpha*(Mhat/(sqrt(Vhat) + eps) + xi)*(1 - Ubar)

    With "protect" False, by analogy with non-protecting UPGD:

                w <- (1 - alpha*lambda)*w - alpha*(Mhat/(sqrt(Vhat) + eps) + 2*xi*(1 - Ubar))
    """
    w = list(weights)
    u = [np.zeros_like(x) for x in w]
    m = [np.zeros_like(x) for x in w]
    v = [np.zeros_like(x) for x in w]
    t = [0 for _ in w]
    result = []
    for step in steps:
        active = [i for i in range(len(w)) if has_gradient(step, i)]

        # Traces and eta: all at the weights before this step's update.
        u_hat: dict[int, Array] = {}
        m_hat: dict[int, Array] = {}
        v_hat: dict[int, Array] = {}
        eta = -math.inf
        for i in active:
            beta_u = number(hyper[i], "beta_utility")
            beta_1, beta_2 = adam_betas(hyper[i])
            g = entry(step, "g", i, w[i].shape)
            if second_order:
                h = entry(step, "h", i, w[i].shape)
                r = 0.5 * h * w[i] ** 2 - g * w[i]
            else:
                r = -g * w[i]
            t[i] += 1
            u[i] = update_trace(u[i], r, beta_u)
            m[i] = update_trace(m[i], g, beta_1)
            v[i] = update_trace(v[i], g**2, beta_2)
            u_hat[i] = bias_corrected(u[i], beta_u, t[i])
            m_hat[i] = bias_corrected(m[i], beta_1, t[i])
            v_hat[i] = bias_corrected(v[i], beta_2, t[i])
            eta = max(eta, float(u_hat[i].max()))

        # The update.
        for i in active:
            alpha = number(hyper[i], "lr")
            lam = weight_decay(hyper[i])
            eps = number(hyper[i], "eps")
            xi = number(hyper[i], "sigma") * entry(step, "noise", i, w[i].shape)
            direction = m_hat[i] / (np.sqrt(v_hat[i]) + eps)
            gate = global_gate(u_hat[i], eta)
            if hyper[i].get("protect", True):
                w[i] = (1.0 - alpha * lam) * w[i] - 2.0 * alpha * (direction + xi) * gate
            else:
                w[i] = (1.0 - alpha * lam) * w[i] - alpha * (direction + 2.0 * xi * gate)
        result.append(list(w))
    return result


# --------------------------------------------------------------------------------------------------
# SGDW, PGD, Shrink and Perturb, AdamW
# --------------------------------------------------------------------------------------------------


def simulate_baseline(
    method: str,
    weights: list[Array],
    steps: list[Step],
    hyper: list[Hyper],
) -> list[list[Array]]:
    """SGDW, PGD, S&P and AdamW.

    SGDW    w <- (1 - alpha*lambda)*w - alpha*g
    PGD     w <- w - alpha*(g + xi)
    S&P     w <- (1 - alpha*lambda)*w - alpha*(g + xi)
    AdamW   M <- beta_1*M + (1 - beta_1)*g,   Mhat = M / (1 - beta_1^t)
            V <- beta_2*V + (1 - beta_2)*g^2, Vhat = V / (1 - beta_2^t)
            w <- (1 - alpha*lambda)*w - alpha*Mhat/(sqrt(Vhat) + eps)
    """
    w = list(weights)
    m = [np.zeros_like(x) for x in w]
    v = [np.zeros_like(x) for x in w]
    t = [0 for _ in w]
    result = []
    for step in steps:
        for i in range(len(w)):
            if not has_gradient(step, i):
                continue
            t[i] += 1
            alpha = number(hyper[i], "lr")
            lam = weight_decay(hyper[i])
            g = entry(step, "g", i, w[i].shape)
            if method == "sgdw":
                w[i] = (1.0 - alpha * lam) * w[i] - alpha * g
            elif method == "pgd":
                xi = number(hyper[i], "sigma") * entry(step, "noise", i, w[i].shape)
                w[i] = w[i] - alpha * (g + xi)
            elif method == "shrink-and-perturb":
                xi = number(hyper[i], "sigma") * entry(step, "noise", i, w[i].shape)
                w[i] = (1.0 - alpha * lam) * w[i] - alpha * (g + xi)
            elif method == "adamw":
                beta_1, beta_2 = adam_betas(hyper[i])
                eps = number(hyper[i], "eps")
                m[i] = update_trace(m[i], g, beta_1)
                v[i] = update_trace(v[i], g**2, beta_2)
                m_hat = bias_corrected(m[i], beta_1, t[i])
                v_hat = bias_corrected(v[i], beta_2, t[i])
                w[i] = (1.0 - alpha * lam) * w[i] - alpha * m_hat / (np.sqrt(v_hat) + eps)
            else:
                raise ValueError(f"unknown method: {method!r}")
        result.append(list(w))
    return result


# --------------------------------------------------------------------------------------------------
# S-EWC, S-MAS, S-SI, S-RWalk
# --------------------------------------------------------------------------------------------------


def simulate_synaptic(
    method: str,
    weights: list[Array],
    steps: list[Step],
    hyper: list[Hyper],
) -> list[list[Array]]:
    """S-EWC, S-MAS, S-SI and S-RWalk.

    update      w <- w - alpha*[g + kappa*Omega*(w - wbar)]

    wbar        the bias-corrected trace of w, with decay beta_w
    Delta       w^- - w, with w^- the weights before the parameter's previous update; 0 at t = 1
    omega       g*Delta

    Traces take this step's g and the weights before this step's update, and are then used. Those
    marked ~ have decay beta_I and are bias-corrected.

    S-EWC       Omega = F~, the trace of g^2
    S-MAS       Omega = the trace of |g|
    S-SI        Omega = omega~ / ((Delta~)^2 + 10^-3)
    S-RWalk     Omega = s~ + F~,  F~ the trace of g^2,
                s = omega~ / (1/2*F~*Delta^2 + 10^-3),
                s~ <- 1/2*s~ + 1/2*s from zero, uncorrected, not clamped
    """
    w = list(weights)
    w_before_previous_update = list(weights)  # equal to w until the first update: Delta = 0
    w_trace = [np.zeros_like(x) for x in w]
    square_trace = [np.zeros_like(x) for x in w]
    absolute_trace = [np.zeros_like(x) for x in w]
    omega_trace = [np.zeros_like(x) for x in w]
    delta_trace = [np.zeros_like(x) for x in w]
    score_trace = [np.zeros_like(x) for x in w]
    t = [0 for _ in w]
    result = []
    for step in steps:
        for i in range(len(w)):
            if not has_gradient(step, i):
                continue
            t[i] += 1
            alpha = number(hyper[i], "lr")
            kappa = number(hyper[i], "kappa")
            beta_i = number(hyper[i], "beta_importance")
            beta_w = number(hyper[i], "beta_weight")
            g = entry(step, "g", i, w[i].shape)

            w_trace[i] = update_trace(w_trace[i], w[i], beta_w)
            w_bar = bias_corrected(w_trace[i], beta_w, t[i])

            if method == "s-ewc":
                square_trace[i] = update_trace(square_trace[i], g**2, beta_i)
                importance = bias_corrected(square_trace[i], beta_i, t[i])
            elif method == "s-mas":
                absolute_trace[i] = update_trace(absolute_trace[i], np.abs(g), beta_i)
                importance = bias_corrected(absolute_trace[i], beta_i, t[i])
            elif method == "s-si":
                delta = w_before_previous_update[i] - w[i]
                omega_trace[i] = update_trace(omega_trace[i], g * delta, beta_i)
                delta_trace[i] = update_trace(delta_trace[i], delta, beta_i)
                omega_hat = bias_corrected(omega_trace[i], beta_i, t[i])
                delta_hat = bias_corrected(delta_trace[i], beta_i, t[i])
                importance = omega_hat / (delta_hat**2 + SYNAPTIC_EPS)
            elif method == "s-rwalk":
                delta = w_before_previous_update[i] - w[i]
                omega_trace[i] = update_trace(omega_trace[i], g * delta, beta_i)
                square_trace[i] = update_trace(square_trace[i], g**2, beta_i)
                omega_hat = bias_corrected(omega_trace[i], beta_i, t[i])
                fisher_hat = bias_corrected(square_trace[i], beta_i, t[i])
                score = omega_hat / (0.5 * fisher_hat * delta**2 + SYNAPTIC_EPS)
                score_trace[i] = 0.5 * score_trace[i] + 0.5 * score
                importance = score_trace[i] + fisher_hat
            else:
                raise ValueError(f"unknown method: {method!r}")

            w_before_previous_update[i] = w[i]  # for the next update: it will be the previous one
            w[i] = w[i] - alpha * (g + kappa * importance * (w[i] - w_bar))
        result.append(list(w))
    return result
