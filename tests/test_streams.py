"""Streams are pure functions of seed and step, and what the paper says they are."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from scipy import stats

from tests.waiting import PATIENCE
from upgd.streams import (
    PROBLEMS,
    Dataset,
    Drift,
    Every,
    Purpose,
    Recurring,
    Sample,
    Schedule,
    StreamEndedError,
    TaskStream,
    ToyStream,
    from_iterable,
    get,
    keyed,
)

MASK = (1 << 64) - 1
N, CLASSES = 60, 6


def tiny(n: int = N, seed: int = 0) -> Dataset:
    """Images of 3×4 distinct bytes; the first tells which sample it is, plus 100·seed."""
    images = (np.arange(12) * 20 + np.zeros((n, 1))).astype(np.uint8).reshape(n, 3, 4)
    images[:, 0, 0] = np.arange(n) + 100 * seed
    return Dataset("tiny", images, np.arange(n) % CLASSES, CLASSES)


def stream(permute: str | None = "inputs", length: int | None = 40, seed: int = 0) -> TaskStream:
    return TaskStream(tiny(), seed, length, permute, test=tiny(30, seed=1))  # type: ignore[arg-type]


def same(a: Sample, b: Sample) -> None:
    assert_array_equal(a.x, b.x)
    assert_array_equal(a.y, b.y)
    assert a.x.dtype == b.x.dtype
    assert a.y.dtype == b.y.dtype


# ---- keyed randomness


def philox(key: tuple[int, int], counter: list[int]) -> list[int]:
    """Philox4x64-10, written from its paper."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(b >> 64) ^ c[1] ^ k0, b & MASK, (a >> 64) ^ c[3] ^ k1, a & MASK]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return c


