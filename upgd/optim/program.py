"""Compiles a rule into a few tensor calls, as one would write them by hand.

A rule evaluated operator by operator makes a pass over memory, and a temporary, for
every ``+`` and ``*``. Here it is evaluated once on symbols instead. The expression is
read as a sum of ``coefficient * x``, ``coefficient * x * y`` and
``coefficient * x / y``, the shapes that ``add(alpha=)``, ``addcmul`` and ``addcdiv``
compute in one pass; ``beta * x + (1 - beta) * y`` becomes ``lerp``; a temporary is
overwritten at its last use. A coefficient, such as ``1 - lr * weight_decay``, is a number;
a scalar that lives on the device, such as ``eta``, gets a pass of its own.

The result is Python source, compiled once. For UPGD's update on lists of tensors::

    def update_protecting(w, g, utility, noise, eta, lr, weight_decay, sigma):
        r0 = torch._foreach_div(utility, (-eta))
        torch._foreach_sigmoid_(r0)
        r1 = torch._foreach_add(g, noise, alpha=sigma)
        torch._foreach_mul_(w, (1 - (lr * weight_decay)))
        torch._foreach_addcmul_(w, r1, r0, value=(-1 * lr))
        return (w,)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from upgd.rules.symbols import Symbol


def _is_one(coefficient: Any) -> bool:
    return not isinstance(coefficient, Symbol) and coefficient == 1


def _complement(a: Any, b: Any) -> bool:
    """Whether `b` was written ``1 - a``."""
    return isinstance(b, Symbol) and b.op == "-" and _is_one(b.args[0]) and b.args[1] is a


@dataclass(frozen=True)
class _Term:
    """``coefficient * left [op right]``; `left` is a register, or None for the number 1."""

    coefficient: Any
    left: int | None
    op: str | None = None
    right: int | None = None

    def scaled(self, by: Any) -> _Term:
        return replace(self, coefficient=by if _is_one(self.coefficient) else by * self.coefficient)

    @property
    def registers(self) -> list[int]:
        return [r for r in (self.left, self.right) if r is not None]


@dataclass(frozen=True)
class _Instruction:
    """``out = call(*operands, [keyword=]coefficient)``, or in place on the first operand."""

    call: str
    out: int
    operands: tuple[int, ...]
    coefficient: Any = None
    keyword: str = ""


_CALLS = {"absolute": "abs", "maximum": "clamp_min", "minimum": "clamp_max"}
"""PyTorch's names of functions that rules call otherwise."""
_KEYWORDS = {"add": "alpha=", "addcmul": "value=", "addcdiv": "value="}


