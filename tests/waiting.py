"""Waiting for what other processes do to a study."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from upgd.study import Ledger, LedgerError


def comes(what: Callable[[], Any], seconds: float) -> bool:
    """Whether something comes true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def wait_for(what: Callable[[], Any]) -> None:
    assert comes(what, seconds=90.0)


def states(folder: Path) -> dict[str, int]:
    """How many runs are in which state; none as long as another process makes the study."""
    with suppress(LedgerError), Ledger.open(folder, create=False, read_only=True) as ledger:
        return {state: count for state, count in ledger.counts().items() if count}
    return {}
