"""PyTorch's own battery for optimizers, on our classes.

``torch.testing._internal.common_optimizers`` describes each optimizer of PyTorch by an
``OptimizerInfo``, and the generic tests of PyTorch's ``test/test_optim.py`` check one property of
all entries each. Here are entries for our classes and the same properties under the same names.
`EXEMPT` says which classes lack one, and why; such a property must fail, so that no reason
outlives its cause. `NOT_HERE` has the properties that need other machines.
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import upgd
from tests.cases import assert_close, assert_equal, watching
from upgd.optim.layered import LACKS, LayerOptimizer
from upgd.optim.noise import PhiloxNoise
from upgd.optim.registry import METHODS, Row

pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
Kwargs = dict[str, Any]

_CLASSES: dict[str, tuple[Any, list[Kwargs]]] = {
    "UPGD": (
        upgd.UPGD,
        [
            {},
            {"sigma": 0.01, "beta_utility": 0.9},
            {"momentum": 0.9, "weight_decay": 0.1},
            {"scaling": "local"},
            {"protect": False},
            {"order": 2},
            {"order": 2, "scaling": "local", "protect": False},
        ],
    ),
    "AdaUPGD": (upgd.AdaUPGD, [{}, {"betas": (0.8, 0.99), "eps": 1e-5}, {"order": 2}]),
    "FeatureUPGD": (upgd.FeatureUPGD, [{}, {"scaling": "local"}, {"protect": False}]),
    "SGDW": (upgd.SGDW, [{}]),
    "PGD": (upgd.PGD, [{}, {"sigma": 0.01}]),
    "ShrinkAndPerturb": (upgd.ShrinkAndPerturb, [{}, {"sigma": 0.01}]),
    **{
        name: (getattr(upgd, name), [{}, {"kappa": 0.5, "beta_importance": 0.9}])
        for name in ("StreamingEWC", "StreamingMAS", "StreamingSI", "StreamingRWalk")
    },
    "CentredSGD": (upgd.CentredSGD, [{}, {"beta_mean": 0.9, "bias_share": 1.0}]),
    "SelfTunedSGD": (upgd.SelfTunedSGD, [{}, {"beta_slow": 0.9}]),
    **{
        name: (getattr(upgd, name), [{}, {"base": "adam", "betas": (0.8, 0.99)}, more])
        for name, more in {
            "ContinualBackprop": {"replacement_rate": 0.1, "maturity": 2},
            "ReDo": {"threshold": 0.8, "period": 3},
        }.items()
    },
}
STREAMING = tuple(name for name in _CLASSES if name.startswith("Streaming"))
LAYERED = tuple(name for name, (cls, _) in _CLASSES.items() if issubclass(cls, LayerOptimizer))
NOISY = tuple(name for name in _CLASSES if name not in ("SGDW", *STREAMING, *LAYERED))

NOT_HERE = {
    "forloop_goes_right_direction_multigpu": "two GPUs",
    "mixed_device_dtype": "two GPUs; mixed dtypes are in tests/test_limits.py",
    "state_dict_with_cuda_params": "CUDA: test_battery.test_checkpoints_cross_devices",
    "cpu_load_state_dict": "CUDA: test_battery.test_checkpoints_cross_devices",
    "fused_cpu_matches_cuda": "CUDA: test_fused.test_equals_the_plain_rule on both devices",
    "foreach_large_tensor": "more than 2**31 elements: 40 GB",
    "fused_large_tensor": "more than 2**31 elements: 40 GB",
    "peak_memory_foreach": "CUDA's allocator; docs/optimizers.md has the copies a step takes",
}
EXEMPT = {
    "supports_complex": {
        None: "a utility is a real number, -g·w; complex weights have two of them, one per part"
    },
    "supports_sparse_gradients": {
        None: "traces decay for every weight at every step, so a sparse step would be dense"
    },
    "supports_differentiable": {
        None: "updates are made in place without a graph; meta-learning through a step is another "
        "library's"
    },
    "step_is_noop_for_zero_grads": {
        NOISY: "perturbations move weights whose gradient is zero; "
        "zero_grads_without_noise shows the rest",
        ("SelfTunedSGD",): "its weight decay is its own choice",
    },
    **{
        name: {("FeatureUPGD",): "features have no kernels"}
        for name in (
            "fused_matches_forloop",
            "fused_does_not_step_if_found_inf",
            "fused_error_on_params_on_meta",
        )
    },
    "foreach_matches_forloop": {LAYERED: LACKS["foreach"]},
    "defaults_changed_to_foreach": {LAYERED: LACKS["foreach"]},
    "param_groups_lr": {("SelfTunedSGD",): "all layers share one step size"},
    "zero_grads_without_noise": {("SelfTunedSGD",): "its weight decay is its own choice"},
}
"""For each property, the classes (None: all) that lack it, with the reason."""


class Battery(NamedTuple):
    """An ``OptimizerInfo`` and how to try it."""

    info: Any

    @property
    def row(self) -> Row:
        """A method of the class."""
        return next(row for row in METHODS.values() if row.optimizer is self.info.optim_cls)

    def configurations(self, rules: bool = False) -> list[Kwargs]:
        """Arguments to try: all, or one set for each rule and kind of state."""
        given = self.info.optim_inputs_func(device="cpu")
        return [dict(each.kwargs) for each in given if each.desc == "rule" or not rules]

    def known(self, **hyper: float) -> Kwargs:
        """Those of `hyper` that the class has."""
        names = inspect.signature(self.info.optim_cls).parameters
        return {name: value for name, value in hyper.items() if name in names}

    def make(self, params: Any, model: nn.Module, **kwargs: Any) -> Any:
        kwargs |= watching(self.row, model)
        return self.info.optim_cls(params, **kwargs)

    def on_model(self, dtype: torch.dtype = torch.float32, **kwargs: Any) -> tuple[Any, Any]:
        model = network(dtype)
        return model, self.make(list(model.parameters()), model, **{"seed": 0, **kwargs})


Property = Callable[[Battery], None]
PROPERTIES: dict[str, Property] = {}


def generic(fn: Property) -> Property:
    PROPERTIES[fn.__name__] = fn
    return fn


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid()).to(dtype)


def loss_of(model: nn.Module) -> Tensor:
    weight = next(model.parameters())
    x = torch.arange(1, 7).reshape(3, 2).to(weight) / 10
    return model(x).sum()


def closure_of(model: nn.Module, opt: Any, calls: list[int] | None = None) -> Callable[[], Tensor]:
    """Evaluates the loss as users do; with ``order=2`` as they must."""

    def closure() -> Tensor:
        if calls is not None:
            calls.append(1)
        opt.zero_grad()
        loss = loss_of(model)
        if "curvature" in opt.method.needs:
            opt.backward(loss)
        else:
            loss.backward()
        return loss

    return closure


def run(model: nn.Module, opt: Any, steps: int) -> list[Tensor]:
    for _ in range(steps):
        opt.step(closure_of(model, opt))
    return [p.detach().clone() for p in model.parameters()]


def states(opt: Any) -> list[Tensor]:
    params = [p for group in opt.param_groups for p in group["params"]]
    return [v for p in params for _, v in sorted(opt.state.get(p, {}).items())]


# -------------------------------------------------------------------------- construction
@generic
def infos_do_not_specify_global_cliquey_kwargs(battery: Battery) -> None:
    for kwargs in battery.configurations():
        assert not kwargs.keys() & {"foreach", "fused", "differentiable"}


@generic
def errors(battery: Battery) -> None:
    """What PyTorch expects of all optimizers, and our own hyperparameters out of range."""
    from torch.testing._internal.common_optimizers import OptimizerErrorEnum

    cases = battery.info.optim_error_inputs_func(device="cpu", dtype=torch.float32)
    assert len(cases) > 6
    for case in cases:
        given, model = case.optimizer_error_input, network()
        assert case.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
        own = list(model.parameters())
        params = own if given.params is None else given.params
        if given.params is not None and battery.row.needs & {"gates", "layers"}:
            params = exchanged(params, *own)
        if issubclass(case.error_type, Warning):
            with pytest.warns(case.error_type, match=case.error_regex):
                battery.make(params, model, **given.kwargs)
        else:
            with pytest.raises(case.error_type, match=case.error_regex):
                battery.make(params, model, **given.kwargs)


def exchanged(params: Any, *own: Tensor) -> Any:
    """The same structure with parameters of a model, without which there are no features."""
    found: list[Tensor] = []

    def replaced(each: Any) -> Any:
        if isinstance(each, Tensor):
            if not any(each is known for known in found):
                found.append(each)
            return own[next(i for i, known in enumerate(found) if known is each)]
        if isinstance(each, list | tuple):
            return type(each)(map(replaced, each))
        if isinstance(each, dict):
            return {key: replaced(value) for key, value in each.items()}
        return each

    return replaced(params)


@generic
def optimizer_can_be_printed(battery: Battery) -> None:
    for kwargs in battery.configurations(rules=True):
        _, opt = battery.on_model(**kwargs)
        for name, value in opt.param_groups[0].items():
            assert name == "params" or f"{name}: {value}" in repr(opt)


@generic
def supports_differentiable(battery: Battery) -> None:
    battery.on_model(differentiable=True)


# ------------------------------------------------------------------------------ learning
def goes_right_direction(battery: Battery, scheduled: bool, apart: bool = False) -> None:
    some = [(kwargs, True) for kwargs in battery.configurations()]
    some += [(kwargs, False) for kwargs in battery.configurations(rules=True) if not scheduled]
    for kwargs, contiguous in some:
        model = network()
        if not contiguous:
            for p in model.parameters():
                wide = torch.zeros(*p.shape, 2)
                wide[..., 0] = p.detach()
                p.data = wide[..., 0]
        params: Any = list(model.parameters())
        if apart:
            params = [{"params": params[:2]}, {"params": params[2:], "lr": 0.005}]
        opt = battery.make(params, model, seed=0, foreach=False, **kwargs)
        for make in battery.info.scheduler_inputs if scheduled else [()]:
            schedulers = [each(opt) for each in make]
            before = float(loss_of(model).detach())
            for _ in range(10):
                loss = opt.step(closure_of(model, opt))
                for each in schedulers:
                    plateau = isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau)
                    each.step(*[float(loss.detach())] * plateau)
            change = float(loss_of(model).detach()) - before
            assert change > 0 if kwargs.get("maximize") else change < 0, kwargs


@generic
def forloop_goes_right_direction(battery: Battery) -> None:
    goes_right_direction(battery, scheduled=False)


@generic
def forloop_goes_right_direction_with_lrsched(battery: Battery) -> None:
    goes_right_direction(battery, scheduled=True)


@generic
def param_group_with_lrscheduler_goes_right_direction(battery: Battery) -> None:
    goes_right_direction(battery, scheduled=True, apart=True)


@generic
def tensor_lr(battery: Battery) -> None:
    """Zero or one dimension, a number: the same, and the tensor is not changed."""
    for kwargs in battery.configurations(rules=True):
        kwargs.pop("lr", None)
        results = []
        for lr in (1e-2, torch.tensor(1e-2), torch.tensor([1e-2])):
            kept = copy.deepcopy(lr)
            model, opt = battery.on_model(**{**kwargs, "lr": lr, "foreach": False})
            results.append(run(model, opt, 5))
            assert lr == kept
        assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)
        assert_equal(results[1], results[2])


@generic
def param_groups_lr(battery: Battery) -> None:
    """A group's own step size, 0 here, and the default for the others."""
    for kwargs in battery.configurations(rules=True):
        kwargs.pop("lr", None)
        model = network()
        params = list(model.parameters())
        groups = [{"params": params[:1], "lr": 0.0}, {"params": params[1:]}]
        opt = battery.make(groups, model, seed=0, lr=0.02, **kwargs)
        before = [p.detach().clone() for p in params]
        run(model, opt, 2)
        assert [float(group["lr"]) for group in opt.param_groups] == [0.0, 0.02]
        moved = [not torch.equal(p, b) for p, b in zip(params, before, strict=True)]
        assert moved == [False, True, True, True]


