"""Whole studies, killed at random times and at every crash point, end as if nothing had been."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
if os.name == "nt":
    pytest.skip("needs fork and SIGKILL", allow_module_level=True)

from tests.killing import HEALTHY, POISON, SMALL, TOY, Server, results
from tests.running import work
from upgd.engine import EagerRun
from upgd.ledger import Ledger, load_checkpoint


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        assert running.run("cli", ["--version"]) == 0
        yield running


def check_tables(folder: Path) -> None:
    """What holds of every ledger at all times."""
    db = sqlite3.connect(folder / "ledger.sqlite")
    try:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        over = "SELECT key FROM runs WHERE state IN ('done', 'diverged') ORDER BY key"
        held = "SELECT key FROM runs WHERE state = 'running' ORDER BY key"
        given = "SELECT key FROM results ORDER BY key"  # a second result has no place to be
        leases = "SELECT key FROM leases ORDER BY key"
        assert db.execute(over).fetchall() == db.execute(given).fetchall()
        assert db.execute(held).fetchall() == db.execute(leases).fetchall()
    finally:
        db.close()


def finished(folder: Path) -> dict[str, Any]:
    """The runs that are over, with all that the ledger says about them."""
    given = results(folder)
    with Ledger.open(folder, create=False, read_only=True) as ledger:
        runs = {run.key: run for run in ledger.runs() if run.result is not None}
    return {key: (run, given[key]) for key, run in runs.items()}


def is_begun(folder: Path, count: int) -> bool:
    if not (folder / "ledger.sqlite").exists():
        return False
    with Ledger.open(folder) as ledger:
        return sum(ledger.counts().values()) == count


@pytest.mark.slow
@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_one_study_killed_at_random_times(server: Server, tmp_path: Path, kills: int) -> None:
    steps = 25 * kills
    options = ["--quiet", "--engine", "eager", "--checkpoint-seconds", "0"]
    arguments = ["run", TOY, "sgd", "upgd", "--seeds", "2", "--window", "50", *options]
    arguments += ["--hidden", "32-16", "--steps", str(steps), "--study"]
    assert server.run("cli", [*arguments, str(tmp_path / "whole")]) == 0
    killed = tmp_path / "killed"
    resume = ["resume", str(killed), *options]
    rng, seen, landed = random.Random(0), {}, set()
    for number in range(kills):
        begun = is_begun(killed, 4)
        command = resume if begun else [*arguments, str(killed)]
        if number % 3 == 0:  # while it starts, perhaps
            when = 0, rng.uniform(0.0, 0.02)
        else:  # in mid-run; together not much more than half the steps of the study
            when = rng.randint(1, 4 * steps // kills), rng.uniform(0.0, 0.005)
        assert server.run("kill", command, *when) == -signal.SIGALRM
        if begun:
            check_tables(killed)
            with Ledger.open(killed, read_only=True) as ledger:
                landed.add(tuple(ledger.counts().values()))
        now = finished(killed) if is_begun(killed, 4) else {}
        assert now.items() >= seen.items()  # nothing that was finished is lost, or changed
        seen = now
    assert any(counts[1] for counts in landed)  # kills did hit runs under way
    last = [sys.executable, "-m", "upgd.cli", *resume]
    done = subprocess.run(last, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert finished(killed).items() >= seen.items()
    assert results(killed) == results(tmp_path / "whole")
    assert [state for _, state, _, _ in results(killed).values()] == ["done"] * 4
    check_tables(killed)
    assert not list((killed / "checkpoints").glob("*.npz"))
    assert not list((killed / "workers").iterdir())


@pytest.mark.parametrize(
    "how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupt_saves_a_checkpoint_and_gives_the_run_back(
    server: Server, tmp_path: Path, how: signal.Signals
) -> None:
    """Ctrl-C in the middle of a step: it is finished, the run is kept, nothing is held."""
    arguments = ["run", TOY, "upgd", "--seeds", "1", "--steps", "80", "--window", "20"]
    arguments += ["--hidden", "32-16", "--quiet", "--engine", "eager", "--study"]
    assert server.run("cli", [*arguments, str(tmp_path / "whole")]) == 0
    stopped = tmp_path / "stopped"
    for step in (0, 33):
        command = [*arguments, str(stopped)]
        before = saved_step(stopped)
        assert server.run("signal", command, max(step, before), how) == 130
        with Ledger.open(stopped) as ledger:
            assert ledger.counts()["pending"] == 1
            assert ledger.leases() == []
        assert saved_step(stopped) > max(step, before)
        if saved_step(stopped) == 80:
            break
    assert server.run("cli", [*arguments, str(stopped)]) == 0
    assert results(stopped) == results(tmp_path / "whole")


def saved_step(study: Path) -> int:
    files = list((study / "checkpoints").glob("*.npz"))
    return max((load_checkpoint(file)[1]["run"]["step"] for file in files), default=0)


def test_a_second_interrupt_keeps_nothing_of_a_step_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = EagerRun._learn

    def interrupted(run: EagerRun) -> None:
        learn(run)
        if run.step == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(EagerRun, "_learn", interrupted)
    with Ledger.open(tmp_path) as ledger:
        ledger.add(SMALL[:1])
        with pytest.raises(KeyboardInterrupt):
            work(ledger)
        assert ledger.counts()["pending"] == 1
        assert ledger.leases() == []
    assert not list((tmp_path / "checkpoints").iterdir())


def crash_points(server: Server, folder: Path, log: Path) -> list[str]:
    assert server.run("crash", str(folder), -1, str(log)) == 0
    names: list[str] = json.loads(log.read_text())
    return names


def check_resumed(server: Server, folder: Path, log: Path, expected: dict[str, Any]) -> None:
    """Go on without a crash: the study ends as the uninterrupted one."""
    assert server.run("crash", str(folder), -1, str(log)) == 0
    check_tables(folder)
    assert results(folder) == expected
    with open(folder / "runs.csv", newline="") as file:
        assert [row["key"] for row in csv.DictReader(file)] == list(expected)
    left = {file.stem for file in (folder / "checkpoints").glob("*.npz")}
    assert left == set()
    assert not list((folder / "workers").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_a_whole_study_killed_before_and_after_every_durable_write(
    server: Server, tmp_path: Path, every: int
) -> None:
    log = tmp_path / "log"
    names = crash_points(server, tmp_path / "whole", log)
    expected = results(tmp_path / "whole")
    states = [expected[spec.key][1] for spec in SMALL]
    assert states == ["done", "diverged", "failed"]
    for write in ("migrate", "add", "claim", "hear", "settle", "fail"):
        assert {f"{write}: before begin", f"{write}: before commit"} <= set(names)
        assert f"{write}: after commit" in names
    for write in ("write: before file", "write: before sync", "write: before replace"):
        assert names.count(write) >= 2  # a checkpoint and a table
    assert {"write: after replace", "write: after sync", "forget: before removal"} <= set(names)
    for number, name in [*enumerate(names)][::every]:
        folder = tmp_path / str(number)
        assert server.run("crash", str(folder), number, str(log)) == -signal.SIGKILL, name
        if is_begun(folder, len(SMALL)):
            check_tables(folder)
        check_resumed(server, folder, log, expected)


@pytest.mark.slow
def test_killed_again_at_every_point_while_resuming(server: Server, tmp_path: Path) -> None:
    """The first kill comes in mid-run: what follows takes the run over from a dead process."""
    log = tmp_path / "log"
    names = crash_points(server, tmp_path / "whole", log)
    expected = results(tmp_path / "whole")
    first = names.index("hear: after commit")
    assert server.run("crash", str(tmp_path / "once"), first, str(log)) == -signal.SIGKILL
    names = crash_points(server, tmp_path / "once", log)
    assert "evict: after commit" in names
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        assert server.run("crash", str(folder), first, str(log)) == -signal.SIGKILL
        assert server.run("crash", str(folder), number, str(log)) == -signal.SIGKILL, name
        check_resumed(server, folder, log, expected)


def test_a_run_that_kills_its_process_is_given_up_and_the_rest_is_done(
    server: Server, tmp_path: Path
) -> None:
    for _ in range(5):
        assert server.run("poison", str(tmp_path)) == -signal.SIGKILL
    assert server.run("poison", str(tmp_path)) == 0
    with Ledger.open(tmp_path) as ledger:
        poisoned, healthy = ledger.get(POISON.key), ledger.get(HEALTHY.key)
        assert (poisoned.state, poisoned.attempts) == ("failed", 5)
        assert "gave up after 5 attempts" in str(poisoned.error)
        assert healthy.state == "done"
    resume = ["resume", str(tmp_path), "--quiet", "--engine", "eager"]
    assert server.run("cli", resume) == 1  # one has failed still
    assert server.run("cli", [*resume, "--retry"]) == 0
    with Ledger.open(tmp_path) as ledger:
        assert ledger.get(POISON.key).state == "done"  # this time nothing kills it
