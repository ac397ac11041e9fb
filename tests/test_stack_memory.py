"""How many runs fit: estimates against what is allocated, and what happens when memory runs out."""

from __future__ import annotations

import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import upgd.engine.batched as batched
from tests.cases import RULES, is_repetition
from tests.running import work_stacks
from tests.waiting import states
from upgd.engine import Setting, memory
from upgd.engine.batched import BatchedRun
from upgd.ledger import Ledger, RunSpec, StudyError
from upgd.streams import get
from upgd.study.options import Options
from upgd.study.prepare import plan
from upgd.study.worker import EventReporter, Job, do_job

PROBLEM = "label-permuted-digits"
OPTIONS = {"window": 50, "hidden": "9-7", "task_length": 50}


# ------------------------------------------------------------------------------ estimates
class Allocated(TorchDispatchMode):
    """Bytes of the tensors that were made and are still held, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, storage._cdata)
        return result

    def _gone(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)


def settings_of(methods: str, window: int, **options: Any) -> list[Setting]:
    names = methods.split()
    return [Setting(name, {}, seed, window, **options) for seed, name in enumerate(names)]


def whole_need(problem: Any, settings: list[Setting], steps: int, device: str = "cpu") -> int:
    found = memory.need(problem, settings, problem.make(0), steps, device)
    inputs = min(len(settings) * found.inputs, found.most_inputs)
    return found.shared + sum(found.each) + inputs


def run_some(problem: Any, settings: list[Setting], steps: int, device: str = "cpu") -> BatchedRun:
    streams = [problem.make(setting.seed) for setting in settings]
    run = BatchedRun(problem, settings, streams, steps, device)
    while run.step < min(steps, 10):
        run.advance(run.next_stop() - run.step)
    return run


CASES = {
    "one method": ("input-permuted-digits", "upgd " * 20, 2_500, 100),
    "mixed": ("label-permuted-digits", "sgd upgd s-rwalk adamw feature-upgd ", 2_500, 100),
    "many windows": ("label-permuted-digits", "sgd " * 10, 1, 30_000),
    "made": ("toy-changing-sign", "upgd " * 10, 200, 2_000),
    "layered": ("label-permuted-digits", "centred-sgd " * 10, 2_500, 100),
}


@pytest.mark.parametrize("case", CASES)
def test_dense_stacks_take_what_is_planned(case: str) -> None:
    """All arrays, the samples' included; the network is compiled before."""
    pytest.importorskip("numba")
    name, methods, window, steps = CASES[case]
    problem, settings = get(name), settings_of(methods, window)
    run_some(problem, settings, 10)
    planned = whole_need(problem, settings, steps)
    tracemalloc.start()
    try:
        run = run_some(problem, settings, steps)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert run.step > 0
    assert peak <= planned <= 2 * peak


FIRST_ORDER = [name for name, row in RULES.items() if not row.needs & {"curvature", "gates"}]


@pytest.mark.parametrize(
    "methods",
    [pytest.param(n, marks=[pytest.mark.slow] * is_repetition(n)) for n in FIRST_ORDER]
    + ["sgd s-si"],
)
def test_general_stacks_take_what_is_planned(methods: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched, "has_dense_path", lambda device: False)
    problem, settings = get(PROBLEM), settings_of(f"{methods} " * 4, 1_000)
    with Allocated() as allocated:
        run_some(problem, settings, 10)
    assert allocated.most <= whole_need(problem, settings, 10) <= 2 * allocated.most


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("methods", ["sgd", "upgd", "s-rwalk", "sgd s-si"])
@pytest.mark.parametrize("dense", [True, False])
def test_stacks_take_what_is_planned_on_cuda(
    methods: str, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not dense:
        monkeypatch.setattr(batched, "has_dense_path", lambda device: False)
    problem, settings = get("input-permuted-digits"), settings_of(f"{methods} " * 20, 1_000)
    run_some(problem, settings, 200, "cuda")
    memory.make_room()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run_some(problem, settings, 200, "cuda")
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= whole_need(problem, settings, 200, "cuda") <= 2 * peak


def test_how_many_fit() -> None:
    """Runs are counted one by one, since methods differ; a tenth of what is free stays free."""
    need = memory.Need(shared=100, each=(10, 10, 50, 10))
    assert [need.fitting(free) for free in (0, 120, 134, 199, 200, 1000)] == [1, 1, 2, 3, 4, 4]
    ready = memory.Need(shared=0, each=(10,) * 10, inputs=100, most_inputs=250)
    assert [ready.fitting(free) for free in (220, 245, 312, 400)] == [1, 2, 3, 10]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: not enough memory: "
            "you tried to allocate 4000000000000 bytes."
        ),
        RuntimeError(  # elsewhere than on ARM
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 4000000000000 bytes."
        ),
    ],
)
def test_what_out_of_memory_looks_like(error: Exception) -> None:
    assert memory.is_out_of_memory(error)
    assert not memory.is_out_of_memory(RuntimeError("shapes do not agree"))
    assert not memory.is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize("allocate", [torch.zeros, np.ones])
