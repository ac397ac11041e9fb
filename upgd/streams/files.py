"""Which files a dataset comes in, and where they are looked for."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from upgd.streams.images import (
    SUFFIXES,
    class_names,
    has_sprites,
    read_image_folder,
    read_sprite_labels,
    read_sprites,
)
from upgd.streams.npz import read_arrays, read_npz
from upgd.streams.readers import (
    DataError,
    Inputs,
    Labels,
    check_labels,
    read_cifar_binary,
    read_idx,
)

Arrays = tuple[Inputs, Labels, int]
"""Inputs, labels, the brightest value of images."""

_CIFAR_RECORDS = 10_000  # in each original batch
_FETCH_CIFAR = "upgd data fetch cifar10"


class Source(NamedTuple):
    """Files that were found, how they become arrays of a split, and how many samples they have.

    `samples` looks at as little as it can; only `read` checks everything.
    """

    paths: tuple[Path, ...]
    read: Callable[[], Arrays]
    samples: Callable[[], int]


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
        published: samples of the published train and test splits.
    """

    classes: int
    shape: tuple[int, ...]
    prefixes: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    has_test: bool = True
    downloads: tuple[Download, ...] = ()
    published: tuple[int, ...] = ()

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
        published=(60_000, 10_000),
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
        published=(112_800, 18_800),
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
        published=(50_000, 10_000),
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
    "mini-imagenet": Known(
        100, (2048,), folders=("mini_imagenet",), has_test=False, published=(60_000,)
    ),
}


def find(name: str, split: str, folders: Sequence[Path]) -> Source | None:
    """The first files of a dataset's split in these folders, or None.

    Example:
        >>> find("mnist", "train", [Path("nowhere")]) is None
        True
    """
    for base in folders:
        for folder in places(name, base):
            if folder.is_dir() and (source := _find_here(name, split, folder)):
                return source
    return None


def places(name: str, base: Path) -> list[Path]:
    """Where a dataset's files are looked for below a searched folder.

    Example:
        >>> [folder.as_posix() for folder in places("mnist", Path("data"))]
        ['data/mnist', 'data', 'data/MNIST/raw']
    """
    return [base / name, base, *(base / sub for sub in DATASETS[name].folders)]


def _find_here(name: str, split: str, folder: Path) -> Source | None:
    known = DATASETS[name]
    if (file := folder / f"{name}.npz").is_file():
        return npz_source(file, split, known)
    if source := find_original(name, split, folder):
        return source
    if folder.name == name and known.is_images:  # such names say too little elsewhere
        if (folder / split).is_dir():
            return images_source(folder, split, known)
        if has_sprites(folder):
            return sprites_source(folder, split, known)
    return None


def sprites_source(folder: Path, split: str, known: Known | None = None) -> Source:
    """Sprites (:func:`upgd.streams.read_sprites`) as a source.

    Example:
        >>> sprites_source(Path("mine"), "test").paths[0].name
        'labels.npz'
    """
    sprites = sorted(f for f in folder.glob("*") if f.suffix.lower() in SUFFIXES)
    paths = (folder / "labels.npz", *sprites)
    read = partial(_read_sprites, known, folder, split)
    return Source(paths, read, partial(_count_sprites, folder, split))


def find_original(name: str, split: str, folder: Path) -> Source | None:
    """A dataset's files as they were published, in this folder, or None.

    Example:
        >>> find_original("cifar10", "test", Path("nowhere")) is None
        True
    """
    for prefix in DATASETS[name].prefixes:
        if source := find_idx(split, folder, prefix, DATASETS[name]):
            return source
    return find_cifar(split, folder) if name == "cifar10" else None


