"""Replacing files: links, special files and permissions."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from pathlib import Path
from typing import BinaryIO

_MOST_LINKS = 40
_STANDARD = {"/dev/stdout": 1, "/dev/stderr": 2}
_DESCRIPTOR = re.compile(r"/(?:dev|proc/(?:self|thread-self|(?P<process>\d+)))/fd/(?P<number>\d+)")


def open_through(path: str | os.PathLike[str]) -> BinaryIO | None:
    """Open a pipe, a terminal or ``/dev/null`` for writing; None for regular files.

    Such a file cannot be replaced. A name of one of this process's descriptors, such as
    ``/dev/stdout``, means that descriptor even if it is a regular file: opening the file again
    would overwrite its beginning.

    Raises:
        OSError: It cannot be opened for writing, or is a disk.
    """
    descriptor = _descriptor(os.fspath(path))
    if descriptor is not None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # keep the order of what was printed
        return os.fdopen(os.dup(descriptor), "wb")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    if stat.S_ISBLK(mode):
        raise PermissionError(1, "it is a disk")
    return open(path, "wb")


def _descriptor(path: str) -> int | None:
    """The descriptor that a path in ``/dev`` or ``/proc`` stands for; follows links."""
    for _ in range(_MOST_LINKS):
        path = os.path.abspath(path)
        found = _DESCRIPTOR.fullmatch(path)
        if found and found["process"] in (None, str(os.getpid())):
            return int(found["number"])
        if path in _STANDARD:
            return _STANDARD[path]
        if not os.path.islink(path):
            return None
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    return None


def follow(path: str | os.PathLike[str]) -> Path:
    """The file that a path leads to through links; it need not exist. Raises OSError for a loop."""
    with contextlib.suppress(FileNotFoundError):
        os.stat(path)  # raises for a loop; realpath does not
    return Path(os.path.realpath(path))


def open_replacement(partial: Path, target: Path) -> BinaryIO:
    """Create `partial`, which will replace `target`, with the permissions of `target`.

    Keeps owner and group where permitted. If `target` does not exist the umask decides.
    """
    try:
        old = os.stat(target)
    except FileNotFoundError:
        return open(partial, "xb")
    if os.name == "nt":  # files inherit the folder's permissions
        return open(partial, "xb")
    # Unreadable for others until it has its final permissions.
    file = os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    try:
        mode = old.st_mode & 0o777
        new = os.fstat(file.fileno())
        if new.st_uid != old.st_uid:
            with contextlib.suppress(PermissionError):
                os.fchown(file.fileno(), old.st_uid, -1)
        if new.st_gid != old.st_gid:
            try:
                os.fchown(file.fileno(), -1, old.st_gid)
            except PermissionError:  # give the wrong group no more than others have
                mode = mode & 0o707 | (mode & 0o007) << 3
        os.fchmod(file.fileno(), mode)
    except BaseException:
        file.close()
        partial.unlink()
        raise
    return file