def test_that_is_what_libraries_raise(allocate: Any) -> None:
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        allocate(1 << 55)
    assert memory.is_out_of_memory(caught.value)


# -------------------------------------------------------------------------------- studies
SPECS = [RunSpec(PROBLEM, m, {}, s, 100, OPTIONS) for s in (0, 1, 2) for m in ("upgd", "s-si")]


class Study:
    """The same six runs in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.told: list[str] = []
        self.steps: list[int] = []
        with Ledger.open(folder) as ledger:
            ledger.add(SPECS)
            self.tally = work_stacks(
                ledger, on_note=self.told.append, on_progress=lambda p: self.steps.append(p.step)
            )
            self.runs = [ledger.get(spec.key) for spec in SPECS]
            self.bytes = [
                {m: ledger.series(key, m).tobytes() for m in ledger.metrics(key)}
                for key in (spec.key for spec in SPECS)
            ]
        assert not list((folder / "checkpoints").glob("*"))

    @property
    def together(self) -> list[int]:
        return [int(run.result.host["runs_in_stack"]) for run in self.runs if run.result]


@pytest.fixture
def dense() -> None:
    pytest.importorskip("numba")


@pytest.fixture
def undisturbed(tmp_path: Path, dense: None) -> Study:
    study = Study(tmp_path / "undisturbed")
    assert study.together == [6] * 6
    assert study.told == study.tally.notes == []
    return study


def test_runs_that_do_not_fit_together_take_turns(
    tmp_path: Path, undisturbed: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, setting = plan(SPECS[1])
    one = memory.need(problem, [setting], problem.make(0), 100, "cpu")
    free = int((one.shared + 2 * one.each[0]) / 0.89)
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    study = Study(tmp_path / "split")
    assert study.together == [2] * 6
    assert study.bytes == undisturbed.bytes
    assert study.told == [
        f"6 runs: 2 at a time (each takes up to {one.each[0] / 1e3:.1f} kB, "
        f"the data {one.shared / 1e3:.1f} kB; {free / 1e3:.1f} kB are free)"
    ]


def test_the_plan_is_told_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dense: None
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    events: list[str] = []
    with Ledger.open(tmp_path) as ledger:
        ledger.add(SPECS[:2])
        work_stacks(
            ledger,
            on_note=lambda text: events.append("note"),
            on_progress=lambda progress: events.append("progress"),
        )
    assert events[0] == "note"
    assert events.count("note") == 1


def full(monkeypatch: pytest.MonkeyPatch, error: Exception, most: int, first_step: int) -> None:
    """Let stacks of more than `most` runs fail at a step."""
    advance = BatchedRun.advance

    def limited(self: BatchedRun, steps: int) -> None:
        if len(self.settings) > most and self.step >= first_step:
            raise error
        advance(self, steps)

    monkeypatch.setattr(BatchedRun, "advance", limited)
    monkeypatch.setattr(batched, "LONGEST_CHUNK", 50)


@pytest.mark.parametrize("first_step", [pytest.param(0, marks=pytest.mark.slow), 50])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_halves_a_stack(
    tmp_path: Path,
    undisturbed: Study,
    monkeypatch: pytest.MonkeyPatch,
    first_step: int,
    error: Exception,
) -> None:
    full(monkeypatch, error, most=2, first_step=first_step)
    study = Study(tmp_path / "halved")
    assert [run.state for run in study.runs] == ["done"] * 6
    assert sorted(study.together) == [1, 1, 2, 2, 2, 2]
    assert study.bytes == undisturbed.bytes
    assert study.told == study.tally.notes
    assert study.told[0] == "out of memory: 6 runs continue, 3 at a time"
    assert study.told[1] == "out of memory: 3 runs continue, 2 at a time"


@pytest.mark.slow
def test_later_stacks_are_no_larger_than_what_fitted(
    tmp_path: Path, undisturbed: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four runs at a time are planned; once they were too many, the rest takes two."""
    full(monkeypatch, MemoryError(), most=2, first_step=0)
    monkeypatch.setattr("upgd.study.learners.at_a_time", lambda *arguments: 4)
    study = Study(tmp_path / "halved")
    assert study.together == [2] * 6
    assert study.bytes == undisturbed.bytes
    assert len([note for note in study.told if note.startswith("out of memory")]) == 1


