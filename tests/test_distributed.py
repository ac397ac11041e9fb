"""Several processes do what one does: replicas, shards, checkpoints of other numbers of shards.

Processes are started once for each number of them; each test reads its part of the files.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import upgd
from tests import cases, sharing
from tests.cases import every_method
from tests.sharing import COMMON, DOUBLE, METHODS, network, stream, train
from upgd.optim.noise import PhiloxNoise
from upgd.optim.registry import Row

REFUSED = {
    ("zero", "upgd-2nd"): "order=2 walks the graph of whole parameters",
    ("fsdp1", "upgd-2nd"): "order=2 walks the graph of whole parameters",
    ("fsdp2", "upgd-2nd"): "order=2 walks the graph of whole parameters",
    ("fsdp1", "upgd-local"): "scaling='local' needs their rows",
    ("fsdp1", "feature-upgd"): "FSDP1 has flattened the weight of layer",
    ("fsdp1", "feature-upgd-local"): "FSDP1 has flattened the weight of layer",
}
"""Wrapper and method, and the words of the error that says why not."""


def processes(world: int, folder: Path) -> list[dict[str, Any]]:
    """What each process found."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.sharing"]
    where = Path(__file__).parent.parent
    started = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(folder)],
            env=env,
            cwd=where,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    said = [p.communicate(timeout=600)[0] for p in started]
    failed = [text for p, text in zip(started, said, strict=True) if p.returncode]
    assert not failed, failed[0]
    files = [folder / f"{world}-{rank}.pt" for rank in range(world)]
    return [torch.load(file, weights_only=True) for file in files]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: Any) -> Callable[[int], list[dict[str, Any]]]:
    """What the processes of a world found; it takes up the checkpoints of one half its size."""
    folder = tmp_path_factory.mktemp("worlds")

    @functools.cache
    def world(size: int) -> list[dict[str, Any]]:
        if size > 1:
            world(size // 2)
        return processes(size, folder)

    return world


@pytest.fixture(scope="module", params=(2, pytest.param(4, marks=pytest.mark.slow)))
def found(request: Any, worlds: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = worlds(request.param)
    return found


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("wrapper", sharing.WRAPPERS)
def test_many_processes_do_what_one_does(found: Any, wrapper: str, name: str) -> None:
    """To rounding where gradients are sums over processes; bit for bit where noise is alone."""
    for case, (sigma, more) in sharing.CASES.items():
        if name == "s-rwalk" and case != "still":
            continue
        expected = sharing.alone(name, sigma, quiet=case == "noise", **more)
        for told in found:
            here = told[f"{wrapper}/{name}/{case}"]
            if (wrapper, name) in REFUSED:
                assert REFUSED[wrapper, name] in here
            elif case == "noise":
                assert all(torch.equal(a, b) for a, b in zip(here, expected, strict=True))
                start = [p.detach() for p in network().parameters()]
                assert not any(torch.equal(a, b) for a, b in zip(here, start, strict=True))
            else:
                assert_close(here, expected)


def place_matters() -> bool:
    """Whether PyTorch rounds a sigmoid otherwise at the end of a tensor, as on some ARM processors.

    Shards end elsewhere than whole parameters.
    """
    x = torch.randn(1000, 7, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    return not torch.equal(torch.sigmoid(x), torch.stack([torch.sigmoid(row) for row in x]))


def test_checkpoints_reshard_bit_for_bit(found: Any) -> None:
    """One process, two that go on, four that go on; the same as four from the first step on."""
    tolerance = 1e-15 if place_matters() else 0.0
    for told in found:
        for name in sharing.RESHARDED:
            for a, b in zip(told[f"resumed/{name}"], told[f"straight/{name}"], strict=True):
                torch.testing.assert_close(a, b, rtol=0.0, atol=tolerance)


def test_a_step_is_taken_by_all_or_none(found: Any) -> None:
    for rank, told in enumerate(found):
        raised, skipped = told["nan/raise"], told["nan/skip"]
        assert raised["same"]
        assert skipped["same"]
        assert not skipped["error"]
        words = "the gradient of parameter 0" if rank == 1 else "another process has a weight"
        assert words in raised["error"]
        assert (raised["skipped"], skipped["skipped"]) == (0, 1)
        assert_close(raised["then"], found[0]["nan/raise"]["then"])
        assert_close(skipped["then"], found[0]["nan/skip"]["then"])


@pytest.mark.parametrize(
    ("case", "name", "sigma"),
    [
        ("tensor parallel/global", "upgd", 0.1),
        ("tensor parallel/local", "upgd-local", 0.1),
        ("replicated shards", "upgd-local", 0.1),
        ("fused/zero", "upgd", 0.1),
        ("fused/fsdp2", "upgd", 0.0),
        ("fused/fsdp2/local", "upgd-local", 0.0),
        ("one process's state", "ada-upgd", 0.1),
        ("accumulated", "feature-upgd", 0.1),
    ],
)
def test_other_ways_to_share(found: Any, case: str, name: str, sigma: float) -> None:
    expected = sharing.alone(name, sigma)
    for told in found:
        assert_close(told[case], expected)


@pytest.mark.parametrize("option", sharing.SIXTEEN)
def test_sixteen_bits_are_rounded_by_a_weights_place_in_the_whole(found: Any, option: str) -> None:
    """Bit for bit: shards, noise and rounding together, of weights and traces."""
    expected = sharing.sixteen_bits(option, alone=True)
    for told in found:
        for what, tensors in expected.items():
            here = told[f"16 bits/{option}"][what]
            assert all(torch.equal(a, b) for a, b in zip(here, tensors, strict=True))


def test_replicas_stay_equal_whatever_their_seeds(found: Any) -> None:
    for told in found:
        for a, b in zip(told["seeds"], found[0]["seeds"], strict=True):
            assert torch.equal(a, b)


def test_stages_of_a_pipeline(found: Any) -> None:
    """One optimizer over all layers is the reference: one η, and noise by the place in the list."""
    layers = sharing.pipeline_layers(len(found))
    params = [p for layer in layers for p in layer.parameters()]
    opt = upgd.UPGD(params, sigma=0.1, seed=1, noise=PhiloxNoise(), **COMMON)
    for x, _ in stream():
        opt.zero_grad()
        for layer in layers:
            layer(x).square().sum().backward()
        opt.step()
    assert_close([w for told in found for w in told["pipeline"]["weights"]], params)


def test_sharded_stages_of_a_pipeline(found: Any) -> None:
    """Parameters of different stages have different noise, and one η."""
    layers = sharing.pipeline_layers(2)
    params = [p for layer in layers for p in layer.parameters()]
    opt = upgd.UPGD(params, sigma=0.1, seed=1, noise=PhiloxNoise(), **COMMON)
    for x, _ in stream():
        opt.zero_grad()
        for layer in layers:
            layer(x).square().sum().backward()
        opt.step()
    for told in found:
        here = told["sharded pipeline"]
        assert_close(here["weights"], list(layers[here["stage"]].parameters()))


@pytest.mark.parametrize("option", sharing.ONE_ROW)
def test_parameters_that_some_processes_hold_nothing_of(found: Any, option: str) -> None:
    expected = sharing.one_row(False, option)
    for told in found:
        assert_close(told[f"one row/{option}"], expected)


def test_a_process_without_weights_raises_with_the_others(found: Any) -> None:
    for rank, told in enumerate(found):
        error, draws = told["one row/nan"]
        assert ("another process" if rank else "the gradient of parameter 2") in error
        assert draws == sharing.STEPS


def test_gradients_that_are_summands(found: Any) -> None:
    for told in found:
        assert_close(told["partial gradients"], sharing.partial_gradients(False))


@pytest.mark.parametrize("kind", sharing.FEW)
def test_fewer_parameters_than_processes(found: Any, kind: str) -> None:
    for told in found:
        assert_close(told[f"few/{kind}"], sharing.few(False, kind))
    largest = [u for told in found for u in told["few/utilities"]]
    assert largest == pytest.approx([1 / (1 + math.exp(-1))], rel=1e-12)


def test_replicas_stay_equal_after_they_have_loaded(found: Any) -> None:
    for told in found:
        assert all(map(torch.equal, told["loaded"], found[0]["loaded"]))


def test_utilities_of_sharded_biases(found: Any) -> None:
    for told in found:
        assert_close(told["biases"], sharing.biases(False))


def test_a_share_of_an_optimizer_that_all_have_is_no_shard(found: Any) -> None:
    assert not any(told["two optimizers"] for told in found)


def test_processes_of_their_own(found: Any) -> None:
    assert all(told["apart"] for told in found)


def test_scaled_utilities_of_shards(found: Any) -> None:
    for place, name in enumerate(("upgd", "upgd-local")):
        model = network()
        opt = METHODS[name][0](model.parameters(), **METHODS[name][1], sigma=0.0)
        train(model, opt)
        expected = [opt.scaled_utility(p) for p in model.parameters()]
        for told in found:
            assert_close(told["utility"][place], expected)


def test_what_is_refused(found: Any) -> None:
    for told in found:
        assert "use fully_shard" in told["flat parameters"]
        assert "on the CPU cannot perturb parts" in told["fused/noise"]
        assert "only upgd.optim.noise.PhiloxNoise" in told["own noise"]
        assert "different number of draws" in told["steps apart"]
        assert "process_group=False" in told["steps apart"]
        assert "leave out process_group" in told["left out"]
        assert "rows of sharded parameters" in told["flat rows"]


@pytest.fixture
def one_shard(tmp_path: Path) -> Iterator[Any]:
    """What fully_shard does to a model in a world of one process."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()


@every_method
@pytest.mark.parametrize("fused", [False, True])
def test_every_method_on_shards(row: Row, one_shard: Any, fused: bool) -> None:
    if fused and "fused" in row.unsupported:
        pytest.skip(row.unsupported["fused"])
    plain, model = cases.network(dtype=DOUBLE), one_shard(cases.network(dtype=DOUBLE))
    noise = {} if fused else {"noise": PhiloxNoise()}
    opt = row.make(model, seed=1, fused=fused)
    batches = cases.batches(4, dtype=DOUBLE)
    if "layers" in row.needs:
        model(batches[0][0]).sum().backward()
        with pytest.raises(TypeError, match="each process sees samples of its own"):
            opt.step()
        return
    if "curvature" in row.needs:
        model(batches[0][0]).sum().backward()
        with pytest.raises(TypeError, match="order=2 walks the graph of whole parameters"):
            opt.step()
        return
    cases.train(row, opt, model, batches)
    cases.train(row, row.make(plain, seed=1, fused=fused, **noise), plain, batches)
    assert_close([p.full_tensor() for p in model.parameters()], list(plain.parameters()))


def test_parameters_sharded_after_the_optimizer_was_made(one_shard: Any) -> None:
    """Libraries put the shards into an optimizer that was made before them."""
    model = network()
    opt = upgd.UPGD(model.parameters(), **COMMON, sigma=0.1, seed=1)
    opt.param_groups[0]["params"] = list(one_shard(model).parameters())
    train(model, opt)
    assert_close([p.full_tensor() for p in model.parameters()], sharing.alone("upgd", 0.1))


def test_copies_share_the_process_group(one_shard: Any) -> None:
    group = torch.distributed.group.WORLD
    model = network()
    opt = upgd.UPGD(model.parameters(), sigma=0.1, process_group=group)
    train(model, opt)
    copied = copy.deepcopy(opt)
    assert copied.process_group is group
    for mine, theirs in zip(copied.state.values(), opt.state.values(), strict=True):
        assert torch.equal(mine["utility"], theirs["utility"])


def test_a_process_group_is_one() -> None:
    with pytest.raises(TypeError, match="process_group must be"):
        upgd.UPGD(network().parameters(), process_group="gloo")


def test_a_flattened_parameter_must_be_found() -> None:
    from upgd.optim.shards import FSDP1, parts_of

    p = torch.nn.Parameter(torch.ones(3))
    setattr(p, FSDP1, True)
    with pytest.raises(TypeError, match=r"gc.freeze\(\)"):
        parts_of([p], [p])


def test_parts_know_their_elements() -> None:
    """By cutting a tensor of its own indices."""
    from upgd.optim.shards import Part

    whole = torch.arange(7 * 6 * 2).view(7, 6, 2)
    block = Part(3, (7, 6, 2), (2, 0, 1), (4, 6, 1))
    assert torch.equal(block.indices(), whole[2:6, :, 1:].flatten())
    assert block.first is None
    assert block.splits_rows
    assert not block.whole
    rows = Part(3, (7, 6, 2), (2, 0, 0), (4, 6, 2))
    assert torch.equal(rows.indices(), whole[2:6].flatten())
    assert rows.first == int(whole[2, 0, 0])
    assert not rows.splits_rows
    stretch = Part(3, (7, 6, 2), (5,), (9,))
    assert torch.equal(stretch.indices(), whole.flatten()[5:14])
    assert stretch.first == 5


def test_noise_of_parts_is_that_of_the_whole() -> None:
    from upgd.optim.shards import Part

    shapes = [(9, 5), (9,), (), (3, 2, 2)]
    sizes = [45, 9, 1, 12]
    offsets = [0, 45, 54, 55]
    question: Any = {"seed": 5, "step": 3, "device": torch.device("cpu"), "dtype": DOUBLE}
    whole = PhiloxNoise(shapes).draw(sizes, offsets, **question).split(sizes)
    parts = [
        Part(0, (9, 5), (3, 0), (4, 5)),
        Part(1, (9,), (5,), (4,)),
        Part(2, (), (), ()),
        Part(3, (3, 2, 2), (1, 0, 1), (2, 2, 1)),
    ]
    source = PhiloxNoise()
    source.describe(parts)
    held = [len(part.indices()) for part in parts]
    pieces = source.draw(held, offsets, **question).split(held)
    for part, numbers, all_ in zip(parts, pieces, whole, strict=True):
        assert torch.equal(numbers, all_[part.indices()])
