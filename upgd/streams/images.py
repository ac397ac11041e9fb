"""Readers of image files: folders of classes, and sprites. They need Pillow."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd.streams.readers import DataError, Labels, OnProgress, read_arrays

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".tif", ".tiff"}
_LABELS = "labels.npz"


def read_image_folder(
    folder: Path, names: Sequence[str] | None = None, on_progress: OnProgress | None = None
) -> tuple[NDArray[np.uint8], Labels]:
    """Images in one sub-folder per class.

    All images must have one size; grey ones give [n, height, width], others
    [n, 3, height, width].

    Args:
        folder: of the classes' folders.
        names: of the classes, in order; by default those of the sub-folders, sorted.
        on_progress: called with the numbers of images read and of all.

    Raises:
        DataError: a file is not an image, or of another size; there are no classes.
    """
    pillow = need_pillow(folder)
    present = class_names(folder)
    if not present:
        raise DataError(folder, "has no sub-folders", "put each class in a sub-folder of its own")
    numbers = {name: label for label, name in enumerate(present if names is None else names)}
    files: list[tuple[Path, int]] = []
    for name in present:
        if name not in numbers:
            wrong = "is a class that the training images do not have"
            raise DataError(folder / name, wrong, "rename or remove it")
        found = sorted(f for f in (folder / name).iterdir() if f.suffix.lower() in SUFFIXES)
        if not found:
            raise DataError(folder / name, "has no images", "add some, or remove the folder")
        files += [(file, numbers[name]) for file in found]
    images = _together(
        [file for file, _ in files], lambda i, file: _image(pillow, file)[None], on_progress
    )
    return images, np.array([label for _, label in files], dtype=np.int64)


def _together(
    files: list[Path],
    read: Callable[[int, Path], NDArray[np.uint8]],
    on_progress: OnProgress | None,
) -> NDArray[np.uint8]:
    """The images [n, ...] of all files."""
    images: list[NDArray[np.uint8]] = []
    for number, file in enumerate(files):
        images.append(read(number, file))
        if images[-1].shape[1:] != images[0].shape[1:]:
            wrong = f"holds images of shape {images[-1].shape[1:]}, not {images[0].shape[1:]}"
            raise DataError(file, wrong, "give all images one size and one mode")
        if on_progress is not None:
            on_progress(number + 1, len(files))
    return np.concatenate(images)


def class_names(folder: Path) -> list[str]:
    """The classes of an images folder: its sub-folders, sorted."""
    if not folder.is_dir():
        raise DataError(folder, "is not a folder", "give one with a sub-folder per class")
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def has_sprites(folder: Path) -> bool:
    """Whether a folder has what :func:`read_sprites` reads."""
    return (folder / _LABELS).is_file()


def read_sprites(
    folder: Path, test: bool = False, on_progress: OnProgress | None = None
) -> tuple[NDArray[np.uint8], Labels]:
    """Sprites: large images that hold many small ones, and a ``labels.npz`` beside them.

    ``labels.npz`` has one array of labels per sprite, under the file's name without suffix.
    A sprite is a full grid of square images, row by row, as many as it has labels: their side is
    ``√(width · height / labels)``. Sprites whose names begin with ``test`` are the test split;
    within a split they are read in the order of their names, numbers by value.

    Args:
        folder: of the sprites.
        test: whether the test split is wanted.
        on_progress: called with the numbers of sprites read and of all.

    Returns:
        Images [n, 3, side, side] ([n, side, side] if grey) and labels.
    """
    pillow = need_pillow(folder)
    labels = read_sprite_labels(folder, test)
    if not labels:
        wrong = f"has no {'test' if test else 'training'} labels"
        raise DataError(folder / _LABELS, wrong, "add them under the names of their sprites")
    each = list(labels.values())
    files = [_sprite(folder, key) for key in labels]
    images = _together(files, lambda i, file: _tiles(pillow, file, each[i]), on_progress)
    return images, np.concatenate(each).astype(np.int64)


def read_sprite_labels(folder: Path, test: bool) -> dict[str, NDArray[Any]]:
    """The labels of a split's sprites, by their names, in order."""
    _, keys = read_arrays(folder / _LABELS, ())
    chosen = sorted((k for k in keys if k.startswith("test") == test), key=_natural)
    labels, _ = read_arrays(folder / _LABELS, tuple(chosen))
    return {key: labels[key] for key in chosen}


def _sprite(folder: Path, key: str) -> Path:
    found = sorted(f for f in folder.glob(f"{key}.*") if f.suffix.lower() in SUFFIXES)
    if not found:
        wrong = f"has labels for {key!r}, and there is no such image"
        raise DataError(folder / _LABELS, wrong, f"put {key}.png or {key}.webp beside it")
    return found[0]


def _tiles(pillow: Any, file: Path, labels: NDArray[Any]) -> NDArray[np.uint8]:
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels):
        wrong = f"has {labels.dtype} labels of shape {labels.shape} for {file.name}"
        raise DataError(file.parent / _LABELS, wrong, "labels are one integer per image")
    sprite = _image(pillow, file)
    height, width = sprite.shape[-2:]
    side = math.isqrt(height * width // len(labels))
    if side == 0 or height % side or width % side or height * width != side**2 * len(labels):
        wrong = f"is {width}×{height}, not a full grid of {len(labels)} square images"
        raise DataError(file, wrong, "it needs as many square images as labels")
    grid = sprite.reshape(-1, height // side, side, width // side, side)
    tiles: NDArray[np.uint8] = grid.transpose(1, 3, 0, 2, 4).reshape(len(labels), -1, side, side)
    return tiles[:, 0] if sprite.ndim == 2 else tiles


def _natural(text: str) -> list[tuple[int, str]]:
    """Sorts batch_2 before batch_10."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", text)]


def need_pillow(source: Path) -> Any:
    """``PIL.Image``, or an error that names what to install."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise DataError(source, "reading images needs Pillow", "pip install pillow") from error


def _image(pillow: Any, file: Path) -> NDArray[np.uint8]:
    return _pixels(
        pillow, file, lambda image: image.convert("L" if image.mode in ("1", "L") else "RGB")
    )


def read_square(pillow: Any, file: Path, side: int) -> NDArray[np.uint8]:
    """An image in colour, [3, side, side]: its middle square, scaled."""

    def square(image: Any) -> Any:
        colour = image.convert("RGB")
        width, height = colour.size
        if (width, height) == (side, side):
            return colour
        short = min(width, height)
        left, top = (width - short) / 2, (height - short) / 2
        box = (left, top, left + short, top + short)
        return colour.resize((side, side), pillow.Resampling.BILINEAR, box=box)

    return _pixels(pillow, file, square)


def _pixels(pillow: Any, file: Path, prepare: Callable[[Any], Any]) -> NDArray[np.uint8]:
    """A prepared image as [height, width], or [3, height, width] in colour."""
    try:
        with pillow.open(file) as image:
            pixels = np.asarray(prepare(image), dtype=np.uint8)
    except Exception as error:  # Pillow's plugins raise many kinds
        raise DataError(file, f"is not an image ({error})", "repair or remove it") from error
    return pixels if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