@pytest.mark.slow
def test_a_run_that_does_not_even_fit_alone_fails_and_the_others_finish(
    tmp_path: Path, undisturbed: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = BatchedRun._make

    def greedy(self: BatchedRun, learners: Any, dtype: Any) -> Any:
        if any(learner.method == "upgd" and learner.seed == 1 for learner in learners):
            raise RuntimeError("not enough memory: you tried to allocate 1 byte")
        return make(self, learners, dtype)

    monkeypatch.setattr(BatchedRun, "_make", greedy)
    study = Study(tmp_path / "greedy")
    assert [run.state for run in study.runs] == ["done", "done", "failed", "done", "done", "done"]
    assert study.runs[2].error == "out of memory, alone, 4 times"
    assert study.tally.failed == 1
    assert study.tally.errors == [f"{SPECS[2].label()}: out of memory, alone, 4 times"]
    del study.bytes[2], undisturbed.bytes[2]
    assert study.bytes == undisturbed.bytes


# ---------------------------------------------------------------------------- lost devices
LOST = RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for it elsewhere")


def test_a_lost_device_costs_no_run(
    tmp_path: Path, undisturbed: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All later runs of the process would fail, too: they are given back."""
    folder = tmp_path / "lost"
    with monkeypatch.context() as patch:
        full(patch, LOST, most=0, first_step=50)
        patch.setattr(memory, "is_lost", lambda device: True)
        with pytest.raises(
            StudyError, match="an illegal memory access was encountered\\);"
        ) as told:
            Study(folder)
    assert "\n" not in str(told.value)
    assert states(folder) == {"pending": 6}
    assert Study(folder).bytes == undisturbed.bytes


def test_a_worker_whose_device_is_lost_is_left_out(
    monkeypatch: pytest.MonkeyPatch, dense: None
) -> None:
    full(monkeypatch, LOST, most=0, first_step=0)
    monkeypatch.setattr(memory, "is_lost", lambda device: True)
    job = Job(tuple(SPECS), "batched", Options(), {})
    ended = do_job(job, EventReporter(job, lambda event: None, lambda: False))
    assert ended.cause == "machine"


def test_what_a_lost_device_looks_like(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise LOST

    assert not memory.is_lost("cpu")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert not memory.is_lost("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert memory.is_lost("cuda:0")
    assert not memory.is_lost("cpu")
    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    memory.make_room()


def test_the_command_says_how_runs_are_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dense: None
) -> None:
    pytest.importorskip("typer")
    from upgd.cli.run import run

    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    arguments: dict[str, Any] = {"steps": "50", "window": 50, "hidden": "9-7", "seeds": "3"}
    run(PROBLEM, ["sgd"], study=tmp_path, **arguments)
    shown = capsys.readouterr().err
    assert shown.count("3 runs: 1 at a time (each takes up to ") == 1
