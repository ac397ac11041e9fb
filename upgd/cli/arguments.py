"""What people type: numbers, seeds and hyperparameters."""

from __future__ import annotations

from upgd.optim.registry import get as get_method


def whole(name: str, text: str) -> int:
    """A whole number from 1 on, such as 1e6."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value >= 1 or value != int(value):
        raise ValueError(f"{name} must be a whole number from 1 on, such as 1e6; got {text!r}")
    return int(value)


def seed_list(text: str) -> list[int]:
    """Seeds from their number (20), a list (3,5) or a range (0-4)."""
    try:
        if "," in text:
            return [int(part) for part in text.split(",") if part]
        if "-" in text.strip("-"):
            first, last = (int(part) for part in text.split("-"))
            return list(range(first, last + 1))
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError(f"seeds are a number (20), a list (3,5) or a range (0-4); got {text!r}")
    return list(range(count))


def hyperparameters(methods: list[str], settings: list[str]) -> dict[str, dict[str, float]]:
    """The hyperparameters of each method: those of ``--set`` that it has."""
    given: dict[str, float] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        try:
            given[name] = float(text)
        except ValueError:
            raise ValueError(f"--set takes name=number, such as lr=0.01; got {setting!r}") from None
        if not equals:
            raise ValueError(f"--set takes name=number, such as lr=0.01; got {setting!r}")
    found: dict[str, dict[str, float]] = {}
    used: set[str] = set()
    for method in methods:
        _, defaults = get_method(method)
        scalars = {k: float(v) for k, v in defaults.items() if k != "betas"}
        if "betas" in defaults:
            scalars["beta1"], scalars["beta2"] = defaults["betas"]
        mine = {k: v for k, v in given.items() if k in scalars}
        used |= mine.keys()
        found[method.lower()] = {**scalars, **mine}
    unused = given.keys() - used
    if unused:
        raise ValueError(
            f"none of {', '.join(methods)} has a hyperparameter {', '.join(sorted(unused))}; "
            "'upgd list methods' shows what they have"
        )
    return found
