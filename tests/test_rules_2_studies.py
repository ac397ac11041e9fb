"""A study of rules 2, where a weight without utility took half of the step: it keeps its meaning.

``tests/data/rules_2_study`` was made at commit 7eb54e5, on ``label-permuted-digits`` with options
``window=20, task_length=20, hidden="8"`` where nothing else is said:

- done, of every method in ``SETS``: seed 0 on the eager engine, seed 1 on the batched one; upgd
  with lr=1e30 diverged, and with nonsense=1 failed;
- interrupted by a ``KeyboardInterrupt`` in ``on_progress``: upgd and feature-upgd (seed 7, eager,
  400 steps), n-upgd and ada-upgd (seed 8, batched, 20 000 steps, task_length=500, window=1000),
  whose checkpoints are kept;
- running: adamw, claimed by a process that died;
- pending: sgd with ``rules=3``, which is the same as a run that is done; upgd with ``rules=1``; a
  method that upgd does not have; two with sources of their own, one of them with a utility; upgd
  with defaults; an agent of ada-upgd with defaults.

``tests/data/rules_2_study.json`` has what that commit gave for the interrupted runs when it
continued them (``continued``, by key), and the results that its ``upgd show --json`` printed.
"""

from __future__ import annotations

import json
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
from tests.running import work
from upgd.ledger import Ledger, RunSpec
from upgd.ledger.checking import check_study
from upgd.ledger.checkpoints import checkpoint_facts
from upgd.ledger.errors import DamagedError
from upgd.ledger.old_specs import whole_step_json
from upgd.ledger.repairing import repair_study

OLD = DATA / "rules_2_study"
THEN = json.loads((DATA / "rules_2_study.json").read_text())
RUNS, KEPT = 34, 33
SETS = {  # in the terms of rules 3
    "sgd": {"lr": 0.03},
    "pgd": {"lr": 0.01, "sigma": 0.01},
    "adamw": {"lr": 0.001, "weight_decay": 0.01},
    "upgd": {"lr": 0.015, "weight_decay": 0.02, "sigma": 0.1},
    "n-upgd": {"lr": 0.03, "weight_decay": 0.01, "sigma": 0.05},
    "feature-upgd": {"lr": 0.015, "weight_decay": 0.02, "sigma": 0.1, "output_gate": 2},
    "feature-n-upgd-local": {"lr": 0.03, "weight_decay": 0, "sigma": 0.05, "output_gate": 1},
    "upgd-2nd-local": {"lr": 0.015, "weight_decay": 0, "sigma": 0.01},
    "ada-upgd": {"lr": 0.0005, "weight_decay": 0.02, "sigma": 0.1},
    "ada-upgd-2nd": {"lr": 0.0005, "weight_decay": 0, "sigma": 0.001},
}
TRACES = {"beta_utility": 0.999}
MOMENTS = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
SHORT = {"window": 20, "task_length": 20, "hidden": "8"}
LONG = {"window": 1000, "task_length": 500, "hidden": "8"}


def spec(method: str, seed: int, steps: int = 100, options: Any = SHORT) -> RunSpec:
    hyper = SETS[method] | (TRACES if "upgd" in method else {})
    hyper |= MOMENTS if method.startswith("ada") else {}
    return RunSpec("label-permuted-digits", method, hyper, seed, steps, options)


INTERRUPTED = [
    *(spec(method, 7, 400) for method in ("upgd", "feature-upgd")),
    *(spec(method, 8, 20_000, LONG) for method in ("n-upgd", "ada-upgd")),
]


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return copied(OLD, tmp_path / "study")


def assert_same(found: dict[str, Any], then: dict[str, Any], exact: bool) -> None:
    """Series by metric are equal; where roundings differ, losses are close.

    In a plasticity, the quotient of two losses, a last digit of the platform's exp may show.
    """
    assert found.keys() == then.keys()
    for metric in found if exact else ():
        last = 1e-6 if metric == "plasticity" else 0.0
        np.testing.assert_allclose(found[metric], then[metric], rtol=last, atol=0, err_msg=metric)
    np.testing.assert_allclose(found["loss"], then["loss"], rtol=1e-3)


# ------------------------------------------------------------------------------------ opening
@pytest.mark.parametrize("read_only", [False, True])
def test_runs_and_results_are_kept(study: Path, read_only: bool) -> None:
    before, old = content(study), list(rows(OLD))
    found: dict[str, list[str]] = {}
    with Ledger.open(study, create=False, read_only=read_only) as ledger:
        for row in old:
            run = ledger.get(row["key"])
            found.setdefault(run.key, []).append(row["state"])
            assert run.key == run.spec.key
            if row["summary"] is not None:
                assert run.state == row["state"]
                assert run.result is not None
                assert dict(run.result.summary) == json.loads(row["summary"])
                assert ledger.metrics(run.key).keys() == row["series"].keys()
                for metric, values in row["series"].items():
                    np.testing.assert_array_equal(ledger.series(run.key, metric), values)
        assert (len(old), len(found), sum(ledger.counts().values())) == (RUNS, KEPT, KEPT)
    assert sorted(states for states in found.values() if len(states) > 1) == [["done", "pending"]]
    if read_only:
        assert content(study) == before
    else:
        assert check_study(study).lines == []
        again = dump(study)
        Ledger.open(study).close()
        assert dump(study) == again


