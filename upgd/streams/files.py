"""Which files a dataset comes in, and where they are looked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from upgd.streams.readers import (
    DataError,
    Inputs,
    Labels,
    check_labels,
    read_cifar_binary,
    read_cifar_python,
    read_idx,
    read_image_folder,
    read_npz,
)

Arrays = tuple[Inputs, Labels, int]
"""Inputs, labels, the brightest value of images."""

_CIFAR_RECORDS = 10_000  # in each original batch


class Source(NamedTuple):
    """Files that were found, and how they become arrays of a split."""

    paths: tuple[Path, ...]
    read: Callable[[], Arrays]


class Download(NamedTuple):
    """A public file: its address, its checksum, and what to take out of it if an archive."""

    url: str
    checksum: str
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Known:
    """A dataset that has a name.

    Args:
        classes: how many.
        shape: of one input.
        prefixes: what its idx files' names begin with, in order of preference.
        folders: where else to look below a searched folder, as other tools lay out.
        has_test: whether it is published with a test split.
        downloads: public files that can be fetched.
    """

    classes: int
    shape: tuple[int, ...]
    prefixes: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    has_test: bool = True
    downloads: tuple[Download, ...] = ()

    @property
    def is_images(self) -> bool:
        """Whether inputs are images, not features."""
        return len(self.shape) > 1


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_EMNIST = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"

DATASETS = {
    "mnist": Known(
        classes=10,
        shape=(28, 28),
        prefixes=("",),
        folders=("MNIST/raw",),
        downloads=tuple(
            Download(f"{_MNIST}{file}-ubyte.gz", f"md5:{md5}")
            for file, md5 in (
                ("train-images-idx3", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
                ("train-labels-idx1", "d53e105ee54ea40749a09fcbcd1e9432"),
                ("t10k-images-idx3", "9fb629c4189551a2d022fa330f9573f3"),
                ("t10k-labels-idx1", "ec29112dd5afa0611ce80d1b7f02629c"),
            )
        ),
    ),
    "emnist47": Known(
        classes=47,
        shape=(28, 28),
        prefixes=("emnist-balanced-", "emnist-bymerge-", "emnist47-*"),
        folders=("emnist47/gzip", "gzip", "EMNIST/raw"),
        downloads=(
            Download(
                _EMNIST,
                "md5:58c8d27c78d21e728a6bc7b3cc06412e",
                tuple(
                    f"gzip/emnist-balanced-{split}-{kind}-ubyte.gz"
                    for split in ("train", "test")
                    for kind in ("images-idx3", "labels-idx1")
                ),
            ),
        ),
    ),
    "cifar10": Known(
        classes=10,
        shape=(3, 32, 32),
        downloads=(
            Download(
                _CIFAR,
                "md5:c32a1d4ab5d03f1284b67883e8d87530",
                tuple(
                    f"cifar-10-batches-bin/{batch}.bin"
                    for batch in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
                ),
            ),
        ),
    ),
    "mini-imagenet": Known(100, (2048,), folders=("mini_imagenet",), has_test=False),
}


def find(name: str, split: str, folders: Sequence[Path]) -> Source | None:
    """The first files of a dataset's split in these folders, or None.

    Example:
        >>> find("mnist", "train", [Path("nowhere")]) is None
        True
    """
    for base in folders:
        for folder in (base / name, base, *(base / sub for sub in DATASETS[name].folders)):
            if folder.is_dir() and (source := _find_here(name, split, folder)):
                return source
    return None


def _find_here(name: str, split: str, folder: Path) -> Source | None:
    known = DATASETS[name]
    if (file := folder / f"{name}.npz").is_file():
        return Source((file,), partial(_read_npz, known, file, split))
    for prefix in known.prefixes:
        if source := _find_idx(known, split, folder, prefix):
            return source
    if name == "cifar10" and (source := _find_cifar(split, folder)):
        return source
    images = folder / split
    if folder.name == name and known.is_images and images.is_dir():
        return Source((images,), partial(_read_images, known, images))
    return None


def _find_idx(known: Known, split: str, folder: Path, prefix: str) -> Source | None:
    part = "train" if split == "train" else "test" if prefix else "t10k"
    names = [f"{prefix}{part}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
    images, labels = (
        next((f for end in ("", ".gz") for f in sorted(folder.glob(n + end))), None) for n in names
    )
    if images is None and labels is None:
        return None
    if images is None or labels is None:
        absent = folder / names[0 if images is None else 1]
        raise DataError(absent, "is missing, and its partner is there", "put it there")
    return Source((images, labels), partial(_read_idx, known, images, labels, prefix != ""))


def _find_cifar(split: str, folder: Path) -> Source | None:
    stems = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    for sub, end, read in (
        ("cifar-10-batches-bin", ".bin", read_cifar_binary),
        ("cifar-10-batches-py", "", read_cifar_python),
    ):
        for place in (folder / sub, folder):
            paths = tuple(place / (stem + end) for stem in stems)
            absent = [path for path in paths if not path.is_file()]
            if absent and len(absent) < len(paths):
                raise DataError(absent[0], "is missing, and other batches are there", "add it")
            if not absent:
                return Source(paths, partial(_read_cifar, read, paths))
    return None


def _read_npz(known: Known, file: Path, split: str) -> Arrays:
    inputs, labels, top = read_npz(file, split)
    _check(known, file, inputs, labels)
    return inputs, labels, top


def _read_idx(known: Known, images: Path, labels: Path, transposed: bool) -> Arrays:
    """EMNIST's images are stored column by column: transposed, they stand upright."""
    inputs, targets = read_idx(images, 3), read_idx(labels, 1).astype(np.int64)
    if len(inputs) != len(targets):
        wrong = f"has {len(targets)} labels for the {len(inputs)} images of {images.name}"
        raise DataError(labels, wrong, "the two files must come from one release")
    if transposed:
        inputs = np.ascontiguousarray(inputs.transpose(0, 2, 1))
    _check(known, images, inputs, targets, labels)
    return inputs, targets, 255


