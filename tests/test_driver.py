"""Drivers and pools: whatever becomes of workers, each run has its one result."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")
if os.name == "nt":
    pytest.skip("needs signals", allow_module_level=True)

from tests.killing import results
from tests.ledgers import Clock, CrashError, crash_at, raise_crash
from tests.pools import (
    OPTIONS,
    PROBLEM,
    Holds,
    Watched,
    held_command,
    kill_process,
    misbehave,
    processes_of,
    small,
)
from tests.running import drive, work, work_stacks
from tests.simulated import Fate, SimulatedPool
from tests.test_kills import check_tables
from tests.test_ledger_disks import no_file_larger_than
from tests.waiting import PATIENCE, states, wait_for
from upgd.ledger import Ledger, LedgerError, RunSpec, StudyError
from upgd.study.execution import Tally
from upgd.study.kinds import Room
from upgd.study.options import Options
from upgd.study.pools import LocalPool, _WorkerProcess
from upgd.study.worker import Advanced, Died, Finished, Job, Ready

EAGER = [
    RunSpec(PROBLEM, "sgd", {"lr": 0.01}, 0, 20, {**OPTIONS, "batch": 5}),  # no stack has it
    RunSpec(PROBLEM, "sgd", {"lr": 0.01}, 0, 20, {"unknown": 1}),  # fails
    RunSpec(PROBLEM, "sgd", {"lr": 1e25}, 0, 100, OPTIONS),  # diverges
]


def alone(folder: Path, specs: list[RunSpec]) -> dict[str, Any]:
    """What one process gives."""
    with Ledger.open(folder) as ledger:
        ledger.add(specs)
        work_stacks(ledger)
        work(ledger)
    return results(folder)


def driven(folder: Path, specs: list[RunSpec], pool: Any, **options: Any) -> Tally:
    with Ledger.open(folder) as ledger:
        ledger.add(specs)
        tally = drive(ledger, pool, **options)
        assert ledger.leases() == []
    check_tables(folder)
    return tally


def saved(folder: Path) -> dict[str, int]:
    """A study's checkpoints, and when they were written."""
    return {file.stem: file.stat().st_mtime_ns for file in folder.glob("checkpoints/*.npz")}


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    with closing(LocalPool(2)) as running:
        yield running


# --------------------------------------------------------------------------- real workers
def test_a_pool_gives_what_one_process_gives(tmp_path: Path, pool: LocalPool) -> None:
    specs = [*small(12), *EAGER]
    expected = alone(tmp_path / "alone", specs)
    told: list[Any] = []
    tally = driven(tmp_path / "pool", specs, pool, on_progress=told.append)
    assert results(tmp_path / "pool") == expected
    assert (tally.done, tally.diverged, tally.failed) == (13, 1, 1)
    assert "unknown option" in tally.errors[0]
    assert not list((tmp_path / "pool" / "checkpoints").iterdir())
    assert not list((tmp_path / "pool" / "workers").iterdir())


@pytest.mark.slow
def test_runs_of_workers_that_die_or_freeze_go_on_from_their_checkpoints(tmp_path: Path) -> None:
    specs = small(8, steps=250, restart=True)  # chunks of 50
    expected = alone(tmp_path / "alone", specs)
    holds, clock, frozen = Holds(tmp_path / "holds"), Clock(), set[int]()

    def strike(events: list[tuple[int, Any]]) -> None:
        if frozen:
            holds.release(*holds.waiting())  # those that come in their place
            if frozen & local._hands.keys() and any(worker not in frozen for worker, _ in events):
                clock.time += 1.9  # the others are heard, and it is not
        elif len(holds.waiting()) == 2 and len(saved(tmp_path / "pool")) == 8:
            first, second = watched.busy
            kill_process(local, first, signal.SIGKILL)
            kill_process(local, second, signal.SIGSTOP)
            frozen.add(second)

    with closing(LocalPool(2, at_start=holds.at_start)) as local:
        watched = Watched(local, at_turn=strike)
        options = {"checkpoint_seconds": 0.0, "silence": 4.0, "clock": clock}
        tally = driven(tmp_path / "pool", specs, watched, **options)
    assert results(tmp_path / "pool") == expected
    for words in ("killed (SIGKILL); its 4", "its worker sent nothing for 4 s; its 4"):
        assert sum(words in note for note in tally.notes) == 1, tally.notes
    assert [len(job.saved) for _, job in watched.jobs] == [0, 0, 4, 4]


