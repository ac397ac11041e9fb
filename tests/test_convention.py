"""The paper's form of a set and this package's are the same learner, bit for bit.

The paper's rules are written here once more, as it prints them, and run with printed sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases import CounterNoise, assert_close, assert_equal, batches, network, weights
from upgd.optim.registry import METHODS
from upgd.paper.experiments import ablation_arms
from upgd.paper.grids import grid, printed_grid, sets
from upgd.paper.searches import SEARCHES, variants
from upgd.paper.sets import BEST, MAIN, Set, best, from_paper, to_paper

KINDS = {name: plain for plain in ("upgd", "n-upgd") for name in variants(plain)}
"""First-order methods by name, with the one whose printed sets they take."""
AGENTS: Set = {
    "lr": 3e-4, "sigma": 0.001, "beta_utility": 0.999, "weight_decay": 0.0,
    "beta1": 0.9, "beta2": 0.999, "eps": 1e-5,
}  # fmt: skip
"""AdaUPGD's printed set."""


# ------------------------------------------------------------------------------ conversion
@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("upgd-w", {"lr": 0.005, "weight_decay": 0.002, "sigma": 0.1}),
        ("ada-upgd", {"lr": 0.005, "weight_decay": 0.002, "sigma": 0.1}),
        ("feature-upgd", {"lr": 0.005, "weight_decay": 0.002, "sigma": 0.1, "output_gate": 2}),
        ("n-upgd-2nd", {"lr": 0.01, "weight_decay": 0.001, "sigma": 0.05}),
        ("feature-n-upgd", {"lr": 0.01, "weight_decay": 0.001, "sigma": 0.05, "output_gate": 1}),
        ("shrink-and-perturb", {"lr": 0.01, "weight_decay": 0.001, "sigma": 0.1}),
    ],
)
def test_conversion(method: str, expected: Set) -> None:
    printed = {"lr": 0.01, "weight_decay": 0.001, "sigma": 0.1}
    assert from_paper(method, printed) == expected
    assert to_paper(method, expected) == printed


def printed_sets() -> Iterator[tuple[str, Set]]:
    """All printed sets; those of UPGD and N-UPGD also for other kinds of utility."""
    yield "ada-upgd", AGENTS
    for known in BEST.values():
        yield from known.items()
        yield from ((kind, known[plain]) for kind, plain in KINDS.items())


def test_every_printed_set_survives_the_way_back() -> None:
    for method, printed in printed_sets():
        assert to_paper(method, from_paper(method, printed)) == printed


def test_a_set_that_the_paper_does_not_have() -> None:
    with pytest.raises(ValueError, match="output_gate 2, not 1"):
        to_paper("feature-upgd", {"lr": 0.01, "output_gate": 1.0})


@pytest.mark.parametrize("problem", SEARCHES)
def test_grids_are_the_printed_ones_converted(problem: str) -> None:
    for method in (*KINDS, "ada-upgd", "shrink-and-perturb"):
        here, there = sets(grid(problem, method)), sets(printed_grid(problem, method))
        assert [to_paper(method, one) for one in here] == there


def test_ablations_share_the_printed_step_size() -> None:
    """Without gating UPGD-W is S&P with the same α, σ and λ."""
    for problem in MAIN:
        arms = {arm.name: arm.hyper for arm in ablation_arms(problem)}
        printed = BEST[problem]["upgd"]
        assert arms["sgd"]["lr"] == arms["upgd-ug"]["lr"] == printed["lr"] == 2 * arms["upgd"]["lr"]
        assert arms["upgd-ug"] == {name: printed[name] for name in arms["upgd-ug"]}
        assert arms["upgd"] == best(problem, "upgd")


# -------------------------------------------------------------------------- both ways to run
Gates = Callable[[list[Tensor], float, int], list[Tensor]]
"""From utility traces, their decay and the step's number to 1 - Ū."""


def as_printed(traces: list[Tensor], beta: float, t: int) -> list[Tensor]:
    corrected = [trace / (1 - beta**t) for trace in traces]
    eta = torch.stack([u.max() for u in corrected]).max().abs()
    return [1 - torch.sigmoid(u / eta) for u in corrected]


def as_computed(traces: list[Tensor], beta: float, t: int) -> list[Tensor]:
    """The same with the operations of the optimizers: the correction cancels, 1 - φ(x) = φ(-x)."""
    eta = torch.stack([u.max() for u in traces]).max().abs()
    return [torch.sigmoid(u / -eta) for u in traces]


