"""Which files a dataset comes in, where they are looked for, and how they are downloaded."""

from __future__ import annotations

import importlib
import importlib.util
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from upgd.streams.images import (
    SUFFIXES,
    class_names,
    has_sprites,
    read_image_folder,
    read_sprite_labels,
    read_sprites,
)
from upgd.streams.readers import (
    DataError,
    Inputs,
    Labels,
    check_labels,
    read_arrays,
    read_cifar_binary,
    read_idx,
    read_npz,
)

Arrays = tuple[Inputs, Labels, int]  # inputs, labels, the brightest value of images

_RETRIES = 4
_WHY = {"ConnectionError": "no connection to {}", "ConnectTimeout": "{} does not answer"}
_CIFAR_RECORDS = 10_000  # in each original batch
_CIFAR_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))


class Source(NamedTuple):
    """The files of a split. `read` checks everything, `samples` reads as little as it can."""

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
        prefixes: of its idx files' names, in order of preference.
        folders: other places below a searched folder, as other tools lay data out.
        has_test: whether it is published with a test split.
        downloads: public files.
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
                tuple(f"cifar-10-batches-bin/{stem}.bin" for stem in (*_CIFAR_TRAIN, "test_batch")),
            ),
        ),
    ),
    "mini-imagenet": Known(
        100, (2048,), folders=("mini_imagenet",), has_test=False, published=(60_000,)
    ),
}


def find(name: str, split: str, folders: Sequence[Path]) -> Source | None:
    """The first files of a dataset's split in these folders, or None."""
    for base in folders:
        for folder in places(name, base):
            if folder.is_dir() and (source := _find_here(name, split, folder)):
                return source
    return None


def places(name: str, base: Path) -> list[Path]:
    """Where a dataset's files are looked for below a searched folder."""
    return [base / name, base, *(base / sub for sub in DATASETS[name].folders)]


def _find_here(name: str, split: str, folder: Path) -> Source | None:
    known = DATASETS[name]
    if (file := folder / f"{name}.npz").is_file():
        return npz_source(file, split, known)
    if source := find_original(name, split, folder):
        return source
    if folder.name == name and known.is_images:  # such names say too little elsewhere
        if (folder / split).is_dir():
            return _images_source(folder, split, known)
        if has_sprites(folder):
            return _sprites_source(folder, split, known)
    return None


def npz_source(file: Path, split: str, known: Known | None = None) -> Source:
    """A documented ``.npz`` as a source."""

    def samples() -> int:
        name = "labels" if split == "train" else "test_labels"
        return len(read_arrays(file, (name,))[0].get(name, ()))

    return Source((file,), lambda: _checked(known, file, *read_npz(file, split)), samples)


def _sprites_source(folder: Path, split: str, known: Known) -> Source:
    labels, test = folder / "labels.npz", split == "test"
    sprites = sorted(f for f in folder.glob("*") if f.suffix.lower() in SUFFIXES)
    return Source(
        (labels, *sprites),
        lambda: _checked(known, labels, *read_sprites(folder, test)),
        lambda: sum(map(len, read_sprite_labels(folder, test).values())),
    )


def _images_source(folder: Path, split: str, known: Known) -> Source:
    """The folders ``train`` and ``test`` of images; classes are numbered by the former."""
    here, train = folder / split, folder / "train"

    def read() -> Arrays:
        names = class_names(train) if train.is_dir() else None
        return _checked(known, here, *read_image_folder(here, names))

    return Source(
        (here,), read, lambda: sum(f.suffix.lower() in SUFFIXES for f in here.glob("*/*"))
    )


def find_original(name: str, split: str, folder: Path) -> Source | None:
    """A dataset's files as they were published, in this folder, or None."""
    for prefix in DATASETS[name].prefixes:
        if source := find_idx(split, folder, prefix, DATASETS[name]):
            return source
    return find_cifar(split, folder) if name == "cifar10" else None


