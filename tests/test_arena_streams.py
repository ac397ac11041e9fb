"""Streams and networks of the arena: permutations of both, recurring and gradual ones, norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from upgd.engine.batched import BatchedRun, kind_of, why_eager
from upgd.engine.eager import EagerRun, Setting
from upgd.engine.feed import Feed, has_table
from upgd.ledger import RunSpec
from upgd.ledger.errors import SpecError
from upgd.networks import OnlineNorm, build, build_for, mlp
from upgd.streams import PROBLEMS, TaskStream, get, load, make_problem
from upgd.study.prepare import plan, prepare

DIGITS = [n for n in PROBLEMS if n.endswith("-digits")]
HOW = ("", "gradual-", "recurring-")


# ---------------------------------------------------------------------------------- streams
def test_every_combination_is_a_problem() -> None:
    datasets = {"mnist": "mnist", "emnist": "emnist47", "mini-imagenet": "mini-imagenet"}
    datasets |= {"flat-cifar10": "cifar10", "digits": "digits"}
    for data, dataset in datasets.items():
        assert get(f"stationary-{data}").task_length is None
        for how in HOW:
            for what, permute in (("input", "inputs"), ("label", "labels"), ("both", "both")):
                problem = get(f"{how}{what}-permuted-{data}")
                assert (problem.dataset, problem.permute) == (dataset, permute)
                assert len(problem.network) == 4
    assert get("both-permuted-flat-cifar10").network == (3072, 300, 150, 10)


def test_both_are_permuted_each_in_its_own_way() -> None:
    digits = load("digits")
    s = TaskStream(digits, 3, 40, "both", flatten=True)
    alone = {what: TaskStream(digits, 3, 40, what, flatten=True) for what in ("inputs", "labels")}
    block, found = s.block(35, 10), s.samples(35, 10)
    for row, (index, task) in enumerate(zip(block.index, block.task, strict=True)):
        p, q = s.input_permutation(task), s.label_permutation(task)
        assert (found.x[row] == digits.scaled(np.array([index])).reshape(-1)[p]).all()
        assert found.y[row] == q[digits.labels[index]]
        assert sorted(p) == list(range(64))
        assert sorted(q) == list(range(10))
    assert (found.x == alone["inputs"].samples(35, 10).x).all()
    assert (found.y == alone["labels"].samples(35, 10).y).all()
    test = TaskStream(digits, 3, 40, "both", test=load("digits", "test"), flatten=True)
    held, inputs = test.held_out(2, 5), TaskStream(digits, 3, 40, test=load("digits", "test"))
    assert (held.x == inputs.held_out(2, 5).x.reshape(5, -1)[:, s.input_permutation(2)]).all()
    assert (held.y == s.label_permutation(2)[inputs.held_out(2, 5).y]).all()


def test_held_out_samples_of_a_recurring_task_have_its_permutation() -> None:
    problem = replace(get("recurring-label-permuted-digits"), task_length=50)
    s = problem.make(seed=1)
    assert isinstance(s, TaskStream)
    plain = TaskStream(s.dataset, 1, 50, test=load("digits", "test"), flatten=True)
    twelfth, second = s.held_out(12, 20), s.held_out(2, 20)
    assert (twelfth.y == s.label_permutation(2)[plain.held_out(12, 20).y]).all()
    assert (twelfth.x != second.x).any()


def test_gradual_and_recurring_streams_are_what_they_are_called() -> None:
    gradual = replace(get("gradual-input-permuted-digits"), task_length=200).make(0)
    tasks = np.array([gradual.task(step) for step in range(200)])
    assert (tasks[:100] == 0).all()
    assert 25 < (tasks[100:] == 1).sum() < 75
    recurring = get("recurring-both-permuted-digits").make(0)
    assert recurring.task(0) == recurring.task(10 * 2_500) == 0
    assert recurring.task(9 * 2_500) == 9


@pytest.mark.parametrize("name", DIGITS)
def test_a_stack_is_fed_the_streams_samples(name: str) -> None:
    problem = get(name)
    problem = replace(problem, task_length=problem.task_length and 30)
    streams = [problem.make(seed) for seed in (0, 1, 0)]
    feed = Feed(streams, 100)
    mixes = name.startswith("gradual-") and "label" not in name
    assert has_table(streams[0]) == (not mixes)
    for start in (0, 30, 60):
        chunk = feed.chunk(start, 30)
        assert chunk.labels is not None
        for run, one in enumerate(streams):
            x = chunk.table[chunk.index[run]]
            if chunk.permutations is not None and chunk.slots is not None:
                order = chunk.permutations[chunk.slots, run]
                x = np.take_along_axis(x, order, 1)
            found = one.samples(start, 31)
            assert (x == found.x.reshape(31, -1)).all()
            assert (chunk.labels[run] == found.y).all()


@pytest.mark.parametrize("name", [f"{how}both-permuted-digits" for how in HOW])
def test_stacks_learn_what_the_eager_engine_learns(name: str) -> None:
    problem = replace(get(name), task_length=20, network=(64, 8, 10))
    settings = [Setting("sgdw", {"lr": 0.1}, seed, window=20) for seed in (0, 1)]
    stack = BatchedRun(problem, settings, [problem.make(s.seed) for s in settings], 60)
    stack.advance(60)
    for run, setting in enumerate(settings):
        eager = EagerRun(problem.make(setting.seed), lambda s, t: build_for(problem, s, t), setting)
        eager.advance(60)
        expected = eager.meter.series("loss")
        np.testing.assert_allclose(stack.series(run)["loss"], expected, rtol=1e-4)


def test_targets_have_no_labels_to_permute() -> None:
    x = np.zeros((9, 2), np.float32)
    with pytest.raises(ValueError, match="no labels"):
        make_problem("mine", (x, x), loss="squared_error", permute="both", task_length=3)


# ----------------------------------------------------------------------------------- norms
def weighted(samples: Any, decay: float) -> tuple[Any, Any]:
    """Mean and variance with the weight of each sample written out."""
    weights = [1.0]
    for t in range(2, len(samples) + 1):
        rate = max(1 - decay, 1 / t)
        weights = [*(w * (1 - rate) for w in weights), rate]
    w = torch.tensor(weights, dtype=torch.float64)[:, None]
    mean = (w * samples).sum(0)
    return mean, (w * (samples - mean) ** 2).sum(0)


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99])
def test_online_norm_has_exact_weighted_moments(decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = 3 + 2 * torch.randn(40, 5, generator=generator, dtype=torch.float64)
    samples[:, 4] = 7  # never changes
    norm = OnlineNorm(5, decay, floor=1e-3).double()
    for t, x in enumerate(samples, 1):
        mean, variance = weighted(samples[:t], decay)
        expected = (x - mean) / variance.clamp_min(1e-3).sqrt()
        torch.testing.assert_close(norm(x[None])[0], expected, rtol=1e-9, atol=1e-9)
    before = norm.mean.clone()
    norm.eval()
    norm(torch.zeros(1, 5, dtype=torch.float64))
    assert torch.equal(norm.mean, before)


def test_a_batch_counts_as_a_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    norm = OnlineNorm(3, floor=1e-9).double()
    y = norm(batch)
    torch.testing.assert_close(y.mean(0), torch.zeros(3).double(), atol=1e-9, rtol=0)
    torch.testing.assert_close(y.var(0, unbiased=False), torch.ones(3).double(), atol=1e-6, rtol=0)
    more = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    norm(more)  # still equally weighted
    both = torch.cat([batch, more])
    torch.testing.assert_close(norm.mean, both.mean(0))
    torch.testing.assert_close(norm.variance, both.var(0, unbiased=False))


def test_no_output_exceeds_its_bound() -> None:
    norm = OnlineNorm(1, decay=0.99)
    for _ in range(500):
        norm(torch.full((1, 1), -1.0))
    assert float(norm(torch.full((1, 1), 1e6))) == pytest.approx(99**0.5, rel=1e-4)
    with pytest.raises(ValueError, match="decay"):
        OnlineNorm(1, decay=1.0)


def test_norms_are_where_they_belong_and_change_no_initial_weight() -> None:
    kinds = [type(layer).__name__ for layer in mlp([4, 3, 2, 2], "tanh", True, True)]
    hidden = ["Linear", "LayerNorm", "Tanh"]
    assert kinds == ["Flatten", "OnlineNorm", *hidden, *hidden, "Linear"]
    plain, normed = build([4, 3, 2], 5), build([4, 3, 2], 5, layer_norm=True, input_norm=True)
    pairs = zip(plain.parameters(), normed.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def forward(x: Any, weights: list[Any], layer_norm: bool) -> Any:
    """A dense network by plain formulas, in float64."""
    for w, b in weights[:-1]:
        a = w @ x + b
        if layer_norm:
            a = (a - a.mean()) / np.sqrt(a.var() + 1e-5)
        x = np.maximum(a, 0)
    w, b = weights[-1]
    return w @ x + b


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("input_norm", [False, True])
def test_a_run_has_the_norms_of_its_specification(layer_norm: bool, input_norm: bool) -> None:
    options = {"hidden": "6-5", "layer_norm": layer_norm, "input_norm": input_norm, "window": 1}
    spec = RunSpec("both-permuted-digits", "sgdw", {"lr": 0.0}, 2, 30, options)
    run = prepare(spec)
    run.advance(30)
    parameters = [p.detach().double().numpy() for p in run.model.parameters()]
    weights = list(zip(parameters[::2], parameters[1::2], strict=True))
    xs, ys = (np.concatenate(part) for part in zip(*map(run.stream.at, range(30)), strict=True))
    losses = []
    for t, (x, y) in enumerate(zip(xs, ys, strict=True), 1):
        x = x.astype(np.float64)
        if input_norm:
            mean, variance = weighted(torch.from_numpy(xs[:t]).double(), 0.99)
            x = ((torch.from_numpy(x) - mean) / variance.clamp_min(1e-4).sqrt()).numpy()
        z = forward(x, weights, layer_norm)
        losses.append(np.log(np.exp(z - z.max()).sum()) + z.max() - z[y])
    np.testing.assert_allclose(run.meter.series("loss"), losses, rtol=2e-4)


def test_keys_without_norms_stay_and_those_with_differ() -> None:
    problem, plain = "label-permuted-digits", RunSpec("label-permuted-digits", "sgd")
    named = RunSpec(problem, "sgd", options={"layer_norm": False, "input_norm": False})
    assert plain.key == named.key
    keys = {
        RunSpec(problem, "sgd", options={name: True}).key for name in ("layer_norm", "input_norm")
    }
    assert len({*keys, plain.key}) == 3


def test_a_run_with_normalised_inputs_resumes() -> None:
    spec = RunSpec("input-permuted-digits", "upgd", {}, 1, 40, {"hidden": "6", "input_norm": True})
    whole, first, second = prepare(spec), prepare(spec), prepare(spec)
    whole.advance(40)
    first.advance(25)
    second.restore(*first.state())
    second.advance(15)
    both = zip(whole.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in both)


def test_general_stacks_run_normalised_layers_but_do_not_normalise_inputs() -> None:
    """Others do (tests/test_layered_stack.py), but not with this method."""

    def planned(**norms: bool) -> Any:
        options = {"hidden": "6", **norms}
        hyper = {"lr": 0.1, "sigma": 0.0}
        return plan(RunSpec("label-permuted-digits", "upgd-local", hyper, 0, 50, options))

    problem, setting = planned(layer_norm=True)
    assert kind_of(problem, setting, "cpu") == "general"
    setting = replace(setting, window=10, stride=5, held_out=0)
    stack = BatchedRun(problem, [setting], [problem.make(0)], 50)
    stack.advance(50)
    eager = EagerRun(problem.make(0), lambda s, t: build_for(problem, s, t), setting)
    eager.advance(50)
    for name in ("loss", "zero_activations", "weight_l2"):
        np.testing.assert_allclose(stack.series(0)[name], eager.meter.series(name), rtol=1e-4)
    problem, setting = planned(input_norm=True)
    assert kind_of(problem, setting, "cpu") is None
    assert "norm" in why_eager(problem, setting, "cpu")


def test_norms_are_of_dense_networks() -> None:
    spec = RunSpec("label-permuted-cifar10", "sgd", options={"layer_norm": True})
    with pytest.raises(SpecError, match="dense networks"):
        plan(spec)
    with pytest.raises(SpecError, match="true or false"):
        plan(RunSpec("label-permuted-digits", "sgd", options={"input_norm": 2}))


def test_feature_wise_methods_learn_behind_norms() -> None:
    options = {"hidden": "6-5", "layer_norm": True, "input_norm": True}
    run = prepare(RunSpec("label-permuted-digits", "feature-upgd", {"lr": 0.01}, 0, 20, options))
    before = [p.detach().clone() for p in run.model.parameters()]
    run.advance(20)
    moved = [bool((a != b).any()) for a, b in zip(before, run.model.parameters(), strict=True)]
    assert all(moved)
