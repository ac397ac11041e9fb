"""One palette for figures and pages, on white paper and on black.

The six colours of lines differ in lightness as well as in hue, for any colour blindness, and have
the contrast that text needs (4.5 to 1). From the seventh line on they repeat, dashed.
"""

from __future__ import annotations

LIGHT = ("#1769aa", "#b55a00", "#0b4a26", "#c2496f", "#4b3b6b", "#7d7440")
DARK = ("#6cb6ff", "#e8701a", "#7df5b0", "#cf6f91", "#ad60f8", "#f0ee7a")
BLUE, ORANGE, GREEN, PINK, PURPLE, OLIVE = LIGHT
INK, SOFT, RULE, EDGE = "#1c1e21", "#5a6068", "#d9dce1", "#767c85"
"""On white: text, side notes, grids, and the frames of axes. A baseline may be drawn in ink."""
DASHES = ("solid", "dash", "dot", "dashdot")
"""Plotly's names."""


def style(number: int) -> tuple[int, int]:
    """The numbers of a line's colour and dash."""
    return number % len(LIGHT), number // len(LIGHT) % len(DASHES)


def css(colours: tuple[str, ...]) -> str:
    """Colours as CSS properties."""
    return " ".join(f"--c{number}: {colour};" for number, colour in enumerate(colours))
