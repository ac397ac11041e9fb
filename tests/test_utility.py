"""Utilities against plain loops, exact mathematics and SciPy."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

import upgd
from upgd import utility
from upgd.paper import provenance, utility_quality
from upgd.paper.measuring import How
from upgd.paper.quotations import QUOTED
from upgd.paper.verdicts import NO, UNKNOWN, YES
from upgd.utility import (
    approximate,
    feature_utility,
    outgoing_sums,
    rank_correlation,
    spearman,
    true_feature_utility,
    true_utility,
    true_weight_utility,
    weight_utility,
)


class Reused(nn.Module):
    """One activation module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 2)
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.act(self.second(self.act(self.first(x)))))


def mlp(activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 5), activation(), nn.Linear(5, 6), activation(), nn.Linear(6, 2)
    )


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3 * 4, 2)
    )


def problem(make: Any, seed: int = 0) -> tuple[nn.Module, Any]:
    """A model in float64 and its loss on three samples."""
    torch.manual_seed(seed)
    model = make().double()
    shape = (3, 1, 5, 5) if isinstance(model[0] if make is cnn else None, nn.Conv2d) else (3, 4)
    x, y = torch.randn(shape, dtype=torch.float64), torch.randint(2, (3,))
    return model, lambda: F.cross_entropy(model(x), y)


# ------------------------------------------------------------------ the true utility
@pytest.mark.parametrize("make", [mlp, cnn, Reused])
@pytest.mark.parametrize("memory", [utility.MEMORY, 1])
def test_true_weight_utility_is_the_loss_without_each_weight(make: Any, memory: int) -> None:
    model, loss = problem(make)
    found = true_weight_utility(model, loss, memory=memory)
    with torch.no_grad():
        base = loss()
        for name, p in model.named_parameters():
            for index in np.ndindex(*p.shape):
                kept = p[index].clone()
                p[index] = 0
                assert float(found[name][index]) == pytest.approx(float(loss() - base), abs=1e-12)
                p[index] = kept


@pytest.mark.parametrize("make", [mlp, cnn, Reused])
@pytest.mark.parametrize("memory", [utility.MEMORY, 1])
def test_true_feature_utility_is_the_loss_without_each_feature(make: Any, memory: int) -> None:
    model, loss = problem(make)
    features = upgd.Features(model)
    found = true_feature_utility(model, loss, features, memory=memory)
    followers = {"0": 1, "2": 3}  # in a chain, the activation that follows a layer
    for layer in features.layers:
        for j in range(layer.size):
            alone = copy.deepcopy(model)
            if make is Reused:  # tanh(0) = 0: cut the feature's inputs
                with torch.no_grad():
                    getattr(alone, layer.name).weight[j] = 0
                    getattr(alone, layer.name).bias[j] = 0
            else:
                alone[followers[layer.name]].register_forward_hook(_zero(j))
            without = _reloss(loss, model, alone)
            expected = float((without - loss()).detach())
            assert float(found[layer.name][j]) == pytest.approx(expected, abs=1e-12)


def _zero(j: int) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        mask = torch.ones(output.shape[1], dtype=output.dtype)
        mask[j] = 0
        return output * mask.reshape(-1, *[1] * (output.dim() - 2))

    return hook


def _reloss(loss: Any, model: nn.Module, other: nn.Module) -> Tensor:
    """The same loss on another model: `loss` closes over `model`."""
    x, y = (
        cell.cell_contents for cell in loss.__closure__ if isinstance(cell.cell_contents, Tensor)
    )
    x, y = (x, y) if x.is_floating_point() else (y, x)
    return F.cross_entropy(other(x), y)


def test_utilities_leave_gradients_and_measurements_alone() -> None:
    model, loss = problem(mlp)
    features = upgd.Features(model)
    loss().backward()
    before = [p.grad.clone() for p in model.parameters()]
    measured = [layer.first.clone() for layer in features.layers]
    true_weight_utility(model, loss)
    true_feature_utility(model, loss, features)
    weight_utility(model, loss)
    for source in ("gates", "preactivations", "outgoing"):
        for order in (1, 2):
            feature_utility(model, loss, features, order, source)
    for p, g in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, g)
        assert not hasattr(p, "curvature")
    for layer, first in zip(features.layers, measured, strict=True):
        assert torch.equal(layer.first, first)
        assert layer.second is None


