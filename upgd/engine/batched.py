"""The batched engine: many runs on one problem in lock step.

Runs that agree in everything but method, hyperparameters, seed and restarts share a stack. Which
stack runs them depends on the network and on what is installed:

=================  ==========================================================================
dense, CUDA        :class:`~upgd.engine.dense_cuda.CudaStack`: fused kernels, CUDA graphs
dense, CPU         ``upgd.engine.dense_cpu.CpuStack``: fused loops, if numba is installed
layered, CUDA      :class:`~upgd.engine.layered_cuda.LayeredCudaStack`: dense networks whose
                   methods see layers, or which have ``layer_norm`` or ``input_norm``
layered, CPU       ``upgd.engine.layered_cpu.LayeredCpuStack``: the same, if numba is installed
anything else      :class:`~upgd.engine.general.GeneralStack`: batched tensors
=================  ==========================================================================
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from upgd.engine import layered, roofline
from upgd.engine.dense import COLUMNS, Learner
from upgd.engine.dense import unsupported as unsupported_dense
from upgd.engine.eager import Setting
from upgd.engine.feed import Chunk, Feed, HeldOut
from upgd.engine.general import GeneralStack, unsupported
from upgd.engine.precision import full_float32
from upgd.engine.stackable import why_not_stacked
from upgd.engine.stacked import Networks
from upgd.kernels.layout import Layout
from upgd.metrics import UTILITIES
from upgd.networks import build_for
from upgd.streams import Problem

Kind = Literal["dense", "layered", "general"]
LONGEST_CHUNK = 5_000
MOST_BYTES = 1 << 28
"""Of inputs that lie on the device at a time, where they are made for each chunk."""
MOST_WITHOUT_WORD = 2_000
"""Learner-steps of PyTorch on CPU that a chunk has at most: some ten seconds of a convolutional
network, for which an interrupt and whoever watches have to wait."""
WEIGHED = ("weight_l1", "weight_l2", "effective_rank", *UTILITIES)
"""What is measured of the weights at the end of windows."""
log = logging.getLogger(__name__)


def kind_of(problem: Problem, setting: Setting, device: str) -> Kind | None:
    """Which stack can run this, or None: then the eager engine must; see :func:`why_eager`."""
    return None if why_eager(problem, setting, device) else _kind(problem, setting, device)


def why_eager(problem: Problem, setting: Setting, device: str) -> str:
    """Why no stack can run this; empty if one can."""
    if setting.batch != 1:
        return f"a stack takes one sample per step, not {setting.batch}"
    learner, kind = _learner(setting), _kind(problem, setting, device)
    if kind == "layered":
        return layered.unsupported(learner)
    if kind == "dense":
        return unsupported_dense(learner) or ""
    return unsupported(learner) or why_not_stacked(problem, device)


def _kind(problem: Problem, setting: Setting, device: str) -> Kind:
    """The stack that is made for such runs, whether it can run this one or not."""
    where = torch.device(device).type
    if isinstance(problem.network, str) or not has_dense_path(where):
        return "general"
    learner = _learner(setting)
    if not (learner.row.method.layered or problem.layer_norm or problem.input_norm):
        return "dense"
    # Tensors also have LayerNorm, and methods that the layered stack lacks.
    only = learner.row.method.layered or problem.input_norm
    return "layered" if only or not layered.unsupported(learner) else "general"


def _learner(setting: Setting) -> Learner:
    return Learner(setting.method, setting.hyper, setting.seed)


@cache
def has_dense_path(device: str) -> bool:
    """Whether the compiled path for dense networks is installed; says so once if it is not."""
    needed = {"cuda": "triton", "cpu": "numba"}.get(device)
    if needed is None:
        return False
    if importlib.util.find_spec(needed) is None:
        log.warning("%s is not installed: runs on %s take the slower general path", needed, device)
        return False
    return True


def longest_chunk(problem: Problem, setting: Setting, stream: Any, steps: int) -> int:
    """How many steps are taken at a time at most."""
    longest = min(LONGEST_CHUNK, steps)
    if problem.task_length and _ends_at_tasks(setting, stream):
        longest = min(longest, problem.task_length)
    return longest


def _ends_at_tasks(setting: Setting, stream: Any) -> bool:
    """Whether something is to be done where a task ends, or its permutation changes."""
    permutes = bool(getattr(stream, "permutes_inputs", False))
    return bool(setting.restart or setting.held_out or permutes)


class BatchedRun:
    """Several runs in lock step, with a setting and a stream each, for so many steps.

    Settings differ in method, hyperparameters, seed and restarts only. dtype float64 is for tests.

    Example:
        >>> from upgd.streams import get
        >>> problem = get("label-permuted-digits")
        >>> settings = [Setting("sgd", {}, seed, window=5) for seed in (0, 1)]
        >>> run = BatchedRun(problem, settings, [problem.make(s.seed) for s in settings], steps=10)
        >>> run.advance(10)
        >>> run.series(0)["accuracy"].shape
        (2,)
    """

    def __init__(
        self,
        problem: Problem,
        settings: Sequence[Setting],
        streams: Sequence[Any],
        steps: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.problem, self.settings, self.streams = problem, list(settings), list(streams)
        self.steps, self.device = steps, device
        restarting = [run for run, setting in enumerate(self.settings) if setting.restart]
        self.setting = self.settings[restarting[0] if restarting else 0]
        self.window, self.stride = self.setting.window, self.setting.stride
        for setting in settings:
            if reason := why_eager(problem, setting, device):
                raise ValueError(f"{setting.method} needs the eager engine: {reason}")
        kinds = {_kind(problem, setting, device) for setting in settings}
        if len(kinds) > 1:
            raise ValueError(f"these runs need different stacks: {', '.join(sorted(kinds))}")
        self.kind: Kind = kinds.pop()
        learners = [Learner(s.method, s.hyper, s.seed) for s in settings]
        self.stack: Any = self._make(learners, dtype)
        self._place = {run: place for place, run in enumerate(self.stack.order)}
        self._restarting = [self._place[run] for run in restarting]
        for stream in self.streams:
            if hasattr(stream, "needed"):
                stream.needed = steps
        self.feed = Feed(self.streams, steps)
        self.offline: list[list[float]] = [[] for _ in settings]
        windows = -(-steps // self.window)
        self.weighed = np.full((len(settings), windows, len(WEIGHED)), np.nan)
        self._ahead: tuple[tuple[int, int], Future[Chunk]] | None = None
        self._pool = ThreadPoolExecutor(1)
        self.networks = Networks(problem, self.stack)
        self._ranking: tuple[int, Future[list[float]]] | None = None
        self._ranks_pool = ThreadPoolExecutor(1)

    def _make(self, learners: list[Learner], dtype: torch.dtype) -> Any:
        problem = self.problem
        common: dict[str, Any] = {"loss": problem.loss, "steps": self.steps, "dtype": dtype}
        common |= {"window": self.window, "stride": self.stride}
        if self.kind == "general":
            common |= {"shape": tuple(self.streams[0].shape), "device": self.device}
            return GeneralStack(partial(build_for, problem), learners, **common)
        assert not isinstance(problem.network, str)
        layout = Layout(tuple(problem.network))
        common["activation"] = problem.activation
        on_cuda = torch.device(self.device).type == "cuda"
        if self.kind == "layered":
            common |= {"layer_norm": problem.layer_norm, "input_norm": problem.input_norm}
            if on_cuda:
                from upgd.engine.layered_cuda import LayeredCudaStack

                return LayeredCudaStack(layout, learners, device=self.device, **common)
            from upgd.engine.layered_cpu import LayeredCpuStack

            return LayeredCpuStack(layout, learners, **common)
        if on_cuda:
            from upgd.engine.dense_cuda import CudaStack

            return CudaStack(layout, learners, device=self.device, **common)
        from upgd.engine.dense_cpu import CpuStack

        return CpuStack(layout, learners, **common)

    @property
    def step(self) -> int:
        return int(self.stack.step)

    # ------------------------------------------------------------------------- learning
    @full_float32()
    def advance(self, steps: int) -> None:
        """Learn from the next `steps` samples, in chunks that end where something must be done."""
        for start, stop in self._chunks(self.step, min(self.step + steps, self.steps)):
            self._advance(start, stop)

    most: int | None = None  # steps of a chunk, for those who want to hear of it more often

    def next_stop(self) -> int:
        """Where the next chunk ends: the least that :meth:`advance` does at a time."""
        return next(stop for _, stop in self._chunks(self.step, self.steps))

    def _advance(self, start: int, stop: int) -> None:
        length = self.problem.task_length
        if self._restarting and length and start and start % length == 0:
            self.stack.restart(start // length, self._restarting)
        chunk = self._chunk(start, stop)
        self._fetch_ahead(stop)
        held_out: Future[HeldOut] | None = None
        if self.setting.held_out and length and stop % length == 0:
            task = stop // length - 1
            held_out = self._pool.submit(self.feed.held_out, task, self.setting.held_out)
        self.stack.advance(chunk)
        if self.setting.weighs(stop - 1):
            self._weigh(stop - 1)
        if held_out is not None:
            self._hold_out(held_out.result())

    def _chunks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        length, setting = self.problem.task_length, self.setting
        at_tasks = length and _ends_at_tasks(setting, self.streams[0])
        longest = longest_chunk(self.problem, setting, self.streams[0], self.steps)
        if self.feed.made:
            features = int(np.prod(self.streams[0].shape))
            longest = max(1, min(longest, MOST_BYTES // (4 * self.feed.made * features)))
        if self.kind == "general" and torch.device(self.device).type == "cpu":
            longest = max(1, min(longest, MOST_WITHOUT_WORD // len(self.settings)))
        longest = max(1, min(longest, self.most or longest))
        while start < stop:
            end = min(stop, start + longest)
            if at_tasks:
                assert length is not None
                end = min(end, (start // length + 1) * length)
            if self.stride:  # diagnostics of the weights follow the step that is measured
                end = min(end, setting.next_weighing(start) + 1)
            yield start, end
            start = end

    def _chunk(self, start: int, stop: int) -> Chunk:
        if self._ahead is not None and self._ahead[0] == (start, stop):
            return self._ahead[1].result()
        return self.feed.chunk(start, stop - start)

    def _fetch_ahead(self, start: int) -> None:
        """Prepare the next chunk while the device works on this one."""
        following = next(self._chunks(start, self.steps), None)
        self._ahead = None
        if following is not None:
            begin, end = following
            self._ahead = following, self._pool.submit(self.feed.chunk, begin, end - begin)

    # ------------------------------------------------------------------------- measuring
    def _weigh(self, step: int) -> None:
        """Norms and ranks of the weights; the gradient's are summed up by the stack."""
        window = step // self.window
        self.weighed[:, window, :2] = self.networks.norms()
        self.weighed[:, window, 3:] = self.networks.utilities()
        if self.setting.ranks(step):
            self._wait_for_ranks()
            self._ranking = window, self._ranks_pool.submit(self.networks.ranks_later())
            if torch.device(self.device).type == "cpu":  # nobody else could go on
                self._wait_for_ranks()

    def _wait_for_ranks(self) -> None:
        if self._ranking is not None:
            window, ranks = self._ranking
            self.weighed[:, window, 2] = ranks.result()
            self._ranking = None

    def _hold_out(self, samples: HeldOut) -> None:
        for known, share in zip(self.offline, self.networks.accuracy(samples), strict=True):
            known.append(share)

    def diverged_at(self, run: int) -> int | None:
        """The step at which a run's loss or gradient was not finite, if it came to that."""
        step = int(self.stack.diverged[self._place[run]])
        return None if step < 0 else step

    def series(self, run: int) -> dict[str, NDArray[np.float64]]:
        """Means of the closed windows by metric; until it diverged, where it did."""
        end = self.step if self.diverged_at(run) is None else self.diverged_at(run)
        assert end is not None
        closed = end // self.window
        if closed == 0:
            return {}
        sums = np.asarray(torch.as_tensor(self.stack.series[self._place[run]]).cpu())[:closed]
        found = {"loss": sums[:, 0] / self.window, "plasticity": sums[:, 1] / self.window}
        if self.problem.loss == "cross_entropy":
            found["accuracy"] = sums[:, 2] / self.window
        if self.stride:
            with np.errstate(invalid="ignore", divide="ignore"):
                measured = sums[:, COLUMNS.index("measured"), None]
                means = sums[:, 3:7] / measured
            self._wait_for_ranks()
            weights = self.weighed[run, :closed]
            found |= {name: means[:, i] for i, name in enumerate(COLUMNS[3:7])}
            if self.problem.activation != "relu":
                found["zero_activations"] = np.full(closed, np.nan)
            has_more = _learner(self.settings[run]).has_utilities
            names = WEIGHED if has_more else WEIGHED[:3]
            found |= {name: weights[:, i] for i, name in enumerate(names)}
        return found

    def share_of_roofline(self, rate: float) -> float | None:
        """The share of the roofline of `rate` learner-steps/s; None where it cannot be measured."""
        methods = [setting.method for setting in self.settings]
        parameters, itemsize = self.networks.size, int(self.stack.dtype.itemsize)
        size = itemsize * parameters * max(roofline.kept(method) for method in methods)
        threads = getattr(self.stack, "threads", torch.get_num_threads())
        on_cpu = torch.device(self.device).type == "cpu"
        speed = roofline.bandwidth(self.device, *((size, threads) if on_cpu else ()))
        moved = roofline.floor(methods, parameters, itemsize)
        return None if speed is None else roofline.share(rate, moved, speed)

    # ----------------------------------------------------------------------- checkpoints
    def state(self, run: int) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Everything that the rest of one run depends on: arrays, and what fits into JSON."""
        self._wait_for_ranks()
        arrays = dict(self.stack.state(self._place[run]))
        arrays["weighed"] = self.weighed[run]
        return arrays, {"step": self.step, "offline": self.offline[run]}

    def restore(
        self, saved: Sequence[tuple[Mapping[str, NDArray[Any]], Mapping[str, Any]]]
    ) -> None:
        """Continue all runs from what :meth:`state` returned of each, all at one step."""
        steps = {int(meta["step"]) for _, meta in saved}
        if len(steps) != 1 or len(saved) != len(self.settings):
            raise ValueError(f"runs of one stack go on from one step, not from {sorted(steps)}")
        for run, (arrays, meta) in enumerate(saved):
            rest = dict(arrays)
            weighed = rest.pop("weighed")  # older ones have no utilities
            self.weighed[run][:, : weighed.shape[1]] = weighed
            self.stack.restore(self._place[run], rest)
            self.offline[run] = [float(value) for value in meta["offline"]]
        self.stack.step = steps.pop()
