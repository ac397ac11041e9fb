"""Engines compute in float32 proper, and leave a user's settings as they were."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.backends import cudnn

from tests.stacks import feed, small
from upgd.engine.batched import BatchedRun
from upgd.engine.dense import Learner
from upgd.engine.eager import EagerRun
from upgd.engine.general import GeneralStack
from upgd.engine.precision import full_float32
from upgd.ledger import RunSpec
from upgd.networks import build
from upgd.study.prepare import plan, prepare

NEWER = [
    place
    for backend in (torch.backends.cuda, cudnn, torch.backends.mkldnn)
    for name in ("matmul", "conv", "rnn")
    if hasattr(place := getattr(backend, name, None), "fp32_precision")
]
"""Settings that PyTorch has since 2.9."""


def settings() -> list[Any]:
    """All there are; one that cannot be read is None."""
    found: list[Any] = []
    for read in (torch.get_float32_matmul_precision, lambda: cudnn.allow_tf32):
        try:
            found.append(read())
        except RuntimeError:
            found.append(None)
    return [*found, *(place.fp32_precision for place in NEWER)]


def all_allowed() -> None:
    torch.set_float32_matmul_precision("medium")
    cudnn.allow_tf32 = True


def some_in_the_newer_way() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    cudnn.conv.fp32_precision = "ieee"
    torch.backends.mkldnn.conv.fp32_precision = "bf16"


def all_in_the_newer_way() -> None:
    torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]


WAYS: dict[str, Callable[[], None]] = {"default": lambda: None, "all": all_allowed}
if NEWER:
    WAYS |= {"some, newer": some_in_the_newer_way, "all, newer": all_in_the_newer_way}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What these tests set lasts no longer than they do."""
    before = settings()
    yield
    if hasattr(torch.backends, "fp32_precision"):
        torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision(before[0])
    cudnn.allow_tf32 = before[1]
    for place, value in zip(NEWER, before[2:], strict=True):
        place.fp32_precision = value
    assert settings() == before


@pytest.mark.parametrize("way", WAYS)
def test_what_was_allowed_comes_back(way: str) -> None:
    WAYS[way]()
    before = settings()
    with full_float32():
        within = settings()
    assert within == ["highest", False, *["ieee"] * len(NEWER)]
    assert settings() == before
    with pytest.raises(ZeroDivisionError), full_float32():
        raise ZeroDivisionError
    assert settings() == before


def test_threads_do_not_give_back_too_early() -> None:
    """The one that came first leaves first; the settings come back when the other one leaves."""
    all_allowed()
    before = settings()
    first, second = full_float32(), full_float32()
    with first:
        thread = threading.Thread(target=second.__enter__)
        thread.start()
        thread.join()
    assert settings()[:2] == ["highest", False]
    second.__exit__(None, None, None)
    assert settings() == before


def eager() -> None:
    prepare(RunSpec("toy-changing-sign", "sgdw", {"lr": 0.01}, 0, 3), None, "cpu").advance(3)


def general() -> None:
    learners = [Learner("sgdw", {}, 3)]
    stack = GeneralStack(
        lambda seed, task: build((16, 4, 10), seed, "relu", task),
        learners,
        loss="cross_entropy",
        steps=3,
        window=3,
        shape=(16,),
    )
    stack.advance(feed(learners, small).chunk(0, 3))


@pytest.mark.parametrize(("learn", "engine"), [(eager, EagerRun), (general, GeneralStack)])
def test_engines_learn_in_full_precision(
    learn: Callable[[], None], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, original = [], engine._learn

    def spy(self: Any, *given: Any, **named: Any) -> None:
        seen.append(settings()[:2])
        original(self, *given, **named)

    monkeypatch.setattr(engine, "_learn", spy)
    all_allowed()
    learn()
    assert seen == [["highest", False]] * 3
    assert settings()[:2] == ["medium", True]


def test_held_out_samples_are_judged_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, original = [], BatchedRun._hold_out

    def spy(self: BatchedRun, *given: Any) -> None:
        seen.append(settings()[:2])
        original(self, *given)

    monkeypatch.setattr(BatchedRun, "_hold_out", spy)
    all_allowed()
    options = {"window": 50, "hidden": "9-7", "task_length": 50, "held_out": 30}
    problem, setting = plan(RunSpec("label-permuted-digits", "upgd", {}, 0, 100, options))
    BatchedRun(problem, [setting], [problem.make(0)], 100).advance(100)
    assert seen == [["highest", False]] * 2