@pytest.mark.slow
def test_what_ends_its_worker_fails_alone_and_the_rest_is_done(tmp_path: Path) -> None:
    """One kills its worker, one hangs, one is too large, one is wrong; all share a stack."""
    odd = [RunSpec(PROBLEM, "sgd", {}, seed, 100, OPTIONS) for seed in (1001, 1002, 1003, 1004)]
    odd = [RunSpec(s.problem, s.method, s.hyper, s.seed, 100, CHUNKS) for s in odd]
    specs = [*(RunSpec(PROBLEM, "upgd", {}, s, 100, CHUNKS) for s in range(4)), *odd]
    holds, clock = Holds(tmp_path / "holds"), Clock()

    def pass_time(_: Any) -> None:
        """Once nobody does anything but hang."""
        busy = {local._hands[worker].process.pid for worker in watched.busy}
        if busy and busy <= set(holds.waiting()):
            clock.time += 7.0

    with closing(LocalPool(2, at_start=partial(misbehave, str(holds.folder)))) as local:
        watched = Watched(local, at_turn=pass_time)
        options = {"checkpoint_seconds": 1e6, "stall": 6.0, "clock": clock}
        tally = driven(tmp_path, specs, watched, retries=1, **options)
    assert states(tmp_path) == {"done": 4, "failed": 4}
    with Ledger.open(tmp_path) as ledger:
        errors = [str(ledger.get(spec.key).error) for spec in odd]
    assert "killed (SIGKILL), 2 times without progress" in errors[0]
    assert "made no step for 6 s, 2 times without progress" in errors[1]
    assert errors[2] == "out of memory, alone, 2 times"
    assert errors[3] == "ZeroDivisionError: odd"
    assert tally.failed == 4
    assert len(tally.errors) == 4


class Slow:
    """A process of which it takes ten seconds to learn how it ended."""

    exitcode: int | None = None

    def join(self, timeout: float = 1e9) -> None:
        self.exitcode = -signal.SIGKILL if timeout > 10.0 else None


def test_how_a_worker_ended_is_told_on_a_busy_machine() -> None:
    ours, theirs = multiprocessing.Pipe()
    told: list[Any] = []
    _WorkerProcess(Slow(), ours, told.append)
    theirs.close()
    wait_for(lambda: told)
    assert told == [Died("its worker was killed (SIGKILL)")]


CHUNKS = {**OPTIONS, "restart": True}