def find_idx(split: str, folder: Path, prefix: str, known: Known | None = None) -> Source | None:
    """A pair of idx files whose names begin with `prefix` (a glob pattern), or None.

    Example:
        >>> find_idx("train", Path("nowhere"), "emnist-letters-") is None
        True
    """
    for part in ("train",) if split == "train" else ("t10k", "test"):
        names = [f"{prefix}{part}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
        images, labels = (
            next((f for end in ("", ".gz") for f in sorted(folder.glob(n + end))), None)
            for n in names
        )
        if images is None and labels is None:
            continue
        if images is None or labels is None:
            absent = folder / names[0 if images is None else 1]
            raise DataError(absent, "is missing, and its partner is there", "put it there")
        read = partial(_read_idx, known, images, labels, prefix.startswith("emnist"))
        return Source((images, labels), read, partial(_count_idx, labels))
    return None


def npz_source(file: Path, split: str, known: Known | None = None) -> Source:
    """A documented ``.npz`` as a source.

    Example:
        >>> npz_source(Path("mnist.npz"), "train").paths[0].name
        'mnist.npz'
    """
    return Source((file,), partial(_read_npz, known, file, split), partial(_count_npz, file, split))


def images_source(folder: Path, split: str, known: Known | None = None) -> Source:
    """The images folders ``train`` and ``test`` in `folder`; classes are numbered by the former.

    Example:
        >>> images_source(Path("mine"), "test").paths[0].name
        'test'
    """
    read = partial(_read_images, known, folder, split)
    return Source((folder / split,), read, partial(_count_images, folder / split))


def find_cifar(split: str, folder: Path) -> Source | None:
    """CIFAR-10's binary batches, or None.

    Raises:
        DataError: Some are missing, or there are Python batches only.

    Example:
        >>> find_cifar("test", Path("nowhere")) is None
        True
    """
    stems = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    for place in (folder / "cifar-10-batches-bin", folder):
        paths = tuple(place / f"{stem}.bin" for stem in stems)
        absent = [path for path in paths if not path.is_file()]
        if absent and len(absent) < len(paths):
            raise DataError(absent[0], "is missing, and other batches are there", "add it")
        if not absent:
            count = _CIFAR_RECORDS * len(paths)
            return Source(paths, partial(_read_cifar, paths), partial(int, count))
    for place in (folder / "cifar-10-batches-py", folder):
        if (place / stems[0]).is_file():
            wrong = "is a batch of CIFAR-10's Python version, a pickle, which is not read"
            raise DataError(place / stems[0], wrong, f"get the binary version: {_FETCH_CIFAR}")
    return None


def _count_npz(file: Path, split: str) -> int:
    name = "labels" if split == "train" else "test_labels"
    labels, _ = read_arrays(file, (name,))
    return len(labels.get(name, ()))


def _count_idx(labels: Path) -> int:
    return len(read_idx(labels, 1))


def _count_images(folder: Path) -> int:
    return sum(file.suffix.lower() in SUFFIXES for file in folder.glob("*/*"))


def _count_sprites(folder: Path, split: str) -> int:
    labels = read_sprite_labels(folder, split == "test")
    return sum(map(len, labels.values()))


def _read_sprites(known: Known | None, folder: Path, split: str) -> Arrays:
    inputs, labels = read_sprites(folder, split == "test")
    _check(known, folder / "labels.npz", inputs, labels)
    return inputs, labels, 255


def _read_npz(known: Known | None, file: Path, split: str) -> Arrays:
    inputs, labels, top = read_npz(file, split)
    _check(known, file, inputs, labels)
    return inputs, labels, top


def _read_idx(known: Known | None, images: Path, labels: Path, transposed: bool) -> Arrays:
    """EMNIST's images are stored column by column: transposed, they stand upright."""
    inputs, targets = read_idx(images, 3), read_idx(labels, 1).astype(np.int64)
    if len(inputs) != len(targets):
        wrong = f"has {len(targets)} labels for the {len(inputs)} images of {images.name}"
        raise DataError(labels, wrong, "the two files must come from one release")
    if transposed:
        inputs = np.ascontiguousarray(inputs.transpose(0, 2, 1))
    _check(known, images, inputs, targets, labels)
    return inputs, targets, 255


def _read_cifar(paths: tuple[Path, ...]) -> Arrays:
    return (*read_cifar_binary(paths, _CIFAR_RECORDS), 255)


def _read_images(known: Known | None, folder: Path, split: str) -> Arrays:
    names = class_names(folder / "train") if (folder / "train").is_dir() else None
    inputs, labels = read_image_folder(folder / split, names)
    _check(known, folder / split, inputs, labels)
    return inputs, labels, 255


def _check(
    known: Known | None, file: Path, inputs: Inputs, labels: Labels, labels_file: Path | None = None
) -> None:
    if len(labels) == 0:
        raise DataError(file, "has no samples")
    if known is None:
        return
    if inputs.shape[1:] != known.shape:
        wrong = f"holds inputs of shape {inputs.shape[1:]}, {known.shape} expected"
        raise DataError(file, wrong, "this may be another dataset's file")
    if (inputs.dtype == np.uint8) != known.is_images:
        wrong = f"holds {inputs.dtype} inputs"
        raise DataError(file, wrong, "images are uint8, features are floats")
    check_labels(labels_file or file, labels, known.classes)


def missing(name: str, split: str, folders: Sequence[Path]) -> str:
    """What to say when nothing was found, in one line: which file to put where.

    Example:
        >>> print(missing("mini-imagenet", "train", [Path("data")]))  # doctest: +ELLIPSIS
        no mini-imagenet data (train); put mini-imagenet.npz into data (searched: data); ...
    """
    files = ", or ".join(_accepted(name, split))
    searched = ", ".join(map(str, folders))
    place = shlex.quote(str(folders[0]))
    way = (
        f"or download: upgd data fetch {name} --data-dir {place}"
        if DATASETS[name].downloads
        else "it cannot be downloaded: 'upgd data features' makes it from images"
    )
    return f"no {name} data ({split}); put {files} into {folders[0]} (searched: {searched}); {way}"


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
    kinds.append(f"{name}.npz")
    if known.is_images:
        kinds.append(f"{name}/{split}/<class>/<image>.png")
        kinds.append(f"{name}/labels.npz with sprites")
    return kinds
