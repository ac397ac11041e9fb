"""What each process of a distributed test runs: ``python -m tests.sharing RANK WORLD FOLDER``.

Results go to files in FOLDER, where :mod:`tests.test_distributed` compares them with one process.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.nn.parallel import DistributedDataParallel

import upgd
from upgd.optim.noise import GeneratorNoise, PhiloxNoise

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
def ddp(name: str, sigma: float, **more: Any) -> tuple[nn.Module, Any]:
    model = network()
    noise = {} if name == "s-rwalk" else {"noise": PhiloxNoise()}
    given = arguments(name, model, sigma, seed=1 + dist.get_rank(), **noise, **more)
    return DistributedDataParallel(model), METHODS[name][0](model.parameters(), **given)


def zero(name: str, sigma: float, **more: Any) -> tuple[nn.Module, Any]:
    model = network()
    cls, _ = METHODS[name]
    given = arguments(name, model, sigma, seed=1 + dist.get_rank(), **more)
    return DistributedDataParallel(model), ZeroRedundancyOptimizer(model.parameters(), cls, **given)


def fsdp1(
    name: str, sigma: float, use_orig_params: bool = True, **more: Any
) -> tuple[nn.Module, Any]:
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(network(), use_orig_params=use_orig_params, device_id=cpu)
    given = arguments(name, model, sigma, seed=1 + dist.get_rank(), **more)
    return model, METHODS[name][0](model.parameters(), **given)


def fsdp2(
    name: str, sigma: float, replicas: int = 1, dtype: torch.dtype = DOUBLE, **more: Any
) -> tuple[nn.Module, Any]:
    model = network().to(dtype)
    size = dist.get_world_size()
    shape = (size,) if replicas == 1 else (replicas, size // replicas)
    names = ("shard",) if replicas == 1 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    given = arguments(name, model, sigma, seed=1 + dist.get_rank(), **more)
    return model, METHODS[name][0](model.parameters(), **given)


CASES: dict[str, tuple[float, dict[str, Any]]] = {
    "still": (0.0, {}),
    "noisy": (0.1, {"nonfinite": "skip"}),  # another path: values are packed
    "noise": (0.1, {"foreach": False}),
}
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
def methods() -> dict[str, Any]:
    """Every wrapper with every method; without noise, with noise, and noise alone."""
    found: dict[str, Any] = {}
    for wrapper, make in WRAPPERS.items():
        for name in METHODS:
            for case, (sigma, more) in CASES.items():
                if name == "s-rwalk" and case != "still":
                    continue
                key = f"{wrapper}/{name}/{case}"
                try:
                    model, opt = make(name, sigma, **more)
                    train(model, opt, share, quiet=case == "noise")
                    found[key] = whole(model)
                except TypeError as error:
                    found[key] = str(error)
    return found


RESHARDED = ("upgd", "ada-upgd", "upgd-momentum", "feature-upgd")


def resharding(folder: Path) -> dict[str, Any]:
    """Take up a checkpoint of another number of processes, go on, and leave one.

    All processes see the same samples: then the mean of their gradients is exact.
    """
    found = {}
    size = dist.get_world_size()
    for name in RESHARDED:
        for taken, before in ((folder / f"{name}-{n}", n) for n in (1, 2) if n * 2 == size):
            model, opt = fsdp2(name, 0.1)
            _load(model, opt, taken)
            train(model, opt, steps=2 * size, skip=2 * before)
            found[f"resumed/{name}"] = whole(model)
            _save(model, opt, folder / f"{name}-{size}")
        model, opt = fsdp2(name, 0.1)
        train(model, opt, steps=2 * size)
        found[f"straight/{name}"] = whole(model)
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


def cases() -> dict[str, Any]:
    """Everything else."""
    found: dict[str, Any] = {}
    for name, case in {
        "nan/raise": lambda: not_finite("raise"),
        "nan/skip": lambda: not_finite("skip"),
        "tensor parallel/global": lambda: tensor_parallel("global"),
        "tensor parallel/local": lambda: tensor_parallel("local"),
        "replicated shards": lambda: trained(fsdp2("upgd-local", 0.1, replicas=2)),
        "fused/zero": lambda: trained(zero("upgd", 0.1, fused=True)),
        "fused/fsdp2": lambda: trained(fsdp2("upgd", 0.0, fused=True)),
        "fused/fsdp2/local": lambda: trained(fsdp2("upgd-local", 0.0, fused=True)),
        "one process's state": one_process_state,
        "accumulated": lambda: trained(fsdp2("feature-upgd", 0.1), pieces=2),
        **{f"16 bits/{option}": partial(sixteen_bits, option) for option in SIXTEEN},
        "seeds": default_noise,
        "pipeline": pipeline,
        "apart": apart,
        "utility": scaled_utilities,
        "flat parameters": lambda: refused(lambda: trained(fsdp1("upgd", 0.0, False))),
        "fused/noise": lambda: refused(lambda: trained(fsdp2("upgd", 0.1, fused=True))),
        "own noise": lambda: refused(lambda: trained(fsdp2("upgd", 0.1, noise=GeneratorNoise()))),
        "steps apart": steps_apart,
        **{f"one row/{option}": partial(one_row, True, option) for option in ONE_ROW},
        "one row/nan": one_row_not_finite,
        "partial gradients": partial(partial_gradients, True),
        **{f"few/{kind}": partial(few, True, kind) for kind in FEW},
        "few/utilities": few_utilities,
        "loaded": loaded,
        "biases": partial(biases, True),
        "left out": lambda: refused(
            lambda: trained(fsdp2("upgd", 0.0, process_group=False)),
        ),
        "flat rows": flat_rows,
        "two optimizers": two_optimizers,
        "sharded pipeline": sharded_pipeline,
    }.items():
        found[name] = case()
    return found


SIXTEEN: dict[str, dict[str, Any]] = {
    "rounded": {"rounding": "stochastic", "trace_dtype": torch.bfloat16},
    "packed": {"rounding": "stochastic", "trace_dtype": torch.bfloat16, "nonfinite": "skip"},
    "master": {"master_weights": True, "foreach": False},
}


def sixteen_bits(option: str, alone: bool = False) -> dict[str, list[Tensor]]:
    """Weights and traces of a model in bfloat16 under gradients that are given."""
    given = {"dtype": torch.bfloat16, **SIXTEEN[option]}
    if alone:
        model = network().to(given.pop("dtype"))
        more = {"noise": PhiloxNoise(), "seed": 1}
        opt = upgd.AdaUPGD(model.parameters(), **arguments("ada-upgd", model, 0.1, **given, **more))
    else:
        model, opt = fsdp2("ada-upgd", 0.1, **given)
    generator = torch.Generator().manual_seed(6)
    for _ in range(STEPS):
        for p in model.parameters():
            g = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = g if alone else distribute_tensor(g, p.device_mesh, p.placements)
        opt.step()
    kept = [t for p in model.parameters() for n, t in opt.state[p].items() if t.dim()]
    full = [t.full_tensor() if isinstance(t, DTensor) else t for t in kept]
    return {"weights": whole(model), "states": full}


def trained(pair: tuple[nn.Module, Any], pieces: int = 1) -> list[Tensor]:
    model, opt = pair
    for x, y in stream():
        opt.zero_grad()
        for part, target in zip(share(x).chunk(pieces), share(y).chunk(pieces), strict=True):
            ((model(part) - target).square().mean() / pieces).backward()
        opt.step()
    return whole(model)


def refused(run: Callable[[], Any]) -> str:
    try:
        run()
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return ""


def not_finite(nonfinite: str) -> dict[str, Any]:
    """One process has a NaN: none takes the step."""
    model, opt = fsdp2("upgd", 0.1, nonfinite=nonfinite)
    train(model, opt, share, steps=2)
    before, error = whole(model), ""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if dist.get_rank() == 1:
        next(model.parameters()).grad._local_tensor.fill_(torch.nan)
    try:
        opt.step()
    except FloatingPointError as raised:
        error = str(raised)
    after = whole(model)
    train(model, opt, share, steps=3, skip=2)
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return {"error": error, "same": same, "skipped": int(opt.skipped_steps), "then": whole(model)}


def tensor_parallel(scaling: str) -> list[Tensor]:
    """A layer cut by rows, the next by columns; all processes see all samples."""
    model = network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer, dim in ((model[0], 0), (model[2], 1)):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(dim)]))
        layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, [Replicate()]))
    for p in (model[4].weight, model[4].bias):
        cut = distribute_tensor(p.detach(), mesh, [Replicate()])
        setattr(model[4], "weight" if p is model[4].weight else "bias", nn.Parameter(cut))
    opt = upgd.UPGD(model.parameters(), sigma=0.1, scaling=scaling, **COMMON, seed=1)
    train(model, opt, lambda t: distribute_tensor(t, mesh, [Replicate()]))
    return whole(model)


def one_process_state() -> list[Tensor]:
    """The state dict of one process, taken up by shards."""
    plain = network()
    first = upgd.AdaUPGD(plain.parameters(), sigma=0.1, seed=1, noise=PhiloxNoise(), **COMMON)
    train(plain, first, steps=2)
    model, opt = fsdp2("ada-upgd", 0.1)
    for p, whole_p in zip(model.parameters(), plain.parameters(), strict=True):
        p.detach().copy_(distribute_tensor(whole_p.detach(), p.device_mesh, p.placements))
    opt.load_state_dict(first.state_dict())
    train(model, opt, share, skip=2)
    return whole(model)


def default_noise() -> list[Tensor]:
    """Replicas whose generators differ, with the default noise and the default seed."""
    model = network()
    torch.manual_seed(dist.get_rank())
    opt = upgd.UPGD(model.parameters(), sigma=0.1)
    train(DistributedDataParallel(model), opt, share)
    return whole(model)


def pipeline() -> dict[str, Any]:
    """Each process has layers of its own; one loss, computed by each for its layer."""
    rank = dist.get_rank()
    layers = pipeline_layers(dist.get_world_size())
    opt = upgd.UPGD(layers[rank].parameters(), sigma=0.1, seed=1 + rank, **COMMON)
    for x, _ in stream():
        opt.zero_grad()
        layers[rank](x).square().sum().backward()
        opt.step()
    return {"weights": [p.detach() for p in layers[rank].parameters()]}


def pipeline_layers(size: int) -> list[nn.Linear]:
    torch.manual_seed(4)
    return [nn.Linear(5, 2 + k, dtype=DOUBLE) for k in range(size)]


def apart() -> bool:
    """Processes that train models of their own, for different times."""
    rank = dist.get_rank()
    model, alike = network(), network()
    opt = upgd.UPGD(model.parameters(), sigma=0.1, seed=rank, process_group=False)
    train(model, opt, steps=1 + rank)
    other = upgd.UPGD(alike.parameters(), sigma=0.1, seed=rank, process_group=False)
    train(alike, other, steps=1 + rank)
    same = all(
        torch.equal(p, q) for p, q in zip(model.parameters(), alike.parameters(), strict=False)
    )
    return same and opt.param_groups[0]["seed"] == rank


def scaled_utilities() -> list[list[Tensor]]:
    found = []
    for name in ("upgd", "upgd-local"):
        model, opt = fsdp2(name, 0.0)
        train(model, opt, share)
        found.append([opt.scaled_utility(p).full_tensor() for p in model.parameters()])
    return found


def steps_apart() -> str:
    """A process that has taken a step which others have not."""
    model = network()
    opt = upgd.UPGD(model.parameters(), sigma=0.1)
    if dist.get_rank() == 0:
        for group in opt.param_groups:
            group["noise_step"] = 7
    return refused(lambda: train(model, opt))


# A parameter with one row lies on the first process whole; the others hold nothing of it.
ONE_ROW: dict[str, dict[str, Any]] = {
    "local": {"scaling": "local", "sigma": 0.1},
    "fused": {"fused": True, "sigma": 0.0},
    "fused/local": {"fused": True, "sigma": 0.0, "scaling": "local"},
    "fused/unprotected": {"fused": True, "sigma": 0.0, "protect": False},
}


def _critic(shared: bool, **given: Any) -> tuple[nn.Module, Any]:
    """A network with one output; with `fused`, nothing else is trained."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).to(DOUBLE)
    model[0].requires_grad_(not given.get("fused"))
    if shared:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif not given.get("fused"):
        given["noise"] = PhiloxNoise()
    return model, upgd.UPGD(model.parameters(), **COMMON, **given, seed=1)


