"""How a study is getting on, for those who look at it from outside; nothing is written.

What runs under way have done is told by their checkpoints, at most a minute old; before the first
one, by how fast runs of the same method were that finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from upgd.ledger.canonical import is_called
from upgd.ledger.checkpoints import checkpoint_facts
from upgd.ledger.errors import CheckpointError
from upgd.ledger.ledger import Ledger
from upgd.ledger.queries import UnderWay
from upgd.ledger.spec import RunSpec
from upgd.report.tables import no_such_run

FAILURES = 3
RECENT = 300.0
"""Seconds back to which a pace reaches while somebody looks on."""
LEAST = 30.0
"""Seconds between two checkpoints that tell a pace."""


@dataclass
class MethodProgress:
    """The runs of one method.

    Attributes:
        problem: Which problem.
        method: Which method.
        counts: Runs by state; ``"left"`` are those that a process began and nobody holds.
        steps: Of all runs.
        done: Steps that are done, as far as it is known.
        pace: Learner-steps per second of those under way; 0 where it is not known.
    """

    problem: str
    method: str
    counts: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    done: float = 0.0
    pace: float = 0.0

    @property
    def runs(self) -> int:
        """How many there are."""
        return sum(self.counts.values())

    @property
    def to_do(self) -> int:
        """How many are not over."""
        return sum(self.counts.get(state, 0) for state in ("pending", "running", "left"))

    @property
    def seconds_left(self) -> float | None:
        """At this pace, where there is one."""
        return (self.steps - self.done) / self.pace if self.pace > 0 and self.to_do else None


@dataclass(frozen=True)
class View:
    """A study at one moment.

    Attributes:
        rows: One per problem and method.
        failures: Some runs that failed, and why.
    """

    rows: list[MethodProgress]
    failures: list[tuple[RunSpec, str]]

    @property
    def total(self) -> MethodProgress:
        """All rows together."""
        states = {state for row in self.rows for state in row.counts}
        return MethodProgress(
            "",
            "all",
            {state: sum(row.counts.get(state, 0) for row in self.rows) for state in states},
            sum(row.steps for row in self.rows),
            sum(row.done for row in self.rows),
            sum(row.pace for row in self.rows),
        )


def look(ledger: Ledger, method: str = "") -> View:
    """A study as it is now, or one method's part of it; ValueError if there is none."""
    rows: dict[tuple[str, str], MethodProgress] = {}
    for part in ledger.parts():
        if method and not is_called(method, part.method):
            continue
        row = rows.setdefault(
            (part.problem, part.method), MethodProgress(part.problem, part.method)
        )
        row.counts[part.state] = part.runs
        row.steps += part.steps
        if part.state not in ("pending", "running"):
            row.done += part.steps
    if method and not rows:
        raise no_such_run(ledger, None, [method])
    folder, under_way = ledger.path.parent / "checkpoints", ledger.under_way()
    _add_progress(rows, under_way, ledger.paces(), folder)
    _add_interrupted(rows, ledger, {run.key for run in under_way}, folder)
    failures = ledger.failures(FAILURES)
    mine = [pair for pair in failures if not method or pair[0].is_called(method)]
    return View(list(rows.values()), mine)


class Paces:
    """The paces of the last minutes, from one look to the next.

    The pace of a look is the average over the life of each run, and is wrong as soon as the machine
    has other work than before. Since checkpoints are rare, time is taken between two of them.
    """

    def __init__(self) -> None:
        self._done: dict[tuple[str, str], float] = {}
        self._seen: dict[tuple[str, str], deque[tuple[float, float]]] = {}

    def update(self, view: View, now: float) -> None:
        """Take note of a look at the time `now`, and give its rows their present paces."""
        for row in view.rows:
            name = (row.problem, row.method)
            before, self._done[name] = self._done.get(name, row.done), row.done
            seen = self._seen.setdefault(name, deque())
            if row.done < before:  # a run has begun anew
                seen.clear()
            elif row.done > before:
                seen.append((now, row.done))
            while len(seen) > 2 and now - seen[0][0] > RECENT:
                seen.popleft()
            if row.pace > 0 and len(seen) > 1 and seen[-1][0] - seen[0][0] >= LEAST:
                (began, first), (ended, last) = seen[0], seen[-1]
                row.pace = (last - first) / (ended - began)


def _add_progress(
    rows: dict[tuple[str, str], MethodProgress],
    under_way: Iterable[UnderWay],
    paces: dict[tuple[str, str], float],
    folder: Path,
) -> None:
    for run in under_way:
        name = (run.problem, run.method)
        if name not in rows:
            continue  # added since
        row = rows[name]
        step, seconds = progress(folder / f"{run.key}.npz")
        row.done += min(step, run.steps)
        if run.held:
            row.pace += step / seconds if step and seconds > 0 else paces.get(name, 0.0)
        elif row.counts.get("running", 0) > 0:
            row.counts["running"] -= 1
            row.counts["left"] = row.counts.get("left", 0) + 1


def _add_interrupted(
    rows: dict[tuple[str, str], MethodProgress], ledger: Ledger, seen: set[str], folder: Path
) -> None:
    """What runs that were given back have done: those with a checkpoint."""
    begun = {path.stem for path in folder.glob("*.npz")} - seen
    for spec in ledger.claimable() if begun else ():
        if spec.key in begun and (row := rows.get((spec.problem, spec.name))):
            row.done += min(progress(folder / f"{spec.key}.npz")[0], spec.steps)


def progress(path: Path) -> tuple[int, float]:
    """The step and the seconds of work that a checkpoint tells of, without reading its arrays."""
    try:
        facts = checkpoint_facts(path)
        return int(facts["run"]["step"]), float(facts["wall"])
    except (CheckpointError, ValueError, KeyError, TypeError):
        return 0, 0.0  # there is none yet, or it was replaced in this moment
