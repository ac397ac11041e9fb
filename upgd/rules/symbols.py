"""Symbols on which a rule is evaluated once, to be written out for whatever executes it."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any, NoReturn

MOST_POWER = 8
"""Integer powers up to this one are written as products."""
_WAY_OUT = (
    "a rule is evaluated once for all weights, so {}; "
    "use maximum, minimum, clip or sign of upgd.lab"
)


def _binary(op: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """An operator's method of the left operand, and that of the right one."""
    return (
        lambda self, other: Symbol._apply(op, self, other),
        lambda self, other: Symbol._apply(op, other, self),
    )


def _function(op: str) -> Callable[..., Any]:
    def method(self: Symbol, *others: Any) -> Any:
        found = self._apply(op, self, *others)
        if found is NotImplemented:
            raise TypeError(f"{op} takes values of the rule and numbers, got {others[0]!r}")
        if not found.is_list:
            raise TypeError(
                f"{op} is taken of hyperparameters alone; a rule may take it of something that "
                "varies with the weight"
            )
        return found

    return method


class Symbol:
    """An expression under construction: an operator and its operands.

    `is_list` tells what is computed for every weight from a scalar, `full` what is shaped
    like the parameters from what only broadcasts to them, `on_device` a scalar that is a
    tensor from a number.
    """

    def __init__(
        self, op: str, *args: Any, is_list: bool, full: bool = True, on_device: bool = False
    ) -> None:
        self.op, self.args = op, args
        self.is_list, self.full, self.on_device = is_list, full, on_device

    @staticmethod
    def _apply(op: str, *args: Any) -> Any:
        if not all(isinstance(a, Symbol | Real) for a in args):
            return NotImplemented
        symbols = [a for a in args if isinstance(a, Symbol)]
        if op in "*+" and any(not isinstance(a, Symbol) and a == 0 for a in args):
            # An absent perturbation vanishes from the rule.
            return 0.0 if op == "*" else symbols[0]
        lists = [s for s in symbols if s.is_list]
        on_device = not lists and any(s.on_device for s in symbols)
        full = any(s.full for s in lists)
        return Symbol(op, *args, is_list=bool(lists), full=full, on_device=on_device)

    __add__, __radd__ = _binary("+")
    __sub__, __rsub__ = _binary("-")
    __mul__, __rmul__ = _binary("*")
    __truediv__, __rtruediv__ = _binary("/")

    def __neg__(self) -> Any:
        return self._apply("neg", self)

    def __pow__(self, power: Any) -> Any:
        if isinstance(power, bool) or not isinstance(power, int) or not 1 <= power <= MOST_POWER:
            raise TypeError(
                f"a rule may take whole powers from 1 to {MOST_POWER}, not {power!r}; "
                "use sqrt, exp and log of upgd.lab"
            )
        found = self
        for _ in range(power - 1):
            found = found * self
        return found

    def __rpow__(self, base: Any) -> NoReturn:
        raise TypeError(f"a rule may not take powers of {base!r}; use exp of upgd.lab")

    __abs__, sigmoid, sqrt = _function("absolute"), _function("sigmoid"), _function("sqrt")
    sign, exp, log = _function("sign"), _function("exp"), _function("log")
    clamp_min, clamp_max = _function("maximum"), _function("minimum")

    # What Python or NumPy would need a value for.
    __array_ufunc__ = None
    __hash__ = object.__hash__

    def _compared(self, other: Any) -> NoReturn:
        raise TypeError(_WAY_OUT.format("values cannot be compared (if, max, min, <, ==)"))

    __lt__ = __le__ = __gt__ = __ge__ = _compared
    __eq__ = __ne__ = _compared

    def __bool__(self) -> NoReturn:
        raise TypeError(_WAY_OUT.format("a value cannot be a condition (if, and, or, not)"))

    def __float__(self) -> NoReturn:
        raise TypeError(
            "a rule is evaluated once for all weights, so math and numpy cannot be used; use "
            "sigmoid, sqrt, exp, log, absolute, sign, maximum, minimum or clip of upgd.lab"
        )

    __int__ = __index__ = __complex__ = __array__ = __float__

    def __str__(self) -> str:
        """Python source, for scalars."""
        if self.op == "input":
            return str(self.args[0])
        if self.op == "neg":
            return f"(-{self.args[0]})"
        return f"({self.args[0]} {self.op} {self.args[1]})"
