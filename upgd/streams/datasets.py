r"""The data behind the problems: found on disk, checked, and given as arrays.

Files are searched for in `data_dir`, then in ``$UPGD_DATA``, then in the user's cache
(``$XDG_CACHE_HOME/upgd`` or ``~/.cache/upgd``; ``%LOCALAPPDATA%\upgd`` on Windows), in each
first in a sub-folder with the dataset's name and then in the folder itself. The files that
people already have are read as they are; ``<name>.npz`` (:func:`upgd.streams.read_npz`) does for
every dataset.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from upgd.caches import home
from upgd.extras import install
from upgd.streams.files import DATASETS, Source, fetch, find, missing, npz_source
from upgd.streams.readers import DataError, Inputs, Labels, check_labels, read_arrays, save_npz

Split = Literal["train", "test"]
_Key = tuple[str, str, tuple[tuple[str, int, int], ...]]
_LOADED: dict[_Key, Dataset] = {}
_KEEP = 8  # datasets in memory, shared by the streams of all seeds


class DataNotFoundError(FileNotFoundError):
    """No file of a dataset was found: says which to put where."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs and labels in memory.

    Args:
        name: of the dataset.
        inputs: uint8 images [n, …] or float32 features [n, d].
        labels: int64 [n], from 0.
        classes: how many there are; a sample of each need not be present.
        top: the brightest value of uint8 images.
        source: the file that was read, for messages.

    Example:
        >>> images = np.array([[[0, 255]]], dtype=np.uint8)
        >>> Dataset("tiny", images, np.array([1]), classes=2).scaled([0])
        array([[[-1.,  1.]]], dtype=float32)
    """

    name: str
    inputs: Inputs
    labels: Labels
    classes: int
    top: int = 255
    source: str = "memory"

    def __post_init__(self) -> None:
        if self.inputs.dtype not in (np.uint8, np.float32):
            wrong = f"inputs are {self.inputs.dtype}"
            raise DataError(self.source, wrong, "give uint8 images or float32 features")
        if len(self.labels) == 0 or self.labels.shape != self.inputs.shape[:1]:
            wrong = f"has {len(self.inputs)} inputs and labels of shape {self.labels.shape}"
            raise DataError(self.source, wrong, "give one label per input, and at least one")
        check_labels(self.source, self.labels, self.classes)
        if self.inputs.dtype == np.uint8 and self.inputs.max() > self.top:
            wrong = f"has values up to {self.inputs.max()}, {self.top} expected"
            raise DataError(self.source, wrong, "set top to the brightest value")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.inputs.shape[1:])

    @functools.cached_property
    def checksum(self) -> str:
        """SHA-256 of inputs and labels as arrays, whatever files they came in."""
        found = hashlib.sha256()
        for array in (self.inputs, self.labels):
            found.update(f"{array.dtype.str} {array.shape}".encode())
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()

    def scaled(self, indices: NDArray[np.int64] | list[int] | slice) -> NDArray[np.float32]:
        """Inputs as a network takes them: images in [-1, 1], features as they are.

        Images become ``(x/top - 0.5)/0.5``. Shape [len(indices), …], a copy.
        """
        chosen = self.inputs[indices]
        if chosen.dtype == np.float32:
            return chosen.astype(np.float32)  # a slice would be a view
        half, top = np.float32(0.5), np.float32(self.top)
        return np.asarray((chosen.astype(np.float32) / top - half) / half)


class Facts(NamedTuple):
    """What :func:`check` found out about one split."""

    split: Split
    source: str
    samples: int
    shape: tuple[int, ...]
    classes: int
    checksum: str


def user_cache() -> Path:
    """The folder for data where no other is named."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home() / "AppData" / "Local") / "upgd"
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "upgd"


