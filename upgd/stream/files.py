"""Learners as files: arrays and facts, without pickle."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from upgd.ledger.checkpoints import load_checkpoint, save_checkpoint
from upgd.ledger.errors import CheckpointError, StudyError

if TYPE_CHECKING:
    from upgd.stream.learner import StreamLearner

AnyLearner = TypeVar("AnyLearner", bound="StreamLearner")
KIND, VERSION = "upgd.stream", 1
FIXED = {
    *("network", "optimizer", "hyper", "activation", "batch_size", "random_state"),
    *("normalize", "horizon", "missing", "max_features", "replay", "drift"),
}
"""Parameters on which what was learned depends: as they were when the learner began."""
_CODE = {"code": True}
"""Stands for a parameter that files do not hold: modules, functions, detectors."""


def save_learner(
    learner: StreamLearner, path: str | os.PathLike[str], extra: Mapping[str, Any] | None
) -> None:
    """See :meth:`StreamLearner.save`."""
    arrays, facts = learner._state()
    beside = learner.extra if extra is None else dict(extra)
    used = {**learner.get_params(), **{name: learner._began_with[name] for name in FIXED}}
    parameters = {name: _plain(value) for name, value in used.items()}
    head = {"kind": KIND, "version": VERSION, "class": type(learner).__name__}
    parameters["random_state"] = learner._seed
    meta = {**head, "parameters": parameters, "extra": beside, "learner": facts}
    try:
        save_checkpoint(path, arrays, meta)
    except StudyError as error:
        raise OSError(str(error)) from error
    learner._extra = beside
    learner._saved_at = learner.n_samples_seen_


def load_learner(
    cls: type[AnyLearner], path: str | os.PathLike[str], parameters: Mapping[str, Any]
) -> AnyLearner:
    """See :meth:`StreamLearner.load`."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no saved learner at {path}")
    try:
        arrays, meta = load_checkpoint(path)
        kind, version, name = (meta.get(key) for key in ("kind", "version", "class"))
    except CheckpointError as error:
        raise ValueError(f"{path} is damaged, or is no saved learner") from error
    if kind != KIND:
        raise ValueError(f"{path} is no saved learner")
    if version != VERSION:
        raise ValueError(f"{path} has version {version}; this upgd reads version {VERSION}")
    if name != cls.__name__:
        raise ValueError(f"{path} is a {name}; load it with upgd.stream.{name}.load")
    saved = {k: v for k, v in meta["parameters"].items() if v != _CODE}
    missing = meta["parameters"].keys() - saved.keys() - parameters.keys()
    if missing:
        raise ValueError(
            f"{path} was saved with a {', '.join(sorted(missing))} that a file cannot hold; give "
            f"it to load, as {', '.join(f'{name}=...' for name in sorted(missing))}"
        )
    for parameter in sorted(FIXED & parameters.keys() & saved.keys()):
        if _plain(parameters[parameter]) != saved[parameter]:
            raise ValueError(
                f"{path} was learned with {parameter}={saved[parameter]!r}, which cannot be "
                "changed when it is loaded"
            )
    learner = cls(**{**saved, **parameters})
    learner._begin()
    learner._restore(arrays, meta["learner"])
    learner._extra = meta["extra"]
    learner._saved_at = learner.n_samples_seen_
    return learner


def _plain(value: Any) -> Any:
    """A parameter as JSON has it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return _CODE
