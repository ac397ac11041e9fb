"""Which workers of a study are alive: each holds a lock on a file of its own.

The system drops the lock when the process ends, so that the runs of a killed process are taken over
at once. Without such locks (Windows, some file systems) others wait for the leases to expire.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, unquote

from upgd.ledger.errors import StudyError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".lock"


@contextmanager
def present(folder: Path, owner: str, release: Callable[[], object]) -> Iterator[None]:
    """Hold the lock of an owner, so that other processes see that it is alive.

    On an error `release` is called; if that fails too, the file stays, unlocked, and the next
    process frees the owner's runs.
    """
    descriptor, path, stays = None, folder / (quote(owner, safe="") + SUFFIX), False
    with suppress(OSError):
        descriptor = _lock(path)
    try:
        yield
    except BaseException:
        try:
            release()
        except StudyError:  # such as a full disk; the first error is the one to raise
            stays = True
        raise
    finally:
        if descriptor is not None:
            if not stays:
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
