"""What frameworks do to optimizers: keys in groups, sequences of their own, schedulers, hooks."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

import upgd
from tests.cases import (
    assert_close,
    assert_equal,
    batches,
    every_method,
    every_rule,
    loss_of,
    network,
    provide,
    train,
    watching,
    weights,
)
from upgd import PGD, SGDW, UPGD, AdaUPGD, ShrinkAndPerturb, StreamingEWC
from upgd.optim.registry import METHODS, Row


# ----------------------------------------------------------------------- keys in groups
def as_transformers_does(model: nn.Module, decay: float = 0.0) -> list[dict[str, Any]]:
    """Two groups that say ``weight_decay``, whatever the optimizer."""
    some = list(model.named_parameters())
    decayed = [p for name, p in some if name.endswith("weight")]
    others = [p for name, p in some if name.endswith("bias")]
    return [
        {"params": decayed, "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]


LACKING = [name for name, row in METHODS.items() if "weight_decay" not in row.method.hyper]


@pytest.mark.parametrize("name", LACKING)
@pytest.mark.parametrize("where", ["same groups", "own groups"])
def test_keys_of_a_framework_round_trip(name: str, where: str) -> None:
    row, stream = METHODS[name], batches(4)

    def make(model: nn.Module, extra: bool) -> Any:
        groups = as_transformers_does(model)
        for group in groups:
            group["framework"] = {"tag": [1, 2]}
            if not extra:
                del group["weight_decay"], group["framework"]
        return row.optimizer(groups, seed=3, **watching(row, model))

    model = network()
    opt = make(model, extra=True)
    train(row, opt, model, stream[:2])
    other = copy.deepcopy(model)
    resumed = make(other, extra=where == "same groups")
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert resumed.param_groups[0]["weight_decay"] == 0.0
    assert resumed.param_groups[0]["framework"] == {"tag": [1, 2]}
    assert resumed.state_dict()["param_groups"] == opt.state_dict()["param_groups"]
    train(row, opt, model, stream[2:])
    train(row, resumed, other, stream[2:])
    assert_equal(weights(model), weights(other))


def test_another_optimizers_key_is_still_refused() -> None:
    decaying = ShrinkAndPerturb(network().parameters()).state_dict()
    with pytest.raises(ValueError, match=r"another optimizer's; its groups have weight_decay"):
        PGD(network().parameters()).load_state_dict(decaying)


def test_an_ignored_decay_is_told_once() -> None:
    with pytest.warns(UserWarning, match=r"StreamingEWC has no weight_decay: .*=0.1 .* ignored"):
        opt = StreamingEWC(as_transformers_does(network(), decay=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.add_param_group({"params": [nn.Parameter(torch.ones(1))], "weight_decay": 0.2})
        StreamingEWC(as_transformers_does(network()))  # a decay of zero says nothing
        UPGD(as_transformers_does(network(), decay=0.1))  # its own


# ------------------------------------------------------------------- numbers of others
class Listed(Sequence[float]):
    """As OmegaConf's ``ListConfig``: a sequence that is no list."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[float]:
        return iter(self.values)


@pytest.mark.parametrize(
    "betas",
    [Listed(0.8, 0.95), [0.8, 0.95], np.array([0.8, 0.95])],
    ids=["ListConfig", "list", "array"],
)
def test_betas_are_any_sequence_of_two(betas: Any) -> None:
    model = network()
    opt = AdaUPGD(model.parameters(), betas=betas)
    opt.add_param_group({"params": [nn.Parameter(torch.ones(1))], "betas": betas})
    saved = opt.state_dict()
    saved["param_groups"][0]["betas"] = betas
    opt.load_state_dict(saved)
    for found in (opt.defaults, *opt.param_groups):
        assert found["betas"] == (0.8, 0.95)
        assert [type(found["betas"]), *map(type, found["betas"])] == [tuple, float, float]
    pickle.loads(pickle.dumps(opt))


@pytest.mark.parametrize("betas", ["ab", {0: 0.9, 1: 0.9}, np.array(0.9), np.eye(2), ("0.9", 0.9)])
def test_what_is_no_pair_of_numbers(betas: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="betas must be two numbers"):
        AdaUPGD(network().parameters(), betas=betas)


@every_method
@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_numbers_of_numpy(row: Row, kind: Any) -> None:
    stream, models = batches(2), [network(), network()]
    for model, lr in zip(models, (kind(0.25), 0.25), strict=True):
        opt = row.make(model, lr=lr, seed=1)
        assert type(opt.param_groups[0]["lr"]) is type(opt.defaults["lr"]) is float
        train(row, opt, model, stream)
    assert_equal(*map(weights, models))


