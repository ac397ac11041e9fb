"""Files that a crash leaves either old or new, never half-written; checks before writing."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from upgd.filesystem import follow, open_replacement, open_through
from upgd.ledger import crash_points as crash
from upgd.ledger.errors import StudyError
from upgd.ledger.schema import APPLICATION_ID

SUFFIX, LEDGER = ".partial", "ledger.sqlite"
FIGURE_MARK = "Matplotlib"  # what is found near the beginning of figures
Content = bytes | Callable[[BinaryIO], object]
_LEDGERS = tuple(LEDGER + end for end in ("", "-wal", "-shm", "-journal"))
_INSIDE = ("checkpoints", "workers")
_EFFECTIVE = os.access in os.supports_effective_ids


def write_atomically(path: str | os.PathLike[str], content: Content) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, whole.

    The content is written to a temporary file in the same folder and synced; the file is renamed,
    and the folder synced, where the system allows it. A link stays one: its target is replaced.
    Permissions stay those of the old file. What is not a regular file, such as a pipe or
    ``/dev/null``, is written to.

    Args:
        path: The file to write or replace; its folder must exist.
        content: Bytes, or a function that writes them to an open file.

    Raises:
        StudyError: The file cannot be written, or belongs to a study; the old content stays.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "numbers.txt"
    ...     write_atomically(file, b"1 2 3")
    ...     print(file.read_text())
    1 2 3
    """
    with cannot_write(path):
        _check_foreign(path)
        through = open_through(path)
        if through is None:
            replace_file(follow(path), content)
        else:
            with through as file:
                _fill(file, content)


def check_output(path: str | os.PathLike[str], make_folders: bool = False) -> None:
    """Raise StudyError, before any work is done, unless :func:`write_atomically` can write a file.

    With `make_folders`, folders that are missing will be made.
    """
    with cannot_write(path):
        _check_foreign(path)
        if os.path.isdir(path):
            raise StudyError(f"cannot write {path}: it is a folder; name a file in it")
        if os.path.exists(path) and not os.path.isfile(path):
            return  # a pipe, a terminal
        _check_writable(follow(path).parent, make_folders)


def check_output_folder(folder: str | os.PathLike[str]) -> None:
    """Raise StudyError unless files can be written to a folder, which need not exist."""
    with cannot_write(folder):
        _check_foreign(folder)
        _check_writable(follow(folder), make_folders=True)


def _check_writable(folder: Path, make_folders: bool) -> None:
    while make_folders and folder != folder.parent and not os.path.lexists(folder):
        folder = folder.parent
    if not stat.S_ISDIR(os.stat(folder).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=_EFFECTIVE):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def check_generated(path: str | os.PathLike[str], mark: str = FIGURE_MARK) -> None:
    """Raise StudyError if there is a file without the mark near its beginning that upgd writes."""
    with cannot_write(path):
        if os.path.isfile(path):
            with open(path, "rb") as file:
                found = mark.encode() in file.read(4096)
        else:
            found = not os.path.lexists(path)
    if not found:
        raise StudyError(f"{path} is there and was not made by upgd; move it or rename it")


@contextlib.contextmanager
def cannot_write(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an OSError into a StudyError that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StudyError(
            f"cannot write {path}: {reason}; free space there or choose another folder"
        ) from error


def _check_foreign(path: str | os.PathLike[str]) -> None:
    """Raise StudyError for a file of a study: replacing it would lose runs."""
    for place in (Path(os.path.abspath(path)), follow(path)):
        if place.name in _LEDGERS or _is_ledger(place):
            raise StudyError(f"cannot write {path}: it is a study's ledger; choose another name")
        for folder in place.parents:
            if folder.name in _INSIDE and (folder.parent / LEDGER).exists():
                raise StudyError(
                    f"cannot write {path}: a study keeps its own files there; choose another folder"
                )


def _is_ledger(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            head = file.read(72)
    except OSError:
        return False
    return head[:16] == b"SQLite format 3\0" and head[68:] == APPLICATION_ID.to_bytes(4, "big")


def replace_file(path: Path, content: Content) -> None:
    """Write a regular file, whole or not at all."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}{SUFFIX}")
    crash.point("write: before file")
    try:
        with open_replacement(partial, path) as file:
            _fill(file, content)
            file.flush()
            crash.point("write: before sync")
            _sync(file.fileno())
        crash.point("write: before replace")
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    crash.point("write: after replace")
    _sync_folder(path.parent)
    crash.point("write: after sync")


def _fill(file: BinaryIO, content: Content) -> None:
    if isinstance(content, bytes):
        file.write(content)
    else:
        content(file)


def remove_partial(folder: str | os.PathLike[str], older_than: float = 3600.0) -> int:
    """Remove partial files of killed writers, older than so many seconds; return how many."""
    removed = 0
    for file in Path(folder).glob(f".*{SUFFIX}"):
        with contextlib.suppress(OSError):  # another process may have been faster
            if time.time() - file.stat().st_mtime >= older_than:
                file.unlink()
                removed += 1
    return removed


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        # macOS: fsync alone leaves the data in the drive's cache.
        fcntl.fcntl(descriptor, getattr(fcntl, "F_FULLFSYNC"))  # noqa: B009


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems refuse
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