@pytest.mark.slow
def test_two_drivers_share_a_study(
    tmp_path: Path, pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``tests/test_sweep_processes.py`` has the same with two commands, which is slow."""
    monkeypatch.setenv("UPGD_THREADS", "1")  # so that one job does not take all runs
    specs = small(80, steps=200, restart=True)
    expected = alone(tmp_path / "alone", specs)

    def other() -> None:
        with Ledger.open(tmp_path / "both") as ledger, closing(LocalPool(1)) as second:
            tallies.append(drive(ledger, Watched(second, begin)))

    def begin(worker: int, event: Any) -> None:
        if isinstance(event, Finished):
            begun.set()
            assert joined.wait(PATIENCE)

    def join(_: Any) -> None:
        if watched.jobs:
            joined.set()

    tallies: list[Tally] = []
    begun, joined = threading.Event(), threading.Event()
    watched = Watched(pool, at_turn=join)
    with Ledger.open(tmp_path / "both") as ledger:
        ledger.add(specs)
        thread = threading.Thread(target=other)
        thread.start()
        assert begun.wait(PATIENCE)
        tallies.append(drive(ledger, watched))
        thread.join()
    assert results(tmp_path / "both") == expected
    assert sorted(tally.done > 0 for tally in tallies) == [True, True]  # each had its part
    assert sum(tally.done for tally in tallies) == 80
    check_tables(tmp_path / "both")


# ------------------------------------------------------------------------------ interrupts
COMMAND = ["run", PROBLEM, "upgd", "--hidden", "9-7", "--task-length", "50", "--restart"]
COMMAND += ["--seeds", "4", "--steps", "1500", "--quiet", "--workers", "2"]
COMMAND += ["--checkpoint-seconds", "0"]


def signalled(folder: Path, first: int, second: int | None = None) -> tuple[int, str]:
    """Go on with a study, and send a signal once all runs are under way and saved anew.

    A second one is sent when all workers have heard of the first, and none has saved its runs.
    """
    holds, before = Holds(Path(tempfile.mkdtemp()) / "holds"), saved(folder)
    command = held_command(holds, *COMMAND, "--study", folder)
    process = subprocess.Popen(**command, stderr=subprocess.PIPE, text=True)

    def at_work() -> bool:
        assert process.poll() is None
        return len(saved(folder).items() - before.items()) == 4 and len(holds.waiting()) == 2

    try:
        wait_for(at_work)
        if first == signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, first)  # as terminals and schedulers do
            wait_for(lambda: len(holds.stopped()) == 2)
            if second is None:
                holds.release(*holds.waiting())
            else:
                os.killpg(process.pid, second)
        _, said = process.communicate(timeout=PATIENCE)
        wait_for(lambda: not processes_of(process.pid))  # workers end with their driver
        return process.returncode, said
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(holds.folder.parent)


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.slow
@pytest.mark.parametrize("kill", [False, True])
def test_interrupts_and_kills_are_resumed(tmp_path: Path, pool: LocalPool, kill: bool) -> None:
    """The first interrupt saves and gives back, a second one stops at once."""
    sent = [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]]
    for signals in [[signal.SIGINT], *sent] if kill else sent:
        code, said = signalled(tmp_path, *signals)
        assert code == 130, said
        assert "Traceback" not in said
        assert "its worker" not in said
        assert states(tmp_path) == {"pending": 4}
        assert len(list((tmp_path / "checkpoints").glob("*.npz"))) == 4  # all were saved
        check_tables(tmp_path)
    if kill:
        code, _ = signalled(tmp_path, signal.SIGKILL)
        assert code == -signal.SIGKILL
        assert states(tmp_path)["running"]
    watched = Watched(pool)
    driven(tmp_path, [], watched)
    assert states(tmp_path) == {"done": 4}
    assert all(len(job.saved) == len(job.specs) for _, job in watched.jobs)
    with Ledger.open(tmp_path) as ledger:
        specs = [run.spec for run in ledger.runs()]
    assert results(tmp_path) == alone(tmp_path / "alone", specs)


# ------------------------------------------------------------------------------------ disks
@pytest.mark.parametrize("room", [0, 20_000])
def test_a_full_disk_ends_the_work_and_it_goes_on_once_there_is_space(
    tmp_path: Path, pool: LocalPool, room: int
) -> None:
    """Ledger and checkpoints cannot grow: one line, what was done stays done, and resumes."""
    specs = small(12, steps=300, restart=True)
    with Ledger.open(tmp_path / "full") as ledger:
        ledger.add(specs)
        begun = Watched(pool)
        with no_file_larger_than(room), pytest.raises(StudyError) as caught:
            drive(ledger, begun, checkpoint_seconds=0.0)
        assert "\n" not in str(caught.value)
        assert "the disk is full or failing" in str(caught.value) or "cannot write" in str(
            caught.value
        )
        with no_file_larger_than(room), Ledger.open(tmp_path / "full", read_only=True) as reader:
            assert sum(reader.counts().values()) == 12
            assert len(list(reader.runs())) == 12
    tally = driven(tmp_path / "full", [], pool)
    assert tally.failed == 0
    assert states(tmp_path / "full") == {"done": 12}
    assert results(tmp_path / "full") == alone(tmp_path / "alone", specs)


def test_a_folder_that_becomes_read_only(pool: LocalPool) -> None:
    """As a user who is not root, for whom permissions count."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Ledger.open(folder) as ledger:
            ledger.add(small(4))
        with read_only(folder):
            with pytest.raises(LedgerError, match="cannot be opened or written") as caught:
                Ledger.open(folder)
            assert "\n" not in str(caught.value)
            with Ledger.open(folder, read_only=True) as ledger:
                assert ledger.counts()["pending"] == 4
                with pytest.raises(StudyError, match="cannot keep checkpoints") as caught:
                    drive(ledger, pool)
                assert "\n" not in str(caught.value)
        assert driven(folder, [], pool).done == 4


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    root = os.geteuid() == 0
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o555)
    if root:
        os.seteuid(65534)
    try:
        if not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
            pytest.skip("temporary folders are private here")
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)
        for file in folder.iterdir():
            file.chmod(0o644)