def _read_cifar(
    read: Callable[[Sequence[Path], int], tuple[Inputs, Labels]], paths: tuple[Path, ...]
) -> Arrays:
    return (*read(paths, _CIFAR_RECORDS), 255)


def _read_images(known: Known, folder: Path) -> Arrays:
    inputs, labels = read_image_folder(folder)
    _check(known, folder, inputs, labels)
    return inputs, labels, 255


def _check(
    known: Known, file: Path, inputs: Inputs, labels: Labels, labels_file: Path | None = None
) -> None:
    if inputs.shape[1:] != known.shape:
        wrong = f"holds inputs of shape {inputs.shape[1:]}, {known.shape} expected"
        raise DataError(file, wrong, "this may be another dataset's file")
    if len(labels) == 0:
        raise DataError(file, "has no samples")
    if (inputs.dtype == np.uint8) != known.is_images:
        wrong = f"holds {inputs.dtype} inputs"
        raise DataError(file, wrong, "images are uint8, features are floats")
    check_labels(labels_file or file, labels, known.classes)


def missing(name: str, split: str, folders: Sequence[Path]) -> str:
    """What to say when nothing was found: which file to put where, and how to download.

    Example:
        >>> print(missing("mini-imagenet", "train", [Path("data")]))
        no mini-imagenet data (train). Put one of
          mini-imagenet.npz
        into one of these folders (searched in this order) or its sub-folder 'mini-imagenet':
          data
        It cannot be downloaded: its files must be placed by hand.
    """
    lines = [f"no {name} data ({split}). Put one of"]
    lines += [f"  {files}" for files in _accepted(name, split)]
    lines += [f"into one of these folders (searched in this order) or its sub-folder {name!r}:"]
    lines += [f"  {folder}" for folder in folders]
    lines += [
        f"Or let it be downloaded: upgd.streams.load({name!r}, download=True)"
        if DATASETS[name].downloads
        else "It cannot be downloaded: its files must be placed by hand."
    ]
    return "\n".join(lines)


def _accepted(name: str, split: str) -> list[str]:
    """The files that would do, one line per kind."""
    known = DATASETS[name]
    kinds = []
    for prefix in known.prefixes[:1]:
        stem = prefix + ("train" if split == "train" else "test" if prefix else "t10k")
        kinds.append(f"{stem}-images-idx3-ubyte.gz and {stem}-labels-idx1-ubyte.gz")
    if name == "cifar10":
        batch = "data_batch_1" if split == "train" else "test_batch"
        more = " … data_batch_5" if split == "train" else ""
        kinds.append(f"cifar-10-batches-bin/{batch}.bin{more}{'.bin' if more else ''}")
        kinds.append(f"cifar-10-batches-py/{batch}{more}")
    kinds.append(f"{name}.npz")
    if known.is_images:
        kinds.append(f"{name}/{split}/<class>/<image>.png")
    return kinds
