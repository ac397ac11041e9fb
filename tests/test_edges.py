"""Parameters without elements or values, and one optimizer used from several threads."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import PATHS, every_method, every_path, network, path_of, provide, state
from upgd import SGDW, UPGD, Features, FeatureUPGD
from upgd.optim.registry import METHODS, Row


def make(row: Row, model: nn.Module, path: str, **more: Any) -> Any:
    return row.make(model, **path_of(row, path), **more)


# ------------------------------------------------------------------------ zero width
EMPTY = {  # layer by layer: inputs, outputs, whether there is a bias
    "no hidden units": [(4, 0, True), (0, 3, True), (3, 2, True)],
    "no inputs": [(0, 4, True), (4, 2, True)],
    "no outputs": [(4, 3, True), (3, 0, True)],
    "nothing at all": [(0, 0, False), (0, 0, False)],
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("which", EMPTY)
@every_path
@every_method
def test_layers_of_zero_width(row: Row, path: str, which: str) -> None:
    """Elements that there are move and stay finite; what is saved loads."""
    layers = [layer for sizes in EMPTY[which] for layer in (nn.Linear(*sizes), nn.Tanh())]
    model = nn.Sequential(*layers[:-1])
    opt = make(row, model, path, seed=1)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        opt.zero_grad()
        (model(torch.ones(5, model[0].in_features)).sum() + 0.0).backward()
        provide(row, opt, model)
        opt.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.isfinite().all()
        if p.grad is not None and bool(p.grad.any()):
            assert not torch.equal(p.detach(), old)
    again = make(row, model, path)
    again.load_state_dict(opt.state_dict())
    assert len(state(again)) == len(state(opt))


@every_path
@every_method
def test_an_optimizer_of_nothing_but_empty_parameters(row: Row, path: str) -> None:
    if row.needs & {"gates", "layers"}:
        pytest.skip("needs a model")
    p = nn.Parameter(torch.zeros(0, 3))
    opt = row.optimizer([p], **row.options, **PATHS[path])
    p.grad = torch.zeros(0, 3)
    opt.step()
    assert int(opt.skipped_steps) == 0
    opt.load_state_dict(opt.state_dict())


# ------------------------------------------------------------------------------ meta
@every_path
@every_method
def test_parameters_on_the_meta_device(row: Row, path: str) -> None:
    model = network().to("meta")
    opt = make(row, model, path)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"parameter 0 .*is on the meta device.*to_empty") as error:
        opt.step()
    assert "\n" not in str(error.value)
    opt.load_state_dict(opt.state_dict())


def test_a_step_size_on_the_meta_device() -> None:
    with pytest.raises(TypeError, match=r"lr must be a finite number >= 0, got tensor\(.*meta"):
        UPGD(network().parameters(), lr=torch.tensor(0.1, device="meta"))


def test_a_state_dict_moves_to_the_meta_device() -> None:
    model = network()
    opt = UPGD(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    opt.step()
    other = UPGD(network().to("meta").parameters())
    other.load_state_dict(opt.state_dict())
    assert all(t.is_meta for t in state(other))


# --------------------------------------------------------------------------- threads
@pytest.fixture
def busy() -> Any:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(count: int, act: Any) -> list[BaseException]:
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            act()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


@pytest.mark.usefixtures("busy")
@every_path
@pytest.mark.parametrize("name", ["upgd", "adamw", "s-rwalk", "shrink-and-perturb"])
def test_steps_of_several_threads_are_made_one_after_the_other(name: str, path: str) -> None:
    """With constant gradients, their order does not matter and none may be lost."""
    row, count, threads = METHODS[name], 12, 3
    results = []
    for parallel in (True, False):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(40, 30)), nn.Parameter(torch.randn(40))]
        opt = row.optimizer(params, seed=2, **row.options, **PATHS[path])
        for p in params:
            p.grad = torch.full_like(p, 0.1)

        def several(opt: Any = opt) -> None:
            for _ in range(count):
                opt.step()

        if parallel:
            assert in_threads(threads, several) == []
        else:
            for _ in range(threads):
                several()
        assert opt.param_groups[0]["noise_step"] == threads * count
        assert int(opt.state[params[0]]["step"]) == threads * count
        results.append([*(p.detach() for p in params), *state(opt)])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


@every_path
def test_locks_are_neither_saved_nor_copied(path: str) -> None:
    params = [nn.Parameter(torch.ones(3))]
    params[0].grad = torch.ones(3)
    opt = SGDW(params, **PATHS[path])
    opt.step()
    for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert "_step_lock" not in twin.__dict__
        twin.step()
        assert twin._lock is not opt._lock


def test_a_failed_step_lets_others_go_on() -> None:
    model = network()
    opt = FeatureUPGD(model.parameters(), features=Features(model))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="gates were not measured"):
        opt.step()
    assert in_threads(1, opt.zero_grad) == []
    model(torch.ones(2, 6)).sum().backward()
    assert in_threads(1, opt.step) == []