def one_row(shared: bool, option: str) -> list[Tensor]:
    """All processes see all samples, as in the tasks below."""
    model, opt = _critic(shared, **ONE_ROW[option])
    _fit(model, opt)
    return whole(model)


def _fit(model: nn.Module, opt: Any, steps: int = STEPS) -> None:
    for x, _ in stream(steps):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()


def one_row_not_finite() -> tuple[str, int]:
    model, opt = _critic(True, **ONE_ROW["fused"])
    _fit(model, opt)
    for p in model[2].parameters():
        p.grad = torch.full_like(p, torch.nan)
    error = ""
    try:
        opt.step()
    except FloatingPointError as raised:
        error = str(raised)
    return error, opt.param_groups[0]["noise_step"]


def partial_gradients(shared: bool) -> list[Tensor]:
    """Every process has a summand of the gradient of a parameter that all hold."""
    generator = torch.Generator().manual_seed(6)
    values = torch.randn(40, 50, generator=generator, dtype=DOUBLE)
    size = dist.get_world_size() if shared else 1
    mesh = init_device_mesh("cpu", (size,)) if shared else None
    p = nn.Parameter(distribute_tensor(values, mesh, [Replicate()]) if shared else values)
    opt = upgd.UPGD([p], **COMMON, sigma=0.0, fused=True)
    for _ in range(STEPS):
        g = torch.randn(40, 50, generator=generator, dtype=DOUBLE)
        p.grad = DTensor.from_local(g / size, mesh, [Partial()]) if shared else g
        opt.step()
    return [local_p.detach() for local_p in ([p.full_tensor()] if shared else [p])]


