"""A stack of learners with any network: parameters with a leading dimension of runs.

One forward and one backward pass serve all runs, since no run's loss depends on another's
parameters. This is the path of convolutional networks, and that of dense ones where no compiled
path is installed. Sums are PyTorch's, so a result is the same bit for bit on the same stack of
libraries and devices only, with the same number of runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from upgd.engine.dense import COLUMNS, Learner, MethodGroup, Stack, replay, tables
from upgd.engine.dense import unsupported as unsupported_dense
from upgd.engine.feed import Chunk
from upgd.engine.precision import full_float32
from upgd.kernels import philox
from upgd.kernels.rules import (
    ARGUMENTS,
    CORRECTIONS,
    DUE,
    NUMBERS,
    SHARE,
    STATES,
    reduces,
    source,
)
from upgd.monitor.measures import pooled_share
from upgd.optim.batch import tiny
from upgd.optim.roles import bounds, roles
from upgd.rules.ops import FUNCTIONS
from upgd.rules.vocabulary import Method, Phase
from upgd.threads import no_garbage

GRAPH_STEPS = 10


def unsupported(learner: Learner) -> str | None:
    """Why this engine cannot run a learner, if it cannot."""
    if reason := unsupported_dense(learner):
        return reason
    needs = learner.row.needs & {"curvature", "gates", "layers"}
    return f"{learner.row.name} needs {', '.join(sorted(needs))}" if needs else None


class GeneralStack(Stack):
    """R learners in lock step, with one network architecture.

    `build` makes a learner's network from its seed and the number of a task; `shape` is that of one
    input. dtype float64 is for tests; other arguments are those of
    :class:`~upgd.engine.dense.Stack`.
    """

    def __init__(
        self,
        build: Callable[[int, int], nn.Module],
        learners: Sequence[Learner],
        *,
        shape: tuple[int, ...],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        **common: Any,
    ) -> None:
        super().__init__(learners, **common)
        self.build, self.shape = build, shape
        self.dtype, self.device = dtype, torch.device(device)
        self.model = build(self.learners[0].seed, 0).to(self.device, dtype)  # for its buffers
        self.shapes = [tuple(p.shape) for p in self.model.parameters()]
        self._allocate()
        self._rules = {g.row.name: _rules(g.row.method) for g in self.groups}
        self._fused = self._fused_updates()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._fed: dict[str, Tensor] = {}
        self._table: NDArray[Any] | None = None
        self._drawn: dict[int, tuple[int, Tensor]] = {}

    def _unsupported(self, learner: Learner) -> str | None:
        return unsupported(learner)

    def _allocate(self) -> None:
        runs, size = len(self.learners), sum(math.prod(s) for s in self.shapes)
        named = any("." in name for learner in self.learners for name in learner.all_hyper())
        theirs = roles(self.model) if named else ["hidden"] * len(self.shapes)
        hyper, decays = tables(self.learners, theirs, bounds(self.shapes))
        self.hyper, self.decays = self._put(hyper), self._put(decays)
        self.corrections = torch.zeros_like(self.decays)
        self.began = torch.zeros(runs, dtype=torch.int64, device=self.device)
        self._stretches = _stretches(self.shapes, np.concatenate([hyper, decays], 2))
        seeds = np.array([learner.seed for learner in self.learners], np.uint64).view(np.int64)
        self.seeds = self._put(seeds)
        self.weights = torch.zeros(runs, size, dtype=self.dtype, device=self.device)
        self.gradients = torch.zeros_like(self.weights)
        self.states = [
            torch.zeros(len(g.states), g.count, size, dtype=self.dtype, device=self.device)
            for g in self.groups
        ]
        self.series = torch.zeros(
            runs, self.windows, len(COLUMNS), dtype=torch.float64, device=self.device
        )
        self.diverged = torch.full((runs,), -1, dtype=torch.int64, device=self.device)
        self.clock = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.params: list[Tensor] = []
        self._gradient_views: list[Tensor] = []
        at = 0
        for shape in self.shapes:
            count = math.prod(shape)
            view = self.weights[:, at : at + count].view(runs, *shape)
            self.params.append(view.detach().requires_grad_())
            gradient = self.gradients[:, at : at + count].view(runs, *shape)
            self._gradient_views.append(gradient)
            at += count
        self._row_of = _row_numbers(self.shapes, self.device)
        self.restart(0)

    def _initial(self, seed: int, task: int) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.build(seed, task).parameters()])

    def _put(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _get(self, kept: Tensor) -> NDArray[Any]:
        return kept.cpu().numpy()

    def _fused_updates(self) -> Any:
        if self.device.type != "cuda":
            return None
        from upgd.engine.general_cuda import FusedUpdates

        return FusedUpdates(self)

    # ------------------------------------------------------------------------- learning
    @full_float32()
    def advance(self, chunk: Chunk) -> None:
        """Learn from a chunk of samples."""
        self._feed(chunk)
        end = self.step + chunk.steps
        for measured in self.step + np.flatnonzero(self.measured[self.step : end]):
            self._go(int(measured) - self.step)
            self._learn(measured=True)
            self.step = int(measured) + 1
        self._go(end - self.step)
        self.step = end

    def _go(self, steps: int) -> None:
        """So many steps without diagnostics."""
        if self.device.type == "cuda":
            replay(self._graphs, self._capture, steps, GRAPH_STEPS)
            return
        for _ in range(steps):
            self._learn()

    def _feed(self, chunk: Chunk) -> None:
        order = self.order
        fed: dict[str, NDArray[Any] | None] = {
            "index": chunk.index[order].astype(np.int64),
            "labels": None if chunk.labels is None else chunk.labels[order].astype(np.int64),
            "targets": None if chunk.targets is None else chunk.targets[order],
            "slots": None if chunk.slots is None else chunk.slots.astype(np.int64),
        }
        if chunk.permutations is not None:
            fed["permutations"] = chunk.permutations[:, order].astype(np.int64)
        if chunk.table is not self._table:
            fed["table"] = self._table = chunk.table
        for name, array in fed.items():
            if array is None:
                continue
            new = torch.from_numpy(np.ascontiguousarray(array))
            if new.is_floating_point():
                new = new.to(self.dtype)
            old = self._fed.get(name)
            if old is not None and old.shape == new.shape:
                old.copy_(new)  # graphs remember addresses
            else:
                self._fed[name] = new.to(self.device)
                self._graphs.clear()
        self.clock.copy_(torch.tensor([self.step, self.step]))

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        changing = [self.weights, *self.states, self.series, self.diverged, self.clock]
        changing.append(self.corrections)
        saved = [tensor.clone() for tensor in changing]
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):  # libraries allocate at their first calls
            for _ in range(2):
                self._learn()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with no_garbage(), torch.cuda.graph(graph):
            for _ in range(size):
                self._learn()
        for tensor, old in zip(changing, saved, strict=True):
            tensor.copy_(old)
        return graph

    def _learn(self, measured: bool = False) -> None:
        """One step of all learners."""
        x, y = self._sample()
        zeros: list[Tensor] | None = [] if measured else None
        outputs = forward(self.model, self.params, x, zeros)
        losses = self._losses(outputs, y)
        found = torch.autograd.grad(losses.sum(), self.params)
        with torch.no_grad():
            torch._foreach_copy_(self._gradient_views, list(found))
            largest = torch.linalg.vector_norm(self.gradients, math.inf, 1)  # one pass
            finite = losses.isfinite() & largest.isfinite()
            fresh = ~finite & (self.diverged < 0)
            self.diverged.copy_(torch.where(fresh, self.clock[0], self.diverged))
            self._correct()
            if self._fused is not None:
                self._fused()
            else:
                for group, states in zip(self.groups, self.states, strict=True):
                    self._update(group, states)
            late = self._losses(forward(self.model, self.params, x), y).double()
            values = torch.zeros_like(self.series[:, 0])
            early = losses.double()
            values[:, 0] = early
            progress = (1 - late / early.clamp_min(1e-8)).clamp(0, 1)
            values[:, 1] = torch.where(late.isnan(), 0, progress)
            if not self.squared:
                values[:, 2] = (outputs.argmax(1) == y).double()
            if measured:
                self._diagnose(values, zeros or [])
            window = (self.clock[:1] // self.window).clamp_max(self.series.shape[1] - 1)
            self.series.index_add_(1, window, values.unsqueeze(1))
            self.clock[:1] += 1

    def _diagnose(self, values: Tensor, zeros: list[Tensor]) -> None:
        wide = self.gradients.double()
        values[:, 3] = pooled_share(zeros) if zeros else math.nan
        values[:, 4] = (wide != 0).double().mean(1)
        values[:, 5] = wide.abs().sum(1)
        values[:, 6] = wide.square().sum(1).sqrt()
        values[:, 7] = 1

    def _sample(self) -> tuple[Tensor, Tensor]:
        """This step's inputs [R, ...] and labels or targets."""
        fed = self._fed
        here = (self.clock[:1] - self.clock[1:]).clamp(0, self._length() - 1)
        x = fed["table"].index_select(0, fed["index"].index_select(1, here).squeeze(1))
        if "permutations" in fed:
            slot = fed["slots"].index_select(0, here)
            x = x.gather(1, fed["permutations"].index_select(0, slot).squeeze(0))
        y = fed["targets" if self.squared else "labels"].index_select(1, here).squeeze(1)
        return x.view(len(x), *self.shape), y

    def _length(self) -> int:
        return self._fed["targets" if self.squared else "labels"].shape[1]

    def _losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        if self.squared:
            return F.mse_loss(outputs, y, reduction="none").mean(1)
        return F.cross_entropy(outputs, y, reduction="none")

    # --------------------------------------------------------------------------- update
    def _correct(self) -> None:
        """The corrections of this step, and whether it is due."""
        self.corrections.mul_(self.decays).add_(1 - self.decays)
        if any(group.apart for group in self.groups):
            trace = self.corrections[..., 0]
            self.corrections[..., SHARE] = trace / trace[:, :1]
        if any(group.row.method.period is not None for group in self.groups):
            age = (self.clock[0] - self.began + 1).unsqueeze(1)
            due = age % self.decays[..., DUE].clamp_min(1).long() == 0
            self.corrections[..., DUE] = due.double()

    def _update(self, group: MethodGroup, states: Tensor) -> None:
        """The rules on tensors [R, P], or on stretches of them where numbers differ by layer."""
        mine = slice(group.first, group.first + group.count)
        rules = self._rules[group.row.name]
        noise = self._noise(group) if group.noise else None
        given = [self._given(group, states, noise, *stretch) for stretch in self._stretches]
        if group.reduce is not None:
            traces = [rules["reduce"](**each) for each in given]
            self._put_eta(group, traces, given)
        for each, (where, _) in zip(given, self._stretches, strict=True):
            old = [each[name] for name in STATES[: len(group.states)]]
            weights, *new = (
                # A rule may return another state's old value, which will be overwritten.
                t.clone() if t is not own and any(t is other for other in old) else t
                for own, t in zip((None, *old), rules["update"](**each), strict=False)
            )
            for state, value in zip(old, new, strict=True):
                state.copy_(value)
            self.weights[mine, where] = weights

    def _given(
        self, group: MethodGroup, states: Tensor, noise: Tensor | None, where: slice, tensor: int
    ) -> dict[str, Any]:
        """What the rules read for a stretch of weights with the numbers of parameter `tensor`.

        Scalars [R, 1] are float64 until they meet a weight.
        """
        mine = slice(group.first, group.first + group.count)
        given: dict[str, Any] = dict.fromkeys(ARGUMENTS)
        given |= {"w": self.weights[mine, where], "g": self.gradients[mine, where]}
        given |= {name: self.hyper[mine, tensor, i : i + 1] for i, name in enumerate(NUMBERS)}
        given["due"] = self.corrections[mine, tensor, DUE : DUE + 1]
        for k in range(len(group.states)):
            given[STATES[k]] = states[k][:, where]
            given[CORRECTIONS[k]] = self.corrections[mine, tensor, k : k + 1]
        none = torch.zeros((), dtype=self.dtype, device=self.device)
        given["noise"] = none if noise is None else noise[:, where]
        return given

    def _put_eta(
        self, group: MethodGroup, traces: list[Tensor], given: list[dict[str, Any]]
    ) -> None:
        """Find η from the traces of all stretches."""
        mine = slice(group.first, group.first + group.count)
        shares: list[Any] = [1.0] * len(traces)
        if group.apart:
            columns = [self.corrections[mine, tensor, SHARE] for _, tensor in self._stretches]
            shares = [column.unsqueeze(1).to(self.dtype) for column in columns]
            traces = [trace / share for trace, share in zip(traces, shares, strict=True)]
        whole = torch.cat(traces, 1) if len(traces) > 1 else traces[0]
        eta = self._eta(group.row.method.phases[0], whole)
        for each, share, (where, _) in zip(given, shares, self._stretches, strict=True):
            each["eta"] = eta * share if eta.shape[1] == 1 else eta[:, where]

    def _noise(self, group: MethodGroup) -> Tensor:
        """The perturbations [R, P] of this step, drawn for several steps at a time."""
        now = int(self.clock[0])
        first, block = self._drawn.get(group.first, (-1, None))
        if block is None or not 0 <= now - first < len(block):
            ahead = philox.steps_ahead(group.count * self.weights.shape[1])
            seeds = self.seeds[group.first : group.first + group.count].repeat(ahead)
            steps = torch.arange(now, now + ahead, device=self.device)
            steps = steps.repeat_interleave(group.count).unsqueeze(1)
            parts = [
                philox.normal(shape, seeds, i, steps, self.device, self.dtype).reshape(
                    len(seeds), -1
                )
                for i, shape in enumerate(self.shapes)
            ]
            first, block = now, torch.cat(parts, 1).view(ahead, group.count, -1)
            self._drawn[group.first] = first, block
        return block[now - first]

    def _eta(self, phase: Phase, trace: Tensor) -> Tensor:
        least = tiny(self.dtype)
        if phase.reduce == "max":
            return trace.amax(1, keepdim=True).abs().clamp_min(least)
        rows = int(self._row_of[-1]) + 1
        squares = torch.zeros(len(trace), rows, dtype=torch.float64, device=self.device)
        squares.index_add_(1, self._row_of, trace.double().square())
        return squares.sqrt().to(self.dtype).clamp_min(least).index_select(1, self._row_of)


