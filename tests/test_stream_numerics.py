"""The numbers of stream learners: scaling and mixing against their plain definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sklearn", reason="needs the extra stream")

from upgd.stream import Regressor, mixing, scaling
from upgd.stream.mixing import FLOOR, LeastSquares, Product
from upgd.stream.scaling import Scaler
from upgd.stream.values import LARGEST

NAN = math.nan


@pytest.fixture(params=["compiled", "NumPy"])
def both(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test runs with the compiled functions, and as where numba is not installed."""
    if request.param == "NumPy":
        monkeypatch.setattr(scaling, "scale_rows", None)
        monkeypatch.setattr(mixing, "mix_rows", None)
    else:
        pytest.importorskip("numba")


def values(count: int, columns: int = 3, seed: int = 0) -> Any:
    """Normal numbers of different scales, with gaps."""
    random = np.random.default_rng(seed)
    found = random.normal(size=(count, columns)) * [1e-3, 1.0, 1e4] + [5.0, 0.0, -1e4]
    found[random.random(found.shape) < 0.2] = NAN
    return found


# ------------------------------------------------------------------------------- scaling
@pytest.mark.usefixtures("both")
def test_up_to_the_horizon_all_values_count_alike() -> None:
    rows = values(100)
    scaler = Scaler(3, horizon=100)
    scaled = scaler.learn(rows)
    np.testing.assert_allclose(scaler.mean, np.nanmean(rows, 0), rtol=1e-12)
    np.testing.assert_allclose(scaler.variance, np.nanvar(rows, 0), rtol=1e-9)
    assert scaler.count.tolist() == (~np.isnan(rows)).sum(0).tolist()
    for t in range(2, 100):  # each by the statistics up to and with it
        so_far = rows[: t + 1]
        known = ~np.isnan(rows[t])
        z = (rows[t] - np.nanmean(so_far, 0)) / np.nanstd(so_far, 0)
        np.testing.assert_allclose(scaled[t][known], z[known], rtol=1e-5, atol=1e-5)
        assert not scaled[t][~known].any()


@pytest.mark.usefixtures("both")
def test_behind_the_horizon_values_are_weighted_exponentially() -> None:
    """Weights by definition: 1/n each at the horizon n, then all shrink by 1 - 1/n."""
    horizon, rows = 20, values(150)
    scaler = Scaler(3, horizon=horizon)
    scaler.learn(rows)
    for j in range(3):
        x = rows[:, j][~np.isnan(rows[:, j])]
        weights = np.zeros(len(x))
        for t in range(len(x)):
            rate = 1 / min(t + 1, horizon)
            weights *= 1 - rate
            weights[t] = rate
        assert weights.sum() == pytest.approx(1)
        mean = weights @ x
        assert scaler.mean[j] == pytest.approx(mean, rel=1e-12)
        assert scaler.variance[j] == pytest.approx(weights @ (x - mean) ** 2, rel=1e-9)


@pytest.mark.usefixtures("both")
def test_an_infinite_horizon_is_all_of_the_past() -> None:
    rows = values(2000)
    scaler = Scaler(3, horizon=math.inf)
    scaler.learn(rows)
    np.testing.assert_allclose(scaler.mean, np.nanmean(rows, 0), rtol=1e-11)
    np.testing.assert_allclose(scaler.variance, np.nanvar(rows, 0), rtol=1e-9)


@pytest.mark.usefixtures("both")
def test_peeking_is_what_learning_would_give() -> None:
    for includes in (True, False):
        scaler, rows = Scaler(3, horizon=30, includes=includes), values(60)
        for t in range(60):
            before = scaler.mean.copy(), scaler.variance.copy(), scaler.count.copy()
            others = scaler.peek(rows)
            for old, new in zip(before, (scaler.mean, scaler.variance, scaler.count), strict=True):
                np.testing.assert_array_equal(old, new)
            np.testing.assert_array_equal(scaler.learn(rows[t : t + 1])[0], others[t])


