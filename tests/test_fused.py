"""``fused=True`` against the plain rule with the same noise, on every backend that is at hand.

The Triton kernels run on CUDA where there is a device and in Triton's interpreter otherwise, on
few and small tensors.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.cases import (
    CounterNoise,
    assert_close,
    assert_equal,
    batches,
    differ,
    needs_cuda,
    network,
    rows_of,
    train,
    weights,
)
from upgd import UPGD, Features, FeatureUPGD, StreamingEWC
from upgd.kernels import flat, philox
from upgd.optim import fused
from upgd.optim.ada_upgd import AdamW
from upgd.optim.noise import PhiloxNoise
from upgd.optim.ranks import Ranks
from upgd.optim.registry import METHODS, Row, rules
from upgd.optim.shards import Part

HAS = {name: importlib.util.find_spec(name) is not None for name in ("numba", "triton")}
INTERPRETED = HAS["triton"] and os.environ.get("TRITON_INTERPRET") == "1"
FUSED = {name: row for name, row in rules().items() if "fused" not in row.unsupported}
"""Of layered methods: tests/test_fused_layers.py."""
SHAPES = [(7, 5), (7,), (), (0, 3), (2, 3, 2, 2), (12, 8), (1, 9)]
SMALL = [(5, 3), (5,), ()]

needs_numba = pytest.mark.skipif(not HAS["numba"], reason="needs numba")
every_fused_method = pytest.mark.parametrize("row", rows_of(FUSED))
fast = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=needs_numba), pytest.param("cuda", marks=needs_cuda)]
)


@pytest.fixture(params=["numba", "interpreter", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device's name, with its kernels; the interpreter takes the CPU's place."""
    if request.param == "numba" and not HAS["numba"]:
        pytest.skip("needs numba")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if request.param == "interpreter":
        if not INTERPRETED:
            pytest.skip("needs Triton and TRITON_INTERPRET=1")
        from upgd.kernels import triton_flat
        from upgd.optim.fused_cuda import Cuda

        monkeypatch.setattr(fused, "_backend", lambda kind: Cuda)
        monkeypatch.setattr(triton_flat, "BLOCK", 32)
    return "cuda" if request.param == "cuda" else "cpu"


class Problem:
    """Parameters of given shapes, and the same derivatives at every step for whoever asks."""

    def __init__(
        self, shapes: list[Any], device: str = "cpu", dtype: torch.dtype = torch.float64
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        self.params = [nn.Parameter(p.to(device, dtype)) for p in made]
        self.generator = torch.Generator().manual_seed(6)

    def derive(self, scale: float = 1.0) -> None:
        for p in self.params:
            g, h = (
                torch.randn(p.shape, generator=self.generator, dtype=torch.float64)
                for _ in range(2)
            )
            p.grad = (scale * g).to(p)
            p.curvature = h.to(p)  # type: ignore[attr-defined]

    def run(self, opt: Any, steps: int, scale: float = 1.0) -> Problem:
        for _ in range(steps):
            self.derive(scale)
            opt.step()
        return self

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach() for p in self.params]


PATHS = ({"fused": True}, {"foreach": False})


def optimizers(
    row: Row, device: str, dtype: torch.dtype, shapes: list[Any], **arguments: Any
) -> list[tuple[Problem, Any]]:
    """The same optimizer fused and plain, on two groups of the same problem."""
    pairs = []
    for path in PATHS:
        problem = Problem(shapes, device, dtype)
        other = {"params": problem.params[1:], "lr": 0.005}
        for name, value in (("beta_utility", 0.9), ("sigma", 0.3), ("betas", (0.5, 0.9))):
            if name in row.method.hyper:
                other[name] = value
        noise = {} if "fused" in path else {"noise": PhiloxNoise()}
        groups = [{"params": problem.params[:1]}, other]
        given = {"seed": 2**61 + 3, **row.options, **path, **noise, **arguments}
        pairs.append((problem, row.optimizer(groups, **given)))
    return pairs