def _rules(method: Method) -> dict[str, Callable[..., Any]]:
    """A method's rules as the kernels have them, for tensors."""
    found: dict[str, Any] = dict(FUNCTIONS)
    for stage in ("reduce", "update") if reduces(method) else ("update",):
        exec(source(method, stage, "torch"), found)
    return found


def _stretches(shapes: Sequence[tuple[int, ...]], numbers: NDArray[Any]) -> list[tuple[slice, int]]:
    """Stretches of weights with the same numbers [R, tensors, ...], each with its first tensor."""
    found: list[tuple[slice, int]] = []
    at = 0
    for tensor, shape in enumerate(shapes):
        end = at + math.prod(shape)
        if found and (numbers[:, tensor] == numbers[:, found[-1][1]]).all():
            found[-1] = slice(found[-1][0].start, end), found[-1][1]
        else:
            found.append((slice(at, end), tensor))
        at = end
    return found


def _row_numbers(shapes: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """The row of each parameter: all weights into one output unit; a vector is one row."""
    numbers, rows = [], 0
    for shape in shapes:
        count = shape[0] if len(shape) > 1 else 1
        numbers.append(rows + torch.arange(count).repeat_interleave(math.prod(shape) // count))
        rows += count
    return torch.cat(numbers).to(device)


# -------------------------------------------------------------------------------- forward
def forward(
    model: nn.Module, params: Sequence[Tensor], x: Tensor, zeros: list[Tensor] | None = None
) -> Tensor:
    """The outputs [R, outputs] of R networks for one input [R, ...] each.

    Plain sequences of layers become batched products; other modules go through ``torch.vmap``.
    `params` have a leading dimension of runs; `zeros` receives which outputs [R, ...] of each ReLU
    are zero.
    """
    if type(model) is not nn.Sequential or not all(_is_known(m) for m in model):
        return _vmapped(model, params, x, zeros)
    left = iter(params)
    for module in model:
        if isinstance(module, nn.Linear):
            weight = next(left)
            bias = next(left) if module.bias is not None else None
            x = torch.bmm(weight, x.unsqueeze(2)).squeeze(2)
            x = x if bias is None else x + bias
        elif isinstance(module, nn.Conv2d):
            filters = next(left)
            x = _convolve(x, filters, next(left) if module.bias is not None else None)
        elif isinstance(module, nn.Flatten):
            x = x.flatten(1)
        else:  # acts on every run alike
            x = module(x)
            if zeros is not None and isinstance(module, nn.ReLU):
                zeros.append((x == 0).flatten(1))
    return x


def _vmapped(
    model: nn.Module, params: Sequence[Tensor], x: Tensor, zeros: list[Tensor] | None
) -> Tensor:
    """The same through ``torch.vmap``."""
    names = [name for name, _ in model.named_parameters()]

    def one(parameters: tuple[Tensor, ...], sample: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        named = dict(zip(names, parameters, strict=True))
        with zero_outputs(model, zeros is not None) as found:
            outputs = functional_call(model, named, (sample.unsqueeze(0),)).squeeze(0)
        return outputs, tuple(found)

    outputs, masks = torch.vmap(one)(tuple(params), x)
    if zeros is not None:
        zeros.extend(masks)
    result: Tensor = outputs
    return result


@contextmanager
def zero_outputs(model: nn.Module, active: bool = True) -> Iterator[list[Tensor]]:
    """Collect which outputs of every ReLU are zero, one vector for each."""
    masks: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        masks.append((output == 0).flatten())

    relus = [m for m in model.modules() if isinstance(m, nn.ReLU)] if active else []
    handles = [module.register_forward_hook(note) for module in relus]
    try:
        yield masks
    finally:
        for handle in handles:
            handle.remove()


def _is_known(module: nn.Module) -> bool:
    """Whether a layer is PyTorch's own, with nothing added, and has a batched form here."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return False
    if type(module) is nn.Conv2d:
        plain = (module.stride, module.padding, module.dilation, module.groups)
        return plain == ((1, 1), (0, 0), (1, 1), 1)
    if type(module) is nn.Flatten:
        return (module.start_dim, module.end_dim) == (1, -1)
    if type(module) is nn.MaxPool2d:
        return not module.return_indices
    if type(module) is nn.LayerNorm:
        return not module.elementwise_affine and len(module.normalized_shape) == 1
    return type(module) in (nn.Linear, nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Identity)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve each run's image with its own filters, as one batched product of patches."""
    runs, filters, channels, height, width = weight.shape
    windows = x.unfold(2, height, 1).unfold(3, width, 1)  # [R, channels, rows, columns, h, w]
    patches = windows.permute(0, 1, 4, 5, 2, 3).reshape(runs, channels * height * width, -1)
    found = torch.bmm(weight.flatten(2), patches)
    found = found if bias is None else found + bias.unsqueeze(2)
    return found.view(runs, filters, x.shape[2] - height + 1, x.shape[3] - width + 1)
