"""Learners on streams: one at a time on the eager engine, or many in a stack."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from upgd.engine import Divergence, EagerRun, memory
from upgd.engine.batched import BatchedRun, kind_of, why_eager
from upgd.ledger.checkpoints import Checkpoint
from upgd.ledger.errors import SpecError
from upgd.ledger.records import Result
from upgd.ledger.spec import RunSpec
from upgd.streams import check, get
from upgd.study.execution import (
    LONGEST_LOSS,
    Execution,
    Progress,
    Recorder,
    Reporter,
    is_environment_error,
)
from upgd.study.kinds import Kind, Pace, Room, RunGroup
from upgd.study.options import Options
from upgd.study.prepare import plan, prepare

EAGER, BATCHED = "eager", "batched"  # results name the kind of stack too: "batched-dense"
PER_CORE = 8  # runs of a stack on the CPU, for each core: enough to balance fast and slow ones
MOST_ON_CUDA = 400  # runs of a stack on a GPU: more would take more time without a gain
SECONDS = 1.5  # to measure a pace


class Learners(Kind):
    """Learners on streams."""

    def check(self, spec: RunSpec, options: Options) -> None:
        setting = prepare(spec, options.data_dir, options.here).setting
        if spec.steps * setting.batch < setting.window:
            samples = f" of {setting.batch} samples" if setting.batch > 1 else ""
            raise SpecError(
                f"{spec.steps} steps{samples} are less than one window of {setting.window} "
                "samples, so nothing would be measured; give more --steps or a smaller --window"
            )

    def dataset(self, problem: str) -> str | None:
        return get(problem).dataset

    def check_data(self, problem: str, data_dir: str | os.PathLike[str] | None) -> None:
        dataset = self.dataset(problem)
        if dataset is not None:
            check(dataset, data_dir)

    def group(self, spec: RunSpec, options: Options) -> tuple[str, Any] | None:
        if options.engine != EAGER:
            with suppress(SpecError):  # the eager engine reports it
                key = stack_key(spec, options.device)
                if key is not None:
                    return BATCHED, key
        return None if options.engine == BATCHED else (EAGER, spec.key)

    def why_alone(self, spec: RunSpec, options: Options) -> str:
        try:
            return why_eager(*plan(spec), options.device)
        except (ValueError, KeyError, TypeError):  # the eager engine says what is wrong with it
            return ""

    def stack(self, facts: Mapping[str, Any]) -> str | None:
        found: str | None = facts["run"].get("together")
        return found

    def size(self, group: RunGroup, options: Options, room: Room) -> tuple[int, str]:
        if group.engine == EAGER:
            return 1, ""
        most = at_a_time(options.device, room.threads)
        specs = group.first(most)
        try:
            need = _need(specs, options)
        except Exception as error:
            if is_environment_error(error):
                raise
            return 1, ""  # the run will fail with this error
        fitting = need.fitting(room.free)
        if fitting >= len(specs):
            return most, ""
        sizes = (max(need.each), need.shared + need.most_inputs, room.free)
        each, data, free = map(_in_bytes, sizes)
        return fitting, f" (each takes up to {each}, the data {data}; {free} are free)"

    def engine_name(self, spec: RunSpec, engine: str, device: str) -> str:
        return EAGER if engine == EAGER else f"{BATCHED}-{kind_of(*plan(spec), device)}"

    def execution(
        self, specs: Sequence[RunSpec], engine: str, options: Options, reporter: Reporter
    ) -> Execution:
        if engine == EAGER:
            return EagerExecution(reporter, specs[0], options)
        return StackExecution(reporter, specs, options)

    def measure_pace(self, specs: Sequence[RunSpec], options: Options) -> Pace:
        device, steps = options.device, specs[0].steps
        if options.engine == EAGER or kind_of(*plan(specs[0]), device) is None:
            run = prepare(specs[0], options.data_dir, device)
            return Pace(_steps_per_second(run, steps, device), "timed now, one run at a time")
        some = spread(specs, at_a_time(device))
        stack = _make_stack(some, options)
        rate = _steps_per_second(stack, steps, device) * len(some)
        return Pace(rate, f"timed now, {len(some)} runs at a time")


KIND = Learners()


# ---------------------------------------------------------------------------- one at a time
class EagerExecution(Execution):
    """One run on the eager engine."""

    run: EagerRun | None = None
    _between_steps = True
    _diverged_at: int | None = None

    def __init__(self, reporter: Reporter, spec: RunSpec, options: Options) -> None:
        self.reporter, self.spec, self.options, self.specs = reporter, spec, options, [spec]
        pauses, pause = (5.0, LONGEST_LOSS / 2), options.checkpoint_seconds
        self.recorder = Recorder(reporter, EAGER, options.device, pauses, pause)

    def begin(self) -> None:
        self.run = self._make()
        found = self.recorder.load(self.spec)
        if found is not None:
            try:
                self.run.restore(found[0], found[1]["run"])
                self.recorder.start(found)
                return
            except Exception:  # whatever is wrong with it, the run can restart
                self.run = self._make()
        self.recorder.start()

    def _make(self) -> EagerRun:
        return prepare(self.spec, self.options.data_dir, self.options.device)

    def learn(self) -> None:
        """Advance to the end, or to where it diverges."""
        try:
            self._learn()
        except Divergence as end:
            self._diverged_at = end.step

    def _learn(self) -> None:
        """Advance in pieces of about half a second."""
        assert self.run is not None
        run, steps = self.run, self.spec.steps
        piece = 20
        while run.step < steps:
            before = time.monotonic()
            count = min(piece, steps - run.step)
            self._between_steps = False
            run.advance(count)
            self._between_steps = True
            took = max(time.monotonic() - before, 1e-6)
            piece = max(1, min(100_000, int(count * 0.5 / took)))
            if self.reporter.wants_progress():
                latest = {k: v[-1] for k, v in run.meter.closed.items() if v}
                self.reporter.progress(Progress(self.spec, run.step, count / took, latest))
            if run.step < steps:
                self.recorder.tend(self.save)

    def save(self) -> None:
        if self.run is not None and self.run.step and self._between_steps:
            self.recorder.save(self.spec, *self.run.state())

    def finish(self) -> None:
        assert self.run is not None
        run = self.run
        values = {name: run.meter.series(name) for name in run.meter.closed}
        window, length, end = run.setting.window, run.stream.task_length, self._diverged_at
        result = self.recorder.result(run.step, values, window, length, run.offline, end)
        self.reporter.finish([(self.spec, result)])


# --------------------------------------------------------------------------------- stacks
FIRST_CHUNK = 32  # steps, on the CPU
CHUNK_SECONDS = 0.5  # so often runs on the CPU report how far they are, roughly


def _chunk_of(seconds: float, known: int | None, steps: int, since: float) -> int:
    """How many steps take so long at the pace of the last ones; `known` if that is about right."""
    wanted = max(1, int(seconds * steps / max(time.monotonic() - since, 1e-6)))
    # What is prepared ahead is prepared for the known length: change it rarely.
    return known if known is not None and wanted / 3 <= known <= 2 * wanted else wanted


class StackExecution(Execution):
    """Runs in lock step on the batched engine; see :mod:`upgd.engine.batched`.

    Runs whose checkpoints are not all at one step restart.
    """

    run: BatchedRun | None = None
    _between_steps = True

    def __init__(self, reporter: Reporter, specs: Sequence[RunSpec], options: Options) -> None:
        self.reporter, self.specs, self.options = reporter, specs, options
        engine = KIND.engine_name(specs[0], BATCHED, options.device)
        device, pause = device_name(options.device), options.checkpoint_seconds
        self.recorder = Recorder(reporter, engine, device, (10.0, LONGEST_LOSS), pause)

    def begin(self) -> None:
        self.run = _make_stack(self.specs, self.options)
        found = [self._checkpoint(spec) for spec in self.specs]
        saved = [one for one in found if one is not None]
        if len(saved) == len(self.specs):
            try:
                self.run.restore([(arrays, facts["run"]) for arrays, facts in saved])
                self.recorder.start(*saved)
                return
            except Exception:  # whatever is wrong with them, the runs can restart
                self.run = _make_stack(self.specs, self.options)
        self.recorder.start()

    def _checkpoint(self, spec: RunSpec) -> Checkpoint | None:
        """A run's checkpoint from which a stack can continue, if there is one."""
        found = self.recorder.load(spec)
        run = None if found is None else found[1].get("run")
        step = run.get("step") if isinstance(run, dict) else None
        return found if isinstance(step, int) and 0 < step <= spec.steps else None

    def learn(self) -> None:
        """Advance to the end, chunk by chunk."""
        assert self.run is not None
        run, specs = self.run, tuple(self.specs)
        on_cpu = torch.device(self.options.device).type == "cpu"
        run.most = FIRST_CHUNK if on_cpu else None
        while run.step < run.steps:
            before, first = time.monotonic(), run.step
            self._between_steps = False
            run.advance(run.next_stop() - first)
            self._between_steps = True
            if on_cpu:
                run.most = _chunk_of(CHUNK_SECONDS, run.most, run.step - first, before)
            if self.reporter.wants_progress():
                # Reading them waits for the device: only now the time is known.
                latest = {name: float(v[-1]) for name, v in run.series(0).items() if len(v)}
                took = max(time.monotonic() - before, 1e-6)
                rate = (run.step - first) * len(specs) / took
                share = run.share_of_roofline(rate)
                progress = Progress(specs[0], run.step, rate, latest, specs[1:], share)
                self.reporter.progress(progress)
            if run.step < run.steps:
                self.recorder.tend(self.save)

    def save(self) -> None:
        if self.run is not None and self.run.step and self._between_steps:
            whole = {} if self.run.kind != "general" else {"together": together(self.specs)}
            for i, spec in enumerate(self.specs):
                arrays, facts = self.run.state(i)
                self.recorder.save(spec, arrays, facts | whole)

    def finish(self) -> None:
        assert self.run is not None
        results = [(spec, self._result(self.run, i)) for i, spec in enumerate(self.specs)]
        self.reporter.finish(results)

    def _result(self, run: BatchedRun, number: int) -> Result:
        end, length = run.diverged_at(number), run.problem.task_length
        steps, values = run.step if end is None else end, run.series(number)
        given = (steps, values, run.window, length, run.offline[number], end)
        return self.recorder.result(*given, runs_in_stack=len(self.specs))


