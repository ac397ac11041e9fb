"""Numbers as text."""

from __future__ import annotations

from collections.abc import Iterable


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