def test_stacked_learners_equal_each_alone() -> None:
    torch.manual_seed(0)
    weights = {"w": torch.randn(3, 4, 2), "v": torch.randn(3, 4)}

    def loss(values: dict[str, Tensor]) -> Tensor:
        return (values["w"].sum(-1) * values["v"]).sum(-1).tanh()

    together = true_utility(loss, weights, stacked=True)
    for i in range(3):
        alone = true_utility(loss, {name: value[i] for name, value in weights.items()})
        for name in weights:
            torch.testing.assert_close(together[name][i], alone[name])


# ------------------------------------------------------------------ approximations
def test_second_order_utility_is_true_for_a_quadratic_loss() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)

    def loss() -> Tensor:
        return F.mse_loss(model(x), y)

    true, second = true_weight_utility(model, loss), weight_utility(model, loss)
    first = weight_utility(model, loss, "first")
    for name in true:
        torch.testing.assert_close(second[name], true[name])
        assert not torch.allclose(first[name], true[name])


def test_kinds_are_what_they_say() -> None:
    w, g, h = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0]), torch.tensor([2.0, 1.0])
    assert approximate("first", w, g).tolist() == [-0.5, 6.0]
    assert approximate("second", w, g, h).tolist() == [0.5, 8.0]
    assert approximate("squared_gradient", w, g).tolist() == [0.25, 9.0]
    assert approximate("magnitude", w, g).tolist() == [1.0, 2.0]
    random = [approximate("random", w, g, generator=torch.Generator().manual_seed(0)) for _ in "ab"]
    assert torch.equal(*random)
    with pytest.raises(ValueError, match="kind must be one of"):
        approximate("third", w, g)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs second derivatives"):
        approximate("second", w, g)


def with_gates(model: nn.Sequential, x: Tensor, y: Tensor) -> tuple[list[Tensor], Any]:
    """The model's loss as a function of real gates after its activations."""
    sizes = [m.out_features for m in model if isinstance(m, nn.Linear)][:-1]
    gates = [torch.ones(n, dtype=torch.float64) for n in sizes]

    def loss(*gates: Tensor) -> Tensor:
        h, left = x, list(gates)
        for module in model:
            h = module(h)
            if not isinstance(module, nn.Linear):
                h = h * left.pop(0)
        return F.mse_loss(h, y)

    return gates, loss


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.GELU])
def test_gate_utility_has_the_derivatives_of_real_gates(activation: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, 1)).double()
    x, y = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 1, dtype=torch.float64)
    (gate,), loss = with_gates(model, x, y)
    f = torch.func.grad(loss)(gate)
    s = torch.func.hessian(loss)(gate).diagonal()  # one output: HesScale has it exactly
    features = upgd.Features(model)
    found = feature_utility(model, lambda: F.mse_loss(model(x), y), features)
    torch.testing.assert_close(found["0"], 0.5 * s - f)
    found = feature_utility(model, lambda: F.mse_loss(model(x), y), features, order=1)
    torch.testing.assert_close(found["0"], -f)


@pytest.mark.parametrize("make", [mlp, cnn])
def test_outgoing_weights_carry_a_features_first_order_utility(make: Any) -> None:
    model, loss = problem(make)
    features = upgd.Features(model)
    outgoing = feature_utility(model, loss, features, 1, "outgoing")
    gates = feature_utility(model, loss, features, 1, "gates")
    for name in gates:
        torch.testing.assert_close(outgoing[name], gates[name])


def test_preactivations_equal_gates_where_activations_are_homogeneous() -> None:
    for activation, equal in ((nn.ReLU, True), (nn.LeakyReLU, True), (nn.Tanh, False)):
        model, loss = problem(lambda activation=activation: mlp(activation))
        features = upgd.Features(model)
        for order in (1, 2):
            a = feature_utility(model, loss, features, order, "preactivations")
            b = feature_utility(model, loss, features, order, "gates")
            assert all(torch.allclose(a[n], b[n], atol=1e-12) for n in a) == equal


