"""The file of a learner that a pipe feeds: the learner and the position in the stream."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from upgd.ledger.checkpoints import checkpoint_facts
from upgd.ledger.errors import CheckpointError
from upgd.ledger.files import SUFFIX, check_output
from upgd.pipe.lines import FileSource, Source
from upgd.stream.estimators import Classifier, Regressor
from upgd.stream.files import KIND, _plain

KINDS: dict[str, type[Classifier] | type[Regressor]] = {
    "classify": Classifier,
    "regress": Regressor,
}
_SECTION = "pipe"
_ABANDONED = 60.0  # seconds after which a partial file has lost its writer


class StateFile:
    """A learner's file. Learner and position are written in one moment.

    Args:
        path: Need not exist.

    Attributes:
        learner: What was loaded; None if there was no file.
        saved: What the pipe saved beside it.

    Raises:
        ValueError: It is damaged, or no saved learner.
        OSError: It cannot be read, or its folder cannot be written.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.learner: Classifier | Regressor | None = None
        self.saved: dict[str, Any] = {}
        self._extra: dict[str, Any] = {}  # what others have saved beside the learner, too
        check_output(path)
        _remove_partial(path)
        self._seen = _signature(path)
        if self._seen is None:
            return
        try:
            facts = checkpoint_facts(Path(path))
        except CheckpointError as error:
            raise ValueError(
                f"{path} is damaged, or is no saved learner; name another file"
            ) from error
        names = {each.__name__: kind for kind, each in KINDS.items()}
        if facts.get("kind") != KIND or facts.get("class") not in names:
            raise ValueError(f"{path} is no saved learner; name another file")
        self.kind = names[facts["class"]]
        self.parameters: dict[str, Any] = facts["parameters"]
        self.learner = KINDS[self.kind].load(path)
        self._extra = self.learner.extra
        self.saved = dict(self._extra.get(_SECTION, {}))

    def check(
        self, target: str, kind: str, ignore: Sequence[str] | None, parameters: Mapping[str, Any]
    ) -> None:
        """Raise ValueError if the saved learner was made for something else.

        What is empty or not given is what was saved.
        """
        pairs: list[tuple[str, Any, Any]] = []
        if target:
            pairs.append(("target", target, self.saved.get("target", target)))
        if kind:
            pairs.append(("kind", kind, self.kind))
        if ignore is not None:
            had = self.saved.get("ignore", [])
            pairs.append(("ignored columns", sorted(ignore), sorted(had)))
        for name, value in parameters.items():
            pairs.append((name, _plain(value), self.parameters.get(name)))
        for name, wanted, had in pairs:
            if wanted != had:
                raise ValueError(
                    f"{self.path} was learned with {name} {_told(had)}, not {_told(wanted)}; "
                    "leave it as it was, or name another state file"
                )

    def save(self, learner: Classifier | Regressor, facts: Mapping[str, Any]) -> None:
        """Write the learner and what belongs to it.

        Raises:
            ValueError: Another process has written the file meanwhile.
            OSError: It cannot be written.
        """
        if _signature(self.path) != self._seen:
            raise ValueError(
                f"{self.path} was written or removed by another process; what was learned here "
                "since is not saved. Give each learner a file of its own"
            )
        learner.save(self.path, {**self._extra, _SECTION: dict(facts)})
        self._seen = _signature(self.path)


def _told(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _signature(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _remove_partial(path: str) -> None:
    """Remove what killed writers of this file have left."""
    folder, name = os.path.split(os.path.abspath(path))
    for each in glob.glob(os.path.join(glob.escape(folder), f".{glob.escape(name)}.*{SUFFIX}")):
        with suppress(OSError):
            if time.time() - os.stat(each).st_mtime > _ABANDONED:
                os.unlink(each)


def saved_positions(
    sources: Sequence[Source], saved: Sequence[Mapping[str, Any]]
) -> list[int | None]:
    """Which of the saved positions each source has; None for what was not read before.

    A file is known by its inode, or by its path, and by what it contains up to the position: it
    may have been renamed, or copied elsewhere, and may have grown.

    Raises:
        ValueError: A file of the same name has other content.
    """
    free = dict(enumerate(saved))
    found: list[int | None] = [None] * len(sources)
    files = [(i, each) for i, each in enumerate(sources) if isinstance(each, FileSource)]
    for is_it in (FileSource.is_same, FileSource.is_named):
        for i, source in files:
            matches = (n for n, each in free.items() if is_it(source, each) and source.agrees(each))
            if found[i] is None and (number := next(matches, None)) is not None:
                found[i] = number
                del free[number]
    for i, source in files:
        source.close()  # thousands of files cannot be open at once
        for each in free.values():
            if found[i] is None and source.is_named(each):
                raise ValueError(
                    f"{source.name} has changed before byte {each['offset']}, up to which it was "
                    f"learned; {_after_rotation(source, each)}"
                    f"learn from it as new with: cat {source.given} | upgd learn ..."
                )
    return found


def _after_rotation(source: FileSource, saved: Mapping[str, Any]) -> str:
    """A hint for a file that has taken the name of another one; empty for the same file."""
    if source.is_same(saved):
        return ""
    old = source.given
    return f"if it was rotated, name the renamed file before it: {old}.1 {old}; else "