@generic
def closure_is_called_once(battery: Battery) -> None:
    for kwargs in battery.configurations(rules=True):
        model, opt = battery.on_model(**kwargs)
        calls: list[int] = []
        expected = loss_of(model).detach()
        assert torch.equal(opt.step(closure_of(model, opt, calls)).detach(), expected)
        assert calls == [1]


# -------------------------------------------------------------------------- what is absent
@generic
def step_is_noop_when_params_have_no_grad(battery: Battery) -> None:
    for kwargs in battery.configurations(rules=True):
        for foreach in (None, False):
            model, opt = battery.on_model(**kwargs, foreach=foreach)
            before = [p.detach().clone() for p in model.parameters()]
            opt.step()
            assert_equal([p.detach() for p in model.parameters()], before)
            assert not opt.state


def zero_gradients(battery: Battery, quiet: Kwargs) -> None:
    for kwargs in battery.configurations(rules=True):
        for foreach in (None, False):
            given = {**kwargs, **battery.known(**quiet, weight_decay=0.0), "foreach": foreach}
            model, opt = battery.on_model(**given)
            before = [p.detach().clone() for p in model.parameters()]
            for _ in range(3):
                closure_of(model, opt)()
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad.zero_()
                    p.curvature = torch.ones_like(p)  # type: ignore[assignment]
                opt.step()
            assert_equal([p.detach() for p in model.parameters()], before)


