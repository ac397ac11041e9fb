"""The batched engine equals the eager one, through studies and their ledgers."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import upgd.engine.batched as batched
from tests.cases import RULES
from tests.running import drive, work, work_stacks
from tests.simulated import SimulatedPool
from tests.stacks import SIZES, classify, feed, plain
from upgd.engine import Setting
from upgd.engine.batched import BatchedRun, kind_of
from upgd.engine.dense import Learner
from upgd.engine.general import GeneralStack, forward
from upgd.ledger import Ledger, RunSpec
from upgd.networks import build, cnn
from upgd.streams import get
from upgd.study import learners
from upgd.study.options import Options
from upgd.study.pending import restarts

PROBLEM = "label-permuted-digits"
OPTIONS = {"window": 50, "hidden": "9-7", "task_length": 50}


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiled path."""
    monkeypatch.setattr(batched, "has_dense_path", lambda device: False)


def results(folder: Path, specs: list[RunSpec], do: Any, **arguments: Any) -> dict[str, Any]:
    with Ledger.open(folder) as ledger:
        ledger.add(specs)
        tally = do(ledger, **arguments)
        assert tally.failed == 0, tally.errors
        found = {}
        for spec in specs:
            series = {m: ledger.series(spec.key, m) for m in ledger.metrics(spec.key)}
            found[spec.key] = ledger.get(spec.key), series
    return found


def assert_same(first: dict[str, Any], second: dict[str, Any], tolerance: float) -> None:
    for key, (run, series) in first.items():
        other, others = second[key]
        assert run.state == other.state
        assert series.keys() == others.keys(), run.spec.label()
        assert run.result.summary.keys() == other.result.summary.keys()
        for name, values in series.items():
            scale = max(1.0, float(np.nanmax(np.abs(values), initial=0)))
            np.testing.assert_allclose(
                values, others[name], atol=tolerance * scale, err_msg=f"{run.spec.label()} {name}"
            )


@pytest.mark.usefixtures("general")
def test_a_general_stack_is_many_eager_runs(tmp_path: Path) -> None:
    """All metrics, diagnostics and held-out accuracies included."""
    options = {**OPTIONS, "stride": 30, "held_out": 30}
    specs = [
        RunSpec(PROBLEM, method, {}, seed, 100, options)
        for method in ("upgd", "n-upgd-local", "adamw", "s-si")
        for seed in (0, 1)
    ]
    one = results(tmp_path / "eager", specs, work)
    many = results(tmp_path / "batched", specs, work_stacks)
    assert {run.result.engine for run, _ in many.values()} == {"batched-general"}
    assert {run.result.host["runs_in_stack"] for run, _ in many.values()} == {8}
    assert_same(one, many, 2e-5)


def test_a_dense_stack_is_many_eager_runs(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    options = {**OPTIONS, "stride": 30, "held_out": 30}
    specs = [
        RunSpec(PROBLEM, method, {}, seed, 100, options)
        for method in ("upgd", "s-si")
        for seed in (0, 1)
    ]
    one = results(tmp_path / "eager", specs, work)
    many = results(tmp_path / "batched", specs, work_stacks)
    assert {run.result.engine for run, _ in many.values()} == {"batched-dense"}
    assert_same(one, many, 2e-4)


@pytest.mark.usefixtures("general")
def test_restarts_and_regression(tmp_path: Path) -> None:
    restarts = {**OPTIONS, "restart": True}
    specs = [RunSpec(PROBLEM, "adam", {}, 3, 150, restarts)]
    toy = {"window": 40, "task_length": 20, "hidden": "9-7"}
    specs += [RunSpec("toy-changing-sign", "upgd", {"sigma": 0.1}, 3, 80, toy)]
    assert_same(
        results(tmp_path / "eager", specs, work),
        results(tmp_path / "batched", specs, work_stacks),
        2e-5,
    )


@pytest.mark.parametrize("dense", [pytest.param(False, marks=pytest.mark.slow), True])
def test_some_of_a_stack_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dense: bool
) -> None:
    """With every task, beside others that do not: Figure 1 as one stack."""
    if dense:
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(batched, "has_dense_path", lambda device: False)
    hyper = {"adam": {}, "upgd": {"lr": 0.05}, "s-ewc": {"kappa": 0.1}}
    specs = [
        RunSpec(PROBLEM, method, own, 3, 150, {**OPTIONS, **options})
        for method, own in hyper.items()
        for options in ({}, {"restart": True})
    ]
    one = results(tmp_path / "eager", specs, work)
    many = results(tmp_path / "batched", specs, work_stacks)
    assert {run.result.host["runs_in_stack"] for run, _ in many.values()} == {len(specs)}
    assert_same(one, many, 2e-5)


