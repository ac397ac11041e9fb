"""What users of PyTorch take for granted, for every method of the registry."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cases import (
    RULES,
    CounterNoise,
    assert_close,
    assert_equal,
    batches,
    differ,
    every_device,
    every_method,
    every_method_with,
    every_noisy_method,
    every_rule,
    is_repetition,
    loss_of,
    needs_cuda,
    network,
    provide,
    rows_of,
    state,
    train,
    watching,
    weights,
)
from upgd.optim.registry import METHODS, Row


def trained(
    row: Row, device: str, steps: int = 5, dtype: torch.dtype = torch.float32, **arguments: Any
) -> tuple[nn.Module, Any]:
    model = network(device, dtype)
    opt = row.make(model, **{"seed": 7, **arguments})
    train(row, opt, model, batches(steps, device, dtype))
    return model, opt


# ----------------------------------------------------------------------------- learning
@every_method
@every_device
def test_defaults_learn(row: Row, device: str) -> None:
    model = network(device)
    opt = row.make(model, seed=0)
    batch = batches(1, device)
    first = float(loss_of(model, batch[0]).detach())
    train(row, opt, model, batch * 120)
    assert float(loss_of(model, batch[0]).detach()) < 0.9 * first


# -------------------------------------------------------------------------------- paths
@every_rule
@every_device
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_foreach_equals_single_tensor(row: Row, device: str, nonfinite: str) -> None:
    double = {"dtype": torch.float64, "nonfinite": nonfinite}
    a, _ = trained(row, device, 20, foreach=True, **double)
    b, _ = trained(row, device, 20, foreach=False, **double)
    assert_close(weights(a), weights(b), rtol=1e-11, atol=1e-13)
    single = {"nonfinite": nonfinite}
    a, _ = trained(row, device, 5, foreach=True, **single)
    b, _ = trained(row, device, 5, foreach=False, **single)
    assert_close(weights(a), weights(b), rtol=1e-5, atol=1e-6)


@every_rule
def test_blocks_change_nothing(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large models are updated block by block; here even small ones are."""
    a, _ = trained(row, "cpu", 8, torch.float64)
    for size in (1, 7, 40):
        monkeypatch.setattr("upgd.optim.batch.BLOCK", size)
        b, _ = trained(row, "cpu", 8, torch.float64)
        assert_close(weights(a), weights(b), rtol=1e-12, atol=1e-14)


@every_method
@every_device
def test_skipping_costs_no_accuracy(row: Row, device: str) -> None:
    a, _ = trained(row, device, 20, torch.float64, nonfinite="raise")
    b, _ = trained(row, device, 20, torch.float64, nonfinite="skip")
    assert_close(weights(a), weights(b), rtol=1e-11, atol=1e-13)


@every_method
@every_device
def test_maximize(row: Row, device: str) -> None:
    """Ascending the loss is descending its negative."""
    up, down = network(device, torch.float64), network(device, torch.float64)
    stream = batches(8, device, torch.float64)
    ascending = row.make(up, seed=1, maximize=True)
    descending = row.make(down, seed=1)
    for batch in stream:
        for model, opt, sign in ((up, ascending, 1), (down, descending, -1)):
            opt.zero_grad()
            (sign * loss_of(model, batch)).backward()
            if "curvature" in row.needs and "gates" in row.needs:
                for layer in opt.features.layers:  # type: ignore[attr-defined]
                    layer.second = sign * torch.ones_like(layer.first)
            elif "curvature" in row.needs:
                for p in model.parameters():
                    p.curvature = sign * p.detach() ** 2
            opt.step()
    assert_close(weights(up), weights(down), rtol=1e-12, atol=1e-14)


@every_method_with("foreach")
@every_device
def test_tensor_lr(row: Row, device: str, foreach: bool) -> None:
    for place in {"cpu", device}:
        lr = torch.tensor(0.02, dtype=torch.float64, device=place)
        a, _ = trained(row, device, 5, torch.float64, lr=lr, foreach=foreach)
        b, _ = trained(row, device, 5, torch.float64, lr=0.02, foreach=foreach)
        assert_close(weights(a), weights(b), rtol=1e-11, atol=1e-13)


