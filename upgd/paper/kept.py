"""Findings as JSON, for :func:`upgd.kept.keep`."""

from __future__ import annotations

from collections.abc import Iterable

from upgd.kept import keep
from upgd.metrics import Interval
from upgd.paper.evidence import Finding

__all__ = ["keep", "pack_findings", "unpack_findings"]

Rows = list[list[object]]


def pack_findings(findings: Iterable[Finding]) -> Rows:
    """Findings as lists."""
    return [[f.statement, f.found and list(f.found), f.verdict, f.unit] for f in findings]


def unpack_findings(rows: Rows) -> list[Finding]:
    """The findings of :func:`pack_findings`."""
    return [
        Finding(text, None if found is None else Interval(*found), verdict, unit)  # type: ignore[misc,arg-type]
        for text, found, verdict, unit in rows
    ]
