"""How the paper's arms look: one colour and dash each, in every figure.

Families share a colour: dashed is the variant of the solid one, and lies over it where they agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from upgd.pages.colours import BLUE, GREEN, INK, OLIVE, ORANGE, PINK, PURPLE
from upgd.paper.experiments import PRINTED
from upgd.paper.searches import REFERENCE, WEIGHTS, variants
from upgd.report.plotting import made_look

SOLID, DASHED, DOTTED, DASH_DOTTED = range(4)
ARMS: Mapping[str, tuple[str, int]] = {
    "upgd": (BLUE, SOLID), "n-upgd": (BLUE, DASHED),
    "sgdw": (INK, SOLID), "shrink-and-perturb": (GREEN, SOLID), "pgd": (GREEN, DASHED),
    "adamw": (ORANGE, SOLID), "s-ewc": (PINK, SOLID), "s-rwalk": (PINK, DASHED),
    "s-mas": (PURPLE, SOLID), "s-si": (OLIVE, SOLID),
    "adam": (ORANGE, SOLID), "adam-restarts": (INK, DASHED),
    "ada-upgd": (BLUE, SOLID), "ada-upgd-authors": (PURPLE, DASHED),
    "adam-99": (PINK, DOTTED), "adam-half": (INK, DASHED), "adam+wd": (OLIVE, DASHED),
    "sgd": (INK, DOTTED), "sgd+wd": (INK, SOLID), "sgd+wp": (GREEN, DASHED),
    "sgd+wd+wp": (GREEN, SOLID), "upgd-wd": (PINK, DASHED), "upgd-wp": (ORANGE, DASHED),
    "upgd-ug": (PURPLE, SOLID), "sgd+ug": (OLIVE, SOLID), REFERENCE: (INK, DASH_DOTTED),
}  # fmt: skip
"""Colour and dash by arm."""
_SECOND_ORDER = {"upgd": (ORANGE, DASHED), "n-upgd": (PURPLE, SOLID)}
_OF_KINDS = {
    name: ARMS[method] if order == 1 else _SECOND_ORDER[method]
    for method in WEIGHTS
    for order in (1, 2)
    for name in variants(method, order)
}
"""Kinds of utility look as their method: each kind has its own panels."""


def look(arm: str) -> dict[str, Any]:
    """The look of an arm's line, of its printed set the same with dots; KeyError if none."""
    colour, dash = (dict(ARMS) | _OF_KINDS)[arm.removesuffix(PRINTED)]
    if arm.endswith(PRINTED):
        dash = DOTTED if dash == SOLID else DASH_DOTTED
    return made_look(colour, dash)


def colour(arm: str) -> str:
    """The colour of an arm; KeyError if it has none."""
    return str(look(arm)["color"])
