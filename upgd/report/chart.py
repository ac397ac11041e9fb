"""A line chart as SVG for a page: it scales, and takes the page's colours, light or dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 560, 330
LEFT, RIGHT, TOP, BOTTOM = 42, 84, 34, 46
LABEL_GAP = 17.0


def line_chart(
    curves: Mapping[str, NDArray[np.floating]], label: str, x_name: str, y_name: str
) -> str:
    """Means over seeds with standard errors, a line per name, a point per task.

    Line number i has the class ``line-i``; the page says which colour that is.

    Args:
        curves: By name, accuracies from 0 to 1, a row per seed and a column per task.
        label: What a screen reader says.
        x_name: The horizontal axis.
        y_name: The vertical axis.

    Example:
        >>> svg = line_chart({"a < b": np.array([[0.1, 0.2]])}, "An example", "task", "accuracy")
        >>> svg[:4], "a &lt; b" in svg
        ('<svg', True)
    """
    tasks = max((values.shape[1] for values in curves.values()), default=1)
    means = {name: values.mean(0) for name, values in curves.items()}
    errors = {name: _standard_error(values) for name, values in curves.items()}
    ends = [m + s * errors[n] for n, m in means.items() for s in (-1, 1)]
    low, high = _range(np.concatenate(ends)) if ends else (0.0, 1.0)

    def x(task: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (task / max(1, tasks - 1))

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">',
        *_axes(x, y, tasks, low, high, x_name, y_name),
    ]
    for number, (name, mean) in enumerate(means.items()):
        error = errors[name]
        upper = [(x(i), y(v)) for i, v in enumerate(mean + error)]
        lower = [(x(i), y(v)) for i, v in enumerate(mean - error)]
        if error.any():
            band = _points([*upper, *reversed(lower)])
            parts.append(f'<polygon class="band line-{number}" points="{band}"/>')
        line = _points((x(i), y(v)) for i, v in enumerate(mean))
        parts.append(f'<polyline class="line line-{number}" points="{line}"/>')
        for i, value in enumerate(mean):
            told = f"{name}, {x_name} {i + 1}: {value:.1%}"
            told += f" ± {error[i]:.1%}" if error.any() else ""
            place = f'cx="{x(i):.1f}" cy="{y(value):.1f}"'
            parts.append(
                f'<circle class="dot line-{number}" {place} r="3.5">'
                f"<title>{escape(told)}</title></circle>"
            )
    heights = _spread([y(float(mean[-1])) for mean in means.values()])
    for number, (name, height) in enumerate(zip(means, heights, strict=True)):
        place = f'x="{WIDTH - RIGHT + 9}" y="{height + 4.5:.1f}"'
        parts.append(f'<text class="name line-{number}" {place}>{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"])


def _axes(
    x: Callable[[float], float],
    y: Callable[[float], float],
    tasks: int,
    low: float,
    high: float,
    x_name: str,
    y_name: str,
) -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    step = 0.1 if high - low > 0.25 else 0.05
    for i in range(round((high - low) / step) + 1):
        value = low + i * step
        height = y(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}"/>'
        place = f'x="{LEFT - 8}" y="{height + 4.5:.1f}"'
        yield f'<text class="tick" {place} text-anchor="end">{value:.0%}</text>'
    stride = max(1, math.ceil(tasks / 8))
    for task in range(0, tasks, stride):
        place = f'x="{x(task):.1f}" y="{bottom + 18}"'
        yield f'<text class="tick" {place} text-anchor="middle">{task + 1}</text>'
    middle = f'x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 6}"'
    yield f'<text class="axis" {middle} text-anchor="middle">{escape(x_name)}</text>'
    yield f'<text class="axis" x="0" y="14">{escape(y_name)}</text>'


def _range(values: NDArray[np.floating]) -> tuple[float, float]:
    """Whole tenths around all values, from 0 to 1."""
    low = max(0.0, math.floor(float(values.min()) * 10 + 1e-9) / 10)
    high = min(1.0, math.ceil(float(values.max()) * 10 - 1e-9) / 10)
    return (low, high) if high > low else (max(0.0, low - 0.1), min(1.0, low + 0.1))


def _standard_error(values: NDArray[np.floating]) -> NDArray[np.floating]:
    if len(values) < 2:
        return np.zeros(values.shape[1])
    error: NDArray[np.floating] = values.std(0, ddof=1) / np.sqrt(len(values))
    return error


def _points(pairs: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)


def _spread(heights: Sequence[float]) -> list[float]:
    """Move labels apart that would lie upon each other, in their order, within the chart.

    Example:
        >>> _spread([100.0, 50.0, 101.0])
        [100.0, 50.0, 117.0]
        >>> _spread([283.0, 284.0])
        [267.0, 284.0]
    """
    moved = list(heights)
    order = sorted(range(len(moved)), key=lambda i: moved[i])
    last = -math.inf
    for i in order:
        last = moved[i] = max(moved[i], last + LABEL_GAP)
    last = HEIGHT - BOTTOM + LABEL_GAP
    for i in reversed(order):
        last = moved[i] = min(moved[i], last - LABEL_GAP)
    return moved
