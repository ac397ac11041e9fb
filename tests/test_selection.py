"""Which set wins: on ledgers that are filled by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from upgd.ledger import Ledger, Result, RunSpec, Series
from upgd.study.selection import best_sets, rankings

PROBLEM = "label-permuted-digits"


def fill(folder: Path, rows: dict[tuple[str, float, int], Any], **fields: Any) -> Ledger:
    """Runs by method, step size and seed: a value, "diverged", "failed" or "pending"."""
    fields = {"problem": PROBLEM, "steps": 40, "metric": "accuracy", **fields}
    metric = fields.pop("metric")
    ledger = Ledger.open(folder)
    for (method, lr, seed), value in rows.items():
        spec = RunSpec(method=method, hyper={"lr": lr, "sigma": 1.0}, seed=seed, **fields)
        ledger.add([spec])
        if value == "pending":
            continue
        [claim] = ledger.claim("me", 60, where={"key": spec.key})
        if value == "failed":
            ledger.fail(claim, "broken", retry=False)
        elif value == "diverged":  # what it gave before must not count
            ledger.finish(claim, Result("eager", summary={metric: 0.99}, diverged_at=20))
        else:
            series = {metric: Series(np.array([value - 0.1, value + 0.1]), 20)}
            ledger.finish(claim, Result("eager", summary={metric: value}, series=series))
    return ledger


def winners(ledger: Ledger, **options: Any) -> dict[str, float | None]:
    found = {}
    for ranking in best_sets(ledger, **options):
        best = ranking.winner
        found[ranking.name] = None if best is None else dict(best.hyper)["lr"]
    return found


@pytest.mark.parametrize("state", ["pending", "failed"])
def test_a_set_that_lacks_a_seed_never_wins(tmp_path: Path, state: str) -> None:
    rows = {("upgd", 0.1, 0): 0.5, ("upgd", 0.1, 1): 0.5}
    rows |= {("upgd", 0.2, 0): 0.9, ("upgd", 0.2, 1): state, ("upgd", 0.3, 0): 0.8}
    with fill(tmp_path, rows) as ledger:
        assert winners(ledger) == {"upgd": 0.1}
        (ranking,) = best_sets(ledger)
        assert [dict(one.hyper)["lr"] for one in ranking.incomplete] == [0.2, 0.3]
        assert [one.missing for one in ranking.incomplete] == [(1,), (1,)]
        # Of the seed that all have, the largest wins; of one that none has, no set does.
        assert winners(ledger, seeds=[0]) == {"upgd": 0.2}
        assert winners(ledger, seeds=[0, 1, 2]) == {"upgd": None}


def test_a_set_with_a_diverged_seed_never_wins(tmp_path: Path) -> None:
    rows = {("upgd", 0.1, 0): 0.3, ("upgd", 0.1, 1): 0.3}
    rows |= {("upgd", 0.2, 0): 0.9, ("upgd", 0.2, 1): "diverged"}
    rows |= {("sgd", 0.1, 0): "diverged", ("sgd", 0.1, 1): 0.5}
    with fill(tmp_path, rows) as ledger:
        assert winners(ledger) == {"upgd": 0.1, "sgd": None}
        ranking = best_sets(ledger, methods=["upgd"])[0]
        worst = ranking.complete[-1]
        assert (worst.values, worst.diverged, worst.missing) == ({0: 0.9, 1: 0.0}, (1,), ())
        assert math.isnan(worst.interval.low)


def test_squared_error_chooses_the_lowest(tmp_path: Path) -> None:
    rows = {("sgd", lr, seed): value + seed for lr, value in ((0.1, 0.7), (0.2, 0.4), (0.3, 0.5))
            for seed in (0, 1)}  # fmt: skip
    rows |= {("sgd", 0.4, 0): 0.01, ("sgd", 0.4, 1): "diverged"}
    with fill(tmp_path, rows, problem="toy-changing-sign", metric="loss") as ledger:
        assert winners(ledger) == {"sgd": 0.2}
        (ranking,) = best_sets(ledger)
    assert ranking.metric == "loss"
    assert [dict(one.hyper)["lr"] for one in ranking.complete] == [0.2, 0.3, 0.1, 0.4]
    assert ranking.complete[-1].value == math.inf


def test_ties_do_not_depend_on_the_order_of_runs(tmp_path: Path) -> None:
    rows = {("upgd", lr, 0): 0.5 for lr in (0.3, 0.1, 0.2)}
    with fill(tmp_path, rows) as ledger:
        runs = list(ledger.runs())
        for order in (runs, runs[::-1], [runs[1], runs[0], runs[2]]):
            (ranking,) = rankings(order).values()
            assert [dict(one.hyper)["lr"] for one in ranking.complete] == [0.1, 0.2, 0.3]


def test_only_runs_of_one_length_and_kind_are_compared(tmp_path: Path) -> None:
    fill(tmp_path, {("upgd", 0.1, 0): 0.9}, steps=20).close()
    fill(tmp_path, {("upgd", 0.2, 0): 0.6, ("upgd", 0.1, 0): 0.5}).close()
    with fill(tmp_path, {("upgd", 0.3, 0): 0.7}, options={"batch": 2}) as ledger:
        found = {r.family.options: dict(r.winner.hyper)["lr"] for r in best_sets(ledger)}
        assert found == {(): 0.2, (("batch", 2),): 0.3}
        assert winners(ledger, steps=20) == {"upgd": 0.1}


def test_values_and_intervals_by_hand(tmp_path: Path) -> None:
    rows = {("upgd", 0.1, seed): value for seed, value in enumerate((0.4, 0.5, 0.6))}
    with fill(tmp_path, rows) as ledger:
        (ranking,) = best_sets(ledger)
        best = ranking.winner
    assert best is not None
    assert best.value == pytest.approx(0.5)
    half = 4.302653 * 0.1 / math.sqrt(3)  # Student's t for two degrees of freedom
    assert best.interval == pytest.approx((0.5, 0.5 - half, 0.5 + half), abs=1e-4)
    assert ranking.find({"lr": 0.1}) is best
    assert ranking.find({"lr": 0.2}) is None
