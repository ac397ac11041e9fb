"""Checkpoints of runs: arrays and facts in one file, written atomically and without pickle."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from upgd.ledger import crash_points as crash
from upgd.ledger.errors import CheckpointError, StudyError
from upgd.ledger.files import cannot_write, replace_file

META, FORMAT, VERSION = "__meta__", "upgd-checkpoint", 1

Checkpoint = tuple[dict[str, NDArray[Any]], dict[str, Any]]


def save_checkpoint(
    path: str | os.PathLike[str], arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]
) -> None:
    """Save arrays and facts about them as one ``.npz``, atomically and without pickle.

    The same content has the same bytes. ``numpy.load`` reads the file too.

    Raises:
        StudyError: The file cannot be written.
        ValueError: An array holds Python objects, a name is taken, or `meta` is not JSON.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(Path(folder) / "c.npz", {"w": np.arange(3)}, {"step": 7})
    ...     load_checkpoint(Path(folder) / "c.npz")
    ({'w': array([0, 1, 2])}, {'step': 7})
    """
    with cannot_write(path):
        replace_file(Path(path), _writer(arrays, meta))


def save_packed(path: Path, content: bytes) -> None:
    """Save what :func:`pack_checkpoint` packed, as :func:`save_checkpoint` would."""
    with cannot_write(path):
        replace_file(path, content)


def pack_checkpoint(arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> bytes:
    """The bytes that :func:`save_checkpoint` would write."""
    file = io.BytesIO()
    _writer(arrays, meta)(file)
    return file.getvalue()


def _writer(
    arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]
) -> Callable[[BinaryIO], None]:
    """A function that writes a checkpoint to an open file; raises ValueError for bad content."""
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


def load_checkpoint(content: str | os.PathLike[str] | bytes) -> Checkpoint:
    """Read arrays and facts from a file or from packed bytes; CheckpointError if damaged."""
    with _open(content) as archive:
        head = _head(archive)
        return {name: _member(archive, name) for name in head["names"]}, head["meta"]


def checkpoint_facts(content: bytes | Path) -> dict[str, Any]:
    """The facts of a checkpoint alone; the arrays are not read. Raises CheckpointError."""
    with _open(content) as archive:
        facts: dict[str, Any] = _head(archive)["meta"]
        return facts


@contextmanager
def _open(content: str | os.PathLike[str] | bytes) -> Iterator[zipfile.ZipFile]:
    file = io.BytesIO(content) if isinstance(content, bytes) else Path(content)
    if isinstance(file, Path) and not file.is_file():
        raise CheckpointError(f"there is no checkpoint at {file}")
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except Exception as error:  # a damaged archive can fail in any layer
        what = file if isinstance(file, Path) else "a packed checkpoint"
        raise CheckpointError(
            f"{what} is damaged or not a checkpoint of upgd ({error}); remove it to restart the run"
        ) from error


def _head(archive: zipfile.ZipFile) -> dict[str, Any]:
    head: dict[str, Any] = json.loads(_member(archive, META).tobytes())
    if head["format"] != FORMAT:
        raise ValueError(f"its format is {head['format']!r}")
    if head["version"] != VERSION:
        raise ValueError(f"its version is {head['version']}, this upgd reads {VERSION}")
    return head


def _member(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    with archive.open(f"{name}.npy") as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
        # Reading to the end is what makes zipfile compare the checksum.
        if file.read(1):
            raise ValueError(f"array {name!r} is longer than it says")
    return array


# ------------------------------------------------------------------------ of a study
def checkpoints(study: Path) -> Path:
    """The folder with the checkpoints of a study; made if it is missing."""
    folder = study / "checkpoints"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StudyError(f"cannot keep checkpoints in {folder}: {reason}; move it away") from error
    return folder


def kept_checkpoints(study: Path) -> dict[str, Path]:
    """All checkpoints by the keys of their runs."""
    return {path.stem: path for path in checkpoints(study).glob("*.npz")}


def checkpoint_path(study: Path, key: str) -> Path:
    """The file of a run's checkpoint, which may not exist."""
    return checkpoints(study) / f"{key}.npz"


def forget(study: Path, key: str) -> None:
    """Remove the checkpoint of a run that is over."""
    crash.point("forget: before removal")
    checkpoint_path(study, key).unlink(missing_ok=True)
    crash.point("forget: after removal")