@generic
def step_is_noop_for_zero_grads(battery: Battery) -> None:
    zero_gradients(battery, {})


@generic
def zero_grads_without_noise(battery: Battery) -> None:
    zero_gradients(battery, {"sigma": 0.0})


@generic
def supports_complex(battery: Battery) -> None:
    model = network()
    battery.make([nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))], model)


@generic
def supports_sparse_gradients(battery: Battery) -> None:
    model, opt = battery.on_model()
    closure_of(model, opt)()
    for p in model.parameters():
        assert p.grad is not None
        p.grad = p.grad.to_sparse()
    opt.step()


# ----------------------------------------------------------------------------------- paths
def paths_agree(battery: Battery, flag: str, dtype: torch.dtype = torch.float64) -> None:
    """Weights and states after seven steps, one of them without gradients, a scalar at the end."""
    for kwargs in battery.configurations():
        results = []
        for value in (False, True):
            path: Kwargs = {flag: value} if flag == "foreach" or value else {"foreach": False}
            path["noise"] = PhiloxNoise()
            model = network(dtype)
            scalar = nn.Parameter(torch.ones((), dtype=dtype))
            scalar.grad = torch.full_like(scalar, 0.5)
            params = [*model.parameters(), scalar]
            opt = battery.make(params, model, **{"seed": 0, **kwargs, **path})
            for step in range(7):
                opt.zero_grad()
                if step != 3:
                    closure_of(model, opt)()
                opt.step()
            results.append([*[p.detach() for p in params], *states(opt)])
        tolerance = 1e-11 if dtype == torch.float64 else 1e-5
        assert_close(*results, rtol=tolerance, atol=tolerance / 10)