# ------------------------------------------------------------------------ simulated workers
class Timed:
    """A ledger and a pool on one clock."""

    def __init__(self, folder: Path, count: int, **options: Any) -> None:
        self.pool = SimulatedPool(seconds=lambda job: 100.0, **options)
        self.ledger = Ledger.open(folder, now=self.pool.clock)
        self.ledger.add(small(count))

    def drive(self, **options: Any) -> Tally:
        with self.ledger as ledger:
            tally = drive(ledger, self.pool, clock=self.pool.clock, **options)
            self.counts = {state: n for state, n in ledger.counts().items() if n}
        return tally


def fate_of(seed: int, fate: Fate) -> Callable[[int, Job], Fate]:
    """What becomes of jobs with this run."""
    return lambda worker, job: fate if any(s.seed == seed for s in job.specs) else Fate()


def test_a_run_that_always_kills_its_worker_is_cornered(tmp_path: Path) -> None:
    timed = Timed(tmp_path, 16, workers=2, fate=fate_of(5, Fate("dies", 0.3)))
    tally = timed.drive()
    assert timed.counts == {"done": 15, "failed": 1}
    sizes = [len(job.specs) for job in timed.pool.jobs if any(s.seed == 5 for s in job.specs)]
    assert sizes == [8, 8, 4, 1]
    assert "4 times without progress" in tally.errors[0]


def test_progress_forgives(tmp_path: Path) -> None:
    """A worker that dies again and again, but later each time, gets its runs done."""
    timed = Timed(tmp_path, 8, workers=1, pause=10.0)
    jobs = timed.pool.jobs
    timed.pool.fate = lambda worker, job: Fate("dies", 0.4) if len(jobs) < 4 else Fate()
    assert timed.drive(retries=1).failed == 0
    assert timed.counts == {"done": 8}
    assert {len(job.specs) for job in jobs} == {8}
    assert len(jobs) == 4


def test_out_of_memory_halves_and_later_stacks_are_smaller(tmp_path: Path) -> None:
    def fate(worker: int, job: Job) -> Fate:
        return Fate("memory", 0.1) if len(job.specs) > 4 else Fate()

    timed = Timed(tmp_path, 40, workers=1, fate=fate)
    tally = timed.drive()
    assert timed.counts == {"done": 40}
    assert sum(len(job.specs) > 4 for job in timed.pool.jobs) <= 3
    assert sum("out of memory" in note for note in tally.notes) <= 3


@pytest.mark.slow
def test_a_driver_that_dies_at_any_kind_of_write_is_followed_by_one_that_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def study(folder: Path) -> Timed:
        """With checkpoints, a run that fails, and one that kills its worker."""
        timed = Timed(folder, 6, workers=2, pause=20.0)

        def fate(worker: int, job: Job) -> Fate:
            seeds = [spec.seed for spec in job.specs]
            bad = Fate("fails", 0.1) if seeds == [4] else Fate("dies", 0.5)
            return bad if 4 in seeds else Fate()

        timed.pool.fate = fate
        return timed

    names: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr("upgd.ledger.crash_points.point", names.append)
        study(tmp_path / "whole").drive()
    expected = results(tmp_path / "whole")
    assert [state for _, state, _, _ in expected.values()].count("failed") == 1
    writes = {name.split(":")[0] for name in names}
    assert {"claim", "settle", "hear", "fail", "write", "forget"} <= writes
    first = {name: number for number, name in reversed(list(enumerate(names)))}
    last = {name: number for number, name in enumerate(names)}
    for number in sorted({*first.values(), *last.values()}):
        folder = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr("upgd.ledger.crash_points.point", crash_at(number, raise_crash))
            with suppress(CrashError):
                study(folder).drive()
        study(folder).drive()
        assert results(folder) == expected
        check_tables(folder)
        left = {file.stem for file in (folder / "checkpoints").glob("*.npz")}
        assert left <= {key for key, (_, state, _, _) in expected.items() if state == "failed"}


