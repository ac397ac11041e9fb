"""State dicts: those of earlier versions load, and what is refused changes nothing."""

from __future__ import annotations

import copy
import json
import math
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import assert_close, assert_equal, every_method, weights
from tests.state_dicts import SAVED_AFTER, decode, model, steps, variants
from upgd import SGDW, UPGD, AdaUPGD
from upgd.optim.convention import ConventionWarning
from upgd.optim.registry import METHODS, Row
from upgd.optim.upgd import UtilityOptimizer
from upgd.rules.ops import sigmoid, sqrt
from upgd.rules.vocabulary import HYPERPARAMETERS, Method, Phase

SAVED = json.loads((Path(__file__).parent / "data" / "state_dicts_0.1.0.json").read_text())
VARIANTS = {name: (row, arguments) for name, row, arguments in variants()}


# ---------------------------------------------------------------- the rules of that version
# fmt: off
def gated(w: Any, g: Any, utility: Any, noise: Any, eta: Any,
          lr: Any, weight_decay: Any, sigma: Any) -> Any:
    return (1 - lr * weight_decay) * w - lr * ((g + sigma * noise) * sigmoid(utility / -eta))


def gated_noise(w: Any, g: Any, utility: Any, noise: Any, eta: Any,
                lr: Any, weight_decay: Any, sigma: Any) -> Any:
    return (1 - lr * weight_decay) * w - lr * (g + sigma * noise * sigmoid(utility / -eta))


def gated_adam(w: Any, utility: Any, first_moment: Any, second_moment: Any, noise: Any, eta: Any,
               c_first_moment: Any, c_second_moment: Any,
               lr: Any, weight_decay: Any, sigma: Any, eps: Any) -> Any:
    direction = first_moment / c_first_moment / (sqrt(second_moment / c_second_moment) + eps)
    gate = sigmoid(utility / -eta)
    return (1 - lr * weight_decay) * w - lr * ((direction + sigma * noise) * gate)
# fmt: on


def before(row: Row) -> Row:
    """A row with the paper's rules, in which a weight without utility takes half of the step."""
    kind = row.optimizer
    if not issubclass(kind, UtilityOptimizer):
        return row

    class Before(kind):  # type: ignore[valid-type, misc]
        @staticmethod
        def build(scaling: Any, order: int, protect: bool) -> Method:
            method = kind.build(scaling, order, protect)
            rule = gated_adam if kind is AdaUPGD else gated if protect else gated_noise
            return replace(method, phases=(*method.phases[:-1], Phase(rule, writes=("w",))))

        def _converted(self, group: Any) -> Any:
            return {**group, "convention": 2}

    return replace(row, optimizer=Before)


def saved_hyper(row: Row, name: str) -> dict[str, Any]:
    """The hyperparameters that were saved; the gate of an output layer was 1, not 2·φ(0)."""
    [saved] = SAVED[name]["dict"]["param_groups"]
    found = {n: saved[n] for n in row.hyper if n in saved}
    return found | ({"output_gate": 2.0} if "gates" in row.needs else {})


@pytest.mark.filterwarnings("ignore::upgd.optim.convention.ConventionWarning")
@pytest.mark.parametrize("name", [name for name in SAVED if name != "version"])
def test_what_version_0_1_0_saved_goes_on(name: str) -> None:
    """As that version would have gone on, bit for bit, and as a run that was never interrupted.

    The latter but for rounding, which differs between machines.
    """
    row, arguments = VARIANTS[name]
    hyper, old = saved_hyper(row, name), before(row)
    for path in ({}, {"foreach": False}):
        resumed, theirs, never = model(), model(), model()
        ended = []
        for net, kind, given in ((resumed, row, {}), (theirs, old, hyper)):
            net.load_state_dict(decode(SAVED[name]["weights"]))
            opt = kind.make(net, **{**arguments, **given, "seed": 1}, **path)
            opt.load_state_dict(decode(SAVED[name]["dict"]))
            for own in opt.param_groups:
                assert own.keys() >= opt.defaults.keys() - {"differentiable"}  # PyTorch's own
                assert own["seed"] == arguments["seed"]
                assert own["noise_step"] == SAVED_AFTER
            steps(row, opt, net, SAVED_AFTER, SAVED_AFTER + 3)
            ended.append(weights(net))
        assert_equal(*ended)
        other = old.make(never, **{**arguments, **hyper}, **path)
        steps(row, other, never, 0, SAVED_AFTER + 3)
        assert_close(weights(resumed), weights(never), rtol=1e-4, atol=1e-5)
        start = list(decode(SAVED[name]["weights"]).values())
        assert all(not torch.equal(a, b) for a, b in zip(weights(resumed), start, strict=True))


