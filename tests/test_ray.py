"""Studies on a real Ray cluster of this machine."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")
pytest.importorskip("ray")
os.environ["RAY_AUTH_MODE"] = "disabled"

from tests.killing import results
from tests.pools import processes_of, small, states
from tests.test_driver import alone, driven
from tests.test_kills import check_tables
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


def comes(what: Callable[[], Any], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def wait_for(what: Callable[[], Any]) -> None:
    assert comes(what, seconds=90.0)


def kill_at_work(session: int, dice: random.Random, said: Path, deaths: int) -> None:
    """Kill workers until the driver has said so often that one died with runs to do.

    One that has just begun, or just told its last result, has none: then another is killed.
    """
    killed: set[int] = set()

    def noticed() -> bool:
        return said.read_text().count("runs go on from their checkpoints") == deaths

    def victims() -> list[int]:
        return sorted(set(workers_of(session)) - killed)

    while not noticed():
        assert len(killed) < 3
        wait_for(victims)
        victim = dice.choice(victims())
        os.kill(victim, signal.SIGKILL)
        killed.add(victim)
        comes(noticed, seconds=5.0)


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_200_runs_two_workers_killed_and_the_driver_restarted(tmp_path: Path) -> None:
    specs = small(200, steps=1000)
    study = tmp_path / "study"
    with Ledger.open(study) as ledger:
        ledger.add(specs)
    command = [sys.executable, "-m", "upgd.cli", "resume", str(study), "--on", "ray"]
    command += ["--workers", "2", "--checkpoint-seconds", "0.2"]
    expected = alone(tmp_path / "alone", specs)
    second = None
    with open(tmp_path / "said", "w") as said:
        driver = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
    try:
        for deaths, part in enumerate((20, 60), start=1):
            wait_for(lambda part=part: states(study).get("done", 0) >= part)  # type: ignore[misc]
            kill_at_work(driver.pid, random.Random(part), tmp_path / "said", deaths)
        wait_for(lambda: states(study).get("done", 0) >= 100)
        assert driver.poll() is None  # still at work
        driver.kill()
        driver.wait()
        left = states(study)
        assert left["running"] > 0
        assert left["done"] < 200
        check_tables(study)
        second = RayPool(None, 2)
        tally = driven(study, [], second)
    finally:
        for process in processes_of(driver.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if second is not None:
            second.close()
    assert tally.done == 200 - left["done"]
    assert states(study) == {"done": 200}
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