def test_hung_workers_are_noticed_in_time(tmp_path: Path) -> None:
    hung: list[int] = []

    def fate(worker: int, job: Job) -> Fate:
        if hung:
            return Fate()
        hung.append(worker)
        return Fate("hangs", 0.5)

    timed = Timed(tmp_path, 8, workers=1, fate=fate)
    timed.drive(silence=20.0)
    assert timed.counts == {"done": 8}
    # Begin, hang at half time, be noticed, begin anew (there was no checkpoint), finish.
    assert timed.pool.clock.now <= 10 + 50 + 20 + 10 + 100 + 5


def test_claims_are_kept_while_runs_take_long(tmp_path: Path) -> None:
    timed = Timed(tmp_path, 8, workers=1)
    timed.pool.seconds = lambda job: 10_000.0
    assert timed.drive(lease_seconds=60.0).done == 8


def test_runs_that_another_took_are_dropped(tmp_path: Path) -> None:
    timed = Timed(tmp_path, 8, workers=1)
    timed.pool.seconds = lambda job: 1000.0

    def steal(worker: int, event: Any) -> None:
        if isinstance(event, Advanced) and not stolen:
            with Ledger.open(tmp_path, now=timed.pool.clock) as other:
                [lease, *_] = other.leases()
                other.evict(lease.owner)
                stolen.extend(other.claim("thief", 1e6, limit=3))

    stolen: list[Any] = []
    watched = Watched(timed.pool, steal)
    with timed.ledger as ledger:
        tally = drive(ledger, watched, clock=timed.pool.clock, lease_seconds=60.0)
        assert ledger.counts()["running"] == 3
    assert tally.lost == 8
    assert tally.done == 5  # given back by the thief's eviction, and claimed again


def test_a_worker_with_another_upgd_is_refused(tmp_path: Path) -> None:
    timed = Timed(tmp_path, 2, workers=1)
    events = timed.pool.events
    old = Ready(Room(1, 1 << 30), ("0.0.1", 1))
    timed.pool.events = lambda timeout: [(w, old) for w, _ in events(timeout)]  # type: ignore[method-assign]
    with pytest.raises(StudyError, match="install the same"):
        timed.drive()


def test_workers_that_never_begin_end_the_work(tmp_path: Path) -> None:
    timed = Timed(tmp_path, 2, workers=1, starting=1e6)
    with pytest.raises(StudyError, match="no worker started"):
        timed.drive()
    timed = Timed(tmp_path, 2, workers=1)
    events = timed.pool.events
    gone = Died("its worker ended with exit code 1")
    timed.pool.events = lambda timeout: [(w, gone) for w, _ in events(timeout)] or [(0, gone)]  # type: ignore[method-assign]
    with pytest.raises(StudyError, match="before they start"):
        timed.drive()


def test_a_driver_that_stopped_for_a_while_blames_no_worker(tmp_path: Path) -> None:
    timed = Timed(tmp_path, 8, workers=1)

    def sleep(worker: int, event: Any) -> None:
        if isinstance(event, Advanced) and event.step == 50:
            timed.pool.clock.now += 1000.0

    with timed.ledger as ledger:
        drive(ledger, Watched(timed.pool, sleep), clock=timed.pool.clock, silence=20.0)
    assert len(timed.pool.jobs) == 1


@pytest.mark.parametrize("on", ["", "cluster", "ray:/host"])
def test_pools_that_do_not_exist(on: str) -> None:
    with pytest.raises(ValueError, match="on is local, ray or ray://host:port"):
        Options(on=on)


def test_without_ray_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "upgd.study.ray_pool", raising=False)
    with pytest.raises(ImportError, match=r"Ray is not installed; pip install 'ray"):
        Options(on="ray")


SCRIPT = """
import sys, torch
from upgd import lab


class Twice(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        super().step()


study = lab.Study(sys.argv[1], quiet=True, workers=2)
study.run("toy-changing-inputs", [Twice], seeds=2, steps=4, window=2, hidden="4", lr=0.01)
print(study.tally.done)
"""


@pytest.mark.slow
def test_a_script_without_a_guard_starts_workers_once(tmp_path: Path) -> None:
    """Workers do not import the main program again; a class in it goes to them by value."""
    pytest.importorskip("cloudpickle")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "study")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "2\n", done.stderr