@generic
def foreach_matches_forloop(battery: Battery) -> None:
    paths_agree(battery, "foreach")


@generic
def fused_matches_forloop(battery: Battery) -> None:
    pytest.importorskip("numba")
    paths_agree(battery, "fused")


@generic
def set_default_dtype_works_with_foreach(battery: Battery) -> None:
    """What is float32 stays so where new tensors are float64 by default."""
    results = []
    before = torch.get_default_dtype()
    for default in (torch.float64, torch.float32):
        model, opt = battery.on_model(foreach=None)
        try:
            torch.set_default_dtype(default)
            results.append([*run(model, opt, 4), *states(opt)])
        finally:
            torch.set_default_dtype(before)
    assert_equal_dtypes(*results)
    assert_close(*results, rtol=1e-6, atol=1e-7)


def assert_equal_dtypes(a: list[Tensor], b: list[Tensor]) -> None:
    assert [t.dtype for t in a] == [t.dtype for t in b]


@generic
def defaults_changed_to_foreach(battery: Battery) -> None:
    """``foreach=None`` takes the multi-tensor programs."""
    for kwargs in battery.configurations(rules=True):
        for foreach, multi in ((None, True), (False, False)):
            model, opt = battery.on_model(**kwargs, foreach=foreach)
            with mock.patch("upgd.optim.batch.compiled", wraps=upgd.optim.batch.compiled) as spy:
                run(model, opt, 1)
            assert spy.called == multi


