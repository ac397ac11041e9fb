"""Puts a method through what the package's own methods are tested for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from upgd.lab.battery import Battery, EndedError
from upgd.lab.definitions import method_name
from upgd.lab.views import Cells, Part


class Verdict(NamedTuple):
    """How one check ended: ``"ok"``, ``"FAILED"`` or ``"skipped"``, and what was found."""

    check: str
    verdict: str
    detail: str


@dataclass(frozen=True, repr=False)
class Checks(Cells):
    """What :func:`check` found.

    Attributes:
        method: The method's name.
        verdicts: One per check.
    """

    method: str
    verdicts: Sequence[Verdict]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(each.verdict != "FAILED" for each in self.verdicts)

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.verdicts)

    def parts(self) -> list[Part]:
        """The table."""
        return [Part("", self.cells())]

    def cells(self) -> list[list[str]]:
        """The table as text, its header first."""
        return [[self.method, "verdict", "detail"], *map(list, self.verdicts)]


def check(method: Any) -> Checks:
    """Put a method through the checks that the package's own have to pass.

    A rule is executed by every executor that there is here, in float64, and all of them must agree;
    it is interrupted and resumed, run in half precision and given a gradient that is not finite. An
    optimizer of PyTorch's kind is run twice, resumed, and has to learn.

    Args:
        method: A name, an optimizer class or what :func:`upgd.lab.method` returned.

    Returns:
        A table of verdicts; a check that fails raises nothing.

    Raises:
        KeyError: There is no such method.

    Example:
        >>> from upgd import lab
        >>> lab.check("sgd").ok
        True
    """
    name = method_name(method)
    return Checks(name, [_verdict(what, each) for what, each in Battery(name).checks().items()])


def _verdict(what: str, one: Callable[[], str]) -> Verdict:
    try:
        return Verdict(what, "ok", one())
    except EndedError as end:
        return Verdict(what, *end.args)
    except Exception as error:  # whatever a user's code may raise
        line = (str(error).splitlines() or [""])[0]
        return Verdict(what, "FAILED", f"{type(error).__name__}: {line}")
