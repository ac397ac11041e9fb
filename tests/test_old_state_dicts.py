"""State dicts: those of earlier versions load, and what is refused changes nothing."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import assert_close, assert_equal, every_method, weights
from tests.state_dicts import SAVED_AFTER, decode, model, steps, variants
from upgd import SGDW, UPGD
from upgd.optim.registry import METHODS, Row
from upgd.rules.vocabulary import HYPERPARAMETERS

SAVED = json.loads((Path(__file__).parent / "data" / "state_dicts_0.1.0.json").read_text())
VARIANTS = {name: (row, arguments) for name, row, arguments in variants()}


@pytest.mark.parametrize("name", [name for name in SAVED if name != "version"])
def test_what_version_0_1_0_saved_goes_on(name: str) -> None:
    """As a run that was never interrupted; rounding differs between machines."""
    row, arguments = VARIANTS[name]
    for path in ({}, {"foreach": False}):
        resumed, never = model(), model()
        resumed.load_state_dict(decode(SAVED[name]["weights"]))
        opt = row.make(resumed, **{**arguments, "seed": 1}, **path)
        opt.load_state_dict(decode(SAVED[name]["dict"]))
        for own in opt.param_groups:
            assert own.keys() >= opt.defaults.keys() - {"differentiable"}  # PyTorch's own
            assert own["seed"] == arguments["seed"]
            assert own["noise_step"] == SAVED_AFTER
        steps(row, opt, resumed, SAVED_AFTER, SAVED_AFTER + 3)
        other = row.make(never, **arguments, **path)
        steps(row, other, never, 0, SAVED_AFTER + 3)
        assert_close(weights(resumed), weights(never), rtol=1e-4, atol=1e-5)
        start = list(decode(SAVED[name]["weights"]).values())
        assert all(not torch.equal(a, b) for a, b in zip(weights(resumed), start, strict=True))


def test_every_method_of_that_version_is_there() -> None:
    assert set(VARIANTS) >= SAVED.keys() - {"version"}


class Later(UPGD):
    """A version of UPGD to come, with one more option."""

    def __init__(self, params: Any, cautious: float = 0.25, **arguments: Any) -> None:
        self._cautious = cautious
        super().__init__(params, **arguments)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.defaults.setdefault("cautious", self._cautious)
        super().add_param_group(param_group)


def test_a_default_that_was_added_later() -> None:
    """An older dict takes it from the optimizer at hand; a dict that has it decides."""
    for given, expected in (({}, 0.25), ({"cautious": 0.5}, 0.5)):
        net = model()
        opt = Later(net.parameters(), **given)
        assert opt.param_groups[0]["cautious"] == expected
        opt.load_state_dict(decode(SAVED["upgd"]["dict"]))
        assert opt.param_groups[0]["cautious"] == expected
        saved = opt.state_dict()
        other = Later(model().parameters(), cautious=9.0)
        other.load_state_dict(saved)
        assert other.param_groups[0]["cautious"] == expected
    groups = [{"params": [p], "cautious": k} for k, p in enumerate(model().parameters())]
    own = Later(groups)
    old = UPGD([{"params": [p]} for p in model().parameters()])
    own.load_state_dict(old.state_dict())
    assert [group["cautious"] for group in own.param_groups] == [0, 1, 2, 3]


def test_a_hyperparameter_that_was_added_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named in ``Method.added``, it may be missing; unnamed, the dict is another optimizer's."""
    from dataclasses import replace

    from upgd.optim import perturbed

    hyper = (*perturbed.SGDW_METHOD.hyper, "kappa")
    for added in (True, False):
        names = frozenset({"kappa"} if added else ())
        method = replace(perturbed.SGDW_METHOD, hyper=hyper, added=names)

        class Pulled(SGDW):
            def __init__(self, params: Any, kappa: float = 0.1, _method: Any = method) -> None:
                super(SGDW, self).__init__(
                    params, _method, {"lr": 0.1, "weight_decay": 0.0, "kappa": kappa}
                )

        opt = Pulled(model().parameters())
        if added:
            opt.load_state_dict(decode(SAVED["sgdw"]["dict"]))
            assert opt.param_groups[0]["kappa"] == 0.1
            assert opt.param_groups[0]["weight_decay"] == 0.001
        else:
            with pytest.raises(ValueError, match="another optimizer's; its groups lack kappa"):
                opt.load_state_dict(decode(SAVED["sgdw"]["dict"]))


@every_method
def test_other_optimizers_dicts_are_refused(row: Row) -> None:
    """Those of all methods with other hyperparameters or states."""
    for other, entry in SAVED.items():
        if other == "version" or "noise" in other:
            continue
        theirs = METHODS[other]
        same = set(theirs.method.hyper) == set(row.method.hyper) and theirs.states == row.states
        if same and ("gates" in theirs.needs) == ("gates" in row.needs):
            continue
        opt = row.make(model())
        with pytest.raises(ValueError, match=r"another (model's or )?optimizer's"):
            opt.load_state_dict(decode(entry["dict"]))
        assert not opt.state


