"""Figures that need no study; see :mod:`upgd.paper.measuring`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from upgd.paper import update_time, utility_quality
from upgd.paper.measuring import Measured

_ALL: tuple[Measured, ...] = (utility_quality, update_time)
MEASURED: Mapping[str, Measured] = {module.NAME: module for module in _ALL}
"""By name."""


def of_folder(folder: Path) -> Measured | None:
    """The module whose table is in a folder, or None."""
    return next((m for m in MEASURED.values() if (folder / m.TABLE).exists()), None)
