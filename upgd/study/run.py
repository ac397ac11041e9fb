"""Run what a study has to do: which kinds of runs come first, and with how many workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from upgd.engine.dense_cpu import cores
from upgd.ledger.errors import StudyError
from upgd.ledger.ledger import Ledger, Where
from upgd.ledger.spec import RunSpec
from upgd.study.execution import Tally
from upgd.study.extensions import carried
from upgd.study.folder import evict_departed, tidy
from upgd.study.kinds import Kind, kind_of
from upgd.study.learners import EAGER
from upgd.study.options import Options, check_device
from upgd.study.pending import Pending, survey
from upgd.study.pools import Pool, ThisProcess, make_pool
from upgd.study.runner import TURN, OnNote, OnProgress, Runner

WORTH_PROCESSES = 5_000
"""Total steps from which runs that go one at a time are spread over processes by default."""


def run_pending(
    ledger: Ledger,
    options: Options | None = None,
    *,
    where: Where | None = None,
    on_progress: OnProgress | None = None,
    on_note: OnNote | None = None,
    pool: Pool | None = None,
    **limits: Any,
) -> Tally:
    """Run what is pending in a study; several processes may share a study.

    Runs of dead processes are taken over. An error in a run fails that run; an error of the
    environment (disk, data, device) is raised. The first interrupt (Ctrl-C) saves checkpoints,
    releases the runs and is raised to the caller; a second one is raised at once.

    Args:
        ledger: The study's.
        options: How runs are executed.
        where: Restricts which runs are taken; see :meth:`Ledger.claim`.
        on_progress: Called with how far runs are.
        on_note: Called with notes for the user, which the tally has too.
        pool: Workers, instead of those that `options` ask for; it stays open.
        limits: ``retries``, ``silence``, ``stall``, ``lease_seconds``, ``clock`` of Runner.

    Raises:
        SpecError: There is no such device here.
        StudyError: The study cannot be written, no worker can work, or runs were started with
            other versions.
    """
    options = options or Options()
    check_device(options.here)
    tidy(ledger)
    tally = Tally()
    for kind in _kinds(ledger, where, options):
        mine = _of_kind(ledger, kind, where)
        refused, notes = survey(ledger, mine, kind, options)
        tally = tally + Tally(refused=refused, notes=notes)
        for note in notes:
            if on_note is not None:
                on_note(note)
        for chosen, workers in _steps(ledger, mine, kind, options, pool):
            here = ThisProcess(chosen.device, on_progress is not None)
            given = pool or (make_pool(chosen, workers) if workers else here)
            runner = Runner(ledger, given, kind, chosen, mine, on_progress, on_note, **limits)
            with closing(given) if pool is None else nullcontext():
                runner.run()
            tally = tally + runner.tally
    return tally


def run_specs(
    ledger: Ledger,
    specs: Sequence[RunSpec],
    options: Options | None = None,
    *,
    on_progress: OnProgress | None = None,
    on_note: OnNote | None = None,
) -> Tally:
    """Add runs and execute them all; wait for those that other processes execute."""
    options = options or Options()
    ledger.add(specs)
    mine = [spec.key for spec in specs]
    where = {"key": mine}
    run = partial(run_pending, where=where, on_progress=on_progress, on_note=on_note)
    tally = run(ledger, options)
    while not {lease.key for lease in ledger.leases()}.isdisjoint(mine):
        time.sleep(TURN)
        if next(ledger.claimable(where), None) is not None:
            tally = tally + run(ledger, options)
    if ledger.unfinished(where):
        raise StudyError("; ".join(dict.fromkeys(tally.refused)) or "some runs are left pending")
    return tally


def _kinds(ledger: Ledger, where: Where | None, options: Options) -> list[Kind]:
    """The kinds of the runs to do, those that need this process first."""
    evict_departed(ledger)
    found = list(dict.fromkeys(kind_of(spec.problem) for spec in ledger.claimable(where)))
    for kind in found:
        if kind.local_only and options.on != "local":
            raise ValueError(kind.local_only)
    return sorted(found, key=lambda kind: not kind.local_only)


def _of_kind(ledger: Ledger, kind: Kind, where: Where | None) -> dict[str, Any]:
    """`where`, restricted to the problems of a kind."""
    asked: Any = (where or {}).get("problem")
    known = [asked] if isinstance(asked, str) else asked or ledger.problems()
    return {**(where or {}), "problem": sorted(p for p in known if kind_of(p) is kind)}


def _steps(
    ledger: Ledger, where: Where, kind: Kind, options: Options, pool: Pool | None
) -> list[tuple[Options, int]]:
    """The parts of the work, each with its number of worker processes; 0 for this process.

    By default this process executes stacks, and then worker processes the runs that go alone.
    """
    if pool is not None or kind.local_only:
        return [(options, 0)]
    if options.on != "local" or (options.workers or 0) > 1:
        workers = max(1, min(options.workers or 1, ledger.unfinished(where)))
        return [(replace(options, extensions=carried()), workers)]
    if options.workers is None and options.engine == "auto" and options.device == "cpu":
        pending = Pending(ledger, where, kind, options)
        pending.read()
        alone = [spec for g in pending.groups() if g.engine == EAGER for spec in g.specs]
        workers = min(cores(), len(alone))
        if workers > 1 and sum(spec.steps for spec in alone) >= WORTH_PROCESSES:
            carrying = replace(options, extensions=carried())
            return [(replace(options, engine="batched"), 0), (carrying, workers)]
    return [(options, 0)]
