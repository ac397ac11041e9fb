"""How runs are executed: one object from the command line to the worker."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from upgd.extras import install
from upgd.ledger.errors import SpecError

ENGINES = ("auto", "batched", "eager")


@dataclass(frozen=True)
class Options:
    """How runs are executed. None of this is part of a run's specification."""

    device: str = "cpu"  # where learners run: ``"cpu"``, ``"cuda"``
    # ``"auto"`` (many runs at once where possible), ``"batched"`` (only runs that can share a
    # stack) or ``"eager"`` (one at a time).
    engine: str = "auto"
    data_dir: str | os.PathLike[str] | None = None  # where data are looked for first
    # Seconds from one checkpoint to the next; by default they cost 2% of the time at most.
    checkpoint_seconds: float | None = None
    on: str = "local"  # where workers are: ``"local"``, ``"ray"`` or the address of a Ray cluster
    # Worker processes. By default this process does the work, and processes are started for runs
    # that have to go one at a time.
    workers: int | None = None
    # The user's definitions that workers must load (:class:`upgd.study.extensions.Carried`).
    extensions: Any = None

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"engine is one of {', '.join(ENGINES)}; got {self.engine!r}")
        if self.workers is not None and self.workers < 0:
            raise ValueError(f"workers must be 0 or more, got {self.workers}")
        host = self.on.removeprefix("ray://")
        if self.on not in ("local", "ray") and (host == self.on or not host):
            raise ValueError(f"on is local, ray or ray://host:port; got {self.on!r}")
        if self.on != "local":
            if self.device.partition(":")[0] not in ("cpu", "cuda"):
                raise ValueError(f"workers of a cluster have cpu or cuda, not {self.device!r}")
            if find_spec("ray") is None:
                raise ImportError(f"Ray is not installed; {install('ray')}")

    @property
    def here(self) -> str:
        """The device that this process needs: on a cluster, only the workers need a GPU."""
        return self.device if self.on == "local" else "cpu"


def check_device(device: str) -> None:
    """Raise SpecError unless learners can run on `device`."""
    try:
        kind = torch.device(device).type
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, ValueError, TypeError):
        kind = ""
    if kind in ("", "meta"):
        raise SpecError(
            f"cannot run on device {device!r}; 'cpu' always works, 'cuda' where PyTorch finds a GPU"
        )