def states(opt: Any) -> list[Tensor]:
    params = [p for group in opt.param_groups for p in group["params"]]
    return [v for p in params for _, v in sorted(opt.state.get(p, {}).items())]


# ------------------------------------------------------------------------------ the rules
@fast
@every_fused_method
def test_equals_the_plain_rule(row: Row, device: str) -> None:
    (a, fast_one), (b, plain) = optimizers(row, device, torch.float64, SHAPES, lr=0.02)
    a.run(fast_one, 12), b.run(plain, 12)
    assert_close(a.weights, b.weights, rtol=1e-12, atol=1e-12)
    assert_close(states(fast_one), states(plain), rtol=1e-12, atol=1e-12)


@fast
@pytest.mark.parametrize("name", ["upgd", "n-upgd-2nd-local", "ada-upgd", "s-si", "pgd"])
def test_equals_the_plain_rule_in_single_precision(name: str, device: str) -> None:
    shapes = [(300, 130), (130,), (), (64, 3, 3, 3)]
    (a, fast_one), (b, plain) = optimizers(FUSED[name], device, torch.float32, shapes, lr=0.02)
    a.run(fast_one, 6), b.run(plain, 6)
    assert_close(a.weights, b.weights, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["upgd", "upgd-2nd-local", "ada-upgd", "s-rwalk"])
def test_kernels_without_a_device(name: str, device: str) -> None:
    """Few and small tensors, for the interpreter's sake; on all backends."""
    (a, fast_one), (b, plain) = optimizers(FUSED[name], device, torch.float64, SMALL, lr=0.02)
    a.run(fast_one, 2), b.run(plain, 2)
    assert_close(a.weights, b.weights, rtol=1e-12, atol=1e-12)
    assert_close(states(fast_one), states(plain), rtol=1e-12, atol=1e-12)


@fast
def test_many_steps(device: str) -> None:
    (a, fast_one), (b, plain) = optimizers(METHODS["upgd"], device, torch.float64, [(9, 7), (9,)])
    a.run(fast_one, 300), b.run(plain, 300)
    assert_close(a.weights, b.weights, rtol=1e-10, atol=1e-10)


@fast
def test_groups_may_differ_in_rule_and_noise(device: str) -> None:
    results = []
    for path in PATHS:
        problem = Problem([(9, 4), (9,), (3, 4), (3,)], device)
        p = problem.params
        groups = [
            {"params": p[:1]},
            {"params": p[1:2], "protect": False, "weight_decay": 0.1},
            {"params": p[2:3], "sigma": 0.0, "maximize": True},
            {"params": p[3:], "sigma": 0.0, "protect": False},
        ]
        noise = {} if "fused" in path else {"noise": PhiloxNoise()}
        opt = UPGD(groups, seed=1, sigma=0.5, **path, **noise)
        results.append(problem.run(opt, 10).weights)
    assert_close(*results, rtol=1e-12, atol=1e-12)


@fast
def test_strong_gates(device: str) -> None:
    """Where utilities exceed η in magnitude, the gate is far from one half."""
    results = []
    for path in PATHS:
        params = [nn.Parameter(torch.linspace(1, 30, 4000).to(device).reshape(40, 100))]
        noise = {} if "fused" in path else {"noise": PhiloxNoise()}
        opt = UPGD(params, lr=0.5, seed=3, **path, **noise)
        for _ in range(3):
            params[0].grad = torch.full_like(params[0], 1.0)
            params[0].grad[-1, -1] = -1e-3
            opt.step()
        results.append([p.detach() for p in params])
    assert_close(*results, rtol=1e-6, atol=1e-6)
    assert_close([results[0][0][:1]], [torch.linspace(1, 30, 4000).reshape(40, 100)[:1]], atol=4)


@needs_numba
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            problem = Problem([(400, 301), (400,)], dtype=dtype)
            results.append(problem.run(UPGD(problem.params, seed=2, fused=True), 4).weights)
    finally:
        torch.set_num_threads(before)
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