# ------------------------------------------------------------------ quantised models
@pytest.mark.parametrize("path", ["fused", "foreach", "single", "skip"])
def test_frozen_integers_among_the_parameters(path: str) -> None:
    """They are left alone, and count for the numbering of the noise."""
    if path == "fused":
        pytest.importorskip("numba")
    options: dict[str, Any] = {
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "single": {"foreach": False},
        "skip": {"nonfinite": "skip"},
    }[path]
    found = []
    for frozen in (torch.ones(4, 3, dtype=torch.int8), torch.ones(4, 3)):
        weight, bias = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(2))
        opt = UPGD([weight, nn.Parameter(frozen, requires_grad=False), bias], seed=2, **options)
        for _ in range(2):
            weight.grad, bias.grad = torch.ones(5), torch.ones(2)
            opt.step()
        assert torch.equal(frozen, torch.ones_like(frozen))
        found.append([weight.detach(), bias.detach()])
        opt.load_state_dict(opt.state_dict())
    assert_equal(*found)


def test_a_gradient_of_integers_is_an_error() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    opt = UPGD([weight])
    weight.grad = torch.ones(3, dtype=torch.int8)
    words = r"parameter 0 of group 0, .* has a gradient and is torch.int8; .* real floating-point"
    with pytest.raises(ValueError, match=words):
        opt.step()


# ------------------------------------------------------------------------- one cycle
PATHS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "single": {"foreach": False},
    "skip": {"nonfinite": "skip"},
    "fused": {"fused": True},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_cycle_is_that_of_sgd(path: str, momentum: float) -> None:
    """Without noise and gates UPGD is SGD; momentum comes from the scheduler, for both."""
    if path == "fused":
        pytest.importorskip("numba")
    found = []
    for cls, options in (
        (UPGD, {"sigma": 0.0, "protect": False, **PATHS[path]}),
        (torch.optim.SGD, {}),
    ):
        model = network(dtype=torch.float64)
        opt = cls(model.parameters(), lr=0.1, momentum=momentum, **options)
        scheduler = OneCycleLR(opt, max_lr=0.5, total_steps=8)
        for batch in batches(8, dtype=torch.float64):
            opt.zero_grad()
            loss_of(model, batch).backward()
            opt.step()
            scheduler.step()
        found.append(weights(model))
    assert_close(*found, rtol=1e-9, atol=1e-12)


def test_one_cycle_moves_the_first_of_betas() -> None:
    found = []
    for cls, options in (
        (AdaUPGD, {"sigma": 0.0, "protect": False, "weight_decay": 0.01}),
        (torch.optim.AdamW, {"weight_decay": 0.01}),
    ):
        model = network(dtype=torch.float64)
        opt = cls(model.parameters(), **options)
        scheduler = OneCycleLR(opt, max_lr=0.01, total_steps=6)
        for batch in batches(6, dtype=torch.float64):
            opt.zero_grad()
            loss_of(model, batch).backward()
            opt.step()
            scheduler.step()
        assert opt.param_groups[0]["betas"][0] != 0.9
        found.append(weights(model))
    assert_close(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["sgdw", "pgd", "s-ewc", "feature-upgd"])
@pytest.mark.parametrize("scheduler", [OneCycleLR, CyclicLR])
def test_methods_without_momentum_name_the_way_out(name: str, scheduler: Any) -> None:
    arguments: dict[str, Any] = {"max_lr": 0.1}
    arguments |= {"total_steps": 4} if scheduler is OneCycleLR else {"base_lr": 0.01}
    opt = METHODS[name].make(network())
    with pytest.raises(ValueError, match="cycle_momentum"):
        scheduler(opt, **arguments)
    scheduler(opt, cycle_momentum=False, **arguments)


def test_momentum_that_came_later_is_kept_in_checkpoints() -> None:
    stream, row = batches(6), METHODS["upgd"]
    model = network()
    opt = UPGD(model.parameters(), seed=1)
    train(row, opt, model, stream[:2])
    early = copy.deepcopy(opt.state_dict()), copy.deepcopy(model)
    opt.param_groups[0]["momentum"] = 0.9
    train(row, opt, model, stream[2:4])
    late = copy.deepcopy(opt.state_dict()), copy.deepcopy(model)
    train(row, opt, model, stream[4:])
    for (saved, then), at in ((early, 2), (late, 4)):
        for momentum in (0.0, 0.5):
            other = copy.deepcopy(then)
            resumed = UPGD(other.parameters(), momentum=momentum)
            resumed.load_state_dict(saved)
            resumed.param_groups[0]["momentum"] = 0.9
            train(row, resumed, other, stream[at:])
            assert_equal(weights(other), weights(model))


