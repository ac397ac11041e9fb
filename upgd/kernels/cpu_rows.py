# mypy: ignore-errors
"""Each method's update of a row of weights, compiled: the part of a learner that knows a method.

The rules are those of the optimizers, written out by :mod:`upgd.kernels.rules` and put into loops
over a row; the generated modules are kept on disk with their machine code. Needs numba.
"""

from __future__ import annotations

from functools import cache

from numba import types

from upgd.kernels import cpu_functions, philox, vectors
from upgd.kernels.rules import (
    ARGUMENTS,
    NUMBERS,
    fingerprint,
    gates_by_share,
    load_module,
    reduces,
    source,
)

VERSION = fingerprint(__file__, cpu_functions.__file__, vectors.__file__, philox.__file__)
"""Part of generated modules: a change of the helpers invalidates their cache."""

_HEAD = '''"""What {name} does to a row of weights, in {real}; upgd.kernels.cpu_rows {version}."""

import numpy as np
from numba import njit, types

from upgd.kernels import cpu_rows
from upgd.kernels.compiling import cfunc
from upgd.kernels.cpu_functions import near_sigmoid, sigmoid
from upgd.kernels.vectors import (
    LANES, absolute, choose, equal, exp, fused, largest, lanes, less, load, log, maximum, minimum,
    sign, smallest, spread, sqrt, store, total, widened,
)

real = np.{real}
ZERO = real(0.0)
ONE = real(1.0)
LOWEST = real(-np.inf)
SIGNATURES = cpu_rows.signatures("{real}")
'''

_UPDATE = """
@cfunc(SIGNATURES[0], error_model="numpy")
def {function}(w, s, gap, x, v, z, inputs, d, q, eta, eta_bias, hyper, c, out):
    {numbers}
    {corrections} = {correction_values}
    was = spread(ZERO)
    now = spread(ZERO)
    top = spread(LOWEST)
    low = spread(-LOWEST)
    big = spread(ZERO)
    whole = inputs - inputs % LANES
    for j in range(0, whole, LANES):
        w_j = load(w, j)
        x_j = load(x, j)
{main}
    j = whole
    w_j = load(w, j)
    x_j = load(x, j)
    last = spread(np.uint32(inputs - whole))
    inside = less(lanes(), last + np.uint32(1))
{tail}
    out[0] = total(was)
    out[1] = total(now)
{noted}"""

_REDUCE = """
@cfunc(SIGNATURES[1], error_model="numpy")
def reduce_row(w, s, x, inputs, d, q, hyper, out):
    {numbers}
    {corrections} = {ones}
    top = spread({start})
    whole = inputs - inputs % LANES
    for j in range(0, whole, LANES):
        x_j = load(x, j)
        u = reduce({arguments})
        top = {fold}
    j = whole
    x_j = load(x, j)
    last = spread(np.uint32(inputs - whole))
    u = reduce({arguments})
{tail}"""

_TRACE = """
@cfunc(SIGNATURES[2], error_model="numpy")
def trace_units(d, q, h, u, count, beta):
    for i in range(count):
        u[i] = trace(d[i] * h[i], q[i] * h[i] * h[i], u[i], beta)
"""


@cache
def signatures(real):
    """Sources of a method's functions on rows of weights, traces and units."""
    dtype = getattr(types, real)
    numbers, wide, size = types.CPointer(dtype), types.CPointer(types.float64), types.intp
    update = types.void(
        *(numbers, numbers, size, numbers, numbers, numbers, size, dtype, dtype, dtype, dtype),
        *(wide, wide, numbers),
    )
    reduce = types.void(numbers, numbers, numbers, size, dtype, dtype, wide, numbers)
    trace = types.void(numbers, numbers, numbers, numbers, size, types.float64)
    return update, reduce, trace


def row_functions(row, real):
    """A method's functions for a learner, with dummies for those that it lacks.

    Args:
        row: Of the registry.
        real: ``"float32"`` or ``"float64"``.

    Returns:
        Addresses: of the update of a row; of the same where no utility is larger than η; of the
        trace from which η is taken; of the trace of features.
    """
    module = load_module(_rows_source(row, real), f"cpu_{row.name.replace('-', '_')}_{real}")
    update = module.update_row
    near = getattr(module, "update_row_near", update)
    reduce = getattr(module, "reduce_row", None) or _stand_ins(real).reduce_row
    trace = getattr(module, "trace_units", None) or _stand_ins(real).trace_units
    return tuple(function.address for function in (update, near, reduce, trace))


def _stand_ins(real):
    text = _HEAD.format(name="no method", real=real, version=VERSION) + (
        '\n\n@cfunc(SIGNATURES[1], error_model="numpy")\n'
        "def reduce_row(w, s, x, inputs, d, q, hyper, out):\n    out[0] = ZERO\n"
        '\n\n@cfunc(SIGNATURES[2], error_model="numpy")\n'
        "def trace_units(d, q, h, u, count, beta):\n    u[0] = ZERO\n"
    )
    return load_module(text, f"cpu_none_{real}")


