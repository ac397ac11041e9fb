"""What the tests share: a small network, a stream of batches, and a noise source of our own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from upgd.optim.features import Features
from upgd.optim.layers import Layers
from upgd.optim.registry import METHODS, Row, rules

SWITCHES = {"feature", "n", "2nd", "local"}
"""UPGD's sixteen variants are named by those that are on."""


ALIKE = {
    *("l2-init", "weight-clipping-adam", "fade", "fade-1st", "gated-upgd"),
    *("continual-backprop", "redo", "redo-adam"),
}
"""Methods that take the same paths through the package as others that are tested."""


def is_repetition(name: str) -> bool:
    """Whether a method is in :data:`ALIKE`, or a variant of UPGD with an odd number of switches.

    In the other half of these, any three switches have all combinations of on and off; without
    "feature", any two.
    """
    if name in ALIKE:
        return True
    words = name.split("-")
    switches = set(words) - {"upgd"}
    return "upgd" in words and switches <= SWITCHES and len(switches) % 2 == 1


def rows_of(names: Iterable[str], slow: Callable[[str], bool] = is_repetition) -> list[Any]:
    """Rows of the registry for ``parametrize``; repetitions are slow."""
    marks = {True: pytest.mark.slow, False: ()}
    return [pytest.param(METHODS[name], id=name, marks=marks[slow(name)]) for name in names]


RULES = rules()
"""The methods that `RuleOptimizer` runs."""
every_method = pytest.mark.parametrize("row", rows_of(METHODS))
"""All of the registry; repetitions are slow."""
every_rule = pytest.mark.parametrize("row", rows_of(RULES))
every_noisy_method = pytest.mark.parametrize(
    "row", rows_of(name for name, row in METHODS.items() if "noise" in row.needs)
)


def every_method_with(name: str, *values: Any) -> Any:
    """Every method with each value of an argument; without True where the method lacks it.

    Repetitions are slow.
    """
    found = [
        pytest.param(
            *(row, value),
            id=f"{row.name}-{value}",
            marks=pytest.mark.slow if is_repetition(row.name) else (),
        )
        for row in METHODS.values()
        for value in values or (True, False)
        if value is not True or name not in row.unsupported
    ]
    return pytest.mark.parametrize(("row", name), found)


PATHS: dict[str, dict[str, Any]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "packed": {"foreach": True, "nonfinite": "skip"},
    "fused": {"fused": True},
}
"""How a step may run, as arguments of an optimizer."""
if importlib.util.find_spec("numba") is None:
    del PATHS["fused"]
every_path = pytest.mark.parametrize("path", PATHS)


def path_of(row: Row, path: str) -> dict[str, Any]:
    """The arguments of a path; skips the test where the method lacks it."""
    for name, value in PATHS[path].items():
        if value is True and name in row.unsupported:
            pytest.skip(row.unsupported[name])
    return PATHS[path]


def devices() -> list[Any]:
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return ["cpu", pytest.param("cuda", marks=missing)]


every_device = pytest.mark.parametrize("device", devices())
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def seed_torch(seed: int) -> None:
    """As torch.manual_seed, which formats a stack for each kind of device that is not there."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def network(device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Two hidden layers; the same weights on every device."""
    seed_torch(seed)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 3))
    return model.to(device, dtype)


def batches(count: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Any]:
    """Inputs and labels, the same on every device."""
    generator = torch.Generator().manual_seed(42)
    return [
        (
            torch.randn(8, 6, generator=generator).to(device, dtype),
            torch.randint(3, (8,), generator=generator).to(device),
        )
        for _ in range(count)
    ]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).float(), y)


def watching(row: Row, model: nn.Module) -> dict[str, Any]:
    """What a method's class takes besides the parameters of a model that it must watch."""
    if "layers" in row.needs:
        return {"layers": Layers(model)}
    return {"features": Features(model)} if "gates" in row.needs else {}


def provide(row: Row, opt: Any, model: nn.Module) -> None:
    """Leave some curvature where a second-order method looks for it."""
    if "curvature" not in row.needs:
        return
    if "gates" in row.needs:
        for layer in opt.features.layers:
            layer.second = layer.first.abs() * 0.5
    else:
        for p in model.parameters():
            if p.grad is not None:
                p.curvature = p.detach() ** 2 + p.grad**2


def train(
    row: Row,
    opt: Any,
    model: nn.Module,
    stream: list[Any],
    step: Callable[[], Any] | None = None,
    scale: float = 1.0,
) -> None:
    """One update per batch."""
    for batch in stream:
        opt.zero_grad()
        (scale * loss_of(model, batch)).backward()
        provide(row, opt, model)
        (step or opt.step)()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def state(opt: Any) -> list[Tensor]:
    """Copies of all state tensors, in order."""
    params = [p for group in opt.param_groups for p in group["params"]]
    return [v.clone() for p in params for _, v in sorted(opt.state.get(p, {}).items())]


def assert_equal(a: list[Tensor], b: list[Tensor]) -> None:
    """Bit for bit."""
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x.cpu(), y.cpu())


def assert_close(a: list[Tensor], b: list[Tensor], rtol: float = 1e-5, atol: float = 1e-7) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x.cpu(), y.cpu(), rtol=rtol, atol=atol)


def differ(a: list[Tensor], b: list[Tensor]) -> bool:
    return any(not torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))


class CounterNoise:
    """A noise source as the laboratory will have one: a function of (seed, step, index)."""

    def draw(
        self, sizes: Any, offsets: Any, *, seed: int, step: Any, device: Any, dtype: Any
    ) -> Tensor:
        parts = [
            np.random.default_rng([seed, int(step), offset]).standard_normal(size)
            for size, offset in zip(sizes, offsets, strict=True)
        ]
        return torch.as_tensor(np.concatenate(parts)).to(device, dtype)
