"""Whether a stack can run a user's network: found out on two copies and two samples."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from upgd.engine.general import forward
from upgd.engine.packing import beside
from upgd.networks import Network, build, get
from upgd.streams import Problem
from upgd.text import error_line


def why_not_stacked(problem: Problem, device: str) -> str:
    """Why the general stack cannot run the problem's network; empty if it can."""
    if problem.input_norm:
        return "stacks of tensors do not normalise inputs online"
    if not isinstance(problem.network, str) or problem.network == "cnn":
        return ""
    return _why_not(get(problem.network), *problem.interface, device)


@lru_cache(64)
def _why_not(network: Network, shape: tuple[int, ...], outputs: int, device: str) -> str:
    models = [build(network.name, seed, shape=shape, outputs=outputs).to(device) for seed in (0, 1)]
    name = f"network {network.name!r}"
    params = list(models[0].parameters())
    if any(p.dtype != torch.float32 for p in params):
        return f"{name} has parameters that are not float32"
    if any(p.numel() == 0 for p in params):
        return f"{name} has empty parameters"
    if not all(p.requires_grad for p in params):
        return f"{name} has parameters that are not trained"
    if any(len(list(m.parameters())) != len(params) for m in models):
        return f"{name} has other parameters for another seed"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, *shape, generator=generator).to(device)
    with torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []):
        try:
            return _compared(name, models, x)
        except Exception as error:
            return f"{name} does not run under torch.vmap: {error_line(error)}"


def _compared(name: str, models: list[nn.Module], x: Tensor) -> str:
    """Outputs and gradients of both modules by themselves and in a stack."""
    alone = []
    for model, sample in zip(models, x, strict=True):
        before, random = _kept(model), _random(x)
        outputs = model(sample.unsqueeze(0))
        if not all(torch.equal(a, b) for a, b in zip(_random(x), random, strict=True)):
            return f"{name} draws random numbers, as dropout does"
        if not _same(before, _kept(model)):
            return f"{name} changes its buffers or attributes when it is called"
        mine = list(model.parameters())
        alone.append([outputs, *torch.autograd.grad(outputs.square().sum(), mine)])
    params = [
        torch.stack(both).detach().requires_grad_()
        for both in zip(*(model.parameters() for model in models), strict=True)
    ]
    with _no_waiting(x.device):
        outputs = forward(models[0], params, x)
        stacked = [outputs, *torch.autograd.grad(outputs.square().sum(), params)]
    for number, own in enumerate(alone):
        for one, all_ in zip(own, stacked, strict=True):
            if not torch.allclose(one, all_[number].reshape(one.shape), rtol=1e-3, atol=1e-5):
                return f"{name} gives other results under torch.vmap"
    return ""


def _random(x: Tensor) -> list[Tensor]:
    on_gpu = [torch.cuda.get_rng_state(x.device)] if x.is_cuda else []
    return [torch.random.get_rng_state(), *on_gpu]


def _kept(model: nn.Module) -> dict[str, Any]:
    """Copies of everything that a call may change."""
    return copy.deepcopy({**dict(model.named_buffers()), **beside(model)})


def _same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    if before.keys() != after.keys():
        return False
    return all(
        torch.equal(value, after[key]) if isinstance(value, Tensor) else value == after[key]
        for key, value in before.items()
    )


@contextmanager
def _no_waiting(device: torch.device) -> Iterator[None]:
    """Raise where a CUDA graph could not be captured: values that are read back."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
