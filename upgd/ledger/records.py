"""The records of a ledger: results, claims, leases, runs."""

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
    """A metric over time."""

    values: ArrayLike  # one number per window, in order; kept as float32
    window: int = 1  # how many steps a window has

    def __post_init__(self) -> None:
        if not 1 <= self.window < LIMIT:
            raise LedgerError(f"a window has at least one step, not {self.window}")


@dataclass(frozen=True)
class Result:
    """The result of a run, and where it was computed."""

    engine: str  # the engine that ran it
    device: str = "cpu"  # where it ran, such as ``"cpu"``
    dtype: str = "float32"  # the type of the weights
    versions: Mapping[str, str] = field(default_factory=dict)  # libraries and their versions
    host: Mapping[str, Scalar] = field(default_factory=dict)  # facts about the machine
    started: float = 0.0  # in seconds since 1970
    finished: float = 0.0  # when it ended
    wall: float = 0.0  # seconds of work, without interruptions
    # Final metrics by name. NaN and infinities are kept as NaN.
    summary: Mapping[str, float] = field(default_factory=dict)
    # Metrics over time by name; empty in :meth:`Ledger.runs`, read them by :meth:`Ledger.series`.
    series: Mapping[str, Series] = field(default_factory=dict)
    diverged_at: int | None = None  # the step at which the loss was not finite, if it diverged


@dataclass(frozen=True)
class Claim:
    """The right to run one specification for a while."""

    spec: RunSpec  # what to run
    token: int  # larger than that of any earlier claim; a result is accepted only with the latest
    owner: str  # who claimed it
    attempt: int = 1  # how many times the run was started, with this one


@dataclass(frozen=True)
class Lease:
    """Who holds a run, and until when (seconds since 1970)."""

    key: str
    owner: str
    token: int
    expires: float


@dataclass(frozen=True)
class Run:
    """A row of the ledger."""

    spec: RunSpec  # what to run
    key: str  # its key
    state: str  # one of pending, running, done, failed, diverged
    attempts: int  # how many times it was started
    error: str | None  # why it failed last, if it did
    result: Result | None  # once it is done or diverged; without series


def owner_name() -> str:
    """A name for this process that no other has: host, process id, and a random part."""
    return f"{platform.node() or 'host'}:{os.getpid()}:{secrets.token_hex(4)}"


def to_blob(values: ArrayLike) -> bytes:
    """Pack numbers as little-endian float32."""
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
    """Unpack what :func:`to_blob` packed, as a new array."""
    if not isinstance(blob, bytes) or len(blob) % 4:
        raise LedgerError("a series in the ledger is damaged; restore it from a copy")
    return np.frombuffer(blob, "<f4").astype(np.float32)


def to_text(mapping: Mapping[str, Any]) -> str:
    """Facts or metrics as standard JSON: a number that is not finite is null.

    >>> to_text({"loss": float("nan"), "accuracy": np.float32(0.5)})
    '{"accuracy": 0.5, "loss": null}'
    """
    finite = {}
    for name, value in mapping.items():
        plain = value.item() if isinstance(value, np.generic) else value
        finite[str(name)] = None if isinstance(plain, float) and not math.isfinite(plain) else plain
    try:
        return json.dumps(finite, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise LedgerError(f"a result must hold what JSON can: {error}") from None


def from_summary(text: str) -> dict[str, float]:
    """Read final metrics back; null is NaN."""
    content: dict[str, float | None] = json.loads(text)
    return {name: math.nan if value is None else value for name, value in content.items()}