@cache
def _rows_source(row, real):
    method, features = row.method, "gates" in row.needs
    reduce = reduces(method)
    states = 0 if features else len(row.states)
    parts = [_HEAD.format(name=row.name, real=real, version=VERSION)]
    values = {
        "w": "w_j",
        "g": "d * x_j",
        "h": "q * x_j * x_j",
        "noise": "load(z, j)" if "noise" in row.needs else "ZERO",
        **{f"s{k}": f"load(s, {k} * gap + j)" if k < states else "ZERO" for k in range(5)},
        "eta": "eta",
    }
    if features:  # the gate of the row's unit
        values |= {"s0": "eta", "eta": "ONE"}
    outputs = ", ".join(["w_j", *(f"n{k}" for k in range(5))])

    def block(rule, indent, inside, arguments):
        lines = [f"{outputs} = {rule}({', '.join(arguments.get(n, n) for n in ARGUMENTS)})"]
        names = ["w_j", *(f"n{k}" for k in range(states))]
        if inside:
            lines += [f"{n} = choose(inside, {n}, spread(ZERO))" for n in names]
        lines.append("store(w, j, w_j)")
        lines += [f"store(s, {k} * gap + j, n{k})" for k in range(states)]
        lines += ["was = was + w_j * x_j", "now = now + w_j * load(v, j)"]
        if reduce == "max":
            lines.append("big = maximum(big, absolute(w_j))")
            if inside:
                lines.append("top = maximum(top, choose(inside, n0, spread(LOWEST)))")
                lines.append("low = minimum(low, choose(inside, n0, spread(-LOWEST)))")
            else:
                lines += ["top = maximum(top, n0)", "low = minimum(low, n0)"]
        return "\n".join(" " * indent + line for line in lines)

    tail = dict(values)
    if reduce == "row_norm":
        tail["eta"] = "choose(equal(lanes(), last), spread(eta_bias), spread(eta))"
    corrections = [*(f"c{k}" for k in range(5)), "due"]
    noted = ["largest(top)", "smallest(low)", "largest(big)"] if reduce == "max" else []
    rule = source(method, "update", "numba")
    numbers = "\n    ".join(f"{name} = hyper[{i}]" for i, name in enumerate(NUMBERS))
    for near in (False, True) if gates_by_share(method) and real == "float32" else (False,):
        name = "update_near" if near else "update"
        text = rule.replace("def update(", f"def {name}(")
        text = text.replace(" sigmoid(", " near_sigmoid(") if near else text
        parts.append('\n\n@njit(error_model="numpy", forceinline=True)\n' + text)
        parts.append(
            "\n"
            + _UPDATE.format(
                function=name.replace("update", "update_row"),
                numbers=numbers,
                corrections=", ".join(corrections),
                correction_values=", ".join(f"c[{k}]" for k in range(6)),
                main=block(name, 8, False, values),
                tail=block(name, 4, True, tail),
                noted="".join(f"    out[{2 + i}] = {value}\n" for i, value in enumerate(noted)),
            )
        )
    if reduce is not None:
        parts.append(
            '\n\n@njit(error_model="numpy", forceinline=True)\n' + source(method, "reduce", "numba")
        )
        reads = {**values, "w": "load(w, j)", "noise": "ZERO", "eta": "ONE", "s0": "load(s, j)"}
        reads |= {f"s{k}": "ZERO" for k in range(1, 5)}
        wide = reduce == "row_norm"
        tails = (
            "    square = widened(choose(less(lanes(), last), u, spread(ZERO)))\n"
            "    top = top + square * square\n"
            "    out[0] = real(np.sqrt(total(top)))\n"
            "    out[1] = total(choose(equal(lanes(), last), u, spread(ZERO)))\n"
            if wide
            else "    inside = less(lanes(), last + np.uint32(1))\n"
            "    out[0] = largest(maximum(top, choose(inside, u, spread(LOWEST))))\n"
        )
        parts.append(
            "\n"
            + _REDUCE.format(
                numbers=numbers,
                corrections=", ".join(corrections),
                ones=", ".join(["1.0"] * 6),
                start="0.0" if wide else "LOWEST",
                fold="top + widened(u) * widened(u)" if wide else "maximum(top, u)",
                arguments=", ".join(reads.get(n, n) for n in ARGUMENTS),
                tail=tails,
            )
        )
    if features:
        parts.append(
            '\n\n@njit(error_model="numpy", forceinline=True)\n'
            + source(method, "features", "numba")
        )
        parts.append("\n" + _TRACE)
    return "".join(parts)
