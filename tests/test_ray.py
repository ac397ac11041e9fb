"""Studies on a real Ray cluster of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("numba")
pytest.importorskip("ray")
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - at 15 they starve on a busy machine

from tests.killing import results
from tests.pools import Holds, held_command, processes_of, small
from tests.test_driver import alone, driven, saved
from tests.test_kills import check_tables
from tests.waiting import states, wait_for
from upgd.ledger import Ledger, RunSpec, StudyError
from upgd.study.ray_pool import RayPool


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def specs_of(runs: int) -> list[RunSpec]:
    """Runs for many jobs: four of a kind, of which each of two workers takes two."""
    return [
        replace(spec, options={**spec.options, "hidden": f"9-{7 + number // 4}"})
        for number, spec in enumerate(small(runs, steps=250, restart=True))
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.slow
@pytest.mark.parametrize("runs", [24, 200])
def test_two_workers_are_killed_and_the_driver_is_restarted(tmp_path: Path, runs: int) -> None:
    """Each when it has runs to do: workers wait in every job until they are let go on."""
    specs, study, holds = specs_of(runs), tmp_path / "study", Holds(tmp_path / "holds")
    with Ledger.open(study) as ledger:
        ledger.add(specs)
    expected = alone(tmp_path / "alone", specs)
    command = held_command(holds, "resume", study, "--on", "ray", "--workers", 2)
    command["args"] += ["--checkpoint-seconds", "0"]
    with open(tmp_path / "said", "w") as said:
        driver = subprocess.Popen(**command, stdout=said, stderr=said)

    def at_work() -> bool:
        """Both workers have two runs each, and their checkpoints are written."""
        assert driver.poll() is None, (tmp_path / "said").read_text()
        found = states(study).get("running"), len(saved(study)), len(holds.waiting())
        return found == (4, 4, 2)

    def told() -> int:
        return (tmp_path / "said").read_text().count("2 runs continue from their checkpoints")

    second = None
    try:
        for kills in (1, 2):
            wait_for(at_work)
            victim, other = holds.waiting()
            os.kill(victim, signal.SIGKILL)
            holds.release(victim)
            wait_for(lambda kills=kills: told() == kills)  # type: ignore[misc]
            wait_for(at_work)  # another goes on with its runs
            holds.release(other)
            wait_for(lambda kills=kills: states(study).get("done") == 2 * kills)  # type: ignore[misc]
        wait_for(at_work)
        driver.kill()
        driver.wait()
        assert states(study) == {"done": 4, "running": 4, "pending": runs - 8}
        check_tables(study)
        second = RayPool(None, 2)
        tally = driven(study, [], second)
    finally:
        for process in processes_of(driver.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if second is not None:
            second.close()
    assert tally.done == runs - 4
    assert states(study) == {"done": runs}
    assert results(study) == expected
    assert not list((study / "checkpoints").iterdir())
    with Ledger.open(study, read_only=True) as ledger:  # by the first driver, and by the second
        assert sorted(run.attempts for run in ledger.runs()) == [1] * (runs - 4) + [2] * 4


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
