"""Several processes that share the work of a study, each with one thread.

They share nothing but the study's folder: each opens the ledger itself and claims runs from it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from upgd.streams import DataError
from upgd.study.errors import StudyError
from upgd.study.ledger import Ledger
from upgd.study.spec import RunSpec
from upgd.study.work import Progress, Tally, work

PATIENCE = 20.0
"""Seconds for an interrupted process to save its run before it is ended."""


def work_in_processes(
    folder: str | os.PathLike[str],
    count: int,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    where: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Tally:
    """Run what is pending in a study, in `count` processes; see :func:`upgd.study.work.work`.

    An interrupt reaches every process: each saves its run and gives it back.

    Raises:
        StudyError: A process met what the others would meet too, or was killed. The runs that are
            done are safe.
    """
    context = multiprocessing.get_context("spawn")  # SQLite does not survive a fork
    crew: dict[Any, Any] = {}  # pipe: process
    tally, problems = Tally(), []
    try:
        with _deaf():
            for _ in range(count):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (theirs, os.fspath(folder), data_dir, device, dict(where or {}))
                crew[ours] = context.Process(target=_serve, args=arguments, daemon=True)
                crew[ours].start()
                theirs.close()
        listening = dict(crew)
        while listening:
            ready: list[Any] = list(wait(list(listening)))
            for connection in ready:
                try:
                    kind, content = connection.recv()
                except (EOFError, OSError):
                    listening.pop(connection).join(PATIENCE)
                    continue
                if kind == "problem":
                    problems.append(content)
                elif kind == "tally":
                    _add(tally, content)
                elif on_progress is not None:
                    spec, step, rate, latest = content
                    on_progress(Progress(RunSpec.from_json(spec), step, rate, latest))
    finally:
        for process in crew.values():
            if process.pid is not None and process.is_alive():
                process.terminate()
        for connection, process in crew.items():
            if process.pid is not None:
                process.join(PATIENCE)
                if process.is_alive():
                    process.kill()
            connection.close()
    codes = sorted({process.exitcode for process in crew.values() if process.exitcode})
    if codes and not problems:
        told = ", ".join(map(str, codes))
        problems.append(f"a worker was ended (exit code {told}); run it again to go on")
    if problems:
        raise StudyError(problems[0])
    return tally


def _add(tally: Tally, more: Tally) -> None:
    tally.done += more.done
    tally.diverged += more.diverged
    tally.failed += more.failed
    tally.lost += more.lost
    tally.errors += more.errors


@contextmanager
def _deaf() -> Iterator[None]:
    """Start processes that do not hear Ctrl-C: this one hears it and tells them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(
    parent: Connection,
    folder: str,
    data_dir: str | os.PathLike[str] | None,
    device: str,
    where: Mapping[str, Any],
) -> None:
    """What a process does: work, and tell how far it is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(1)

    def tell(progress: Progress) -> None:
        content = progress.spec.to_json(), progress.step, progress.rate, dict(progress.latest)
        try:
            parent.send(("progress", content))
        except OSError:  # nobody listens any more
            raise KeyboardInterrupt from None

    try:
        with Ledger.open(folder) as ledger:
            tally = work(ledger, data_dir=data_dir, device=device, where=where, on_progress=tell)
        parent.send(("tally", tally))
    except KeyboardInterrupt:
        pass
    except (StudyError, DataError, OSError, ImportError) as error:
        parent.send(("problem", str(error)))
