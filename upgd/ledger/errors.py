"""What can go wrong in a study; each message says what, where, and the way out."""

from __future__ import annotations


class StudyError(Exception):
    """A study cannot do what was asked; the message is one line for the user."""


class SpecError(StudyError, ValueError):
    """A run is not specified well."""


class LedgerError(StudyError):
    """The ledger cannot be opened, read or written."""


class DamagedError(LedgerError):
    """The ledger does not match its checksums; `what` is the damage without the file."""

    def __init__(self, message: str, what: str = "") -> None:
        super().__init__(message)
        self.what = what or message


class LeaseLostError(LedgerError):
    """Another process has claimed the run, or it has ended; the work must be dropped."""


class CheckpointError(StudyError):
    """A checkpoint is missing, damaged or not one of ours."""