def test_preactivation_utility_is_true_for_a_quadratic() -> None:
    """With an identity above, removing an input is exactly quadratic."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Identity(), nn.Linear(5, 1)).double()
    x, y = torch.randn(1, 4, dtype=torch.float64), torch.randn(1, 1, dtype=torch.float64)

    def loss() -> Tensor:
        return F.mse_loss(model(x), y)

    features = upgd.Features(model)
    true = true_feature_utility(model, loss, features)["0"]
    for source in ("preactivations", "gates"):
        torch.testing.assert_close(feature_utility(model, loss, features, 2, source)["0"], true)


@pytest.mark.parametrize("curvature", ["ggn", "hutchinson"])
def test_other_curvatures_serve(curvature: Any) -> None:
    model, loss = problem(mlp)
    assert weight_utility(model, loss, curvature=curvature).keys() == {
        name for name, _ in model.named_parameters()
    }
    assert feature_utility(model, loss, upgd.Features(model), curvature=curvature).keys() == {
        "0",
        "2",
    }


def test_bad_input_is_told() -> None:
    model, loss = problem(mlp)
    features = upgd.Features(model)
    with pytest.raises(TypeError, match="function without arguments"):
        true_weight_utility(model, loss())
    with pytest.raises(ValueError, match="source must be"):
        feature_utility(model, loss, features, source="weights")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="did not run layer"):
        true_feature_utility(model, lambda: model[0].weight.sum(), features)
    with pytest.raises(ValueError, match="did not run layer"):
        feature_utility(model, lambda: model[0].weight.sum(), features)
    with pytest.raises(ValueError, match="no layer with inputs"):
        outgoing_sums(model, {}, features)


# --------------------------------------------------------------- rank correlation
@pytest.mark.parametrize("ties", [False, True])
def test_spearman_is_scipys(ties: bool) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, b = rng.normal(size=(2, rng.integers(2, 40)))
        if ties:
            a, b = a.round(), b.round()
        expected = stats.spearmanr(a, b).statistic if min(np.ptp(a), np.ptp(b)) > 0 else np.nan
        found = float(spearman(torch.tensor(a), torch.tensor(b)))
        assert found == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_spearman_of_rows_and_undefined_ones() -> None:
    a = torch.tensor([[1.0, 2, 3], [1, 1, 1], [1, 2, torch.nan]])
    found = spearman(a, torch.tensor([3.0, 2, 1]).expand(3, 3))
    assert float(found[0]) == pytest.approx(-1)
    assert found[1:].isnan().all()
    with pytest.raises(ValueError, match="differ"):
        spearman(torch.ones(2), torch.ones(3))


def test_local_correlation_is_the_mean_over_tensors_that_have_one() -> None:
    true = {"a": torch.tensor([1.0, 2, 3]), "b": torch.tensor([1.0, 2, 3]), "c": torch.ones(1)}
    guess = {"a": torch.tensor([3.0, 2, 1]), "b": torch.ones(3), "c": torch.ones(1)}
    value, undefined = rank_correlation(true, guess, "local")
    assert (float(value), int(undefined)) == (pytest.approx(-1), 1)  # `c` is too short to count
    flat = [torch.cat(list(x.values())) for x in (true, guess)]
    torch.testing.assert_close(rank_correlation(true, guess).value, spearman(*flat))
    with pytest.raises(ValueError, match="different names"):
        rank_correlation(true, {})
    with pytest.raises(ValueError, match="scope must be"):
        rank_correlation(true, guess, "layer")  # type: ignore[arg-type]


# --------------------------------------------------------------- the experiment
@pytest.mark.parametrize("of", ["weight", "feature"])
def test_a_seed_does_not_depend_on_its_neighbours(of: Any) -> None:
    together = list(utility_quality.run("tanh", of, [3, 7, 5], 6))
    alone = list(utility_quality.run("tanh", of, [7], 6))
    for a, b in zip(together, alone, strict=True):
        for key in a:
            torch.testing.assert_close(a[key][1], b[key][0], atol=1e-9, rtol=0)


@pytest.mark.parametrize("of", ["weight", "feature"])
def test_the_experiment_measures_what_the_library_measures(of: Any) -> None:
    """One seed's first step, done again with an ordinary module and the library's functions."""
    seed = 11
    (row,) = utility_quality.run("relu", of, [seed], 1)
    torch.manual_seed(seed)
    sizes = utility_quality.SIZES[of]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    model = nn.Sequential(*layers[:-1]).double()
    xs, ys = utility_quality.samples(seed, 1)

    def loss() -> Tensor:
        return (model(xs)[0, 0] - ys[0]).square()

    features = upgd.Features(model)
    for order, kind in ((1, "first"), (2, "second")):
        if of == "weight":
            true, guess = true_weight_utility(model, loss), weight_utility(model, loss, kind)
        else:
            true = true_feature_utility(model, loss, features)
            guess = feature_utility(model, loss, features, order)
        for scope in ("global", "local"):
            expected = rank_correlation(true, guess, scope).value
            # Rounding may exchange neighbours in rank: a pair is worth 3e-7 here.
            torch.testing.assert_close(row[kind, scope][0], expected, atol=1e-5, rtol=0)


def test_the_public_codes_correlation_is_that_of_one_argsort() -> None:
    rng = np.random.default_rng(0)
    a, b = torch.from_numpy(rng.normal(size=(2, 3, 40)))
    found = utility_quality._argsort_correlation({"w": a}, {"w": b})
    for x, y, r in zip(a.numpy(), b.numpy(), found.tolist(), strict=True):
        assert r == pytest.approx(stats.pearsonr(np.argsort(x), np.argsort(y)).statistic)
        assert r != pytest.approx(stats.spearmanr(x, y).statistic)


def test_the_stream_is_the_problems() -> None:
    x, y = utility_quality.samples(0, 4000)
    assert x.shape == (4000, 5)
    assert float(x.abs().max()) <= 0.5
    assert stats.kstest(x.flatten() + 0.5, "uniform").pvalue > 1e-3
    weights = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    assert sorted(weights.round().tolist()) == [0, 0, 0, 1, 1]
    torch.testing.assert_close(weights, weights.round(), atol=1e-4, rtol=0)


def made_up(
    seeds: int = 4, points: int = 200, **means: tuple[float, float]
) -> utility_quality.Results:
    """Results whose series go linearly from one value to another, with a little noise."""
    rng = np.random.default_rng(0)
    results = utility_quality.Results(list(range(seeds)))
    for kind, (start, end) in means.items():
        line = np.linspace(start, end, points) + rng.normal(scale=1e-3, size=(seeds, points))
        for of in ("weight", "feature"):
            for scope in ("global", "local", "argsort"):
                results.series["relu", of, scope, kind] = line
                results.undefined["relu", of, scope, kind] = np.arange(seeds)
    return results


def test_claim_one_can_hold_and_fail(tmp_path: Any) -> None:
    paper = {
        "second": (0.95, 0.95),
        "first": (0.9, 0.8),
        "squared_gradient": (0.0, 0.5),
        "magnitude": (0.2, 0.1),
        "random": (0.0, 0.0),
    }
    assert {f.verdict for f in utility_quality.claim(made_up(**paper))} == {YES}
    parts = {f.part for f in utility_quality.claim(made_up(**paper))}
    assert parts == {quote.part for quote in QUOTED[1]}
    for seeds, points in ((2, 200), (4, 99)):  # too few, too short
        few = utility_quality.claim(made_up(seeds, points, **paper))
        assert {f.verdict for f in few} == {UNKNOWN}
    for broken in (
        {"second": (0.85, 0.95)},
        {"first": (0.8, 0.9)},
        {"magnitude": (0.5, 0.4)},
        {"magnitude": (0.1, 0.2)},
        {"squared_gradient": (0.5, 0.1)},
        {"squared_gradient": (0.0, 0.9)},
        {"random": (0.05, 0.05)},
    ):
        verdicts = [f.verdict for f in utility_quality.claim(made_up(**{**paper, **broken}))]
        assert NO in verdicts
    wide = made_up(**paper)
    wide.series["relu", "weight", "global", "random"] += np.array([-0.2, 0.2, -0.1, 0.1])[:, None]
    assert [f.verdict for f in utility_quality.claim(wide)][-1] == UNKNOWN
    results = made_up(**paper)
    results.save(tmp_path / "c.csv.gz")
    loaded = utility_quality.Results.load(tmp_path / "c.csv.gz")
    assert loaded.seeds == results.seeds
    for key, values in results.series.items():
        np.testing.assert_allclose(loaded.series[key], values, atol=6e-4)
        assert loaded.undefined[key].tolist() == [0, 1, 2, 3]


def test_it_is_measured_drawn_and_told(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(utility_quality, "ACTIVATIONS", {"relu": torch.nn.ReLU})
    how = How(scale=1e-9, seeds=1)
    assert utility_quality.size(how) == (1, 50)
    assert utility_quality.size(How()) == (30, 2000)
    assert "1 seed of 50 steps" in utility_quality.plan(how)
    told: list[str] = []
    utility_quality.measure(how, tmp_path, told.append)
    assert told == [f"ReLU, {of}s: 50 steps of 1 seed done" for of in ("weight", "feature")]
    known = provenance.read(tmp_path)
    assert known is not None
    assert (known.steps, known.runs, known.learner_steps) == (50, 2, 100)
    drawn = utility_quality.draw(tmp_path, tmp_path, ["png"])
    assert [path.stem for path in drawn] == list(utility_quality.pictures(tmp_path))
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert any("Claim 1" in line for line in utility_quality.page(tmp_path))
