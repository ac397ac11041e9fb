"""The paper's theorems as statements, and measurements of what they leave open.

    python -m upgd.paper.theorems

Tests show where the theorems hold exactly (tests/test_theorems.py, tests/test_convergence.py):
conservation is that of first-order utility where σ'(a)·a = σ(a), while the paper has utility as a
whole and any activation that passes through the origin; convergence is that of full gradients.
This prints how far the rest is off: the second-order part of the conservation of utility, and
UPGD with gradients and utilities of the same sample, for which the proof of convergence assumes
an independence that is not there.
"""

from __future__ import annotations

import math
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from upgd.kept import keep
from upgd.metrics import Interval, mean_interval, standard_error
from upgd.optim import UPGD
from upgd.optim.registry import METHODS
from upgd.paper.evidence import Array, below
from upgd.paper.sets import from_paper
from upgd.paper.verdicts import NO, PLAIN, TOLD, YES, Finding, Verdict
from upgd.utility import propagated_utility, weight_utility

SMALLEST_GATE = 1 / (1 + math.e)  # 1 - φ(1)


def distances(activation: type[nn.Module], width: int, networks: int) -> Array:
    """Relative distance between what enters and what leaves features, [layer, order].

    For the first- and second-order part, in hidden layers of random 8-w-w-4 networks with PyTorch's
    initial weights, one normal input and cross-entropy; not a number where nothing flows.
    """
    found = []
    for seed in range(networks):
        torch.manual_seed(seed)
        model = nn.Sequential(
            *(nn.Linear(8, width), activation(), nn.Linear(width, width), activation()),
            nn.Linear(width, 4),
        ).double()
        x = torch.randn(1, 8, dtype=torch.float64)
        layers = propagated_utility(model, x, _cross_entropy)
        for lower, upper in pairwise(layers):
            first = _distance(lower.first.sum(1) + lower.first_bias, upper.first.sum(0))
            second = _distance(lower.second.sum(1) + lower.second_bias, upper.second.sum(0))
            found.append([first, second])
    return np.array(found)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return _cross_entropy(model(x))


def _cross_entropy(output: Tensor) -> Tensor:
    return F.cross_entropy(output, torch.tensor([1]))


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def _optimizer(method: str, theta: Tensor, seed: int, **values: float) -> UPGD:
    """A method with values in the paper's form, which the theorems are about."""
    arguments: dict[str, Any] = {**METHODS[method].options, **from_paper(method, values)}
    return UPGD([theta], seed=seed, **arguments)


def sampled_upgd(alpha: float, beta: float, steps: int, replicas: int = 8) -> tuple[Array, float]:
    """UPGD on samples ½(θ - c)², c = 0 or 2, from the minimum θ = 1: does the bound hold?

    Returns the averaged squared gradient norm of the expected loss by replica, and the theorem's
    bound.
    """
    trace, update = (phase.fn for phase in METHODS["upgd"].method.phases)
    lr = from_paper("upgd", {"lr": alpha})["lr"]
    draws = [np.random.default_rng([replica, 0xC0]) for replica in range(replicas)]
    targets = torch.tensor(np.stack([2.0 * draw.integers(0, 2, steps) for draw in draws], 1))
    theta = torch.ones(replicas, dtype=torch.float64)
    utility = total = torch.zeros_like(theta)
    for target in targets:
        gradient = theta - target
        total = total + (theta - 1) ** 2
        utility = trace(theta, gradient, utility, beta)
        eta = utility.abs()  # the only weight's is the largest
        theta = update(theta, gradient, utility, 0.0, eta, lr, 0.0, 0.0)
    # L = 1, σ_g² = 1, f(θ₁) = f*: only the second term is left.
    bound = alpha**2 / (2 * alpha * SMALLEST_GATE - alpha**2)
    return (total / steps).numpy(), bound


def propagation(networks: int = 30) -> float:
    """The largest relative distance between propagated and HesScale utilities, biases included.

    Over random 5-6-4-3 networks with ReLU, LeakyReLU and Tanh, one normal input each.
    """
    largest = 0.0
    activations: list[Any] = [nn.ReLU, nn.LeakyReLU, nn.Tanh]
    for seed in range(networks):
        torch.manual_seed(seed)
        activation = activations[seed % len(activations)]
        model = nn.Sequential(
            *(nn.Linear(5, 6), activation(), nn.Linear(6, 4), activation(), nn.Linear(4, 3))
        ).double()
        x = torch.randn(1, 5, dtype=torch.float64)
        known = weight_utility(model, partial(_loss, model, x), "second")
        found = propagated_utility(model, x, _cross_entropy)
        for number, layer in zip((0, 2, 4), found, strict=True):
            biases = layer.first_bias + layer.second_bias
            pairs = ((layer.total, f"{number}.weight"), (biases, f"{number}.bias"))
            largest = max(largest, *(_distance(a, known[name]) for a, name in pairs))
    return largest