def _make_stack(specs: Sequence[RunSpec], options: Options) -> BatchedRun:
    plans = [plan(spec) for spec in specs]
    problem = plans[0][0]
    streams = [problem.make(spec.seed, options.data_dir) for spec in specs]
    settings = [setting for _, setting in plans]
    return BatchedRun(problem, settings, streams, specs[0].steps, options.device)


def together(specs: Sequence[RunSpec]) -> str:
    """Identifies a general stack: in another one PyTorch may order sums differently."""
    return hashlib.sha256("\n".join(spec.key for spec in specs).encode()).hexdigest()[:16]


def device_name(device: str) -> str:
    """A device's name in results of stacks: the model of a GPU, since bits depend on it."""
    on_gpu = torch.device(device).type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if on_gpu else device


def stack_key(spec: RunSpec, device: str) -> Any:
    """What runs of one stack have in common; None if this one cannot be in any."""
    problem, setting = plan(spec)
    try:
        kind = kind_of(problem, setting, device)
    except (ValueError, KeyError, TypeError):
        return None
    common = tuple(item for item in spec.options.items() if item[0] != "restart")
    return None if kind is None else (spec.problem, spec.steps, common, kind)


def at_a_time(device: str, threads: int | None = None) -> int:
    """How many runs share a stack where memory allows it."""
    if torch.device(device).type == "cuda":
        return MOST_ON_CUDA
    return PER_CORE * (threads or torch.get_num_threads())


