"""A study's folder beside its ledger: checkpoints of its runs, signs of life of its processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from upgd.ledger.checkpoints import (
    checkpoint_facts,
    checkpoints,
    kept_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from upgd.ledger.errors import CheckpointError, LedgerError, StudyError
from upgd.ledger.files import remove_partial
from upgd.ledger.ledger import Ledger, Where
from upgd.ledger.presence import departed, present
from upgd.ledger.versions import versions
from upgd.study.kinds import kind_of


@contextmanager
def at_work(ledger: Ledger, owner: str, where: Where | None) -> Iterator[None]:
    """Show other processes that this one is alive; on an error, release its runs."""
    evict_departed(ledger)
    check_versions(ledger, where)
    with present(ledger.path.parent / "workers", owner, lambda: ledger.evict(owner)):
        yield


def tidy(ledger: Ledger) -> None:
    """Remove what killed processes left: checkpoints of runs that are over, partial files."""
    folder = checkpoints(ledger.path.parent)
    remove_partial(folder)
    for file in folder.glob("*.npz"):
        with suppress(LedgerError):  # a file that is not ours
            if ledger.get(file.stem).result is not None:
                file.unlink(missing_ok=True)


def evict_departed(ledger: Ledger) -> None:
    """Free the runs of processes that died."""
    for dead in departed(ledger.path.parent / "workers"):
        ledger.evict(dead)


def check_versions(ledger: Ledger, where: Where | None = None) -> None:
    """Raise StudyError if runs have checkpoints of other versions.

    They would restart and overwrite their checkpoints: an upgrade in the middle of a study would
    lose work without a warning.
    """
    made = Counter(tuple(changed.items()) for _, changed in _of_other_versions(ledger, where))
    for changed, count in made.most_common(1):
        then = ", ".join(f"{name} {before}" for name, (before, _) in changed)
        now = ", ".join(f"{name} {here}" for name, (_, here) in changed)
        raise StudyError(
            f"{count} run{'s have' if count > 1 else ' has'} been started with {then}, and here is "
            f"{now}: continue with those versions, or with 'upgd resume --other-versions', after "
            f"which results name both; or remove {checkpoints(ledger.path.parent)} to restart"
        )


def adopt_checkpoints(ledger: Ledger) -> None:
    """Let runs that were begun with other versions go on with these; results will name both."""
    evict_departed(ledger)
    for path, changed in _of_other_versions(ledger):
        arrays, facts = load_checkpoint(path)
        earlier = facts.get("earlier", {})
        for name, (before, here) in changed.items():
            facts["stack"][name] = here
            earlier[name] = f"{earlier[name]} then {before}" if name in earlier else before
        save_checkpoint(path, arrays, facts | {"earlier": earlier})


def _of_other_versions(
    ledger: Ledger, where: Where | None = None
) -> Iterator[tuple[Path, dict[str, tuple[str, str]]]]:
    """Checkpoints of runs that can be claimed; with the versions that differ, then and here."""
    kept = kept_checkpoints(ledger.path.parent)
    for spec in list(ledger.claimable(where)) if kept else ():
        with suppress(LookupError, TypeError, ValueError, CheckpointError):  # none, or unreadable
            path = kept[spec.key]
            stack = dict(checkpoint_facts(path)["stack"])
            here = versions(kind_of(spec.problem).packages)
            changed = {n: (str(v), here[n]) for n, v in stack.items() if v != here.get(n, v)}
            if changed:
                yield path, changed
