# mypy: ignore-errors
"""Optimizer steps on CPU: all parameters in one compiled call per pass, on several threads.

The kernels of a method are generated: its rules inside loops over stretches of memory that LLVM
vectorises. Threads take items in turn until none is left. Each item's result is its own, so the
number of threads changes nothing.

The update goes through the items backwards: what the first pass read last is still in the cache.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from upgd.kernels import cpu_math, flat
from upgd.kernels.rules import CORRECTIONS, NUMBERS, STATES, gates_by_share, load_module, source
from upgd.rules.vocabulary import Method

MOST_QUADS, FEWEST_QUADS = 16384, 512
"""Bounds for the quads of an item: long stretches prefetch well, many items balance threads."""
ALONE = 1 << 15
"""The fewest weights for which a second thread pays off."""


class Kernels(NamedTuple):
    """A method's two passes, compiled at their first call.

    Each takes a counter of items taken, the items and the tables of :mod:`upgd.kernels.flat`.
    `first` leaves in ``partial``, for each item, the largest magnitude of a weight or derivative in
    column 1 and, if it is a maximum that makes η, the largest trace in column 0 and the largest
    magnitude of one in column 2; if norms make η, it leaves those and its items are tensor, first
    and last row.
    """

    first: Any
    update: Any


def kernels(method: Method, real: str) -> Kernels:
    """The kernels of a method for ``real`` = ``"float32"`` or ``"float64"``."""
    second = "curvature" in method.needs
    reduction = method.phases[0].reduce if flat.uses_eta(method) else None
    return Kernels(
        _first(method, reduction, second, real), _second(method, reduction, second, real)
    )


def _texts(arrays: list[str], real: str, rule: str = "") -> dict[str, Any]:
    """Values for the templates below: `rule` becomes the body of their loops."""
    _, *lines, last = rule.splitlines() if rule else ("", "")
    words = set(re.findall(r"\w+", rule.partition(":")[2]))
    results = last.removeprefix("    return ").split(", ")
    given = {"g": "factor * G[i]", "h": "h_factor * H[i]", "noise": "z[i]"}
    given |= {name: f"{name.upper()}[i]" for name in ("w", *STATES)}
    read = [name for name in given if name in words and name in (*arrays, "noise")]
    size = int(real[-2:]) // 8
    columns = (*NUMBERS, *CORRECTIONS, "due")
    numbers = [(name, k) for k, name in enumerate(columns) if name in words]
    indent = "\n    "
    return {
        "open": indent.join(
            f"{a.upper()} = carray(pointer(t[{_column(a)}] + {size} * first), n, real)"
            for a in arrays
        ),
        "name": indent.join(f"{name} = m[{k}]" for name, k in numbers),
        "body": "\n    ".join([f"    {name} = {given[name]}" for name in read] + lines),
        "result": results[0],
        "store": "\n        ".join(
            f"{name.upper()}[i] = {value}"
            for name, value in zip(("w", *STATES), results, strict=False)
            if name in arrays and name != value
        ),
        "magnitude": "maximum(maximum(abs(W[i]), abs(factor * G[i])), abs(H[i]))"
        if "h" in arrays
        else "maximum(abs(W[i]), abs(factor * G[i]))",
        "tiny": float(np.finfo(real).tiny),
        "version": cpu_math.VERSION,
        "real": real,
        "bits": real[-2:],
    }


def _first(method: Method, reduction: str | None, second: bool, real: str) -> Any:
    read = ["w", "g", *["h"] * second]
    check = _CHECK.format(**_texts(read, real))
    if reduction is None:
        name, texts = "check", _texts([], real)
        parts = [_HEAD.format(**texts), check, _CHECK_KERNEL]
    else:
        place = method.states.index(method.phases[0].writes[0])
        rule = source(method, "reduce", "numba")
        texts = _texts([*read, STATES[place]], real, rule)
        name = "reduce" if reduction == "max" else "norms"
        parts = [_REDUCE, _REDUCE_KERNEL] if reduction == "max" else [_NORMS, _NORMS_KERNEL]
        parts = [_HEAD.format(**texts), check, parts[0].format(**texts), parts[1]]
    return getattr(load_module("\n\n".join(parts), f"{name}_{real}"), f"{name}_kernel")


def _second(method: Method, reduction: str | None, second: bool, real: str) -> Any:
    noisy = "noise" in method.needs
    arrays = ["w", "g", *["h"] * second, *STATES[: len(method.states)]]
    rule = source(method, "update", "numba")
    texts = _texts(arrays, real, rule)
    parts = [_HEAD.format(**texts), _STRETCH.format(near="", **texts)]
    # A gate near ½ is a cheaper function, but in float64 not exact enough.
    near = "sigmoid(" in rule and real == "float32" and gates_by_share(method)
    if near:
        cheap = _texts(arrays, real, rule.replace("sigmoid", "near_sigmoid32"))
        parts.append(_STRETCH.format(near="near_", **cheap))
    if reduction == "row_norm":
        walk = _BY_ROW.format(near="near_" * near)
    else:
        walk = _BY_MAGNITUDE if near and reduction == "max" else _AT_ONCE
    texts |= {"noise": _NOISE if noisy else "", "walk": walk}
    parts.append(_UPDATE_KERNEL.format(**texts))
    return load_module("\n\n".join(parts), f"update_{real}").update_kernel


def _column(name: str) -> int:
    places = {"w": flat.W, "g": flat.G, "h": flat.H}
    return places[name] if name in places else flat.STATE + int(name[1:])


def quads(weights: int) -> int:
    """The quads of an item; depends only on the number of weights."""
    share = weights // 128 // FEWEST_QUADS * FEWEST_QUADS  # about 32 items
    return max(FEWEST_QUADS, min(MOST_QUADS, share))


# --------------------------------------------------------------------------- threads
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def launch(kernel: Any, items: Any, weights: int, *arguments: Any) -> None:
    """Run a kernel on all `items`, on as many threads as PyTorch uses."""
    todo = np.zeros(1, np.int64)
    if not kernel.signatures:  # compile once, before threads ask for it
        kernel(np.full(1, len(items)), items, *arguments)
    helpers = min(torch.get_num_threads(), len(items)) - 1 if weights > ALONE else 0
    waiting = [_helpers(helpers).submit(kernel, todo, items, *arguments) for _ in range(helpers)]
    kernel(todo, items, *arguments)
    for other in waiting:
        if not other.cancel():  # a task that has not started has nothing left to do
            other.result()


def _helpers(count):
    global _pool, _pool_size
    if _pool is None or _pool_size < count:
        _pool, _pool_size = ThreadPoolExecutor(count, "upgd"), count
    return _pool


def _forget_helpers():
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=_forget_helpers)


# ------------------------------------------------------------------- source of kernels
_COLUMNS = "\n".join(
    f"{name} = {getattr(flat, name)}"
    for name in ("TOTAL", "SPAN", "NUMBER", "GROUP", "LENGTH", "ROW", "FACTOR", "SIGN", "ETA")
)
_HEAD = (
    '''"""Generated for the helpers {version}."""

import numpy as np
from numba import carray, njit

from upgd.kernels.compiling import njit as kept
from upgd.kernels.cpu_functions import COEFFICIENTS, normals
from upgd.kernels.cpu_math import OPTIONS, near_sigmoid32, pointer, take_ticket
from upgd.kernels.cpu_math import sigmoid{bits} as sigmoid
from upgd.kernels.subnormals import flush_subnormals, give_back
from upgd.kernels.vectors import exp, fused, log, maximum, minimum, sign

real = np.{real}
zero = real(0)
DOUBLE = {bits} == 64
SUMS = {{**OPTIONS, "fastmath": OPTIONS["fastmath"] | {{"reassoc"}}}}
sqrt, absolute = np.sqrt, abs
'''
    + _COLUMNS
)
_STRETCH = """
@njit(**OPTIONS)
def {near}stretch(t, m, first, n, z, eta):
    {open}
    {name}
    factor, h_factor = real(m[FACTOR]), real(m[SIGN])
    for i in range(n):
    {body}
        {store}
