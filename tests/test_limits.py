"""Huge but finite weights and derivatives: a step refuses them, or everything stays finite."""

from __future__ import annotations

import importlib.util
import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases import assert_equal, every_method, loss_of, network, state, watching, weights
from tests.cases import batches as samples
from upgd import UPGD, StreamingRWalk
from upgd.optim.registry import METHODS, Row

PATHS: dict[str, dict[str, Any]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
if importlib.util.find_spec("numba") is None:
    del PATHS["fused"]
every_path = pytest.mark.parametrize("path", PATHS)
MAX = torch.finfo(torch.float32).max


class Case:
    """A model with an optimizer, and derivatives of our own choice."""

    def __init__(self, row: Row, path: str, dtype: torch.dtype = torch.float32, **more: Any):
        if path in row.unsupported:
            pytest.skip(row.unsupported[path])
        self.row = row
        self.model = network(dtype=dtype)
        self.params = list(self.model.parameters())
        arguments = {"seed": 1, **row.options, **PATHS[path], **more}
        watched = watching(row, self.model)
        self.opt: Any = row.optimizer(self.model.named_parameters(), **arguments, **watched)

    def derive(self, scale: float, seed: int = 0) -> None:
        """Derivatives of random signs; the largest magnitude is `scale`, most are near it."""
        generator = torch.Generator().manual_seed(seed)
        self.opt.zero_grad()
        if "layers" in self.row.needs:
            loss_of(self.model, samples(1, dtype=self.params[0].dtype)[0]).backward()
            for layer in self.opt.layers.all:
                records = [(self._huge(x, scale, generator), d) for x, d in layer._records]
                layer._records = [(x, self._huge(d, scale / len(d), generator)) for x, d in records]
        if "gates" in self.row.needs:
            loss_of(self.model, samples(1, dtype=self.params[0].dtype)[0]).backward()
            for layer in self.opt.features.layers:
                layer.first = self._huge(layer.params[0][:, 0], scale, generator)
                if "curvature" in self.row.needs:
                    layer.second = self._huge(layer.params[0][:, 0], scale, generator)
        for p in self.params:
            p.grad = self._huge(p, scale, generator)
            if "curvature" in self.row.needs and "gates" not in self.row.needs:
                p.curvature = self._huge(p, scale, generator)  # type: ignore[attr-defined]

    @staticmethod
    def _huge(like: Tensor, scale: float, generator: torch.Generator) -> Tensor:
        signs = torch.randn(like.shape, generator=generator).sign()
        sizes = 1 - 0.5 * torch.rand(like.shape, generator=generator).round()
        return (signs * sizes).to(like).mul_(scale)

    @property
    def everything(self) -> list[Tensor]:
        return [*weights(self.model), *state(self.opt)]

    @property
    def limit(self) -> float:
        dtype = self.params[0].dtype
        double = dtype == torch.float64
        return self.row.method.limit(torch.float64 if double else torch.float32)

    def assert_finite(self) -> None:
        assert all(bool(t.isfinite().all()) for t in self.everything)


@every_path
@every_method
def test_up_to_the_limit_everything_stays_finite(row: Row, path: str) -> None:
    check_up_to_the_limit(row, path, torch.float32)


@every_path
@pytest.mark.parametrize("name", ["upgd-2nd-local", "ada-upgd", "s-rwalk"])
def test_up_to_the_limit_in_double_precision(name: str, path: str) -> None:
    check_up_to_the_limit(METHODS[name], path, torch.float64)


def check_up_to_the_limit(row: Row, path: str, dtype: torch.dtype) -> None:
    """Both modes, several steps, weights at the limit as well, settings that are large."""
    large = {"lr": 1.0, "weight_decay": 2.0, "sigma": 10.0, "kappa": 10.0}
    for nonfinite in ("raise", "skip"):
        hyper = {name: large[name] for name in large if name in row.method.hyper}
        case = Case(row, path, dtype, nonfinite=nonfinite, **hyper)
        for step in range(4):
            case.derive(case.limit, step)
            with torch.no_grad():
                for p in case.params:
                    p.copy_(case._huge(p, case.limit, torch.Generator().manual_seed(step + 50)))
            case.opt.step()
            case.assert_finite()
        assert int(case.opt.skipped_steps) == 0


@every_path
@every_method
def test_beyond_the_limit_is_as_not_finite(row: Row, path: str) -> None:
    over = float(torch.tensor(row.method.limit(torch.float32)).nextafter(torch.tensor(MAX)))
    cases = [("gradient", 3e38), ("weight", over), ("curvature", over), ("gate derivative", over)]
    cases += [("input", over), ("derivative by the output", over)]
    for nonfinite in ("raise", "skip"):
        for what, size in cases:
            case = Case(row, path, nonfinite=nonfinite)
            case.derive(1.0)
            case.opt.step()
            case.derive(1.0, 1)
            if not plant(case, what, size):
                continue
            before = case.everything
            if nonfinite == "raise":
                of_layer = what not in ("gradient", "weight", "curvature")
                name = r"layer '2'" if of_layer else r"parameter '2\.weight'"
                with pytest.raises(FloatingPointError, match=f"the {what} of {name}.*limit"):
                    case.opt.step()
                assert_equal(before, case.everything)
            else:
                case.opt.step()
                pairs = zip(before, case.everything, strict=True)
                changed = [(x, y) for x, y in pairs if not torch.equal(x, y)]
                assert all(y.dim() == 0 and y == x + 1 for x, y in changed)  # attempts
                assert int(case.opt.skipped_steps) == 1


def plant(case: Case, what: str, size: float) -> bool:
    """Put one huge number where a step reads it; False where this method reads none."""
    p = case.params[2]
    if what == "weight":
        p.data[1, 1] = size
    elif what == "gradient":
        assert p.grad is not None
        p.grad[1, 1] = -size
    elif what == "curvature" and hasattr(p, "curvature"):
        p.curvature[1, 1] = size
    elif what == "gate derivative" and "gates" in case.row.needs:
        case.opt.features.layers[1].first[1] = size
    elif what in ("input", "derivative by the output") and "layers" in case.row.needs:
        case.opt.layers.all[1]._records[0][what != "input"][1, 1] = size
    else:
        return False
    return True


@every_path
@every_method
def test_a_huge_gradient_never_ends_in_silence(row: Row, path: str) -> None:
    """Whatever its size, weights and states are finite after every step, until one raises."""
    for exponent in range(8, 39, 5):
        case = Case(row, path, nonfinite="raise")
        for seed, size in enumerate((1.0, 10.0**exponent, 1.0, 1.0)):
            case.derive(size, seed)
            try:
                case.opt.step()
            except FloatingPointError:
                break
            finally:
                case.assert_finite()


@every_path
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named(path: str, bad: float) -> None:
    """However they came about, for example by a step size of 1e38."""
    case = Case(METHODS["upgd"], path)
    case.derive(1.0)
    with torch.no_grad():
        case.params[2][0, 0] = bad
    with pytest.raises(FloatingPointError, match=r"weight of parameter '2\.weight'.*not finite"):
        case.opt.step()


@every_path
@pytest.mark.parametrize("name", ["sgdw", "adamw", "upgd"])
def test_growing_weights_are_noticed(name: str, path: str) -> None:
    """A decay that multiplies weights by -2 at every step overflows in the end, not silently."""
    case = Case(METHODS[name], path, lr=1.0, weight_decay=3.0)
    with pytest.raises(FloatingPointError, match="weight of parameter"):  # noqa: PT012
        for step in range(200):
            case.derive(1e-3, step)
            case.opt.step()
            case.assert_finite()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_path
def test_half_precision_has_the_limit_of_its_arithmetic(path: str, dtype: torch.dtype) -> None:
    case = Case(METHODS["ada-upgd"], path, dtype)
    largest = min(float(torch.finfo(dtype).max), case.limit)
    case.derive(largest)
    case.opt.step()
    case.assert_finite()
    if dtype == torch.bfloat16:
        case.derive(4 * case.limit)
        with pytest.raises(FloatingPointError, match=r"gradient of parameter.*limit"):
            case.opt.step()


@every_path
def test_the_unscaled_gradient_counts(path: str) -> None:
    """``GradScaler`` multiplies gradients; what is left after the division is compared."""
    for scale, skipped in ((2.0**20, 0), (1.0, 1)):
        case = Case(METHODS["upgd"], path, capturable=True)
        case.derive(case.limit * 2.0**10)
        case.opt.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
        case.opt.found_inf = torch.zeros(1)  # type: ignore[attr-defined]
        case.opt.step()
        assert int(case.opt.skipped_steps) == skipped


@every_path
def test_parameters_of_two_types_have_limits_of_their_own(path: str) -> None:
    single, double = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3).double())
    for bad in (single, double):
        opt = UPGD([single, double], nonfinite="skip", **PATHS[path])
        single.grad, double.grad = torch.ones(3), torch.full((3,), 1e100, dtype=torch.float64)
        opt.step()
        assert int(opt.skipped_steps) == 0
        assert bad.grad is not None
        bad.grad.fill_(1e30 if bad is single else 1e200)
        opt.step()
        assert int(opt.skipped_steps) == 1


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton and TRITON_INTERPRET=1",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["upgd", "upgd-2nd-local", "s-rwalk"])
def test_triton_kernels_have_the_same_limit(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from upgd.kernels import triton_flat
    from upgd.optim import fused
    from upgd.optim.fused_cuda import Cuda

    monkeypatch.setattr(fused, "_backend", lambda kind: Cuda)
    monkeypatch.setattr(triton_flat, "BLOCK", 32)
    row = METHODS[name]
    params = [nn.Parameter(torch.ones(2, 3, dtype=dtype)), nn.Parameter(torch.ones(2, dtype=dtype))]
    opt = row.optimizer(params, fused=True, nonfinite="skip", **row.options)
    limit = row.method.limit(dtype)
    skipped = 0
    for what, size in (("g", limit), ("g", 2 * limit), ("w", 2 * limit), ("h", 2 * limit)):
        if what == "h" and "curvature" not in row.needs:
            continue
        for p in params:
            p.data.fill_(1.0)
            p.grad, p.curvature = torch.ones_like(p), torch.ones_like(p)
        {"g": params[0].grad, "w": params[0].data, "h": params[0].curvature}[what][1, 1] = size
        opt.step()
        skipped += size > limit
        assert int(opt.skipped_steps) == skipped
        assert all(bool(t.isfinite().all()) for t in [*params, *state(opt)])


def test_limits() -> None:
    """Documented in docs/optimizers.md."""
    assert METHODS["upgd"].method.limit(torch.float32) == 2.0**56
    assert METHODS["adamw"].method.limit(torch.float64) == 2.0**504
    assert METHODS["upgd-2nd"].method.limit(torch.float32) == 2.0**37
    assert StreamingRWalk.consolidation.limit(torch.float64) == 2.0**336
