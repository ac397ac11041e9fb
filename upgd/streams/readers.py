"""Readers of the files that public datasets come in. Every problem is a :class:`DataError`.

Readers return ``(inputs, labels)``: images as uint8, features as float32, labels as int64. They
check a file's whole structure, so that a truncated or mistaken one never starts a run.
"""

from __future__ import annotations

import gzip
import importlib
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from upgd.streams.unpickle import read_batch

Inputs = NDArray[np.uint8] | NDArray[np.float32]
Labels = NDArray[np.int64]

_CHUNK = 1 << 20
_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORD = 1 + math.prod(_CIFAR_SHAPE)
_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".tif", ".tiff"}
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, zlib.error, BadZipFile, MemoryError)
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
        super().__init__(f"{file}: {wrong}; {way_out}")
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


def read_cifar_python(
    paths: Sequence[Path], records: int | None = None
) -> tuple[NDArray[np.uint8], Labels]:
    """CIFAR-10's python batches, without running anything that they might contain.

    Arguments and return value are those of :func:`read_cifar_binary`.

    Example:
        >>> import pickle, tempfile
        >>> file = Path(tempfile.mkdtemp()) / "test_batch"
        >>> batch = {b"data": np.zeros((1, 3072), np.uint8), b"labels": [4]}
        >>> _ = file.write_bytes(pickle.dumps(batch, protocol=2))
        >>> images, labels = read_cifar_python([file])
        >>> images.shape, labels
        ((1, 3, 32, 32), array([4]))
    """
    images, labels = [], []
    for path in paths:
        try:
            data, found = read_batch(path.read_bytes())
        except Exception as error:  # a hostile pickle may raise anything
            raise DataError(path, f"is not a CIFAR-10 batch ({error})") from error
        if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != _CIFAR_RECORD - 1:
            raise DataError(path, f"holds {data.dtype} data of shape {data.shape}")
        if len(found) != len(data) or len(data) == 0:
            raise DataError(path, f"has {len(data)} images and {len(found)} labels")
        if records not in (None, len(data)):
            raise DataError(path, f"has {len(data)} images, {records} expected")
        check_labels(path, found, classes=10)
        images.append(data.reshape(-1, *_CIFAR_SHAPE))
        labels.append(found)
    return np.concatenate(images), np.concatenate(labels)


def read_image_folder(folder: Path) -> tuple[NDArray[np.uint8], Labels]:
    """Images in one sub-folder per class; classes are numbered in the order of their names.

    Needs Pillow. All images must have one size; grey ones give [n, height, width], others
    [n, 3, height, width].

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> read_image_folder(folder)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        upgd.streams.readers.DataError: ...: has no sub-folders; put each class in a sub-folder ...
    """
    try:
        pillow = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise DataError(folder, "reading images needs Pillow", "pip install pillow") from error
    classes = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not classes:
        raise DataError(folder, "has no sub-folders", "put each class in a sub-folder of its own")
    images: list[NDArray[np.uint8]] = []
    labels = []
    for label, sub in enumerate(classes):
        files = sorted(f for f in sub.iterdir() if f.suffix.lower() in _IMAGES)
        if not files:
            raise DataError(sub, "has no images", "add some, or remove the folder")
        for file in files:
            images.append(_image(pillow, file))
            labels.append(label)
            if images[-1].shape != images[0].shape:
                wrong = f"has shape {images[-1].shape}, the first image {images[0].shape}"
                raise DataError(file, wrong, "give all images one size and one mode")
    return np.stack(images), np.array(labels, dtype=np.int64)


def _image(pillow: Any, file: Path) -> NDArray[np.uint8]:
    try:
        with pillow.open(file) as image:
            grey = image.mode in ("1", "L")
            pixels = np.asarray(image.convert("L" if grey else "RGB"), dtype=np.uint8)
    except Exception as error:  # Pillow's plugins raise many kinds
        raise DataError(file, f"is not an image ({error})", "repair or remove it") from error
    return pixels if grey else pixels.transpose(2, 0, 1)


def read_npz(path: Path, split: str = "train") -> tuple[Inputs, Labels, int]:
    """The documented ``.npz``: a NumPy archive without pickled objects.

    ============== =========================================================================
    `inputs`       uint8 images [n, …], or features [n, d] of any float type; or uint8 codes
    `labels`       integers [n] from 0
    `test_inputs`  optional, with `test_labels`: the same for the test split
    `scale`        optional: inputs are codes, and features are ``(codes · scale)²``
    `top`          optional: the brightest value of uint8 images, 255 if absent
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
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataError(path, "is a single array, not an .npz", "write it with np.savez")
        with archive:
            keep = (*wanted, "scale", "top")
            arrays = {name: archive[name] for name in keep if name in archive}
            names = sorted(archive)
    except DataError:
        raise
    except _UNREADABLE as error:
        raise DataError(path, f"is not a readable .npz ({error})") from error
    if missing := [name for name in wanted if name not in arrays]:
        wrong = f"has no {' and no '.join(missing)} (it holds {', '.join(names) or 'nothing'})"
        raise DataError(path, wrong, "add them, see upgd.streams.read_npz")
    inputs, labels = (arrays[name] for name in wanted)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or inputs.shape[:1] != labels.shape:
        wrong = f"{labels.dtype} labels {labels.shape} do not fit inputs {inputs.shape}"
        raise DataError(path, wrong, "labels are one integer per input")
    if len(labels) == 0:
        raise DataError(path, "has no samples")
    return _npz_inputs(path, inputs, arrays), labels.astype(np.int64), _top(path, arrays)


def _npz_inputs(path: Path, inputs: NDArray[Any], arrays: Mapping[str, NDArray[Any]]) -> Inputs:
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


def _top(path: Path, arrays: Mapping[str, NDArray[Any]]) -> int:
    if "top" not in arrays:
        return 255
    top = arrays["top"]
    if top.shape != () or top.dtype.kind not in "iu" or not 1 <= int(top) <= 255:
        raise DataError(path, f"has top {top!r}", "give one integer from 1 to 255")
    return int(top)


def check_labels(path: Path | str, labels: Labels, classes: int) -> None:
    """Raise :class:`DataError` unless labels are from 0 to ``classes - 1``.

    Example:
        >>> check_labels(Path("labels"), np.array([0, 9]), classes=10)
    """
    if labels.min() < 0 or labels.max() >= classes:
        wrong = f"has labels from {labels.min()} to {labels.max()}, 0 to {classes - 1} expected"
        raise DataError(path, wrong, "this may be another dataset's file")
