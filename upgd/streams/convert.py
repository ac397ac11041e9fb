"""Makes the documented ``.npz`` (:func:`upgd.streams.read_npz`) out of the files people have."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd.streams.files import (
    DATASETS,
    Source,
    find_cifar,
    find_idx,
    find_original,
    npz_source,
    places,
)
from upgd.streams.images import (
    class_names,
    has_sprites,
    read_image_folder,
    read_sprite_labels,
    read_sprites,
)
from upgd.streams.readers import DataError, OnProgress, read_arrays, save_npz

Content = dict[str, NDArray[Any]]  # arrays under the names of the documented ``.npz``

_SPLITS = {"train": "", "test": "test_"}
_KINDS = ("inputs", "images", "features", "codes")
_UNDERSTOOD = (
    "it may hold idx files, CIFAR-10 batches, sprites with labels.npz, or a sub-folder of images "
    "per class"
)


class Written(NamedTuple):
    """What is in a written split."""

    split: str
    samples: int
    shape: tuple[int, ...]
    dtype: str
    classes: int


def read_source(source: Path, name: str | None, on_progress: OnProgress | None = None) -> Content:
    """The content of a folder or an ``.npz``, whichever way it is laid out.

    Folders: idx files, CIFAR-10 batches, sprites (:func:`upgd.streams.read_sprites`), or images
    with one sub-folder per class, either directly or below ``train`` and ``test``. An ``.npz``
    may call its inputs ``inputs``, ``images``, ``features`` or ``codes`` (with ``scale``), or use
    the names of Keras, ``x_train`` and ``y_train``.

    Args:
        source: a folder or an ``.npz``.
        name: of the dataset that this is, if one of :data:`DATASETS`.
        on_progress: called with the numbers of files read and of all, where there are many.

    Raises:
        DataError: the layout is unknown, or a file is wrong.
    """
    if source.is_file():
        return _from_npz(source)
    if not source.is_dir():
        raise DataError(source, "no such file or folder", "check the path")
    for find in _finders(source, name):
        train, test = find(split="train"), find(split="test")
        if train is not None:
            return _arrays("", train.read()) | (_arrays("test_", test.read()) if test else {})
        if test is not None:
            raise DataError(test.paths[0], "is there without its training data", "add those files")
    if has_sprites(source):
        content = _arrays("", read_sprites(source, False, on_progress))
        if read_sprite_labels(source, test=True):
            content |= _arrays("test_", read_sprites(source, True, on_progress))
        return content
    if class_names(source):
        return _from_images(source, on_progress)
    raise DataError(source, "holds nothing that can be converted", _UNDERSTOOD)


def write_content(path: Path, content: Mapping[str, NDArray[Any]], name: str | None) -> None:
    """Write a ``.npz`` that can be loaded, or nothing.

    Raises:
        DataError: the content is not that of dataset `name` (one of :data:`DATASETS`, or None for
            any), or the disk is full.
    """
    known = DATASETS.get(name or "")
    if known is not None and known.has_test and "test_inputs" not in content:
        wrong = f"has no test split, and {name} is published with one"
        raise DataError(path, wrong, "add the test files to the source")

    def verify(written: Path) -> None:
        try:
            for split, prefix in _SPLITS.items():
                if prefix + "inputs" in content:
                    npz_source(written, split, known).read()
        except DataError as error:  # under the name that the user knows
            raise DataError(path, f"not written: {error.wrong}", error.way_out) from error

    save_npz(path, _small(content), verify)


def describe(content: Mapping[str, NDArray[Any]]) -> list[Written]:
    """The splits of a content."""
    found = []
    for split, prefix in _SPLITS.items():
        if prefix + "inputs" in content:
            inputs, labels = content[prefix + "inputs"], content[prefix + "labels"]
            kind = "uint8 codes" if "scale" in content else str(inputs.dtype)
            classes = len(np.unique(labels))
            found.append(Written(split, len(inputs), tuple(inputs.shape[1:]), kind, classes))
    return found


def _small(content: Mapping[str, NDArray[Any]]) -> Content:
    """With labels in as few bytes as they need."""
    small = dict(content)
    for prefix in _SPLITS.values():
        labels = small.get(prefix + "labels")
        if labels is not None and labels.size and labels.dtype.kind in "iu" and labels.min() >= 0:
            small[prefix + "labels"] = labels.astype(np.min_scalar_type(int(labels.max())))
    return small


def _arrays(prefix: str, read: tuple[Any, ...]) -> Content:
    """Inputs and labels, and what else a reader returned, under their names."""
    return {prefix + "inputs": read[0], prefix + "labels": read[1]}


def _finders(folder: Path, name: str | None) -> Iterator[Callable[..., Source | None]]:
    """Ways to find a split: the dataset's own files, any pair of idx files, CIFAR-10's batches."""
    if name is not None and name in DATASETS:
        for place in places(name, folder):
            yield partial(find_original, name, folder=place)
    pattern = re.compile(r"(.*?)(train|test|t10k)-(images-idx3|labels-idx1)-ubyte(\.gz)?")
    matches = (pattern.fullmatch(file.name) for file in folder.iterdir())
    prefixes = sorted({match[1] for match in matches if match})
    if len(prefixes) > 1:
        wrong = f"holds the idx files of {len(prefixes)} sets ({', '.join(prefixes)})"
        raise DataError(folder, wrong, "put those of one set into a folder of their own")
    for prefix in map(glob.escape, prefixes):
        known = DATASETS.get(name or "")
        yield partial(find_idx, folder=folder, prefix=prefix, known=known)
    yield partial(find_cifar, folder=folder)


def _from_images(folder: Path, on_progress: OnProgress | None) -> Content:
    split = (folder / "train").is_dir() and bool(class_names(folder / "train"))
    train = folder / "train" if split else folder
    names = class_names(train)
    content = {"names": np.array(names)} | _arrays("", read_image_folder(train, names, on_progress))
    if split and (folder / "test").is_dir():
        content |= _arrays("test_", read_image_folder(folder / "test", names, on_progress))
    return content


def _from_npz(file: Path) -> Content:
    content: Content = {}
    for split, prefix in _SPLITS.items():
        inputs = (*(prefix + kind for kind in _KINDS), f"x_{split}")
        labels = (prefix + "labels", f"y_{split}")
        arrays, all_names = read_arrays(file, (*inputs, *labels))
        chosen = [next((n for n in names if n in arrays), None) for names in (inputs, labels)]
        if chosen == [None, None] and prefix:
            continue
        for name, choices in zip(chosen, (inputs, labels), strict=True):
            if name is None:
                wrong = f"has none of {', '.join(choices)} (it holds {', '.join(all_names)})"
                raise DataError(file, wrong, "rename its arrays")
        content[prefix + "inputs"] = _channels_first(arrays[str(chosen[0])])
        content[prefix + "labels"] = arrays[str(chosen[1])]
    others, _ = read_arrays(file, ("scale", "top", "names", "wnids"))
    if "wnids" in others:
        others["names"] = others.pop("wnids")
    return content | others


def _channels_first(inputs: NDArray[Any]) -> NDArray[Any]:
    """Colour images [n, height, width, 3] as [n, 3, height, width]; others as they are."""
    if inputs.ndim == 4 and inputs.shape[-1] == 3 and inputs.shape[1] != 3:
        return np.ascontiguousarray(inputs.transpose(0, 3, 1, 2))
    return inputs
