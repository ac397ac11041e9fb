"""The checks of :func:`upgd.lab.check`: executors against the plainest one, resuming, bad input."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from upgd.engine import EagerRun, Setting
from upgd.engine.dense import Learner
from upgd.engine.feed import Feed
from upgd.engine.general import GeneralStack, unsupported
from upgd.kernels.layout import Layout
from upgd.networks import build
from upgd.optim.base import RuleOptimizer
from upgd.optim.noise import PhiloxNoise
from upgd.optim.registry import get
from upgd.optim.state import StatefulOptimizer
from upgd.streams import get as get_problem

SIZES = (64, 7, 6, 10)
STEPS = 12
SEED = 3
TOLERANCE = 1e-9
"""How far two executors may be apart in float64."""


class EndedError(Exception):
    """A check was skipped or failed; its arguments are the verdict and the reason."""


def _skip(reason: str) -> None:
    """Skip the check if there is a reason to."""
    if reason:
        raise EndedError("skipped", reason)


def _require(holds: bool, otherwise: str) -> None:
    """Let the check fail unless something holds."""
    if not holds:
        raise EndedError("FAILED", otherwise)


def _without(package: str, device: str = "cpu") -> str:
    """Why a compiled path cannot be tried here; empty if it can."""
    if device == "cuda" and not torch.cuda.is_available():
        return "there is no GPU"
    return "" if importlib.util.find_spec(package) else f"{package} is not installed"


class Battery:
    """The checks of one method; each returns what it found, or raises."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.row, self.defaults = get(name)

    def checks(self) -> dict[str, Callable[[], str]]:
        """Those that apply, by name: more to a rule than to an optimizer of PyTorch's kind."""
        bases = getattr(self.row.optimizer, "__mro__", ())
        of_rules: dict[str, Callable[[], str]] = {
            "foreach = plain": partial(self.path, foreach=True),
            "fused on CUDA = plain": partial(self.path, "cuda", "triton", fused=True),
            "general stack = eager": self.general_stack,
            "stack on CUDA = eager": self.cuda_stack,
            "sigma=0 is no noise": self.no_noise,
        }
        of_states: dict[str, Callable[[], str]] = {
            "fused on CPU = plain": partial(self.path, "cpu", "numba", fused=True),
            "stack on CPU = eager": self.cpu_stack,
            "neighbours in a stack": self.neighbours,
            "state_dict": self.state_dict,
            "bfloat16": self.bfloat16,
            "NaN gradient": self.nan_gradient,
        }
        of_all: dict[str, Callable[[], str]] = {
            "same seed, same bits": self.determinism,
            "run resumed": self.resumed,
            "finite on digits": self.finite,
            "loss falls": self.loss_falls,
        }
        found = of_rules if RuleOptimizer in bases else {}
        return {**found, **(of_states if StatefulOptimizer in bases else {}), **of_all}

    # ------------------------------------------------------------------------ optimizers
    def make(
        self, dtype: torch.dtype = torch.float64, device: str = "cpu", **given: Any
    ) -> tuple[nn.Module, Any]:
        model = build(SIZES, SEED).to(device, dtype)
        return model, self.row.make(model, **{**self.defaults, "seed": SEED, **given})

    def trained(self, dtype: torch.dtype = torch.float64, **given: Any) -> list[Tensor]:
        """The weights after some steps, by Philox's noise."""
        model, opt = self.make(dtype, **{"noise": PhiloxNoise(), **given})
        _train(model, opt, 0, STEPS)
        return _weights(model)

    def path(self, device: str = "cpu", needs: str = "torch", **given: Any) -> str:
        if "fused" in given:
            _skip(self.row.unsupported.get("fused", "") or _without(needs, device))
        return _close(self.trained(foreach=False), self.trained(device=device, **given))

    def state_dict(self) -> str:
        (model, opt), (other, fresh) = self.make(), self.make()
        _train(model, opt, 0, STEPS // 2)
        file = io.BytesIO()
        torch.save((model.state_dict(), opt.state_dict()), file)
        file.seek(0)
        weights, state = torch.load(file)
        other.load_state_dict(weights)
        fresh.load_state_dict(state)
        for each in ((model, opt), (other, fresh)):
            _train(*each, STEPS // 2, STEPS)
        return _same(_weights(model), _weights(other))

    def bfloat16(self) -> str:
        start = _weights(build(SIZES, SEED))
        single, half = self.trained(torch.float32), self.trained(torch.bfloat16)
        _require(_finite(half), "weights are not finite")
        moved, size = _difference(single, start), max(float(w.abs().max()) for w in single)
        return _close(single, half, 0.5 * moved + 0.1 * size)

    def nan_gradient(self) -> str:
        for mode in ("raise", "skip"):
            model, opt = self.make(nonfinite=mode)
            _train(model, opt, 0, 2)
            before = _weights(model)
            _backward(model, opt, 2)
            for p in model.parameters():
                p.grad = torch.full_like(p, torch.nan)
            with suppress(FloatingPointError):
                opt.step()
                _require(mode == "skip", "step() took it with nonfinite='raise'")
            _same(before, _weights(model), f"weights changed with nonfinite={mode!r}")
        return "refused, or skipped without change"

    def no_noise(self) -> str:
        if "noise" not in self.row.needs or "sigma" not in self.row.hyper:
            _skip("it has no noise with a hyperparameter called sigma")
        return _close(self.trained(sigma=0.0), self.trained(noise=_Silence()))

    def loss_falls(self) -> str:
        model, opt = self.make(torch.float32)
        losses = []
        for _ in range(100):
            losses.append(_backward(model, opt, 0))
            opt.step()
        found = f"{losses[0]:.4f} to {losses[-1]:.4f} in 100 steps on one batch"
        _require(losses[-1] < losses[0], found)
        return found

    # --------------------------------------------------------------------------- engines
    def eager(self, dtype: torch.dtype = torch.float32, seed: int = SEED) -> EagerRun:
        def network(seed: int, task: int) -> nn.Module:
            return nn.Sequential(_As(dtype), _network(seed, task).to(dtype))

        return EagerRun(_stream(seed), network, Setting(self.name, {}, seed, window=1))

    def compare_stack(self, make: Callable[..., Any]) -> str:
        run = self.eager(torch.float64)
        run.advance(STEPS)
        expected = torch.cat([p.flatten() for p in _weights(run.model)])
        return _close([expected], [self.stacked(make, [SEED, SEED + 1], dtype=torch.float64)])

    def stacked(self, make: Callable[..., Any], seeds: Sequence[int], **given: Any) -> Tensor:
        """The weights of the first learner of a stack after some steps."""
        common = {"loss": "cross_entropy", "steps": STEPS, "window": 1, **given}
        stack = make([Learner(self.name, {}, seed) for seed in seeds], **common)
        stack.advance(Feed([_stream(seed) for seed in seeds]).chunk(0, STEPS))
        places = stack.layout.places if hasattr(stack, "layout") else slice(None)
        return torch.as_tensor(stack.weights[stack.order.index(0)]).cpu()[places]

    def cpu_stack(self) -> str:
        return self.compare_stack(self._cpu())

    def neighbours(self) -> str:
        alone, among = (self.stacked(self._cpu(), seeds) for seeds in ([SEED], [SEED, 0, 1]))
        return _same([alone], [among])

    def general_stack(self) -> str:
        _skip(unsupported(Learner(self.name, {}, SEED)) or "")
        return self.compare_stack(partial(GeneralStack, _network, shape=SIZES[:1]))

    def cuda_stack(self) -> str:
        _skip(self.row.eager_only or _without("triton", "cuda"))
        from upgd.engine.dense_cuda import CudaStack

        return self.compare_stack(partial(CudaStack, Layout(SIZES), activation="relu"))

    def _cpu(self) -> Callable[..., Any]:
        _skip(self.row.eager_only or _without("numba"))
        from upgd.engine.dense_cpu import CpuStack
        from upgd.engine.layered_cpu import LayeredCpuStack

        stack: Callable[..., Any] = LayeredCpuStack if self.row.method.layered else CpuStack
        return partial(stack, Layout(SIZES), activation="relu")

    def determinism(self) -> str:
        runs = [self.eager() for _ in range(2)]
        for run in runs:
            run.advance(STEPS)
        first, second = (_weights(run.model) for run in runs)
        return _same(first, second)

    def resumed(self) -> str:
        run, other = self.eager(), self.eager()
        run.advance(STEPS // 2)
        other.restore(*run.state())
        for each in (run, other):
            each.advance(STEPS - STEPS // 2)
        return _same(_weights(run.model), _weights(other.model))

    def finite(self) -> str:
        run = self.eager()
        run.advance(200)  # raises where the loss or a gradient is not finite
        _require(_finite(_weights(run.model)), "weights are not finite after 200 steps")
        return "200 steps"


# ------------------------------------------------------------------------------------ pieces
class _As(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class _Silence(PhiloxNoise):
    """Noise that is zero everywhere."""

    def draw(self, *args: Any, **given: Any) -> Tensor:
        return torch.zeros_like(super().draw(*args, **given))


def _network(seed: int, task: int) -> nn.Module:
    return build(SIZES, seed, task=task)


def _stream(seed: int) -> Any:
    return get_problem("label-permuted-digits").make(seed)


def _backward(model: nn.Module, opt: Any, step: int) -> float:
    """The loss of a batch and its gradients."""
    first = next(model.parameters())
    x, y = (torch.from_numpy(part).to(first.device) for part in _stream(SEED).at(step, 8))
    opt.zero_grad()
    outputs = model(x.to(first.dtype))
    loss = F.cross_entropy(outputs if first.dtype == torch.float64 else outputs.float(), y)
    getattr(opt, "backward", Tensor.backward)(loss)
    return float(loss.detach())


def _train(model: nn.Module, opt: Any, first: int, stop: int) -> None:
    for step in range(first, stop):
        _backward(model, opt, step)
        opt.step()


def _weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().cpu().clone() for p in model.parameters()]


def _finite(weights: Sequence[Tensor]) -> bool:
    return all(bool(w.isfinite().all()) for w in weights)


def _difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The largest; infinite where something is not a number."""
    found = max(
        float((a.double() - b.double()).abs().max()) for a, b in zip(one, other, strict=True)
    )
    return found if found == found else float("inf")


def _close(one: Sequence[Tensor], other: Sequence[Tensor], limit: float = TOLERANCE) -> str:
    found = _difference(one, other)
    _require(found <= limit, f"weights differ by up to {found:.2g}, more than {limit:.2g}")
    return f"weights differ by up to {found:.2g}"


def _same(one: Sequence[Tensor], other: Sequence[Tensor], what: str = "weights differ") -> str:
    same = all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    _require(same, f"{what}, by up to {_difference(one, other):.2g}")
    return "bit for bit"
