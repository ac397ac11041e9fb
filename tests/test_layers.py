"""Rules that see layers: bounds, periods, roles."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from upgd.optim.base import RuleOptimizer
from upgd.rules.ops import clip
from upgd.rules.vocabulary import Method, Phase


def clipped(w: Any, g: Any, slow: Any, lr: Any, reach: Any, bound: Any, due: Any) -> Any:
    """Weights within a multiple of their first bound, and a copy taken now and then."""
    w = clip(w - lr * g, -reach * bound, reach * bound)
    return w, slow + due * (w - slow)


METHOD = Method(
    hyper=("lr", "reach", "every"),
    states=("slow",),
    phases=(Phase(clipped, writes=("w", "slow")),),
    period="every",
)


class Clipped(RuleOptimizer):
    """The rule as an optimizer."""

    def __init__(self, params: Any, lr: float = 0.1, reach: float = 1.0, every: float = 3.0, **c):
        super().__init__(params, METHOD, {"lr": lr, "reach": reach, "every": every}, **c)


def network() -> nn.Sequential:
    """Layers of which no two have the same number of inputs, and a normalisation."""
    torch.manual_seed(0)
    layers = [nn.Conv1d(2, 4, 3), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 5), nn.Linear(5, 2)]
    return nn.Sequential(*layers).double()


def plain(models: nn.Module, data: Any, reach: float, every: int) -> list[torch.Tensor]:
    """The same learning, written out; returns the copies."""
    params = list(models.parameters())
    inputs = [6, 6, 1, 1, 8, 8, 5, 5]
    slow = [torch.zeros_like(p) for p in params]
    for t, (x, y) in enumerate(data, 1):
        grads = torch.autograd.grad((models(x) - y).square().mean(), params)
        with torch.no_grad():
            for p, g, s, fan_in in zip(params, grads, slow, inputs, strict=True):
                most = reach / math.sqrt(fan_in)
                p.copy_((p - 0.1 * g).clamp(-most, most))
                if t % every == 0:
                    s.copy_(p)
    return slow


@pytest.mark.parametrize(
    "options", [{"foreach": False}, {"foreach": True}, {"foreach": True, "nonfinite": "skip"}]
)
def test_optimizers_know_bounds_and_periods(options: dict[str, Any]) -> None:
    model, other = network(), network()
    generator = torch.Generator().manual_seed(1)
    data = [
        tuple(
            torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((3, 2, 4), (3, 2))
        )
        for _ in range(8)
    ]
    opt = Clipped(model.parameters(), reach=0.8, every=3.2, **options)
    for x, y in data:
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        opt.step()
    slow = plain(other, data, 0.8, 3)
    for p, q, s in zip(model.parameters(), other.parameters(), slow, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(opt.state[p]["slow"], s, rtol=1e-9, atol=1e-12)
    assert any((p.abs() == 0.8 / math.sqrt(8)).any() for p in model.parameters())


def test_a_rule_that_reads_due_needs_a_period() -> None:
    with pytest.raises(ValueError, match="no period"):
        Method(hyper=METHOD.hyper, states=METHOD.states, phases=METHOD.phases)
    with pytest.raises(ValueError, match="no hyperparameter"):
        Method(hyper=("lr",), phases=(), period="every")