# ------------------------------------------------------------------------------- tensors
@fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layouts_and_half_precision(dtype: torch.dtype, device: str) -> None:
    """Transposed parameters, gradients of another layout, 16 bits rounded once."""
    results = []
    for path in PATHS:
        problem = Problem([(6, 8), (5, 4, 3, 2)], device, dtype)
        first, second = (p.detach() for p in problem.params)
        problem.params = [
            nn.Parameter(first.t().contiguous().t()),
            nn.Parameter(second.contiguous(memory_format=torch.channels_last)),
        ]
        noise = {} if "fused" in path else {"noise": PhiloxNoise()}
        opt = UPGD(problem.params, seed=4, lr=0.1, **path, **noise)
        for _ in range(4):
            problem.derive()
            p = problem.params[0]
            assert p.grad is not None
            p.grad = p.grad.t().contiguous().t()
            opt.step()
        results.append(problem.weights)
    eps = torch.finfo(dtype).eps
    assert_close(*results, rtol=2 * eps, atol=2 * eps)


@fast
def test_parameters_may_pause(device: str) -> None:
    results = []
    for path in PATHS:
        problem = Problem([(4, 3), (4,), (3, 3)], device)
        noise = {} if "fused" in path else {"noise": PhiloxNoise()}
        opt = UPGD(problem.params, seed=5, **path, **noise)
        for step in range(8):
            problem.derive()
            if step in (2, 3, 6):
                problem.params[1].grad = None
            if step == 5:
                for p in problem.params:
                    p.grad = None
            opt.step()
        results.append([*problem.weights, *states(opt)])
    assert_close(*results, rtol=1e-12, atol=1e-12)