@generic
def fused_does_not_step_if_found_inf(battery: Battery) -> None:
    pytest.importorskip("numba")
    for kwargs in battery.configurations(rules=True):
        kwargs.pop("capturable", None)
        model, opt = battery.on_model(**kwargs, fused=True)
        run(model, opt, 1)
        before = [*[p.detach().clone() for p in model.parameters()]]
        taken = [int(s["step"]) for s in opt.state.values()]
        known = "unscale_" in battery.row.unsupported  # the scale must be
        opt.grad_scale, opt.found_inf = torch.tensor(1.0) if known else None, torch.tensor(1.0)
        run(model, opt, 1)
        assert_equal([p.detach() for p in model.parameters()], before)
        assert [int(s["step"]) for s in opt.state.values()] == taken
        opt.found_inf = torch.tensor(0.0)
        run(model, opt, 1)
        assert [int(s["step"]) for s in opt.state.values()] == [n + 1 for n in taken]


@generic
def fused_error_on_params_on_meta(battery: Battery) -> None:
    model = network().to("meta")
    opt = battery.make(model.parameters(), model, fused=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="meta device"):
        opt.step()


@generic
def grad_scaling(battery: Battery) -> None:
    """A scaled loss gives the plain loss's steps; an overflow gives none."""
    for kwargs in battery.configurations():
        if kwargs.pop("sigma", None) is None and kwargs.get("order") == 2:
            continue  # p.curvature is never scaled: test_battery.test_grad_scaler
        results = []
        for scaled in (True, False):
            model, opt = battery.on_model(torch.float64, **kwargs, **battery.known(sigma=0.0))
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
            for step in range(3):
                opt.zero_grad()
                scaler.scale(loss_of(model)).backward()
                if step == 1:
                    next(model.parameters()).grad[0, 0] = torch.inf
                if scaled or step != 1:
                    scaler.step(opt)
                    scaler.update()
            results.append([p.detach() for p in model.parameters()])
        assert_close(*results, rtol=1e-10, atol=1e-12)


# ----------------------------------------------------------------------------- checkpoints
@generic
def state_dict_deterministic(battery: Battery) -> None:
    """Loading leaves the dict alone, and continues; named parameters or not."""
    for kwargs in battery.configurations(rules=True):
        for named in (False, True):
            model = network()
            params = list(model.named_parameters() if named else model.parameters())
            opt = battery.make(params, model, seed=0, **kwargs)
            run(model, opt, 3)
            twin = copy.deepcopy(model)
            own = list(twin.named_parameters() if named else twin.parameters())
            other = battery.make(own, twin, seed=9, **kwargs)
            saved = opt.state_dict()
            kept = copy.deepcopy(saved)
            other.load_state_dict(saved)
            assert_same(saved, kept)
            assert_equal(run(model, opt, 3), run(twin, other, 3))
            assert_same(opt.state_dict(), other.state_dict())


