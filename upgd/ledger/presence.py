"""Which workers of a study are alive: each holds a lock on a file of its own.

The system drops the lock when the process ends, so that the runs of a killed process are taken over
at once. Without such locks (Windows, some file systems) others wait for the leases to expire.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".lock"


@dataclass
class Presence:
    """How an owner leaves."""

    # It could not give its runs back. Its file stays, unlocked, and the next process frees them.
    holds_runs: bool = False


@contextmanager
def present(folder: Path, owner: str) -> Iterator[Presence]:
    """Hold the lock of an owner, so that other processes see that it is alive."""
    descriptor, path = None, folder / (quote(owner, safe="") + SUFFIX)
    with suppress(OSError):
        descriptor = _lock(path)
    presence = Presence()
    try:
        yield presence
    finally:
        if descriptor is not None:
            if not presence.holds_runs:
                path.unlink(missing_ok=True)
            os.close(descriptor)


def departed(folder: Path) -> Iterator[str]:
    """Owners whose processes are dead; each is reported to one process, and once."""
    if fcntl is None:
        return
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with suppress(OSError):  # locked: alive; gone: another process was faster
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _same(descriptor, path):
                    yield unquote(path.name.removesuffix(SUFFIX))
                    path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)


def _lock(path: Path) -> int | None:
    """Make a file and lock it; again if another process removes it in between."""
    if fcntl is None:
        return None
    path.parent.mkdir(exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _same(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
