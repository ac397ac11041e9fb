"""Users' data as problems: the stream has the samples it should, on every engine."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from tests.running import work
from upgd.engine import EagerRun, Setting
from upgd.engine.batched import BatchedRun
from upgd.ledger import Ledger, RunSpec
from upgd.networks import build_for
from upgd.streams import (
    PROBLEMS,
    Boundaries,
    Drift,
    Problem,
    Recurring,
    StreamEndedError,
    StreamError,
    make_problem,
    register,
)
from upgd.study.prepare import prepare

N = 60
X = np.random.default_rng(0).normal(size=(N, 6)).astype(np.float32)
Y = np.arange(N) % 4
T = (X[:, :2] * 2 + 1).astype(np.float32)


@pytest.fixture(autouse=True)
def problems() -> Iterator[None]:
    """What a test registers is gone afterwards."""
    before = dict(PROBLEMS)
    yield
    PROBLEMS.clear()
    PROBLEMS.update(before)


def numbers(seed: int = 0) -> Iterator[tuple[Any, int]]:
    for step in range(200):
        yield X[(step + seed) % N], int(Y[(step + seed) % N])


def endless() -> Iterator[tuple[Any, Any]]:
    step = 0
    while True:
        yield X[step % N], T[step % N]
        step += 1


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return endless()


def all_of(problem: Problem, count: int, seed: int = 0) -> tuple[Any, Any]:
    return problem.make(seed).samples(0, count)  # type: ignore[attr-defined,no-any-return]


# ---------------------------------------------------------------------- kinds of data
@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        (torch.from_numpy(X), torch.from_numpy(Y)),
        (X.tolist(), Y.tolist()),
        TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
        DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=7),
        DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=None),
        lambda: zip(X, Y, strict=True),
        lambda: iter([*zip(X, Y.tolist(), strict=True)] * 3),
    ],
)
def test_samples_as_they_come(data: Any) -> None:
    more: dict[str, Any] = {"outputs": 4} if callable(data) else {"shuffle": False}
    problem = make_problem("mine", data, **more)
    x, y = all_of(problem, N)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)
    assert (problem.loss, problem.network) == ("cross_entropy", (6, 300, 150, 4))
    assert problem.task_length is None
    assert len(problem.source) == 16
    if not callable(data):
        again = problem.make(3).at(N + 2)
        np.testing.assert_array_equal(again.x[0], X[2])


def test_a_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=X, y=Y)
    problem = make_problem("mine", tmp_path / "mine.npz", shuffle=False)
    np.testing.assert_array_equal(all_of(problem, N)[0], X)
    assert problem.source == make_problem("mine", (X, Y), shuffle=False).source


def test_shuffled_by_default_and_by_seed() -> None:
    problem = make_problem("mine", (X, Y), task_length=30)
    x, y = all_of(problem, N, seed=1)
    rows = [int(np.flatnonzero((each == X).all(1))[0]) for each in x]
    assert rows[:30] != sorted(rows[:30])
    assert len(set(rows[:30])) == 30
    np.testing.assert_array_equal(y, Y[rows])
    assert not np.array_equal(x, all_of(problem, N, seed=2)[0])


def test_regression() -> None:
    problem = make_problem("mine", (X, T), shuffle=False, permute="inputs", task_length=10)
    stream: Any = problem.make(0)
    x, y = stream.samples(0, 20)
    np.testing.assert_array_equal(y, T[:20])
    np.testing.assert_array_equal(x[10:], X[10:20][:, stream.input_permutation(1)])
    assert problem.loss == "squared_error"
    assert problem.network[-1] == 2
    single = make_problem("mine", (X, T[:, 0]))
    assert all_of(single, 3)[1].shape == (3, 1)
    assert make_problem("mine", (X, Y), loss="squared_error").loss == "squared_error"


def test_a_generator_is_given_its_seed_and_can_be_permuted() -> None:
    problem = make_problem("mine", numbers, outputs=4, permute="labels", task_length=50)
    stream: Any = problem.make(3)
    x, y = stream.samples(40, 20)
    rows = (np.arange(40, 60) + 3) % N
    np.testing.assert_array_equal(x, X[rows])
    for task, here in ((0, slice(0, 10)), (1, slice(10, 20))):
        np.testing.assert_array_equal(y[here], stream.label_permutation(task)[Y[rows][here]])


@pytest.mark.parametrize("data", [Endless(), DataLoader(Endless(), batch_size=4), endless])
def test_endless_data(data: Any) -> None:
    problem = make_problem("mine", data)
    np.testing.assert_array_equal(all_of(problem, 100)[1], T[np.arange(100) % N])
    assert problem.loss == "squared_error"


def test_schedules() -> None:
    at = make_problem("mine", (X, Y), permute="labels", boundaries=[5, 12])
    assert at.task_length is None
    assert [at.make(0).task(step) for step in (4, 5, 11, 12, 500)] == [0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="increasing"):
        Boundaries((5, 5))
    recurring = make_problem("mine", (X, Y), permute="labels", schedule=Recurring(10, 2))
    assert [recurring.make(0).task(step) for step in (0, 10, 20)] == [0, 1, 0]
    shorter = replace(recurring, task_length=5).make(0)
    assert [shorter.task(step) for step in (0, 5, 10)] == [0, 1, 0]
    for drift in ({"drift": Drift(20, 5)}, {"drift": 5, "task_length": 20}):
        stream: Any = make_problem("mine", (X, Y), permute="inputs", **drift).make(0)
        assert stream.schedule == Drift(20, 5)


def test_images_are_scaled() -> None:
    images = np.random.default_rng(0).integers(0, 256, (N, 4, 4), dtype=np.uint8)
    x = all_of(make_problem("mine", (images, Y), shuffle=False), N)[0]
    np.testing.assert_allclose(x, images.reshape(N, -1) / 127.5 - 1, atol=1e-6)
    table = np.random.default_rng(0).integers(0, 2, (N, 4), dtype=np.uint8)
    x = all_of(make_problem("mine", (table, Y), shuffle=False), N)[0]
    np.testing.assert_array_equal(x, table)


# -------------------------------------------------------------------------- bad data
NAN = X.copy()
NAN[7, 2] = np.nan


def ending() -> Iterator[Any]:
    yield from ()


def broken(seed: int) -> Iterator[Any]:
    raise OSError("no such\ndevice")


@pytest.mark.parametrize(
    ("data", "more", "words"),
    [
        ((NAN, Y), {}, "x is not finite in row 7"),
        ((X, T * np.inf), {}, "y is not finite"),
        ((X, Y[:-1]), {}, "a row of each per sample"),
        ((X[:0], Y[:0]), {}, "no samples"),
        ((X, Y - 1), {}, "y is -1 in row 0; a class from 0 expected"),
        ((X, Y), {"outputs": 3}, "y is 3 in row 3; a class from 0 to 2 expected"),
        ((X, Y + 0.5), {"loss": "cross_entropy"}, "y is 0.5 in row 0"),
        ((X, ["a"] * N), {}, "y holds strings"),
        (([["a"]], [1]), {}, "x holds strings"),
        (([[1], [1, 2]], [1, 2]), {}, "not an array of numbers"),
        ((X, np.stack([Y, Y], 1)), {}, "2 whole numbers per sample"),
        ((X, Y), {"shape": (4, 2)}, "which is not (4, 2)"),
        ((X, Y), {"loss": "hinge"}, "loss must be one of"),
        ((X, T), {"permute": "labels"}, "no labels to permute"),
        ((X, Y), {"task_length": 3, "boundaries": [3]}, "exclude each other"),
        ((X, Y), {"drift": 3}, "needs a task_length"),
        ((X, Y), {"drift": 30, "task_length": 3}, "over must be"),
        ((X, Y), {"permute": "all"}, "permute must be"),
        ((X, Y), {"network": "cnn"}, "takes inputs (3, 32, 32)"),
        ((X, Y), {"network": "mine", "hidden": (3,)}, "exclude each other"),
        ((X, Y), {"test": (X[:, :3], Y)}, "another kind"),
        ((X, T), {"test": (X, T)}, "leave test out"),
        (3, {}, "data are a int"),
        ("missing.npz", {}, "there is no file"),
        (ending, {}, "no samples"),
        (broken, {}, "raised OSError: no such"),
        (numbers, {}, "give outputs="),
        (numbers, {"outputs": 4, "shuffle": True}, "leave shuffle out"),
        (numbers, {"outputs": 4, "test": (X, Y)}, "leave test out"),
        (lambda: iter([3]), {}, "sample 0 is a int, not a pair"),
        (
            DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), shuffle=True),
            {},
            "RandomSampler draws an order of its own",
        ),
        (
            DataLoader(
                TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
                sampler=WeightedRandomSampler([1.0] * N, N),
            ),
            {},
            "draws an order of its own",
        ),
    ],
)
def test_bad_data_are_said_in_one_line(data: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        make_problem("mine", data, **more)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("mine: ")


def test_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "mine.npz").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"is not a readable \.npz"):
        make_problem("mine", tmp_path / "mine.npz")
    np.savez(tmp_path / "mine.npz", a=X)
    with pytest.raises(ValueError, match="has a; x and y expected"):
        make_problem("mine", tmp_path / "mine.npz")


# ----------------------------------------------------------------------------- engines
KINDS: list[tuple[Any, dict[str, Any]]] = [
    ((X, Y), {"permute": "inputs", "task_length": 10}),
    ((X, Y), {"permute": "labels", "boundaries": [7, 21]}),
    ((X, Y), {"permute": "inputs", "drift": 5, "task_length": 10}),
    ((X, Y), {"shuffle": False}),
    ((X, T), {"permute": "inputs", "task_length": 10}),
    (numbers, {"outputs": 4, "permute": "inputs", "task_length": 10}),
    (endless, {}),
]


@pytest.mark.parametrize(("data", "more"), KINDS)
def test_stacks_and_eager_runs_see_the_same(data: Any, more: dict[str, Any]) -> None:
    problem = make_problem("mine", data, hidden=(5,), **more)
    settings = [Setting("upgd", {"lr": 0.05}, seed, window=10) for seed in (0, 1, 1)]
    stack = BatchedRun(problem, settings, [problem.make(s.seed) for s in settings], 30)
    stack.advance(13)
    stack.advance(17)
    for number, setting in enumerate(settings):
        run = EagerRun(problem.make(setting.seed), lambda s, t: build_for(problem, s, t), setting)
        run.advance(30)
        for name in ("loss", "plasticity"):
            mine = stack.series(number)[name]
            np.testing.assert_allclose(mine, run.meter.series(name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("data", "more"), KINDS)
def test_resuming_skips_what_was_seen(data: Any, more: dict[str, Any]) -> None:
    problem = make_problem("mine", data, hidden=(5,), **more)
    settings = [Setting("upgd", {"lr": 0.05}, seed, window=10) for seed in (0, 1)]

    def stack() -> BatchedRun:
        return BatchedRun(problem, settings, [problem.make(s.seed) for s in settings], 30)

    whole, first, second = stack(), stack(), stack()
    whole.advance(30)
    first.advance(10)
    second.restore([first.state(number) for number in range(2)])
    second.advance(20)
    for number in range(2):
        for name, values in whole.series(number).items():
            np.testing.assert_array_equal(values, second.series(number)[name])


def test_a_generator_may_have_just_enough_samples() -> None:
    problem = make_problem("mine", lambda: zip(X, T, strict=True), hidden=(5,))
    settings = [Setting("sgd", {}, 0, window=10)]
    run = BatchedRun(problem, settings, [problem.make(0)], N)
    run.advance(N)
    assert len(run.series(0)["loss"]) == N // 10
    more = BatchedRun(problem, settings, [problem.make(0)], N + 10)
    with pytest.raises(StreamEndedError, match="of mine ended after 60 samples; 70 are needed"):
        more.advance(N + 10)


def test_a_generator_that_ends_fails_its_run_and_no_other(tmp_path: Path) -> None:
    def short(seed: int) -> Iterator[Any]:
        return zip(X[: 30 if seed == 0 else N], Y.tolist(), strict=False)

    register(make_problem("mine", short, outputs=4, hidden=(5,)))
    specs = [RunSpec("mine", "sgd", {}, seed, 50, {"window": 10}) for seed in (0, 1)]
    with Ledger.open(tmp_path / "study") as ledger:
        ledger.add(specs)
        tally = work(ledger)
        assert (tally.done, tally.failed) == (1, 1)
        error = str(ledger.get(specs[0].key).error)
    assert "the generator of mine ended after 30 samples; 50 are needed" in error


def test_errors_within_a_generator_name_the_sample() -> None:
    def bad() -> Iterator[Any]:
        yield X[0], 1
        yield NAN[7], 1
        raise OSError("gone")

    stream: Any = make_problem("mine", bad, outputs=4).make(0)
    with pytest.raises(ValueError, match="sample 1 of the generator of mine: x is not finite"):
        stream.at(1)
    with pytest.raises(StreamError, match="generator of mine, sample 2: OSError: gone"):
        stream.at(2)
    with pytest.raises(ValueError, match="a class from 0 to 1 expected"):
        make_problem("mine", numbers, outputs=2).make(0).at(2)


def test_two_threads_may_read_a_generator() -> None:
    stream: Any = make_problem("mine", endless).make(0)
    found: dict[int, Any] = {}

    def read(start: int) -> None:
        for step in range(start, start + 300, 3):
            found[step] = stream.at(step).y[0]

    threads = [threading.Thread(target=read, args=(start,)) for start in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step, y in found.items():
        np.testing.assert_array_equal(y, T[step % N])


# ---------------------------------------------------------------------------- registry
def test_names_of_the_package_are_refused_and_own_ones_replaced() -> None:
    first = register(make_problem("mine", (X, Y)))
    second = register(make_problem("mine", (X, Y + 1)))
    assert PROBLEMS["mine"] is second
    assert first.source != second.source
    with pytest.raises(ValueError, match="this package's"):
        register(make_problem("stationary-mnist", (X, Y)))
    with pytest.raises(ValueError, match="letters, digits"):
        register(make_problem("my problem", (X, Y)))


def test_what_changes_the_source() -> None:
    def f() -> Iterator[Any]:
        return zip(X, T, strict=True)

    def g() -> Iterator[Any]:
        return zip(X, 2 * T, strict=True)

    made: list[Callable[[], Problem]] = [
        lambda: make_problem("mine", (X, Y)),
        lambda: make_problem("mine", (X + 1, Y)),
        lambda: make_problem("mine", (X, Y), shuffle=False),
        lambda: make_problem("mine", (X, Y), outputs=5),
        lambda: make_problem("mine", (X, Y), permute="labels"),
        lambda: make_problem("mine", (X, Y), task_length=10),
        lambda: make_problem("mine", (X, Y), boundaries=[10]),
        lambda: make_problem("mine", (X, Y), hidden=(3,)),
        lambda: make_problem("mine", (X, Y), activation="tanh"),
        lambda: make_problem("mine", (X, Y), window=7),
        lambda: make_problem("mine", f),
        lambda: make_problem("mine", g),
    ]
    sources = [[make().source for make in made] for _ in range(2)]
    assert sources[0] == sources[1]
    assert len(set(sources[0])) == len(made)
    assert make_problem("mine", (X, Y), window=5).source == (
        make_problem("mine", (X, Y), window=5, steps=99).source
    )


def test_options_of_a_run() -> None:
    register(make_problem("mine", (X, Y), task_length=10, test=(X, Y)))
    options = {"window": 5, "task_length": 5, "hidden": "3", "held_out": 20, "restart": True}
    run = prepare(RunSpec("mine", "upgd", {}, 0, 20, options))
    run.advance(20)
    assert len(run.offline) == 4
    assert run.model[1].weight.shape == (3, 6)
