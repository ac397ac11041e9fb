"""Processes that this one starts.

They end with it, however it ends. One that works notices that its pipe is closed; this module sees
to the time before, when it imports (torch takes seconds). It is the first that ``upgd`` imports.
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
"""What a terminal or a scheduler sends to all processes of a group."""
_HAS_MASKS = hasattr(signal, "pthread_sigmask")
PARENT = "UPGD_PARENT"
"""The variable of the environment by which a process that is started knows by whom."""
SECONDS_BETWEEN_LOOKS = 1.0
PR_SET_PDEATHSIG = 1


@contextmanager
def deaf() -> Iterator[None]:
    """Processes that begin here hear nothing of Ctrl-C and SIGTERM from the first moment on.

    This one sees to both, and to those that come meanwhile when this is over. In a thread, where
    handlers cannot be changed, it does nothing; without masks of signals (Windows) new processes
    hear until they :func:`ignore`.
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
        for each in came:  # by way of another thread
            signal.raise_signal(each)


@contextmanager
def tied() -> Iterator[None]:
    """Processes that begin here end with this one, from when they import ``upgd`` on.

    In a thread it does nothing: Linux would end them with the thread.
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
    """End with the process that started this one, if it was started by :func:`tied`."""
    with suppress(ValueError):
        parent = int(os.environ.pop(PARENT, ""))
        _end_with(parent)
        if hasattr(os, "register_at_fork"):  # a server of forks: so do those that it starts
            forking = [os.getpid()]
            os.register_at_fork(
                before=lambda: forking.append(os.getpid()),
                after_in_child=lambda: _end_with(forking[-1]),
                after_in_parent=forking.pop,
            )


def _end_with(parent: int) -> None:
    """Let the system end this process when its parent ends, or look at times whether it has."""
    by_system = _set_death_signal(signal.SIGKILL) if sys.platform == "linux" else False
    if os.getppid() != parent:
        if os.getppid() == 1 or not _is_alive(parent):
            os._exit(1)
        _set_death_signal(0)  # somebody else's process, which has the variable by chance
    elif not by_system and sys.platform != "win32":  # there, a parent's number never changes
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _set_death_signal(number: int) -> bool:
    import ctypes

    with suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) == 0)
    return False


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(1)


def _is_alive(process: int) -> bool:
    """Whether a process is there and has not ended without its parent having noticed."""
    with suppress(OSError, IndexError):
        if sys.platform == "linux":
            with open(f"/proc/{process}/stat", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0] not in "ZX"
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)  # another user's is there
    return True


@contextmanager
def _blocked() -> Iterator[None]:
    """Block both signals, which processes inherit; handlers they do not."""
    if not _HAS_MASKS:
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # beginning later, it would unblock them
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, TO_END)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def ignore() -> None:
    """Hear nothing of Ctrl-C and SIGTERM: whoever started this process sees to them."""
    for number in TO_END:
        signal.signal(number, signal.SIG_IGN)
    if _HAS_MASKS:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, TO_END)


_follow_parent()