def test_a_refused_dict_brings_no_velocity() -> None:
    opt = UPGD(network().parameters())
    model = network()
    other = UPGD(model.parameters(), momentum=0.9)
    train(METHODS["upgd"], other, model, batches(1))
    saved = other.state_dict()
    saved["param_groups"][0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr must be"):
        opt.load_state_dict(saved)
    assert opt.method == METHODS["upgd"].method


# --------------------------------------------------------------------------- compile
@pytest.mark.parametrize(
    ("name", "path"),
    [("upgd", "foreach"), ("upgd-local", "single"), ("ada-upgd", "skip"), ("s-ewc", "foreach")],
)
def test_a_compiled_step_follows_a_scheduler(name: str, path: str) -> None:
    compile_under_a_schedule(METHODS[name], PATHS[path])


@pytest.mark.slow
@every_rule
@pytest.mark.parametrize("path", ["foreach", "single", "skip"])
def test_every_compiled_step_follows_a_scheduler(row: Row, path: str) -> None:
    compile_under_a_schedule(row, PATHS[path])


def compile_under_a_schedule(row: Row, path: dict[str, Any]) -> None:
    """Twelve step sizes, decays and betas: nothing is compiled after the first steps.

    How many graphs there are by then depends on PyTorch's version. The weights are the eager ones.
    """
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    models = [network(dtype=torch.float64) for _ in range(2)]
    optimizers = [row.make(model, seed=1, **path) for model in models]
    scalars = [nn.Parameter(torch.tensor(0.5, dtype=torch.float64)) for _ in models]
    for opt, scalar in zip(optimizers, scalars, strict=True):
        opt.add_param_group({"params": [scalar]})
    step = torch.compile(optimizers[0].step, backend=counter)
    compiled = []
    for k, batch in enumerate(batches(12, dtype=torch.float64)):
        for opt, model, scalar in zip(optimizers, models, scalars, strict=True):
            for group in opt.param_groups:
                group["lr"] = 0.001 * (12 - k)
                if "weight_decay" in group:
                    group["weight_decay"] = 0.01 * k
                if "betas" in group:
                    group["betas"] = (0.9 - 0.01 * k, 0.999)
            train(row, opt, model, [batch], step=lambda: None)
            provide(row, opt, model)
            scalar.grad = scalar.detach().clone()
            if "curvature" in row.needs and "gates" not in row.needs:
                scalar.curvature = torch.ones_like(scalar)
            step() if opt is optimizers[0] else opt.step()
        compiled.append(counter.frame_count)
    assert 0 < compiled[2] == compiled[-1]
    assert_close(*map(weights, models), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(*scalars, rtol=1e-8, atol=1e-10)


# ------------------------------------------------------- one optimizer per parameter
def step_in_backward(model: nn.Module, make: Callable[[nn.Parameter], Any]) -> list[Any]:
    """An optimizer for each parameter, stepped when its gradient is there."""
    optimizers = []
    for p in model.parameters():
        opt = make(p)

        def hook(p: torch.Tensor, opt: Any = opt) -> None:
            opt.step()
            p.grad = None

        p.register_post_accumulate_grad_hook(hook)
        optimizers.append(opt)
    return optimizers


LOCAL = {"lr": 0.1, "sigma": 0.0, "scaling": "local"}


@pytest.mark.parametrize("cls", [UPGD, AdaUPGD])
@pytest.mark.parametrize("by", ["hooks", "torch"])
def test_steps_in_a_backward_pass_are_those_after_it(cls: Any, by: str) -> None:
    models = [network(dtype=torch.float64) for _ in range(2)]
    if by == "hooks":
        step_in_backward(models[0], lambda p: cls([p], **LOCAL))
    else:
        optim = pytest.importorskip("torch.distributed.optim")
        optim._apply_optimizer_in_backward(cls, models[0].parameters(), LOCAL)
    opt = cls(models[1].parameters(), **LOCAL)
    for batch in batches(4, dtype=torch.float64):
        loss_of(models[0], batch).backward()
        opt.zero_grad()
        loss_of(models[1], batch).backward()
        opt.step()
    assert_close(*map(weights, models), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("fused", [False, True])
def test_one_eta_for_all_needs_all_gradients(fused: bool) -> None:
    if fused:
        pytest.importorskip("numba")
    model = network()
    step_in_backward(model, lambda p: UPGD([p], fused=fused))
    with pytest.raises(RuntimeError, match=r"UPGD: .*scaling='local', or call step\(\) after"):
        loss_of(model, batches(1)[0]).backward()


def test_optimizers_in_a_backward_pass_need_seeds_of_their_own() -> None:
    options: dict[str, Any] = {"lr": 0.1, "scaling": "local"}
    batch = batches(1)[0]
    model = network()
    step_in_backward(model, lambda p: UPGD([p], seed=7, **options))
    with pytest.raises(RuntimeError, match="seed=7 step inside one backward pass"):
        loss_of(model, batch).backward()
    for make in (
        lambda p: UPGD([p], **options),  # each draws a seed
        lambda p: UPGD([p], seed=7, **{**options, "sigma": 0.0}),  # no noise
    ):
        model = network()
        kept = step_in_backward(model, make)
        for _ in range(2):
            loss_of(model, batch).backward()
        assert all(int(opt.state[opt.param_groups[0]["params"][0]]["step"]) == 2 for opt in kept)


def test_two_models_with_one_seed_do_not_meet() -> None:
    kept = []
    for _ in range(2):
        lone = nn.Linear(3, 1, bias=False)
        kept.append((lone, step_in_backward(lone, lambda p: UPGD([p], seed=7, scaling="local"))))
        for model, _ in kept:
            model(torch.ones(1, 3)).sum().backward()


# ------------------------------------------------------------------ what groups spare
class TinyRMSNorm(nn.Module):
    """A normalisation that PyTorch does not know, as those of language models."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt()


class Words(nn.Module):
    """A small model with all that is spared, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4, padding_idx=2)
        self.bags = nn.EmbeddingBag(7, 4, mode="sum", padding_idx=2)
        self.norm = TinyRMSNorm(4)
        self.hidden = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU(), nn.LayerNorm(4))
        self.head = nn.Linear(4, 7)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.norm(self.words(x).mean(1) + self.bags(x))))


