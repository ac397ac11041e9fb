"""Two `upgd sweep` processes on one study share the work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("sklearn")

from tests.waiting import PATIENCE
from upgd.ledger import Ledger

COMMAND = (
    *(sys.executable, "-m", "upgd.cli", "sweep", "label-permuted-digits", "sgdw", "pgd"),
    *("--set", "lr=0.003,0.01,0.03", "--set", "sigma=0.01,0.1", "--set", "weight_decay=0,0.001"),
    *("--seeds", "3", "--steps", "3000", "--task-length", "500", "--hidden", "24-16"),
    *("--quiet", "--study"),
)


def contents(folder: Path) -> dict[str, bytes]:
    with Ledger.open(folder, create=False, read_only=True) as ledger:
        runs = list(ledger.runs())
        assert {run.state for run in runs} == {"done"}
        return {run.key: ledger.series(run.key, "accuracy").tobytes() for run in runs}


@pytest.mark.slow
def test_two_sweeps_share_a_study(tmp_path: Path) -> None:
    """As two drivers do, of which there is an ordinary test."""
    both, alone = tmp_path / "both", tmp_path / "alone"
    pair = [subprocess.Popen([*COMMAND, str(both)]) for _ in range(2)]
    try:
        assert [process.wait(PATIENCE) for process in pair] == [0, 0]
    finally:
        for process in pair:
            process.kill()
    subprocess.run([*COMMAND, str(alone)], check=True, timeout=PATIENCE)
    shared = contents(both)
    assert len(shared) == 3 * (3 * 2 + 3 * 2)
    assert shared == contents(alone)
    with Ledger.open(both, create=False, read_only=True) as ledger:
        attempts = [run.attempts for run in ledger.runs()]
    assert attempts == [1] * len(attempts)  # nobody did a run twice
