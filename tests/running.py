"""How tests run a study: on one engine in this process, or on the workers of a pool."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from upgd.ledger import Ledger
from upgd.study.execution import Tally
from upgd.study.options import Options
from upgd.study.pools import Pool
from upgd.study.run import run_pending

OPTIONS = {field.name for field in fields(Options)}


def work(ledger: Ledger, engine: str = "eager", **given: Any) -> Tally:
    """Run what is pending; `given` are fields of Options and arguments of run_pending."""
    chosen = {"engine": engine, "workers": 1, **given}
    options = Options(**{name: value for name, value in chosen.items() if name in OPTIONS})
    return run_pending(ledger, options, **{k: v for k, v in given.items() if k not in OPTIONS})


def work_stacks(ledger: Ledger, **given: Any) -> Tally:
    """The same for runs that can share a stack."""
    return work(ledger, "batched", **given)


def drive(ledger: Ledger, pool: Pool, engine: str = "auto", **given: Any) -> Tally:
    """The same on the workers of a pool."""
    return work(ledger, engine, pool=pool, **given)
