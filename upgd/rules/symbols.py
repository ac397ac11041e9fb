"""Symbols on which a rule is evaluated once, to be written out for whatever executes it."""

from __future__ import annotations

from typing import Any


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
        symbols = [a for a in args if isinstance(a, Symbol)]
        if op in "*+" and any(not isinstance(a, Symbol) and a == 0 for a in args):
            # An absent perturbation vanishes from the rule.
            return 0.0 if op == "*" else symbols[0]
        lists = [s for s in symbols if s.is_list]
        on_device = not lists and any(s.on_device for s in symbols)
        full = any(s.full for s in lists)
        return Symbol(op, *args, is_list=bool(lists), full=full, on_device=on_device)

    def __add__(self, other: Any) -> Any:
        return self._apply("+", self, other)

    def __radd__(self, other: Any) -> Any:
        return self._apply("+", other, self)

    def __sub__(self, other: Any) -> Any:
        return self._apply("-", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._apply("-", other, self)

    def __mul__(self, other: Any) -> Any:
        return self._apply("*", self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._apply("*", other, self)

    def __truediv__(self, other: Any) -> Any:
        return self._apply("/", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._apply("/", other, self)

    def __neg__(self) -> Any:
        return self._apply("neg", self)

    def sigmoid(self) -> Any:
        return self._apply("sigmoid", self)

    def sqrt(self) -> Any:
        return self._apply("sqrt", self)

    def abs(self) -> Any:
        return self._apply("abs", self)

    def __str__(self) -> str:
        """Python source, for scalars."""
        if self.op == "input":
            return str(self.args[0])
        if self.op == "neg":
            return f"(-{self.args[0]})"
        if self.op in "+-*/":
            return f"({self.args[0]} {self.op} {self.args[1]})"
        raise TypeError(f"a rule may not take {self.op} of a scalar")