"""
_UPDATE_KERNEL = """@kept(**OPTIONS)
def update_kernel(todo, items, tensors, numbers, partial, norms, seed, step, quads):
    drawn, words = np.empty(4 * quads, real), np.empty(4 * quads, np.uint32)
    z, table = drawn.reshape(4, quads), COEFFICIENTS.copy()
    while True:
        k = len(items) - 1 - take_ticket(todo)
        if k < 0:
            break
        tensor, start = items[k]
        t = tensors[tensor]
        m = numbers[t[GROUP]]
        span, total = t[SPAN], t[TOTAL]
        count = min(quads, span - start)
        eta = maximum(real(m[ETA]), real({tiny}))
        {noise}
        before = flush_subnormals()  # not while anything is allocated, which may raise
        for lane in range(4):
            first = lane * span + start
            end = min(first + count, total)
            if end <= first:
                break
{walk}
        give_back(before)
"""
_NOISE = "normals(drawn, words, table, quads, count, start, np.uint32(t[NUMBER]), step, seed)"
_AT_ONCE = """
            stretch(t, m, first, end - first, z[lane], eta)
"""
_BY_MAGNITUDE = """
            if partial[k, 2] <= eta:
                near_stretch(t, m, first, end - first, z[lane], eta)
            else:
                stretch(t, m, first, end - first, z[lane], eta)
