"""Shares of a group of agents, in this process or each in a process of its own.

A share holds some agents' environments. Where agents learn on the CPU it also holds their networks
and optimizers, and an iteration is one message there and one back. Where they learn as a stack,
steps are written to shared memory, and policies are read from it.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd.engine.dense import Learner
from upgd.kernels.announcing import announce, listening
from upgd.processes import dies_with_parent, ignore_interrupts, interrupts_blocked
from upgd.rl.compiled import CompiledPPO
from upgd.rl.diagnostics import diagnose, explained_variance
from upgd.rl.environments import RLError, Spaces
from upgd.rl.network import Network
from upgd.rl.ppo import MEASURES, Settings
from upgd.rl.rollouts import Actor, Episode, Rollout, Trajectory, put, trajectory

State = tuple[dict[str, NDArray[Any]], dict[str, Any]]


class WorkerDiedError(RuntimeError):
    """A worker process of a group has died, and its agents' state is lost."""


class StatesError(RLError):
    """Agents cannot be restored; `reasons` says why, by an agent's number in its group."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        self.reasons = dict(reasons)
        number, reason = next(iter(self.reasons.items()))
        more = f" ({len(reasons)} agents)" if len(reasons) > 1 else ""
        super().__init__(f"agent {number} cannot go on from its state: {reason}{more}")


@dataclass
class Record:
    """The record of one agent's iteration.

    Attributes:
        step: Steps in its environment so far.
        episodes: Those that ended in this iteration.
        values: By name, :data:`upgd.rl.ppo.MEASURES` as means over the iteration's minibatches;
            ``value_plasticity``, the mean plasticity (:func:`upgd.metrics.sample_plasticity`) of
            the value network's squared error on each epoch's last minibatch;
            ``explained_variance`` of the returns; and what
            :func:`upgd.rl.diagnostics.diagnose` found, where networks were measured.
        failure: Why the agent has stopped, if it has; the others continue.
        seconds: Processor time of its rollout and of its update; in a stack, its share of the
            update's wall-clock time.
    """

    step: int
    episodes: list[Episode]
    values: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    seconds: tuple[float, float] = (0.0, 0.0)

    def fill(
        self,
        measures: NDArray[Any],
        plasticity: float,
        values: NDArray[Any],
        returns: NDArray[Any],
        weights: NDArray[Any],
    ) -> None:
        """Take in what an update has found; it failed if parameters are not finite."""
        self.values = dict(zip(MEASURES, map(float, measures), strict=True))
        self.values["value_plasticity"] = float(plasticity)
        self.values["explained_variance"] = explained_variance(values, returns)
        if not np.isfinite(weights).all():
            self.failure = f"diverged at step {self.step}: its parameters are not finite"


@dataclass(frozen=True)
class WorkPlan:
    """The configuration of a share: learners and their `numbers` in the group.

    `memory` is shared by processes for steps and policies, if agents do not learn in the share.
    """

    spaces: Spaces
    learners: tuple[Learner, ...]
    numbers: tuple[int, ...]
    settings: Settings
    iterations: int
    dtype: str
    memory: SharedArrays | None
    compiled_steps: bool = True


class SharedArrays:
    """Arrays in memory that processes share, with these shapes by name."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
        self.shapes, self.dtype = dict(shapes), np.dtype(dtype)
        total = sum(int(np.prod(shape)) for shape in shapes.values()) * self.dtype.itemsize
        # A memory file: /dev/shm is small in containers.
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("upgd")
            self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            self._file, self.path = tempfile.mkstemp(prefix="upgd-")
        os.ftruncate(self._file, max(total, 1))
        self._map(self._file)

    def _map(self, file: int) -> None:
        memory, at = mmap.mmap(file, 0), 0
        self.arrays: dict[str, NDArray[Any]] = {}
        for name, shape in self.shapes.items():
            count = int(np.prod(shape))
            array = np.frombuffer(memory, self.dtype, count, at).reshape(shape)
            self.arrays[name] = array
            at += count * self.dtype.itemsize

    def __getstate__(self) -> dict[str, Any]:
        return {"shapes": self.shapes, "dtype": self.dtype, "path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._file = os.open(self.path, os.O_RDWR)
        self._map(self._file)

    def close(self) -> None:
        """Close the file; arrays stay valid as long as they are used."""
        with suppress(OSError):
            os.close(self._file)
        if not self.path.startswith("/proc/"):
            with suppress(OSError):
                os.unlink(self.path)


# ------------------------------------------------------------------------------- a share
class Share:
    """Some agents of a group: their environments and, if they learn here, the whole agents."""

    def __init__(self, plan: WorkPlan) -> None:
        self.plan, settings, spaces = plan, plan.settings, plan.spaces
        self.network = Network(spaces.observations, spaces.actions, settings.hidden)
        self.actors: list[Actor] = []
        self.agents: list[CompiledPPO] = []
        self.failures: list[str | None] = [None] * len(plan.learners)
        for number, learner in zip(plan.numbers, plan.learners, strict=True):
            if plan.memory is None:
                room = trajectory(self.network, settings, plan.dtype)
                self.agents.append(CompiledPPO(self.network, learner, settings, plan.dtype))
            else:
                arrays = plan.memory.arrays
                room = Trajectory(**{name: arrays[name][number] for name in Trajectory._fields})
            where = (spaces.name, learner.seed, settings, room)
            self.actors.append(Actor(*where, compiled=plan.compiled_steps))

    def rollout(self) -> list[tuple[Rollout, float]]:
        """Act for an iteration with the policies in shared memory; returns the time, too."""
        assert self.plan.memory is not None
        weights, told = self.plan.memory.arrays["weights"], []
        for place, number in enumerate(self.plan.numbers):
            start = time.thread_time()
            rollout = Rollout([], self.failures[place])
            if rollout.failure is None:
                rollout = self.actors[place].rollout(weights[number])
                self.failures[place] = rollout.failure
            told.append((rollout, time.thread_time() - start))
        return told

    def iterate(self, iteration: int) -> list[Record]:
        """Act and learn, one agent after the other."""
        return [self._iterate(place, iteration) for place in range(len(self.actors))]

    def _iterate(self, place: int, iteration: int) -> Record:
        actor, agent, settings = self.actors[place], self.agents[place], self.plan.settings
        if (failure := self.failures[place]) is not None:
            return Record(actor.step, [], failure=failure)
        start = time.thread_time()
        rollout = actor.rollout(agent.weights)
        middle = time.thread_time()
        record = Record(actor.step, rollout.episodes, failure=rollout.failure)
        if record.failure is None:
            share = settings.share_of_step_size(iteration, self.plan.iterations)
            found = agent.learn(actor.trajectory, iteration, share)
            seen, values = actor.trajectory.observations[:-1], actor.trajectory.values[:-1]
            record.fill(*found, values, agent.returns, agent.weights)
            if record.failure is None and measured(settings, iteration):
                parts = (agent.weights, agent.gradients, agent.utility, seen)
                record.values |= diagnose(self.network, *parts)
        self.failures[place] = record.failure
        record.seconds = (middle - start, time.thread_time() - middle)
        return record

    # ---------------------------------------------------------------------- checkpoints
    def states(self) -> list[State]:
        """The complete state of the agents."""
        found = []
        for place, actor in enumerate(self.actors):
            arrays, meta = actor.state()
            if self.agents:
                agent = self.agents[place]
                arrays |= {"weights": agent.weights.copy(), "states": agent.states.copy()}
                meta["updates"] = agent.updates
            found.append((arrays, meta | {"failure": self.failures[place]}))
        return found

    def restore(self, states: Sequence[State]) -> list[str | None]:
        """Restore what :meth:`states` returned; returns, by agent, what is wrong with it."""
        return [what_is_wrong(self._restore, place, *state) for place, state in enumerate(states)]

    def _restore(
        self, place: int, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]
    ) -> None:
        self.actors[place].restore(arrays, meta)
        self.failures[place] = meta["failure"]
        if self.agents:
            agent = self.agents[place]
            put(agent.weights, arrays["weights"])
            put(agent.states, arrays["states"])
            agent.updates = int(meta["updates"])


