"""Networks from inputs to outputs: every engine makes the step of linear least squares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.running import work, work_stacks
from upgd.engine import batched
from upgd.ledger import Ledger, RunSpec, SpecError
from upgd.networks import initial_weights
from upgd.streams import ToyStream
from upgd.study.prepare import prepare

STEPS, LR = 120, 0.02
TASK = 30
OPTIONS = {"hidden": "none", "window": 40, "task_length": TASK}
SPEC = RunSpec("toy-changing-inputs", "sgdw", {"lr": LR, "weight_decay": 0.0}, 3, STEPS, OPTIONS)


def least_squares() -> np.ndarray:
    """Windows' means of (wᵀx + b - y)² with w ← w - α·2·(wᵀx + b - y)·x, in NumPy."""
    stream = ToyStream("changing-inputs", SPEC.seed, TASK)
    weight, bias = (x.astype(float).ravel() for x in initial_weights([(1, 16), (1,)], SPEC.seed))
    losses = []
    for step in range(STEPS):
        x, y = (part.astype(float).ravel() for part in stream.at(step))
        error = float(weight @ x + bias[0] - y[0])
        losses.append(error**2)
        weight, bias = weight - LR * 2 * error * x, bias - LR * 2 * error
    return np.reshape(losses, (-1, 40)).mean(1)


@pytest.mark.parametrize("engine", ["eager", "dense", "general"])
def test_every_engine_does_least_squares(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "dense":
        pytest.importorskip("numba")
    if engine == "general":
        monkeypatch.setattr(batched, "has_dense_path", lambda device: False)
    with Ledger.open(tmp_path) as ledger:
        ledger.add([SPEC])
        (work if engine == "eager" else work_stacks)(ledger)
        (run,) = ledger.runs()
        assert run.result is not None, run.error
        assert engine in run.result.engine
        np.testing.assert_allclose(ledger.series(run.key, "loss"), least_squares(), rtol=1e-4)


def test_features_need_layers() -> None:
    spec = RunSpec("toy-changing-inputs", "feature-upgd", {}, 0, 10, {"hidden": "none"})
    with pytest.raises(SpecError, match="needs hidden layers"):
        prepare(spec)
