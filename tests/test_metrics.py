"""Metrics by hand, and statistics against SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from upgd import metrics
from upgd.metrics import Meter
from upgd.monitor import measures

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def test_plasticity_is_the_share_of_the_loss_that_an_update_removed() -> None:
    before = [4.0, 1.0, 1.0, 0.0, 1e-12, 2.0]
    after = [1.0, 2.0, 0.0, 0.0, 1e-9, 2.0]
    expected = [0.75, 0.0, 1.0, 1.0, 0.9, 0.0]  # the loss below 1e-8 counts as 1e-8
    np.testing.assert_allclose(metrics.sample_plasticity(before, after), expected)


def test_windows_close_exactly_where_stated() -> None:
    meter = Meter(3)
    full = [meter.add(a=value) for value in (1, 2, 3, 4, 5, 6, 7)]
    assert full == [False, False, True, False, False, True, False]
    assert meter.series("a").tolist() == [2.0, 5.0]  # the open window does not show
    assert meter.count == 1


def test_what_is_measured_at_a_stride_is_averaged_over_what_there_is() -> None:
    meter = Meter(2)
    meter.add(a=1)
    meter.add(a=1, b=5)
    meter.add(a=1)
    meter.add(a=1)
    meter.add(a=1, b=1)
    meter.add(a=1, b=2)
    np.testing.assert_array_equal(meter.series("b"), [5.0, np.nan, 1.5])
    assert meter.series("a").tolist() == [1.0, 1.0, 1.0]


def test_a_metric_that_comes_late_has_no_value_before() -> None:
    meter = Meter(1)
    meter.add(a=1)
    meter.add(a=1, b=2)
    np.testing.assert_array_equal(meter.series("b"), [np.nan, 2.0])
    np.testing.assert_array_equal(meter.series("c"), [np.nan, np.nan])


def test_batches_count_their_samples() -> None:
    meter = Meter(4)
    meter.add(2, a=1.0)
    assert meter.add(2, a=2.0)
    assert meter.series("a").tolist() == [0.75]
    with pytest.raises(ValueError, match="do not fit"):
        meter.add(5, a=0.0)
    with pytest.raises(ValueError, match="at least one sample"):
        Meter(0)


def test_forgetting_is_over_windows_of_two_tasks() -> None:
    accuracy = [0.1, 0.3, 0.9, 0.9, 0.6, 0.8, 0.0]  # the last task has no partner
    assert metrics.forgetting(accuracy) == pytest.approx(0.2 - 0.7)
    with pytest.raises(ValueError, match="too short"):
        metrics.forgetting([0.1, 0.2, 0.3])


@pytest.mark.parametrize(
    ("tasks", "length", "first"),
    [
        (8, 100, 4),  # half of a short run
        (400, 2500, 200),  # the paper's: 0.5 M of 1 M samples
        (1000, 2500, 200),  # a longer run still begins at 0.5 M
        (250, 60_000, 9),  # 0.5 M lies within task 8; task 9 is the first behind it
    ],
)
def test_loss_of_plasticity_begins_where_the_paper_says(
    tasks: int, length: int, first: int
) -> None:
    plasticity = np.arange(tasks, dtype=float)
    last = first + (tasks - first) // 2 * 2 - 2
    expected = (first + 0.5) - (last + 0.5)
    assert metrics.loss_of_plasticity(plasticity, length) == pytest.approx(expected)


def test_norms_are_of_all_parameters_stacked() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(3, 4), torch.zeros(2), torch.randn(5)]
    flat = np.concatenate([t.numpy().ravel() for t in tensors])
    found = measures.norms(tensors)
    assert found.l0 == pytest.approx((flat != 0).mean())
    assert found.l1 == pytest.approx(np.linalg.norm(flat, 1), rel=1e-6)
    assert found.l2 == pytest.approx(np.linalg.norm(flat), rel=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_effective_ranks_are_each_matrix_own(device: str) -> None:
    """Whatever stands beside it, and however many; singular and infinite ones among them."""
    x = torch.randn(70, 12, 30, generator=torch.Generator().manual_seed(0)).to(device)
    x[5, :6], x[6], x[8] = 0, x[6, :1], 0
    x[7] *= torch.logspace(0, -9, 30, device=device)
    x[9, 3, 4] = torch.inf
    together = measures.effective_ranks_later(x)()
    assert np.isnan(together[9])
    alone = [measures.effective_rank(one.cpu()) for i, one in enumerate(x) if i != 9]
    del together[9]
    np.testing.assert_allclose(together, alone, rtol=1e-5 if device == "cuda" else 0)
    x = torch.cat([x[:9], x[10:]])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert measures.effective_ranks_later(x[order.to(device)])() == [together[i] for i in order]
    assert measures.effective_ranks_later(x[3:8])() == together[3:8]
    assert measures.effective_ranks_later(x[40:41])() == together[40:41]


def test_effective_rank_of_known_matrices() -> None:
    assert measures.effective_rank(torch.diag(torch.tensor([1.0, 1, 1, 0]))) == pytest.approx(3)
    assert measures.effective_rank(torch.outer(torch.arange(1.0, 4), torch.ones(5))) == 1
    assert measures.effective_rank(torch.zeros(3, 3)) == 0
    shares = np.array([0.5, 0.25, 0.25])
    expected = np.exp(stats.entropy(shares))
    assert measures.effective_rank(torch.diag(torch.tensor(shares))) == pytest.approx(expected)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Linear(3, 3))
    ranks = [measures.effective_rank(p) for p in (model[0].weight.flatten(1), model[1].weight)]
    assert measures.mean_effective_rank(model) == pytest.approx(np.mean(ranks))


def test_interquartile_mean_is_scipys_where_quarters_are_whole() -> None:
    rng = np.random.default_rng(0)
    for n in (4, 8, 20, 40):
        values = rng.normal(size=(3, n))
        expected = [stats.trim_mean(row, 0.25) for row in values]
        np.testing.assert_allclose(metrics.interquartile_mean(values), expected)
    # With six values the middle three: half of the second and of the fifth count.
    assert metrics.interquartile_mean([0, 1, 2, 3, 4, 100]) == pytest.approx(
        (0.5 * 1 + 2 + 3 + 0.5 * 4) / 3
    )


def test_standard_error_is_scipys() -> None:
    values = np.random.default_rng(0).normal(size=(7, 3))
    np.testing.assert_allclose(metrics.standard_error(values), stats.sem(values))


@pytest.mark.parametrize("seeds", [3, 5, 11, 12, 20, 100])
def test_intervals_are_scipys_students(seeds: int) -> None:
    values = np.random.default_rng(seeds).normal(size=(seeds, 4))
    mean, error = values.mean(0), stats.sem(values)
    low, high = stats.t.interval(0.95, seeds - 1, mean, error)
    np.testing.assert_allclose(metrics.half_width(values), (high - low) / 2, rtol=1e-3)
    found = metrics.mean_interval(values[:, 0])
    np.testing.assert_allclose(found, (mean[0], low[0], high[0]), atol=3e-3 * error[0])


@pytest.mark.parametrize("seeds", [1, 2])
def test_few_seeds_have_no_interval(seeds: int) -> None:
    values = np.arange(3.0 * seeds).reshape(seeds, 3)
    assert np.isnan(metrics.half_width(values)).all()
    mean, low, high = metrics.mean_interval(values[:, 0])
    assert mean == values[:, 0].mean()
    assert np.isnan([low, high]).all()


def test_bootstrap_intervals_cover() -> None:
    """About 95% of the intervals contain the mean of the distribution's middle half, 0."""
    rng = np.random.default_rng(1)
    intervals = [metrics.bootstrap(rng.normal(size=40), 400, seed=i) for i in range(200)]
    covered = np.mean([i.low <= 0 <= i.high for i in intervals])
    assert 0.88 <= covered <= 0.99


def test_bootstrap_is_stratified() -> None:
    """Problems of different levels do not widen the interval: each keeps its number of seeds."""
    rng = np.random.default_rng(0)
    easy, hard = rng.normal(1, 0.01, 20), rng.normal(0, 0.01, 20)
    together = metrics.bootstrap({"easy": easy, "hard": hard})
    pooled = metrics.bootstrap(np.concatenate([easy, hard]))
    assert together.high - together.low < 0.2 * (pooled.high - pooled.low)
    with pytest.raises(ValueError, match="no values"):
        metrics.bootstrap({"easy": []})
