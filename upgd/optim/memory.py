"""What weights, gradients and states take in memory."""

from __future__ import annotations

from typing import Any

import torch

from upgd.optim.batch import compute_dtype
from upgd.optim.registry import METHODS, Row

PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "float32, bfloat16 traces": (torch.float32, {"trace_dtype": torch.bfloat16}),
    "bfloat16": (torch.bfloat16, {"rounding": "stochastic"}),
    "bfloat16, bfloat16 traces": (
        torch.bfloat16,
        {"rounding": "stochastic", "trace_dtype": torch.bfloat16},
    ),
    "bfloat16, master weights": (torch.bfloat16, {"master_weights": True}),
}
"""Ways to keep a model: the dtype of its weights, and options of the optimizer."""


def parts(row: Row, precision: str) -> tuple[int, int, int]:
    """Bytes per weight of weights, gradients and what the optimizer keeps.

    Counts and the utilities of features, one per unit, are left out.

    Args:
        row: Of the registry.
        precision: A key of :data:`PRECISIONS`.

    Example:
        >>> from upgd.optim.registry import METHODS
        >>> parts(METHODS["ada-upgd"], "bfloat16, bfloat16 traces")
        (2, 2, 6)
    """
    dtype, options = PRECISIONS[precision]
    trace: torch.dtype = options.get("trace_dtype") or compute_dtype(dtype)
    traces = 0 if "gates" in row.needs else len(row.states)
    master = 4 if options.get("master_weights") else 0
    return dtype.itemsize, dtype.itemsize, traces * trace.itemsize + master


def memory_table() -> str:
    """Bytes per weight of all methods in a Markdown table, as the documentation has it."""
    alike: dict[int, list[str]] = {}
    for row in METHODS.values():
        count = 0 if "gates" in row.needs else len(row.states)
        alike.setdefault(count, []).append(row.name)
    lines = [
        f"| methods | traces | {' | '.join(PRECISIONS)} |",
        "|---|---|" + "---|" * len(PRECISIONS),
    ]
    for count, names in sorted(alike.items()):
        cells = [" + ".join(map(str, parts(METHODS[names[0]], each))) for each in PRECISIONS]
        totals = [f"{cell} = {sum(map(int, cell.split(' + ')))}" for cell in cells]
        listed = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {listed} | {count} | {' | '.join(totals)} |")
    return "\n".join(lines)
