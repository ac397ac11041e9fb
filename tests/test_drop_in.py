"""What frameworks do to optimizers: keys in groups, sequences of their own, schedulers, hooks."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from tests.cases import (
    assert_close,
    assert_equal,
    batches,
    every_method,
    loss_of,
    network,
    train,
    weights,
)
from upgd import PGD, UPGD, AdaUPGD, ShrinkAndPerturb, StreamingEWC
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
        return row.optimizer(groups, seed=3)

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
