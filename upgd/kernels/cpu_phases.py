# mypy: ignore-errors
"""The phases of a method, compiled: the part of a layered learner that knows a method.

:func:`advance_function` writes a module with a function per phase, which loops over the phase's
elements in every layer, and one that calls them in their order; it is kept on disk with its machine
code. A phase over biases that follows one over weights shares its pass. The last pass over weights
also forms the products of the first layer's new weights with this sample and with the next. Needs
numba.
"""

from __future__ import annotations

from functools import cache

from numba import types

from upgd.kernels import cpu_functions, cpu_recycle, philox, vectors
from upgd.kernels.layered import kept_names, phase_function
from upgd.kernels.rules import MOST_NUMBERS, TIMES, fingerprint, load_module

_HELPERS = (cpu_functions, cpu_recycle, philox, vectors)
VERSION = fingerprint(__file__, *(module.__file__ for module in _HELPERS))
"""Part of generated modules: a change of the helpers invalidates their cache."""

ARGUMENTS = (
    *("layers", "count", "places", "w", "s", "gap", "kept", "acts", "here", "following", "delta"),
    *("hyper", "c", "t", "step", "key", "noisy", "z", "bias_z", "fresh", "words", "table"),
    *("width", "sizes", "pre"),
)
"""Of the compiled function, see :func:`upgd.kernels.cpu_layered.learn`."""

_HEAD = '''"""The phases of {name}, in {real}; upgd.kernels.cpu_phases {version}."""

import numpy as np
from numba import njit

from upgd.kernels import cpu_phases
from upgd.kernels.compiling import cfunc
from upgd.kernels.cpu_functions import normals, sigmoid
from upgd.kernels.cpu_recycle import grow_older, products, recycle, sizes_of
from upgd.kernels.vectors import (
    LANES, absolute, choose, exp, full, fused, largest, lanes, less, load, log, maximum, minimum,
    sign, spread, sqrt, store, total,
)

real = np.{real}
ZERO = real(0.0)
ONE = real(1.0)
LOWEST = real(-np.inf)
TINY = real(np.finfo(real).tiny)
'''

_LAYER = """        inputs, outputs = layers[6 * layer], layers[6 * layer + 1]
        pitch, base = layers[6 * layer + 2], layers[6 * layer + 3]
        begin = here if layer == 0 else layers[6 * layer + 4]
        place, row_at = layers[6 * layer + 4] - layers[4], layers[6 * layer + 5]
"""

_NOISE = """        span = -(-outputs // 4)
        if noisy:
            tensor = np.uint32(2 * layer + 1)
            normals(bias_z, words, table, width, span, 0, tensor, step, key)
        for quad in range(span):
            if noisy:
                tensor = np.uint32(2 * layer)
                normals(z, words, table, width, inputs, quad * inputs, tensor, step, key)
            for lane in range(4):
                i = quad + lane * span
                if i >= outputs:
                    break
                z[lane * width + inputs] = bias_z[lane * width + quad]
"""


@cache
def signature(real):
    """Of the compiled function."""
    number, whole = types.CPointer(getattr(types, real)), types.CPointer(types.int64)
    wide, size = types.CPointer(types.float64), types.intp
    return types.void(
        *(whole, size, whole, number, number, size, number, number, size, size, number),
        *(wide, wide, size, size, types.uint64, size, number, number, number),
        *(types.CPointer(types.uint32), types.CPointer(types.float32), size, number, number),
    )


def advance_function(row, real):
    """The address of a method's update: all its phases for one sample, then recycling.

    Args:
        row: Of the registry.
        real: ``"float32"`` or ``"float64"``.
    """
    name = f"cpu_phases_{row.name.replace('-', '_')}_{real}"
    return load_module(_phases_source(row, real), name).advance.address


@cache
def _phases_source(row, real):
    return _Writer(row.method).source(row.name, real)


