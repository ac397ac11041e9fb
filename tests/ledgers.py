"""What the tests of the ledger share: runs with known results, and checks of the tables."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from upgd.ledger import Ledger, Result, RunSpec, Series

# A forked child has torch imported already; elsewhere than on Linux forking is not safe.
PROCESSES = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
posix = pytest.mark.skipif(os.name == "nt", reason="needs POSIX permissions and limits")
forking = pytest.mark.skipif(sys.platform != "linux", reason="needs fork")


def spec(seed: int = 0, **fields: Any) -> RunSpec:
    return RunSpec(**{"problem": "digits", "method": "upgd", "seed": seed, "steps": 10, **fields})


def specs(count: int) -> list[RunSpec]:
    return [spec(seed, hyper={"lr": 0.01}) for seed in range(count)]


def result_of(s: RunSpec, windows: int = 3) -> Result:
    """What a pure function of the specification gives."""
    values = np.arange(windows, dtype=np.float32) + s.seed % 1000
    series = {"accuracy": Series(values, 5), "loss": Series(-values, 5)}
    return Result("eager", wall=1.5, summary={"accuracy": float(s.seed)}, series=series)


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def check(folder: Path) -> None:
    """What holds of every ledger at all times."""
    db = sqlite3.connect(folder / "ledger.sqlite")
    try:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        states = dict(db.execute("SELECT key, state FROM runs"))
        results = [key for (key,) in db.execute("SELECT key FROM results")]
        leases = [key for (key,) in db.execute("SELECT key FROM leases")]
        series = dict(db.execute("SELECT key, count(*) FROM series GROUP BY key"))
    finally:
        db.close()
    assert sorted(results) == sorted(k for k, s in states.items() if s in ("done", "diverged"))
    assert sorted(leases) == sorted(k for k, s in states.items() if s == "running")
    assert series == dict.fromkeys(results, 2)


def outcome(folder: Path) -> list[Any]:
    """All that the runs gave, without how often they were begun."""
    with Ledger.open(folder, create=False) as ledger:
        return [
            (
                *(run.key, run.state, run.error, run.result and dict(run.result.summary)),
                *(run.result and run.result.diverged_at,),
                {name: ledger.series(run.key, name).tolist() for name in ledger.metrics(run.key)},
            )
            for run in ledger.runs()
        ]


class CrashError(Exception):
    pass


def crash_at(number: int, end: Callable[[], None]) -> Callable[[str], None]:
    left = iter(range(number, -1, -1))

    def point(name: str) -> None:
        if next(left, -1) == 0:
            end()

    return point


def raise_crash() -> None:
    raise CrashError
