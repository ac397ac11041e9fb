"""Tensors changed behind an optimizer's back: every path raises a clear error or is right."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases import PATHS, RULES, every_path
from upgd import UPGD
from upgd.optim.base import RuleOptimizer
from upgd.optim.noise import PhiloxNoise
from upgd.optim.registry import METHODS, Row

SHAPES = ((4, 3), (3, 3), (5,))
WEIGHTWISE = {name: row for name, row in RULES.items() if "gates" not in row.needs}
every_weightwise_method = pytest.mark.parametrize("row", WEIGHTWISE.values(), ids=WEIGHTWISE.keys())


def make(row: Row, path: str, steps: int = 2) -> tuple[list[nn.Parameter], RuleOptimizer]:
    """Parameters of SHAPES and an optimizer that has stepped."""
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    noise = {} if path == "fused" else {"noise": PhiloxNoise()}
    opt = row.optimizer(
        [("a", params[0]), ("b", params[1]), ("c", params[2])],
        seed=3,
        **{**row.options, **noise, **PATHS[path]},
    )
    for step in range(steps):
        derive(params, step)
        opt.step()
    return params, opt


def derive(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p)
        p.curvature = torch.randn(p.shape, generator=generator)  # type: ignore[attr-defined]


def everything(params: list[nn.Parameter], opt: RuleOptimizer, *but: Tensor) -> list[Tensor]:
    """Copies of all weights and states that can be read."""
    found = [*params, *(t for state in opt.state.values() for t in state.values())]
    return [t.detach().clone() for t in found if all(t is not other for other in but)]


def shrink(t: Tensor) -> None:
    t.untyped_storage().resize_(t.untyped_storage().nbytes() // 2)


def reassign(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    def act(t: Tensor) -> None:
        t.data = change(t.data)

    return act


def resize(t: Tensor) -> None:
    learned = t.requires_grad
    t.requires_grad_(False).resize_(30, 7).requires_grad_(learned)


BREAKING: dict[str, Callable[[Tensor], Any]] = {
    "larger": reassign(lambda t: t.new_zeros(40, 3)),
    "smaller": reassign(lambda t: t.new_zeros(1, 3)),
    "other shape, same memory": reassign(lambda t: t.view(3, 4)),
    "part of itself": reassign(lambda t: t[:2]),
    "resized": resize,
    "emptied storage": lambda t: t.untyped_storage().resize_(0),
    "half the storage": shrink,
    "expanded": reassign(lambda t: t[:1].expand(4, 3)),
}


@pytest.mark.parametrize("how", BREAKING)
@every_path
@pytest.mark.parametrize("name", ["upgd-2nd-local", "sgdw"])
def test_a_parameter_that_lost_its_shape_or_memory_is_named(name: str, path: str, how: str) -> None:
    params, opt = make(METHODS[name], path)
    derive(params, 5)
    BREAKING[how](params[0])
    before = everything(params, opt, params[0])
    with pytest.raises(ValueError, match=r"parameter 'a' of shape \(.*") as caught:
        opt.step()
    assert "\n" not in str(caught.value)
    for x, y in zip(before, everything(params, opt, params[0]), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("how", [how for how in BREAKING if how != "expanded"])
@every_path
@pytest.mark.parametrize("name", ["upgd", "sgdw"])
def test_a_gradient_of_another_shape_or_without_memory(name: str, path: str, how: str) -> None:
    params, opt = make(METHODS[name], path)
    derive(params, 5)
    grad = params[0].grad
    assert grad is not None
    BREAKING[how](grad)
    before = everything(params, opt)
    with pytest.raises(ValueError, match=r"parameter 'a' of shape \(4, 3\) has .*gradient"):
        opt.step()
    for x, y in zip(before, everything(params, opt), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("how", BREAKING)
@pytest.mark.parametrize("in_place", [True, False])
@every_path
def test_a_state_that_lost_its_shape_or_memory(path: str, in_place: bool, how: str) -> None:
    row = METHODS["ada-upgd"]
    params, opt = make(row, path)
    derive(params, 5)
    name = row.states[-1]
    if not in_place:
        opt.state[params[0]][name] = opt.state[params[0]][name].clone()
    state = opt.state[params[0]][name]
    if how in ("emptied storage", "half the storage") and in_place and path == "packed":
        pytest.skip("all states share this storage")
    BREAKING[how](state)
    before = everything(params, opt, state)
    words = rf"state '{name}' of parameter 'a' of shape \(4, 3\) is .* remove .* from opt\.state"
    with pytest.raises(ValueError, match=words):
        opt.step()
    for x, y in zip(before, everything(params, opt, state), strict=True):
        assert torch.equal(x, y)
    del opt.state[params[0]]
    opt.step()  # the way out
    assert all(p.isfinite().all() for p in params)


@every_path
@every_weightwise_method
def test_states_that_are_missing_or_no_tensors(row: Row, path: str) -> None:
    params, opt = make(row, path)
    for name in ("step", *row.states):
        for value in (None, 3.0, "x", torch.zeros(7)):
            kept = opt.state[params[1]][name]
            derive(params, 5)
            opt.state[params[1]][name] = value
            with pytest.raises(ValueError, match=rf"state '{name}' of parameter 'b'"):
                opt.step()
            opt.state[params[1]][name] = kept
    opt.step()


# ------------------------------------------------------------- changes that are allowed
HARMLESS: dict[str, Callable[[Tensor], Any]] = {
    "moved": reassign(lambda t: t.clone()),
    "transposed copy": reassign(lambda t: t.t().contiguous().t()),
    "transposed in place": lambda t: t.data.set_(
        t.untyped_storage(), t.storage_offset(), (3, 3), (1, 3)
    ),
    "double": reassign(lambda t: t.double()),
    "a slice of something larger": reassign(lambda t: torch.cat([t, t], 1)[:, :3]),
}


@pytest.mark.parametrize("how", HARMLESS)
@pytest.mark.parametrize("name", ["upgd", "upgd-local", "s-si", "pgd"])
def test_new_memory_and_layout_change_nothing(name: str, how: str) -> None:
    """Same values elsewhere, or in another layout: all paths go on as the plain rule does."""
    results = []
    for path in PATHS:
        params, opt = make(METHODS[name], path)
        HARMLESS[how](params[1])
        for step in (5, 6):
            derive(params, step)
            opt.step()
        results.append([p.detach().double() for p in params])
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@every_path
def test_states_may_get_other_memory(path: str) -> None:
    """What a state holds counts, wherever it lies: ``state.data = ...`` is honoured."""
    results = []
    for changed in (False, True):
        params, opt = make(METHODS["upgd"], path)
        state = opt.state[params[0]]["utility"]
        if changed:
            state.data = state.data.clone().mul_(0).sub_(5)
        derive(params, 5)
        opt.step()
        results.append([p.detach().clone() for p in params])
    assert not torch.equal(results[0][0], results[1][0])


@every_path
@pytest.mark.parametrize("name", ["sgdw", "pgd", "shrink-and-perturb"])
def test_methods_without_states_take_new_shapes(name: str, path: str) -> None:
    params, opt = make(METHODS[name], path)
    params[0].data = torch.ones(7, 2)
    derive(params, 5)
    opt.step()
    assert params[0].shape == (7, 2)
    assert all(p.isfinite().all() for p in params)


@every_path
def test_states_follow_a_model_that_moved(path: str) -> None:
    """The error names the way, and the way leads on."""
    params, opt = make(METHODS["upgd"], path)
    opt.state[params[0]]["utility"] = torch.zeros(4, 3, device="meta")
    derive(params, 5)
    with pytest.raises(ValueError, match=r"on meta.*opt\.load_state_dict\(opt\.state_dict"):
        opt.step()


def test_the_interpreted_triton_path_checks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton and TRITON_INTERPRET=1")
    from upgd.kernels import triton_flat
    from upgd.optim import fused
    from upgd.optim.fused_cuda import Cuda

    monkeypatch.setattr(fused, "_backend", lambda kind: Cuda)
    monkeypatch.setattr(triton_flat, "BLOCK", 32)
    params = [nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(2))]
    opt = UPGD(params, fused=True)
    derive(params, 0)
    opt.step()
    derive(params, 1)
    opt.state[params[0]]["utility"].resize_(9, 9)
    with pytest.raises(ValueError, match="state 'utility' of parameter 0"):
        opt.step()
    opt.state.clear()
    params[0].data = torch.zeros(90, 3)
    with pytest.raises(ValueError, match="gradient of shape"):
        opt.step()