# --------------------------------------------------------------------------- malformed
def group(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda saved: saved["param_groups"][-1].update(values)


def last_state(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda saved: saved["state"][3].update(values)


MALFORMED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "negative lr": group(lr=-1.0),
    "lr not a number": group(lr=math.nan),
    "lr in words": group(lr="fast"),
    "lr a tensor that is not a number": group(lr=torch.tensor(math.nan)),
    "decay of one": group(beta_utility=1.0),
    "infinite sigma": group(sigma=math.inf),
    "seed in words": group(seed="seven"),
    "no seed": group(seed=None),
    "negative seed": group(seed=-1),
    "noise_step in words": group(noise_step="3"),
    "negative noise_step": group(noise_step=-2),
    "switch in words": group(maximize="no"),
    "protect in words": group(protect="no"),
    "vector step": last_state(step=torch.tensor([3, 3])),
    "negative step": last_state(step=torch.tensor(-1)),
    "half a step": last_state(step=torch.tensor(2.5)),
    "step in words": last_state(step="3"),
    "more steps than attempts": last_state(step=torch.tensor(9)),
    "no attempts": lambda saved: saved["state"][3].pop("attempts"),
    "utility of NaN": last_state(utility=torch.full((1,), math.nan)),
    "infinite utility": last_state(utility=torch.full((1,), math.inf)),
    "utility of integers": last_state(utility=torch.ones(1, dtype=torch.int64)),
    "utility that is a list": last_state(utility=[0.0]),
    "utility on meta": last_state(utility=torch.zeros(1, device="meta")),
    "utility of another shape": last_state(utility=torch.zeros(7)),
    "a state that is a number": lambda saved: saved["state"].update({3: 4.0}),
    "a state of nobody": lambda saved: saved["state"].update({17: saved["state"][3]}),
    "no groups": lambda saved: saved.pop("param_groups"),
    "no states": lambda saved: saved.pop("state"),
    "a group that is a list": lambda saved: saved["param_groups"].__setitem__(-1, [1]),
    "one group too many": lambda saved: saved["param_groups"].append(saved["param_groups"][0]),
    "one group too few": lambda saved: saved["param_groups"].pop(),
    "one parameter too many": lambda saved: saved["param_groups"][-1]["params"].append(9),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("how", MALFORMED)
@pytest.mark.parametrize("fused", [False, True])
def test_a_refused_dict_changes_nothing(how: str, fused: bool) -> None:
    if fused:
        pytest.importorskip("numba")
    row = METHODS["upgd"]

    def make() -> tuple[nn.Module, UPGD]:
        net = model()
        some = list(net.parameters())
        groups = [{"params": some[:2]}, {"params": some[2:], "lr": 0.02}]
        opt = UPGD(groups, seed=5, fused=fused)
        steps(row, opt, net, 0, 2)
        return net, opt

    net, opt = make()
    before = copy.deepcopy(opt.state_dict())
    saved = copy.deepcopy(opt.state_dict())
    saved["param_groups"][0]["lr"] = 0.5  # valid, and must not be loaded either
    saved["state"][0]["utility"].fill_(3.0)
    MALFORMED[how](saved)
    with pytest.raises((ValueError, TypeError)) as caught:
        opt.load_state_dict(saved)
    assert "\n" not in str(caught.value)
    assert same(opt.state_dict(), before)
    other_net, other = make()
    steps(row, opt, net, 2, 4)
    steps(row, other, other_net, 2, 4)
    assert_equal(weights(net), weights(other_net))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@every_method
def test_tensor_step_sizes_are_checked(row: Row, value: float) -> None:
    with pytest.raises(ValueError, match=r"lr must be a finite number >= 0, got tensor"):
        row.make(model(), lr=torch.tensor(value))
    opt = row.make(model(), lr=torch.tensor(0.1))
    with pytest.raises(ValueError, match="lr must be"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": torch.tensor(value)})


def test_a_hook_that_spoils_the_dict() -> None:
    """What is loaded is checked, not what was handed over."""
    net = model()
    opt = UPGD(net.parameters())
    steps(METHODS["upgd"], opt, net, 0, 1)
    before = copy.deepcopy(opt.state_dict())

    def spoil(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "param_groups": [{**given["param_groups"][0], "lr": -3.0}]}

    hook = opt.register_load_state_dict_pre_hook(spoil)
    with pytest.raises(ValueError, match=r"lr must be .* group 0 of the state dict"):
        opt.load_state_dict(opt.state_dict())
    assert same(opt.state_dict(), before)
    hook.remove()
    opt.load_state_dict(before)


def test_the_vocabulary_covers_all_hyperparameters() -> None:
    assert all(name in HYPERPARAMETERS for row in METHODS.values() for name in row.method.added)
