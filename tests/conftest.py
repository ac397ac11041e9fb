"""Fixtures of several test files."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from upgd.threads import one_thread

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The program of benchmarks/ that the test file names as SCRIPT."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    with one_thread():
        yield importlib.import_module(request.module.SCRIPT)


@pytest.fixture
def program(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Calls its main function with words of a command line."""

    def call(*words: object) -> None:
        monkeypatch.setattr("sys.argv", [f"{script.__name__}.py", *map(str, words)])
        script.main()

    return call
