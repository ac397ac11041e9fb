"""The ledger: what it keeps, and how processes share it."""

from __future__ import annotations

import csv
import io
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ledgers import (
    PROCESSES,
    Clock,
    check,
    forking,
    result_of,
    spec,
    specs,
)
from tests.waiting import PATIENCE
from upgd.ledger import (
    STATES,
    LeaseLostError,
    Ledger,
    LedgerError,
    Result,
    RunSpec,
    Series,
    StudyError,
    owner_name,
)

# ---- what it does


def test_adding_is_idempotent(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "deep" / "study") as ledger:
        assert ledger.add(specs(3)) == (3, 0)
        assert ledger.add(specs(5) + specs(5)) == (2, 8)
        assert ledger.add([]) == (0, 0)
        assert [run.spec for run in ledger.runs()] == specs(5)
        assert ledger.counts() == {**dict.fromkeys(STATES, 0), "pending": 5}


def test_a_run_from_claim_to_result(tmp_path: Path) -> None:
    facts = Result(
        "eager",
        "cuda:0",
        "float64",
        versions={"torch": "2.6"},
        host={"cores": 2, "gpu": None},
        started=1.25,
        finished=3.5,
        wall=np.float32(2.25),
        summary={"accuracy": np.float64(0.1), "loss": math.nan, "tasks": 3},
        series={"accuracy": Series([0.1, math.nan, 1e300], 5), "empty": Series([])},
    )
    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs(1))
        [claim] = ledger.claim("me", 60)
        assert (claim.spec, claim.attempt) == (spec(hyper={"lr": 0.01}), 1)
        assert ledger.counts()["running"] == 1
        assert ledger.claim("you", 60) == []
        ledger.finish(claim, facts)
    with Ledger.open(tmp_path, create=False) as ledger:
        run = ledger.get(claim.spec.key)
        assert run.state == "done"
        assert run.result is not None
        for name in ("engine", "device", "dtype", "versions", "host", "started", "finished"):
            assert getattr(run.result, name) == getattr(facts, name)
        assert run.result.wall == 2.25
        assert run.result.summary["accuracy"] == 0.1
        assert math.isnan(run.result.summary["loss"])
        series = ledger.series(run.key, "accuracy")
        assert series.dtype == np.float32
        np.testing.assert_array_equal(series, np.float32([0.1, math.nan, math.inf]))
        assert ledger.metrics(run.key) == {"accuracy": 5, "empty": 1}
        assert ledger.series(run.key, "empty").shape == (0,)
        with pytest.raises(LedgerError, match="it has accuracy, empty"):
            ledger.series(run.key, "acuracy")
        with pytest.raises(LedgerError, match="no run 'abc'"):
            ledger.series("abc", "accuracy")


def test_ends_other_than_done(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs(4))
        first, second, third, fourth = ledger.claim("me", 60, limit=9)
        ledger.fail(first, "out of memory \ud800", retry=False)
        ledger.fail(second, "flaky", retry=True)
        ledger.finish(third, replace(result_of(third.spec), diverged_at=7))
        ledger.release([fourth])
        states = [(run.state, run.error) for run in ledger.runs()]
        assert states == [
            ("failed", "out of memory ?"),
            *(("pending", "flaky"), ("diverged", None), ("pending", None)),
        ]
        diverged = ledger.get(third.spec.key).result
        assert diverged is not None
        assert diverged.diverged_at == 7
        again = ledger.claim("me", 60, limit=9)
        assert [(c.spec.seed, c.attempt) for c in again] == [(1, 2), (3, 2)]
        ledger.finish(again[0], result_of(again[0].spec))
        assert ledger.get(again[0].spec.key).error is None
        assert ledger.retry_failed() == 1
        assert ledger.counts()["pending"] == 1
        for claim in (first, second, third, fourth, again[0]):
            for act in (
                lambda c: ledger.finish(c, result_of(c.spec)),
                lambda c: ledger.fail(c, "late", retry=True),
            ):
                with pytest.raises(LeaseLostError):
                    act(claim)
        before = list(ledger.runs())
        late = [first, second, third, fourth, again[0]]
        assert ledger.settle((c, result_of(c.spec)) for c in late) == late
        ledger.release(late)
        ledger.hear(late)
        assert list(ledger.runs()) == before
        assert [lease.token for lease in ledger.leases()] == [again[1].token]
    check(tmp_path)