def assert_same(a: Any, b: Any) -> None:
    """Equal values and types, at any depth."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    else:
        assert a == b


@generic
def can_load_older_state_dict(battery: Battery) -> None:
    for kwargs in battery.configurations(rules=True):
        for flag in battery.info.not_og_supported_flags:
            if flag == "differentiable":
                continue
            model, opt = battery.on_model(**kwargs)
            run(model, opt, 2)
            older = copy.deepcopy(opt.state_dict())
            for group in older["param_groups"]:
                del group[flag]
            opt.load_state_dict(older)
            assert opt.param_groups[0][flag] == opt.defaults[flag]
            run(model, opt, 1)


@generic
def can_load_from_to_named_state_dict(battery: Battery) -> None:
    for kwargs in battery.configurations(rules=True):
        for first, second in ((True, False), (False, True), (True, True)):
            model = network()
            opts = [
                battery.make(
                    list(model.named_parameters() if named else model.parameters()),
                    model,
                    seed=0,
                    **kwargs,
                )
                for named in (first, second)
            ]
            run(model, opts[0], 2)
            opts[1].load_state_dict(opts[0].state_dict())
            run(model, opts[1], 1)
            assert ("param_names" in opts[1].param_groups[0]) == first or second
            assert_equal_dtypes(states(opts[0]), states(opts[1]))


@generic
def save_load_equality_with_weights_only(battery: Battery) -> None:
    for kwargs in battery.configurations(rules=True):
        model, opt = battery.on_model(**kwargs)
        run(model, opt, 2)
        buffer = io.BytesIO()
        torch.save(opt.state_dict(), buffer)
        buffer.seek(0)
        assert_same(torch.load(buffer, weights_only=True), opt.state_dict())


@generic
def load_nontensor_step(battery: Battery) -> None:
    """Counts as numbers, as other writers leave them."""
    for kwargs in battery.configurations(rules=True):
        model, opt = battery.on_model(**kwargs)
        run(model, opt, 2)
        saved = copy.deepcopy(opt.state_dict())
        for state in saved["state"].values():
            state["step"] = state["step"].item()
        opt.load_state_dict(saved)
        run(model, opt, 1)
        assert {int(s["step"]) for s in opt.state.values()} == {3}


@generic
def non_empty_state(battery: Battery) -> None:
    for kwargs in battery.configurations(rules=True):
        model, opt = battery.on_model(**kwargs)
        run(model, opt, 1)
        assert all(opt.state[p] for p in model.parameters())


@generic
def deepcopy_copies_all_public_attrs(battery: Battery) -> None:
    for kwargs in battery.configurations(rules=True):
        _, opt = battery.on_model(**kwargs)
        opt.mine = "kept"
        public = [
            {k for k in o.__dict__ if not k.startswith("_")} for o in (opt, copy.deepcopy(opt))
        ]
        assert public[0] == public[1]


@generic
def pickling_copies_all_public_attrs(battery: Battery) -> None:
    for kwargs in battery.configurations(rules=True):
        model, opt = battery.on_model(**kwargs)
        run(model, opt, 2)
        other = pickle.loads(pickle.dumps(opt))
        assert_same(other.state_dict(), opt.state_dict())
        twin, other = pickle.loads(pickle.dumps((model, opt)))  # as a whole
        assert_equal(run(model, opt, 2), run(twin, other, 2))


# ----------------------------------------------------------------------------------- hooks
@generic
def state_dict_hooks(battery: Battery) -> None:
    """Before and after ``state_dict()``, the last with ``prepend`` first; removed, silent."""
    _, opt = battery.on_model()
    order: list[str] = []
    handles = [
        opt.register_state_dict_pre_hook(lambda _: order.append("pre")),
        opt.register_state_dict_pre_hook(lambda _: order.append("first"), prepend=True),
        opt.register_state_dict_post_hook(lambda _, d: {**d, "note": "new"}),
        opt.register_state_dict_post_hook(lambda _, d: order.append("post"), prepend=True),
    ]
    assert opt.state_dict()["note"] == "new"
    assert order == ["first", "pre", "post"]
    for handle in handles:
        handle.remove()
    assert "note" not in opt.state_dict()


@generic
def load_state_dict_hooks(battery: Battery) -> None:
    """Before: may replace the dict; after: sees what was loaded; ``prepend`` comes first."""
    model, opt = battery.on_model()
    run(model, opt, 2)
    order: list[Any] = []

    def replaced(_: Any, given: Any) -> Any:
        order.append("pre")
        return {**given, "param_groups": [{**g, "lr": 0.125} for g in given["param_groups"]]}

    handles = [
        opt.register_load_state_dict_pre_hook(replaced),
        opt.register_load_state_dict_pre_hook(lambda *_: order.append("first"), prepend=True),
        opt.register_load_state_dict_post_hook(lambda o: order.append(o.param_groups[0]["lr"])),
        opt.register_load_state_dict_post_hook(lambda _: order.append("post"), prepend=True),
    ]
    saved = opt.state_dict()
    opt.load_state_dict(saved)
    assert order == ["first", "pre", "post", 0.125]
    assert saved["param_groups"][0]["lr"] != 0.125
    for handle in handles:
        handle.remove()
    opt.load_state_dict(saved)
    assert len(order) == 4


@generic
def step_hooks(battery: Battery) -> None:
    """Own and global ones, before and after; a hook before a step may replace its arguments."""
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    model, opt = battery.on_model()
    order: list[str] = []

    def replace(_: Any, args: Any, kwargs: Any) -> Any:
        order.append("own pre")
        return (args[0], closure_of(model, opt)), {}

    handles = [
        register_optimizer_step_pre_hook(lambda *_: order.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: order.append("global post")),
        opt.register_step_pre_hook(replace),
        opt.register_step_post_hook(lambda *_: order.append("own post")),
    ]
    try:
        assert opt.step() is not None  # the hook's closure
    finally:
        for handle in handles:
            handle.remove()
    assert order == ["global pre", "own pre", "own post", "global post"]
    opt.step()
    assert len(order) == 4


# ---------------------------------------------------------------------------------- driving
@pytest.fixture(scope="module")
def batteries() -> dict[str, Battery]:
    """The entries; importing what they are made of takes seconds, so only who runs these does."""
    frozen = mock.patch("torch.backends.disable_global_flags")  # else for all tests that follow
    with warnings.catch_warnings(), frozen:
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_optimizers as theirs

    def inputs(cls: Any, own: list[Kwargs]) -> Callable[..., list[Any]]:
        lr = {"lr": 0.02}
        rules = [{**lr, **each} for each in own]
        options = [{}, {"lr": torch.tensor(0.02)}, {"maximize": True, "nonfinite": "skip"}]
        if "capturable" not in row_of(cls).unsupported:
            options += [{**lr, "capturable": True}]
        if "weight_decay" in row_of(cls).method.hyper:
            options += [{"weight_decay": 0.1, "maximize": True}]
        return lambda device, dtype=None: [
            theirs.OptimizerInput(None, copy.deepcopy(kwargs), kind)
            for kind, some in (("rule", rules), ("option", options))
            for kwargs in some
        ]

    def row_of(cls: Any) -> Row:
        return next(row for row in METHODS.values() if row.optimizer is cls)

    def supported(cls: Any, *names: str) -> list[str]:
        return [name for name in names if name not in row_of(cls).unsupported]

    def wrong(cls: Any) -> Callable[..., list[Any]]:
        def made(device: str, dtype: torch.dtype) -> list[Any]:
            bad = [
                {name: (1.0, 0.0) if name == "betas" else -1.0} for name in row_of(cls).method.hyper
            ]
            own = [
                theirs.ErrorOptimizerInput(
                    theirs.OptimizerInput(None, kwargs, "out of range"),
                    error_type=ValueError,
                    error_regex=f"{cls.__name__}: {next(iter(kwargs))}",
                )
                for kwargs in bad
            ]
            return [*theirs.get_error_inputs_for_all_optims(device, dtype), *own]

        return made

    return {
        name: Battery(
            theirs.OptimizerInfo(
                cls,
                optim_inputs_func=inputs(cls, own),
                optim_error_inputs_func=wrong(cls),
                supported_impls=tuple(supported(cls, "foreach", "fused")),
                supports_fused_on=("cpu", "cuda") if supported(cls, "fused") else (),
                has_capturable_arg=bool(supported(cls, "capturable")),
                supports_complex=False,
                supports_multiple_devices=True,
            )
        )
        for name, (cls, own) in _CLASSES.items()
    }


def exemption(name: str, cls: str) -> str | None:
    """Why a class lacks a property."""
    for classes, reason in EXEMPT.get(name, {}).items():
        if classes is None or cls in classes:
            return reason
    return None


FAST = {"UPGD", "AdaUPGD", "FeatureUPGD", "StreamingRWalk", "CentredSGD", "ContinualBackprop"}


@pytest.mark.parametrize("name", PROPERTIES)
@pytest.mark.parametrize(
    "cls", [pytest.param(c, marks=[pytest.mark.slow] * (c not in FAST)) for c in _CLASSES]
)
def test_property(cls: str, name: str, batteries: dict[str, Battery]) -> None:
    if exemption(name, cls) is None:
        PROPERTIES[name](batteries[cls])
    else:
        with pytest.raises((AssertionError, TypeError, ValueError)):
            PROPERTIES[name](batteries[cls])


def test_exemptions_are_of_properties() -> None:
    assert EXEMPT.keys() <= PROPERTIES.keys()
    assert not NOT_HERE.keys() & PROPERTIES.keys()
    classes = [c for named in EXEMPT.values() for some in named for c in some or ()]
    assert set(classes) <= _CLASSES.keys()
