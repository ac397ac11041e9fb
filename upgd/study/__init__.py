"""Studies: runs as specifications, a ledger that loses none of them, checkpoints.

A :class:`RunSpec` says what to run, a :class:`Ledger` keeps which runs there are and what they
gave, and :func:`save_checkpoint` keeps a run that is under way.
"""

from upgd.study.checkpoints import load_checkpoint, load_checkpoint_or_none, save_checkpoint
from upgd.study.errors import CheckpointError, LeaseLostError, LedgerError, SpecError, StudyError
from upgd.study.files import remove_partial, write_atomically
from upgd.study.ledger import Ledger
from upgd.study.records import STATES, Claim, Lease, Result, Run, Series, owner_name
from upgd.study.spec import RULES_VERSION, RunSpec, Scalar

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
    "load_checkpoint_or_none",
    "owner_name",
    "remove_partial",
    "save_checkpoint",
    "write_atomically",
]
