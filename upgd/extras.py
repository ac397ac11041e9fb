"""How to install what an optional part of the package needs."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires


def install(extra: str) -> str:
    """The command that installs what an extra needs, without asking any index for this package.

    Example:
        >>> install("fast")
        "pip install 'numba>=0.60'"
    """
    try:
        found = _needed(extra, requires("upgd") or [])
    except PackageNotFoundError:  # run from its sources
        found = []
    return f"pip install {' '.join(map(repr, found))}" if found else f"pip install '.[{extra}]'"


def _needed(extra: str, every: list[str]) -> list[str]:
    """The requirements of an extra, those of extras that it names included; markers are dropped."""
    found = []
    for line in every:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        if not re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", marker):
            continue
        inner = re.fullmatch(r"upgd\[([\w,-]+)\]", requirement)
        some = (
            [each for name in inner[1].split(",") for each in _needed(name, every)] if inner else []
        )
        found += some or [requirement]
    return list(dict.fromkeys(found))