"""
_BY_ROW = """
            begin = first
            while begin < end:
                row = begin // t[LENGTH]
                until = min(end, (row + 1) * t[LENGTH])
                own = z[lane, begin - first :]
                {near}stretch(t, m, begin, until - begin, own, norms[t[ROW] + row])
                begin = until
"""
_CHECK = """
@njit(**OPTIONS)
def largest_read(t, m, first, n):
    {open}
    factor = real(m[FACTOR])
    largest = zero
    for i in range(n):
        largest = maximum(largest, {magnitude})
    return largest
"""
_CHECK_KERNEL = """
@kept(**OPTIONS)
def check_kernel(todo, items, tensors, numbers, partial, quads):
    before = flush_subnormals()
    while True:
        k = take_ticket(todo)
        if k >= len(items):
            break
        tensor, start = items[k]
        t = tensors[tensor]
        m = numbers[t[GROUP]]
        span, total = t[SPAN], t[TOTAL]
        largest = zero
        for lane in range(4):
            first = lane * span + start
            n = min(first + min(quads, span - start), total) - first
            if n > 0:
                largest = maximum(largest, largest_read(t, m, first, n))
        partial[k, 1] = largest
    give_back(before)
"""
_REDUCE = """
@njit(**OPTIONS)
def largest_trace(t, m, first, n):
    {open}
    {name}
    factor, h_factor = real(m[FACTOR]), real(m[SIGN])
    largest, magnitude, read = real(-np.inf), zero, zero
    for i in range(n):
    {body}
        largest = maximum(largest, {result})
        magnitude = maximum(magnitude, abs({result}))
        read = maximum(read, {magnitude})
    return largest, magnitude, read
"""
_REDUCE_KERNEL = """
@kept(**OPTIONS)
def reduce_kernel(todo, items, tensors, numbers, partial, quads):
    before = flush_subnormals()
    while True:
        k = take_ticket(todo)
        if k >= len(items):
            break
        tensor, start = items[k]
        t = tensors[tensor]
        m = numbers[t[GROUP]]
        span, total = t[SPAN], t[TOTAL]
        largest, magnitude, read = real(-np.inf), zero, zero
        for lane in range(4):
            first = lane * span + start
            n = min(first + min(quads, span - start), total) - first
            if n > 0:
                one, two, three = largest_trace(t, m, first, n)
                largest, magnitude = maximum(largest, one), maximum(magnitude, two)
                read = maximum(read, three)
        partial[k, 0], partial[k, 1], partial[k, 2] = largest, read, magnitude
    give_back(before)
"""
_NORMS = """
@njit(**OPTIONS)
def largest_magnitude(t, m, first, n):
    {open}
    {name}
    factor, h_factor = real(m[FACTOR]), real(m[SIGN])
    largest = real({tiny})
    for i in range(n):
    {body}
        largest = maximum(largest, abs({result}))
    return np.float64(largest)


@njit(**SUMS)
def row_norm(t, m, first, n):
    {open}
    {name}
    factor, h_factor = real(m[FACTOR]), real(m[SIGN])
    # Squares of small utilities would underflow.
    scale = largest_magnitude(t, m, first, n) if DOUBLE else 1.0
    total = 0.0
    for i in range(n):
    {body}
        u = np.float64({result}) / scale
        total += u * u
    return maximum(real(np.sqrt(total) * scale), real({tiny}))
"""
_NORMS_KERNEL = """
@kept(**OPTIONS)
def norms_kernel(todo, rows, tensors, numbers, partial, norms):
    before = flush_subnormals()
    while True:
        k = take_ticket(todo)
        if k >= len(rows):
            break
        tensor, begin, end = rows[k]
        t = tensors[tensor]
        m = numbers[t[GROUP]]
        length = t[LENGTH]
        for row in range(begin, end):
            norms[t[ROW] + row] = row_norm(t, m, row * length, length)
        partial[k, 1] = largest_read(t, m, begin * length, (end - begin) * length)
    give_back(before)
"""
