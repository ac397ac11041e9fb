"""Features of images by a frozen ResNet-50, as mini-ImageNet's are made. Needs torchvision."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from upgd.streams.images import SUFFIXES, need_pillow, read_square
from upgd.streams.readers import DataError, OnProgress

SIDE = 84
FEATURES = 2048
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's colours


def list_images(folder: Path) -> tuple[list[Path], list[int], list[str]]:
    """All images below a folder; the class of an image is the folder that it lies in.

    So ``cat/1.jpg`` and ``train/cat/1.jpg`` are both cats, and mini-ImageNet's three parts with
    their different classes make one dataset.

    Returns:
        The files, by class and then by path; their labels; the classes' names, sorted.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("train/dog", "test/cat"):
        ...     (folder / name).mkdir(parents=True)
        ...     (folder / name / "1.jpg").touch()
        >>> list_images(folder)[1:]
        ([0, 1], ['cat', 'dog'])
    """
    if not folder.is_dir():
        raise DataError(folder, "no such folder", "give one with a sub-folder of images per class")
    found = [
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]
    if loose := [file for file in found if file.parent == folder]:
        wrong = f"has images outside of any class ({loose[0].name})"
        raise DataError(folder, wrong, "put each class in a sub-folder of its own")
    if not found:
        raise DataError(folder, "has no images", "put each class in a sub-folder of its own")
    found.sort(key=lambda file: (file.parent.name, file))
    names = sorted({file.parent.name for file in found})
    numbers = {name: label for label, name in enumerate(names)}
    return found, [numbers[file.parent.name] for file in found], names


def extract(
    files: list[Path],
    weights: Path | None = None,
    device: str = "cpu",
    batch: int = 64,
    on_progress: OnProgress | None = None,
) -> NDArray[np.float16]:
    """What a frozen ResNet-50 sees in images: its average-pooled features, [n, 2048].

    Images become squares of 84×84: the middle, scaled. Kept as float16, whose error is below
    0.05% of a value and halves the file.

    Args:
        files: the images.
        weights: a file with the network's state dict; by default torchvision's
            ``IMAGENET1K_V1``, which it downloads.
        device: where the network runs.
        batch: images at a time.
        on_progress: told how many images are done.

    Raises:
        DataError: an image cannot be read, or the weights do not fit.
        ValueError: torchvision or the device is missing.
    """
    pillow = need_pillow(files[0].parent)
    place = _device(device)
    model = _resnet50(weights).eval().requires_grad_(False).to(place)
    mean, std = (torch.tensor(c, device=place).view(1, 3, 1, 1) for c in (_MEAN, _STD))
    features = np.empty((len(files), FEATURES), dtype=np.float16)
    with torch.inference_mode():
        for first in range(0, len(files), batch):
            some = files[first : first + batch]
            pixels = torch.from_numpy(np.stack([read_square(pillow, f, SIDE) for f in some]))
            seen = model((pixels.to(place).float() / 255 - mean) / std)
            if seen.shape != (len(some), FEATURES):
                raise ValueError(f"this ResNet-50 gives {tuple(seen.shape[1:])}, not {FEATURES}")
            features[first : first + len(some)] = seen.half().cpu().numpy()
            if on_progress is not None:
                on_progress(first + len(some), len(files))
    return features


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split("\n")[0].split())
        raise ValueError(f"cannot use device {name!r} ({reason}); try cpu or cuda") from error
    return device


def _resnet50(weights: Path | None) -> nn.Module:
    try:
        models: Any = importlib.import_module("torchvision.models")
    except Exception as error:  # a torchvision of another torch raises RuntimeError
        reason = " ".join(str(error).split())
        raise ValueError(
            f"computing features needs torchvision ({reason}); pip install torchvision"
        ) from error
    if weights is None:
        chosen = models.ResNet50_Weights.IMAGENET1K_V1
        try:
            model: nn.Module = models.resnet50(weights=chosen)
        except OSError as error:  # no network
            wrong = f"could not be downloaded ({' '.join(str(error).split())})"
            raise DataError(
                chosen.url, wrong, "get it elsewhere and give --weights FILE"
            ) from error
    else:
        model = models.resnet50(weights=None)
        try:
            model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        except FileNotFoundError:
            raise DataError(weights, "no such file", "give the state dict of a ResNet-50") from None
        except Exception as error:  # of pickle, of zip, of PyTorch
            reason = " ".join(str(error).split())
            if len(reason) > 200:
                reason = reason[:200] + " …"
            wrong = f"is not the state dict of torchvision's resnet50 ({reason})"
            raise DataError(weights, wrong, "torchvision's own is resnet50-0676ba61.pth") from error
    model.fc = nn.Identity()
    return model
