"""The paper's theorems on utilities: propagation and conservation, over random networks.

Convergence has a file of its own, test_convergence.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from upgd.utility import LayerUtility, propagated_utility, weight_utility

quick = settings(max_examples=40, deadline=None, derandomize=True, database=None)
HOMOGENEOUS = [nn.ReLU, nn.LeakyReLU]  # σ'(a)·a = σ(a)
ACTIVATIONS = [*HOMOGENEOUS, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.GELU, nn.Softplus]
LOSSES: dict[str, Any] = {
    "cross-entropy": lambda out: F.cross_entropy(out, torch.tensor([1])),
    "squared error": lambda out: F.mse_loss(out, torch.ones_like(out)),
    "binary": lambda out: F.binary_cross_entropy_with_logits(out, torch.ones_like(out)),
}


@st.composite
def networks(draw: Any, activations: Any = tuple(ACTIVATIONS)) -> tuple[nn.Sequential, Tensor]:
    """A chain of linear layers, with or without biases, and one sample."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    sizes = draw(st.lists(st.integers(1, 6), min_size=2, max_size=5))
    bias = draw(st.booleans())
    activation = draw(st.sampled_from(activations))
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip(sizes, [*sizes[1:], 3], strict=True):
        layers += [nn.Linear(fan_in, fan_out, bias=bias), activation()]
    model = nn.Sequential(*layers[:-1]).double()
    return model, torch.randn(1, sizes[0], dtype=torch.float64)


def linears(model: nn.Sequential) -> list[str]:
    return [name for name, m in model.named_children() if isinstance(m, nn.Linear)]


def check_propagation(model: nn.Sequential, x: Tensor, loss: Any) -> list[LayerUtility]:
    layers = propagated_utility(model, x, loss)
    first = weight_utility(model, lambda: loss(model(x)), "first")
    second = weight_utility(model, lambda: loss(model(x)), "second")
    for name, layer in zip(linears(model), layers, strict=True):
        torch.testing.assert_close(layer.first, first[f"{name}.weight"], rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(layer.total, second[f"{name}.weight"], rtol=1e-8, atol=1e-10)
        if f"{name}.bias" in second:
            total = layer.first_bias + layer.second_bias
            torch.testing.assert_close(total, second[f"{name}.bias"], rtol=1e-8, atol=1e-10)
    return layers


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@given(case=networks())
@quick
def test_propagated_utility_is_hesscales(loss: Any, case: Any) -> None:
    """Theorem 1: per sample, biases allowed, for any smooth or piecewise smooth activation."""
    check_propagation(*case, loss)


def test_a_zero_feature_where_the_activation_is_flat_gives_zero() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    with torch.no_grad():
        model[0].bias[1] = -100.0
    layers = check_propagation(model, torch.ones(1, 2).double(), LOSSES["squared error"])
    assert (layers[0].total[1] == 0).all()
    assert (layers[0].total[[0, 2]] != 0).any()


def test_a_zero_feature_elsewhere_is_undefined() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    with torch.no_grad():
        model[0].weight[1] = 0
        model[0].bias[1] = 0
    layers = propagated_utility(model, torch.ones(1, 2).double(), LOSSES["squared error"])
    assert layers[0].total[1].isnan().all()
    assert layers[0].total[[0, 2]].isfinite().all()


def test_propagation_is_for_chains_and_one_sample() -> None:
    chain = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    with pytest.raises(ValueError, match="per sample"):
        propagated_utility(chain, torch.ones(2, 2), torch.sum)
    with pytest.raises(ValueError, match="linear layers with one elementwise activation"):
        propagated_utility(
            nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), torch.ones(2), torch.sum
        )


def flows(layers: list[LayerUtility], which: str) -> list[tuple[Tensor, Tensor]]:
    """Per hidden layer: what flows into each feature (biases included) and what flows out."""
    found = []
    for below, above in itertools.pairwise(layers):
        into = getattr(below, which).sum(1) + getattr(below, f"{which}_bias")
        found.append((into, getattr(above, which).sum(0)))
    return found


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@given(case=networks(tuple(HOMOGENEOUS)))
@quick
def test_first_order_utility_is_conserved(loss: Any, case: Any) -> None:
    """Theorem 2, exact where σ'(a)·a = σ(a): what enters a feature leaves it."""
    for into, out in flows(check_propagation(*case, loss), "first"):
        torch.testing.assert_close(into, out, rtol=1e-9, atol=1e-12)


def test_conservation_fails_for_tanh_and_for_the_second_order_part() -> None:
    """σ'(a)·a ≠ σ(a), and Σ(Wh)² ≠ (ΣWh)²; how much: ``python -m upgd.paper.theorems``."""
    torch.manual_seed(0)
    x = torch.randn(1, 4, dtype=torch.float64)
    for activation, which in ((nn.Tanh, "first"), (nn.ReLU, "second")):
        model = nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, 3)).double()
        ((into, out),) = flows(propagated_utility(model, x, LOSSES["cross-entropy"]), which)
        assert float((into - out).norm() / out.norm()) > 0.05
