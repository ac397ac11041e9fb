"""Files that are either the old ones or the new ones, never half of one; checkpoints."""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from upgd.study import crash
from upgd.study.errors import CheckpointError, StudyError

META = "__meta__"
FORMAT = "upgd-checkpoint"
VERSION = 1
SUFFIX = ".partial"

Checkpoint = tuple[dict[str, NDArray[Any]], dict[str, Any]]


def write_atomically(
    path: str | os.PathLike[str], content: bytes | Callable[[BinaryIO], object]
) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, whole.

    The content goes to a temporary file in the same folder, to the disk, and then takes the
    name; last the folder itself goes to the disk, where the system allows it.

    Args:
        path: The file to write or replace; its folder must exist.
        content: Bytes, or a function that writes them to an open file.

    Raises:
        StudyError: If the file cannot be written; what was there before still is.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "numbers.txt"
    ...     write_atomically(file, b"1 2 3")
    ...     print(file.read_text())
    1 2 3
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}{SUFFIX}")
    try:
        crash.point("write: before file")
        try:
            with open(partial, "xb") as file:
                if isinstance(content, bytes):
                    file.write(content)
                else:
                    content(file)
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
    except OSError as error:
        reason = error.strerror or str(error)
        raise StudyError(
            f"cannot write {path}: {reason}; free space there or choose another folder"
        ) from error


def remove_partial(folder: str | os.PathLike[str], older_than: float = 3600.0) -> int:
    """Remove what killed writers left in a folder, and return how many files that was.

    Args:
        folder: Where :func:`write_atomically` wrote.
        older_than: Age in seconds from which a partial file has no writer any more.
    """
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


def save_checkpoint(
    path: str | os.PathLike[str], arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]
) -> None:
    """Save arrays and facts about them as one ``.npz``, atomically and without pickle.

    The same content gives the same bytes. ``numpy.load`` reads the file too.

    Args:
        path: The file; its folder must exist.
        arrays: Arrays of numbers, booleans or text by name.
        meta: What JSON can hold.

    Raises:
        StudyError: If the file cannot be written.
        ValueError: If an array holds Python objects, a name is taken, or `meta` is not JSON.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(Path(folder) / "c.npz", {"w": np.arange(3)}, {"step": 7})
    ...     load_checkpoint(Path(folder) / "c.npz")
    ({'w': array([0, 1, 2])}, {'step': 7})
    """
    write_atomically(path, _writer(arrays, meta))


def pack_checkpoint(arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> bytes:
    """The bytes that :func:`save_checkpoint` would write.

    >>> unpack_checkpoint(pack_checkpoint({"w": np.arange(3)}, {"step": 7}))
    ({'w': array([0, 1, 2])}, {'step': 7})
    """
    file = io.BytesIO()
    _writer(arrays, meta)(file)
    return file.getvalue()


def _writer(
    arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]
) -> Callable[[BinaryIO], None]:
    """Writes a checkpoint to an open file; what cannot be in one is refused at once."""
    for name, array in arrays.items():
        if not name or name == META:
            raise ValueError(f"an array of a checkpoint cannot be called {name!r}")
        if np.asarray(array).dtype.kind not in "biufcSU":
            raise ValueError(
                f"array {name!r} has dtype {np.asarray(array).dtype}, which needs pickle; "
                "convert it to numbers"
            )
    try:
        text = json.dumps(
            {"format": FORMAT, "version": VERSION, "names": list(arrays), "meta": dict(meta)}
        )
    except TypeError as error:
        raise ValueError(f"the facts of a checkpoint must be JSON: {error}") from None

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            members = {META: np.frombuffer(text.encode(), np.uint8), **arrays}
            for name, array in members.items():
                info = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
                with archive.open(info, "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)

    return write


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the arrays and facts that :func:`save_checkpoint` wrote.

    Raises:
        CheckpointError: If there is no such file, or it is truncated, damaged or foreign.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint at {path}")
    try:
        return _read(path)
    except Exception as error:  # a damaged archive can fail in any layer
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint of upgd ({error}); "
            "remove it and the run starts anew"
        ) from error


def unpack_checkpoint(content: bytes) -> Checkpoint:
    """Read the arrays and facts that :func:`pack_checkpoint` packed.

    Raises:
        CheckpointError: If they are truncated, damaged or foreign.
    """
    try:
        return _read(io.BytesIO(content))
    except Exception as error:
        raise CheckpointError(f"these bytes are no checkpoint of upgd ({error})") from error


def checkpoint_facts(content: bytes | Path) -> dict[str, Any]:
    """The facts of a checkpoint alone, packed or in a file; the arrays are not looked at.

    Raises:
        CheckpointError: If they cannot be read.
    """
    try:
        file = content if isinstance(content, Path) else io.BytesIO(content)
        with zipfile.ZipFile(file) as archive:
            facts: dict[str, Any] = _head(archive)["meta"]
            return facts
    except Exception as error:
        what = content if isinstance(content, Path) else "these bytes"
        raise CheckpointError(f"no checkpoint of upgd: {what} ({error})") from error


def _read(file: Path | io.BytesIO) -> Checkpoint:
    with zipfile.ZipFile(file) as archive:
        head = _head(archive)
        return {name: _member(archive, name) for name in head["names"]}, head["meta"]


def _head(archive: zipfile.ZipFile) -> dict[str, Any]:
    head: dict[str, Any] = json.loads(_member(archive, META).tobytes())
    if head["format"] != FORMAT:
        raise ValueError(f"its format is {head['format']!r}")
    if head["version"] != VERSION:
        raise ValueError(f"its version is {head['version']}, this upgd reads {VERSION}")
    return head


def load_checkpoint_or_none(path: str | os.PathLike[str]) -> Checkpoint | None:
    """Read a checkpoint, or return None where there is none that can be trusted."""
    try:
        return load_checkpoint(path)
    except CheckpointError:
        return None


def _member(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    with archive.open(f"{name}.npy") as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
        # Reading to the end is what makes zipfile compare the checksum.
        if file.read(1):
            raise ValueError(f"array {name!r} is longer than it says")
    return array
