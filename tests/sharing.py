"""What each process of a distributed test runs: ``python -m tests.sharing RANK WORLD FOLDER NAME``.

Results go to files in FOLDER, where :mod:`tests.test_distributed` compares them with one process.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import upgd
from upgd.optim.noise import PhiloxNoise

DOUBLE = torch.float64
STEPS = 4
SAMPLES = 8  # per step, over all processes
COMMON: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "beta_utility": 0.7}
METHODS: dict[str, tuple[type, dict[str, Any]]] = {
    "upgd": (upgd.UPGD, COMMON),
    "upgd-local": (upgd.UPGD, {**COMMON, "scaling": "local"}),
    "upgd-2nd": (upgd.UPGD, {**COMMON, "order": 2}),
    "upgd-momentum": (upgd.UPGD, {**COMMON, "momentum": 0.9}),
    "ada-upgd": (upgd.AdaUPGD, COMMON),
    "feature-upgd": (upgd.FeatureUPGD, COMMON),
    "feature-upgd-local": (upgd.FeatureUPGD, {**COMMON, "scaling": "local"}),
    "s-rwalk": (upgd.StreamingRWalk, {"lr": 0.05}),
}


def network() -> nn.Sequential:
    """Rows that four processes cannot share evenly; the last layer's leave one without any."""
    torch.manual_seed(3)
    layers = nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)
    return nn.Sequential(*layers).to(DOUBLE)


def stream(steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        x = torch.randn(SAMPLES, 5, generator=generator, dtype=DOUBLE)
        yield x, torch.randn(SAMPLES, 3, generator=generator, dtype=DOUBLE)


def arguments(name: str, model: nn.Module, sigma: float, **more: Any) -> dict[str, Any]:
    cls, given = METHODS[name]
    given = {**given, **more}
    if cls is upgd.StreamingRWalk:
        return given
    if issubclass(cls, upgd.FeatureUPGD):
        given["features"] = upgd.Features(model)
    return {**given, "sigma": sigma}


def train(
    model: nn.Module,
    opt: Any,
    share: Callable[[Tensor], Tensor] = lambda t: t,
    steps: int = STEPS,
    skip: int = 0,
    quiet: bool = False,
) -> None:
    """Mean squared error, or with `quiet` a loss whose gradients are zero: noise alone moves."""
    for place, (x, y) in enumerate(stream(steps)):
        if place < skip:
            continue
        opt.zero_grad()
        loss = (model(share(x)) - share(y)).square().mean() * (0.0 if quiet else 1.0)
        inner = getattr(opt, "order", 1)
        opt.backward(loss) if inner == 2 else loss.backward()
        opt.step()


def alone(name: str, sigma: float, quiet: bool = False, **more: Any) -> list[Tensor]:
    """The weights that one process gets."""
    model = network()
    cls, _ = METHODS[name]
    noise = {} if name == "s-rwalk" else {"noise": PhiloxNoise()}
    opt = cls(model.parameters(), **arguments(name, model, sigma, seed=1, **noise, **more))
    train(model, opt, quiet=quiet)
    return [p.detach() for p in model.parameters()]


# -------------------------------------------------------------------------- wrappers
def ddp(name: str, sigma: float) -> tuple[nn.Module, Any]:
    model = network()
    noise = {} if name == "s-rwalk" else {"noise": PhiloxNoise()}
    given = arguments(name, model, sigma, seed=1 + dist.get_rank(), **noise)
    return DistributedDataParallel(model), METHODS[name][0](model.parameters(), **given)


def zero(name: str, sigma: float) -> tuple[nn.Module, Any]:
    model = network()
    cls, _ = METHODS[name]
    given = arguments(name, model, sigma, seed=1 + dist.get_rank())
    return DistributedDataParallel(model), ZeroRedundancyOptimizer(model.parameters(), cls, **given)


def fsdp1(name: str, sigma: float) -> tuple[nn.Module, Any]:
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(network(), use_orig_params=True, device_id=cpu)
    given = arguments(name, model, sigma, seed=1 + dist.get_rank())
    return model, METHODS[name][0](model.parameters(), **given)


def fsdp2(name: str, sigma: float) -> tuple[nn.Module, Any]:
    model = network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    given = arguments(name, model, sigma, seed=1 + dist.get_rank())
    return model, METHODS[name][0](model.parameters(), **given)


WRAPPERS = {"ddp": ddp, "zero": zero, "fsdp1": fsdp1, "fsdp2": fsdp2}


def whole(model: nn.Module) -> list[Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return [p.detach().clone() for p in model.parameters()]
    return [
        p.full_tensor().detach() if isinstance(p, DTensor) else p.detach().clone()
        for p in model.parameters()
    ]


def share(t: Tensor) -> Tensor:
    """This process's samples."""
    return t.chunk(dist.get_world_size())[dist.get_rank()]


# ----------------------------------------------------------------------------- tasks
def methods(folder: Path) -> dict[str, Any]:
    """Every wrapper with every method; without noise, with noise, and noise alone."""
    found: dict[str, Any] = {}
    for wrapper, make in WRAPPERS.items():
        for name in METHODS:
            for case, sigma in (("still", 0.0), ("noisy", 0.1), ("noise", 0.1)):
                if name == "s-rwalk" and case != "still":
                    continue
                key = f"{wrapper}/{name}/{case}"
                try:
                    model, opt = make(name, sigma)
                    train(model, opt, share, quiet=case == "noise")
                    found[key] = whole(model)
                except TypeError as error:
                    found[key] = str(error)
    return found


def resharding(folder: Path) -> dict[str, Any]:
    """Take up a checkpoint of another number of processes, go on, and leave one.

    All processes see the same samples: then the mean of their gradients is exact.
    """
    found = {}
    size = dist.get_world_size()
    for name in ("upgd", "ada-upgd", "upgd-momentum", "feature-upgd"):
        for taken, before in ((folder / f"{name}-{n}", n) for n in (1, 2) if n * 2 == size):
            model, opt = fsdp2(name, 0.1)
            _load(model, opt, taken)
            train(model, opt, steps=2 * size, skip=2 * before)
            found[name] = whole(model)
            _save(model, opt, folder / f"{name}-{size}")
        model, opt = fsdp2(name, 0.1)
        train(model, opt, steps=2 * size)
        found[f"{name}/straight"] = whole(model)
        if size == 1:
            _save(model, opt, folder / f"{name}-1")
    return found


def _save(model: nn.Module, opt: Any, path: Path) -> None:
    weights, states = get_state_dict(model, opt)
    dcp.save({"model": weights, "opt": states}, checkpoint_id=path)


def _load(model: nn.Module, opt: Any, path: Path) -> None:
    weights, states = get_state_dict(model, opt)
    dcp.load({"model": weights, "opt": states}, checkpoint_id=path)
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=states)


TASKS = {"methods": methods, "resharding": resharding}


def main() -> None:
    rank, world, folder, name = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    group = folder / f"group-{name}-{world}"
    dist.init_process_group("gloo", f"file://{group}", rank=rank, world_size=world)
    found = TASKS[name](folder)
    torch.save(found, folder / f"{name}-{world}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
