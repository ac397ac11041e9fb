"""A method's rules as one straight-line function of scalars, for compilers.

The rules of a method are evaluated once on symbols, phase after phase, and written out as Python
source that numba and Triton compile::

    def update(w, g, h, noise, s0, s1, s2, s3, s4, eta, c0, ..., lr, weight_decay, sigma, ...):
        t0 = s0 * beta_utility
        ...
        return w_new, s0_new, s1, s2, s3, s4

Every method has the same signature, so kernels know none: ``s0 … s4`` are the method's states in
its own order, ``c0 … c4`` their bias corrections; what a method lacks goes through untouched.
Hyperparameters and corrections are float64: ``1 - beta`` keeps its digits, and a scalar is rounded
to the kernel's type where it meets a weight.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from upgd.caches import cache_folder
from upgd.rules.symbols import Symbol
from upgd.rules.vocabulary import Method

MOST_STATES = 5
HYPER = (
    *("lr", "weight_decay", "sigma", "beta_utility", "kappa", "beta_importance", "beta_weight"),
    *("beta1", "beta2", "eps"),
)
"""The order of a run's hyperparameters in memory."""
STATES = tuple(f"s{i}" for i in range(MOST_STATES))
CORRECTIONS = tuple(f"c{i}" for i in range(MOST_STATES))
ARGUMENTS = ("w", "g", "h", "noise", *STATES, "eta", *CORRECTIONS, *HYPER)

Stage = Literal["reduce", "features", "update"]
Target = Literal["triton", "numba", "torch"]


def reduces(method: Method) -> str | None:
    """How a method's η comes about: ``"max"``, ``"row_norm"`` or not at all, over weights."""
    first = method.phases[0]
    return first.reduce if first.over == "weights" else None


def source(method: Method, stage: Stage, target: Target) -> str:
    """The method as one function called ``reduce`` or ``update``.

    Args:
        method: Whose rules.
        stage: ``"reduce"`` gives the trace from which η is taken; ``"update"`` gives the new
            weight and states; ``"features"`` gives ``trace(f, s, utility, beta_utility)``.
        target: ``"numba"`` wraps each number into the kernel's own type. Compiled targets are told
            which products are fused with a sum.
    """
    if stage == "features":
        return _feature_trace(method, target)
    name = "reduce" if stage == "reduce" else "update"
    return _function(name, _results(method, stage), target)


def divides(method: Method) -> bool:
    """Whether a rule divides by something that is each weight's own: of zeros that makes NaN."""

    def found(expression: Any) -> bool:
        if not isinstance(expression, Symbol) or expression.op == "input":
            return False
        mine = expression.op == "/" and _full(expression.args[1])
        return mine or any(found(argument) for argument in expression.args)

    return any(found(result) for result in _results(method, "update"))


def _results(method: Method, stage: Stage) -> list[Any]:
    """A method's rules evaluated on symbols."""
    env: dict[str, Any] = {
        name: Symbol("input", name, is_list=True) for name in ("w", "g", "h", "noise")
    }
    env["eta"] = Symbol("input", "eta", is_list=True, full=False)
    env |= {name: Symbol("input", name, is_list=False) for name in HYPER}
    for i, state in enumerate(method.states):
        env[state] = Symbol("input", STATES[i], is_list=True)
        env[f"c_{state}"] = Symbol("input", CORRECTIONS[i], is_list=False)
    for phase in method.phases:
        if phase.over == "features":  # the kernel brings the feature's scaled utility as state 0
            continue
        results = phase.fn(*[env[name] for name in phase.reads])
        results = results if isinstance(results, tuple) else (results,)
        env.update(zip(phase.writes, results, strict=True))
        if stage == "reduce":
            return [env[phase.writes[0]]]
    states = [env.get(s, s) for s in method.states]
    return [env["w"], *states, *STATES[len(states) :]]


