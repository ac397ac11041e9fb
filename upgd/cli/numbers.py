"""Numbers and settings as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from upgd.cli.app import printable


def short(number: float) -> str:
    """A number in few characters.

    >>> short(950), short(12_345), short(3_200_000)
    ('950', '12.3k', '3.2M')
    """
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.{1 if number < 100 * unit else 0}f}{name}"
    return f"{number:.0f}"


def clock(seconds: float) -> str:
    """A time in words of a clock; days where there are any.

    >>> clock(75), clock(3_675), clock(200_000)
    ('1:15', '1:01:15', '2 d 7:33:20')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def count(number: int, what: str) -> str:
    """So many of something.

    >>> count(1, "run"), count(2000, "run")
    ('1 run', '2000 runs')
    """
    return f"{number} {what}" + ("" if number == 1 else "s")


def pairs(values: Mapping[str, Any]) -> str:
    """Names and values.

    >>> pairs({"lr": 0.01, "hidden": "64-32"})
    'lr=0.01 hidden=64-32'
    """
    return " ".join(
        f"{printable(name)}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
    )
