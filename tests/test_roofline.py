"""The share of the roofline: what must be moved, how fast a copy is, what the user reads."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.running import work_stacks
from upgd.engine import Setting, roofline
from upgd.engine.batched import BatchedRun
from upgd.engine.stacked import Networks
from upgd.ledger import Ledger, RunSpec
from upgd.networks import build
from upgd.streams import get
from upgd.study.execution import Progress

PROBLEM = "label-permuted-digits"


def test_the_floor_by_hand() -> None:
    """SGD reads and writes weights; UPGD weights and traces, and reads both for its maximum."""
    assert roofline.passes("sgd") == 1 + 1
    assert roofline.passes("upgd") == 2 + (2 + 2)
    assert roofline.passes("adamw") == 3 + 3  # weight and two moments
    assert roofline.passes("ada-upgd") == 2 + (4 + 4)  # its maximum needs no moments
    assert roofline.floor(["sgd"], 1000) == 8_000
    assert roofline.floor(["upgd"], 1000) == 24_000
    assert roofline.floor(["upgd"], 1000, itemsize=8) == 48_000
    assert roofline.floor(["sgd", "upgd", "upgd"], 1000) == (8_000 + 24_000 + 24_000) / 3


def test_the_share_is_rate_times_bytes_per_bandwidth() -> None:
    assert roofline.share(rate=500, moved=24_000, speed=48e6) == 0.25


@pytest.mark.parametrize("problem", [PROBLEM, "label-permuted-cifar10"])
def test_a_stack_knows_its_share(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all parameters, whatever the network; mixed stacks move the mean of their learners'."""
    asked: list[Any] = []

    def speed(*arguments: Any) -> float:
        asked.append(arguments)
        return 1e9

    monkeypatch.setattr(roofline, "bandwidth", speed)
    row = get(PROBLEM)
    settings = [Setting(method, {}, 0, 10) for method in ("sgd", "upgd", "upgd")]
    run = BatchedRun(row, settings, [row.make(0)] * 3, 10)
    if problem != PROBLEM:  # the streams stay: no sample is taken
        run.problem = get(problem)
        run.networks = Networks(run.problem, run.stack)
    network = build(run.problem.network, 0)
    parameters = sum(p.numel() for p in network.parameters())
    expected = 100 * 4 * parameters * (2 + 6 + 6) / 3 / 1e9
    assert run.share_of_roofline(100.0) == pytest.approx(expected)
    assert asked[0][:2] == ("cpu", 4 * parameters * 2)  # a learner: weights and traces
    monkeypatch.setattr(roofline, "bandwidth", lambda *arguments: None)
    assert run.share_of_roofline(100.0) is None


def test_the_bandwidth_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()  # at a clock on which every copy takes a millisecond
    clock = SimpleNamespace(perf_counter=lambda: 1e-3 * next(looks))
    monkeypatch.setattr(roofline, "time", clock)
    size = 1_234_567
    one = roofline.bandwidth("cpu", size, 2)
    assert one == pytest.approx(2 * (size + size) / 1e-3)  # two threads; read and written
    took = next(looks)
    assert roofline.bandwidth("cpu", size, 2) == one
    assert next(looks) == took + 1  # measured once
    assert roofline.bandwidth("meta") is None


def test_where_no_copy_fits_there_is_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size: int) -> float:
        raise MemoryError

    monkeypatch.setattr(roofline, "_of_core", full)
    assert roofline.bandwidth("cpu", 12_345_678, 3) is None


def test_stacks_tell_their_share(tmp_path: Path) -> None:
    options = {"window": 50, "hidden": "9-7", "task_length": 50}
    told: list[Progress] = []
    with Ledger.open(tmp_path) as ledger:
        ledger.add([RunSpec(PROBLEM, "sgd", {}, seed, 100, options) for seed in (0, 1)])
        work_stacks(ledger, on_progress=told.append)
    assert told
    assert all(progress.share is not None and progress.share > 0 for progress in told)


def test_the_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("typer")
    from upgd.lab import display as run

    specs = [RunSpec(PROBLEM, "sgd", {}, seed, 1_000_000) for seed in range(200)]
    monkeypatch.setattr(run, "SECONDS_BETWEEN_LINES", 0.0)
    with run.progress(200) as tell:
        # 200 runs, half done: 10⁸ steps at 503 211 a second take 198.7 seconds.
        tell(Progress(specs[0], 500_000, 503_211.0, {}, tuple(specs[1:]), 0.811))
        line = "".join(capsys.readouterr().err.splitlines())
        assert line == (
            "200 runs at step 500000: 100.0 of 200 runs, "
            "503k steps/s, 81% of what memory bandwidth allows, 3:19 left"
        )
        tell(Progress(specs[0], 999_000, 40.0, {}))
        line = "".join(capsys.readouterr().err.splitlines())
        assert line.endswith("runs, 40 steps/s, 28 d 18:58:45 left")  # 99.501 · 10⁶ / 40 s
