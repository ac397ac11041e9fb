"""A study that the last version with ledgers of version 4 made: it opens, loses nothing, goes on.

``tests/data/old_study`` was made with upgd 0.1.0 by ``Ledger.add`` and these specifications, with
options ``window=20, task_length=20, hidden="8"`` where nothing else is said:

- done by ``work``: sgd without hyperparameters and with all of them (two keys for one run), upgd
  with all, UPGD-W with none, adam with beta1=0.8; sgd with lr=1e30 diverged, and with nonsense=1
  failed; of seed 5, sgdw with λ = 0 is done while the same as sgd waits;
- interrupted by a ``KeyboardInterrupt`` in ``on_progress``: UPGD-W (seed 7, ``work``) and sgd (seed
  8, ``work_stacks``, 20 000 steps, task_length=500, window=1000), whose checkpoints are kept;
- pending: runs that others are already (sgdw with λ = 0, upgd with λ = 0.001), s&p and pgd with
  options that change nothing, a method and a problem that upgd does not have, agents, older rules;
- running: adamw with λ = 0, claimed by a process that died.

Then ``PRAGMA journal_mode=DELETE`` and ``VACUUM``.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ledgers import forking
from tests.old_studies import (
    DATA,
    assert_kills_lose_nothing,
    call,
    content,
    copied,
    dump,
    rows,
)
from upgd.ledger import Ledger, RunSpec, load_checkpoint
from upgd.ledger.checking import check_study
from upgd.ledger.database import Database
from upgd.ledger.errors import DamagedError
from upgd.ledger.repairing import repair_study
from upgd.study.prepare import prepare

OLD = DATA / "old_study"
RUNS, KEPT = 21, 16
OVER = ("done", "diverged")
GATED = ("upgd", "ada-upgd")  # what the study has of methods that rules 3 convert


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return copied(OLD, tmp_path / "study")


# ------------------------------------------------------------------------------------ opening
@pytest.mark.parametrize("read_only", [False, True])
def test_no_run_and_no_result_is_lost(study: Path, read_only: bool) -> None:
    before, old_rows = content(study), list(rows(OLD))
    with Ledger.open(study, create=False, read_only=read_only) as ledger:
        runs = {run.key: run for run in ledger.runs()}
        alike: dict[str, list[dict[str, Any]]] = {}
        for row in old_rows:
            run, old = ledger.get(row["key"]), json.loads(row["spec"])
            alike.setdefault(run.key, []).append(row)
            for name in ("problem", "seed", "steps"):
                assert getattr(run.spec, name) == old[name]
            assert run.spec.rules == {1: 1, 2: 3}[old["rules"]]
            halved = run.spec.rules == 3 and run.spec.method in GATED
            factors = {"lr": 0.5, "weight_decay": 2.0} if halved else {}
            hyper = {name: value * factors.get(name, 1) for name, value in old["hyper"].items()}
            assert hyper.items() <= run.spec.hyper.items()
            assert run.spec.options.items() <= old["options"].items()
        for key, same in alike.items():
            run = runs.pop(key)
            states = {row["state"] for row in same}
            assert run.state == next(
                s for s in (*OVER, "running", "pending", "failed") if s in states
            )
            if run.result is not None:
                kept = [row for row in same if row["started"] == run.result.started]
                assert dict(run.result.summary) == json.loads(kept[0]["summary"])
                assert ledger.metrics(key).keys() == kept[0]["series"].keys()
                for metric, values in kept[0]["series"].items():
                    np.testing.assert_array_equal(ledger.series(key, metric), values)
        assert not runs
        assert (len(old_rows), len(alike)) == (RUNS, KEPT)
        assert sum(ledger.counts().values()) == KEPT
    if read_only:
        assert content(study) == before


def test_what_was_left_out_had_the_defaults_of_then() -> None:
    """The canonical specification gives the old result again."""
    with Ledger.open(OLD, read_only=True) as ledger:
        done = list(ledger.runs(state="done"))
        assert {run.spec.name for run in done} == {"sgd", "upgd", "upgd-w", "adam"}
        for run in done:
            again = prepare(run.spec)
            again.advance(run.spec.steps)
            loss = ledger.series(run.key, "loss")
            np.testing.assert_allclose(again.meter.series("loss"), loss, rtol=1e-3)


def test_specifications_are_canonical() -> None:
    with Ledger.open(OLD, read_only=True) as ledger:
        runs = list(ledger.runs())
    for run in runs:
        assert run.key == run.spec.key
        assert RunSpec(**json.loads(run.spec.to_json())) == run.spec


def test_opened_a_second_time_nothing_happens(study: Path) -> None:
    Ledger.open(study).close()
    first, files = dump(study), content(study / "checkpoints")
    assert len(files) == 2
    Ledger.open(study).close()
    assert (dump(study), content(study / "checkpoints")) == (first, files)
    assert check_study(study).lines == []


def test_show_reads_an_old_study(study: Path) -> None:
    before = content(study)
    found = json.loads(call("show", study, "--json").output)
    assert found["counts"] == {"pending": 8, "running": 1, "done": 5, "failed": 1, "diverged": 1}
    assert {row["method"] for row in found["results"]} == {"sgd", "upgd", "upgd-w", "adam"}
    for name, count in {"sgd": 2, "SGDW": 2, "adam": 1, "adamw": 1, "upgd": 2, "upgd-w": 1}.items():
        shown = json.loads(call("show", study, "--method", name, "--json").output)
        assert len(shown["results"]) == count, name
    assert content(study) == before


# ----------------------------------------------------------------------------------- going on
@pytest.mark.parametrize(("engine", "seed"), [("eager", 7), ("auto", 8)])
def test_resume_goes_on_from_the_checkpoint(study: Path, engine: str, seed: int) -> None:
    pytest.importorskip("numba")
    started = {}
    for path in (study / "checkpoints").iterdir():
        facts = load_checkpoint(path)[1]
        started[facts["stack"]["run"]] = facts["started"]
        assert facts["run"]["step"] > 0
    with Ledger.open(study) as ledger:
        for claim in ledger.claim("me", 60, limit=99):
            if claim.spec.seed in (0, 9, seed) and "hidden" in claim.spec.options:  # short ones
                ledger.release([claim])
            else:
                ledger.fail(claim, "not in this test", retry=False)
        [run] = [run for run in ledger.runs() if run.spec.seed == seed]
        [began] = [at for old, at in started.items() if ledger.get(old).key == run.key]
    call("resume", study, "--engine", engine, "--quiet")
    with Ledger.open(study, create=False) as ledger:
        # One run follows other rules; one has failed, and five that were left out.
        expected = {"pending": 1, "running": 0, "done": 8, "failed": 6, "diverged": 1}
        assert ledger.counts() == expected
        result = ledger.get(run.key).result
        assert result is not None
        assert result.started == began  # and not when it was resumed
        loss = ledger.series(run.key, "loss")
    assert not (study / "checkpoints" / f"{run.key}.npz").exists()
    whole = prepare(run.spec)
    whole.advance(min(run.spec.steps, 6_000))  # past the checkpoint
    beginning = whole.meter.series("loss")
    np.testing.assert_allclose(loss[: len(beginning)], beginning, rtol=1e-3)


@forking
def test_killed_in_the_middle_of_it(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_kills_lose_nothing(study, tmp_path, monkeypatch, KEPT, checkpoints=2)


# ------------------------------------------------------------------------------------- damage
DAMAGE = {
    "a result": "UPDATE results SET wall = wall + 1 WHERE key = ?",
    "a series": "UPDATE series SET window = window + 1 WHERE key = ? AND metric = 'loss'",
    "a run": "UPDATE runs SET attempts = attempts + 1 WHERE key = ?",
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_was_damaged_stays_so_and_can_be_mended(study: Path, what: str) -> None:
    """Of UPGD-W's run, which has another key afterwards and which another row waits for."""
    [key] = [row["key"] for row in rows(OLD) if (row["method"], row["seed"]) == ("UPGD-W", 1)]
    db = sqlite3.connect(study / "ledger.sqlite")
    db.execute(DAMAGE[what], (key,))
    db.commit()
    db.close()
    mended = study.with_name("mended")
    shutil.copytree(study, mended)
    for read_only in (True, False):
        with Ledger.open(study, read_only=read_only) as ledger, pytest.raises(DamagedError):
            list(zip(ledger.runs(), ledger.each_series(), strict=False))
    findings = check_study(mended)
    assert len(findings.lines) == 1
    repair_study(mended, findings)
    assert check_study(mended).lines == []
    with Ledger.open(mended, create=False) as ledger:
        runs = list(ledger.runs())
        assert all(run.key == run.spec.key for run in runs)
        assert sum(run.state == "done" for run in runs) == 4 + (what == "a run")
    assert {p.stem for p in (mended / "checkpoints").iterdir()} <= {run.key for run in runs}


def test_a_mended_study_still_knows_old_keys(study: Path) -> None:
    Ledger.open(study).close()
    db = sqlite3.connect(study / "ledger.sqlite")
    db.execute("UPDATE results SET wall = wall + 1")
    db.commit()
    db.close()
    repair_study(study, check_study(study))
    with Ledger.open(study, create=False) as ledger:
        for row in rows(OLD):
            assert ledger.get(row["key"]).spec.seed == row["seed"]


def test_ledgers_can_be_looked_at_as_they_are(study: Path) -> None:
    database = Database(study / "ledger.sqlite", as_it_is=True)
    with database.read() as db:
        assert db.execute("SELECT count(*) FROM runs").fetchone() == (RUNS,)
    database.close()
    assert check_study(study).lines == []
