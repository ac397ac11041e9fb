"""16-bit weights and traces: stochastic rounding, master weights, low-precision traces."""

from __future__ import annotations

import copy
import io
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases import (
    PATHS,
    RULES,
    assert_equal,
    every_device,
    every_method,
    every_path,
    is_repetition,
    needs_cuda,
)
from upgd import SGDW, UPGD, AdaUPGD, Features, FeatureUPGD
from upgd.kernels.philox import philox4x32
from upgd.optim import fused, memory, rounding
from upgd.optim.noise import ROUNDING, PhiloxNoise
from upgd.optim.ranks import Ranks
from upgd.optim.registry import METHODS, Row
from upgd.optim.rounding import stochastic
from upgd.optim.shards import Part

BF16, F16 = torch.bfloat16, torch.float16
OPTIONS: dict[str, dict[str, Any]] = {
    "stochastic": {"rounding": "stochastic"},
    "traces": {"trace_dtype": BF16},
    "both": {"rounding": "stochastic", "trace_dtype": BF16},
    "master": {"master_weights": True},
}
every_option = pytest.mark.parametrize("option", OPTIONS)


def bits_of(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**16, (count,), generator=generator, dtype=torch.int32)


# ------------------------------------------------------------------- the rounding itself
def neighbours(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The numbers of `dtype` below and above, from the nearest one."""
    near = x.to(dtype)
    wide = near.double()
    low = torch.where(wide <= x.double(), near, near.nextafter(torch.full_like(near, -math.inf)))
    high = torch.where(wide >= x.double(), near, near.nextafter(torch.full_like(near, math.inf)))
    return low.double(), high.double()


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("value", [1.001, -0.3, 1e-3, -7e-5, 3e-6, 5e-8, 1234.5, 1e-20, 1e-39])
def test_rounding_is_unbiased(dtype: torch.dtype, value: float) -> None:
    """Only the two neighbours occur, and their mean is the number."""
    n = 1 << 17
    x = torch.full((n,), value)
    found = stochastic(x, bits_of(n), dtype)
    assert found.dtype == dtype
    low, high = neighbours(x[:1], dtype)
    assert set(found.double().tolist()) <= {float(low), float(high)}
    exact = float(x[0].double())
    spacing = float(high - low)
    share = (exact - float(low)) / spacing if spacing else 0.0
    error = spacing * math.sqrt(share * (1 - share) / n)
    # Bits beyond those that are drawn are cut: at most 2⁻¹⁶ of the spacing (float16: 2⁻¹³).
    cut = spacing * 2.0 ** (-16 if dtype == BF16 else -13)
    assert abs(float(found.double().mean()) - exact) <= 5 * error + cut


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_what_the_type_has_stays(dtype: torch.dtype) -> None:
    """Each of the 65536 patterns, whatever the bits; infinities and NaN among them."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers = patterns.view(dtype)
    for seed in range(3):
        found = stochastic(numbers.float(), bits_of(2**16, seed), dtype)
        nan = numbers.isnan()
        assert torch.equal(found.isnan(), nan)
        assert torch.equal(found[~nan], numbers[~nan])


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_rounding_makes_no_infinity(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    beyond = torch.finfo(torch.float32).max if dtype == BF16 else 65535.9
    x = torch.tensor([largest, beyond, -beyond])
    for bits in (0, 1, 2**16 - 1):
        found = stochastic(x, torch.full((3,), bits, dtype=torch.int32), dtype)
        assert found.tolist() == [largest, largest, -largest]


MUTANTS: dict[str, Callable[[Tensor, Tensor, torch.dtype], Tensor]] = {
    "to the nearest": lambda x, bits, dtype: x.to(dtype),
    "down": lambda x, bits, dtype: rounding.stochastic(x, bits * 0, dtype),
    "fair coins": lambda x, bits, dtype: rounding.stochastic(x, bits & 0x8000, dtype),
    "one bit short": lambda x, bits, dtype: rounding.stochastic(x, bits >> 1, dtype),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_test_of_bias_bites(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_low_precision.stochastic", MUTANTS[name])
    with pytest.raises(AssertionError):
        test_rounding_is_unbiased(BF16, 1.001)


def test_every_share_is_exact() -> None:
    """Of the 2¹⁶ bits, as many round up as the number is 2⁻¹⁶ spacings above its neighbour."""
    every = torch.arange(2**16, dtype=torch.int32)
    for up in (1, 2, 777, 40_000, 65_535):
        x = torch.full((2**16,), 1.0) * (1 + up * 2.0**-23)
        found = stochastic(x, every, BF16)
        assert int((found > 1).sum()) == up


# ------------------------------------------------------------------------ the random bits
def test_the_bits_are_those_of_the_generator() -> None:
    """Word by word against Philox, with keys that no perturbation has."""
    shapes = [(5, 3), (2,), (3, 2, 2), ()]
    source = PhiloxNoise(shapes)
    seed, step = 2**61 + 3, 2**33 + 7
    offsets = [0, 15, 17, 29]
    for draw in range(3):
        found = source.bits(offsets, draw, seed=seed, step=step, device=torch.device("cpu"))
        wanted = []
        for number, shape in enumerate(shapes):
            rows = shape[0] if shape else 1
            width = math.prod(shape[1:])
            span = -(-rows // 4) * width
            for e in range(rows * width):
                counter = [e % span, number, step & 0xFFFFFFFF, step >> 32]
                key = (seed & 0xFFFFFFFF, ((seed >> 32) + ROUNDING + draw) & 0xFFFFFFFF)
                words = philox4x32([torch.tensor(c) for c in counter], key)
                wanted.append(int(words[e // span]))
        assert found.tolist() == wanted


def test_bits_of_parts_are_those_of_the_whole() -> None:
    shapes, sizes = [(9, 5), (3, 2, 2)], [45, 12]
    question: Any = {"seed": 5, "step": 3, "device": torch.device("cpu")}
    whole = PhiloxNoise(shapes).bits([0, 45], 1, **question).split(sizes)
    parts = [Part(0, (9, 5), (3, 0), (4, 5)), Part(1, (3, 2, 2), (1, 0, 1), (2, 2, 1))]
    source = PhiloxNoise()
    source.describe(parts)
    held = [len(part.indices()) for part in parts]
    for part, bits, all_ in zip(
        parts, source.bits([0, 45], 1, **question).split(held), whole, strict=True
    ):
        assert torch.equal(bits, all_[part.indices()])


def test_bits_are_independent_of_steps_weights_and_the_noise() -> None:
    source = PhiloxNoise([(64, 64)])
    device = torch.device("cpu")
    draws = [
        source.bits([0], draw, seed=seed, step=step, device=device).double()
        for draw, seed, step in ((0, 1, 0), (0, 1, 1), (1, 1, 0), (0, 2, 0))
    ]
    noise = source.draw([4096], [0], seed=1, step=0, device=device, dtype=torch.float64)
    table = torch.corrcoef(torch.stack([*draws, noise]))
    assert float((table - torch.eye(5)).abs().max()) < 5 / math.sqrt(4096)


# ------------------------------------------------------------------------------ learning
def regression(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 16, generator=generator)
    return x, torch.tanh(x[:, :4] @ torch.randn(4, 2, generator=generator))


def fit(make: Callable[[Any], Any], dtype: torch.dtype, steps: int = 100) -> tuple[float, float]:
    """Losses before and after, of a network whose weights are `dtype`; sums are float32's."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))
    for p in model.parameters():
        p.data.mul_(2).round_(decimals=1)  # large weights, small steps
        p.data = p.data.bfloat16().to(dtype)
    opt = make(model)
    x, y = regression()

    def loss() -> Tensor:
        layers = iter(model.parameters())
        hidden = torch.tanh(nn.functional.linear(x, next(layers).float(), next(layers).float()))
        out = nn.functional.linear(hidden, next(layers).float(), next(layers).float())
        return (out - y).square().mean()

    before = float(loss().detach())
    for _ in range(steps):
        opt.zero_grad()
        loss().backward()
        opt.step()
    return before, float(loss().detach())


@every_path
def test_small_steps_are_not_lost(path: str) -> None:
    """Where rounding to the nearest stalls, bfloat16 weights learn as float32 ones do."""
    arguments = {"lr": 5e-4, "sigma": 0.0, "seed": 0, **PATHS[path]}

    def make(**options: Any) -> Callable[[Any], Any]:
        return lambda model: UPGD(model.parameters(), **arguments, **options)

    start, exact = fit(make(), torch.float32)
    _, nearest = fit(make(), BF16)
    assert start - nearest < 0.5 * (start - exact)  # more than half is lost
    for option in ("stochastic", "both", "master"):
        _, found = fit(make(**OPTIONS[option]), BF16)
        assert abs(found - exact) < 0.1 * (start - exact), option


def test_a_trace_that_is_rounded_to_the_nearest_stands_still() -> None:
    """β = 0.999: it neither grows nor decays; rounded stochastically it does both."""
    n, beta = 4096, 0.999
    nearest = torch.full((n,), 1.0, dtype=BF16)
    opt = UPGD([p := nn.Parameter(torch.ones(n))], beta_utility=beta, lr=0.0, trace_dtype=BF16)
    p.grad = torch.zeros(n)
    opt.step()
    opt.state[p]["utility"].fill_(1.0)
    steps = 500
    for _ in range(steps):
        nearest = (beta * nearest.float()).to(BF16)
        opt.step()
    assert torch.equal(nearest, torch.ones(n, dtype=BF16))
    mean = opt.state[p]["utility"].float().mean()
    # The variance of a step is at most ¼ of the spacing squared; spacings are at most 2⁻⁸ below 1.
    error = math.sqrt(steps * 0.25 * 2.0**-16 / n)
    assert abs(float(mean) - beta**steps) < 5 * error


@pytest.mark.parametrize("cls", [UPGD, AdaUPGD])
def test_low_precision_traces_learn(cls: Any) -> None:
    def make(**options: Any) -> Callable[[Any], Any]:
        given = {"lr": 3e-3 if cls is AdaUPGD else 0.1, "sigma": 0.0, "beta_utility": 0.999}
        return lambda model: cls(model.parameters(), seed=0, **given, **options)

    start, exact = fit(make(), torch.float32, steps=200)
    _, found = fit(make(trace_dtype=BF16), torch.float32, steps=200)
    assert exact < 0.5 * start
    assert abs(found - exact) < 0.1 * exact


# --------------------------------------------------------------------- paths and checkpoints
SHAPES = [(7, 5), (7,), (), (0, 3), (2, 3, 2, 2), (12, 8)]


class Problem:
    """Parameters, and at every step the same derivatives for whoever asks."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(5)
        made = [torch.randn(shape, generator=generator) for shape in SHAPES]
        self.params = [nn.Parameter(p.to(device, dtype)) for p in made]
        self.generator = torch.Generator().manual_seed(6)

    def run(self, opt: Any, steps: int) -> Problem:
        for _ in range(steps):
            for p in self.params:
                g, h = (torch.randn(p.shape, generator=self.generator) for _ in range(2))
                p.grad, p.curvature = g.to(p), h.to(p)  # type: ignore[attr-defined]
            opt.step()
        return self

    def kept(self, opt: Any) -> list[Tensor]:
        states = [t for p in self.params for _, t in sorted(opt.state.get(p, {}).items())]
        return [*[p.detach() for p in self.params], *states]


def make(row: Row, params: list[nn.Parameter], path: str, **arguments: Any) -> Any:
    noise = {} if path == "fused" else {"noise": PhiloxNoise()}
    given = {"lr": 1e-3, "seed": 2**61 + 3, **row.options, **PATHS[path], **noise, **arguments}
    return row.optimizer(params, **given)


def assert_one_unit(a: list[Tensor], b: list[Tensor]) -> None:
    """Equal, but for the last place where float32 sums were made in another order."""
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        if x.is_floating_point():
            unit = torch.finfo(x.dtype).eps if x.dtype in (BF16, F16) else 1e-3  # S-RWalk divides
            torch.testing.assert_close(x.cpu(), y.cpu(), rtol=unit, atol=3e-5)
            same = (x.cpu() == y.cpu()).float().mean() if x.numel() else 1.0
            assert x.dtype == torch.float32 or same > 0.9
        else:
            assert torch.equal(x.cpu(), y.cpu())


WEIGHT_WISE = {name: row for name, row in RULES.items() if "gates" not in row.needs}
SOME = ("upgd", "upgd-2nd-local", "ada-upgd", "s-rwalk", "sgdw")


@pytest.mark.parametrize(
    ("row", "option"),
    [
        pytest.param(
            row,
            option,
            id=f"{option}-{name}",
            marks=() if fast else pytest.mark.slow,  # each compiles a kernel
        )
        for option in OPTIONS
        for name, row in WEIGHT_WISE.items()
        for fast in [name in SOME or (option == "both" and not is_repetition(name))]
    ],
)
def test_all_paths_draw_the_same_bits(row: Row, option: str) -> None:
    """Weights and traces of all paths agree after three steps."""
    dtype = torch.float32 if option == "traces" else BF16
    results = []
    for path in PATHS:
        problem = Problem(dtype)
        opt = make(row, problem.params, path, **OPTIONS[option])
        results.append(problem.run(opt, 3).kept(opt))
    for result in results[1:]:
        assert_one_unit(result, results[0])


INTERPRETED = {
    ("upgd", BF16, "stochastic"),
    ("upgd", F16, "stochastic"),
    ("upgd", torch.float32, "traces"),
    ("upgd", BF16, "master"),
    ("upgd-2nd-local", BF16, "both"),
    ("s-rwalk", BF16, "both"),
}
"""What is tried without a device; the interpreter cuts bfloat16 where a device rounds it."""


def triton_device(monkeypatch: pytest.MonkeyPatch) -> str:
    """A CUDA device, or the CPU with Triton's interpreter."""
    if torch.cuda.is_available():
        return "cuda"
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a CUDA device or TRITON_INTERPRET=1")
    from upgd.kernels import triton_flat
    from upgd.optim.fused_cuda import Cuda

    monkeypatch.setattr(fused, "_backend", lambda kind: Cuda)
    monkeypatch.setattr(triton_flat, "BLOCK", 32)
    return "cpu"


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("dtype", [BF16, F16, torch.float32], ids=str)
@every_option
def test_triton_kernels_draw_the_same_bits(
    name: str, dtype: torch.dtype, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available() and (name, dtype, option) not in INTERPRETED:
        pytest.skip("needs a CUDA device")
    device = triton_device(monkeypatch)
    monkeypatch.setattr("tests.test_low_precision.SHAPES", [(5, 3), (5,), ()])
    results = []
    row = METHODS[name]
    for path in ({"fused": True}, {"foreach": False, "noise": PhiloxNoise()}):
        problem = Problem(dtype, device)
        given = {"lr": 1e-3, "seed": 2**61 + 3, **row.options, **path, **OPTIONS[option]}
        opt = row.optimizer(problem.params, **given)
        results.append(problem.run(opt, 3).kept(opt))
    assert_one_unit(*results)


def test_triton_kernels_round_parts_by_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    device = triton_device(monkeypatch)
    parts = [
        Part(0, (9, 5), (3, 0), (4, 5)),
        Part(2, (9, 3), (4,), (11,)),
        Part(3, (6,), (0,), (6,)),
    ]
    monkeypatch.setattr("tests.test_low_precision.SHAPES", [part.size for part in parts])
    results = []
    for path in ({"fused": True}, {"foreach": False, "noise": PhiloxNoise()}):
        problem = Problem(BF16, device)
        opt = AdaUPGD(problem.params, seed=1, lr=1e-3, **path, **OPTIONS["both"])
        opt._meeting = Ranks(problem.params, parts, sharded=True)
        opt._describe_noise()
        results.append(problem.run(opt, 2).kept(opt))
    assert_one_unit(*results)


@pytest.mark.parametrize("name", ["upgd", "s-si"])
def test_blocks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for block in (1 << 21, 40, 7):
        monkeypatch.setattr("upgd.optim.batch.BLOCK", block)
        problem = Problem(BF16)
        opt = make(METHODS[name], problem.params, "foreach", **OPTIONS["both"])
        results.append(problem.run(opt, 3).kept(opt))
    assert_one_unit(results[1], results[0])
    assert_one_unit(results[2], results[0])


@every_path
@every_option
def test_resuming_changes_nothing(path: str, option: str) -> None:
    """A run that was saved, pickled or copied in between is the run that was not, bit for bit."""
    whole, part = Problem(BF16), Problem(BF16)
    row = METHODS["ada-upgd"]
    through = make(row, whole.params, path, **OPTIONS[option])
    first = make(row, part.params, path, **OPTIONS[option])
    whole.run(through, 6)
    part.run(first, 3)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = make(row, part.params, path, **{**OPTIONS[option], "seed": 1})
    second.load_state_dict(torch.load(buffer, weights_only=True))
    assert_equal(whole.kept(through), part.run(second, 3).kept(second))


@every_path
def test_seeds_decide_how_weights_are_rounded(path: str) -> None:
    results = []
    for seed in (1, 1, 2):
        problem = Problem(BF16)
        opt = make(METHODS["sgdw"], problem.params, path, seed=seed, rounding="stochastic")
        results.append(problem.run(opt, 2).params[0].detach())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@every_path
@every_option
def test_a_skipped_step_changes_nothing(path: str, option: str) -> None:
    problem = Problem(BF16)
    given = {**OPTIONS[option], "nonfinite": "skip"}
    opt = make(METHODS["upgd"], problem.params, path, **given)
    problem.run(opt, 2)
    before = [t.clone() for t in problem.kept(opt) if t.is_floating_point()]
    for p in problem.params:
        p.grad = torch.full_like(p, torch.inf)
    opt.step()
    assert_equal([t for t in problem.kept(opt) if t.is_floating_point()], before)
    assert int(opt.skipped_steps) == 1


@pytest.mark.slow
@pytest.mark.parametrize("option", ["both", "master"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_torch_compile(option: str, backend: str) -> None:
    results = []
    for compiled in (True, False):
        torch._dynamo.reset()
        problem = Problem(BF16)
        opt = make(METHODS["upgd"], problem.params, "foreach", **OPTIONS[option])
        step = torch.compile(opt.step, backend=backend) if compiled else opt.step
        for _ in range(3):
            for p in problem.params:
                p.grad = torch.randn(p.shape, generator=problem.generator).to(p)
            step()
        results.append(problem.kept(opt))
    assert_one_unit(*results)


def test_layouts_of_parameters() -> None:
    """Transposed weights are rounded by the bits of their places."""
    results = []
    for path in PATHS:
        for transposed in (True, False):
            problem = Problem(BF16)
            if transposed:
                problem.params[0].data = problem.params[0].data.t().contiguous().t()
            opt = make(METHODS["upgd"], problem.params, path, **OPTIONS["both"])
            results.append([t.contiguous() for t in problem.run(opt, 2).kept(opt)])
    for result in results[1:]:
        assert_one_unit(result, results[0])


@every_option
def test_feature_wise_methods(option: str) -> None:
    """Weights are rounded as those of others; utilities of features are few and stay float32."""
    results = []
    for path in ("plain", "foreach", "packed"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).bfloat16()
        given = {"seed": 1, "lr": 1e-3, "noise": PhiloxNoise(), **PATHS[path], **OPTIONS[option]}
        opt = FeatureUPGD(model.parameters(), features=Features(model), **given)
        for _ in range(3):
            opt.zero_grad()
            model(torch.ones(4, 6, dtype=BF16)).float().square().mean().backward()
            opt.step()
        assert opt.state[model[0].weight]["utility"].dtype == torch.float32
        results.append([p.detach() for p in model.parameters()])
    assert_one_unit(results[1], results[0])
    assert_one_unit(results[2], results[0])


# ------------------------------------------------------------------------- master weights
@every_path
def test_weights_are_the_nearest_of_their_masters(path: str) -> None:
    """And the masters are what float32 weights would be, given the same derivatives."""
    half, single = Problem(BF16), Problem(torch.float32)
    for p, q in zip(half.params, single.params, strict=True):
        q.data.copy_(p.data)
    row = METHODS["s-ewc"]
    a = make(row, half.params, path, master_weights=True)
    b = make(row, single.params, path)
    for _ in range(5):
        for p, q in zip(half.params, single.params, strict=True):
            p.grad = torch.randn(p.shape, generator=half.generator).to(p)
            q.grad = p.grad.float()
        a.step(), b.step()
    for p, q in zip(half.params, single.params, strict=True):
        if p.numel():
            torch.testing.assert_close(a.state[p]["master"], q.detach())
            assert torch.equal(p, a.state[p]["master"].to(BF16))


@every_path
def test_what_is_written_to_a_weight_is_taken_over(path: str) -> None:
    """One element, or the whole model by ``load_state_dict``; others keep their lower bits."""
    problem = Problem(BF16)
    opt = make(METHODS["sgdw"], problem.params, path, master_weights=True, weight_decay=0.0)
    problem.run(opt, 3)
    p = problem.params[0]
    with torch.no_grad():
        p[0, 0] = 8.0
    master = opt.state[p]["master"].clone()
    for q in problem.params:
        q.grad = torch.zeros_like(q)
    opt.step()
    master[0, 0] = 8.0
    assert torch.equal(opt.state[p]["master"], master)
    assert float(p.detach()[0, 0]) == 8.0


def test_masters_of_a_parameter_that_grows() -> None:
    """What was copied keeps its lower bits, what is new begins with none."""
    old = nn.Parameter(torch.randn(3, 2).bfloat16())
    opt = UPGD([old], lr=1e-4, sigma=0.0, master_weights=True, trace_dtype=BF16)
    old.grad = torch.ones_like(old)
    opt.step()
    exact = opt.state[old]["master"]
    new = nn.Parameter(torch.ones(4, 2).bfloat16())
    new.data[:3] = old.detach()
    opt.replace(old, new)
    new.grad = torch.zeros_like(new)
    opt.step()
    found = opt.state[new]["master"]
    assert torch.equal(found[:3], exact)
    assert torch.equal(found[3], torch.ones(2))
    assert not torch.equal(exact, old.detach().float())
    assert opt.state[new]["utility"].dtype == BF16


def test_masters_come_and_go() -> None:
    problem = Problem(BF16)
    row = METHODS["upgd"]
    kept = make(row, problem.params, "foreach", master_weights=True)
    saved = copy.deepcopy(problem.run(kept, 2) and kept.state_dict())
    without = make(row, problem.params, "foreach")
    without.load_state_dict(saved)
    assert all("master" not in state for state in without.state.values())
    problem.run(without, 1)
    again = make(row, problem.params, "foreach", master_weights=True)
    again.load_state_dict(without.state_dict())
    problem.run(again, 1)
    assert again.state[problem.params[0]]["master"].dtype == torch.float32
    saved["state"][0]["master"] = saved["state"][0]["master"][:1]
    with pytest.raises(ValueError, match="has a master of shape"):
        again.load_state_dict(saved)


# --------------------------------------------------------------------------------- memory
@every_method
@pytest.mark.parametrize("column", memory.PRECISIONS)
def test_memory_is_what_the_table_says(row: Row, column: str) -> None:
    """Bytes of all tensors per weight, of a network large enough for counts not to matter."""
    dtype, options = memory.PRECISIONS[column]
    if not memory.supports(row, column):
        assert row.unsupported.keys() & options.keys()
        return
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).to(dtype)
    opt = row.make(model, **options)
    loss = model(torch.ones(2, 64, dtype=dtype)).float().square().mean()
    loss.backward()
    for p in model.parameters():
        p.curvature = torch.zeros_like(p)  # type: ignore[assignment]
    for layer in opt.features.layers if "gates" in row.needs else ():
        layer.second = torch.zeros(layer.size)
    opt.step()
    held: list[Any] = [t for p in model.parameters() for t in (p, p.grad)]
    kept = {*row.states, "master"}
    held += [t for s in opt.state.values() for name, t in s.items() if name in kept]
    found = sum(t.numel() * t.element_size() for t in held)
    weights = sum(p.numel() for p in model.parameters())
    features = 64 * 4 if "gates" in row.needs else 0
    assert found - features == sum(memory.parts(row, column)) * weights


# --------------------------------------------------------------------------------- options
@every_path
@pytest.mark.parametrize("saved", [None, BF16])
def test_loading_converts_traces(path: str, saved: torch.dtype | None) -> None:
    """A dict keeps its type; who loads it keeps traces in its own, rounded to the nearest."""
    problem = Problem(BF16)
    row = METHODS["upgd"]
    writer = make(row, problem.params, path, trace_dtype=saved)
    state = problem.run(writer, 2) and writer.state_dict()
    kept = state["state"][0]["utility"]
    assert kept.dtype == (saved or torch.float32)
    reader = make(row, problem.params, path, trace_dtype=BF16 if saved is None else None)
    reader.load_state_dict(state)
    found = reader.state[problem.params[0]]["utility"]
    assert found.dtype == (BF16 if saved is None else torch.float32)
    assert torch.equal(found, kept.to(found.dtype))
    problem.run(reader, 1)


def test_wide_weights_are_what_they_were() -> None:
    """float32 weights are not rounded; float64 ones keep float64 traces."""
    for dtype in (torch.float32, torch.float64):
        results = []
        for options in ({}, {"rounding": "stochastic"}):
            problem = Problem(dtype)
            opt = make(METHODS["upgd"], problem.params, "foreach", **options)
            results.append(problem.run(opt, 3).kept(opt))
        assert_equal(*results)
    problem = Problem(torch.float64)
    opt = make(METHODS["upgd"], problem.params, "foreach", trace_dtype=BF16)
    problem.run(opt, 1)
    assert opt.state[problem.params[0]]["utility"].dtype == torch.float64


def test_groups_of_several_types() -> None:
    params = [nn.Parameter(torch.ones(3, 4, dtype=dtype)) for dtype in (BF16, torch.float32, F16)]
    for path in PATHS:
        opt = UPGD([{"params": [p]} for p in params], lr=1e-3, **PATHS[path], **OPTIONS["both"])
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        assert [opt.state[p]["utility"].dtype for p in params] == [BF16] * 3


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"rounding": "up"}, ValueError, "rounding must be 'nearest' or 'stochastic', got 'up'"),
        ({"trace_dtype": F16}, ValueError, "trace_dtype must be .*torch.bfloat16.*float16"),
        ({"trace_dtype": "bfloat16"}, ValueError, "trace_dtype must be"),
        ({"master_weights": 1}, TypeError, "master_weights must be True or False, got 1"),
        (
            {"master_weights": True, "rounding": "stochastic"},
            ValueError,
            "master_weights=True.*leave",
        ),
    ],
)
def test_wrong_options(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"SGDW: {words}"):
        SGDW([nn.Parameter(torch.ones(2))], **arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [("rounding", "stochastic"), ("trace_dtype", BF16), ("master_weights", True)],
)
def test_options_are_one_for_all_groups(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"UPGD: {name} is one for all groups"):
        UPGD([{"params": [nn.Parameter(torch.ones(2))], name: value}])


@needs_cuda
@every_option
@pytest.mark.parametrize("path", ["foreach", "fused"])
def test_cuda_graphs(option: str, path: str) -> None:
    """Each replay rounds by its own bits, as steps taken one by one do."""
    results = []
    for captured in (True, False):
        problem = Problem(BF16, "cuda")
        noise = {} if path == "fused" else {"noise": PhiloxNoise()}
        given = {**PATHS[path], **OPTIONS[option], **noise, "nonfinite": "skip"}
        opt = UPGD(problem.params, seed=3, lr=1e-3, capturable=True, **given)
        for p in problem.params:
            p.grad = torch.ones_like(p)
        for _ in range(2):
            opt.step()
        if captured:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                opt.step()
        for _ in range(3):
            graph.replay() if captured else opt.step()
        results.append(problem.kept(opt))
    assert_one_unit(*results)


@every_device
def test_no_value_is_read_back(device: str) -> None:
    if device == "cpu":
        pytest.skip("waiting for a device needs a device")
    for option, path in [(o, p) for o in OPTIONS for p in ("plain", "packed", "fused")]:
        problem = Problem(BF16, device)
        given = {"nonfinite": "skip", **OPTIONS[option]}
        opt = make(METHODS["upgd"], problem.params, path, **given)
        problem.run(opt, 2)
        torch.cuda.set_sync_debug_mode("error")
        try:
            opt.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