def test_plain_philox_gives_the_published_answer() -> None:
    words = philox((0, 0), [0, 0, 0, 0])
    assert words[0] == 0x16554D9ECA36314C
    assert words[1] == 0xDB20FE9D672D0FDC


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, MASK),
    purpose=st.integers(0, 2**32 - 1),
    index=st.lists(st.integers(0, MASK), max_size=3),
    start=st.integers(0, 2**63),
)
def test_bits_are_philox_of_the_documented_key(
    seed: int, purpose: int, index: list[int], start: int
) -> None:
    words = []
    for block in (start // 4, start // 4 + 1):
        counter = [block + 1, *index, *[0] * (3 - len(index))]  # NumPy advances, then makes
        words += philox((seed, purpose + (len(index) << 32)), counter)
    got = keyed.bits(5, seed, purpose, *index, start=start)
    assert got.tolist() == words[start % 4 :][:5]


def test_no_two_purposes_or_indices_share_a_word() -> None:
    keys: list[tuple[int, ...]] = [(s, p) for s in range(3) for p in Purpose]
    keys += [(*key, i) for key in keys for i in range(4)]
    keys += [(*key, i) for key in keys if len(key) == 3 for i in range(3)]
    words = np.concatenate([keyed.bits(50, *key) for key in keys])
    assert len(np.unique(words)) == len(words)


def test_uniform_and_normal_have_their_distributions() -> None:
    u = keyed.uniform(100_000, 1, Purpose.DRIFT)
    z = keyed.normal(100_000, 1, Purpose.TOY_INPUTS)
    assert u.min() >= 0
    assert u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    assert stats.kstest(z, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(z[0::2], z[1::2])[0, 1]) < 4 / np.sqrt(50_000)


def test_the_first_word_is_uniform_over_indices_and_seeds() -> None:
    """Neighbouring integers must not give similar numbers."""
    for draw in (
        [keyed.uniform(1, 0, Purpose.ORDER, i)[0] for i in range(3000)],
        [keyed.uniform(1, s, Purpose.ORDER, 0)[0] for s in range(3000)],
    ):
        assert stats.kstest(draw, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(draw[:-1], draw[1:])[0, 1]) < 4 / np.sqrt(3000)


def test_permutations_of_four_are_equally_likely() -> None:
    counts = Counter(tuple(keyed.permutation(4, 0, Purpose.ORDER, i)) for i in range(4800))
    assert len(counts) == 24
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


@pytest.mark.parametrize("start", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_start_skips(start: int, count: int) -> None:
    for draw in (keyed.bits, keyed.uniform, keyed.normal):
        whole = draw(200, 3, Purpose.TOY_INPUTS, 5)
        part = draw(count, 3, Purpose.TOY_INPUTS, 5, start=start)
        assert_array_equal(part, whole[start : start + count])


@pytest.mark.parametrize(
    "arguments", [(1, -1, 1), (1, 1 << 64, 1), (1, 0, -1), (-1, 0, 1), (1, 0, 1, -2), (1, *[0] * 6)]
)
def test_integers_out_of_range_are_refused(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must|at most"):
        keyed.bits(*arguments)


DIGEST = """
import hashlib
from upgd.streams import get
digest = hashlib.sha256()
for name in ("input-permuted-digits", "label-permuted-digits", "toy-changing-sign"):
    for step in (7, 2499, 2500, 10**6):
        x, y = get(name).make(seed=3).at(step, 2)
        digest.update(x.tobytes() + y.tobytes())
"""


def test_another_process_gives_the_same_numbers() -> None:
    here: dict[str, Any] = {}
    exec(DIGEST, here)
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = subprocess.run(
        [sys.executable, "-c", DIGEST + "print(digest.hexdigest())"],
        env={**os.environ, "PYTHONHASHSEED": other},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    assert there.stdout.strip() == here["digest"].hexdigest()


# ---- tasks


@pytest.mark.parametrize("task", [0, 1, 7])
def test_permutations_are_permutations_and_task_0_has_one(task: int) -> None:
    for permute in ("inputs", "labels"):
        s = stream(permute)
        inputs, labels = s.input_permutation(task), s.label_permutation(task)
        assert sorted(inputs) == list(range(12))
        assert sorted(labels) == list(range(CLASSES))
        assert sorted(s.order(task)) == list(range(N))
        moved = inputs if permute == "inputs" else labels
        still = labels if permute == "inputs" else inputs
        assert_array_equal(still, np.arange(len(still)))
        assert (moved != np.arange(len(moved))).any()


def test_seeds_and_tasks_differ() -> None:
    seen = {
        (tuple(s.input_permutation(task)), tuple(s.order(task)))
        for s in (stream(seed=0), stream(seed=1))
        for task in range(10)
    }
    assert len(seen) == 20


def test_a_sample_is_the_datas_under_the_tasks_permutation() -> None:
    data = tiny()
    for step in (0, 39, 40, 1234):
        task, position = divmod(step, 40)
        s = stream("inputs")
        index = s.order(task)[position]
        expected = (data.inputs[index].ravel() / 255 - 0.5) / 0.5
        x, y = s.at(step)
        np.testing.assert_allclose(x.ravel(), expected[s.input_permutation(task)], atol=1e-6)
        assert y[0] == data.labels[index]
        s = stream("labels")
        x, y = s.at(step)
        np.testing.assert_allclose(x.ravel(), expected, atol=1e-6)
        assert y[0] == s.label_permutation(task)[data.labels[index]]


def test_boundaries_are_where_stated() -> None:
    s = stream("labels", length=25)
    block = s.block(0, 1000)
    assert_array_equal(block.task, np.arange(1000) // 25)
    assert [s.task(step) for step in (0, 24, 25, 49, 50)] == [0, 0, 1, 1, 2]
    assert s.task_length == 25


def test_no_sample_repeats_until_the_data_end() -> None:
    s = stream(length=150)  # two and a half passes of 60
    for task in range(5):
        index = s.block(task * 150, 150).index
        assert len(set(index[:60])) == len(set(index[60:120])) == 60
        assert len(set(index[120:])) == 30
        assert (index[:60] != index[60:120]).any()


def test_labels_keep_their_histogram() -> None:
    block = stream("labels", length=N).block(0, 10 * N)
    for task in range(10):
        assert_array_equal(np.bincount(block.label[block.task == task]), [N // CLASSES] * CLASSES)


def test_labels_are_spread_evenly_over_tasks() -> None:
    """Over tasks, a class is called by each name equally often."""
    s = stream("labels")
    names = [s.label_permutation(task)[2] for task in range(3000)]
    assert stats.chisquare(np.bincount(names, minlength=CLASSES)).pvalue > 1e-3


def test_stationary_shuffles_each_pass_and_permutes_nothing() -> None:
    s = stream(None, length=None)
    index = s.block(0, 3 * N).index.reshape(3, N)
    assert all(len(set(row)) == N for row in index)
    assert (index[0] != index[1]).any()
    assert (index[1] != index[2]).any()
    assert s.task(10**9) == 0
    assert s.task_length is None
    assert_array_equal(s.at(5).x[0], tiny().scaled([int(index[0, 5])])[0])


SCHEDULES: list[Schedule] = [Every(None), Every(7), Recurring(7, 3), Drift(20, 15), Drift(9, 9)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("permute", ["inputs", "labels", None])
@settings(max_examples=10, deadline=None)
@given(step=st.integers(0, 40), batch=st.integers(1, 5))
def test_a_jump_is_a_walk_and_a_batch_is_its_samples(
    schedule: Schedule, permute: str | None, step: int, batch: int
) -> None:
    def make() -> TaskStream:
        return TaskStream(tiny(25), 5, permute=permute, schedule=schedule)  # type: ignore[arg-type]

    walk = make()
    for k in range(step * batch):
        walk.block(k, 1)
    singles = [walk.at(k) for k in range(step * batch, (step + 1) * batch)]
    jump = make().at(step, batch)
    same(jump, Sample(*(np.concatenate(part) for part in zip(*singles, strict=True))))


@settings(max_examples=30, deadline=None)
@given(start=st.integers(0, 10**12), count=st.integers(1, 200))
def test_block_equals_at(start: int, count: int) -> None:
    s = stream("labels", length=33)
    block = s.block(start, count)
    for i in (0, count // 2, count - 1):
        x, y = stream("labels", length=33).at(start + i)
        assert_array_equal(x, tiny().scaled([int(block.index[i])]))
        assert y[0] == block.label[i]
        assert s.task(start + i) == block.task[i]


def test_samples_are_the_callers() -> None:
    """Writing into what a stream gave changes nothing that it gives later."""
    s = stream("labels")
    first, block = s.at(3), s.block(0, 10)
    expected = first.x.copy(), first.y.copy(), block.index.copy()
    first.x[:], first.y[:], block.index[:] = 0, 0, 0
    same(s.at(3), Sample(*expected[:2]))
    assert_array_equal(s.block(0, 10).index, expected[2])


def test_a_stream_can_be_pickled() -> None:
    s = stream()
    s.at(5)
    same(pickle.loads(pickle.dumps(s)).at(7), s.at(7))


def test_held_out_is_test_data_under_the_tasks_permutation() -> None:
    for permute in ("inputs", "labels"):
        s = stream(permute)
        test = tiny(30, seed=1)
        x, y = s.held_out(task=4, count=20)
        original = np.empty((20, 12), np.float32)
        original[:, s.input_permutation(4)] = x.reshape(20, 12)
        index = np.rint((original[:, 0] / 2 + 0.5) * 255).astype(int) - 100  # marked by 100
        assert len(set(index)) == 20
        assert min(index) >= 0
        assert_array_equal(original, test.scaled(index).reshape(20, 12))
        assert_array_equal(y, s.label_permutation(4)[test.labels[index]])
    assert (s.held_out(5, 20).x != s.held_out(6, 20).x).any()
    same(s.held_out(5, 20), s.held_out(5, 20))


def test_held_out_needs_test_data() -> None:
    with pytest.raises(ValueError, match="no test data"):
        TaskStream(tiny(), 0).held_out(0, 1)
    with pytest.raises(ValueError, match="from 1 to 30"):
        stream().held_out(0, 31)


def test_flatten_gives_the_same_values_as_vectors() -> None:
    flat = TaskStream(tiny(), 0, 40, "inputs", flatten=True)
    assert flat.shape == (12,)
    assert stream().shape == (3, 4)
    assert_array_equal(flat.at(3).x, stream().at(3).x.reshape(1, 12))


# ---- schedules


def test_recurring_tasks_return_in_a_fresh_order() -> None:
    s = TaskStream(tiny(), 0, permute="labels", schedule=Recurring(length=30, tasks=3))
    block = s.block(0, 180)
    assert_array_equal(block.task, np.arange(180) // 30 % 3)
    assert (block.index[:30] != block.index[90:120]).any()
    names = s.label_permutation(0)
    for part in (slice(0, 30), slice(90, 120)):
        assert_array_equal(block.label[part], names[tiny().labels[block.index[part]]])


def test_drift_grows_linearly() -> None:
    length, over, spans = 100, 60, 2000
    s = TaskStream(tiny(), 0, permute="labels", schedule=Drift(length, over))
    moved = s.block(0, length * spans).task.reshape(spans, length) - np.arange(spans)[:, None]
    assert set(np.unique(moved)) == {0, 1}
    assert (moved[:, : length - over] == 0).all()
    expected = np.arange(1, over + 1) / (over + 1)
    z = (moved[:, -over:].mean(0) - expected) / np.sqrt(expected * (1 - expected) / spans)
    assert stats.kstest(z, "norm").pvalue > 1e-3


def test_drift_over_nothing_is_a_plain_change() -> None:
    a = TaskStream(tiny(), 0, permute="inputs", schedule=Drift(20, 0))
    same(a.at(3, 17), stream("inputs", length=20).at(3, 17))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Every(0),
        lambda: Recurring(5, 0),
        lambda: Recurring(0, 5),
        lambda: Drift(5, 6),
        lambda: Drift(5, -1),
        lambda: TaskStream(tiny(), 0, permute="pixels"),  # type: ignore[arg-type]
        lambda: TaskStream(tiny(), 0, 5, schedule=Every(6)),
        lambda: stream().at(-1),
        lambda: stream().at(0, 0),
        lambda: ToyStream("sign", 0),  # type: ignore[arg-type]
    ],
)
def test_mistakes_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"must|leave it out|needs"):
        make()  # type: ignore[operator]


# ---- toys


def test_toy_targets_are_exact() -> None:
    inputs, sign = ToyStream("changing-inputs", 1), ToyStream("changing-sign", 1)
    for step in (0, 199, 200, 401, 1599, 1600, 1_000_000):
        task = step // 200
        left = 2 * task % 16
        x, y = inputs.at(step)
        assert y[0, 0] == (x[0, left] + x[0, left + 1]) / np.float32(2)
        x, y = sign.at(step)
        assert y[0, 0] == (-1) ** task * (x[0, 0] + x[0, 1]) / np.float32(2)
        assert inputs.task(step) == sign.task(step) == task
        assert y.shape == (1, 1)
        assert x.dtype == y.dtype == np.float32


def test_toy_inputs_are_independent_normals() -> None:
    x = ToyStream("changing-inputs", 0).at(0, 20_000).x
    assert stats.kstest(x.ravel(), "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(x.T) - np.eye(16)).max() < 5 / np.sqrt(20_000)


@settings(max_examples=30, deadline=None)
@given(step=st.integers(0, 10**9), batch=st.integers(1, 9))
def test_toy_batches_are_their_samples(step: int, batch: int) -> None:
    s = ToyStream("changing-sign", 2, task_length=3)
    singles = [s.at(k) for k in range(step * batch, (step + 1) * batch)]
    same(s.at(step, batch), Sample(*(np.concatenate(p) for p in zip(*singles, strict=True))))


# ---- iterables


class Squares:
    def __iter__(self) -> Iterator[tuple[list[float], int]]:
        return (([float(i), float(i * i)], i % 3) for i in range(20))


def test_iterables_go_forward_jump_and_start_anew() -> None:
    s = from_iterable(Squares(), shape=(2,), outputs=3)
    for step in (0, 1, 1, 7, 2, 19):
        x, y = s.at(step)
        assert_array_equal(x, [[step, step * step]])
        assert y.tolist() == [step % 3]
    assert_array_equal(s.at(2, 4).x[:, 0], [8, 9, 10, 11])
    with pytest.raises(StreamEndedError, match="iterable has 20"):
        s.at(20)


def test_a_generator_cannot_go_back() -> None:
    s = from_iterable(iter(Squares()), (2,), 3)
    s.at(5)
    same(s.at(5), s.at(5))
    with pytest.raises(ValueError, match="starts anew"):
        s.at(4)


def test_regression_from_an_iterable() -> None:
    s = from_iterable([([1, 2], 0.5), ([3, 4], [0.25])], (2,), 1, "squared_error")
    assert_array_equal(s.at(0, 2).y, np.array([[0.5], [0.25]], np.float32))


@pytest.mark.parametrize("pair", [([1.0], 0), ([1.0, 2.0], 3), ([1.0, 2.0], 0.5)])
def test_wrong_pairs_are_named(pair: tuple[list[float], float]) -> None:
    with pytest.raises(ValueError, match="sample 0 of the iterable"):
        from_iterable([pair], (2,), 3).at(0)


# ---- problems


@pytest.mark.parametrize("name", [n for n, p in PROBLEMS.items() if p.dataset in (None, "digits")])
def test_embedded_problems_fit_their_networks(name: str) -> None:
    problem = PROBLEMS[name]
    s = problem.make(seed=1)
    x, y = s.at(0, 3)
    assert x.shape == (3, problem.network[0])
    assert s.outputs == problem.network[-1]
    assert (s.loss, s.task_length) == (problem.loss, problem.task_length)
    assert y.shape == ((3,) if problem.loss == "cross_entropy" else (3, 1))
    if isinstance(s, TaskStream):
        assert np.abs(x).max() <= 1
        assert s.held_out(0, 250).x.shape == (250, 64)


def test_problems_know_each_other() -> None:
    assert all(name == problem.name for name, problem in PROBLEMS.items())
    for problem in PROBLEMS.values():
        assert problem.task_length is None or problem.window % problem.task_length == 0


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("mnist", "input-permuted-mnist"), ("label-permuted-emnst", "label-permuted-emnist")],
)
def test_a_wrong_name_is_answered_with_a_near_one(wrong: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"unknown problem '{wrong}'; did you mean '{meant}'"):
        get(wrong)


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_the_beginning_of_a_permutation_is_the_permutations(n: int, first: int, seed: int) -> None:
    whole = keyed.permutation(n, seed, keyed.Purpose.ORDER, 3)
    part = keyed.permutation(n, seed, keyed.Purpose.ORDER, 3, first=first)
    assert part.tolist() == whole[:first].tolist()