class Paper:
    """The paper's algorithms for :func:`tests.cases.network`, with a set as it prints it."""

    def __init__(self, method: str, model: Any, printed: Set, gates: Gates, seed: int) -> None:
        self.feature_wise, self.protecting = method.startswith("feature-"), "n-" not in method
        self.model, self.printed, self.gates, self.seed = model, printed, gates, seed
        self.params = list(model.parameters())
        self.places = [0, *accumulate(p.numel() for p in self.params)]
        self.traces: list[Tensor] = []
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.params]
        self.adam, self.t = method == "ada-upgd", 0

    def derivatives(self, x: Tensor, y: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Of the loss, by the parameters and by gates of 1 on the outputs of the activations."""
        gates = []
        for layer in self.model:
            x = layer(x)
            if not isinstance(layer, nn.Linear):
                gates.append(torch.ones(x.shape[1], dtype=x.dtype, requires_grad=True))
                x = x * gates[-1]
        loss = nn.functional.cross_entropy(x, y)
        found = torch.autograd.grad(loss, [*self.params, *gates])
        return found[: len(self.params)], found[len(self.params) :]

    def step(self, x: Tensor, y: Tensor) -> None:
        gradients, by_gates = self.derivatives(x, y)
        self.t += 1
        with torch.no_grad():
            pairs = zip(gradients, self.params, strict=True)
            utilities = [-f for f in by_gates] if self.feature_wise else [-g * w for g, w in pairs]
            beta, old = self.printed["beta_utility"], self.traces or [0.0 * u for u in utilities]
            both = zip(old, utilities, strict=True)
            self.traces = [beta * trace + (1 - beta) * u for trace, u in both]
            gates = self.gates(self.traces, beta, self.t)
            for i, (g, w) in enumerate(zip(gradients, self.params, strict=True)):
                self.update(i, w, self.direction(i, g), self.gate(i, w, gates))

    def gate(self, i: int, w: Tensor, gates: Sequence[Tensor]) -> Tensor | None:
        """1 - Ū of a parameter's weights, or of the features they lead into; None: there are none.

        Every layer has two parameters.
        """
        if not self.feature_wise:
            return gates[i]
        layer = i // 2
        return gates[layer].view(-1, *[1] * (w.dim() - 1)) if layer < len(gates) else None

    def update(self, i: int, w: Tensor, g: Tensor, gate: Tensor | None) -> None:
        """w ← (1-αλ)·w - α·(g + ξ)·(1-Ū), or - α·(g + ξ·(1-Ū)); the output layer: - α·g."""
        alpha, decay, sigma = (self.printed[name] for name in ("lr", "weight_decay", "sigma"))
        at = {"seed": self.seed, "step": self.t - 1, "device": "cpu", "dtype": w.dtype}
        xi = sigma * CounterNoise().draw([w.numel()], [self.places[i]], **at).view_as(w)
        gated = g if gate is None else (g + xi) * gate if self.protecting else g + xi * gate
        w.copy_((1 - alpha * decay) * w - alpha * gated)

    def direction(self, i: int, g: Tensor) -> Tensor:
        """The gradient, or Adam's direction."""
        if not self.adam:
            return g
        first, second = self.moments[i]
        b1, b2, eps = (self.printed[name] for name in ("beta1", "beta2", "eps"))
        first, second = b1 * first + (1 - b1) * g, b2 * second + (1 - b2) * (g * g)
        self.moments[i] = first, second
        return first / (1 - b1**self.t) / ((second / (1 - b2**self.t)).sqrt() + eps)


def paper_weights(method: str, printed: Set, gates: Gates, dtype: torch.dtype) -> list[Tensor]:
    model = network(dtype=dtype)
    paper = Paper(method, model, printed, gates, seed=3)
    for batch in batches(12, dtype=dtype):
        paper.step(*batch)
    return weights(model)


def our_weights(method: str, printed: Set, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    model, hyper = network(dtype=dtype), from_paper(method, printed)
    if "beta1" in hyper:
        hyper["betas"] = hyper.pop("beta1"), hyper.pop("beta2")  # type: ignore[assignment]
    opt = METHODS[method].make(model, **hyper, noise=CounterNoise(), seed=3, **options)
    for x, y in batches(12, dtype=dtype):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    return weights(model)


RUN = [
    *(
        (kind, BEST[problem][kind.removeprefix("feature-")])
        for kind, problem in product(("upgd", "n-upgd", "feature-upgd", "feature-n-upgd"), MAIN)
    ),
    ("ada-upgd", AGENTS),
]
each_set = pytest.mark.parametrize(
    ("method", "printed"), RUN, ids=[f"{m}-{i}" for i, (m, _) in enumerate(RUN)]
)


@each_set
def test_a_converted_set_is_the_papers_rule(method: str, printed: Set) -> None:
    expected = paper_weights(method, printed, as_printed, torch.float64)
    assert_close(our_weights(method, printed, torch.float64), expected, rtol=1e-12, atol=1e-14)


@each_set
def test_with_the_same_operations_it_is_bit_for_bit(method: str, printed: Set) -> None:
    expected = paper_weights(method, printed, as_computed, torch.float32)
    assert_equal(our_weights(method, printed, torch.float32, foreach=False), expected)