def find_idx(split: str, folder: Path, prefix: str, known: Known | None = None) -> Source | None:
    """A pair of idx files whose names begin with `prefix` (a glob pattern), or None."""
    for part in ("train",) if split == "train" else ("t10k", "test"):
        names = [f"{prefix}{part}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
        images, labels = (
            next((f for end in ("", ".gz") for f in sorted(folder.glob(n + end))), None)
            for n in names
        )
        if images is not None and labels is not None:
            return _idx_source(images, labels, prefix.startswith("emnist"), known)
        if images is not None or labels is not None:
            absent = folder / names[0 if images is None else 1]
            raise DataError(absent, "is missing, and its partner is there", "put it there")
    return None


def _idx_source(images: Path, labels: Path, transposed: bool, known: Known | None) -> Source:
    """EMNIST's images are stored column by column: transposed, they stand upright."""

    def read() -> Arrays:
        inputs, targets = read_idx(images, 3), read_idx(labels, 1).astype(np.int64)
        if len(inputs) != len(targets):
            wrong = f"has {len(targets)} labels for the {len(inputs)} images of {images.name}"
            raise DataError(labels, wrong, "the two files must come from one release")
        if transposed:
            inputs = np.ascontiguousarray(inputs.transpose(0, 2, 1))
        return _checked(known, images, inputs, targets, labels_file=labels)

    return Source((images, labels), read, lambda: len(read_idx(labels, 1)))


def find_cifar(split: str, folder: Path) -> Source | None:
    """CIFAR-10's binary batches, or None.

    Raises:
        DataError: Some are missing, or there are Python batches only.
    """
    stems = _CIFAR_TRAIN if split == "train" else ("test_batch",)
    for place in (folder / "cifar-10-batches-bin", folder):
        paths = tuple(place / f"{stem}.bin" for stem in stems)
        absent = [path for path in paths if not path.is_file()]
        if absent and len(absent) < len(paths):
            raise DataError(absent[0], "is missing, and other batches are there", "add it")
        if not absent:
            return _cifar_source(paths)
    for place in (folder / "cifar-10-batches-py", folder):
        if (place / stems[0]).is_file():
            wrong = "is a batch of CIFAR-10's Python version, a pickle, which is not read"
            way_out = "get the binary version: upgd data fetch cifar10"
            raise DataError(place / stems[0], wrong, way_out)
    return None


def _cifar_source(paths: tuple[Path, ...]) -> Source:
    each = _CIFAR_RECORDS
    return Source(paths, lambda: (*read_cifar_binary(paths, each), 255), lambda: each * len(paths))


def _checked(
    known: Known | None,
    file: Path,
    inputs: Inputs,
    labels: Labels,
    top: int = 255,
    labels_file: Path | None = None,
) -> Arrays:
    """The same arrays, if they are what the dataset's should be."""
    if len(labels) == 0:
        raise DataError(file, "has no samples")
    if known is not None:
        if inputs.shape[1:] != known.shape:
            wrong = f"holds inputs of shape {inputs.shape[1:]}, {known.shape} expected"
            raise DataError(file, wrong, "this may be another dataset's file")
        if (inputs.dtype == np.uint8) != known.is_images:
            wrong = f"holds {inputs.dtype} inputs"
            raise DataError(file, wrong, "images are uint8, features are floats")
        check_labels(labels_file or file, labels, known.classes)
    return inputs, labels, top


def missing(name: str, split: str, folders: Sequence[Path]) -> str:
    """What to say when nothing was found, in one line: which file to put where.

    Example:
        >>> print(missing("mini-imagenet", "train", [Path("data")]))  # doctest: +ELLIPSIS
        no mini-imagenet data (train); put mini-imagenet.npz into data (searched: data); ...
    """
    known, files = DATASETS[name], [f"{name}.npz"]
    for prefix in known.prefixes[:1]:
        stem = prefix + ("train" if split == "train" else "test" if prefix else "t10k")
        files.insert(0, f"{stem}-images-idx3-ubyte.gz and {stem}-labels-idx1-ubyte.gz")
    if name == "cifar10":
        batch = "data_batch_1.bin … data_batch_5.bin" if split == "train" else "test_batch.bin"
        files.insert(0, f"cifar-10-batches-bin/{batch}")
    if known.is_images:
        files += [f"{name}/{split}/<class>/<image>.png", f"{name}/labels.npz with sprites"]
    searched, place = ", ".join(map(str, folders)), shlex.quote(str(folders[0]))
    way = (
        f"or download: upgd data fetch {name} --data-dir {place}"
        if known.downloads
        else "it cannot be downloaded: 'upgd data features' makes it from images"
    )
    accepted = ", or ".join(files)
    return (
        f"no {name} data ({split}); put {accepted} into {folders[0]} (searched: {searched}); {way}"
    )


# ------------------------------------------------------------------------ downloading
def fetch(name: str, folder: Path, bar: Any = None) -> None:
    """Download a dataset into the sub-folder `name` of `folder`; keeps files that are there.

    `bar` shows a file's progress: an object with `total`, `update(n)`, `reset()` and `close()`; by
    default tqdm's, where that is installed.

    Raises:
        DataError: it has no public files, ``pooch`` is missing, the network is, or a checksum
            is wrong; says which file to put where instead.
    """
    downloads = DATASETS[name].downloads
    if not downloads:
        way_out = f"put {name}.npz into {folder}, 'upgd data features' makes it from images"
        raise DataError(name, "cannot be downloaded", way_out)
    target = folder / name
    try:
        pooch = importlib.import_module("pooch")
    except ImportError as error:
        way_out = f"pip install pooch, or {_by_hand(downloads, target)}"
        raise DataError(name, "downloading needs pooch", way_out) from error
    if bar is None:  # pooch's progress bar needs tqdm
        bar = importlib.util.find_spec("tqdm") is not None
    for item in downloads:
        try:
            _fetch(pooch, item, target, bar)
        except Exception as error:  # of the network, of the disk, of pooch: one way out
            why = _WHY.get(type(error).__name__)
            why = why.format(urlsplit(item.url).netloc) if why else str(error)
            way_out = f"try again, or {_by_hand(downloads, target)}"
            raise DataError(item.url, f"could not be downloaded ({why})", way_out) from error


def _by_hand(downloads: tuple[Download, ...], target: Path) -> str:
    """Which files to put where, of those that are not there."""
    addresses = [item.url.rsplit("/", 1) for item in downloads]
    absent = [(base, file) for base, file in addresses if not (target / file).exists()]
    files = ", ".join(file for _, file in absent or addresses)
    then = " and repeat this, which checks and unpacks it" if downloads[0].members else ""
    return f"put {files} from {addresses[0][0]}/ into {target}{then}"


def _fetch(pooch: Any, item: Download, target: Path, bar: Any) -> None:
    base, file = item.url.rsplit("/", 1)
    pooch.get_logger().setLevel("WARNING")  # we tell what is to be told
    store = pooch.create(
        path=target, base_url=base + "/", registry={file: item.checksum}, retry_if_failed=_RETRIES
    )
    processor = None
    if item.members:
        unpack = pooch.Unzip if file.endswith(".zip") else pooch.Untar
        processor = unpack(members=list(item.members), extract_dir=".")
    store.fetch(file, processor=processor, progressbar=bar)
