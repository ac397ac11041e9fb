"""What a pipe is asked to do, and how far it is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from upgd.ledger.files import check_output
from upgd.pipe.formats import number_of
from upgd.pipe.outputs import check_distinct
from upgd.pipe.rows import BadLineError
from upgd.text import count

MOST_NUMBERED_CLASSES = 20
"""More different whole numbers than these are not taken for classes."""


@dataclass(frozen=True)
class Task:
    """What is to be learned, from where.

    Args:
        files: Paths; ``-`` is standard input.
        target: The column with the target; empty for that of the saved learner.
        kind: ``"classify"``, ``"regress"``, or empty: guessed from the first targets.
        ignore: Columns that are not features; None for those of the saved learner.
        format: ``"csv"``, ``"jsonl"``, or empty: guessed.
        delimiter: Of CSV; empty: guessed from the header.
        columns: Names, for CSV without a header.
        parameters: Of the learner.
        state: The learner's file.
        save_every: Samples after which it is written.
        save_seconds: Seconds after which it is written.
        predict: Where predictions go; ``-`` is standard output.
        refuse: Whether a bad line ends the run.
        bad_file: Where bad lines are kept.
        skip_seen: Whether as many records of pipes are skipped as the saved learner has read.
        complete: Whether files are complete, so that a last line without a newline is learned
            even if there is a state; else it is left for the next run.
    """

    files: Sequence[str] = ("-",)
    target: str = ""
    kind: str = ""
    ignore: Sequence[str] | None = None
    format: str = ""
    delimiter: str = ""
    columns: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    state: str | None = None
    save_every: int = 10_000
    save_seconds: float = 60.0
    predict: str | None = None
    refuse: bool = False
    bad_file: str | None = None
    skip_seen: bool = False
    complete: bool = False

    def check(self) -> None:
        """Raise ValueError or OSError for what cannot work, before anything is read."""
        named = {f"input {i}": path for i, path in enumerate(self.files, 1)}
        outputs = {"the state": self.state, "the predictions": self.predict}
        outputs["the bad lines"] = self.bad_file
        given = {what: path for what, path in outputs.items() if path}
        inputs = {os.path.realpath(path): what for what, path in named.items() if path != "-"}
        check_distinct({**{what: path for path, what in inputs.items()}, **given})
        if list(self.files).count("-") > 1:
            raise ValueError("standard input, -, can be given once")
        for path in self.files:
            if path != "-":
                os.stat(path)
        for path in given.values():
            if path != "-":
                check_output(path)
        if self.skip_seen and not self.state:
            raise ValueError("--skip-seen needs --state, which knows what was read")


@dataclass
class Counts:
    """What became of records."""

    read: int = 0
    learned: int = 0
    predicted: int = 0  # without a target, so not learned
    bad: int = 0

    def plus(self, saved: Mapping[str, int]) -> dict[str, int]:
        """The same with those of earlier runs."""
        return {name: value + saved.get(name, 0) for name, value in vars(self).items()}


@dataclass(frozen=True)
class Progress:
    """How far learning is."""

    counts: Counts
    seconds: float
    errors: dict[str, float]  # names and values: so far, and of the last thousand
    is_waiting: bool


def guess_kind(targets: Sequence[Any]) -> tuple[str, str]:
    """``"classify"`` or ``"regress"`` by the first targets of a stream, and why.

    >>> guess_kind(["up", "down"]), guess_kind(["1.5", "2"]), guess_kind([0, 1, 1])[0]
    (('classify', "'up' is no number"), ('regress', '1.5 is no whole number'), 'classify')
    """
    numbers = []
    for target in targets:
        try:
            numbers.append(number_of(target))
        except BadLineError:
            return "classify", f"{target!r} is no number"
    broken = next((number for number in numbers if not number.is_integer()), None)
    if broken is not None:
        return "regress", f"{broken:g} is no whole number"
    different = len(set(numbers))
    kind = "classify" if different <= MOST_NUMBERED_CLASSES else "regress"
    what = f"{count(len(numbers), 'target')}: {count(different, 'different whole number')}"
    return kind, f"the stream begins with {what}"