def test_the_same_runs_in_todays_terms_are_there(study: Path) -> None:
    asked = [spec(method, seed) for method in SETS for seed in (0, 1)]
    with Ledger.open(study) as ledger:
        assert ledger.add([*asked, *INTERRUPTED]) == (0, len(asked) + len(INTERRUPTED))
        assert {ledger.get(each.key).state for each in asked} == {"done"}


def test_what_is_converted_and_what_is_not() -> None:
    with Ledger.open(OLD, read_only=True) as ledger:
        some = {
            (run.spec.method, run.spec.rules): run.spec.hyper
            for run in ledger.runs()
            if run.spec.seed == 3 or run.spec.rules == 1
        }
        [agent] = [run.spec for run in ledger.runs() if run.spec.problem.startswith("ppo/")]
    assert some[("upgd", 1)]["lr"] == 0.03  # has been another run since rules 2
    assert some[("upgd", 3)] == {"lr": 0.005, "sigma": 0.01, "weight_decay": 0.0, **TRACES}
    assert some[("theirs", 3)] == {"lr": 0.1}
    # Users' methods may call rules of upgd, which have changed.
    assert some[("own", 2)] == {"lr": 0.1}
    assert some[("mine", 2)]["lr"] == 0.01
    assert (agent.rules, agent.hyper["lr"], agent.hyper["eps"]) == (3, 1.5e-4, 1e-5)


@pytest.mark.parametrize("hyper", [{"lr": 5e-324}, {"weight_decay": 1.7e308}])
def test_what_has_no_exact_counterpart_is_left_alone(hyper: dict[str, float]) -> None:
    """Half of the smallest number is 0, and twice the largest is infinite."""
    old = {"hyper": {"lr": 1.0, "weight_decay": 0.0, **hyper}, "method": "upgd", "rules": 2}
    with pytest.raises(ValueError, match=r"no exact counterpart|JSON compliant"):
        whole_step_json(json.dumps(old))


def test_show_prints_what_it_printed(study: Path) -> None:
    found = json.loads(call("show", study, "--json").output)["results"]
    assert len(found) == len(THEN["shown"]) > len(SETS)
    other = {"hyper", "iqm", "low", "high"}  # intervals were bootstrapped, also of two seeds
    for now, then in zip(found, THEN["shown"], strict=True):
        assert {k: now[k] for k in now.keys() - other} == {k: then[k] for k in then.keys() - other}
        if "upgd" not in now["method"]:
            assert now["hyper"] == then["hyper"]


# ----------------------------------------------------------------------------------- going on
def series_of(ledger: Ledger, key: str) -> dict[str, Any]:
    return {metric: ledger.series(key, metric) for metric in ledger.metrics(key)}


@pytest.mark.parametrize(
    ("engine", "done", "left"),
    [pytest.param("eager", 0, 7, marks=pytest.mark.slow), ("batched", 1, 8)],
)
def test_runs_go_on_to_the_same_end(
    study: Path, tmp_path: Path, engine: str, done: int, left: int
) -> None:
    """Interrupted runs end as in the old version; runs that are done again give the old results.

    Bit for bit, if runs of SGD do: its rule has not changed, so elsewhere the machine's roundings
    are others.
    """
    pytest.importorskip("numba")
    started = {
        path.stem: checkpoint_facts(path)["started"] for path in (study / "checkpoints").iterdir()
    }
    assert started.keys() == THEN["continued"].keys()
    with Ledger.open(study) as ledger, Ledger.open(tmp_path / "again") as again:
        asked = [spec(method, done) for method in SETS]
        again.add(asked)
        assert work(again, engine, workers=0).done == len(asked)
        results = [(series_of(again, one.key), series_of(ledger, one.key)) for one in asked]
        now, then = results[0]
        exact = all(np.array_equal(now[metric], then[metric]) for metric in now)
        for now, then in results:
            assert_same(now, then, exact)
        work(ledger, engine, workers=0, where={"seed": left})
        for key, series in THEN["continued"].items():
            run = ledger.get(key)
            assert run.spec in INTERRUPTED
            if run.spec.seed == left:
                assert run.result is not None
                assert run.result.started == started[key]  # and not when it was resumed
                expected = {metric: np.float32(values) for metric, values in series.items()}
                assert_same(series_of(ledger, run.key), expected, exact)


@forking
@pytest.mark.slow
def test_killed_in_the_middle_of_it(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_kills_lose_nothing(study, tmp_path, monkeypatch, KEPT, checkpoints=4)


# ------------------------------------------------------------------------------------- damage
@pytest.mark.parametrize("table", ["results", "runs"])
def test_what_was_damaged_stays_so_and_can_be_mended(study: Path, table: str) -> None:
    damaged = next(row["key"] for row in rows(OLD) if row["method"] == "upgd" and row["summary"])
    column = {"results": "wall", "runs": "attempts"}[table]
    db = sqlite3.connect(study / "ledger.sqlite")
    db.execute(f"UPDATE {table} SET {column} = {column} + 1 WHERE key = ?", (damaged,))
    db.commit()
    db.close()
    for mended in (copied(study, study.with_name("mended")), study):  # of version 5, then of 6
        with Ledger.open(mended, read_only=True) as ledger, pytest.raises(DamagedError):
            list(ledger.runs())
        findings = check_study(mended)
        assert len(findings.lines) == 1
        repair_study(mended, findings)
        assert check_study(mended).lines == []
        with Ledger.open(mended, create=False) as ledger:
            runs = list(ledger.runs())
            assert all(run.key == run.spec.key for run in runs)
            state = ledger.get(damaged).state
            assert state == ("pending" if table == "results" else "done")
        Ledger.open(study).close()