def test_filters(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        grid = [
            spec(seed, problem=p, method=m, hyper={"lr": lr})
            for p in ("a", "b")
            for m in ("sgd", "upgd")
            for lr in (1, 0.1)
            for seed in range(2)
        ]
        ledger.add(grid)
        found = [r.spec for r in ledger.runs(problem="a", method="sgd", hyper={"lr": 1})]
        assert found == [s for s in grid if (s.problem, s.name, s.hyper["lr"]) == ("a", "sgd", 1)]
        assert list(ledger.runs(hyper={"sigma": 1})) == []
        decays = spec(0, problem="c", method="sgdw", hyper={"weight_decay": 0.5})
        ledger.add([decays])
        sgd = [s for s in grid if s.method == "sgdw"]
        assert len(sgd) == 8
        for name, wanted in {"SGD": sgd, "sgdw": [*sgd, decays], "upgd-w": [], "adam": []}.items():
            assert [run.spec for run in ledger.runs(method=name)] == wanted, name
            assert ledger.unfinished({"method": [name]}) == len(wanted)
        assert ledger.unfinished({"method": []}) == 0
        with pytest.raises(LedgerError, match="unknown state 'finished'"):
            next(ledger.runs(state="finished"))
        where = {"method": "upgd", "seed": [1, 5]}
        claimed = [c.spec for c in ledger.claim("me", 60, limit=99, where=where)]
        assert claimed == [s for s in grid if s.method == "upgd" and s.seed == 1]
        assert [r.spec for r in ledger.runs(state="running")] == claimed
        [claim] = ledger.claim("me", 60, where={"key": {grid[-2].key}})
        assert claim.spec == grid[-2]
        with pytest.raises(LedgerError, match="cannot choose runs by 'lr'"):
            ledger.claim("me", 60, where={"lr": 1})
        with pytest.raises(ValueError, match="lease_seconds"):
            ledger.claim("me", 0)


def test_runs_for_other_rules_are_kept_but_not_claimed(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add([spec(rules=99), spec()])
        assert [claim.spec.rules for claim in ledger.claim("me", 60, limit=5)] == [spec().rules]
        assert [run.key for run in ledger.runs()] == [spec(rules=99).key, spec().key]


def test_csv_round_trip(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add([spec(0, hyper={"lr": 0.1}), spec(1, hyper={"sigma": 1 / 3})])
        ledger.add([spec(2, method='a,"b"', options={"batch": 32, "restart": True})])
        [claim] = ledger.claim("me", 60)
        ledger.finish(claim, result_of(claim.spec))
        assert ledger.export_csv(tmp_path / "runs.csv") == 3
        file = io.StringIO()
        ledger.export_csv(file)
        assert (tmp_path / "runs.csv").read_bytes() == file.getvalue().encode()
        rows = list(csv.DictReader(io.StringIO(file.getvalue())))
        for row, run in zip(rows, ledger.runs(), strict=True):
            assert RunSpec.from_json(row["spec"]) == run.spec
            assert (row["key"], row["state"], row["method"]) == (
                *(run.key, run.state, run.spec.name),
            )
            given = {k.removeprefix("hyper."): v for k, v in row.items() if "hyper." in k}
            assert {n: float(v) for n, v in given.items() if v} == dict(run.spec.hyper)
        assert (rows[2]["option.batch"], rows[2]["option.restart"]) == ("32", "true")
        assert (rows[0]["summary.accuracy"], rows[1]["summary.accuracy"]) == ("0.0", "")
        assert ledger.series_csv(tmp_path / "series.csv", ["accuracy"]) == 3
        with open(tmp_path / "series.csv", newline="") as read:
            table = [(int(row["step"]), float(row["value"])) for row in csv.DictReader(read)]
        assert table == [(5, 0.0), (10, 1.0), (15, 2.0)]
        with pytest.raises(StudyError, match="cannot write"):
            ledger.export_csv(tmp_path / "nowhere" / "runs.csv")


def test_ten_thousand_runs(tmp_path: Path) -> None:
    many = specs(10_000)
    with Ledger.open(tmp_path) as ledger:
        assert ledger.add(many) == (10_000, 0)
        assert ledger.add(many) == (0, 10_000)
        for claim in ledger.claim("me", 60, limit=20):
            ledger.finish(claim, result_of(claim.spec))
        assert [run.spec for run in ledger.runs()] == many
        assert sum(1 for _ in ledger.runs(state="pending")) == 9_980


# ---- leases


def test_expired_lease_is_taken_over_and_the_old_owner_rejected(tmp_path: Path) -> None:
    clock = Clock()
    with Ledger.open(tmp_path, now=clock) as one, Ledger.open(tmp_path, now=clock) as other:
        one.add(specs(2))
        [old] = one.claim("one", 10)
        clock.time += 9
        assert one.renew("one", 10) == 1
        clock.time += 9
        assert [c.spec.seed for c in other.claim("other", 10, limit=9)] == [1]
        clock.time += 1
        [new] = other.claim("other", 10, limit=9, where={"seed": 0})
        assert (new.spec, new.attempt) == (old.spec, 2)
        assert new.token > old.token
        assert one.renew("one", 100) == 0
        one.hear([old])
        with pytest.raises(LeaseLostError, match="held by other"):
            one.finish(old, result_of(old.spec))
        assert one.get(old.spec.key).result is None
        other.finish(new, result_of(new.spec))
        with pytest.raises(LeaseLostError, match="already done"):
            one.finish(old, result_of(old.spec))
        with pytest.raises(LeaseLostError, match="already done"):
            other.finish(new, result_of(new.spec))
    check(tmp_path)


def test_a_run_that_ends_its_process_is_given_up(tmp_path: Path) -> None:
    clock = Clock()
    with Ledger.open(tmp_path, now=clock) as ledger:
        ledger.add(specs(2))
        for attempt in range(1, 6):
            [claim] = ledger.claim("me", 10, where={"seed": 0})
            assert claim.attempt == attempt
            clock.time += 5
            ledger.renew("me", 10)  # alive, but without a checkpoint
            clock.time += 100
        [other] = ledger.claim("me", 10, limit=2)  # gives up the first and takes the second
        assert other.spec.seed == 1
        run = ledger.get(claim.spec.key)
        assert (run.state, run.attempts) == ("failed", 5)
        assert run.error is not None
        assert "5 attempts without a result or checkpoint" in run.error
        assert "upgd resume --retry" in run.error
        with pytest.raises(LeaseLostError, match="already failed"):
            ledger.finish(claim, result_of(claim.spec))
        ledger.finish(other, result_of(other.spec))
        assert ledger.claim("me", 10) == []
        assert ledger.retry_failed() == 1
        [again] = ledger.claim("me", 10)
        ledger.finish(again, result_of(again.spec))
        assert ledger.get(again.spec.key).error is None
    check(tmp_path)


def test_a_suspect_waits_for_the_others_and_quick_kills_do_not_count(tmp_path: Path) -> None:
    clock = Clock()
    with Ledger.open(tmp_path, now=clock) as ledger:
        ledger.add(specs(3))
        for attempt in range(1, 30):  # two minutes of kills
            [claim] = ledger.claim("me", 2, where={"seed": 0})
            clock.time += 4
            assert ledger.suspects() == ({claim.spec.key} if attempt >= 2 else set())
        assert [spec.seed for spec in ledger.claimable()] == [1, 2, 0]
        assert [claim.spec.seed for claim in ledger.claim("me", 2, limit=9)] == [1, 2, 0]
        clock.time += 10
        assert [claim.spec.seed for claim in ledger.claim("me", 2, limit=2)] == [1, 2]
        clock.time += 300
        ledger.claim("me", 2, limit=9)
        assert [run.state for run in ledger.runs()] == ["failed", "running", "running"]


@pytest.mark.parametrize("sign", ["checkpoint", "release", "flaky"])
def test_a_run_that_is_heard_of_is_not_given_up(tmp_path: Path, sign: str) -> None:
    clock = Clock()
    with Ledger.open(tmp_path, now=clock) as ledger:
        ledger.add(specs(1))
        for attempt in range(1, 40):
            [claim] = ledger.claim("me", 10)
            if attempt % 5 == 0:  # four times nothing, then a sign of life
                if sign == "checkpoint":
                    ledger.hear([claim])
                elif sign == "release":
                    ledger.release([claim])
                else:
                    ledger.fail(claim, "flaky", retry=True)
            if sign == "checkpoint" and attempt % 2:
                ledger.evict("me")  # known to be dead
            clock.time += 100
        assert ledger.get(claim.spec.key).attempts == 39


def test_late_owner_may_finish_while_nobody_else_came(tmp_path: Path) -> None:
    clock = Clock()
    with Ledger.open(tmp_path, now=clock) as ledger:
        ledger.add(specs(1))
        [claim] = ledger.claim("me", 10)
        clock.time += 100
        ledger.renew("me", 10)
        assert ledger.leases()[0].expires == clock.time + 10
        clock.time += 100
        ledger.finish(claim, result_of(claim.spec))
        assert ledger.counts()["done"] == 1


def test_tokens_grow_also_after_all_leases_are_gone(tmp_path: Path) -> None:
    tokens = []
    for _ in range(3):
        with Ledger.open(tmp_path) as ledger:
            ledger.add(specs(2))
            claims = ledger.claim("me", 60, limit=2)
            tokens += [claim.token for claim in claims]
            assert ledger.evict("somebody") == 0
            assert ledger.evict("me") == 2
            assert ledger.leases() == []
    assert tokens == sorted(set(tokens))
    assert owner_name() != owner_name()


def _claim_all(folder: Path, owner: str, queue: Any) -> None:
    with Ledger.open(folder) as ledger:
        taken = []
        while claims := ledger.claim(owner, 600, limit=1 + len(taken) % 3):
            taken += [claim.spec.seed for claim in claims]
            for claim in claims:
                ledger.finish(claim, result_of(claim.spec))
        queue.put(taken)


def test_processes_never_share_a_run(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs(200))
    queue = PROCESSES.Queue()
    workers = [
        PROCESSES.Process(target=_claim_all, args=(tmp_path, f"w{n}", queue)) for n in range(4)
    ]
    for worker in workers:
        worker.start()
    taken = [queue.get(timeout=PATIENCE) for _ in workers]
    for worker in workers:
        worker.join(PATIENCE)
        assert worker.exitcode == 0
    assert sorted(seed for seeds in taken for seed in seeds) == list(range(200))
    check(tmp_path)


def _open_and_add(folder: Path, number: int) -> None:
    with Ledger.open(folder) as ledger:
        ledger.add(specs(number + 1))


def test_processes_may_create_a_ledger_at_once(tmp_path: Path) -> None:
    workers = [PROCESSES.Process(target=_open_and_add, args=(tmp_path, n)) for n in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE)
        assert worker.exitcode == 0
    check(tmp_path)
    with Ledger.open(tmp_path) as ledger:
        assert ledger.counts()["pending"] == 6


def test_threads_may_share_a_ledger(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs(60))
        seen: list[int] = []

        def work(owner: str) -> None:
            while claims := ledger.claim(owner, 60):
                ledger.renew(owner, 60)
                ledger.finish(claims[0], result_of(claims[0].spec))
                seen.append(claims[0].spec.seed)

        threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(seen) == list(range(60))
    check(tmp_path)


@forking
def test_a_forked_child_is_told_to_open_its_own(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:

        def child() -> None:
            for act in (ledger.counts, lambda: Ledger.open(tmp_path)):
                with pytest.raises(LedgerError, match="process"):
                    act()
            ledger.close()
            with pytest.raises(LedgerError, match="forked"):
                Ledger.open(tmp_path)

        process = PROCESSES.Process(target=child)
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == 0
        ledger.add(specs(1))
    check(tmp_path)
