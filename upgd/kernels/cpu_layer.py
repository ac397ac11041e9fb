# mypy: ignore-errors
"""A step of a layered method on one model's own tensors, compiled: all phases in one call.

:func:`step_function` writes a module with a function per phase, which loops over the phase's
elements in every layer, and one that calls them in their order. Tensors are given by their
addresses. A phase over weights passes over memory once, in explicit vectors; the others are short.

Values of layers and of the network have one number per sample until the step ends; where layers
have different numbers of samples, they have the mean. Needs numba.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from upgd.kernels import cpu_functions, cpu_math, cpu_reductions, subnormals, vectors
from upgd.kernels.layered import phase_function
from upgd.kernels.rules import fingerprint, load_module
from upgd.rules.vocabulary import Method

INPUTS, OUTPUTS, SAMPLES, X, D, W, G, Z, B, BG, BZ, BEFORE, BEFORE_INPUTS, AFTER, STATES = range(15)
"""Columns of a layer's row: sizes; addresses of samples, of the weight, its gradient and noise, of
the bias, its gradient and noise; for features, the weight before and its inputs, and the layer's
own. Addresses of states follow (:func:`columns`). An address of 0 stands for nothing."""
OWNER, OF_WEIGHT, OF_BIAS = range(3)
"""Rows of a layer's numbers: those of the parameter that owns its states, of weight and bias."""
SIGN = "sign of gradients"
"""A number besides those that phases read: -1 to ascend."""

_HELPERS = (cpu_functions, cpu_math, cpu_reductions, subnormals, vectors)
VERSION = fingerprint(__file__, *(module.__file__ for module in _HELPERS))
"""Part of generated modules: a change of the helpers invalidates their cache."""


def columns(method: Method) -> dict[tuple[str, str], int]:
    """The column of each state in a layer's row, by place and name."""
    places = ("weights", "biases", "inputs", "units", "features", "layers")
    keys = [(place, name) for place in places for name in method.states_of(place)]
    return {key: STATES + k for k, key in enumerate(keys)}


def numbers_of(method: Method) -> dict[str, int]:
    """The place of each number in a row of numbers."""
    names = (*method.numbers, *(f"c_{name}" for name in method.states))
    return {name: k for k, name in enumerate((*names, "t", "head", "first", SIGN))}


# ------------------------------------------------------------------ source of kernels
_HEAD = '''"""A layered step in {real}; upgd.kernels.cpu_layer {version}."""

import numpy as np
from numba import njit

from upgd.kernels.compiling import njit as kept
from upgd.kernels.cpu_functions import sigmoid
from upgd.kernels.cpu_math import OPTIONS, numbers_at
from upgd.kernels.cpu_reductions import average, clear, means, sizes_of, take
from upgd.kernels.subnormals import flush_subnormals, give_back
from upgd.kernels.vectors import (
    LANES, absolute, exp, full, fused, load, log, maximum, minimum, sign, spread, sqrt, store, total
)

real = np.{real}
ZERO = real(0)
ONE = real(1)
'''
_COMMON = "table, numbers, live, shared, alike, scratch"
_LAYER = f"""    for layer in range(len(table)):
        t = table[layer]
        inputs, outputs, samples = t[{INPUTS}], t[{OUTPUTS}], t[{SAMPLES}]
"""
_ADVANCE = f"""

@kept(**OPTIONS)
def advance(table, numbers, network, alike):
    count = table[0, {SAMPLES}] if alike else 1
    live = np.empty((len(table), {{layers}}, count), real)
    shared = np.empty(({{network}}, count), real)
    widest = 1
    for layer in range(len(table)):
        widest = max(max(widest, count), max(table[layer, {INPUTS}], table[layer, {OUTPUTS}]))
    scratch = np.empty(({{rows}}, widest), real)
    before = flush_subnormals()  # not while anything is allocated, which may raise
    for layer in range(len(table)):
        for k in range({{layers}}):
            begin = numbers_at(table[layer, {{first}} + k], ZERO)[0]
            for n in range(count):
                live[layer, k, n] = begin
    for k in range({{network}}):
        begin = numbers_at(network[k], ZERO)[0]
        for n in range(count):
            shared[k, n] = begin
{{calls}}    for layer in range(len(table)):
        for k in range({{layers}}):
            numbers_at(table[layer, {{first}} + k], ZERO)[0] = average(live[layer, k])
    for k in range({{network}}):
        numbers_at(network[k], ZERO)[0] = average(shared[k])
    give_back(before)
"""