@fast
def test_moved_and_cast_models(device: str) -> None:
    """The optimizer comes before ``.to()``; gradients move; the model changes its type."""
    results = []
    for path in PATHS:
        model = network()
        noise = {} if "fused" in path else {"noise": PhiloxNoise()}
        opt = UPGD(model.parameters(), seed=6, **path, **noise)
        model.to(device)
        train(METHODS["upgd"], opt, model, batches(3, device))
        model.double()
        kept = []
        for batch in batches(3, device, torch.float64):
            train(METHODS["upgd"], opt, model, [batch])
            kept.append([p.grad for p in model.parameters()])  # so that the next are elsewhere
        results.append(weights(model))
    assert_close(*results, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- values of a step
@fast
def test_schedules_and_tensor_lr(device: str) -> None:
    results = []
    for lr in (0.1, torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.1, device=device)):
        problem = Problem([(4, 3), (4,)], device)
        opt = UPGD(problem.params, lr=lr, seed=1, fused=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        for _ in range(5):
            problem.run(opt, 1)
            scheduler.step()
        results.append(problem.weights)
    plain = Problem([(4, 3), (4,)], device)
    opt = UPGD(plain.params, seed=1, foreach=False, noise=PhiloxNoise())
    for step in range(5):
        opt.param_groups[0]["lr"] = 0.1 * 0.9**step
        plain.run(opt, 1)
    for result in results:
        assert_close(result, plain.weights, rtol=1e-6, atol=1e-6)


def test_loss_scale_and_overflow(device: str) -> None:
    """What ``GradScaler`` hands over: its scale, and whether something overflowed."""
    plain, scaled = Problem(SMALL, device), Problem(SMALL, device)
    a = AdamW(plain.params, lr=0.1, fused=True)
    b = AdamW(scaled.params, lr=0.1, fused=True)
    plain.run(a, 1)
    b.grad_scale = torch.tensor(1024.0, device=device)  # type: ignore[attr-defined]
    b.found_inf = torch.zeros(1, device=device)  # type: ignore[attr-defined]
    scaled.run(b, 1, scale=1024.0)
    assert_close(plain.weights, scaled.weights, rtol=1e-12, atol=1e-13)
    before = [w.clone() for w in scaled.weights]
    b.found_inf = torch.ones(1, device=device)  # type: ignore[attr-defined]
    scaled.run(b, 1, scale=1024.0)
    assert_equal(before, scaled.weights)
    assert int(b.skipped_steps) == 1
    del b.grad_scale, b.found_inf  # type: ignore[attr-defined]
    plain.derive()  # the overflowing one
    plain.run(a, 1), scaled.run(b, 1)
    assert_close(plain.weights, scaled.weights, rtol=1e-12, atol=1e-13)


@needs_numba
def test_grad_scaler() -> None:
    """The whole protocol, against plain steps."""
    scaled, plain = network(), network()
    row = METHODS["upgd"]
    a = row.make(scaled, seed=1, fused=True)
    b = row.make(plain, seed=1, foreach=False, noise=PhiloxNoise())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for batch in batches(4):
        a.zero_grad(), b.zero_grad()
        loss = nn.functional.cross_entropy(scaled(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.step(a)
        scaler.update()
        train(row, b, plain, [batch])
    assert_close(weights(scaled), weights(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["upgd", "adamw", "upgd-local"])
def test_nonfinite(name: str, bad: float, device: str, request: pytest.FixtureRequest) -> None:
    if "interpreter" in request.node.name and name != "upgd" and bad != bad:
        pytest.skip("the interpreter is slow")
    row = FUSED[name]
    problem = Problem([(4, 3), (4,)], device)
    opt = row.optimizer(problem.params, seed=1, nonfinite="skip", fused=True, **row.options)
    problem.run(opt, 1)
    before = [*map(torch.clone, [*problem.weights, *states(opt)])]
    problem.derive()
    problem.params[0].grad[2, 1] = bad  # type: ignore[index]
    opt.step()
    after = [*problem.weights, *states(opt)]
    changed = [i for i, (x, y) in enumerate(zip(before, after, strict=True)) if not x.equal(y)]
    assert all(after[i].dim() == 0 and after[i] == before[i] + 1 for i in changed)  # attempts
    assert int(opt.skipped_steps) == 1
    problem.run(opt, 1)
    assert int(opt.skipped_steps) == 1
    assert differ(before[:2], problem.weights)
    opt.nonfinite = "raise"
    before = [*map(torch.clone, [*problem.weights, *states(opt)])]
    problem.derive()
    problem.params[1].grad[0] = bad  # type: ignore[index]
    with pytest.raises(FloatingPointError, match="gradient of parameter 1"):
        opt.step()
    assert_equal(before, [*problem.weights, *states(opt)])
    problem.run(opt, 1)
    assert differ(before[:2], problem.weights)


def test_nonfinite_curvature_raises_by_default_on_cpu() -> None:
    if not HAS["numba"]:
        pytest.skip("needs numba")
    problem = Problem([(4, 3)])
    opt = UPGD(problem.params, order=2, fused=True)
    problem.derive()
    problem.params[0].curvature[0, 0] = float("inf")  # type: ignore[attr-defined]
    with pytest.raises(FloatingPointError, match="curvature"):
        opt.step()
    problem.derive()
    del problem.params[0].curvature  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="needs curvature"):
        opt.step()


def test_shards_agree(device: str) -> None:
    """η and the verdict on a step can be combined with those of other ranks."""

    class Others(Ranks):
        verdicts = 0

        def maximum(self, values: Tensor) -> Tensor:
            return torch.maximum(values, torch.full_like(values, 5.0))

        def agree(self, ok: Tensor) -> Tensor:
            self.verdicts += 1
            return ok & (self.verdicts != 2)

    results = []
    for path in PATHS:
        problem = Problem(SMALL, device)
        noise = {} if "fused" in path else {"noise": PhiloxNoise()}
        opt = UPGD(problem.params, seed=1, nonfinite="skip", **path, **noise)
        opt._meeting = Others(problem.params, opt._ranks.parts, sharded=True)
        results.append([*problem.run(opt, 3).weights, *states(opt)])
    assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scaling", ["global", "local"])
def test_parts_of_parameters(device: str, request: pytest.FixtureRequest, scaling: Any) -> None:
    """The noise of a part is that of its place in the whole; foreach draws it element by element.

    That numbers drawn so are those of the whole is shown in test_distributed.py.
    """
    if "numba" in request.node.callspec.id:
        pytest.skip("the CPU's kernels refuse it: test_distributed.py")
    parts = [
        Part(0, (9, 5), (3, 0), (4, 5)),
        Part(2, (13, 6), (5, 0), (7, 6)),
        Part(4, (9, 3), (4,), (11,)),
        Part(5, (6,), (0,), (6,)),
    ]
    parts = parts[:2] + parts[3:] if scaling == "local" else parts
    results = []
    for path in PATHS:
        problem = Problem([part.size for part in parts], device)
        noise = {} if "fused" in path else {"noise": PhiloxNoise()}
        opt = UPGD(problem.params, seed=1, sigma=0.1, scaling=scaling, **path, **noise)
        opt._meeting = Ranks(problem.params, parts, sharded=True)
        opt._describe_noise()
        results.append([*problem.run(opt, 3).weights, *states(opt)])
    assert_close(*results, rtol=1e-10, atol=1e-12)


@needs_cuda
@pytest.mark.parametrize("name", ["upgd", "upgd-local", "ada-upgd"])
def test_fully_sharded_on_one_device(name: str, tmp_path: Path) -> None:
    """FSDP2 with a world of one process, fused, against the unsharded model."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    where = {"rank": 0, "world_size": 1, "device_id": torch.device("cuda", 0)}
    dist.init_process_group("nccl", f"file://{tmp_path / 'group'}", **where)
    try:
        results = []
        for shard in (False, True):
            model = network("cuda", dtype=torch.float64)
            if shard:
                fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
            opt = METHODS[name].make(model, seed=1, sigma=0.1, fused=True)
            for batch in batches(5, "cuda", torch.float64):
                train(METHODS[name], opt, model, [batch])
            params = [p.full_tensor() if shard else p for p in model.parameters()]
            results.append([p.detach() for p in params])
        assert_close(*results, rtol=1e-10, atol=1e-12)
    finally:
        dist.destroy_process_group()


# --------------------------------------------------------------------------- checkpoints
@fast
@pytest.mark.parametrize("name", ["upgd", "s-ewc"])
def test_resume_is_never_having_stopped(name: str, device: str) -> None:
    row = FUSED[name]
    one, two = Problem(SHAPES, device, torch.float32), Problem(SHAPES, device, torch.float32)
    never = row.optimizer(one.params, seed=9, fused=True)
    one.run(never, 6)
    first = row.optimizer(two.params, seed=9, fused=True)
    two.run(first, 3)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = row.optimizer(two.params, seed=1, fused=True)
    second.load_state_dict(torch.load(file, weights_only=True))
    two.run(second, 3)
    assert_equal(one.weights, two.weights)
    assert_equal(states(never), states(second))


@fast
def test_paths_exchange_checkpoints(device: str) -> None:
    """A state dict does not say which path wrote it."""
    one, two = Problem(SHAPES, device), Problem(SHAPES, device)
    a = UPGD(one.params, seed=9, fused=True)
    b = UPGD(two.params, seed=9, noise=PhiloxNoise())
    for _ in range(2):
        one.run(a, 2), two.run(b, 2)
        saved = a.state_dict(), b.state_dict()
        a.load_state_dict(saved[1]), b.load_state_dict(saved[0])
    one.run(a, 1), two.run(b, 1)
    assert_close(one.weights, two.weights, rtol=1e-12, atol=1e-12)


@needs_numba
def test_copies_and_late_groups() -> None:
    problem = Problem([(4, 3), (4,), (2, 2)])
    opt = UPGD(problem.params[:2], seed=3, fused=True)
    problem.run(opt, 2)
    model, twin = copy.deepcopy((problem.params, opt))
    again = pickle.loads(pickle.dumps(opt))
    assert again.fused
    assert twin.fused
    for p, q in zip(problem.params, model, strict=True):
        q.grad = p.grad.clone() if p.grad is not None else None
    for each, params in ((opt, problem.params), (twin, model)):
        each.add_param_group({"params": params[2:], "sigma": 0.0})
        each.step()
    assert_equal(problem.weights, [p.detach() for p in model])
    opt.state.clear()
    problem.run(opt, 1)
    assert int(opt.state[problem.params[0]]["step"]) == 1


@fast
def test_compiled_step(device: str) -> None:
    problem, other = Problem(SMALL, device), Problem(SMALL, device)
    a = StreamingEWC(problem.params, fused=True)
    problem.run(a, 2)
    b = StreamingEWC(other.params, fused=True)
    step = torch.compile(b.step, backend="eager")
    for _ in range(2):
        other.derive()
        step()
    assert_equal(problem.weights, other.weights)


# ------------------------------------------------------------------------------- refusals
def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    params = list(model.parameters())
    with pytest.raises(ValueError, match="features have no kernels"):
        FeatureUPGD(params, features=Features(model), fused=True)
    with pytest.raises(ValueError, match="exclude each other"):
        UPGD(params, fused=True, foreach=True)
    with pytest.raises(ValueError, match="makes its noise in the kernel"):
        UPGD(params, fused=True, noise=CounterNoise())
    with pytest.raises(TypeError, match="fused must be True or False"):
        UPGD(params, fused=1)  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"numba \(pip install 'numba"):
        UPGD(params, fused=True)


@needs_numba
def test_refusals_at_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = nn.Parameter(torch.ones(2, device="meta"))
    elsewhere.grad = torch.ones(2, device="meta")
    with pytest.raises(ValueError, match="on the meta device"):
        UPGD([elsewhere], fused=True).step()
    p = nn.Parameter(torch.ones(3, 3))
    p.grad = torch.ones(3, 3).to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        UPGD([p], fused=True).step()
    p.grad = torch.ones(3, 3)
    opt = UPGD([p], fused=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs numba"):
        opt.step()


def test_quiet_rules_need_no_eta() -> None:
    """Without noise, a method that protects nothing is gradient descent that traces utilities."""
    assert flat.uses_eta(METHODS["upgd"].method)
    assert flat.uses_eta(METHODS["n-upgd"].method)
    assert not flat.uses_eta(flat.without_noise(METHODS["n-upgd"].method))
    assert flat.uses_eta(flat.without_noise(METHODS["upgd"].method))


# --------------------------------------------------------------------------------- noise
@needs_numba
def test_numba_sigmoids() -> None:
    from upgd.kernels import cpu_math

    x = np.concatenate([np.linspace(-1, 1, 999), [-90, -20, 20, 90, -np.inf, np.inf, -1e30]])
    exact = 1 / (1 + np.exp(-x.clip(-700, 700)))
    far = [float(cpu_math.sigmoid32(np.float32(v))) for v in x]
    np.testing.assert_allclose(far, exact, atol=2e-7)
    near = [float(cpu_math.near_sigmoid32(np.float32(v))) for v in x[:999]]
    np.testing.assert_allclose(near, exact[:999], atol=2e-7)
    assert np.isnan(cpu_math.sigmoid32(np.float32(np.nan)))


def test_a_run_may_begin_late(device: str) -> None:
    """Draws are counted from where the noise source says."""
    results = []
    for path in PATHS:
        problem = Problem(SMALL, device)
        opt = UPGD(problem.params, seed=1, sigma=1.0, noise=PhiloxNoise(first=2**33), **path)
        results.append(problem.run(opt, 1).weights)
    assert_close(*results, rtol=1e-12, atol=1e-12)


def test_philox_noise_is_the_written_generator() -> None:
    shapes = [(5, 3), (0, 2), (), (6,), (2, 3, 2)]
    noise = PhiloxNoise(shapes)
    asked = {"seed": 2**50 + 1, "device": torch.device("cpu"), "dtype": torch.float64}
    for step in (0, 2**33 + 1):
        drawn = noise.draw([12, 15, 1], [22, 0, 15], step=step, **asked)  # type: ignore[arg-type]
        wanted = [
            philox.normal(shapes[i], 2**50 + 1, i, step, dtype=torch.float64).flatten()
            for i in (4, 0, 2)
        ]
        assert torch.equal(drawn, torch.cat(wanted))
        counted = noise.draw([6], [16], step=torch.tensor(step), **asked)  # type: ignore[arg-type]
        assert torch.equal(counted, philox.normal((6,), 2**50 + 1, 3, step, dtype=torch.float64))


# ---------------------------------------------------------------------------------- CUDA
@pytest.mark.skipif(not HAS["triton"], reason="needs Triton")
def test_kernels_compile_for_a_device_and_move_four_numbers_at_a_time() -> None:
    """w, g, U in four lanes are twelve loads; w and U are eight stores; the noise takes its own.

    In 32 bits and in 16.
    """
    command = [sys.executable, "-m", "tests.compile_flat", "upgd"]
    plain = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=plain)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[1:3] for line in lines] == [
        [which, kind] for kind in ("float32", "bfloat16") for which in ("first", "second")
    ]
    for _, which, _, loads, stores in lines:
        assert int(loads) >= 12, lines
        assert int(stores) >= (8 if which == "second" else 0), lines


@needs_cuda
@pytest.mark.parametrize("name", ["upgd", "s-rwalk", "upgd-local"])
def test_no_synchronisation_on_cuda(name: str) -> None:
    row = FUSED[name]
    problem = Problem(SHAPES, "cuda", torch.float32)
    opt = row.optimizer(problem.params, fused=True, **row.options)
    problem.run(opt, 2)
    problem.derive()
    torch.cuda.set_sync_debug_mode("error")
    try:
        opt.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
@pytest.mark.parametrize("name", ["upgd", "adamw", "n-upgd-local"])
def test_cuda_graphs(name: str) -> None:
    """Replays equal steps, and each draws new noise."""
    row = FUSED[name]
    results = []
    for captured in (True, False):
        problem = Problem([(64, 33), (64,)], "cuda", torch.float32)
        opt = row.optimizer(problem.params, seed=1, fused=True, capturable=True, **row.options)
        problem.derive()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            opt.step()
        torch.cuda.current_stream().wait_stream(stream)
        for p in problem.params:
            assert p.grad is not None
            p.grad = p.grad.clone()  # a graph's gradients are elsewhere
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                opt.step()
            for _ in range(4):
                graph.replay()
        else:
            for _ in range(4):
                opt.step()
        torch.cuda.synchronize()
        results.append([*problem.weights, *states(opt)])
    assert_close(*results, rtol=1e-6, atol=1e-7)


@needs_cuda
def test_capture_needs_a_first_step() -> None:
    problem = Problem(SMALL, "cuda", torch.float32)
    opt = UPGD(problem.params, fused=True, capturable=True)
    problem.derive()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="before capturing"), torch.cuda.graph(graph):
        opt.step()


@needs_cuda
def test_cpu_and_cuda_agree() -> None:
    results = []
    for device in ("cpu", "cuda"):
        problem = Problem([(200, 101), (200,)], device, torch.float32)
        results.append(problem.run(UPGD(problem.params, seed=1, fused=True), 20).weights)
    assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_garbage_does_not_spoil_a_capture_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that the collector frees during a capture would invalidate it."""
    from upgd.optim.fused_cuda import Cuda

    first, second = Problem(SMALL, "cuda"), Problem(SMALL, "cuda")
    old = [UPGD(first.params, seed=1, fused=True)]
    first.run(old[0], 3)
    new = UPGD(second.params, seed=1, fused=True)
    second.run(new, 1)
    first_pass = Cuda.first_pass

    def collecting(self: Cuda, *given: Any) -> None:
        if gc.isenabled() and torch.cuda.is_current_stream_capturing():
            old.clear()
            gc.collect()
        first_pass(self, *given)

    monkeypatch.setattr(Cuda, "first_pass", collecting)
    second.run(new, 2)
    assert old
