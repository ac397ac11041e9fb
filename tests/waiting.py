"""Waiting for what other processes do, however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from upgd.ledger import Ledger, LedgerError

PATIENCE = 600.0
"""Seconds after which something counts as hanging. Nothing that works comes near it."""


def wait_for(what: Callable[[], Any]) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, "it does not become true"
        time.sleep(0.02)


def states(folder: Path) -> dict[str, int]:
    """How many runs are in which state; none as long as another process makes the study."""
    with suppress(LedgerError), Ledger.open(folder, create=False, read_only=True) as ledger:
        return {state: count for state, count in ledger.counts().items() if count}
    return {}