SPARED = {
    *("words.weight", "bags.weight", "norm.weight"),
    *("hidden.1.weight", "hidden.1.bias", "hidden.3.weight", "hidden.3.bias"),
}


def named(group: dict[str, Any]) -> set[str]:
    return set(group["param_names"])


def test_groups_spare_norms_and_embeddings() -> None:
    model = Words()
    groups = upgd.param_groups(model, lr=0.5, sigma=0.1)
    rest, spared = groups
    assert named(spared) == SPARED
    assert named(rest) == {"hidden.0.weight", "hidden.0.bias", "head.bias"}
    assert (rest["lr"], rest["sigma"], spared["lr"], spared["sigma"]) == (0.5, 0.1, 0.5, 0.0)
    assert (spared["protect"], spared["weight_decay"]) == (False, 0.0)
    opt = UPGD(groups, weight_decay=0.25)
    assert [group["weight_decay"] for group in opt.param_groups] == [0.25, 0.0]
    held = [p for group in opt.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(model.parameters()))
    model.bags.weight.grad = torch.ones(7, 4).to_sparse()
    with pytest.raises(TypeError, match=r"'bags.weight'"):  # errors name parameters
        opt.step()


def test_groups_of_choice() -> None:
    model = Words()
    everything, *none = upgd.param_groups(model, spare=())
    assert not none
    assert everything["params"] == list(model.parameters())
    rest, biases = upgd.param_groups(model, spare="biases", weight_decay=0.1)
    assert named(biases) == {"hidden.0.bias", "head.bias"}  # those of norms are norms
    assert (rest["weight_decay"], biases["weight_decay"]) == (0.1, 0.0)
    assert "sigma" not in biases
    all_kinds = upgd.param_groups(model, spare=("norms", "embeddings", "biases"))
    assert [len(group["params"]) for group in all_kinds] == [1, 2, 7]
    with pytest.raises(ValueError, match=r"spare must be some of .* got 'heads'"):
        upgd.param_groups(model, spare=("heads",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        upgd.param_groups(nn.ReLU())


@pytest.mark.parametrize(
    ("cls", "keys"),
    [
        (torch.optim.SGD, {"weight_decay"}),
        (PGD, {"sigma"}),
        (SGDW, {"weight_decay"}),
        (AdaUPGD, {"weight_decay", "sigma", "protect"}),
    ],
)
def test_groups_for_other_optimizers(cls: Any, keys: set[str]) -> None:
    groups = upgd.param_groups(Words(), optimizer=cls)
    assert groups[1].keys() - {"params", "param_names"} == keys
    cls(groups, lr=0.1)


@pytest.mark.parametrize("cls", [UPGD, AdaUPGD])
@pytest.mark.parametrize("spare", [True, False])
def test_padding_rows_stay_zero(cls: Any, spare: bool) -> None:
    torch.manual_seed(0)
    model = Words()
    model.head.weight = nn.Parameter(torch.randn(7, 4))  # a tied head moves the row itself
    params = upgd.param_groups(model) if spare else model.parameters()
    opt = cls(params, lr=0.01, sigma=0.1)
    for _ in range(3):
        opt.zero_grad()
        words = torch.tensor([[1, 2, 3], [4, 2, 2]])
        nn.functional.cross_entropy(model(words), torch.tensor([0, 1])).backward()
        opt.step()
    for layer in (model.words, model.bags):
        assert bool((layer.weight[2] == 0).all()) is spare  # else noise moves it
        assert bool((layer.weight[1] != 0).all())
