"""Processes that begin hear no interrupt; whoever starts them does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE, wait_for
from upgd.processes import (
    PARENT,
    TO_END,
    _is_alive,
    dies_with_parent,
    ignore_interrupts,
    interrupts_blocked,
)


@pytest.mark.skipif(sys.platform == "win32", reason="there, to send a signal is to end a process")
@pytest.mark.parametrize("number", TO_END)
def test_what_comes_meanwhile_is_heard_afterwards(number: signal.Signals) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda number, frame: heard.append(number))
    try:
        with interrupts_blocked():
            os.kill(os.getpid(), number)
            assert heard == []
        wait_for(lambda: heard == [number])  # it may come by way of another thread
        os.kill(os.getpid(), number)
        wait_for(lambda: heard == [number, number])
    finally:
        signal.signal(number, before)


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="signals cannot be blocked here")
def test_nothing_stays_blocked() -> None:
    with interrupts_blocked():
        pass
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(TO_END)


def test_in_a_thread_it_does_nothing() -> None:
    errors: list[Exception] = []

    def begin() -> None:
        try:
            with interrupts_blocked():
                pass
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert errors == []


def _wait_then_ignore(pipe: Any) -> None:
    pipe.send("here")
    pipe.recv()
    ignore_interrupts()
    pipe.send("still here")
    pipe.recv()


@pytest.mark.skipif(sys.platform != "linux", reason="there is no server of forks elsewhere")
@pytest.mark.slow
def test_a_server_of_forks_and_its_processes_survive_both() -> None:
    """In a program of its own, so that the server begins here."""
    done = subprocess.run(
        [sys.executable, "-c", "import tests.test_processes as t; t._survive()"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (0, "here\nstill here\n2 heard\n"), done.stderr


def _survive() -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_wait_then_ignore, args=(theirs,), daemon=True)
    with interrupts_blocked():
        process.start()
    heard: list[int] = []
    for number in TO_END:
        signal.signal(number, lambda number, frame: heard.append(number))
    assert process.pid is not None
    print(ours.recv())
    for number in TO_END:
        os.kill(process.pid, number)
        os.kill(_server(), number)
        os.kill(os.getpid(), number)
    ours.send("ignore")
    print(ours.recv())
    for number in TO_END:
        os.kill(process.pid, number)
    assert process.is_alive()
    again = context.Process(target=int, daemon=True)  # the server is there, too
    again.start()
    again.join(PATIENCE)
    assert again.exitcode == 0
    ours.send("end")
    print(f"{len(heard)} heard")


ENDINGS = {
    "a pool": """
import tempfile
folder = tempfile.TemporaryDirectory()  # its finalizer would make ours run last
from upgd.study.pools import LocalPool
pool = LocalPool(1)
""",
    "agents": """
import tempfile
folder = tempfile.TemporaryDirectory()
from upgd.rl import AgentGroup, Settings, learner
group = AgentGroup("Pendulum", [learner("adam", 0)], steps=2048, workers=1)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a pool", pytest.param("agents", marks=pytest.mark.slow)])
def test_a_program_ends_without_closing(what: str) -> None:
    """Workers do not hear the SIGTERM by which multiprocessing ends them at last."""
    if what == "agents":
        pytest.importorskip("gymnasium")
    begin = f"if __name__ == '__main__':{textwrap.indent(ENDINGS[what], '    ')}    print('begun')"
    command = [sys.executable, "-c", begin]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, "begun\n"), done.stderr


def _server() -> int:
    from multiprocessing import forkserver

    pid = forkserver._forkserver._forkserver_pid
    assert isinstance(pid, int)
    return pid


# ---- a driver that is killed while its workers are still importing

POOL = """
import os, sys, threading, time

if __name__ != "__main__":  # a worker's process imports this
    time.sleep(600)
from multiprocessing import forkserver
from upgd.study.pools import LocalPool


def tell():
    while forkserver._forkserver._forkserver_pid is None:
        time.sleep(0.01)
    print(forkserver._forkserver._forkserver_pid, flush=True)


if __name__ == "__main__":
    threading.Thread(target=tell, daemon=True).start()
    pool = LocalPool(2)
    print(*pool.pids(), flush=True)
    time.sleep(600)
"""
SPAWNED = """
import multiprocessing, sys, time

if __name__ != "__main__":
    import upgd
    time.sleep(600)
from upgd.processes import interrupts_blocked, dies_with_parent

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=print, daemon=True)
    with interrupts_blocked(), dies_with_parent():
        process.start()
    print(process.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("what", ["forked", "server of forks", "spawned"])
@pytest.mark.slow
def test_workers_that_import_end_with_their_driver(what: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNED if what == "spawned" else POOL)
    path = [os.fspath(Path(__file__).parents[1])]
    if what == "server of forks":  # the last of what it imports takes long
        (tmp_path / "sklearn").mkdir()
        (tmp_path / "sklearn" / "__init__.py").touch()
        (tmp_path / "sklearn" / "datasets.py").write_text("import time\ntime.sleep(600)\n")
        path = [os.fspath(tmp_path), *path]
    driver = subprocess.Popen(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    children: list[int] = []
    try:
        assert driver.stdout is not None
        lines = 2 if what == "forked" else 1
        children = [int(pid) for _ in range(lines) for pid in driver.stdout.readline().split()]
        assert len(children) == {"forked": 3}.get(what, 1)
        assert all(map(_is_alive, children))
        driver.kill()
        wait_for(lambda: not any(map(_is_alive, children)))
    finally:
        driver.kill()
        driver.wait()
        for pid in filter(_is_alive, children):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_a_thread_that_ends_takes_no_worker_along() -> None:
    """Linux ends a process with the thread that started it, if it is asked to."""
    seen: list[str | None] = []

    def begin() -> None:
        with dies_with_parent():
            seen.append(os.environ.get(PARENT))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    begin()
    assert seen == [None, str(os.getpid())]
    assert PARENT not in os.environ
