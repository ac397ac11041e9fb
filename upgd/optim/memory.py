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

    Counts, and what is kept per unit, input or layer, are left out.

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


def supports(row: Row, precision: str) -> bool:
    """Whether a method has the options of a way to keep a model."""
    return not row.unsupported.keys() & PRECISIONS[precision][1].keys()


def memory_table() -> str:
    """Bytes per weight of all methods in a Markdown table, as the documentation has it."""
    alike: dict[tuple[int, int], list[str]] = {}
    for row in METHODS.values():
        count = 0 if "gates" in row.needs else len(row.states)
        lacking = sum(not supports(row, each) for each in PRECISIONS)
        alike.setdefault((count, lacking), []).append(row.name)
    lines = [
        f"| methods | traces | {' | '.join(PRECISIONS)} |",
        "|---|---|" + "---|" * len(PRECISIONS),
    ]
    for (count, _), names in sorted(alike.items()):
        row, totals = METHODS[names[0]], []
        for each in PRECISIONS:
            found = parts(row, each)
            total = f"{' + '.join(map(str, found))} = {sum(found)}"
            totals.append(total if supports(row, each) else "-")
        listed = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {listed} | {count} | {' | '.join(totals)} |")
    return "\n".join(lines)
