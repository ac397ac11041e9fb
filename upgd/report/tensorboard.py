"""TensorBoard's event files of a study: a run's metrics over time, a folder per run."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from upgd.extras import install
from upgd.ledger.errors import StudyError
from upgd.ledger.ledger import Ledger
from upgd.ledger.queries import StoredSeries
from upgd.ledger.records import Run
from upgd.ledger.spec import RunSpec

LONGEST = 120
"""Characters in the name of a folder."""


def write_events(ledger: Ledger, folder: str | os.PathLike[str]) -> tuple[int, int]:
    """Write the event files of all runs that are over; return how many, and how many were there.

    A run's folder is ``PROBLEM/METHOD/SET/STEPS-steps-seed-SEED``. It appears when it is whole,
    and is not written again: what a run gave does not change.

    Args:
        ledger: The study's.
        folder: Where; what ``tensorboard --logdir`` is given.

    Raises:
        StudyError: TensorBoard is not installed, or the files cannot be written.
    """
    writer = _writer()
    root = Path(folder)
    try:
        os.fspath(root).encode()
    except UnicodeEncodeError:
        raise StudyError(
            f"TensorBoard writes only to folders whose names are UTF-8, got {root}"
        ) from None
    runs = {run.key: run for run in ledger.runs() if run.result is not None}
    missing = {key: run for key, run in runs.items() if not (root / place(run.spec)).exists()}
    series: dict[str, list[StoredSeries]] = {}
    written = 0
    try:
        for kept in ledger.each_series(keys=missing):
            series.setdefault(kept.key, []).append(kept)
            done = [key for key in series if key != kept.key]
            for key in done:  # they come run by run
                written += _write(writer, root / place(runs[key].spec), runs[key], series.pop(key))
        for key, found in series.items():
            written += _write(writer, root / place(runs[key].spec), runs[key], found)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StudyError(f"cannot write event files to {root}: {reason}") from error
    return written, len(runs) - len(missing)


def place(spec: RunSpec) -> Path:
    """The folder of a run's event file.

    Example:
        >>> place(RunSpec("digits", "r&d", {"lr": 0.1, "sigma": 1}, 3, 500)).as_posix()
        'digits/r_d-dacc7c16/lr=0.1,sigma=1/500-steps-seed-3'
    """
    hyper = [f"{name}={_exact(value)}" for name, value in spec.hyper.items()]
    options = [f"{name}={value}" for name, value in spec.options.items()]
    last = f"{spec.steps}-steps-seed-{spec.seed}"
    parts = [_safe(p) for p in (spec.problem, spec.name, ",".join(hyper + options) or "set")]
    return Path(*parts, last)


def _exact(value: float) -> str:
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _safe(name: str) -> str:
    """A name that every file system takes; where it had to change, no other name has it."""
    plain = re.sub(r"[^A-Za-z0-9._=,+-]", "_", name).strip(".")
    if plain == name and 0 < len(name) <= LONGEST:
        return name
    return f"{plain[:LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise StudyError(f"event files need tensorboard: {install('tensorboard')}") from None
    return SummaryWriter


def _write(writer: Any, target: Path, run: Run, found: list[StoredSeries]) -> int:
    """One run's events, whole or not at all."""
    assert run.result is not None
    started, took = run.result.started, max(0.0, run.result.finished - run.result.started)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        with writer(log_dir=str(partial)) as events:
            for kept in found:
                for i, value in enumerate(kept.values, 1):
                    if np.isfinite(value):
                        when = started + took * i / len(kept.values)
                        events.add_scalar(kept.metric, value, i * kept.window, walltime=when)
        os.replace(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return 1
