"""How commands work on a study: what they check first, leave behind and tell the shell."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from tests.ledgers import posix, spec
from tests.running import work
from tests.test_ledger_disks import no_file_larger_than
from upgd.cli import app
from upgd.ledger import Ledger, RunSpec, StudyError
from upgd.rl.runs import PREFIX
from upgd.study import run
from upgd.study.execution import Tally
from upgd.study.options import Options

TOY = "toy-changing-inputs"
OPTIONS = {"window": 2, "hidden": "4"}
SHORT = ("--steps", "4", "--window", "2", "--hidden", "4", "--engine", "eager")


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def toy(seed: int = 0, **options: Any) -> RunSpec:
    return RunSpec(TOY, "sgd", {"lr": 0.01, "weight_decay": 0.0}, seed, 4, {**OPTIONS, **options})


def fail_all(folder: Path, specs: list[RunSpec]) -> None:
    """A study in which these runs have failed."""
    with Ledger.open(folder) as ledger:
        ledger.add(specs)
        for claim in ledger.claim("me", 60, limit=len(specs)):
            ledger.fail(claim, "out of luck", retry=False)


# ---- runs that failed earlier
HALVING = "sweep --halving 2"


@pytest.mark.parametrize(
    "command",
    ["run", *(pytest.param(c, marks=pytest.mark.slow) for c in ("resume", "sweep", HALVING))],
)
def test_runs_that_failed_earlier_are_told_each_time(tmp_path: Path, command: str) -> None:
    fail_all(tmp_path, [toy(0), toy(1)])
    name, *more = command.split()
    arguments: tuple[Any, ...] = (name, tmp_path, "--quiet")
    if name != "resume":
        sets = ("--set", "lr=0.01", "--set", "weight_decay=0")
        arguments = (name, TOY, "sgd" if name == "run" else "sgdw", "--seeds", "3", *SHORT, *sets)
        arguments = (*arguments, "--study", tmp_path, "--quiet", *more)
    if name == "sweep":
        fail_all(tmp_path, [RunSpec(TOY, "sgdw", toy().hyper, s, 4, OPTIONS) for s in range(2)])
    for _ in range(2):  # the second time there is nothing left to do
        done = call(*arguments)
        assert done.exit_code == 1, done.output
        assert f"'upgd resume {tmp_path} --retry'" in done.stderr.replace("\n", "")
    assert call("resume", tmp_path, "--quiet", "--engine", "eager", "--retry").exit_code == 0
    again = call(*arguments)
    assert (again.exit_code, again.stderr) == (0, "")


def test_runs_of_others_that_failed_are_not_this_command_s(tmp_path: Path) -> None:
    fail_all(tmp_path, [toy(7)])
    done = call("run", TOY, "sgd", "--seeds", "1", *SHORT, "--study", tmp_path, "--quiet")
    assert (done.exit_code, done.stderr) == (0, "")


# ---- commands that are refused

WRONG: list[tuple[str, ...]] = [
    ("--engine", "foo"),
    ("--on", "cluster"),
    ("--on", "ray://"),
    ("--device", "fpga"),
    ("--on", "ray", "--device", "fpga"),
    ("--workers", "0"),
    ("--checkpoint-seconds", "nan"),
    ("--checkpoint-seconds", "-1"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=" ".join)
@pytest.mark.parametrize("command", ["run", "sweep"])
def test_a_refused_command_leaves_no_study(
    tmp_path: Path, command: str, wrong: tuple[str, ...]
) -> None:
    study = tmp_path / "study"
    refused = call(command, TOY, "upgd", "--seeds", "1", *SHORT, "--study", study, *wrong)
    assert refused.exit_code == 2, refused.output
    assert refused.stderr.startswith("upgd: ")
    assert not study.exists()


@pytest.mark.parametrize("wrong", WRONG, ids=" ".join)
def test_a_refused_resume_changes_nothing(tmp_path: Path, wrong: tuple[str, ...]) -> None:
    fail_all(tmp_path, [toy()])
    assert call("resume", tmp_path, "--retry", *wrong).exit_code == 2
    with Ledger.open(tmp_path, read_only=True) as ledger:
        assert ledger.get(toy().key).state == "failed"


def test_agents_on_ray_are_refused_before_failed_runs_are_tried_again(tmp_path: Path) -> None:
    agent = spec(problem=f"{PREFIX}Pendulum-v1", method="adam")
    fail_all(tmp_path, [agent])
    refused = call("resume", tmp_path, "--retry", "--on", "ray")
    assert refused.exit_code == 2, refused.output
    assert "leave out --on" in refused.stderr
    with Ledger.open(tmp_path, read_only=True) as ledger:
        assert ledger.get(agent.key).state == "failed"


# ---- ledgers without a study


def _empty(path: Path) -> None:
    path.touch()


def _header_only(path: Path) -> None:
    """As a process leaves it that is killed after its first write."""
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode=WAL")
    db.close()
    assert path.stat().st_size > 0


@pytest.mark.parametrize("make", [_empty, _header_only])
def test_an_empty_ledger_is_no_study(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "ledger.sqlite")
    before = (tmp_path / "ledger.sqlite").read_bytes()
    for command in ("show", "export", "plot", "resume", "best", "report", "watch"):
        refused = call(command, tmp_path)
        assert refused.exit_code == 2, refused.output
        assert "there is no study in" in refused.stderr
        assert (tmp_path / "ledger.sqlite").read_bytes() == before
    arguments = ("run", TOY, "sgd", "--seeds", "1", *SHORT, "--study", tmp_path, "--quiet")
    assert call(*arguments).exit_code == 0  # what was begun can be completed
    assert call("show", tmp_path).exit_code == 0


# ---- a full disk


@posix
def test_after_a_full_disk_the_run_is_taken_over_at_once(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add([toy()])
        with contextlib.ExitStack() as stack:

            def fill(_: Any) -> None:
                stack.enter_context(no_file_larger_than(0))

            with pytest.raises(StudyError):
                work(ledger, on_progress=fill)
        assert len(ledger.leases()) == 1  # it could not be given back
        assert work(ledger).done == 1
    assert not list((tmp_path / "workers").iterdir())


@posix
def test_a_process_at_work_keeps_its_run(tmp_path: Path) -> None:
    """Also one that could not give its run back still has it while it is at work again."""
    with Ledger.open(tmp_path) as ledger:
        ledger.add([toy()])
        seen = []

        def look(_: Any) -> None:
            with Ledger.open(tmp_path) as other:
                seen.append(work(other))

        assert work(ledger, on_progress=look).done == 1
        assert seen
        assert all(tally == Tally() for tally in seen)


def test_one_run_under_way_is_told_in_the_singular(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add([toy()])
        ledger.claim("somebody", 600)
    told = call("resume", tmp_path, "--quiet").stderr
    assert "1 run is under way in another process" in told


# ---- workers


@pytest.mark.parametrize(("asked", "runs", "begun"), [(64, 2, [2]), (2, 3, [2]), (64, 0, [])])
def test_there_are_no_more_workers_than_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int, runs: int, begun: list[int]
) -> None:
    counts: list[int] = []

    def make(options: Options, count: int) -> Any:
        counts.append(count)
        raise StudyError("they are not needed")

    monkeypatch.setattr(run, "make_pool", make)
    with Ledger.open(tmp_path) as ledger:
        ledger.add([toy(100)])
        work(ledger)  # a run that is over needs no worker
        ledger.add([toy(seed) for seed in range(runs)])
        keys = [toy(seed).key for seed in (100, *range(runs))]
        with contextlib.suppress(StudyError):
            work(ledger, workers=asked, where=None if asked == 64 else {"key": keys})
    assert counts == begun
