"""What the step size of optimizers with a utility means, and how groups of before are converted.

Since convention 2 a weight without utility takes the whole step. Groups say so under
``"convention"``; those without it were saved when such a weight took half of the step of a
protecting optimizer, and half of the perturbation of a non-protecting one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

CONVENTION = "convention"
CURRENT = 2
STEP_SIZES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # with those of schedulers


class ConventionWarning(UserWarning):
    """A state dict had hyperparameters of an older convention; they were converted."""


def check(owner: str, group: Mapping[str, Any]) -> None:
    """Raise if a group follows a convention that this version does not know."""
    if group[CONVENTION] != CURRENT:
        raise ValueError(
            f"{owner}: convention must be {CURRENT}, got {group[CONVENTION]!r}; a state dict with "
            "another one is a newer version's"
        )


def converted(group: Mapping[str, Any], protect: bool, features: bool) -> dict[str, Any]:
    """A group in the current convention: the same steps bit for bit, as factors of two are exact.

    Args:
        group: Of a state dict.
        protect: Whether the gradient is gated, where the group does not say.
        features: Whether it has a utility per feature, so that its output layer had no gate.
    """
    if CONVENTION in group:
        return dict(group)
    protect = group.get("protect", protect) is not False
    factors = dict.fromkeys(STEP_SIZES, 0.5) | {"weight_decay": 2.0} if protect else {"sigma": 0.5}
    found = {CONVENTION: CURRENT, **group}
    # What is not a number is left for the checks to refuse.
    found |= {k: group[k] * f for k, f in factors.items() if k in group and _is_number(group[k])}
    if features:
        found.setdefault("output_gate", 2.0 if protect else 1.0)
    return found


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool | str) and hasattr(value, "__float__")


def warn(
    owner: str, given: Iterable[Mapping[str, Any]], taken: Iterable[Mapping[str, Any]]
) -> None:
    """Warn if groups were converted, with the values before and after."""
    lines: dict[str, None] = {}
    for before, after in zip(given, taken, strict=True):
        if CONVENTION not in before:
            names = [n for n in ("lr", "weight_decay", "sigma") if n in before]
            pairs = [(n, float(before[n]), float(after[n])) for n in names]
            lines |= dict.fromkeys(f"{n} {a:g} is now {b:g}" for n, a, b in pairs if a != b)
    if lines:
        halve = "; halve the base_lrs of its learning rate scheduler, too"
        warnings.warn(
            f"{owner}: this was saved when a weight without utility took half of the step (of the "
            f"perturbation, with protect=False). For the same updates, {', '.join(lines)}"
            f"{halve if any(line.startswith('lr') for line in lines) else ''}",
            ConventionWarning,
            stacklevel=2,
        )