@pytest.mark.usefixtures("both")
def test_without_itself_a_value_is_scaled_by_those_before() -> None:
    rows = np.random.default_rng(0).normal(3, 2, size=(50, 1))
    scaled = Scaler(1, horizon=100, includes=False).learn(rows)
    for t in range(3, 50):
        z = (rows[t] - rows[:t].mean()) / rows[:t].std()
        assert scaled[t] == pytest.approx(np.clip(z, -10, 10), rel=1e-5)
    assert scaled[0] == 0


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.lists(
            st.one_of(
                st.just(NAN),
                st.floats(-LARGEST, LARGEST),
                st.floats(-10, 10),
                st.sampled_from([0.0, 1.0, -0.0, 5e-324, 1e100, -1e100, 1e-150]),
            ),
            min_size=2,
            max_size=2,
        ),
        min_size=1,
        max_size=40,
    ),
    horizon=st.sampled_from([2, 3, 10, 1000, math.inf]),
    includes=st.booleans(),
)
def test_compiled_and_numpy_agree_and_stay_finite(
    rows: Any, horizon: float, includes: bool
) -> None:
    """Whatever is learned: no statistic is NaN or infinite, no answer is out of bounds."""
    pytest.importorskip("numba")
    x = np.array(rows)
    compiled, plain = (Scaler(2, horizon, includes=includes) for _ in range(2))
    found = compiled.learn(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "scale_rows", None)
        expected = plain.learn(x)
        peeked = plain.peek(x)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(compiled.peek(x), peeked, rtol=1e-6, atol=1e-6)
    for name in scaling.STATISTICS:
        mine, other = getattr(compiled, name), getattr(plain, name)
        assert np.isfinite(mine).all()
        np.testing.assert_allclose(mine, other, rtol=1e-9)
    assert (compiled.variance >= 0).all()
    assert (abs(found) <= 10).all()
    again = compiled.invert(compiled.apply(x))
    assert np.isfinite(again).all()


@pytest.mark.usefixtures("both")
def test_no_value_is_further_than_the_root_of_the_horizon() -> None:
    """For a jump after many equal values, sqrt(n - 1) is reached: the bound is tight."""
    for n in (5, 26, 80):
        x = np.full((n, 1), 7.0)
        x[-1] = 8.0
        assert Scaler(1, horizon=n).learn(x)[-1, 0] == pytest.approx(math.sqrt(n - 1), rel=1e-6)


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("level", [0.0, 1.0, 0.1, -1e9, 1e100, 1 / 3])
def test_a_constant_column_is_zero(level: float) -> None:
    """However its mean is rounded; and its first change is seen at once."""
    scaler = Scaler(1, horizon=50)
    assert not scaler.learn(np.full((1000, 1), level)).any()
    assert scaler.deviation[0] == 0
    assert abs(scaler.learn(np.array([[level * 1.5 + 1]]))[0, 0]) > 6


@pytest.mark.usefixtures("both")
def test_one_outlier_changes_statistics_by_a_factor() -> None:
    """By definition: it counts as a value at sqrt(3 n) standard deviations."""
    random = np.random.default_rng(0)
    usual = random.normal(size=(1000, 1))
    for wrong in (1e6, -1e30, 1e100):
        scaler = Scaler(1, horizon=300)
        scaler.learn(usual)
        mean, deviation = scaler.mean[0], scaler.deviation[0]
        assert scaler.learn(np.array([[wrong]]))[0, 0] == math.copysign(10, wrong)
        limit = math.sqrt(3 * 300) * deviation
        assert scaler.mean[0] == pytest.approx(mean + math.copysign(limit, wrong) / 300)
        variance = (1 - 1 / 300) * (deviation**2 + limit**2 / 300)
        assert scaler.variance[0] == pytest.approx(variance)
        assert scaler.deviation[0] < 2 * deviation
        scaler.learn(random.normal(size=(1500, 1)))
        assert scaler.deviation[0] == pytest.approx(1, abs=0.15)