def spread(specs: Sequence[RunSpec], count: int) -> list[RunSpec]:
    """`count` of the runs, taken evenly, so that each method has its share."""
    if len(specs) <= count:
        return list(specs)
    return [specs[i * len(specs) // count] for i in range(count)]


def _need(specs: Sequence[RunSpec], options: Options) -> memory.Need:
    problem, settings = plan(specs[0])[0], [plan(spec)[1] for spec in specs]
    stream = problem.make(specs[0].seed, options.data_dir)
    return memory.need(problem, settings, stream, specs[0].steps, options.device)


def _in_bytes(count: float) -> str:
    """A number of bytes, such as "12.3 MB"."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    unit, name = next((one for one in units if count >= one[0]), units[-1])
    return f"{count / unit:.1f} {name}"


def _steps_per_second(run: EagerRun | BatchedRun, steps: int, device: str) -> float:
    """The pace of the last of longer and longer pieces, after a warm-up."""
    run.advance(min(10, max(1, steps // 2)))  # compiles
    piece, best = 10, 0.0
    until = time.monotonic() + SECONDS
    while True:
        first, before = run.step, time.monotonic()
        run.advance(min(piece, steps - first))
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        took = max(time.monotonic() - before, 1e-9)
        if run.step > first:
            best = (run.step - first) / took
        piece *= 2
        if run.step >= steps or time.monotonic() >= until:
            return max(best, 1e-9)
