"""What pytest must know before it collects."""

import functools
import gc
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch

# Triton has no wheel everywhere, and the command line is an extra; both have tests of their own.
collect_ignore_glob = []
if not importlib.util.find_spec("triton"):
    collect_ignore_glob += [
        *("upgd/kernels/triton_*.py", "upgd/engine/*_cuda.py", "upgd/optim/fused_cuda.py"),
        "tests/compile_*.py",
    ]
elif not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported
    if os.environ["TRITON_INTERPRET"] == "1":
        from tests.interpreting import make_faster

        make_faster()
if not importlib.util.find_spec("numba"):
    compiled = ("cpu_*", "vectors", "subnormals")
    collect_ignore_glob += [f"upgd/kernels/{name}.py" for name in compiled]
if importlib.util.find_spec("typer"):
    import typer.testing

    # Building the command line anew takes longer than most of what tests call.
    typer.testing._get_command = functools.cache(typer.main.get_command)
else:
    collect_ignore_glob.append("upgd/cli/*.py")
for framework in ("avalanche", "lightning", "river", "stable_baselines3", "transformers"):
    if not importlib.util.find_spec(framework):
        collect_ignore_glob.append(f"upgd/integrations/{framework}.py")
if not importlib.util.find_spec("sklearn"):
    collect_ignore_glob += ["upgd/stream/*.py", "upgd/integrations/river.py"]
if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # On a busy machine any case may take long, and so may drawing it.
    slow = [HealthCheck.too_slow]
    settings.register_profile("any-machine", deadline=None, suppress_health_check=slow)
    settings.load_profile("any-machine")
for logger in logging.root.manager.loggerDict.values():
    # pytest attaches itself to each logger that does not propagate, three times a test; torch has
    # dozens, which took some 4 ms of every test.
    if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
        logger.propagate = True
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As for a script's background jobs; what tests start would ignore it, too, and they interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def definitions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Methods, problems, networks and grids that a test registers are gone afterwards."""
    from upgd.arena.grids import GRIDS
    from upgd.study import extensions

    monkeypatch.setattr(extensions, "_LOADED", {})
    registries = [*extensions._REGISTRIES.values(), GRIDS]
    before, path = [dict(each) for each in registries], list(sys.path)
    yield
    sys.path[:] = path
    for registry, content in zip(registries, before, strict=True):
        registry.clear()
        registry.update(content)


@pytest.fixture(autouse=True)
def examples_write_elsewhere(request: pytest.FixtureRequest) -> None:
    """What an example in a docstring writes does not land in the repository."""
    if isinstance(request.node, pytest.DoctestItem):
        folder = request.getfixturevalue("tmp_path")
        request.getfixturevalue("monkeypatch").chdir(folder)


@pytest.fixture(scope="module", autouse=True)
def garbage_collections_are_short() -> None:
    """What imports and earlier files left is not scanned again at every collection."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Else modules that count their objects at the end of the process report leaks."""
    gc.unfreeze()