FEW = ("one parameter", "groups")


def few(shared: bool, kind: str) -> list[Tensor]:
    """ZeRO where a process gets no parameter at all, or none of the first group."""
    torch.manual_seed(3)
    model: nn.Module = nn.Linear(5, 3, bias=kind == "groups", dtype=DOUBLE)
    groups = [{"params": [p], "lr": 0.1 / (k + 1)} for k, p in enumerate(model.parameters())]
    given = {"sigma": 0.1, "weight_decay": 0.1}
    if shared:
        opt: Any = ZeroRedundancyOptimizer(groups, upgd.UPGD, **given, seed=1 + dist.get_rank())
        model = DistributedDataParallel(model)
    else:
        opt = upgd.UPGD(groups, **given, seed=1, noise=PhiloxNoise())
    _fit(model, opt)
    return whole(model)


def few_utilities() -> list[float]:
    """The largest scaled utility, in float64, where some processes have none."""
    model = nn.Linear(5, 3, bias=False, dtype=DOUBLE)
    opt = ZeroRedundancyOptimizer(model.parameters(), upgd.UPGD, sigma=0.1)
    _fit(DistributedDataParallel(model), opt)
    return [float(u.max()) for u in opt.optim.scaled_utilities().values()]


def loaded() -> list[Tensor]:
    """Each process goes back to a state dict from before the first step, with its own seed."""
    model = network()
    opt = upgd.UPGD(model.parameters(), sigma=0.1, seed=1 + dist.get_rank())
    before, replica = opt.state_dict(), DistributedDataParallel(model)
    _fit(replica, opt)
    opt.load_state_dict(before)
    _fit(replica, opt)
    return whole(model)


