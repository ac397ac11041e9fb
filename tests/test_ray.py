"""Studies on a real Ray cluster of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

pytest.importorskip("numba")
pytest.importorskip("ray")
os.environ["RAY_AUTH_MODE"] = "disabled"

from tests.killing import results
from tests.pools import processes_of, small
from tests.test_driver import alone, driven
from tests.test_kills import check_tables
from tests.waiting import comes, states, wait_for
from upgd.study import Ledger, StudyError
from upgd.study.ray_pool import RayPool


def workers_of(session: int) -> list[int]:
    """The actors of a cluster that was started in this session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ProcessLookupError, ValueError):
            if os.getsid(int(folder.name)) == session:
                name = (folder / "cmdline").read_bytes()
                found += [int(folder.name)] if b"ray::_Servant" in name else []
    return found


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def kill_at_work(session: int, study: Path, told: Callable[[], int]) -> None:
    """Kill a worker that has runs to do, which the driver must tell.

    All that have begun are stopped first, so that they do not finish meanwhile. One that has no
    runs is not missed, and one that has just begun is not stopped: then it is tried again.
    """
    before, deadline = told(), time.monotonic() + 90.0
    while told() == before:
        assert time.monotonic() < deadline
        workers = workers_of(session)
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.5)
        while workers and states(study).get("running", 0) and told() == before:
            os.kill(workers.pop(), signal.SIGKILL)
            comes(lambda: told() > before, seconds=10.0)
        for pid in workers:
            os.kill(pid, signal.SIGCONT)


def stopped_at_work(driver: subprocess.Popen[bytes], study: Path, done: int) -> bool:
    """Stop a driver that has so many runs done and others under way; else it goes on."""
    assert driver.poll() is None
    driver.send_signal(signal.SIGSTOP)
    found = states(study)
    if found.get("done", 0) >= done and found.get("running", 0):
        return True
    driver.send_signal(signal.SIGCONT)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize("runs", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_two_workers_are_killed_and_the_driver_is_restarted(tmp_path: Path, runs: int) -> None:
    specs = small(runs, steps=16_000)  # long enough to be killed
    study = tmp_path / "study"
    with Ledger.open(study) as ledger:
        ledger.add(specs)
    command = [sys.executable, "-m", "upgd.cli", "resume", str(study), "--on", "ray"]
    command += ["--workers", "2", "--checkpoint-seconds", "0.2"]
    expected = alone(tmp_path / "alone", specs)
    second = None
    with open(tmp_path / "said", "w") as said:
        few = {**os.environ, "UPGD_THREADS": "1"}  # else a few jobs take all runs at once
        driver = subprocess.Popen(
            command, stdout=said, stderr=said, start_new_session=True, env=few
        )

    def told() -> int:
        return (tmp_path / "said").read_text().count("runs go on from their checkpoints")

    try:
        for part in (runs // 10, runs // 3):
            wait_for(lambda part=part: states(study).get("done", 0) >= part)  # type: ignore[misc]
            kill_at_work(driver.pid, study, told)
        wait_for(lambda: stopped_at_work(driver, study, runs // 2))
        driver.kill()
        driver.wait()
        left = states(study)
        assert left["running"] > 0
        assert left["done"] < runs
        check_tables(study)
        second = RayPool(None, 2)
        tally = driven(study, [], second)
    finally:
        for process in processes_of(driver.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if second is not None:
            second.close()
    assert tally.done == runs - left["done"]
    assert states(study) == {"done": runs}
    assert results(study) == expected
    assert not list((study / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_cluster_that_runs_already(tmp_path: Path) -> None:
    """``ray://``: the driver is a client, also one that is killed and comes again."""
    port = 20_000 + os.getpid() % 10_000
    options = [f"--port={port}", f"--ray-client-server-port={port + 1}", "--num-cpus=2"]
    options += ["--include-dashboard=false", "--disable-usage-stats", "--block"]
    with open(tmp_path / "said", "w") as said:
        cluster = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *options],
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        specs = small(24)
        with Ledger.open(tmp_path / "study") as ledger:
            ledger.add(specs)
        wait_for(lambda: listens(port + 1))
        address = f"ray://127.0.0.1:{port + 1}"
        with closing(RayPool(address, 2)) as pool:
            assert driven(tmp_path / "study", [], pool).done == 24
        assert results(tmp_path / "study") == alone(tmp_path / "alone", specs)
    finally:
        for process in processes_of(cluster.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def test_a_cluster_that_is_not_there_is_one_line() -> None:
    with pytest.raises(StudyError, match="cannot reach a Ray cluster ray://127") as caught:
        RayPool("ray://127.0.0.1:1", 1)
    assert "\n" not in str(caught.value)