@pytest.mark.usefixtures("both")
def test_a_change_of_level_is_followed() -> None:
    """What looks like outliers at first is normal after some of them."""
    random = np.random.default_rng(0)
    scaler = Scaler(1, horizon=300)
    scaler.learn(random.normal(size=(1000, 1)))
    scaled = scaler.learn(1e6 + 1e5 * random.normal(size=(1000, 1)))
    assert abs(scaled[-100:]).max() < 5
    assert scaler.mean[0] == pytest.approx(1e6, rel=0.15)


@pytest.mark.usefixtures("both")
def test_columns_that_are_added_know_nothing() -> None:
    scaler, rows = Scaler(2, horizon=10), values(30)[:, :2]
    scaler.learn(rows)
    kept = scaler.mean.copy(), scaler.variance.copy()
    scaler.grow(3)
    np.testing.assert_array_equal(scaler.mean, [*kept[0], 0])
    np.testing.assert_array_equal(scaler.variance, [*kept[1], 0])
    assert scaler.count[2] == 0
    scaler.forget()
    assert scaler.count.tolist() == [1, 1, 0]
    np.testing.assert_array_equal(scaler.mean[:2], kept[0])


def test_scaled_values_go_back() -> None:
    scaler, rows = Scaler(3, horizon=50), values(80)
    scaler.learn(rows)
    known = ~np.isnan(rows)
    found = scaler.invert(scaler.apply(rows))
    np.testing.assert_allclose(found[known], rows[known], rtol=1e-4)


def test_a_regressor_survives_an_outlier_among_targets() -> None:
    random = np.random.default_rng(0)
    X = random.normal(size=(4000, 2))
    y = 100 + 5 * X[:, 0]
    learner = Regressor("small").partial_fit(X[:2000], y[:2000])
    learner.learn_one({0: 0.0, 1: 0.0}, 1e90)
    assert abs(learner.predict(X) - y).max() < 1000  # not 1e86
    learner.partial_fit(X[2000:], y[2000:])
    assert learner.score(X, y) > 0.95