def biases(shared: bool) -> list[Tensor]:
    """Utilities of features that are kept by their sharded biases, saved and loaded."""
    model = network()
    if shared:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    some = [p for name, p in model.named_parameters() if name.endswith("bias")]
    given = {} if shared else {"noise": PhiloxNoise()}
    opt = upgd.FeatureUPGD(some, **COMMON, sigma=0.0, features=upgd.Features(model), **given)
    _fit(model, opt)
    opt.load_state_dict(opt.state_dict())
    _fit(model, opt)
    return whole(model)


def flat_rows() -> str:
    model, opt = fsdp1("upgd", 0.0)
    train(model, opt, share)
    return refused(lambda: opt.reset(model.parameters(), rows=[0]))


class _Both(torch.optim.Optimizer):
    """Two optimizers as one, which every process has."""

    def __init__(self, *some: torch.optim.Optimizer) -> None:
        self.some = some
        super().__init__([p for opt in some for g in opt.param_groups for p in g["params"]], {})

    def step(self) -> None:  # type: ignore[override]
        for opt in self.some:
            opt.step()


def two_optimizers() -> bool:
    model = network()
    opt = upgd.UPGD(model[0].parameters(), sigma=0.1)
    _fit(DistributedDataParallel(model), _Both(opt, torch.optim.SGD(model[2:].parameters())))
    return opt._ranks.sharded


def sharded_pipeline() -> dict[str, Any]:
    """Two stages, each shared by half of the processes."""
    half = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("stage", "shard"))
    stage = dist.get_rank() // half
    layer = pipeline_layers(2)[stage]
    fully_shard(layer, mesh=mesh["shard"])
    opt = upgd.UPGD(layer.parameters(), sigma=0.1, seed=1, **COMMON)
    for x, _ in stream():
        opt.zero_grad()
        layer(x).square().sum().backward()
        opt.step()
    return {"stage": stage, "weights": whole(layer)}


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    group = folder / f"group-{world}"
    dist.init_process_group(
        "gloo", f"file://{group}", timedelta(minutes=2), rank=rank, world_size=world
    )
    found = resharding(folder)
    if world > 1:
        found |= {**methods(), **cases()}
    torch.save(found, folder / f"{world}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
