"""Numbers, settings and names as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def ranges(numbers: Iterable[int]) -> str:
    """Integers in few characters.

    Example:
        >>> ranges([3, 0, 1, 2, 7])
        '0-3,7'
    """
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in found)


def duration(seconds: float) -> str:
    """A time with its unit.

    Example:
        >>> duration(0.25), duration(7.3), duration(435), duration(20_000)
        ('0.2 s', '7 s', '7.2 min', '5.6 h')
    """
    if seconds < 120:
        return f"{seconds:.{0 if seconds >= 1 else 1}f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def printable(text: object) -> str:
    r"""Text that any terminal takes: what cannot be printed is escaped.

    >>> printable("caf\u00e9\n\x1b[31m")
    'café\\n\\x1b[31m'
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in str(text)
    )


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


def error_line(error: BaseException) -> str:
    r"""The type of an error and the first line of its message.

    >>> error_line(OSError("no such device\nline 2"))
    'OSError: no such device'
    """
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