def step_function(method: Method, real: str) -> Any:
    """The step of a method for ``real`` = ``"float32"`` or ``"float64"``, compiled when called.

    It is called with a row of addresses per layer, [layers, columns]; numbers of each layer's
    owner, weight and bias, then those of the network, [layers + 1, 3, numbers]; addresses of the
    network's states; and whether all layers have the same samples.
    """
    return compiled(_Writer(method).source(real), real)


@cache
def compiled(text, real):
    """The step that a module defines; optimizers of one method share it."""
    return load_module(text, f"cpu_layer_{real}").advance


class _Writer:
    """Writes a method's module."""

    def __init__(self, method):
        self.method = method
        self.columns, self.numbers = columns(method), numbers_of(method)
        self.own_biases = any(phase.over == "biases" for phase in method.phases)
        self.of_layers = {name: k for k, name in enumerate(method.states_of("layers"))}
        self.of_network = {name: k for k, name in enumerate(method.states_of("network"))}

    def source(self, real):
        parts, calls = [_HEAD.format(real=real, version=VERSION)], ""
        rows = 2
        for number, phase in enumerate(self.method.phases):
            inlined = '\n\n@njit(error_model="numpy", forceinline=True)\n'
            parts.append(inlined + phase_function(self.method, number, "numba"))
            place = {"weights": "_weights", "biases": "_weights", "layers": "_layers"}
            place["network"] = "_network"
            lines = getattr(self, place.get(phase.over, "_elements"))(phase, number)
            parts.append(f"\n\n@njit(**OPTIONS)\ndef run_{number}({_COMMON}):\n{lines}")
            calls += f"    run_{number}({_COMMON})\n"
            rows = max(rows, 2 + len(phase.writes) + len(phase.sums))
        first = min([self.columns["layers", name] for name in self.of_layers], default=0)
        sizes = {"layers": len(self.of_layers), "network": len(self.of_network)}
        parts.append(_ADVANCE.format(**sizes, first=first, rows=rows, calls=calls))
        return "".join(parts)

    # --------------------------------------------------------------------------- names
    def _values(self, phase, row):
        """Lines that load a phase's numbers; what each name is called."""
        lines, known = [], {}
        for name in phase.reads:
            if name in self.numbers:
                wide = name not in ("t", "head", "first")
                value = f"numbers[{row}, {self.numbers[name]}]"
                lines.append(f"{name}_ = {value if wide else f'real({value})'}\n")
                known[name] = f"{name}_"
        return lines, known

    def _live(self, phase):
        """Values of layers and of the network for a sample."""
        known = {n: f"live[layer, {k}, k]" for n, k in self.of_layers.items()}
        known |= {n: f"shared[{k}, k]" for n, k in self.of_network.items()}
        return {name: text for name, text in known.items() if name in phase.reads}

    def _address(self, place, name):
        return f"numbers_at(t[{self.columns[place, name]}], ZERO)"

    def _call(self, phase, number, known):
        results = [f"r_{k}" for k in range(len(phase.writes) + len(phase.sums))]
        arguments = ", ".join(known[name] for name in phase.reads)
        call = f"{', '.join(results)} = phase_{number}({arguments})\n"
        return call, results[: len(phase.writes)], results[len(phase.writes) :]

    # -------------------------------------------------------- inputs, units and features
    def _elements(self, phase, number):
        """A phase over inputs, units or features, for each sample."""
        size = "outputs" if phase.over == "units" else "inputs"
        source = {"units": ("d", D)}.get(phase.over, ("x", X))
        lines, known = self._values(phase, "layer, 0")
        if phase.over == "features":
            lines.insert(0, f"if t[{BEFORE}] == 0:\n    continue\n")
        for name in self.method.states_of(phase.over):
            if name in (*phase.reads, *phase.writes):
                address = self._address(phase.over, name)
                lines.append(f"{name}_of = {address}\n")
                known[name] = f"{name}_of[j]"
        lines.append(f"read = numbers_at(t[{source[1]}], ZERO)\n")
        sign = f"real(numbers[layer, 0, {self.numbers[SIGN]}]) * " if source[0] == "d" else ""
        known[source[0]] = f"{sign}read[n * {size} + j]"
        if {"w_in", "w_out"} & set(phase.reads):
            into = f"t[{BEFORE_INPUTS}]"
            given = [f"numbers_at(t[{BEFORE}], ZERO)", into]
            given += [f"numbers_at(t[{AFTER}], ZERO)", "outputs", "inputs"]
            lines.append(f"sizes_of({', '.join(given)}, scratch[0], scratch[1])\n")
            known |= {"w_in": "scratch[0, j]", "w_out": "scratch[1, j]"}
        call, written, summed = self._call(phase, number, {**known, **self._live(phase)})
        lines.append("clear(scratch)\n")
        lines.append("for n in range(samples):\n    k = n if alike else 0\n")
        lines += [f"    sum_{k} = 0.0\n" for k in range(len(summed))]
        lines.append(f"    for j in range({size}):\n        {call}")
        lines += [f"        scratch[{2 + k}, j] += {r}\n" for k, r in enumerate(written)]
        lines += [f"        sum_{k} += np.float64({r})\n" for k, r in enumerate(summed)]
        first = 2 + len(written)
        for k in range(len(summed)):
            lines.append(f"    scratch[{first + k}, k] += sum_{k} / (1 if alike else samples)\n")
        for k, name in enumerate(phase.writes):
            lines.append(f"for j in range({size}):\n")
            lines.append(f"    {name}_of[j] = scratch[{2 + k}, j] / real(samples)\n")
        for k, name in enumerate(phase.sums):
            lines.append(f"take(live[layer, {self.of_layers[name]}], scratch[{first + k}])\n")
        return _LAYER + _indented(lines, 8)

    # ----------------------------------------------------------------- layers, network
    def _layers(self, phase, number):
        lines, known = self._values(phase, "layer, 0")
        call, written, summed = self._call(phase, number, {**known, **self._live(phase)})
        lines.append(f"for k in range(live.shape[2]):\n    {call}")
        for name, result in zip(phase.writes, written, strict=True):
            lines.append(f"    live[layer, {self.of_layers[name]}, k] = {result}\n")
        lines += [f"    scratch[{2 + k}, k] += {r}\n" for k, r in enumerate(summed)]
        body = "    clear(scratch)\n" + _LAYER + _indented(lines, 8)
        for k, name in enumerate(phase.sums):
            body += f"    take(shared[{self.of_network[name]}], scratch[{2 + k}])\n"
        return body

    def _network(self, phase, number):
        lines, known = self._values(phase, "len(table), 0")
        call, written, _ = self._call(phase, number, {**known, **self._live(phase)})
        lines.append(f"for k in range(live.shape[2]):\n    {call}")
        for name, result in zip(phase.writes, written, strict=True):
            lines.append(f"    shared[{self.of_network[name]}, k] = {result}\n")
        return _indented(lines, 4)

    # -------------------------------------------------------------- weights and biases
    def _weights(self, phase, number):
        lines, known = [], {}
        for name in phase.reads:
            if name in self.of_layers:
                values = f"live[layer, {self.of_layers[name]}]"
                lines.append(f"of_{name} = real(average({values}))\n")
                known[name] = f"of_{name}"
            elif name in self.of_network:
                values = f"shared[{self.of_network[name]}]"
                lines.append(f"of_{name} = real(average({values}))\n")
                known[name] = f"of_{name}"
            elif name in self.method.states_of("units"):
                place = self._address("units", name)
                lines.append(f"{name}_of = {place}\n")
                known[name] = f"{name}_of[i]"
        lines += [f"sum_{k} = 0.0\n" for k in range(len(phase.sums))]
        lines.append("ran = False\n")
        lines.append(_DERIVATIVES.format(sign=self.numbers[SIGN]))
        known["d"] = "scratch[0, i]"
        if phase.over == "weights":
            lines += [f"if t[{W}] != 0:\n", *self._of_weight(phase, number, known)]
        if phase.over == "biases" or not self.own_biases:
            lines += [f"if t[{B}] != 0:\n", *self._of_bias(phase, number, known)]
        lines.append("if not ran:\n    continue\n")
        for k, name in enumerate(phase.sums):
            value = f"live[layer, {self.of_layers[name]}, n] = sum_{k}"
            lines.append(f"for n in range(live.shape[2]):\n    {value}\n")
        return _LAYER + _indented(lines, 8)

    def _opened(self, phase, place, own):
        """Lines that open the arrays of a weight or bias."""
        names = {"w": own[0], "g": own[1], "noise": own[2]}
        lines = ["ran = True\n"]
        for name, column in names.items():
            if name in phase.reads or name in phase.writes:
                lines.append(f"{name}_in = numbers_at(t[{column}], ZERO)\n")
        for name in self.method.states:
            if name in phase.reads or name in phase.writes:
                lines.append(f"{name}_in = {self._address(place, name)}\n")
        return lines

    def _of_bias(self, phase, number, known):
        lines = self._opened(phase, "biases", (B, BG, BZ))
        values, own = self._values(phase, f"layer, {OF_BIAS}")
        known = {**known, **own, "x": "ONE", "g": "scratch[0, i]", "noise": "noise_in[i]"}
        known |= {name: f"{name}_in[i]" for name in ("w", *self.method.states)}
        call, written, summed = self._call(phase, number, known)
        body = [call]
        body += [f"{n}_in[i] = {r}\n" for n, r in zip(phase.writes, written, strict=True)]
        body += [f"sum_{k} += np.float64({r})\n" for k, r in enumerate(summed)]
        lines += [*values, "for i in range(outputs):\n", _indented(body, 4)]
        return [_indented(lines, 4)]

    def _of_weight(self, phase, number, known):
        """A weight's rows: whole vectors, then what is left."""
        lines = self._opened(phase, "weights", (W, G, Z))
        values, own = self._values(phase, f"layer, {OF_WEIGHT}")
        lines += values
        lines.append(f"factor = real(numbers[layer, {OF_WEIGHT}, {self.numbers[SIGN]}])\n")
        for name in self.method.states_of("inputs"):
            if name in phase.reads:
                lines.append(f"{name}_in = {self._address('inputs', name)}\n")
        if "x" in phase.reads:
            samples = f"numbers_at(t[{X}], ZERO)"
            lines += ["x_in = scratch[1]\n", f"means({samples}, samples, inputs, ONE, x_in)\n"]
        known, rows = {**known, **own}, ("w", "noise", *self.method.states)
        columns = ("x", *self.method.states_of("inputs"))
        count = range(len(phase.sums))
        row = ["row = i * inputs\n", *[f"lanes_{k} = spread(ZERO)\n" for k in count]]
        for name, place in known.items():
            if place.endswith("i]"):  # of the unit
                row.append(f"{name}_i = {place}\n")
                known[name] = f"{name}_i"
        row.append("for j in range(0, whole, LANES):\n")
        many = {name: f"load({name}_in, row + j)" for name in rows}
        many |= {name: f"load({name}_in, j)" for name in columns}
        many["g"] = "factor * load(g_in, row + j)"
        call, written, summed = self._call(phase, number, {**known, **many})
        row.append(f"    {call}")
        for name, result in zip(phase.writes, written, strict=True):
            row.append(f"    store({name}_in, row + j, full({result}))\n")
        row += [f"    lanes_{k} = lanes_{k} + full({r})\n" for k, r in enumerate(summed)]
        row += [f"sum_{k} += np.float64(total(lanes_{k}))\n" for k in count]
        row.append("for j in range(whole, inputs):\n")
        one = {name: f"{name}_in[row + j]" for name in rows}
        one |= {name: f"{name}_in[j]" for name in columns} | {"g": "factor * g_in[row + j]"}
        call, written, summed = self._call(phase, number, {**known, **one})
        row.append(f"    {call}")
        for name, result in zip(phase.writes, written, strict=True):
            row.append(f"    {name}_in[row + j] = {result}\n")
        row += [f"    sum_{k} += np.float64({r})\n" for k, r in enumerate(summed)]
        lines += ["whole = inputs - inputs % LANES\n", "for i in range(outputs):\n"]
        return [_indented([*lines, _indented(row, 4)], 4)]


_DERIVATIVES = f"""if t[{B}] != 0:
    factor = real(numbers[layer, {OF_BIAS}, {{sign}}])
    means(numbers_at(t[{BG}], ZERO), 1, outputs, factor, scratch[0])
else:
    means(numbers_at(t[{D}], ZERO), samples, outputs, ONE, scratch[0])
"""


def _indented(lines, spaces):
    """Lines, some of which are several, moved to the right."""
    return "".join(" " * spaces + line for text in lines for line in text.splitlines(True))