class Program:
    """A rule compiled to tensor calls.

    Calling it takes the rule's arguments as a mapping and returns the results by name.
    Where a result's name is owned, the result usually lands in its own memory.

    Args:
        fn: The rule.
        reads: Names of its arguments.
        writes: Names of its results.
        lists: Arguments that exist for every weight: lists of tensors, or with
            `packed` single tensors. The others are scalars.
        on_device: Scalars that are zero-dimensional tensors.
        absent: Arguments to leave out of the rule, as if zero.
        broadcast: Arguments in `lists` that are smaller than the parameters.
        owned: Arguments in `lists` that may be overwritten.
        packed: Generate calls on single tensors instead of lists.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        reads: Sequence[str],
        writes: Sequence[str],
        *,
        lists: frozenset[str],
        on_device: frozenset[str] = frozenset(),
        absent: frozenset[str] = frozenset(),
        broadcast: frozenset[str] = frozenset(),
        owned: frozenset[str] = frozenset(),
        packed: bool = False,
    ) -> None:
        self._full: list[bool] = []
        self._code: list[_Instruction] = []
        self._inputs: dict[str, int] = {}
        self._lowered: dict[Symbol, list[_Term]] = {}
        arguments: list[Any] = []
        for name in reads:
            if name in absent:
                arguments.append(0.0)
                continue
            is_list, full = name in lists, name not in broadcast
            symbol = Symbol("input", name, is_list=is_list, full=full, on_device=name in on_device)
            arguments.append(symbol)
            if is_list:
                self._inputs[name] = self._register(full)
        name = fn.__name__ if fn.__name__.isidentifier() else "rule"  # a lambda has no name
        results = fn(*arguments)
        results = results if isinstance(results, tuple) else (results,)
        self._uses = _count_uses(results)
        outputs = [self._materialise(self._terms(result)) for result in results]
        self.source = self._source(
            name, tuple(r for r in reads if r not in absent), outputs, owned, packed
        )
        self.reads = tuple(r for r in reads if r not in absent)
        self.writes = tuple(writes)
        namespace: dict[str, Any] = {"torch": torch}
        exec(compile(self.source, f"<program {name}>", "exec"), namespace)
        self._function: Callable[..., tuple[Any, ...]] = namespace[name]

    def __call__(self, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Run on `values` by name; returns ``(name, new value)`` pairs in the order of `writes`."""
        results = self._function(*[values[name] for name in self.reads])
        return list(zip(self.writes, results, strict=True))

    # -------------------------------------------------------- expression to instructions
    def _register(self, full: bool) -> int:
        self._full.append(full)
        return len(self._full) - 1

    def _emit(self, call: str, *operands: int, coefficient: Any = None) -> int:
        out = self._register(any(self._full[r] for r in operands))
        keyword = _KEYWORDS.get(call, "")
        if call == "add" and len(operands) == 1:
            keyword = ""
        if keyword and _is_one(coefficient):
            coefficient = None
        self._code.append(_Instruction(call, out, operands, coefficient, keyword))
        return out

    def _terms(self, expression: Any) -> list[_Term]:
        """`expression` as a sum of terms; a shared subexpression is computed once."""
        if not isinstance(expression, Symbol) or not expression.is_list:
            return [_Term(expression, None)]
        if expression not in self._lowered:
            terms = self._lower(expression)
            if self._uses[expression] > 1:
                terms = [self._atom(terms)]
            self._lowered[expression] = terms
        return self._lowered[expression]

    def _lower(self, e: Symbol) -> list[_Term]:
        if e.op == "input":
            return [_Term(1, self._inputs[e.args[0]])]
        if e.op == "+":
            return self._terms(e.args[0]) + self._terms(e.args[1])
        if e.op == "-":
            return self._terms(e.args[0]) + [t.scaled(-1) for t in self._terms(e.args[1])]
        if e.op == "neg":
            return [t.scaled(-1) for t in self._terms(e.args[0])]
        if e.op in ("*", "/"):
            return self._lower_product(e.op, *e.args)
        return [_Term(1, self._lower_function(_CALLS.get(e.op, e.op), e.args))]

    def _lower_function(self, call: str, args: Sequence[Any]) -> int:
        """Emit a function of one or two operands, which is the same for either order."""
        lists = [a for a in args if isinstance(a, Symbol) and a.is_list]
        scalars = [a for a in args if not isinstance(a, Symbol) or not a.is_list]
        operands = [self._materialise(self._terms(a)) for a in lists]
        operands.sort(key=lambda register: not self._full[register])
        return self._emit(call, *operands, coefficient=scalars[0] if scalars else None)

    def _lower_product(self, op: str, a: Any, b: Any) -> list[_Term]:
        a_is_list = isinstance(a, Symbol) and a.is_list
        if not (isinstance(b, Symbol) and b.is_list):
            return self._scaled(op, self._terms(a), b)
        if not a_is_list and op == "*":
            return self._scaled("*", self._terms(b), a)
        right = self._atom(self._terms(b))
        if not a_is_list:  # scalar / list
            return self._scaled(
                "*", [_Term(1, self._emit("reciprocal", self._materialise([right])))], a
            )
        left = self._atom(self._terms(a))
        term = _Term(left.coefficient, left.left, op, right.left)
        if _is_one(right.coefficient):
            return [term]
        return [term.scaled(right.coefficient if op == "*" else 1 / right.coefficient)]

    def _scaled(self, op: str, terms: list[_Term], by: Any) -> list[_Term]:
        """`terms` times, or divided by, a scalar."""
        if isinstance(by, Symbol) and by.on_device:
            atom = self._atom(terms)
            assert atom.left is not None
            out = self._emit("mul" if op == "*" else "div", atom.left, coefficient=by)
            return [_Term(atom.coefficient, out)]
        return [t.scaled(1 / by if op == "/" else by) for t in terms]

    def _atom(self, terms: list[_Term]) -> _Term:
        """`terms` as one coefficient and one register."""
        if len(terms) > 1:
            return _Term(1, self._materialise(terms))
        bare = replace(terms[0], coefficient=1)
        return _Term(terms[0].coefficient, self._materialise([bare]))

    def _materialise(self, terms: list[_Term]) -> int:
        """Emit code that leaves the sum of `terms` in one register."""
        # Begin with a plain, full-sized list, with a coefficient of one where there is
        # a choice: the others are added to it. Plain numbers come last.
        first, *rest = sorted(
            terms,
            key=lambda t: (
                t.left is None,
                not any(self._full[r] for r in t.registers),
                t.op is not None,
                len(terms) > 1 and not _is_one(t.coefficient),
            ),
        )
        if first.left is None:
            raise TypeError("a rule must return something that varies with the weight")
        if len(rest) == 1 and rest[0].op is None and rest[0].left is not None and first.op is None:
            for old, new in ((first, rest[0]), (rest[0], first)):
                if _complement(old.coefficient, new.coefficient):
                    return self._emit(
                        "lerp", *old.registers, *new.registers, coefficient=new.coefficient
                    )
        total = first.left
        if first.right is not None:
            total = self._emit("mul" if first.op == "*" else "div", first.left, first.right)
        if not _is_one(first.coefficient):
            total = self._emit("mul", total, coefficient=first.coefficient)
        calls = {None: "add", "*": "addcmul", "/": "addcdiv"}
        for term in rest:
            total = self._emit(calls[term.op], total, *term.registers, coefficient=term.coefficient)
        return total

    # ------------------------------------------------------------ instructions to source
    def _source(
        self,
        name: str,
        reads: Sequence[str],
        outputs: list[int],
        owned: frozenset[str],
        packed: bool,
    ) -> str:
        names = {register: argument for argument, register in self._inputs.items()}
        last_use = {r: i for i, c in enumerate(self._code) for r in c.operands}
        mine = {register for argument, register in self._inputs.items() if argument in owned}
        prefix = "torch." if packed else "torch._foreach_"
        lines = [f"def {name}({', '.join(reads)}):"]
        fresh = 0
        for i, c in enumerate(self._code):
            target = c.operands[0]
            in_place = (
                target in mine
                and last_use[target] == i
                and target not in outputs
                and c.operands.count(target) == 1
                and self._full[target] == self._full[c.out]
            )
            arguments = [names[r] for r in c.operands]
            if c.coefficient is not None:
                arguments.append(f"{c.keyword}{self._written(c, arguments[0], packed)}")
            if in_place:
                names[c.out] = names[target]
            else:
                names[c.out] = f"r{fresh}"
                fresh += 1
            mine.add(c.out)
            if in_place and packed:
                lines.append(f"    {arguments[0]}.{c.call}_({', '.join(arguments[1:])})")
            elif in_place:
                lines.append(f"    {prefix}{c.call}_({', '.join(arguments)})")
            else:
                lines.append(f"    {names[c.out]} = {prefix}{c.call}({', '.join(arguments)})")
        lines.append(f"    return ({', '.join(names[r] for r in outputs)},)")
        return "\n".join(lines) + "\n"

    @staticmethod
    def _written(c: _Instruction, first: str, packed: bool) -> str:
        """A coefficient in source; lists are clamped by numbers or lists, not by a tensor."""
        on_device = isinstance(c.coefficient, Symbol) and c.coefficient.on_device
        if on_device and not packed and c.call in _CALLS.values():
            return f"[{c.coefficient}] * len({first})"
        return str(c.coefficient)


def _count_uses(results: Sequence[Any]) -> Counter[Symbol]:
    """How often each expression is used, including as a result."""
    uses: Counter[Symbol] = Counter()

    def visit(expression: Any) -> None:
        if isinstance(expression, Symbol) and expression.is_list:
            uses[expression] += 1
            if uses[expression] == 1:
                for argument in expression.args:
                    visit(argument)

    for result in results:
        visit(result)
    return uses


compiled = cache(Program)
"""Programs are pure functions of their arguments: build each once."""
