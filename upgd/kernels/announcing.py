"""Who wants to know that a kernel is being compiled: it takes seconds, in which nothing else moves.

Processes that compile for others hand the names on by :func:`announce`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_listeners: list[Callable[[str], object]] = []


def announce(name: str) -> None:
    """Tell everybody who listens that a kernel is being compiled."""
    for listener in list(_listeners):
        listener(name)


@contextmanager
def listening(listener: Callable[[str], object]) -> Iterator[None]:
    """Call `listener` with the name of each kernel that numba begins to compile in this process.

    Kernels that are loaded from a cache are not announced.
    """
    _listeners.append(listener)
    try:
        with _numba_announces():
            yield
    finally:
        _listeners.remove(listener)


@contextmanager
def _numba_announces() -> Iterator[None]:
    if len(_listeners) > 1 or importlib.util.find_spec("numba") is None:
        yield
        return
    from numba.core import event

    class Listener(event.Listener):
        def on_start(self, event: Any) -> None:
            function = getattr(event.data["dispatcher"], "py_func", None)
            name = getattr(function, "__name__", "").strip("_")
            if name.isidentifier() and str(function.__module__).startswith("upgd."):
                announce(name)  # numba's own helpers would tell nobody anything

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba:compile", Listener()):
        yield
