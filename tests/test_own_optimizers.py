"""Users' optimizers: what a stack would ignore is refused, anything PyTorch has is run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.running import work, work_stacks
from upgd import UPGD
from upgd.engine import EagerRun, Setting
from upgd.engine.batched import BatchedRun, kind_of, why_eager
from upgd.engine.dense import Learner
from upgd.engine.eager import Divergence, LearnerError
from upgd.engine.general import GeneralStack
from upgd.engine.packing import UnpackableError, pack, unpack
from upgd.ledger import Ledger, RunSpec
from upgd.networks import build
from upgd.optim.foreign import torch_row
from upgd.optim.registry import METHODS, Row, get, register, scalars
from upgd.streams import get as get_problem

PROBLEM = "label-permuted-digits"
OPTIONS = {"window": 20, "hidden": "6", "task_length": 20}


@pytest.fixture(autouse=True)
def methods() -> Iterator[None]:
    """What a test registers is gone afterwards."""
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


class Halting(UPGD):
    def step(self, closure: Any = None) -> Any:
        return None


class Doubled(UPGD):
    def _advance(self, batches: Any) -> None:
        super()._advance(batches)
        super()._advance(batches)


class Hutchinson(UPGD):
    curvature = "hutchinson"


class Hooked(UPGD):
    def __init__(self, params: Any, lr: float = 0.01, **more: Any) -> None:
        super().__init__(params, lr=lr, **more)
        self.register_step_post_hook(lambda *_: None)


class Other(UPGD):
    def __init__(self, params: Any, lr: float = 0.01, **more: Any) -> None:
        super().__init__(params, lr=2 * lr, **more)


class Local(UPGD):
    def __init__(self, params: Any, **more: Any) -> None:
        super().__init__(params, scaling="local", **more)


class Renamed(UPGD):
    """Nothing changed: a stack may run it."""

    def more(self) -> int:
        return 1


def row_of(optimizer: type[UPGD], **options: Any) -> Row:
    class Defaults(Row):
        @property
        def defaults(self) -> dict[str, Any]:
            return METHODS["upgd"].defaults

    return Defaults("mine", "Mine", optimizer, METHODS["upgd"].method, options)


# ------------------------------------------------------------------- what stacks ignore
@pytest.mark.parametrize(
    ("optimizer", "options", "words"),
    [
        (Halting, {}, "overrides step()"),
        (Doubled, {}, "overrides _advance()"),
        (Hutchinson, {}, "overrides curvature"),
        (Hooked, {}, "hooks"),
        (Other, {}, "turns lr=0.01 into 0.02"),
        (Local, {}, "another rule"),
        (UPGD, {"maximize": True}, "maximises"),
        (UPGD, {}, ""),
        (Renamed, {}, ""),
    ],
)
@pytest.mark.parametrize("problem", [PROBLEM, "label-permuted-cifar10"])
def test_what_a_stack_would_ignore_runs_elsewhere(
    optimizer: type[UPGD], options: dict[str, Any], words: str, problem: str
) -> None:
    row = register(row_of(optimizer, **options))
    setting = Setting("mine", {}, seed=0, window=10)
    reason = why_eager(get_problem(problem), setting, "cpu")
    assert row.eager_only == reason
    assert (words in reason) if words else reason == ""
    assert (kind_of(get_problem(problem), setting, "cpu") is None) == bool(words)


def test_stacks_refuse_what_they_would_ignore() -> None:
    register(row_of(Halting))
    problem = get_problem(PROBLEM)
    settings = [Setting("mine", {}, seed=0, window=10)]
    with pytest.raises(
        ValueError, match=r"mine needs the eager engine: Halting overrides step\(\)"
    ):
        BatchedRun(problem, settings, [problem.make(0)], steps=10)
    with pytest.raises(ValueError, match="Halting overrides step"):
        GeneralStack(
            lambda seed, task: build((64, 3, 10), seed),
            [Learner("mine", {}, 0)],
            loss="cross_entropy",
            steps=10,
            window=10,
            shape=(64,),
        )


def test_an_overridden_step_is_honoured(tmp_path: Path) -> None:
    """A learner that never learns is no better than chance, whatever runs it."""
    register(row_of(Halting))
    spec = RunSpec(PROBLEM, "mine", {"lr": 0.1}, 0, 60, OPTIONS)
    with Ledger.open(tmp_path / "study") as ledger:
        ledger.add([spec])
        assert work_stacks(ledger).done == 0
        assert work(ledger).done == 1
        assert ledger.get(spec.key).result.engine == "eager"
        assert (ledger.series(spec.key, "plasticity") == 0).all()


# ---------------------------------------------------------------------------- registry
def test_names_of_the_package_are_refused_and_own_ones_replaced() -> None:
    for name in ("upgd", "UPGD-W", "sgd"):
        with pytest.raises(ValueError, match="this package's"):
            register(torch_row(name, torch.optim.SGD))
    first = register(torch_row("Mine", torch.optim.SGD, lr=0.1))
    second = register(torch_row("mine", torch.optim.SGD, lr=0.2))
    assert get("MINE") == (second, second.defaults)
    assert first.source != second.source
    assert len(first.source) == 16
    with pytest.raises(ValueError, match="letters, digits"):
        register(torch_row("my method", torch.optim.SGD))


def test_hyperparameters_of_a_class_and_of_a_factory() -> None:
    register(torch_row("adam-torch", torch.optim.Adam, lr=0.02, amsgrad=True))
    wanted = {"lr": 0.02, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    assert scalars("adam-torch") == wanted
    opt = get("adam-torch")[0].make(nn.Linear(2, 2), lr=0.5, seed=3, noise=None)
    assert opt.param_groups[0]["lr"] == 0.5
    assert opt.param_groups[0]["amsgrad"] is True
    factory = register(
        torch_row("made", lambda params, rate: torch.optim.SGD(params, rate), rate=1.0)
    )
    assert factory.defaults == {"rate": 1.0}
    assert "optimizer of its own" in factory.eager_only


class NoDefault(torch.optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)


class Closure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.LBFGS, "wants a closure"),
        (Closure, "wants a closure"),
        (NoDefault, "missing 1 required positional argument: 'lr'"),
        (nn.Linear, "no subclass"),
        (lambda params: 3, "made a int"),
        (3, "a function expected"),
    ],
)
def test_what_is_no_optimizer_is_said_in_one_line(optimizer: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        torch_row("mine", optimizer)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("mine: ")


# -------------------------------------------------------------------------- eager runs
class Strange(torch.optim.Optimizer):
    """Keeps all kinds of things, and draws from the global generator."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "names": ("a", None, True)})
        self.count = 0
        self.seen: list[float] = []
        self.first = self.param_groups[0]["params"][0]
        self.draws = torch.Generator().manual_seed(3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.seen = [*self.seen[-2:], float(torch.rand(()))]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(wide=torch.zeros(p.shape, dtype=torch.float64), whole=None)
                    state["nested"] = {"half": torch.zeros(2, dtype=torch.bfloat16), 3: [1.5]}
                    state["times"] = torch.zeros((), dtype=torch.int64)
                state["times"] += 1
                state["wide"] += p.grad.double() / 3
                state["nested"]["half"] += 0.1
                factor = 1 + 0.1 * self.count % 0.5 + sum(self.seen)
                p -= group["lr"] * factor * state["wide"].to(p.dtype) / state["times"]
                p += 0.01 * torch.randn_like(p) + 0.01 * torch.randn(1, generator=self.draws)
        self.first.mul_(0.99)


def run_of(name: str, network: Callable[[], nn.Module] | None = None, **hyper: float) -> EagerRun:
    setting = Setting(name, hyper, seed=3, window=10)
    made = (lambda seed, task: network()) if network else None
    plain: Any = lambda seed, task: build((64, 7, 10), seed)  # noqa: E731
    return EagerRun(get_problem(PROBLEM).make(3), made or plain, setting)


def weights(run: EagerRun) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def test_a_torch_optimizer_learns_as_in_a_plain_loop() -> None:
    register(torch_row("mine", torch.optim.Adam, lr=0.01))
    run = run_of("mine", lr=0.02)
    run.advance(30)
    model, stream = build((64, 7, 10), 3), get_problem(PROBLEM).make(3)
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(30):
        x, y = (torch.from_numpy(part) for part in stream.at(step))
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    assert torch.equal(weights(run), nn.utils.parameters_to_vector(model.parameters()).detach())


@pytest.mark.parametrize(
    "optimizer",
    [Strange, torch.optim.Adam, torch.optim.ASGD, torch.optim.NAdam, torch.optim.Adafactor],
)
def test_resuming_goes_on_bit_for_bit(optimizer: Any) -> None:
    register(torch_row("mine", optimizer, lr=0.02))
    whole, first, second = (run_of("mine") for _ in range(3))
    whole.advance(40)
    first.advance(17)
    arrays, meta = first.state()
    torch.rand(5)
    second.restore(arrays, json.loads(json.dumps(meta)))
    second.advance(23)
    assert torch.equal(weights(whole), weights(second))
    assert str(whole.state()[1]) == str(second.state()[1])
    for name, array in whole.state()[0].items():
        np.testing.assert_array_equal(array, second.state()[0][name], err_msg=name)


def test_an_optimizer_that_draws_leaves_the_users_generator_alone() -> None:
    register(torch_row("mine", Strange))
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    run = run_of("mine")
    run.advance(5)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(12)
    again = run_of("mine")
    again.advance(5)
    assert torch.equal(weights(run), weights(again))


class Unkept(torch.optim.SGD):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.inner = object()


class Raising(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise KeyError("no\nsuch key")


class Exploding(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.fill_(float("inf"))


def test_what_a_checkpoint_cannot_keep_is_said() -> None:
    register(torch_row("mine", Unkept))
    with pytest.raises(UnpackableError, match=r"Unkept.inner is a object; a checkpoint keeps"):
        run_of("mine")


def test_an_optimizer_that_raises_fails_its_run(tmp_path: Path) -> None:
    register(torch_row("mine", Raising))
    with pytest.raises(LearnerError, match=r"^mine, step\(\) at step 0: KeyError"):
        run_of("mine").advance(1)
    spec = RunSpec(PROBLEM, "mine", {}, 0, 60, OPTIONS)
    with Ledger.open(tmp_path / "study") as ledger:
        ledger.add([spec])
        assert work(ledger).failed == 1
        assert "\n" not in str(ledger.get(spec.key).error)


def test_a_loss_that_is_not_finite_is_divergence() -> None:
    register(torch_row("mine", Exploding))
    with pytest.raises(Divergence, match="diverged at step 1"):
        run_of("mine").advance(3)


def test_a_state_of_before_is_read() -> None:
    """As it was written when only our own optimizers could run."""
    whole, first, second = (run_of("adamw") for _ in range(3))
    whole.advance(20)
    first.advance(9)
    arrays, meta = first.state()
    saved = first.optimizer.state_dict()
    old = {k: meta[k] for k in ("step", "meter", "offline")}
    old["groups"] = json.loads(json.dumps([dict(group) for group in saved["param_groups"]]))
    names = ("model/", "optimizer/", "meter/")
    second.restore({k: v for k, v in arrays.items() if k.startswith(names)}, old)
    second.advance(11)
    assert torch.equal(weights(whole), weights(second))


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, (2.5, None, "x", True)], 3: {"nested": torch.arange(3)}},
        torch.tensor([1.5, -2]).bfloat16(),
        torch.zeros(0),
        np.float32(2),
        np.arange(3),
        torch.tensor(1 + 2j),
        [float("inf"), float("-inf")],
    ],
)
def test_packing_keeps_everything(value: Any) -> None:
    arrays: dict[str, Any] = {}
    packed = json.loads(json.dumps(pack(value, "it", arrays), allow_nan=False))
    found = unpack(packed, arrays)
    assert type(found) is type(value)
    assert str(found) == str(value)
    if isinstance(value, Tensor):
        assert found.dtype == value.dtype


def test_own_tensors_are_referred_to() -> None:
    mine, arrays = nn.Parameter(torch.ones(2)), {}
    packed = pack({"x": mine}, "it", arrays, [mine])
    other = nn.Parameter(torch.zeros(2))
    assert unpack(packed, arrays, own=[other])["x"] is other
    assert not arrays
