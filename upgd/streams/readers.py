"""Readers of the files that public datasets come in. Every problem is a :class:`DataError`.

Readers return ``(inputs, labels)``: images as uint8, features as float32, labels as int64. They
check a file's whole structure, so that a truncated or mistaken one never starts a run.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

Inputs = NDArray[np.uint8] | NDArray[np.float32]
Labels = NDArray[np.int64]
OnProgress = Callable[[int, int], None]  # called with the numbers of files done and of all

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
