"""Findings as JSON has them, for :mod:`upgd.kept`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from upgd.metrics import Interval
from upgd.paper.verdicts import Finding

Rows = list[list[Any]]
LEDGER = "ledger.sqlite"
"""The file of a study, which may change at any time: what it says is not kept."""


def pack_findings(findings: Iterable[Finding]) -> Rows:
    """Findings as lists."""
    return [list(finding) for finding in findings]


def unpack_findings(rows: Rows) -> list[Finding]:
    """The findings of :func:`pack_findings`."""
    return [
        Finding(
            text,
            None if found is None else Interval(*found),
            verdict,
            unit,
            tuple(words),
            part,
            ours and tuple(ours),
        )
        for text, found, verdict, unit, words, part, ours in rows
    ]