@pytest.mark.usefixtures("general")
def test_a_diverging_run_ends_and_the_others_go_on(tmp_path: Path) -> None:
    options = {**OPTIONS, "stride": 30}
    specs = [RunSpec(PROBLEM, "sgd", {"lr": lr}, 0, 150, options) for lr in (0.01, 1e25)]
    one = results(tmp_path / "eager", specs, work)
    many = results(tmp_path / "batched", specs, work_stacks)
    assert [run.state for run, _ in many.values()] == ["done", "diverged"]
    assert_same(one, many, 2e-5)
    steps = [run.result.diverged_at for run, _ in (*one.values(), *many.values())]
    assert steps[0] == steps[2] is None
    assert steps[1] == steps[3]


def begin(
    folder: Path, specs: list[RunSpec], monkeypatch: pytest.MonkeyPatch, most: int | None = None
) -> None:
    """Have the runs, or the first stack of them, interrupted at step 100."""
    seen: list[int] = []

    def interrupt(progress: Any) -> None:
        seen.append(progress.step)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, Ledger.open(folder) as ledger:
        patch.setattr(batched, "LONGEST_CHUNK", 50)
        patch.setattr(learners, "FIRST_CHUNK", 50)
        ledger.add(specs)
        if most is not None:
            patch.setattr(learners, "at_a_time", lambda *_: most)
        with pytest.raises(KeyboardInterrupt):
            work_stacks(ledger, on_progress=interrupt)
        assert ledger.counts()["pending"] == len(specs)
    assert seen == [50, 100]


SAID = "{} runs continue in another stack than before, where sums may be rounded differently"
FOUR = [RunSpec(PROBLEM, m, {}, s, 200, OPTIONS) for m in ("upgd", "s-ewc") for s in (0, 1)]


@pytest.mark.usefixtures("general")
def test_an_interrupted_stack_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = results(tmp_path / "whole", FOUR, work_stacks)
    begin(tmp_path / "cut", FOUR, monkeypatch)
    notes: list[str] = []
    cut = results(tmp_path / "cut", FOUR, work_stacks, on_note=notes.append)
    assert notes == []
    assert_same(whole, cut, 0.0)


@pytest.mark.usefixtures("general")
def test_slow_stacks_give_word_soon_and_chunks_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt waits for a chunk's end, which minutes of a convolutional network were."""
    whole = results(tmp_path / "whole", FOUR, work_stacks)
    monkeypatch.setattr(batched, "MOST_WITHOUT_WORD", 60)
    steps: list[int] = []
    short = results(
        tmp_path / "short", FOUR, work_stacks, on_progress=lambda told: steps.append(told.step)
    )
    assert steps[0] == 60 // len(FOUR)
    assert_same(whole, short, 0.0)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.usefixtures("general")
def test_it_is_said_when_runs_go_on_in_another_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Where sums are PyTorch's, which may depend on how many runs there are."""
    begin(tmp_path, FOUR, monkeypatch)
    where = {"key": [spec.key for spec in FOUR[:3]]}
    with Ledger.open(tmp_path) as ledger:
        if workers:
            pool = SimulatedPool(1, lambda job: 10.0)
            tally = drive(ledger, pool, where=where, clock=pool.clock)
        else:
            tally = work_stacks(ledger, where=where)
    assert tally.notes == [SAID.format(3)]


@pytest.mark.usefixtures("general")
@pytest.mark.slow
def test_halves_of_a_stack_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path, FOUR, monkeypatch)
    original = BatchedRun.advance

    def advance(self: BatchedRun, steps: int) -> None:
        if len(self.settings) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        original(self, steps)

    monkeypatch.setattr(BatchedRun, "advance", advance)
    with Ledger.open(tmp_path) as ledger:
        first, *others = work_stacks(ledger).notes
    assert first == "out of memory: 4 runs continue, 2 at a time"
    assert others == [SAID.format(2)] * 2


