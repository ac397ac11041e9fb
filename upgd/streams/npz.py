"""The documented ``.npz``: read with every check, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray

from upgd.filesystem import follow, open_replacement
from upgd.streams.readers import DataError, Inputs, Labels

_UNREADABLE = (OSError, EOFError, ValueError, KeyError, zlib.error, BadZipFile, MemoryError)


def read_npz(path: Path, split: str = "train") -> tuple[Inputs, Labels, int]:
    """The documented ``.npz``: a NumPy archive without pickled objects.

    ============== =========================================================================
    `inputs`       uint8 images [n, …], or features [n, d] of any float type; or uint8 codes
    `labels`       integers [n] from 0
    `test_inputs`  optional, with `test_labels`: the same for the test split
    `scale`        optional: inputs are codes, and features are ``(codes · scale)²``
    `top`          optional: the brightest value of uint8 images, 255 if absent
    `names`        optional: of the classes; not read
    ============== =========================================================================

    Returns:
        Inputs, labels and `top`.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "mine.npz"
        >>> np.savez(file, inputs=np.zeros((2, 3), np.float32), labels=[0, 1])
        >>> read_npz(file)[1]
        array([0, 1])
    """
    prefix = "" if split == "train" else "test_"
    wanted = (prefix + "inputs", prefix + "labels")
    arrays, names = read_arrays(path, (*wanted, "scale", "top"))
    if missing := [name for name in wanted if name not in arrays]:
        wrong = f"has no {' and no '.join(missing)} (it holds {', '.join(names) or 'nothing'})"
        raise DataError(path, wrong, "add them, or let 'upgd data convert' write it")
    inputs, labels = (arrays[name] for name in wanted)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or inputs.shape[:1] != labels.shape:
        wrong = f"{labels.dtype} labels {labels.shape} do not fit inputs {inputs.shape}"
        raise DataError(path, wrong, "labels are one integer per input")
    if len(labels) == 0:
        raise DataError(path, "has no samples")
    return (
        _inputs(path, inputs, arrays),
        labels.astype(np.int64),
        _top(path, arrays.get("top", np.array(255))),
    )


def read_arrays(path: Path, keep: tuple[str, ...]) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """Those arrays of an ``.npz`` that are named in `keep`, and the names of all that it has."""
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.lib.npyio.NpzFile):
            with archive:
                return {name: archive[name] for name in keep if name in archive}, sorted(archive)
    except _UNREADABLE as error:
        raise DataError(path, f"is not a readable .npz ({error})") from error
    raise DataError(path, "is a single array, not an .npz", "write it with np.savez")


def _inputs(path: Path, inputs: NDArray[Any], arrays: Mapping[str, NDArray[Any]]) -> Inputs:
    if inputs.ndim < 2:
        raise DataError(path, f"inputs have shape {inputs.shape}", "give them as [n, …]")
    if "scale" in arrays:
        scale = arrays["scale"]
        if inputs.dtype != np.uint8 or scale.dtype.kind != "f":
            wrong = f"has a {scale.dtype} scale for {inputs.dtype} inputs"
            raise DataError(path, wrong, "scale is a float for codes of type uint8")
        if scale.shape not in ((), inputs.shape[1:]):
            wrong = f"has a scale of shape {scale.shape} for inputs {inputs.shape}"
            raise DataError(path, wrong, "give one number, or one per feature")
        inputs = np.square(inputs * scale.astype(np.float32), dtype=np.float32)
    if inputs.dtype == np.uint8:
        return inputs
    if inputs.dtype.kind != "f":
        raise DataError(path, f"inputs are {inputs.dtype}", "give uint8 images or float features")
    features = inputs.astype(np.float32, copy=False)
    if not np.isfinite(features).all():
        raise DataError(path, "inputs are not all finite", "remove NaN and Inf")
    return features


def _top(path: Path, top: NDArray[Any]) -> int:
    if top.shape != () or top.dtype.kind not in "iu" or not 1 <= int(top) <= 255:
        raise DataError(path, f"has top {top!r}", "give one integer from 1 to 255")
    return int(top)


def save_npz(
    path: str | os.PathLike[str],
    arrays: Mapping[str, NDArray[Any]],
    verify: Callable[[Path], object] | None = None,
) -> None:
    """Write a compressed ``.npz`` whole or not at all; makes its folder.

    `verify` is called with the finished file before it replaces the old one; it may raise. Links
    and permissions stay.
    """
    path = Path(path)
    try:
        target = follow(path)
        partial = target.with_name(f".{target.name}.{secrets.token_hex(6)}.partial")
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_replacement(partial, target) as file:
            _write(file, arrays)
            file.flush()
            os.fsync(file.fileno())
        if verify is not None:
            verify(partial)
        partial.replace(target)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with contextlib.suppress(OSError):  # its folder may not exist
            partial.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> DataError:
    wrong = f"cannot be written ({error.strerror or error})"
    return DataError(path, wrong, "free some space or choose another place")


def _write(file: BinaryIO, arrays: Mapping[str, NDArray[Any]]) -> None:
    """As ``np.savez_compressed``, but pickles nothing and gives the same bytes every time."""
    with ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            entry = ZipInfo(f"{name}.npy")
            entry.compress_type = ZIP_DEFLATED
            with archive.open(entry, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