def search_path(data_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    """The folders searched, in order: `data_dir`, ``$UPGD_DATA``, the user's cache.

    Example:
        >>> search_path("mine")[0].name
        'mine'
    """
    named = (data_dir, os.environ.get("UPGD_DATA"))
    return [expanded(folder) for folder in named if folder] + [user_cache()]


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path whose ``~`` is expanded; raises :class:`DataError` if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        wrong = "begins with the home of nobody"
        raise DataError(str(path), wrong, "write the folder out") from None


def load(
    name: str,
    split: Split = "train",
    data_dir: str | os.PathLike[str] | None = None,
    download: bool = False,
) -> Dataset:
    """A dataset by name. Read once, then shared; its arrays cannot be written to.

    Args:
        name: ``mnist``, ``emnist47``, ``cifar10``, ``mini-imagenet`` (2048 features), ``digits``
            (scikit-learn's, embedded), or the path of an ``.npz``.
        split: ``"train"`` or ``"test"``.
        data_dir: searched first.
        download: fetch public files, with checksums, into the first folder searched if none of
            them has the data. Needs ``pooch``.

    Raises:
        DataNotFoundError: there is no file; says which to put where.
        DataError: a file is truncated or not what it should be.

    Example:
        >>> digits = load("digits")
        >>> len(digits), digits.shape, digits.classes
        (1438, (8, 8), 10)
    """
    if split not in get_args(Split):
        raise ValueError(f"unknown split {split!r}; it is 'train' or 'test'")
    if name.endswith(".npz"):
        path = expanded(name)
        if not path.is_file():
            raise DataNotFoundError(f"{path}: no such file; check the path")
        return _read(path.stem, split, npz_source(path, split), None)
    if name == "digits":
        return _digits(split)
    splits_of(name)
    folders = search_path(data_dir)
    source = find(name, split, folders)
    if source is None and download:
        fetch(name, folders[0])
        source = find(name, split, folders)
    if source is None:
        raise DataNotFoundError(missing(name, split, folders))
    return _read(name, split, source, DATASETS[name].classes)


def splits_of(name: str) -> tuple[Split, ...]:
    """The splits that a dataset is published with; raises ValueError for an unknown name."""
    names = ["digits", *DATASETS]
    if name not in names:
        close = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ";"
        raise ValueError(f"unknown dataset {name!r}{hint} there are {', '.join(names)}")
    return ("train", "test") if name == "digits" or DATASETS[name].has_test else ("train",)


def check(name: str, data_dir: str | os.PathLike[str] | None = None) -> list[Facts]:
    """Read all of a dataset, so that a wrong file is known before a run starts.

    Raises what :func:`load` raises. A missing test split is an error only for datasets that are
    published with one.

    Example:
        >>> [(facts.split, facts.samples) for facts in check("digits")]
        [('train', 1438), ('test', 359)]
    """
    splits = _splits_in(name) if name.endswith(".npz") else splits_of(name)
    found = [(split, load(name, split, data_dir)) for split in splits]
    if len({data.shape for _, data in found}) > 1:
        wrong = f"train inputs have shape {found[0][1].shape}, test inputs {found[1][1].shape}"
        raise DataError(found[1][1].source, wrong)
    return [Facts(s, d.source, len(d), d.shape, d.classes, d.checksum) for s, d in found]


def _splits_in(file: str) -> tuple[Split, ...]:
    path = expanded(file)
    names = read_arrays(path, ())[1] if path.is_file() else []
    return ("train", "test") if any(n.startswith("test_") for n in names) else ("train",)


def write_npz(path: str | os.PathLike[str], train: Dataset, test: Dataset | None = None) -> None:
    """Write the ``.npz`` that :func:`upgd.streams.read_npz` documents, whole or not at all.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "digits.npz"
        >>> write_npz(file, load("digits"), load("digits", "test"))
        >>> load(str(file), "test").inputs.shape
        (359, 8, 8)
    """
    arrays = {"inputs": train.inputs, "labels": train.labels, "top": np.array(train.top)}
    if test is not None:
        arrays |= {"test_inputs": test.inputs, "test_labels": test.labels}
    save_npz(path, arrays)


def _read(name: str, split: Split, source: Source, classes: int | None) -> Dataset:
    stamps = ((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in source.paths)
    key = (name, split, tuple(stamps))
    if key not in _LOADED:
        inputs, labels, top = source.read()
        known = classes or int(labels.max()) + 1
        _remember(key, Dataset(name, inputs, labels, known, top, str(source.paths[0])))
    return _LOADED[key]


def _digits(split: Split) -> Dataset:
    """scikit-learn's 1797 digits of 8×8 values from 0 to 16; every fifth one is for testing."""
    key: _Key = ("digits", split, ())
    if key not in _LOADED:
        try:
            sklearn = importlib.import_module("sklearn.datasets")
        except ImportError as error:
            wrong = f"the embedded digits come with scikit-learn; {install('demo')}"
            raise ImportError(wrong) from error
        bundle = sklearn.load_digits()
        chosen = (np.arange(len(bundle.target)) % 5 == 4) == (split == "test")
        inputs = bundle.images[chosen].astype(np.uint8)
        labels = bundle.target[chosen].astype(np.int64)
        _remember(key, Dataset("digits", inputs, labels, 10, 16, "scikit-learn"))
    return _LOADED[key]


def _remember(key: _Key, dataset: Dataset) -> None:
    dataset.inputs.setflags(write=False)
    dataset.labels.setflags(write=False)
    if len(_LOADED) >= _KEEP:
        del _LOADED[next(iter(_LOADED))]
    _LOADED[key] = dataset