def what_is_wrong(restore: Callable[..., None], *state: Any) -> str | None:
    """Why a state cannot be restored, if it is the state's fault."""
    try:
        restore(*state)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        return f"no {error}" if isinstance(error, KeyError) else str(error)
    return None


def measured(settings: Settings, iteration: int) -> bool:
    """Whether networks are measured after an iteration."""
    return settings.measure_every > 0 and iteration % settings.measure_every == 0


# ---------------------------------------------------------------------------- processes
class Workers:
    """The shares of a group: one in this process, or several in worker processes."""

    def __init__(self, plans: Sequence[WorkPlan], processes: bool) -> None:
        self._share = None if processes else Share(plans[0])
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        if not processes:
            return
        # Before multiprocessing sends SIGTERM, which workers ignore.
        self._finish = Finalize(self, _end_all, (self._pipes, self._processes), exitpriority=10)
        context = multiprocessing.get_context("spawn")
        try:
            for plan in plans:
                here, there = context.Pipe()
                process = context.Process(target=_serve, args=(there, plan), daemon=True)
                # Interrupts wait until it is registered: nobody would stop it before.
                with _one_thread(), interrupts_blocked(), dies_with_parent():
                    process.start()
                    there.close()
                    self._pipes.append(here)
                    self._processes.append(process)
            self._receive()
        except BaseException:
            self.close()
            raise

    def call(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of every share, each with its own arguments, at the same time."""
        if self._share is not None:
            return [getattr(self._share, name)(*arguments[0])]
        for pipe, own in zip(self._pipes, arguments, strict=True):
            with _watched():
                pipe.send((name, own))
        return self._receive()

    def _receive(self) -> list[Any]:
        answers = []
        for pipe in self._pipes:
            with _watched():
                while isinstance(answer := pipe.recv(), str):
                    announce(answer)  # a kernel that is being compiled
                answers.append(answer)
        for wrong, _ in answers:
            if wrong is not None:
                raise wrong
        return [answer for _, answer in answers]

    def close(self) -> None:
        """Stop all processes."""
        _end_all(self._pipes, self._processes)


@contextmanager
def _watched() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise WorkerDiedError("a worker of this group of agents has died") from error


def _end_all(pipes: list[Any], processes: list[Any]) -> None:
    for pipe in pipes:
        pipe.close()
    pipes.clear()
    while processes:
        processes[0].join(5)
        if processes[0].is_alive():
            processes[0].kill()
            processes[0].join()
        processes.pop(0)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Start children whose libraries use one thread."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    old = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]
        os.environ.update(old)


def _serve(pipe: Any, plan: WorkPlan) -> None:
    """The main loop of a worker: serves calls until its pipe is closed."""
    ignore_interrupts()  # the parent handles signals
    with listening(lambda name: _announce_to(pipe, name)):
        _serve_calls(pipe, plan)


def _announce_to(pipe: Any, name: str) -> None:
    with suppress(OSError):
        pipe.send(name)


def _serve_calls(pipe: Any, plan: WorkPlan) -> None:
    try:
        share = Share(plan)
    except Exception as error:
        pipe.send((_plain(error), None))
        return
    pipe.send((None, None))
    with suppress(EOFError, OSError):
        while True:
            name, arguments = pipe.recv()
            try:
                answer = getattr(share, name)(*arguments)
            except Exception as error:
                pipe.send((_plain(error), None))
            else:
                pipe.send((None, answer))


def _plain(error: Exception) -> Exception:
    """An error that can be pickled."""
    if isinstance(error, RLError):
        return RLError(str(error))
    return RuntimeError(f"a worker failed: {type(error).__name__}: {error}")
