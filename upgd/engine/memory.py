"""How much memory runs of a stack take, and so how many fit.

The estimate counts what the stacks allocate, at their worst moment: numbers per weight, series,
samples of a chunk and of the next, and what is copied or computed on the way. It is an upper bound
within a factor of two, which the tests compare with what is really allocated.
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from upgd.engine import batched
from upgd.engine.dense import COLUMNS, Learner, MethodGroup
from upgd.engine.eager import Setting
from upgd.engine.feed import has_table
from upgd.engine.general import forward
from upgd.kernels.layered import KeptLayout
from upgd.kernels.layout import Layout
from upgd.kernels.rules import CORRECTIONS, NUMBERS, source
from upgd.monitor.measures import AT_A_TIME
from upgd.networks import build_for
from upgd.optim.registry import Row
from upgd.streams import Problem

SPARE = 0.1  # of the free memory stays free
BESIDE = 1 << 15  # bytes for what is small: hyperparameters, generators, Python's own

WORKSPACES = 80 << 20  # bytes that cuBLAS takes for itself, on two streams


@dataclass(frozen=True)
class Need:
    """Bytes that runs take in a stack: `shared` by all, and `each` of every run, in order.

    Where inputs are made for each chunk, `inputs` are those of a run with a seed of its own; chunks
    are so short that those of all seeds stay below `most_inputs`.
    """

    shared: int
    each: tuple[int, ...]
    inputs: int = 0
    most_inputs: int = 0

    def fitting(self, free: int) -> int:
        """How many of the runs, from the first on, fit into `free` bytes; one at least."""
        count = 0
        for count, sum_of_each in enumerate(accumulate(self.each), 1):
            inputs = min(count * self.inputs, self.most_inputs)
            if self.shared + sum_of_each + inputs > (1 - SPARE) * free:
                return max(1, count - 1)
        return count


def need(
    problem: Problem, settings: Sequence[Setting], stream: Any, steps: int, device: str
) -> Need:
    """The bytes that runs with these settings take, given the stream of any of them."""
    on_cuda, first = torch.device(device).type == "cuda", settings[0]
    kind = batched.kind_of(problem, first, device)
    if kind in ("dense", "layered"):
        assert not isinstance(problem.network, str)
        layout = Layout(tuple(problem.network))
        size = layout.size
        numbers = [_dense(layout, setting, on_cuda) for setting in settings]
        if kind == "layered":
            inputs = 2 * layout.sizes[0] if problem.input_norm else 0
            methods = [_row(setting).method for setting in settings]
            kept = [KeptLayout(method, layout).size for method in methods]
            numbers = [a + b + inputs for a, b in zip(numbers, kept, strict=True)]
    else:
        size, saved = _general_size(problem, stream.shape)
        numbers = [saved + size * _general(setting, on_cuda) for setting in settings]
    shared = 32 * size  # making initial weights takes wide numbers
    if on_cuda and kind == "general":
        shared += WORKSPACES
    if first.stride:  # singular values of some matrices at a time
        shared += 32 * AT_A_TIME * size
    windows = -(-steps // first.window)
    series = 8 * windows * (2 * len(COLUMNS) if on_cuda else len(COLUMNS) + len(batched.WEIGHED))
    length = 1 + batched.longest_chunk(problem, first, stream, steps)
    if kind == "general" and not on_cuda:
        length = min(length, 1 + batched.MOST_WITHOUT_WORD)
    features = math.prod(stream.shape)
    beside = series + BESIDE + _samples(stream, length, on_cuda)
    each = tuple(4 * count + beside for count in numbers)
    copies = 2 if on_cuda else 4  # on CPU this chunk and the next, each also stream by stream
    if has_table(stream):
        return Need(4 * len(stream.dataset) * features + shared, each)
    return Need(shared, each, copies * 4 * features * length, copies * batched.MOST_BYTES)


def free_bytes(device: str) -> int:
    """Memory that is free, on a GPU with what PyTorch holds and does not use."""
    where = torch.device(device)
    if where.type == "cuda":
        unused = torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)
        return int(torch.cuda.mem_get_info(where)[0]) + unused
    try:
        with open("/proc/meminfo") as file:
            facts = dict(line.split(":", 1) for line in file)
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 4 << 30


def make_room() -> None:
    """Let go of what stacks that ended have left: graphs and cycles of Python's objects."""
    gc.collect()
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # of a GPU that is lost, which the next attempt will find
            torch.cuda.empty_cache()


def is_lost(device: str) -> bool:
    """Whether a GPU serves this process no more, as after an illegal access, even another's."""
    if not device.startswith("cuda") or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is used up; PyTorch has several for that."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    signs = ("out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


# ------------------------------------------------------------------------- parts of a run
def _dense(layout: Layout, setting: Setting, on_cuda: bool) -> int:
    """Numbers of a dense learner."""
    group = MethodGroup(_row(setting), 0, 1, noise=True)
    kept = layout.size * (1 + len(group.states)) + (layout.units if group.features else 0)
    if not on_cuda:
        return kept
    changing = kept + 2 * layout.activations + 2 * layout.layers[0].outputs
    return 2 * changing + 8 * layout.units  # capturing a graph sets all that changes aside


def _row(setting: Setting) -> Row:
    return Learner(setting.method, setting.hyper, setting.seed).row


def _general(setting: Setting, on_cuda: bool) -> int:
    """Numbers per parameter: what is kept, and what comes up within a step."""
    learner = Learner(setting.method, setting.hyper, setting.seed)
    if on_cuda:  # gradients and what they are checked by; a graph's capture sets the rest aside
        return 3 + 2 * (1 + len(learner.row.states))
    # The rule's lines each leave a tensor until it returns; Philox has wide words.
    lines = source(learner.row.method, "update", "torch").splitlines()
    scalars = {*NUMBERS, *CORRECTIONS, "due"}
    tensors = 0
    for name, value in (line.split(" = ") for line in lines if " = " in line):
        if ".to(" in value or scalars.issuperset(re.findall(r"\b[a-z]\w*\b", value)):
            scalars.add(name.strip())
        else:
            tensors += 1
    return tensors + (8 if learner.is_perturbed else 6)


def _general_size(problem: Problem, shape: Sequence[int]) -> tuple[int, int]:
    """Parameters of a network, and numbers that it keeps of one sample for its gradient."""
    model = build_for(problem, 0)
    # A module of the user's may hold tensors that cannot meet those without memory.
    where = "meta" if problem.network == "cnn" or not isinstance(problem.network, str) else "cpu"
    params = [torch.zeros(1, *p.shape, device=where).requires_grad_() for p in model.parameters()]
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward(model, params, torch.zeros(1, *shape, device=where))
    return sum(p.numel() for p in params), 2 * sum(kept.values())


def _samples(stream: Any, length: int, on_cuda: bool) -> int:
    """Bytes of a run's labels or targets, and of what leads to its inputs."""
    whole = 8 if on_cuda else 24  # on CPU two chunks, and the stream's own wide numbers
    labels = stream.outputs * length * whole if stream.loss != "cross_entropy" else length * whole
    labels += length * whole  # rows of the table
    if not has_table(stream):
        return labels
    permutations = math.prod(stream.shape) * whole * 2 if stream.permutes_inputs else 0
    recent = 0 if on_cuda else 32 * min(len(stream.dataset), stream.task_length or length)
    return labels + permutations + recent
