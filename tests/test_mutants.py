"""The tests bite: each deliberate error in the library makes a test of the suite fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis")
pytest.importorskip("scipy")

from hypothesis import Phase as Stage

from tests import test_noise, test_rules
from upgd.optim import batch as batch_module
from upgd.optim import upgd as upgd_module
from upgd.optim.base import RuleOptimizer
from upgd.optim.batch import Batch
from upgd.optim.registry import METHODS
from upgd.rules.vocabulary import Method, Phase

Patch = Callable[[pytest.MonkeyPatch], None]


def equations(name: str) -> None:
    """Many examples: which come first depends on the modules that are loaded, and some are rare."""
    test_rules.check_equations(
        METHODS[name], 3000, phases=[Stage.generate], report_multiple_bugs=False
    )


def signed_eta(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: Any, batches: list[Batch], trace: str) -> list[torch.Tensor]:
        largest = torch.stack([b.largest(trace) for b in batches]).amax()
        return [largest for _ in batches]

    patch.setattr(RuleOptimizer, "_eta", mutant)


def eta_per_layer(patch: pytest.MonkeyPatch) -> None:
    together = RuleOptimizer._batches
    alone = RuleOptimizer._eta

    def apart(self: Any, members: Any, gated: bool) -> list[Batch]:
        return [batch for m in members for batch in together(self, [m], gated)]

    patch.setattr(RuleOptimizer, "_batches", apart)
    patch.setattr(
        RuleOptimizer, "_eta", lambda self, bs, trace: [alone(self, [b], trace)[0] for b in bs]
    )


def decay_off(name: str) -> Patch:
    def apply(patch: pytest.MonkeyPatch) -> None:
        original = RuleOptimizer._scalars

        def mutant(self: Any, batch: Batch) -> dict[str, Any]:
            scalars = original(self, batch)
            scalars[name] = max(0.0, scalars[name] - 0.01)
            return scalars

        patch.setattr(RuleOptimizer, "_scalars", mutant)

    return apply


def no_bias_correction(patch: pytest.MonkeyPatch) -> None:
    def ones(self: Batch) -> list[torch.Tensor]:
        assert self.decays is not None
        return list(torch.ones_like(self.decays).to(self.dtype).unbind())

    patch.setattr(Batch, "corrections", ones)


def maximize_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RuleOptimizer, "_factor", lambda self, batch, *, scaled: 1.0)


def unguarded_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batch_module, "tiny", lambda dtype: 0.0)


def shared_clock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RuleOptimizer, "_part_clocks", lambda self, active: None)


def rule(phase: int, fn: Callable[..., Any]) -> Patch:
    """UPGD with one phase's rule exchanged."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        original = upgd_module.upgd_method

        def build(scaling: Any, order: int, protect: bool) -> Method:
            method = original(scaling, order, protect)
            phases = list(method.phases)
            phases[phase] = Phase(fn, phases[phase].writes, phases[phase].reduce)
            return Method(method.hyper, tuple(phases), method.states, method.decays)

        patch.setattr(upgd_module.UPGD, "build", staticmethod(build))

    return apply


def noise_not_gated(w, g, utility, noise, eta, lr, weight_decay, sigma):  # type: ignore[no-untyped-def]
    gate = upgd_module.sigmoid(utility / -eta)
    return (1 - lr * weight_decay) * w - lr * (2 * g * gate + sigma * noise)


def gate_turned_round(w, g, utility, noise, eta, lr, weight_decay, sigma):  # type: ignore[no-untyped-def]
    gate = upgd_module.sigmoid(utility / eta)
    return (1 - lr * weight_decay) * w - 2 * lr * ((g + sigma * noise) * gate)


def single_step(w, g, utility, noise, eta, lr, weight_decay, sigma):  # type: ignore[no-untyped-def]
    gate = upgd_module.sigmoid(utility / -eta)
    return (1 - lr * weight_decay) * w - lr * ((g + sigma * noise) * gate)


def utility_sign_lost(w, g, utility, beta_utility):  # type: ignore[no-untyped-def]
    return beta_utility * utility + (1 - beta_utility) * (g * w)


MUTANTS: list[tuple[str, str, Patch]] = [
    ("signed eta", "upgd", signed_eta),
    ("signed eta", "feature-upgd", signed_eta),
    ("eta per layer", "upgd", eta_per_layer),
    ("eta per layer", "n-upgd-2nd", eta_per_layer),
    ("beta_utility off", "upgd", decay_off("beta_utility")),
    ("beta_utility off", "upgd-local", decay_off("beta_utility")),
    ("beta_utility off", "feature-upgd-local", decay_off("beta_utility")),
    ("beta1 off", "adamw", decay_off("beta1")),
    ("beta2 off", "ada-upgd", decay_off("beta2")),
    ("beta_importance off", "s-ewc", decay_off("beta_importance")),
    ("beta_weight off", "s-mas", decay_off("beta_weight")),
    ("no bias correction", "adamw", no_bias_correction),
    ("no bias correction", "ada-upgd", no_bias_correction),
    ("no bias correction", "s-ewc", no_bias_correction),
    ("no bias correction", "s-mas", no_bias_correction),
    ("no bias correction", "s-si", no_bias_correction),
    ("no bias correction", "s-rwalk", no_bias_correction),
    ("no bias correction", "upgd", no_bias_correction),  # shows where groups differ in β or t
    ("maximize forgotten", "upgd-2nd", maximize_forgotten),
    ("no guard for dead rows", "upgd-local", unguarded_rows),
    ("one clock for all", "s-ewc", shared_clock),
    ("noise not gated", "upgd", rule(1, noise_not_gated)),
    ("gate turned round", "upgd", rule(1, gate_turned_round)),
    ("α as in the paper", "upgd", rule(1, single_step)),
    ("utility's sign lost", "upgd", rule(0, utility_sign_lost)),
]


@pytest.mark.parametrize(
    ("name", "patch"), [m[1:] for m in MUTANTS], ids=[f"{m[0]} ({m[1]})" for m in MUTANTS]
)
def test_mutant_fails_the_equations(
    name: str, patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch)
    with pytest.raises((AssertionError, FloatingPointError)):  # weights of NaN stop the next step
        equations(name)


def test_reused_noise_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RuleOptimizer, "_noise_step", lambda self, device: 0)
    with pytest.raises(AssertionError):
        test_noise.test_weights_receive_independent_noise("cpu", True)


def test_noise_shared_by_parameters_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = test_noise.GeneratorNoise.draw

    def mutant(self: Any, sizes: Any, offsets: Any, **key: Any) -> torch.Tensor:
        longest = draw(self, [max(sizes)], offsets[:1], **key)
        return torch.cat([longest[:size] for size in sizes])

    monkeypatch.setattr(test_noise.GeneratorNoise, "draw", mutant)
    with pytest.raises(AssertionError):
        test_noise.test_weights_receive_independent_noise("cpu", True)
