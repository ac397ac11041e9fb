"""Fetches public datasets, with checksums and retries. Only then is ``pooch`` needed."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from upgd.streams.files import DATASETS, Download
from upgd.streams.readers import DataError

_RETRIES = 4


def fetch(name: str, folder: Path) -> None:
    """Download a dataset into the sub-folder `name` of `folder`. What is there is kept.

    Raises:
        DataError: it has no public files, ``pooch`` is missing, the network is, or a checksum
            is wrong; says what to do instead.

    Example:
        >>> fetch("mini-imagenet", Path("data"))
        Traceback (most recent call last):
        upgd.streams.readers.DataError: mini-imagenet: cannot be downloaded; place its files by hand
    """
    downloads = DATASETS[name].downloads
    if not downloads:
        raise DataError(name, "cannot be downloaded", "place its files by hand")
    try:
        pooch = importlib.import_module("pooch")
    except ImportError as error:
        raise DataError(name, "downloading needs pooch", "pip install pooch") from error
    target = folder / name
    for item in downloads:
        try:
            _fetch(pooch, item, target)
        except Exception as error:  # of the network, of the disk, of pooch: one way out
            way_out = f"or download {item.url} elsewhere and unpack it into {target}"
            wrong = f"could not be downloaded ({error})"
            raise DataError(item.url, wrong, f"try again, {way_out}") from error


def _fetch(pooch: Any, item: Download, target: Path) -> None:
    base, file = item.url.rsplit("/", 1)
    store = pooch.create(
        path=target,
        base_url=base + "/",
        registry={file: item.checksum},
        retry_if_failed=_RETRIES,
    )
    processor = None
    if item.members:
        unpack = pooch.Unzip if file.endswith(".zip") else pooch.Untar
        processor = unpack(members=list(item.members), extract_dir=".")
    bar = importlib.util.find_spec("tqdm") is not None  # pooch's progress bar needs it
    store.fetch(file, processor=processor, progressbar=bar)
