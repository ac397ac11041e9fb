"""Workers on a Ray cluster: one actor each."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch

from upgd.engine.dense_cpu import cores
from upgd.extras import install
from upgd.ledger.errors import StudyError
from upgd.study.pools import Roll
from upgd.study.worker import Alive, Died, Event, Job, Worker

try:
    import ray
    from ray.exceptions import RayError
except ImportError as error:
    raise ImportError(f"Ray is not installed; {install('ray')}") from error

SLOTS = 3  # calls that an actor serves at a time: one that waits for events, a job's start, a stop


class RayPool:
    """Actors of a Ray cluster, which need upgd installed where they run.

    Args:
        address: The cluster's (``ray://host:port``), or None to start one on this machine alone,
            which ends with the pool.
        count: How many actors.
        device: Where they work; on CUDA each has a GPU of its own.
        at_start: Called in each of them first.
    """

    shares_files = False

    def __init__(
        self,
        address: str | None,
        count: int,
        device: str = "cpu",
        at_start: Callable[[], None] | None = None,
    ) -> None:
        self.workers, self._device, self._at_start = count, device, at_start
        self._ours = not ray.is_initialized()
        if self._ours:
            _connect(address, count)
        cluster: Any = ray  # half of it has no types
        nodes = max(1, len([node for node in cluster.nodes() if node["Alive"]]))
        total = int(cluster.cluster_resources().get("CPU", 1))
        self._threads = max(1, total // count)
        self._share = -(-count // nodes)
        self._actors: dict[int, Any] = {}
        self._waiting: dict[Any, int] = {}  # a call that waits for events: whose
        self._again: list[tuple[int, Event]] = []
        self._roll = Roll()
        self._next = 0
        for _ in range(count):
            self._hire()

    def pids(self) -> list[int]:
        """The processes of the actors, once all have started."""
        calls = [actor.pid.remote() for actor in self._actors.values()]
        return [int(pid) for pid in ray.get(calls)]

    def roll_call(self) -> None:
        for worker in self._roll.busy():
            self.kill(worker)
        self._again = list(self._roll.ready())

    def start(self, worker: int, job: Job) -> None:
        self._roll.start(worker)
        self._actors[worker].start.remote(job)

    def stop(self, worker: int) -> None:
        self._actors[worker].stop.remote()

    def kill(self, worker: int) -> None:
        ray.kill(self._forget(worker))
        self._hire()

    def events(self, timeout: float) -> list[tuple[int, Event]]:
        if self._again:
            again, self._again = self._again, []
            return again
        calls = list(self._waiting)
        ready, _ = ray.wait(calls, num_returns=1, timeout=timeout)
        if ready:  # fetch all that have finished
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        found = [one for call in ready for one in self._fetch(call)]
        for worker, event in found:
            self._roll.note(worker, event)
        return found

    def _fetch(self, call: Any) -> list[tuple[int, Event]]:
        """The events of a finished call; the worker is called again, or replaced if it died."""
        worker = self._waiting.pop(call)
        try:
            events = ray.get(call)
        except RayError as error:
            self._forget(worker)
            self._hire()
            return [(worker, Died(_reason(error)))]
        self._listen(worker)
        return [(worker, event) for event in events or [Alive()]]

    def close(self) -> None:
        for worker in list(self._actors):
            ray.kill(self._forget(worker))
        if self._ours:
            ray.shutdown()

    def _hire(self) -> None:
        on_cuda = torch.device(self._device).type == "cuda"
        actor = _Actor.options(
            num_cpus=self._threads,
            num_gpus=1 if on_cuda else 0,
            max_concurrency=SLOTS,
            max_restarts=0,
            max_task_retries=0,
        )
        worker, self._next = self._next, self._next + 1
        arguments = (self._threads, self._device, self._share, self._at_start)
        self._actors[worker] = actor.remote(*arguments)
        self._listen(worker)

    def _listen(self, worker: int) -> None:
        self._waiting[self._actors[worker].events.remote()] = worker

    def _forget(self, worker: int) -> Any:
        self._roll.strike(worker)
        self._waiting = {call: whose for call, whose in self._waiting.items() if whose != worker}
        return self._actors.pop(worker)


class _Inside(Worker):
    """The class of an actor."""

    def __init__(
        self, threads: int, device: str, share: int, at_start: Callable[[], None] | None
    ) -> None:
        if at_start is not None:
            at_start()
        super().__init__(threads, device, share)

    def pid(self) -> int:
        """Its process."""
        return os.getpid()


_Actor: Any = ray.remote(_Inside)


def _connect(address: str | None, count: int) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        quiet |= {"include_dashboard": False, "num_cpus": max(count, cores())}
    try:
        if address is not None:  # Ray itself would wait for half a minute
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=10.0).close()
        ray.init(address=address or "local", namespace="upgd", **quiet)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        where = address or "on this machine"
        reason = str(error).strip().splitlines()[0]
        raise StudyError(f"cannot reach a Ray cluster {where}: {reason}") from error


def _reason(error: RayError) -> str:
    """Why an actor died, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    about = next((line for line in lines if "unexpectedly" in line or "memory" in line), "")
    return f"its worker died ({about or type(error).__name__})"