def bounded(protect: bool, steps: int = 200, replicas: int = 5) -> Array:
    """The averaged squared gradient of UPGD, or of N-UPGD, on a quadratic, as a share of its bound.

    ½Σaᵢθᵢ² with aᵢ from 0 to L = 1 in five dimensions, full gradients, noise 0.1; the step size is
    half of what the theorem allows. A number for each replica.
    """
    curvature = torch.linspace(0, 1, 5, dtype=torch.float64)
    smallest = SMALLEST_GATE if protect else 1.0
    alpha, sigma = smallest, 0.1  # α < 2ρ̄/L
    method, values = "upgd" if protect else "n-upgd", {"lr": alpha, "sigma": sigma}
    totals = []
    for replica in range(replicas):
        theta = torch.full((5,), 2.0, dtype=torch.float64, requires_grad=True)
        opt = _optimizer(method, theta, replica, beta_utility=0.9, **values)
        total = 0.0
        for _ in range(steps):
            theta.grad = curvature * theta.detach()
            total += float(theta.grad.square().sum())
            opt.step()
        totals.append(total / steps)
    start = float(0.5 * (curvature * 4.0).sum())
    slope = alpha * smallest - 0.5 * alpha**2
    bound = (start / steps + 0.5 * alpha**2 * 5 * sigma**2) / slope
    return np.array(totals) / bound


@cache
def findings() -> tuple[Finding, ...]:
    """Claim 13: what holds; what does not is shown but not judged.

    Largest distances and medians have no interval; shares of bounds have one over replicas. All are
    functions of the code alone: they take seconds once for each version of it.
    """
    return tuple(keep("theorems", (), _findings, Finding.from_rows))


def _findings() -> list[Finding]:
    exact = propagation()
    relu, tanh = (distances(activation, 8, 40) for activation in (nn.ReLU, nn.Tanh))
    conserved = float(np.nanmax(relu[:, 0]))
    second, bent = float(np.nanmedian(relu[:, 1])), float(np.nanmedian(tanh[:, 0]))
    found = [
        _below("propagated utility is HesScale's (largest distance below 1e-8)", exact, 1e-8),
        _below("first-order utility is conserved, ReLU (largest below 1e-9)", conserved, 1e-9),
        _told("the same for tanh, where the paper has it too (median)", bent),
        _told("the second-order part, ReLU, where the paper has it too (median)", second),
    ]
    found = [
        each._replace(part="conservation" if place else "propagation")
        for place, each in enumerate(found)
    ]
    for protect, name in ((False, "N-UPGD"), (True, "UPGD")):
        share = mean_interval(bounded(protect))
        text = "with full gradients obeys its bound (averaged squared gradient, share of it)"
        found.append(_converges(f"{name} {text}", share, below(share, 1.0)))
    for beta in (0.0, 0.9):
        averages, bound = sampled_upgd(0.05, beta, 1000)
        text = f"UPGD with gradient and utility of one sample, β = {beta:g} (the same share)"
        found.append(_converges(text, mean_interval(averages / bound), TOLD))
    return found


def _converges(statement: str, share: Interval, verdict: Verdict) -> Finding:
    return Finding(statement, share, verdict, PLAIN, part="convergence")


def _below(statement: str, value: float, threshold: float) -> Finding:
    return _told(statement, value)._replace(verdict=YES if value < threshold else NO)


def _told(statement: str, value: float) -> Finding:
    return Finding(statement, Interval(value, math.nan, math.nan), TOLD, PLAIN)


def main() -> None:
    """Print both as Markdown."""
    activations: list[Any] = [nn.ReLU, nn.LeakyReLU, nn.Tanh]
    print("Conservation: median of |into - out| / |out| over 200 random 8-w-w-4 networks\n")
    print("| activation | width | first order | second order |\n|---|---:|---:|---:|")
    for activation in activations:
        for width in (8, 64):
            first, second = np.nanmedian(distances(activation, width, 200), axis=0)
            print(f"| {activation.__name__} | {width} | {first:.1e} | {second:.2f} |", flush=True)
    print("\nConvergence: UPGD with gradient and utility of the same sample, 8 replicas\n")
    print("| α | β | steps | averaged squared gradient | bound | |\n|---:|---:|---:|---:|---:|---|")
    for alpha, beta, steps in (
        *((0.05, 0.0, 1000), (0.02, 0.0, 2000), (0.005, 0.0, 4000)),
        *((0.02, 0.9, 2000), (0.02, 0.99, 2000), (0.02, 0.999, 2000)),
    ):
        averages, bound = sampled_upgd(alpha, beta, steps)
        mean, error = averages.mean(), float(standard_error(averages))
        verdict = "violated" if mean - 2 * error > bound else "obeyed"
        average = f"{mean:.4f} ± {error:.4f}"
        print(f"| {alpha} | {beta} | {steps} | {average} | {bound:.4f} | {verdict} |", flush=True)


if __name__ == "__main__":
    main()
