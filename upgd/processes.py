"""Child processes: signals, and exiting with their parent.

A working child notices that its pipe is closed. This module covers the seconds before, while the
child imports torch; so ``upgd`` imports it first.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

TO_END = (signal.SIGINT, signal.SIGTERM)
"""Signals that a terminal or a scheduler sends to a whole process group."""
_HAS_MASKS = hasattr(signal, "pthread_sigmask")
PARENT = "UPGD_PARENT"  # environment variable that holds the parent's process id
SECONDS_BETWEEN_POLLS = 1.0
PR_SET_PDEATHSIG = 1


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Start children with SIGINT and SIGTERM blocked; this process handles them at the end.

    Does nothing in a thread, where handlers cannot be changed. Without signal masks (Windows)
    children receive signals until they call :func:`ignore_interrupts`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, frame: Any) -> None:
        came.append(number)

    known = [number for number in TO_END if signal.getsignal(number) is not None]  # Python's own
    try:
        with _blocked():
            before = {number: signal.signal(number, note) for number in known}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
    finally:
        for each in came:  # through another thread
            signal.raise_signal(each)


@contextmanager
def dies_with_parent() -> Iterator[None]:
    """Start children that exit with this process, from the moment they import ``upgd``.

    Does nothing in a thread: Linux would kill the children when the thread ends.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    os.environ[PARENT] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.pop(PARENT, None)


def _follow_parent() -> None:
    """Exit with the parent, if it started this process under :func:`dies_with_parent`."""
    with suppress(ValueError):
        parent = int(os.environ.pop(PARENT, ""))
        _end_with(parent)
        if hasattr(os, "register_at_fork"):  # a fork server: its children, too
            forking = [os.getpid()]
            os.register_at_fork(
                before=lambda: forking.append(os.getpid()),
                after_in_child=lambda: _end_with(forking[-1]),
                after_in_parent=forking.pop,
            )


def _end_with(parent: int) -> None:
    """Let the system kill this process when its parent ends, or poll where it cannot."""
    by_system = _set_death_signal(signal.SIGKILL) if sys.platform == "linux" else False
    if os.getppid() != parent:
        if os.getppid() == 1 or not _is_alive(parent):
            os._exit(1)
        _set_death_signal(0)  # not our parent: the variable was inherited
    elif not by_system and sys.platform != "win32":  # Windows keeps the parent's id
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _set_death_signal(number: int) -> bool:
    import ctypes

    with suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) == 0)
    return False


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_POLLS)
    os._exit(1)


def _is_alive(process: int) -> bool:
    """Whether a process exists and is not a zombie."""
    with suppress(OSError, IndexError):
        if sys.platform == "linux":
            with open(f"/proc/{process}/stat", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0] not in "ZX"
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)  # it belongs to another user
    return True


@contextmanager
def _blocked() -> Iterator[None]:
    """Block both signals; children inherit the mask, but not handlers."""
    if not _HAS_MASKS:
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # started later, it would unblock them
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, TO_END)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def ignore_interrupts() -> None:
    """Ignore SIGINT and SIGTERM: the parent handles them."""
    for number in TO_END:
        signal.signal(number, signal.SIG_IGN)
    if _HAS_MASKS:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, TO_END)


_follow_parent()
