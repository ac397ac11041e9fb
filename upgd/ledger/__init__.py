"""The durable record of a study: specifications, results, checkpoints.

A :class:`RunSpec` specifies a run, a :class:`Ledger` keeps runs and their results, and
:func:`save_checkpoint` keeps a run that is under way. Nothing here executes runs.
"""

from upgd.ledger.checkpoints import load_checkpoint, save_checkpoint
from upgd.ledger.errors import CheckpointError, LeaseLostError, LedgerError, SpecError, StudyError
from upgd.ledger.files import remove_partial, write_atomically
from upgd.ledger.ledger import Ledger
from upgd.ledger.records import STATES, Claim, Lease, Result, Run, Series, owner_name
from upgd.ledger.spec import RULES_VERSION, RunSpec, Scalar

__all__ = [
    "RULES_VERSION",
    "STATES",
    "CheckpointError",
    "Claim",
    "Lease",
    "LeaseLostError",
    "Ledger",
    "LedgerError",
    "Result",
    "Run",
    "RunSpec",
    "Scalar",
    "Series",
    "SpecError",
    "StudyError",
    "load_checkpoint",
    "owner_name",
    "remove_partial",
    "save_checkpoint",
    "write_atomically",
]
