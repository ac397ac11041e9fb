"""A method's rules as one straight-line function of scalars, for compilers.

The rules of a method are evaluated once on symbols, phase after phase, and written out as Python
source that numba and Triton compile::

    def update(w, g, h, noise, s0, s1, s2, s3, s4, eta, c0, ..., due, lr, sigma, p0, ..., p13):
        t0 = s0 * p1
        ...
        return w_new, s0_new, s1, s2, s3, s4

Every method has the same signature, so kernels know none: ``s0 … s4`` are the method's states in
its own order, ``c0 … c4`` their bias corrections, ``p0 … p13`` its hyperparameters but ``lr`` and
``sigma``, and its layer's ``bound`` (:attr:`Method.numbers`); what a method lacks goes through
untouched.
Hyperparameters and corrections are float64: ``1 - beta`` keeps its digits, and a scalar is rounded
to the kernel's type where it meets a weight.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from upgd.caches import cache_folder
from upgd.rules.ops import FUNCTIONS
from upgd.rules.symbols import Symbol
from upgd.rules.vocabulary import Method

MOST_STATES = 5
MOST_NUMBERS = 16
NUMBERS = ("lr", "sigma", *(f"p{i}" for i in range(MOST_NUMBERS - 2)))
"""What kernels call a method's numbers, in the order of :attr:`Method.numbers`."""
LR, SIGMA = 0, 1
OUTPUT_GATE = 2  # of methods with a utility per feature
"""The places of those that kernels and optimizers know."""
DUE, SHARE, TIMES = MOST_STATES, MOST_STATES + 1, 8
"""Columns of a layer's decays and corrections behind those of its states: the period and whether it
is over; the correction of the trace that makes η as a share of the first layer's. How many columns
there are."""
STATES = tuple(f"s{i}" for i in range(MOST_STATES))
CORRECTIONS = tuple(f"c{i}" for i in range(MOST_STATES))
ARGUMENTS = ("w", "g", "h", "noise", *STATES, "eta", *CORRECTIONS, "due", *NUMBERS)

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
            weight and states; ``"features"`` gives ``trace(f, s, utility, beta)``.
        target: ``"numba"`` wraps each number into the kernel's own type. Compiled targets are told
            which products are fused with a sum.
    """
    if stage == "features":
        return _feature_trace(method, target)
    name = "reduce" if stage == "reduce" else "update"
    return _function(name, _results(method, stage), target)


def describe(method: Method) -> str:
    """What a method computes, in its own names: the same however it is laid out in memory."""
    names = {
        **dict(zip(NUMBERS, method.numbers, strict=False)),
        **dict(zip(STATES, method.states, strict=False)),
        **{CORRECTIONS[k]: f"c_{state}" for k, state in enumerate(method.states)},
    }
    stages: list[Stage] = ["reduce", "update"] if reduces(method) else ["update"]
    bodies = [source(method, stage, "torch").split("\n", 1)[1] for stage in stages]
    return re.sub(r"\b[a-z]\w*\b", lambda word: names.get(word[0], word[0]), "".join(bodies))


def fills_padding(method: Method) -> bool:
    """Whether weights and states that are zero, with a gradient of zero, may become something else.

    So it is where a rule divides by something that is each weight's own, which of zeros makes NaN.
    """
    divisors = [e.args[1] for e in _parts(_results(method, "update")) if e.op == "/"]
    if any(map(_full, divisors)):
        return True
    generator = torch.Generator().manual_seed(0)
    env = {name: torch.zeros(8, dtype=torch.float64) for name in ("w", "g", "h", *method.states)}
    env |= {name: _random(generator, -1.0) for name in method.numbers}
    env |= {f"c_{state}": torch.ones(8, dtype=torch.float64) for state in method.states}
    env |= {"noise": _random(generator, -1.0), "sigma": torch.zeros(8), "eta": torch.ones(8)}
    env["due"] = torch.ones(8, dtype=torch.float64)
    _evaluate(method, env, "update")
    return any(bool((env[name] != 0).any()) for name in ("w", *method.states))


def traces_utility(method: Method) -> bool:
    """Whether the trace that makes η is that of ``-g·w`` or of ``½·h·w² - g·w``.

    Then the next trace has bounds that need no weight (:mod:`upgd.kernels.cpu_dense`).
    """
    phase = method.phases[0]
    decay = method.decays.get(phase.writes[0])
    if reduces(method) is None or decay is None:
        return False
    generator = torch.Generator().manual_seed(0)
    env: dict[str, Any] = {name: _random(generator) for name in phase.reads}
    found = phase.fn(*env.values())
    found = found[0] if isinstance(found, tuple) else found
    env = {name: env.get(name, 0.0) for name in ("w", "g", "h", phase.writes[0], decay)}
    w, g, h, trace, beta = env.values()
    expected = beta * trace + (1 - beta) * (0.5 * h * w - g) * w
    return bool((abs(found - expected) <= 1e-12).all())


def gates_by_share(method: Method) -> bool:
    """Whether every sigmoid is that of ``± trace / eta``, so of a number in [-1, 1]."""
    if reduces(method) is None:
        return False
    env = _symbols(method)
    trace = method.phases[0].writes[0]
    _evaluate(method, env, "reduce")
    share = env[trace], env["eta"]
    results = _evaluate(method, env, "update", after=1)
    gates = [e.args[0] for e in _parts(results) if e.op == "sigmoid"]
    return all(_is_share(_unsigned(gate), *share) for gate in gates)


def _is_share(expression: Any, trace: Symbol, eta: Symbol) -> bool:
    if not isinstance(expression, Symbol) or expression.op != "/":
        return False
    return _unsigned(expression.args[0]) is trace and _unsigned(expression.args[1]) is eta


def _unsigned(expression: Any) -> Any:
    while isinstance(expression, Symbol) and expression.op == "neg":
        expression = expression.args[0]
    return expression


def _random(generator: torch.Generator, low: float = 0.0) -> torch.Tensor:
    return low + (1 - low) * torch.rand(8, generator=generator, dtype=torch.float64)


def _parts(expressions: Iterable[Any]) -> Iterator[Symbol]:
    """All expressions within these, each once."""
    left = [e for e in expressions if isinstance(e, Symbol)]
    seen: set[Symbol] = set()
    while left:
        expression = left.pop()
        if expression not in seen:
            seen.add(expression)
            left += [e for e in expression.args if isinstance(e, Symbol)]
            yield expression


def inputs_of(expressions: Iterable[Any]) -> set[str]:
    """The names of all that expressions depend on."""
    return {str(e.args[0]) for e in _parts(expressions) if e.op == "input"}


# ------------------------------------------------------------------------------ writing
def _symbols(method: Method) -> dict[str, Any]:
    """What the rules read, as kernels call it."""
    env: dict[str, Any] = {
        name: Symbol("input", name, is_list=True) for name in ("w", "g", "h", "noise")
    }
    env["eta"] = Symbol("input", "eta", is_list=True, full=False)
    env["due"] = Symbol("input", "due", is_list=False)
    for name, slot in zip(method.numbers, NUMBERS, strict=False):
        env[name] = Symbol("input", slot, is_list=False)
    for i, state in enumerate(method.states):
        env[state] = Symbol("input", STATES[i], is_list=True)
        env[f"c_{state}"] = Symbol("input", CORRECTIONS[i], is_list=False)
    return env


def _evaluate(method: Method, env: dict[str, Any], stage: Stage, after: int = 0) -> list[Any]:
    """Run a method's phases, but for the first `after`, on `env`, which receives what they write.

    Returns the new weight and states, or for ``"reduce"`` the trace.
    """
    for phase in method.phases[after:]:
        if phase.over == "features":  # the kernel brings the feature's scaled utility as state 0
            continue
        results = phase.fn(*[env[name] for name in phase.reads])
        results = results if isinstance(results, tuple) else (results,)
        env.update(zip(phase.writes, results, strict=True))
        if stage == "reduce":
            return [env[phase.writes[0]]]
    return [env["w"], *(env[state] for state in method.states)]


def _results(method: Method, stage: Stage) -> list[Any]:
    """A method's rules evaluated on symbols."""
    results = _evaluate(method, _symbols(method), stage)
    missing = STATES[len(method.states) :] if stage == "update" else ()
    return [*results, *missing]


