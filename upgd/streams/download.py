"""Fetches public datasets, with checksums and retries. Only then is ``pooch`` needed."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from upgd.streams.files import DATASETS, Download
from upgd.streams.readers import DataError

_RETRIES = 4
_WHY = {"ConnectionError": "no connection to {}", "ConnectTimeout": "{} does not answer"}


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
