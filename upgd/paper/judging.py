"""All claims judged by studies or tables; what tables alone say is kept for the next time.

Reading a kept result imports neither torch nor anything that computes one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from upgd.kept import keep
from upgd.paper.verdicts import Finding, Judged

LEDGER = "ledger.sqlite"
"""The file of a study, which may change at any time: what it says is not kept."""
FILES = ("*.csv.gz", "provenance.json")
"""What judgements on a folder of tables depend on."""


def judge(
    places: Iterable[str | os.PathLike[str]], say: Callable[[str], object] = lambda text: None
) -> list[Judged]:
    """Judge all fourteen claims by studies or folders of tables.

    Calls `say` with what is being done.
    """
    folders = [Path(place) for place in places]

    def compute() -> list[Judged]:
        from upgd.paper.claims import judge_results
        from upgd.paper.committed import load

        return judge_results(load(folders, say, older=False), folders, say)

    if any(True for folder in folders for _ in folder.rglob(LEDGER)):
        return compute()
    files = [p for folder in folders for kind in FILES for p in sorted(folder.rglob(kind))]
    return keep("claims", files, compute, _unpack)


def _unpack(rows: list[list[Any]]) -> list[Judged]:
    return [Judged(n, text, data, Finding.from_rows(found)) for n, text, data, found in rows]