class _Writer:
    """Writes a method's module."""

    def __init__(self, method):
        self.method = method
        self.places = {key: k for k, key in enumerate(kept_names(method))}
        self.own_biases = any(phase.over == "biases" for phase in method.phases)
        self.groups = self._groups()
        writers = [k for k, group in enumerate(self.groups) if any("w" in p.writes for p in group)]
        last = writers[-1] if writers else None
        has_weights = last is not None and self.groups[last][0].over == "weights"
        self.forms_products = last if has_weights else None

    def _groups(self):
        """Phases that share a pass: biases after weights, unless they read what the pass sums."""
        found = []
        for phase in self.method.phases:
            first = found[-1][0] if found else None
            if phase.over == "biases" and first is not None and first.over == "weights":
                summed = {name for other in found[-1] for name in other.sums}
                if not summed & set(phase.reads):
                    found[-1].append(phase)
                    continue
            found.append([phase])
        return found

    def source(self, name, real):
        parts = [_HEAD.format(name=name, real=real, version=VERSION)]
        for number in range(len(self.method.phases)):
            inlined = '\n\n@njit(error_model="numpy", forceinline=True)\n'
            parts.append(inlined + phase_function(self.method, number, "numba"))
        calls = []
        everything = ", ".join(ARGUMENTS)
        for number, group in enumerate(self.groups):
            body = getattr(self, f"_{group[0].over}")(group, number)
            head = f"def run_{number}({everything}, eta):\n"
            parts.append(f'\n\n@njit(error_model="numpy")\n{head}{body}    return eta\n')
            calls.append(f"eta = run_{number}({everything}, eta)")
        if self.forms_products is None:
            calls.append("products(w, layers, acts, here, following, pre)")
        if self.method.recycle is not None:
            age = self.places["features", "age"]
            calls.insert(0, f"grow_older(layers, count, kept, places[{age}])")
            calls.append(f"recycle({self._rule()}, {everything})")
        lines = "".join(f"    {call}\n" for call in calls)
        decorator = f'@cfunc(cpu_phases.signature("{real}"), error_model="numpy")'
        parts.append(f"\n\n{decorator}\ndef advance({everything}):\n    eta = ONE\n{lines}")
        return "".join(parts)

    # --------------------------------------------------------------------------- names
    def _at(self, place, name):
        """Where a state of this layer begins in `kept`."""
        start = f"places[{self.places[place, name]}]"
        within = {
            "units": " + row_at", "features": " + row_at - inputs", "layers": " + layer",
            "network": "",
        }  # fmt: skip
        return start + within[place]

    def _shared(self, phases):
        """Lines that load what all elements of a layer share; and what each name is called."""
        method, lines, known = self.method, [], {"t": "real(t)"}
        reads = [name for phase in phases for name in phase.reads]
        values = {name: f"hyper[{MOST_NUMBERS} * layer + {k}]" for k, name in self._numbers()}
        values |= {f"c_{name}": f"c[{TIMES} * layer + {k}]" for k, name in enumerate(method.states)}
        values["eta"] = f"max(eta * {self._share()}, TINY)"
        for place in ("network", "layers"):
            states = method.states_of(place)
            values |= {name: f"kept[{self._at(place, name)}]" for name in states}
        if any(phase.over != "network" for phase in phases):
            values["head"] = "ONE if layer == count - 1 else ZERO"
            values["first"] = "ONE if layer == 0 and count > 1 else ZERO"
            values["bound"] = "real(1.0 / np.sqrt(np.float64(inputs)))"
        for name in dict.fromkeys(reads):
            if name in values:
                known[name] = f"of_layer_{name}"
                lines.append(f"        of_layer_{name} = {values[name]}\n")
        writes = [name for phase in phases for name in phase.writes]
        for name in method.states_of("inputs"):
            if name in (*reads, *writes):
                lines.append(f"        at_{name} = places[{self.places['inputs', name]}] + place\n")
        return "".join(lines), known

    def _numbers(self):
        return enumerate(self.method.numbers)

    def _share(self):
        """The correction of the trace that makes η, as a share of the first layer's."""
        traces = [phase.writes[0] for phase in self.method.phases if phase.reduce]
        if not traces or traces[0] not in self.method.decays:
            return "ONE"
        k = self.method.states.index(traces[0])
        return f"real(c[{TIMES} * layer + {k}] / c[{k}])"

    def _called(self, phase, known):
        """The call of a phase's function, and the names of its results."""
        if missing := [name for name in phase.reads if name not in known]:
            raise ValueError(f"a phase over {phase.over} cannot read {', '.join(missing)}")
        number = self.method.phases.index(phase)
        results = [f"r{number}_{k}" for k in range(len(phase.writes) + len(phase.sums))]
        arguments = ", ".join(known[name] for name in phase.reads)
        return f"{', '.join(results)} = phase_{number}({arguments})\n", results

    @staticmethod
    def _summed(phase, results):
        """Each sum's name, and the result that it sums."""
        return list(zip(phase.sums, results[len(phase.writes) :], strict=True))

    # ------------------------------------------------------------------------- weights
    def _weights(self, group, number):
        method, (phase, *biases) = self.method, group
        head, known = self._shared(group)
        products = number == self.forms_products
        for name in method.states_of("units"):
            known[name] = f"of_unit_{name}"
        units = [n for n in method.states_of("units") if any(n in p.reads for p in group)]
        sums = [name for p in group for name in p.sums]
        noise = any("noise" in p.reads for p in group)
        row = ["row = base + i * pitch\n", "d = delta[row_at + i]\n"]
        row += [f"of_unit_{name} = kept[{self._at('units', name)} + i]\n" for name in units]
        row += [f"sum_{name} = spread(ZERO)\n" for name in phase.sums]
        row += ["top = spread(LOWEST)\n"] if phase.reduce else []
        row += ["was = spread(ZERO)\n", "now = spread(ZERO)\n"] if products else []
        for bias in biases:
            row += self._bias(bias, known)
        block = [*self._block(phase, known, products, tail=False)]
        row += ["whole = inputs - inputs % LANES\n", "for j in range(0, whole, LANES):\n"]
        row += ["    " + line for line in block]
        ends = "inputs - whole" if self.own_biases else "inputs - whole + 1"
        row += ["j = whole\n", f"inside = less(lanes(), spread(np.uint32({ends})))\n"]
        row += self._block(phase, known, products, tail=True)
        row += [f"all_{name} += np.float64(total(sum_{name}))\n" for name in phase.sums]
        if phase.reduce:
            row += [f"found = largest(top) / {self._share()}\n"]
            row += ["if not found <= most:\n", "    most = found\n"]
        if products:
            row += ["if layer == 0:\n", "    pre[i] = total(was)\n"]
            row += ["    pre[outputs + i] = total(now)\n"]
        loop, indent = (_NOISE, 16) if noise else ("        for i in range(outputs):\n", 12)
        body = "    most = LOWEST\n" if phase.reduce else ""
        body += "    for layer in range(count):\n" + _LAYER + head
        body += "        beyond = following if layer == 0 else begin\n" if products else ""
        body += "".join(f"        all_{name} = 0.0\n" for name in sums) + loop
        body += "".join(" " * indent + line for line in row)
        for name in sums:
            body += f"        kept[{self._at('layers', name)}] = real(all_{name})\n"
        if phase.reduce:
            body += "    eta = abs(most)\n"  # in units of the first layer's traces
        return body

    def _bias(self, phase, known):
        """Lines that run a phase over a row's bias."""
        states = {name: f"s[{k} * gap + row + inputs]" for k, name in enumerate(self.method.states)}
        known = {**known, **states, "w": "w[row + inputs]", "g": "d", "d": "d", "x": "ONE"}
        known["noise"] = "bias_z[lane * width + quad]"
        call, results = self._called(phase, known)
        lines = [call]
        lines += [f"{known[name]} = {r}\n" for name, r in zip(phase.writes, results, strict=False)]
        return lines + [
            f"all_{name} += np.float64({r})\n" for name, r in self._summed(phase, results)
        ]

    def _block(self, phase, known, products, tail):
        """Lines that run a phase over LANES weights of a row."""
        method = self.method
        states = {name: f"load(s, {k} * gap + row + j)" for k, name in enumerate(method.states)}
        inputs = {name: f"load(kept, at_{name} + j)" for name in method.states_of("inputs")}
        known = {**known, **states, **inputs, "w": "w_j", "g": "d * x_j", "d": "d", "x": "x_j"}
        known["noise"] = "load(z, lane * width + j)"
        lines = ["x_j = load(acts, begin + j)\n", "w_j = load(w, row + j)\n"]
        call, results = self._called(phase, known)
        lines.append(call)

        def kept(result, otherwise):
            return f"choose(inside, full({result}), {otherwise})" if tail else f"full({result})"

        for name, result in zip(phase.writes, results, strict=False):
            if name == "w":
                lines += [f"w_j = {kept(result, 'w_j')}\n", "store(w, row + j, w_j)\n"]
            else:
                place = f"{method.states.index(name)} * gap + row + j"
                lines.append(f"store(s, {place}, {kept(result, f'load(s, {place})')})\n")
        for name, result in self._summed(phase, results):
            lines.append(f"sum_{name} = sum_{name} + {kept(result, 'spread(ZERO)')}\n")
        if phase.reduce:
            lines.append(f"top = maximum(top, {kept(results[0], 'spread(LOWEST)')})\n")
        if products:
            lines.append("was = was + w_j * x_j\n")
            lines.append("now = now + w_j * load(acts, beyond + j)\n")
        return lines

    def _biases(self, group, number):
        """A pass over biases alone."""
        (phase,) = group
        head, known = self._shared(group)
        units = [name for name in self.method.states_of("units") if name in phase.reads]
        known |= {name: f"kept[{self._at('units', name)} + i]" for name in units}
        loop, indent = "        for i in range(outputs):\n", 12
        if "noise" in phase.reads:
            loop, indent = _NOISE, 16
        lines = ["row = base + i * pitch\n", "d = delta[row_at + i]\n", *self._bias(phase, known)]
        body = "    for layer in range(count):\n" + _LAYER + head
        body += "".join(f"        all_{name} = 0.0\n" for name in phase.sums) + loop
        body += "".join(" " * indent + line for line in lines)
        for name in phase.sums:
            body += f"        kept[{self._at('layers', name)}] = real(all_{name})\n"
        return body

    # -------------------------------------------------------------------- other places
    def _inputs(self, group, number):
        (phase,) = group
        head, known = self._shared(group)
        states = self.method.states_of("inputs")
        known |= {name: f"load(kept, at_{name} + j)" for name in states} | {"x": "x_j"}
        call, results = self._called(phase, known)
        lines = ["inside = less(lanes() + np.uint32(j), spread(np.uint32(inputs)))\n"]
        lines += ["x_j = load(acts, begin + j)\n", call]
        for name, result in zip(phase.writes, results, strict=False):
            value = f"choose(inside, full({result}), {known[name]})"
            lines.append(f"store(kept, at_{name} + j, {value})\n")
        for name, result in self._summed(phase, results):
            chosen = f"choose(inside, full({result}), spread(ZERO))"
            lines.append(f"sum_{name} = sum_{name} + {chosen}\n")
        body = "    for layer in range(count):\n" + _LAYER + head
        body += "".join(f"        sum_{name} = spread(ZERO)\n" for name in phase.sums)
        body += "        for j in range(0, inputs, LANES):\n"
        body += "".join(" " * 12 + line for line in lines)
        for name in phase.sums:
            body += f"        kept[{self._at('layers', name)}] = total(sum_{name})\n"
        return body

    def _units(self, group, number):
        return self._one_by_one(group[0], "units", {"d": "delta[row_at + i]"}, "outputs")

    def _features(self, group, number):
        (phase,) = group
        known = {"x": "acts[begin + i]", "w_in": "sizes[i]", "w_out": "sizes[width + i]"}
        body = self._one_by_one(phase, "features", known, "inputs")
        body = body.replace("range(count)", "range(1, count)", 1)
        if {"w_in", "w_out"} & set(phase.reads):
            body = body.replace(
                _LAYER, _LAYER + "        sizes_of(w, layers, layer, sizes, width)\n"
            )
        return body

    def _one_by_one(self, phase, place, elements, many):
        head, known = self._shared([phase])
        known |= elements
        known |= {n: f"kept[{self._at(place, n)} + i]" for n in self.method.states_of(place)}
        call, results = self._called(phase, known)
        lines = [call]
        lines += [f"{known[n]} = {r}\n" for n, r in zip(phase.writes, results, strict=False)]
        lines += [f"all_{n} += np.float64({r})\n" for n, r in self._summed(phase, results)]
        body = "    for layer in range(count):\n" + _LAYER + head
        body += "".join(f"        all_{name} = 0.0\n" for name in phase.sums)
        body += f"        for i in range({many}):\n" + "".join(" " * 12 + line for line in lines)
        for name in phase.sums:
            body += f"        kept[{self._at('layers', name)}] = real(all_{name})\n"
        return body

    def _layers(self, group, number):
        (phase,) = group
        head, known = self._shared(group)
        call, results = self._called(phase, known)
        lines = [call]
        for name, result in zip(phase.writes, results, strict=False):
            lines.append(f"kept[{self._at('layers', name)}] = {result}\n")
        lines += [f"all_{n} += np.float64({r})\n" for n, r in self._summed(phase, results)]
        body = "".join(f"    all_{name} = 0.0\n" for name in phase.sums)
        body += "    for layer in range(count):\n" + _LAYER + head
        body += "".join(" " * 8 + line for line in lines)
        for name in phase.sums:
            body += f"    kept[{self._at('network', name)}] = real(all_{name})\n"
        return body

    def _network(self, group, number):
        (phase,) = group
        head, known = self._shared(group)
        call, results = self._called(phase, known)
        body = "    for layer in range(1):\n" + head + "        " + call
        for name, result in zip(phase.writes, results, strict=True):
            body += f"        kept[{self._at('network', name)}] = {result}\n"
        return body

    # ----------------------------------------------------------------------- recycling
    def _rule(self):
        """The first arguments of :func:`upgd.kernels.cpu_recycle.recycle`."""
        method, rule = self.method, self.method.recycle
        names, numbers = method.states_of("features"), {n: k for k, n in self._numbers()}
        place = {name: self.places["features", name] for name in names}
        starts = tuple(float(method.starts.get(name, 0.0)) for name in names)
        copied = (*(name in method.starts_as_weight for name in method.states), False)
        found = [starts, place[names[0]], copied, len(method.states), place[rule.score]]
        found += [place["age"], place.get(rule.average, -1), self.places["layers", "owed"]]
        for name in (rule.share, rule.threshold, rule.mature, rule.every):
            found.append(numbers.get(name, -1))
        return ", ".join(map(str, found))
