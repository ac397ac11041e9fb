"""What goes into a ledger and comes out of it."""

from __future__ import annotations

import json
import math
import os
import platform
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from upgd.ledger.errors import LedgerError
from upgd.ledger.spec import LIMIT, RunSpec, Scalar

STATES = ("pending", "running", "done", "failed", "diverged")


@dataclass(frozen=True)
class Series:
    """A metric over time.

    Attributes:
        values: One number per window, in order; kept as float32.
        window: How many steps a window has.
    """

    values: ArrayLike
    window: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.window < LIMIT:
            raise LedgerError(f"a window has at least one step, not {self.window}")


@dataclass(frozen=True)
class Result:
    """What a run gave, and where.

    Attributes:
        engine: The engine that ran it.
        device: Where it ran, such as ``"cpu"``.
        dtype: The type of the weights.
        versions: Libraries and their versions.
        host: Facts about the machine.
        started: When it began, in seconds since 1970.
        finished: When it ended.
        wall: Seconds of work, without interruptions.
        summary: Final metrics by name. NaN and infinities are kept as NaN.
        series: Metrics over time by name. Not filled in by :meth:`Ledger.runs`; read them with
            :meth:`Ledger.series`.
        diverged_at: The step at which the loss was not finite any more, if it came to that.
    """

    engine: str
    device: str = "cpu"
    dtype: str = "float32"
    versions: Mapping[str, str] = field(default_factory=dict)
    host: Mapping[str, Scalar] = field(default_factory=dict)
    started: float = 0.0
    finished: float = 0.0
    wall: float = 0.0
    summary: Mapping[str, float] = field(default_factory=dict)
    series: Mapping[str, Series] = field(default_factory=dict)
    diverged_at: int | None = None


@dataclass(frozen=True)
class Claim:
    """The right to run one specification for a while.

    Attributes:
        spec: What to run.
        token: Larger than that of any earlier claim; a result is accepted only with the latest.
        owner: Who claimed it.
        attempt: How many times the run was begun, with this one.
    """

    spec: RunSpec
    token: int
    owner: str
    attempt: int = 1


@dataclass(frozen=True)
class Lease:
    """Who holds a run, and until when (seconds since 1970)."""

    key: str
    owner: str
    token: int
    expires: float


@dataclass(frozen=True)
class Run:
    """A row of the ledger.

    Attributes:
        spec: What to run.
        key: Its key.
        state: One of pending, running, done, failed, diverged.
        attempts: How many times it was begun.
        error: Why it failed last, if it did.
        result: What it gave, once it is done or diverged; without series.
    """

    spec: RunSpec
    key: str
    state: str
    attempts: int
    error: str | None
    result: Result | None


def owner_name() -> str:
    """A name for this process that no other has: host, process id, and a random part."""
    return f"{platform.node() or 'host'}:{os.getpid()}:{secrets.token_hex(4)}"


def to_blob(values: ArrayLike) -> bytes:
    """Pack numbers as little-endian float32, whatever the machine.

    >>> to_blob([1.0, 2.0]).hex()
    '0000803f00000040'
    """
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise LedgerError(f"a series is a list of numbers: {error}") from None
    if array.ndim != 1:
        raise LedgerError(f"a series has one dimension, not shape {array.shape}")
    if array.size and array.dtype.kind not in "biuf":
        raise LedgerError(f"a series is a list of numbers, not of {array.dtype}")
    with np.errstate(over="ignore"):  # what does not fit is infinite
        return array.astype("<f4").tobytes()


def from_blob(blob: bytes) -> NDArray[np.float32]:
    """Unpack what :func:`to_blob` packed, as a new array.

    >>> from_blob(to_blob([1.0, 2.0]))
    array([1., 2.], dtype=float32)
    """
    if not isinstance(blob, bytes) or len(blob) % 4:
        raise LedgerError("a series in the ledger is damaged; restore it from a copy")
    return np.frombuffer(blob, "<f4").astype(np.float32)


def to_text(mapping: Mapping[str, Any]) -> str:
    """Facts or metrics as JSON that every reader takes: a number that is not finite is null.

    >>> to_text({"loss": float("nan"), "accuracy": np.float32(0.5)})
    '{"accuracy": 0.5, "loss": null}'
    """
    plain = {
        str(name): value.item() if isinstance(value, np.generic) else value
        for name, value in mapping.items()
    }
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in plain.items()
    }
    try:
        return json.dumps(finite, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise LedgerError(f"a result must hold what JSON can: {error}") from None


def from_summary(text: str) -> dict[str, float]:
    """Read final metrics back; null is NaN."""
    content: dict[str, float | None] = json.loads(text)
    return {name: math.nan if value is None else value for name, value in content.items()}
