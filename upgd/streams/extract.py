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
_ONE_EACH = "put each class in a sub-folder of its own"
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's colours


def list_images(folder: Path) -> tuple[list[Path], list[int], list[str]]:
    """All images below a folder; the class of an image is the folder that it lies in.

    So ``cat/1.jpg`` and ``train/cat/1.jpg`` are both cats, and mini-ImageNet's three parts with
    their different classes make one dataset.

    Returns:
        The files, by class and then by path; their labels; the classes' names, sorted.
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
        raise DataError(folder, wrong, _ONE_EACH)
    if not found:
        raise DataError(folder, "has no images", _ONE_EACH)
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
    """The average-pooled features of images in a frozen ResNet-50, [n, 2048].

    Images become squares of 84×84: the middle, scaled. float16 has an error below 0.05% of a
    value and halves the file. `weights` is a file with the network's state dict; by default
    torchvision downloads its ``IMAGENET1K_V1``.

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


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


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
        wrong = f"computing features needs torchvision ({_line(error)}); pip install torchvision"
        raise ValueError(wrong) from error
    if weights is None:
        chosen, way_out = models.ResNet50_Weights.IMAGENET1K_V1, "get it and give --weights FILE"
        try:
            model: nn.Module = models.resnet50(weights=chosen)
        except OSError as error:  # no network
            wrong = f"could not be downloaded ({_line(error)})"
            raise DataError(chosen.url, wrong, way_out) from error
    else:
        model = models.resnet50(weights=None)
        try:
            model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        except FileNotFoundError:
            raise DataError(weights, "no such file", "give the state dict of a ResNet-50") from None
        except Exception as error:  # of pickle, of zip, of PyTorch
            reason = _line(error)
            reason = reason[:200] + " …" if len(reason) > 200 else reason
            wrong = f"is not the state dict of torchvision's resnet50 ({reason})"
            raise DataError(weights, wrong, "torchvision's own is resnet50-0676ba61.pth") from error
    model.fc = nn.Identity()
    return model
