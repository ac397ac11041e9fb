"""Files that datasets come in: readers, and a writer. Every problem is a :class:`DataError`.

Readers return ``(inputs, labels)``: images as uint8, features as float32, labels as int64. They
check a file's whole structure, so that a truncated or mistaken one never starts a run.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import os
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray

from upgd.filesystem import follow, open_replacement

Inputs = NDArray[np.uint8] | NDArray[np.float32]
Labels = NDArray[np.int64]
OnProgress = Callable[[int, int], None]  # called with the numbers of files done and of all

_UNREADABLE = (OSError, EOFError, ValueError, KeyError, zlib.error, BadZipFile, MemoryError)
_CHUNK = 1 << 20
_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORD = 1 + math.prod(_CIFAR_SHAPE)
AGAIN = "get it again, or delete it and let it be downloaded"


class DataError(ValueError):
    """A data file is not what it should be: names the file, what is wrong, the way out.

    Example:
        >>> raise DataError("digits.npz", "has no labels", "write it again")
        Traceback (most recent call last):
        upgd.streams.readers.DataError: digits.npz: has no labels; write it again
    """

    def __init__(self, file: Path | str, wrong: str, way_out: str = AGAIN) -> None:
        wrong = " ".join(wrong.split())  # one line, whatever another library said
        name = str(file) if str(file).isprintable() else ascii(str(file))[1:-1]
        super().__init__(f"{name}: {wrong}; {way_out}")
        self.file, self.wrong, self.way_out = file, wrong, way_out

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.file, self.wrong, self.way_out)


def read_idx(path: Path, dimensions: int | None = None) -> NDArray[np.uint8]:
    """An array of unsigned bytes in MNIST's idx format, gzipped or not.

    Args:
        path: the file; gzip is recognised by its content.
        dimensions: how many the array must have (3 for images, 1 for labels).

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "labels-idx1-ubyte"
        >>> _ = file.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3]) + bytes([7, 8, 9]))
        >>> read_idx(file, dimensions=1)
        array([7, 8, 9], dtype=uint8)
    """
    try:
        with path.open("rb") as raw:
            gzipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if not gzipped:
                return _idx(path, raw, dimensions)
            with gzip.GzipFile(fileobj=raw) as unzipped:
                return _idx(path, unzipped, dimensions)  # type: ignore[arg-type]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(path, f"is truncated or not gzip ({error})") from error
    except OSError as error:
        raise DataError(path, f"cannot be read ({error})", "check the file") from error


def _idx(path: Path, file: BinaryIO, dimensions: int | None) -> NDArray[np.uint8]:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] != 8 or not 1 <= magic[3] <= 4:
        raise DataError(path, f"is not an idx file of bytes (it begins with {magic.hex(' ')})")
    if dimensions not in (None, magic[3]):
        what = f"has {magic[3]} dimensions, {dimensions} expected"
        raise DataError(path, what, "images and labels may be swapped")
    header = file.read(4 * magic[3])
    if len(header) < 4 * magic[3]:
        raise DataError(path, "is truncated in its header")
    shape = tuple(int(size) for size in np.frombuffer(header, dtype=">u4"))
    size = math.prod(shape)
    # In pieces: a wrong header must not reserve memory, nor a wrong file be unzipped to its end.
    body = bytearray()
    while len(body) <= size and (piece := file.read(_CHUNK)):
        body += piece
    if len(body) < size:
        raise DataError(path, f"is truncated: {len(body)} bytes of {size} for shape {shape}")
    if len(body) > size:
        raise DataError(path, f"has more than the {size} bytes of its shape {shape}")
    return np.frombuffer(bytes(body), dtype=np.uint8).reshape(shape)


def read_cifar_binary(
    paths: Sequence[Path], records: int | None = None
) -> tuple[NDArray[np.uint8], Labels]:
    """CIFAR-10's binary batches: records of a label and 3·32·32 bytes.

    Args:
        paths: the files, in order.
        records: how many each must hold (10 000 in the originals).

    Returns:
        Images [n, 3, 32, 32] and labels [n].

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "test_batch.bin"
        >>> _ = file.write_bytes(bytes([4]) + bytes(3072))
        >>> images, labels = read_cifar_binary([file])
        >>> images.shape, labels
        ((1, 3, 32, 32), array([4]))
    """
    rows = []
    for path in paths:
        size = path.stat().st_size
        if size == 0 or size % _CIFAR_RECORD:
            raise DataError(path, f"has {size} bytes, not a multiple of {_CIFAR_RECORD}")
        if records is not None and size != records * _CIFAR_RECORD:
            raise DataError(path, f"has {size // _CIFAR_RECORD} images, {records} expected")
        rows.append(np.fromfile(path, dtype=np.uint8).reshape(-1, _CIFAR_RECORD))
        check_labels(path, rows[-1][:, 0].astype(np.int64), classes=10)
    table = np.concatenate(rows)
    return table[:, 1:].reshape(-1, *_CIFAR_SHAPE), table[:, 0].astype(np.int64)


def check_labels(path: Path | str, labels: Labels, classes: int) -> None:
    """Raise :class:`DataError` unless labels are from 0 to ``classes - 1``."""
    if labels.min() < 0 or labels.max() >= classes:
        wrong = f"has labels from {labels.min()} to {labels.max()}, 0 to {classes - 1} expected"
        raise DataError(path, wrong, "this may be another dataset's file")


# ------------------------------------------------------------------------------- .npz
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
