"""One set of line colours for figures and pages, on white paper and on black.

The six differ in lightness as well as in hue, so that those who do not see red, green or blue as
others do can tell them apart, and each stands out from its paper as text must (4.5 to 1). From the
seventh line on they come again, dashed.
"""

from __future__ import annotations

LIGHT = ("#1769aa", "#b55a00", "#0b4a26", "#c2496f", "#4b3b6b", "#7d7440")
DARK = ("#6cb6ff", "#e8701a", "#7df5b0", "#cf6f91", "#ad60f8", "#f0ee7a")
DASHES = ("solid", "dash", "dot", "dashdot")
"""As plotly calls them."""


def style(number: int) -> tuple[int, int]:
    """The colour and the dash of a line, each by its number.

    Example:
        >>> style(0), style(7), style(24)
        ((0, 0), (1, 1), (0, 0))
    """
    return number % len(LIGHT), number // len(LIGHT) % len(DASHES)


def css(colours: tuple[str, ...]) -> str:
    """Colours as properties that a page's style uses.

    Example:
        >>> css(("#000000", "#ffffff"))
        '--c0: #000000; --c1: #ffffff;'
    """
    return " ".join(f"--c{number}: {colour};" for number, colour in enumerate(colours))
