"""Engines compute in float32 proper, and leave a user's settings as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.backends import cudnn

from tests.stacks import feed, small
from upgd.engine.dense import Learner
from upgd.engine.eager import EagerRun
from upgd.engine.general import GeneralStack
from upgd.engine.precision import full_float32
from upgd.networks import build
from upgd.study import RunSpec
from upgd.study.prepare import prepare


def settings() -> list[Any]:
    """All there are; one that cannot be read is None."""
    found: list[Any] = []
    for read in (torch.get_float32_matmul_precision, lambda: cudnn.allow_tf32):
        try:
            found.append(read())
        except RuntimeError:
            found.append(None)
    newer = (torch.backends.cuda.matmul, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None))
    return [*found, *(getattr(place, "fp32_precision", None) for place in newer)]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What these tests set lasts no longer than they do."""
    before = settings()
    yield
    torch.set_float32_matmul_precision(before[0])
    cudnn.allow_tf32 = before[1]
    for place, value in zip((torch.backends.cuda.matmul, "conv", "rnn"), before[2:], strict=True):
        if value is not None:
            (getattr(cudnn, place) if isinstance(place, str) else place).fp32_precision = value
    assert settings() == before


def all_allowed() -> None:
    torch.set_float32_matmul_precision("medium")
    cudnn.allow_tf32 = True


def in_the_newer_way() -> None:
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this PyTorch has one way")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    cudnn.conv.fp32_precision = "ieee"


@pytest.mark.parametrize(
    "allow", [lambda: None, all_allowed, in_the_newer_way], ids=["default", "all", "newer"]
)
def test_what_was_allowed_comes_back(allow: Callable[[], None]) -> None:
    allow()
    before = settings()
    with full_float32():
        first, second, *newer = settings()
    assert (first, second) == ("highest", False)
    assert "tf32" not in newer
    assert settings() == before
    with pytest.raises(ZeroDivisionError), full_float32():
        raise ZeroDivisionError
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
