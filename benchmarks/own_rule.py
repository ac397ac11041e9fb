"""UPGD-W as a user would write it: the same arithmetic as the package's, other names."""

from __future__ import annotations

from typing import Any

from upgd.optim.custom import rule_row
from upgd.optim.registry import register
from upgd.rules.ops import sigmoid


def trace(w: Any, g: Any, worth: Any, memory: Any) -> Any:
    """The utility trace."""
    return memory * worth + (1 - memory) * (-g * w)


def update(
    w: Any, g: Any, worth: Any, noise: Any, eta: Any, lr: Any, decay: Any, sigma: Any
) -> Any:
    """The protected update."""
    return (1 - lr * decay) * w - 2 * lr * ((g + sigma * noise) * sigmoid(worth / -eta))


def own_upgd() -> str:
    """Register the rule; returns its name."""
    row = rule_row(
        "own-upgd",
        (trace, update),
        states=("worth",),
        decays={"worth": "memory"},
        reduce="max",
        lr=0.01,
        decay=0.0,
        sigma=0.01,
        memory=0.999,
    )
    return register(row).name
