"""What can go wrong in a study; each message says what, where, and the way out."""

from __future__ import annotations


class StudyError(Exception):
    """A study cannot go on as asked; the message is one line for people."""


class SpecError(StudyError, ValueError):
    """A run is not specified well."""


class LedgerError(StudyError):
    """The ledger cannot be opened, read or written."""


class DamagedError(LedgerError):
    """What the ledger holds is not what was written.

    Attributes:
        what: What is damaged, without where and the way out.
    """

    def __init__(self, message: str, what: str = "") -> None:
        super().__init__(message)
        self.what = what or message


class LeaseLostError(LedgerError):
    """The run of a claim is not the claimant's any more; its work must be dropped."""


class CheckpointError(StudyError):
    """A checkpoint is missing, damaged or not one of ours."""
