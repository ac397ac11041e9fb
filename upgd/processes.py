"""Processes that this one starts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TO_END = (signal.SIGINT, signal.SIGTERM)
"""What a terminal or a scheduler sends to all processes of a group."""
_HAS_MASKS = hasattr(signal, "pthread_sigmask")


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