def _feature_trace(method: Method, target: Target) -> str:
    env = {name: Symbol("input", name, is_list=True) for name in ("f", "s")}
    env["utility"] = Symbol("input", "w", is_list=True)
    env["beta_utility"] = Symbol("input", "beta_utility", is_list=False)
    phase = method.phases[0]
    result = phase.fn(*[env[name] for name in phase.reads])
    return _function("trace", [result], target, ("f", "s", "w", "beta_utility"))


def _function(
    name: str, results: list[Any], target: Target, arguments: Sequence[str] = ARGUMENTS
) -> str:
    lines: list[str] = []
    known: dict[str, str] = {}
    factors: dict[str, list[str]] = {}

    def text(expression: Any, for_weights: bool) -> str:
        if isinstance(expression, str):
            return expression
        if not isinstance(expression, Symbol):
            number = repr(float(expression))
            return f"real({number})" if for_weights and target == "numba" else number
        if expression.op == "input":
            found = str(expression.args[0])
        else:
            operands = [text(argument, expression.is_list) for argument in expression.args]
            if expression.op == "/" and expression.full and not _full(expression.args[1]):
                # The reciprocal of what all weights share is taken once.
                one = text(1.0, for_weights=True)
                operands[1] = kept(f"{one} / {operands[1]}")
                found = kept(_operation("*", operands))
            elif expression.op in ("+", "-") and operands[1] in factors:
                found = kept(_fused(expression.op, operands[0], *factors[operands[1]]))
            else:
                found = kept(_operation(expression.op, operands))
                if target != "torch" and expression.op == "*" and expression.is_list:
                    factors[found] = operands
        if for_weights and not expression.is_list:
            found = kept(f"real({found})" if target == "numba" else f"{found}.to(w.dtype)")
        return found

    def kept(value: str) -> str:  # two expressions that are written alike are one
        if value not in known:
            known[value] = f"t{len(lines)}"
            lines.append(f"    {known[value]} = {value}")
        return known[value]

    returned = ", ".join([text(result, True) for result in results])
    header = f"def {name}({', '.join(arguments)}):"
    return "\n".join([header, *lines, f"    return {returned}"]) + "\n"


def _full(expression: Any) -> bool:
    return isinstance(expression, Symbol) and expression.is_list and expression.full


def _fused(op: str, first: str, a: str, b: str) -> str:
    """``first ± a·b``, the product not rounded.

    A compiler that chooses for itself may fuse `first` instead, mostly the decayed weight or
    trace, whose rounding is by far the largest: results would differ from other engines' by it.
    """
    return f"fused({'-' if op == '-' else ''}{a}, {b}, {first})"


def _operation(op: str, operands: list[str]) -> str:
    if op == "neg":
        return f"-{operands[0]}"
    if op in "+-*/":
        return f"{operands[0]} {op} {operands[1]}"
    return f"{ {'abs': 'absolute'}.get(op, op) }({operands[0]})"


# --------------------------------------------------------------------------- modules
def fingerprint(*files: str) -> str:
    """Digits that change with any of these files."""
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:16]


@cache
def load_module(text: str, name: str) -> ModuleType:
    """Import generated source from a file of the user's cache, where compilers keep their results.

    Where no file can be written the source stays in memory.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    full_name = f"upgd_generated_{name}_{digest}"
    file = _keep(text, full_name)
    if file is None:
        file = f"<{full_name}>"
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    module = ModuleType(full_name)
    module.__file__ = file
    sys.modules[full_name] = module
    exec(compile(text, file, "exec"), module.__dict__)
    return module


def _keep(text: str, name: str) -> str | None:
    """Write source to a file, if it is not there; None where that is impossible."""
    folder = cache_folder("kernels")
    if folder is None:
        return None
    path = folder / f"{name}.py"
    try:
        if not path.is_file() or path.read_bytes() != text.encode():
            _write(path, text.encode())
    except OSError:
        return None
    return str(path)


def _write(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