def old_dict(name: str, **changed: Any) -> dict[str, Any]:
    saved: dict[str, Any] = decode(SAVED[name]["dict"])
    saved["param_groups"][0].update(changed)
    return saved


STEPS = {"lr": 0.25, "initial_lr": 0.5, "max_lr": 1.0, "weight_decay": 0.125, "sigma": 0.5}


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("upgd", {"lr": 0.5, "initial_lr": 0.5, "max_lr": 0.5, "weight_decay": 2.0}),
        ("ada-upgd", {"lr": 0.5, "initial_lr": 0.5, "max_lr": 0.5, "weight_decay": 2.0}),
        ("feature-upgd", {"lr": 0.5, "initial_lr": 0.5, "max_lr": 0.5, "weight_decay": 2.0}),
        ("n-upgd", {"sigma": 0.5}),
        ("feature-n-upgd", {"sigma": 0.5}),
        ("sgdw", {}),
    ],
)
def test_an_older_dict_is_converted_once_and_says_so(name: str, factors: dict[str, float]) -> None:
    row = METHODS[name]
    given = {k: v for k, v in STEPS.items() if k in row.hyper or k.endswith("_lr")}
    opt = row.make(model())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.load_state_dict(old_dict(name, **given))
        [group] = opt.param_groups
        assert {k: group[k] for k in given} == {k: v * factors.get(k, 1) for k, v in given.items()}
        assert group.get("output_gate") == {"feature-upgd": 2.0, "feature-n-upgd": 1.0}.get(name)
        said = " ".join(str(one.message) for one in caught)
        assert len(caught) == bool(factors)
        for k in factors.keys() & {"lr", "weight_decay", "sigma"}:
            assert f"{k} {given[k]:g} is now {given[k] * factors[k]:g}" in said
        assert ("halve the base_lrs" in said) == ("lr" in factors)
        again = row.make(model())
        again.load_state_dict(opt.state_dict())
        assert {k: again.param_groups[0][k] for k in given} == {k: group[k] for k in given}
        assert len(caught) == bool(factors)


def test_groups_are_converted_by_their_own_protection() -> None:
    some = list(model().parameters())
    opt = UPGD([{"params": some[:2]}, {"params": some[2:], "protect": False}], lr=1.0, sigma=1.0)
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        del group["convention"]
    with pytest.warns(ConventionWarning):
        opt.load_state_dict(saved)
    assert [(g["lr"], g["sigma"]) for g in opt.param_groups] == [(0.5, 1.0), (1.0, 0.5)]


def test_a_tensor_step_size_and_a_scheduler_go_on() -> None:
    """The dict's own tensor stays as it is; a schedule continues from half of its base."""
    lr = torch.tensor(0.5)
    saved = old_dict("upgd", lr=lr, initial_lr=1.0)
    opt = UPGD(model().parameters(), lr=torch.tensor(9.0))
    with pytest.warns(ConventionWarning):
        opt.load_state_dict(saved)
    assert (float(opt.param_groups[0]["lr"]), float(lr)) == (0.25, 0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5, last_epoch=1)
    assert scheduler.base_lrs == [0.5]


def test_an_optimizer_that_was_pickled_as_a_whole() -> None:
    opt = UPGD(model().parameters(), lr=1.0, weight_decay=0.25)
    del opt.param_groups[0]["convention"], opt.defaults["convention"]
    with pytest.warns(ConventionWarning):
        loaded = pickle.loads(pickle.dumps(opt))
    for found in (loaded.param_groups[0], loaded.defaults):
        assert (found["lr"], found["weight_decay"], found["convention"]) == (0.5, 0.5, 2)


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


@pytest.mark.filterwarnings("ignore::upgd.optim.convention.ConventionWarning")
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


def older(**values: Any) -> Callable[[dict[str, Any]], Any]:
    def change(saved: dict[str, Any]) -> None:
        saved["param_groups"][-1].update(values)
        del saved["param_groups"][-1]["convention"]

    return change


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
    "a convention to come": group(convention=3),
    "lr in words, from before": older(lr="fast"),
    "negative sigma, from before": older(sigma=-1.0, protect=False),
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