# -------------------------------------------------------------------------------- mixing
def answers(members: int, rows: int, outputs: int, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    return random.normal(size=(members, rows, outputs)).astype(np.float32) * 3


@pytest.mark.usefixtures("both")
def test_a_product_descends_the_gradient_of_the_cross_entropy() -> None:
    """Against autograd in float64, row after row."""
    z = answers(3, 40, 4)
    labels = np.random.default_rng(1).integers(0, 4, 40)
    product = Product(3, rate=0.05)
    found = product.mix(z, labels)
    weights = torch.full((3,), 1 / 3, dtype=torch.float64, requires_grad=True)
    for t in range(40):
        logs = torch.log_softmax(torch.tensor(z[:, t], dtype=torch.float64), 1).clamp(min=FLOOR)
        mixed = torch.log_softmax(weights @ logs, 0)
        np.testing.assert_allclose(found[t], mixed.detach(), rtol=1e-9, atol=1e-12)
        (slope,) = torch.autograd.grad(-mixed[labels[t]], weights)
        weights = (weights - 0.05 * slope).clamp(min=0).detach().requires_grad_()
    np.testing.assert_allclose(product.weights, weights.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("both")
def test_probabilities_have_sum_one_and_a_floor() -> None:
    z = answers(2, 30, 5) * 100
    found = Product(2).mix(z)
    np.testing.assert_allclose(np.exp(found).sum(1), 1, rtol=1e-12)
    assert found.min() > FLOOR - 1e-4


@pytest.mark.usefixtures("both")
def test_who_is_right_gains_weight() -> None:
    labels = np.random.default_rng(0).integers(0, 3, 500)
    right = np.eye(3, dtype=np.float32)[labels] * 3
    wrong = answers(1, 500, 3)[0]
    product = Product(2)
    product.mix(np.stack([right, wrong]), labels)
    assert product.weights[0] > 0.9
    assert product.weights[1] < 0.2

    targets = np.random.default_rng(0).normal(size=(500, 1))
    squares = LeastSquares(2)
    squares.mix(np.stack([targets, wrong[:, :1]]).astype(np.float32), targets)
    assert squares.weights[0] == pytest.approx(1, abs=0.05)
    assert squares.weights[1] == pytest.approx(0, abs=0.05)


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("mixture", [Product, LeastSquares])
def test_a_single_answer_is_passed_on(mixture: Any) -> None:
    z, single = answers(1, 20, 3), mixture(1)
    targets = np.zeros(20, np.int64) if mixture is Product else np.zeros((20, 3))
    expected = z[0].astype(float)
    if mixture is Product:
        expected -= np.log(np.exp(expected).sum(1, keepdims=True))
    for found in (single.mix(z), single.mix(z, targets)):
        np.testing.assert_allclose(found, np.clip(expected, -10, 10), rtol=1e-3, atol=1e-5)
    assert single.weights.tolist() == [1.0]


def test_least_squares_are_the_weighted_minimum() -> None:
    """Against numpy.linalg.lstsq on all rows so far, weighted, with the ridge as rows."""
    z, ridge, horizon = np.clip(answers(3, 60, 2), -10, 10), 10.0, 25
    targets = np.random.default_rng(1).normal(size=(60, 2))
    mixture = LeastSquares(3, horizon, ridge)
    found = mixture.mix(z, targets)
    weights = np.full(3, 1 / 3)
    for t in range(60):
        np.testing.assert_allclose(found[t], weights @ z[:, t], rtol=1e-9, atol=1e-9)
        ages = np.repeat(t - np.arange(t + 1), 2)
        root = np.sqrt((1 - 1 / horizon) ** ages)
        A = z[:, : t + 1].reshape(3, -1).T * root[:, None]
        b = targets[: t + 1].reshape(-1) * root
        A = np.concatenate([A, math.sqrt(ridge) * np.eye(3)])
        b = np.concatenate([b, math.sqrt(ridge) * np.full(3, 1 / 3)])
        weights = np.linalg.lstsq(A, b, rcond=None)[0]
    np.testing.assert_allclose(mixture.weights, weights, rtol=1e-8)


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("wrong", [NAN, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("mixture", [Product, LeastSquares])
def test_answers_that_are_not_finite_leave_the_mixture_whole(mixture: Any, wrong: float) -> None:
    z = answers(3, 50, 2)
    z[1, 10:20] = wrong
    z[2, 15, 0] = wrong
    labels: Any = np.random.default_rng(0).integers(0, 2, 50)
    targets = labels if mixture is Product else np.eye(2)[labels]
    mixed = mixture(3)
    assert np.isfinite(mixed.mix(z, targets)).all()
    assert np.isfinite(mixed.mix(z)).all()
    assert all(np.isfinite(each).all() for each in mixed.state().values())


@pytest.mark.parametrize("mixture", [Product, LeastSquares])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), cut=st.integers(0, 30), outputs=st.integers(1, 4))
def test_mixing_in_pieces(mixture: Any, seed: int, cut: int, outputs: int) -> None:
    """Rows together, in pieces, or compiled and in NumPy."""
    z = answers(3, 30, outputs, seed)
    random = np.random.default_rng(seed)
    labels, numbers = random.integers(0, outputs, 30), random.normal(size=(30, outputs))
    targets = labels if mixture is Product else numbers
    together, pieces, plain = mixture(3), mixture(3), mixture(3)
    found = together.mix(z, targets)
    parts = [pieces.mix(z[:, :cut], targets[:cut]), pieces.mix(z[:, cut:], targets[cut:])]
    np.testing.assert_array_equal(np.concatenate(parts), found)
    np.testing.assert_array_equal(together.weights, pieces.weights)
    np.testing.assert_array_equal(together.mix(z)[3], together.mix(z[:, 3:4])[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixing, "mix_rows", None)
        np.testing.assert_allclose(plain.mix(z, targets), found, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(plain.weights, together.weights, rtol=1e-9, atol=1e-12)