@pytest.mark.usefixtures("general")
def test_workers_leave_a_stack_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share what is new, and not what was begun together."""
    begin(tmp_path, FOUR, monkeypatch, most=2)
    pool = SimulatedPool(4, lambda job: 10.0)
    with Ledger.open(tmp_path) as ledger:
        assert drive(ledger, pool, clock=pool.clock).notes == []
    assert sorted(len(job.specs) for job in pool.jobs) == [1, 1, 2]


@pytest.mark.usefixtures("general")
def test_what_begins_anew_is_in_no_other_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path, FOUR, monkeypatch)
    pool = SimulatedPool(2, lambda job: 10.0)
    with Ledger.open(tmp_path) as ledger:
        [note] = drive(ledger, pool, engine="eager", clock=pool.clock).notes
    assert note.startswith("4 runs restart with eager on cpu")


def test_dense_stacks_need_not_stay_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    begin(tmp_path, FOUR, monkeypatch)
    with Ledger.open(tmp_path) as ledger:
        monkeypatch.setattr(learners, "at_a_time", lambda *_: 3)
        assert work_stacks(ledger).done == 4


@pytest.mark.slow
def test_it_is_said_when_runs_begin_anew_with_another_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost without a word, whichever way the work is done."""
    pytest.importorskip("numba")
    begin(tmp_path, FOUR, monkeypatch)
    kind, of = learners.KIND, "of batched-dense on cpu"
    pool, notes = SimulatedPool(1, lambda job: 10.0), []
    with Ledger.open(tmp_path) as ledger:
        assert restarts(ledger, None, kind, Options()) == []
        assert restarts(ledger, None, kind, Options(engine="batched")) == []
        first = {"key": [spec.key for spec in FOUR[:2]]}
        alone = work(ledger, where=first, on_note=notes.append)
        assert (
            alone.notes
            == notes
            == [
                "2 runs restart with eager on cpu: the checkpoints kept are of batched-dense on cpu"
            ]
        )
        second = {"key": [FOUR[2].key]}
        driven = drive(ledger, pool, engine="eager", where=second, clock=pool.clock)
        one = f"1 run restarts with eager on cpu: the checkpoint kept is {of}"
        assert driven.notes == [one]
        monkeypatch.setattr(batched, "has_dense_path", lambda device: False)
        last = work_stacks(ledger)
        assert last.notes == [one.replace("eager", "batched-general")]
        assert ledger.counts()["done"] == 4


def test_what_shares_a_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other problems, lengths and options have stacks of their own; batches run eagerly."""
    specs = [RunSpec(PROBLEM, "sgd", {}, s, 50, OPTIONS) for s in range(3)]
    specs += [RunSpec(PROBLEM, "sgd", {}, 0, 100, OPTIONS)]
    specs += [RunSpec(PROBLEM, "pgd", {}, 0, 50, {**OPTIONS, "hidden": "8-7"})]
    batch = RunSpec(PROBLEM, "sgd", {}, 0, 50, {**OPTIONS, "batch": 5})
    with Ledger.open(tmp_path) as ledger:
        ledger.add([*specs, batch])
        monkeypatch.setattr(learners, "at_a_time", lambda *_: 2)
        tally = work_stacks(ledger)
        assert tally.done == 5
        assert ledger.get(batch.key).state == "pending"
        sizes = sorted(ledger.get(s.key).result.host["runs_in_stack"] for s in specs)  # type: ignore[union-attr]
    assert sizes == [1, 1, 1, 2, 2]


def test_without_a_compiler_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And what could be dense takes the general path."""
    monkeypatch.setattr(batched.importlib.util, "find_spec", lambda name: None)
    batched.has_dense_path.cache_clear()
    try:
        kinds = [kind_of(get(PROBLEM), Setting("upgd", {}, seed, 10), "cpu") for seed in range(3)]
    finally:
        batched.has_dense_path.cache_clear()
    assert kinds == ["general"] * 3
    told = "numba is not installed: runs on cpu take the slower general path"
    assert caplog.messages == [told]


def test_which_engine() -> None:
    dense, images = get(PROBLEM), get("label-permuted-cifar10")
    for method, expected in (("upgd", "general"), ("upgd-2nd", None), ("feature-upgd", None)):
        assert kind_of(images, Setting(method, {}, 0, 10), "cpu") == expected
    assert kind_of(dense, Setting("upgd-2nd", {}, 0, 10, batch=2), "cpu") is None