@every_method
def test_learning_rate_schedulers(row: Row) -> None:
    stream = batches(6)
    model, by_hand = network(), network()
    opt = row.make(model, seed=1, lr=0.04)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.5)
    manual = row.make(by_hand, seed=1, lr=0.04)
    for i, batch in enumerate(stream):
        train(row, opt, model, [batch])
        scheduler.step()
        manual.param_groups[0]["lr"] = 0.04 * 0.5 ** (i // 2)
        train(row, manual, by_hand, [batch])
    assert_equal(weights(model), weights(by_hand))


@every_method
def test_closures_and_hooks(row: Row) -> None:
    model, plain = network(), network()
    opt, other = row.make(model, seed=1), row.make(plain, seed=1)
    calls: list[str] = []
    opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    opt.register_step_post_hook(lambda *_: calls.append("post"))
    for batch in batches(3):

        def closure(batch: Any = batch) -> Any:
            opt.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            provide(row, opt, model)
            return loss

        expected = float(loss_of(model, batch).detach())
        with torch.no_grad():
            assert float(opt.step(closure)) == expected
        train(row, other, plain, [batch])
    assert calls == ["pre", "post"] * 3
    assert_equal(weights(model), weights(plain))


@every_method
@every_device
def test_parameters_without_gradient_are_left_alone(row: Row, device: str) -> None:
    """They do not move, keep no state, and the others move as if alone."""
    model, alone = network(device), network(device)
    noise = CounterNoise()
    opt = row.make(model, seed=1, noise=noise)
    frozen, *others = list(alone.parameters())
    arguments = {**row.options, "seed": 1, "noise": noise}
    kept = {"params": others}
    # A first group that never has gradients keeps the offsets, and so the noise, the same.
    reference = row.optimizer([{"params": [frozen]}, kept], **arguments, **watching(row, alone))
    frozen.requires_grad_(False)
    for batch in batches(4, device):
        for m, o in ((model, opt), (alone, reference)):
            o.zero_grad()
            loss_of(m, batch).backward()
            next(m.parameters()).grad = None
            provide(row, o, m)
            o.step()
    assert torch.equal(weights(model)[0], weights(network(device))[0])
    assert_close(weights(model), weights(alone), rtol=1e-6, atol=1e-8)


@every_method
def test_a_parameter_may_pause(row: Row) -> None:
    """After a pause, traces and counts go on where they were (the equations are elsewhere)."""
    model = network()
    opt = row.make(model, seed=1)
    for i, batch in enumerate(batches(6)):
        opt.zero_grad()
        loss_of(model, batch).backward()
        last = list(model.parameters())[-1]
        if i in (2, 3):
            last.grad = None
        provide(row, opt, model)
        opt.step()
    counts = [int(opt.state[p]["step"]) for p in model.parameters()]
    assert counts == [6] * (len(counts) - 1) + [4]


@every_method_with("foreach")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_half_precision_rounds_once(
    row: Row, dtype: torch.dtype, foreach: bool, nonfinite: str
) -> None:
    """Half-precision weights take the single-precision update, rounded at the end."""
    half = network(dtype=dtype)
    single = network(dtype=dtype).float()
    arguments = {"seed": 1, "foreach": foreach, "nonfinite": nonfinite}
    opt, reference = row.make(half, **arguments), row.make(single, **arguments)
    for batch in batches(4, dtype=dtype):
        for a, b in zip(half.parameters(), single.parameters(), strict=True):
            b.data.copy_(a.data)
        opt.zero_grad()
        loss_of(half, batch).backward()
        for a, b in zip(half.parameters(), single.parameters(), strict=True):
            b.grad = a.grad.float()
        if "gates" in row.needs:
            pairs = zip(opt.features.layers, reference.features.layers, strict=True)  # type: ignore[attr-defined]
            for ours, theirs in pairs:
                theirs.first = ours.first.clone()
        elif "layers" in row.needs:
            for ours, theirs in zip(opt.layers.all, reference.layers.all, strict=True):
                theirs._records = [(x.clone(), d.clone()) for x, d in ours._records]
        provide(row, opt, half)
        provide(row, reference, single)
        if "curvature" in row.needs and "gates" not in row.needs:
            for a, b in zip(half.parameters(), single.parameters(), strict=True):
                b.curvature = a.curvature.float()
        opt.step()
        reference.step()
        assert_equal(weights(half), [w.to(dtype) for w in weights(single)])
    floating = [s for s in state(opt) if s.is_floating_point()]
    assert all(s.dtype == torch.float32 for s in floating)


# --------------------------------------------------------------------- synchronisation
class NoReadBack(TorchDispatchMode):
    """Fails when a value travels from a tensor to Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read back"
        return func(*args, **(kwargs or {}))


@every_rule
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("capturable", [True, False])
def test_no_value_is_read_back(row: Row, foreach: bool, capturable: bool) -> None:
    model = network()
    opt = row.make(model, seed=1, nonfinite="skip", foreach=foreach, capturable=capturable)
    train(row, opt, model, batches(2))
    for batch in batches(3):
        opt.zero_grad()
        loss_of(model, batch).backward()
        provide(row, opt, model)
        with NoReadBack():
            opt.step()


def test_the_guard_against_reading_back_bites() -> None:
    with pytest.raises(AssertionError, match="read back"), NoReadBack():
        float(torch.ones(()) + 1)


@needs_cuda
@every_rule
@pytest.mark.parametrize("foreach", [True, False])
def test_no_synchronisation_on_cuda(row: Row, foreach: bool) -> None:
    model = network("cuda")
    opt = row.make(model, seed=1, foreach=foreach)
    stream = batches(4, "cuda")
    train(row, opt, model, stream[:1])
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(row, opt, model, stream[1:])
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ------------------------------------------------------------------------ graph capture
@needs_cuda
@every_rule
def test_cuda_graphs(row: Row) -> None:
    """A captured step replays as the same steps taken one by one, each with its own noise."""
    batch = batches(1, "cuda")[0]

    def one_step(opt: Any, model: nn.Module) -> None:
        opt.zero_grad(set_to_none=False)
        loss_of(model, batch).backward()
        provide(row, opt, model)
        opt.step()

    captured, eager = network("cuda"), network("cuda")
    opt_captured = row.make(captured, seed=3, capturable=True)
    opt_eager = row.make(eager, seed=3, capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            one_step(opt_captured, captured)
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        one_step(opt_eager, eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_step(opt_captured, captured)
    for _ in range(4):
        graph.replay()
        one_step(opt_eager, eager)
    assert_close(weights(captured), weights(eager), rtol=1e-6, atol=1e-7)
    assert all(int(s["step"]) == 7 for s in opt_captured.state.values() if "step" in s)


@needs_cuda
@every_noisy_method
def test_two_replays_draw_different_noise(row: Row) -> None:
    model = network("cuda")
    opt = row.make(model, seed=3, capturable=True, sigma=1.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    static = {}
    if "gates" in row.needs:
        static = {layer: torch.zeros(layer.size, device="cuda") for layer in opt.features.layers}  # type: ignore[attr-defined]
    curvature = [torch.zeros_like(p) for p in model.parameters()]

    def one_step() -> None:
        for layer, zeros in static.items():
            layer.first = layer.second = zeros
        if "curvature" in row.needs and not static:
            for p, h in zip(model.parameters(), curvature, strict=True):
                p.curvature = h
        opt.step()

    one_step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_step()
    moves = []
    for _ in range(2):
        before = weights(model)
        graph.replay()
        moves.append([a - b for a, b in zip(weights(model), before, strict=True)])
    assert float(moves[0][0].abs().max()) > 0
    correlation = torch.corrcoef(
        torch.stack([torch.cat([m.flatten() for m in ms]) for ms in moves])
    )
    assert abs(float(correlation[0, 1])) < 0.6  # of about a hundred numbers


@needs_cuda
def test_capture_needs_capturable_and_a_first_step() -> None:
    from upgd import UPGD

    for arguments, words in (({}, "capturable"), ({"capturable": True}, "before capturing")):
        model = network("cuda")
        opt = UPGD(model.parameters(), **arguments)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        with pytest.raises(RuntimeError, match=words), torch.cuda.graph(torch.cuda.CUDAGraph()):
            opt.step()


# ------------------------------------------------------------------------------ compile
CAPTURED = ("upgd", "feature-upgd-2nd", "s-rwalk")
"""Gates of weights, of features, and a method without a gate; the rest is slow."""


@pytest.mark.parametrize("row", rows_of(RULES, slow=lambda name: name not in CAPTURED))
def test_torch_compile_captures_one_graph(row: Row) -> None:
    compile_and_compare(row, "raise", backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("row", rows_of(RULES))
def test_torch_compile(row: Row) -> None:
    compile_and_compare(row, "raise")


@pytest.mark.parametrize("row", rows_of(RULES, slow=lambda name: name != "ada-upgd-2nd"))
def test_torch_compile_of_steps_that_skip(row: Row) -> None:
    compile_and_compare(row, "skip")


def compile_and_compare(row: Row, nonfinite: str, backend: str = "inductor") -> None:
    """One graph, one break (where noise is drawn), no recompilation, the same weights.

    Inductor compiles C++, which takes many seconds; `aot_eager` captures the same graphs.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, eager = network(), network()
    opt = row.make(model, seed=1, nonfinite=nonfinite)
    step = torch.compile(opt.step, backend=backend)
    stream = batches(6)
    train(row, opt, model, stream, step)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
    assert len(counters["graph_break"]) == 1
    assert "_gather" in next(iter(counters["graph_break"]))
    train(row, row.make(eager, seed=1, nonfinite=nonfinite), eager, stream)
    assert_close(weights(model), weights(eager), rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------- checkpoints
def saved_and_loaded(opt: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@every_method
@every_device
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_resume_is_never_having_stopped(row: Row, device: str, nonfinite: str) -> None:
    stream = batches(8, device)
    model = network(device)
    opt = row.make(model, seed=11, nonfinite=nonfinite)
    train(row, opt, model, stream[:4])
    resumed = network(device, seed=99)
    resumed.load_state_dict(model.state_dict())
    other = row.make(resumed, seed=5, nonfinite=nonfinite)
    other.load_state_dict(saved_and_loaded(opt))
    train(row, opt, model, stream[4:])
    train(row, other, resumed, stream[4:])
    assert_equal(weights(model), weights(resumed))
    assert_equal(state(opt), state(other))


@every_method
def test_loading_shares_nothing_with_the_dict(row: Row) -> None:
    _model, opt = trained(row, "cpu")
    kept = opt.state_dict()
    before = copy.deepcopy(kept)
    other = network()
    second = row.make(other)
    second.load_state_dict(kept)
    train(row, second, other, batches(2))
    for key, entry in before["state"].items():
        for name, value in entry.items():
            assert torch.equal(torch.as_tensor(kept["state"][key][name]), torch.as_tensor(value))


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_keeps_precision(row: Row, dtype: torch.dtype) -> None:
    _model, opt = trained(row, "cpu", dtype=dtype)
    other = row.make(network(dtype=dtype))
    other.load_state_dict(saved_and_loaded(opt))
    assert_equal(state(opt), state(other))


@needs_cuda
@every_method
def test_checkpoints_cross_devices(row: Row) -> None:
    """A run that moves to the GPU goes on as it would have on the CPU (noise aside)."""
    stream = batches(6, dtype=torch.float64)
    quiet = {"sigma": 0.0} if "noise" in row.needs else {}
    model = network(dtype=torch.float64)
    opt = row.make(model, **quiet)
    train(row, opt, model, stream[:3])
    moved = network("cuda", torch.float64)
    moved.load_state_dict(model.state_dict())
    other = row.make(moved, **quiet)
    other.load_state_dict(opt.state_dict())
    train(row, opt, model, stream[3:])
    train(row, other, moved, [(x.cuda(), y.cuda()) for x, y in stream[3:]])
    assert_close(weights(model), weights(moved), rtol=1e-9, atol=1e-11)


@every_method
def test_distributed_checkpoint_format(row: Row) -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    stream = batches(6)
    model = network()
    opt = row.make(model, seed=3)
    train(row, opt, model, stream[:3])
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = copy.deepcopy(get_optimizer_state_dict(model, opt, options=options))
    resumed = network()
    resumed.load_state_dict(model.state_dict())
    other = row.make(resumed, seed=4)
    set_optimizer_state_dict(resumed, other, flat, options=options)
    train(row, opt, model, stream[3:])
    train(row, other, resumed, stream[3:])
    assert_equal(weights(model), weights(resumed))


@every_method
@every_device
def test_deepcopy(row: Row, device: str) -> None:
    model, opt = trained(row, device, 3)
    twin, twin_opt = copy.deepcopy((model, opt))
    stream = batches(6, device)[3:]
    train(row, opt, model, stream)
    train(row, twin_opt, twin, stream)
    assert_equal(weights(model), weights(twin))
    assert_equal(state(opt), state(twin_opt))


@every_method
def test_adding_a_group_later(row: Row) -> None:
    model = network()
    opt = row.make(model, seed=2)
    train(row, opt, model, batches(3))
    extra = nn.Parameter(torch.ones(4))
    opt.add_param_group({"params": [extra], "lr": 0.5})
    extra.grad = torch.ones(4)
    if "curvature" in row.needs and "gates" not in row.needs:
        extra.curvature = torch.ones(4)
    opt.zero_grad(set_to_none=False)
    extra.grad = torch.ones(4)
    loss_of(model, batches(1)[0]).backward()
    provide(row, opt, model)
    if "curvature" in row.needs and "gates" not in row.needs:
        extra.curvature = torch.ones(4)
    opt.step()
    assert differ([extra.detach()], [torch.ones(4)])
    assert int(opt.state[extra]["step"]) == 1
    assert opt.param_groups[1]["noise_step"] == opt.param_groups[0]["noise_step"]
    other = row.make(model)
    other.add_param_group({"params": [extra]})
    other.load_state_dict(saved_and_loaded(opt))


@every_method
@every_device
def test_state_is_lazy(row: Row, device: str) -> None:
    """The optimizer may be built before the model moves, as Stable-Baselines3 does."""
    early, late = network(), network()
    opt_early = row.make(early, seed=1)
    assert not opt_early.state
    early.to(device)
    late.to(device)
    opt_late = row.make(late, seed=1)
    train(row, opt_early, early, batches(3, device))
    train(row, opt_late, late, batches(3, device))
    assert_equal(weights(early), weights(late))


@every_method
def test_resetting_the_state_starts_over(row: Row) -> None:
    model = network()
    opt = row.make(model, seed=1)
    train(row, opt, model, batches(3))
    opt.state.clear()
    train(row, opt, model, batches(1))
    assert {int(s["step"]) for s in opt.state.values()} == {1}


@every_method
def test_named_parameters(row: Row) -> None:
    plain, named = network(), network()
    arguments = {"seed": 1, **row.options}
    a = row.optimizer(plain.parameters(), **arguments, **watching(row, plain))
    b = row.optimizer(named.named_parameters(), **arguments, **watching(row, named))
    train(row, a, plain, batches(3))
    train(row, b, named, batches(3))
    assert_equal(weights(plain), weights(named))


# ---------------------------------------------------------------------- mixed precision
def scaler_for(device: str, scale: float) -> Any:
    return torch.amp.GradScaler(device, init_scale=scale, growth_interval=10**6)


@every_method_with("capturable")
@every_device
def test_grad_scaler(row: Row, device: str, capturable: bool) -> None:
    """A scaled loss trains as the plain one does; an overflow changes nothing."""
    scaled, plain = network(device, torch.float64), network(device, torch.float64)
    arguments = {"seed": 1, "capturable": capturable}
    opt, reference = row.make(scaled, **arguments), row.make(plain, **arguments)
    scaler = scaler_for(device, 1024.0)
    stream = batches(6, device, torch.float64)
    for i, batch in enumerate(stream):
        overflow = i == 3
        opt.zero_grad()
        scaler.scale(loss_of(scaled, batch)).backward()
        if not overflow:
            train(row, reference, plain, [batch])
        if "gates" in row.needs and "curvature" in row.needs:
            for layer in opt.features.layers:  # type: ignore[attr-defined]
                layer.second = layer.first.abs() * 0.5 / scaler.get_scale()
        elif "curvature" in row.needs:
            for p in scaled.parameters():
                p.curvature = p.detach() ** 2 + (p.grad / scaler.get_scale()) ** 2
        if overflow:
            next(scaled.parameters()).grad[0, 0] = torch.inf
            before, counts = weights(scaled), state(opt)
        scaler.step(opt)
        scaler.update()
        if overflow:
            assert_equal(weights(scaled), before)
            kept = [s for s in counts if s.is_floating_point()]
            assert_equal([s for s in state(opt) if s.is_floating_point()], kept)
            if "noise" in row.needs:  # the two optimizers must go on with the same noise
                gap = opt.param_groups[0]["noise_step"] - reference.param_groups[0]["noise_step"]
                reference.param_groups[0]["noise_step"] += gap
    assert {int(s["step"]) for s in opt.state.values()} == {5}
    if device == "cpu" or not (capturable and "noise" in row.needs):
        assert_close(weights(scaled), weights(plain), rtol=1e-9, atol=1e-11)


def scaled_gradients(model: nn.Module, opt: Any, scaler: Any, batch: Any) -> list[Tensor]:
    """What a model's gradients are after ``scaler.step``."""
    scaler.scale(loss_of(model, batch)).backward()
    for p in model.parameters():
        p.curvature = torch.zeros_like(p)
    for layer in opt.features.layers if hasattr(opt, "features") else ():
        layer.second = torch.zeros_like(layer.first)
    scaler.step(opt)
    return [p.grad for p in model.parameters()]


@every_device
@pytest.mark.parametrize(
    ("row", "path"),
    [
        pytest.param(
            *(row, path),
            id=f"{row.name}-{path}",
            marks=pytest.mark.slow if is_repetition(row.name) else (),
        )
        for row in METHODS.values()
        for path in ("maximize", "foreach", "capturable", "fused")
        if path not in row.unsupported
    ],
)
def test_grad_scaler_leaves_unscaled_gradients(row: Row, device: str, path: str) -> None:
    """Those of PyTorch's own fused step, to which it hands over the scale, too."""
    if path == "fused":
        pytest.importorskip("numba" if device == "cpu" else "triton")
        if device == "cuda" and "fused_cuda" in row.unsupported:
            pytest.skip(row.unsupported["fused_cuda"])
    model, other = network(device), network(device)
    batch = batches(1, device)[0]
    adam = torch.optim.AdamW(other.parameters(), fused=True)
    expected = scaled_gradients(other, adam, scaler_for(device, 1024.0), batch)
    opt = row.make(model, seed=1, **{path: True})
    found = scaled_gradients(model, opt, scaler_for(device, 1024.0), batch)
    assert_equal(found, expected)


@every_method
def test_grad_scaler_unscale(row: Row) -> None:
    """Unscaling first, to clip, gives the same update, or a clear refusal where it cannot."""
    scaled, plain = network(dtype=torch.float64), network(dtype=torch.float64)
    opt, reference = row.make(scaled, seed=1), row.make(plain, seed=1)
    scaler = scaler_for("cpu", 8.0)
    for batch in batches(3, dtype=torch.float64):
        train(row, reference, plain, [batch])
        opt.zero_grad()
        scaler.scale(loss_of(scaled, batch)).backward()
        scaler.unscale_(opt)
        provide(row, opt, scaled)
        if "unscale_" in row.unsupported:
            with pytest.raises(RuntimeError, match="unscale_"):
                scaler.step(opt)
            return
        scaler.step(opt)
        scaler.update()
    assert_close(weights(scaled), weights(plain), rtol=1e-9, atol=1e-11)


# ---------------------------------------------------------------------------- nonfinite
@every_method
@every_device
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_raise_names_the_parameter(row: Row, device: str, bad: float) -> None:
    model = network(device)
    arguments: dict[str, Any] = {"seed": 1, "nonfinite": "raise", **row.options}
    opt = row.optimizer(model.named_parameters(), **arguments, **watching(row, model))
    stream = batches(3, device)
    train(row, opt, model, stream[:2])
    before, kept = weights(model), state(opt)
    opt.zero_grad()
    loss_of(model, stream[2]).backward()
    provide(row, opt, model)
    list(model.parameters())[2].grad[1, 1] = bad
    with pytest.raises(FloatingPointError, match=r"parameter '2\.weight'"):
        opt.step()
    assert_equal(weights(model), before)
    assert_equal(state(opt), kept)


@every_method_with("foreach")
@every_device
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nonfinite_skip_is_as_if_the_step_had_not_been(
    row: Row, device: str, foreach: bool, bad: float
) -> None:
    quiet = {"sigma": 0.0} if "noise" in row.needs else {}
    arguments = {"nonfinite": "skip", "foreach": foreach, **quiet}
    struck, spared = network(device), network(device)
    opt, reference = row.make(struck, **arguments), row.make(spared, **arguments)
    for i, batch in enumerate(batches(7, device)):
        if i not in (0, 3, 4):
            train(row, reference, spared, [batch])
        opt.zero_grad()
        loss_of(struck, batch).backward()
        provide(row, opt, struck)
        if i in (0, 3, 4):
            list(struck.parameters())[i].grad.flatten()[-1] = bad
        opt.step()
    assert_close(weights(struck), weights(spared), rtol=1e-6, atol=1e-7)
    assert int(opt.skipped_steps) == 3
    assert {int(s["step"]) for s in opt.state.values()} == {4}


# --------------------------------------------------------------------------------- seeds
@every_noisy_method
@every_device
def test_seeds(row: Row, device: str) -> None:
    a, _ = trained(row, device, 3, seed=1)
    b, _ = trained(row, device, 3, seed=1)
    c, _ = trained(row, device, 3, seed=2)
    assert_equal(weights(a), weights(b))
    assert differ(weights(a), weights(c))


@every_noisy_method
def test_manual_seed_governs_the_default(row: Row) -> None:
    def seed_after(manual: int) -> int:
        model = network()
        torch.manual_seed(manual)
        return int(row.make(model).param_groups[0]["seed"])

    assert seed_after(5) == seed_after(5) != seed_after(6)


@every_noisy_method
def test_a_group_can_opt_out_of_noise(row: Row) -> None:
    """sigma=0 in a group: its weights do not depend on the seed, the others' do."""
    results = []
    for seed in (1, 2):
        model = network()
        first, *others = model.parameters()
        arguments = {**row.options, "seed": seed, "sigma": 0.5}
        groups = [{"params": [first], "sigma": 0.0}, {"params": others}]
        opt = row.optimizer(groups, **arguments, **watching(row, model))
        train(row, opt, model, batches(1))
        results.append(weights(model))
    assert_equal(results[0][:1], results[1][:1])
    assert differ(results[0][1:3], results[1][1:3])