def _feature_trace(method: Method, target: Target) -> str:
    env = {name: Symbol("input", name, is_list=True) for name in ("f", "s")}
    env["utility"] = Symbol("input", "w", is_list=True)
    env["beta_utility"] = Symbol("input", "beta", is_list=False)
    phase = method.phases[0]
    result = phase.fn(*[env[name] for name in phase.reads])
    return _function("trace", [result], target, ("f", "s", "w", "beta"))


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
                terms = [operands[0], *factors[operands[1]]]
                found = kept(_fused(expression.op, *map(argument, terms)))
            elif expression.op in FUNCTIONS:
                found = kept(_operation(expression.op, [argument(o) for o in operands]))
            else:
                found = kept(_operation(expression.op, operands))
                if target != "torch" and expression.op == "*" and expression.is_list:
                    factors[found] = operands
        if for_weights and not expression.is_list:
            found = kept(f"real({found})" if target == "numba" else f"{found}.to(w.dtype)")
        return found

    def argument(operand: str) -> str:  # in Triton, numbers have 32 bits outside of operators
        is_number = target == "triton" and re.fullmatch(r"-?\d.*", operand)
        return f"tl.full([], {operand}, w.dtype)" if is_number else operand

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
    return f"{op}({', '.join(operands)})"


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