@pytest.mark.usefixtures("general")
def test_runs_that_cannot_share_a_stack_are_refused() -> None:
    problem = get(PROBLEM)
    settings = [Setting("feature-upgd", {}, 0, 10)]
    with pytest.raises(ValueError, match="eager"):
        BatchedRun(problem, settings, [problem.make(0)], 10)


# ------------------------------------------------------------------------- general stacks
def test_every_first_order_method_equals_the_plain_loop() -> None:
    names = [n for n, row in RULES.items() if not row.needs & {"curvature", "gates"}]
    learners = [Learner(name, {}, 3) for name in names]
    stack = GeneralStack(
        lambda seed, task: build(SIZES, seed, "relu", task),
        learners,
        loss="cross_entropy",
        steps=60,
        window=6,
        shape=(64,),
        dtype=torch.float64,
    )
    samples = feed(learners)
    for start in range(0, 60, 5):
        stack.advance(samples.chunk(start, 5))
    for i, learner in enumerate(stack.learners):
        trace = plain(learner, classify(3), 60)
        np.testing.assert_allclose(stack.weights[i].numpy(), trace.weights, atol=1e-9)
        expected = np.add.reduceat(trace.plasticity, np.arange(0, 60, 6))
        np.testing.assert_allclose(stack.series[i, :, 1].numpy(), expected, atol=1e-8)


def test_stacked_networks_are_the_networks() -> None:
    """The convolutional one, and one that goes through vmap."""
    odd = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4), torch.nn.GELU())
    for model, shape in ((cnn(), (3, 32, 32)), (odd, (3, 2, 2))):
        runs = 3
        x = torch.randn(runs, *shape)
        params = [torch.randn(runs, *p.shape) * 0.1 for p in model.parameters()]
        together = forward(model, params, x)
        for run in range(runs):
            with torch.no_grad():
                for p, stacked in zip(model.parameters(), params, strict=True):
                    p.copy_(stacked[run])
                alone = model(x[run : run + 1])[0]
            torch.testing.assert_close(together[run], alone, atol=1e-4, rtol=1e-4)


def test_gradients_of_a_stack_are_each_runs_own() -> None:
    model = cnn()
    x = torch.randn(2, 3, 32, 32)
    params = [(torch.randn(2, *p.shape) * 0.1).requires_grad_() for p in model.parameters()]
    y = torch.tensor([3, 7])
    losses = torch.nn.functional.cross_entropy(forward(model, params, x), y, reduction="none")
    together = torch.autograd.grad(losses.sum(), params)
    for run in range(2):
        with torch.no_grad():
            for p, stacked in zip(model.parameters(), params, strict=True):
                p.copy_(stacked[run])
        loss = torch.nn.functional.cross_entropy(model(x[run : run + 1]), y[run : run + 1])
        alone = torch.autograd.grad(loss, list(model.parameters()))
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[run], b, atol=1e-5, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs fork")
def test_a_killed_study_of_stacks_goes_on_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    pytest.importorskip("typer")
    from tests.killing import Server

    command = ["run", PROBLEM, "upgd-w", "sgd", "s-si", "--seeds", "3", "--steps", "60000"]
    command += ["--hidden", "32-16", "--task-length", "500", "--quiet", "--engine", "batched"]
    command += ["--checkpoint-seconds", "0", "--study"]
    rng = random.Random(1)
    with Server() as server:
        assert server.run("cli", [*command, str(tmp_path / "whole")]) == 0
        for _ in range(4):  # each time in the second of twelve chunks, or soon after
            when = 2, rng.uniform(0.0, 0.1)
            end = server.run("kill", [*command, str(tmp_path / "killed")], *when)
            assert end == -signal.SIGALRM
        assert server.run("cli", [*command, str(tmp_path / "killed")]) == 0
    found = []
    for name in ("whole", "killed"):
        with Ledger.open(tmp_path / name, create=False, read_only=True) as ledger:
            runs = list(ledger.runs())
            assert [run.state for run in runs] == ["done"] * 9
            found.append(
                {
                    r.key: {m: ledger.series(r.key, m).tobytes() for m in ledger.metrics(r.key)}
                    for r in runs
                }
            )
    assert found[0] == found[1]
