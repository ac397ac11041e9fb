"""Caches of compiled code: no folder, a damaged file or a stranger's folder stops nobody."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("numba")
pytest.importorskip("typer")

from upgd.caches import cache_folder, use_cache
from upgd.kernels import cpu_rows
from upgd.kernels.rules import load_module
from upgd.optim.registry import get

posix = pytest.mark.skipif(os.name == "nt", reason="owners and permissions of POSIX")
VARIABLES = ("UPGD_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "NUMBA_CACHE_DIR", "MPLCONFIGDIR")
FUSED = """
import torch
from upgd import UPGD
w = torch.nn.Parameter(torch.ones(9))
w.grad = torch.ones(9)
UPGD([w], lr=0.1, fused=True).step()
print("moved" if (w != 1).all() else "stuck")
"""


def environment(**variables: Path | str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return kept | {name: str(value) for name, value in variables.items()}


def python(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    """A folder that nobody can make, not even root."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "below"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nowhere: Path) -> Path:
    """An empty folder for temporary files, and no other place for caches."""
    folder = tmp_path / "temporary"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(nowhere))
    return folder


# ------------------------------------------------------------------------- no folder
@pytest.mark.parametrize("at_all", [True, False])
def test_kernels_without_a_cache(
    at_all: bool, temporary: Path, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither home nor caches can be written; then not even temporary files."""
    monkeypatch.setenv("HOME", str(nowhere))
    monkeypatch.setattr(cpu_rows, "load_module", load_module.__wrapped__)
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(nowhere))
    if not at_all:
        temporary.rmdir()
    assert all(cpu_rows.row_functions(get("sgd")[0], "float64"))
    assert bool([*temporary.rglob("*.nbc")]) == at_all


@pytest.mark.slow
@pytest.mark.parametrize("at_all", [True, False])
def test_commands_without_a_cache(at_all: bool, tmp_path: Path, nowhere: Path) -> None:
    places = {"HOME": nowhere, "XDG_CACHE_HOME": nowhere, "NUMBA_CACHE_DIR": nowhere}
    env = environment(**places)
    code = "" if at_all else "import upgd.caches; upgd.caches._bases = lambda: iter(())\n"
    done = python("-c", code + FUSED, env=env)
    assert (done.stdout, done.stderr) == ("moved\n", "")
    run = f"{code}import sys; from upgd.cli import main; main()"
    study = str(tmp_path / "study")
    for command in (
        f"run toy-changing-inputs sgd --seeds 1 --steps 20 --window 10 --quiet --study {study}",
        f"plot {study}",
        f"demo --steps 500 --seeds 1 --study {tmp_path}/demo --quiet",
    ):
        done = python("-c", run, *command.split(), env=env)
        assert done.returncode == 0, done.stderr
        assert not at_all or not done.stderr  # matplotlib warns where there is no place at all


# --------------------------------------------------------------------- damaged files
SMALL = """
from upgd.kernels.compiling import cfunc, njit

@njit(nogil=True)
def twice(x):
    return 2 * x

@cfunc("float64(float64)")
def thrice(x):
    return 3 * x
"""


def hits() -> int:
    """Load a module as a new process would; how much of it came from the cache."""
    module = load_module.__wrapped__(SMALL, "small")
    assert (module.twice(4), module.thrice.ctypes(5.0)) == (8, 15.0)
    return sum(module.twice.stats.cache_hits.values()) + module.thrice.cache_hits


def damaged(content: bytes, kind: str) -> bytes:
    if kind == "empty":
        return b""
    if kind == "cut":
        return content[: len(content) // 2]
    if kind == "random":
        return bytes((7 * k * k + 13) % 251 for k in range(len(content)))
    middle = len(content) // 2
    return content[:middle] + bytes(b ^ 255 for b in content[middle : middle + 64]) + (
        content[middle + 64 :]
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["empty", "cut", "random", "changed"])
@pytest.mark.parametrize("suffix", [".nbi", ".nbc", ".py"])
def test_damaged_files_are_made_again(
    suffix: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPGD_CACHE", str(tmp_path))
    assert [hits(), hits()] == [0, 2]
    files = list(tmp_path.rglob(f"*{suffix}"))
    assert files
    for file in files:
        file.write_bytes(damaged(file.read_bytes(), kind))
    assert [hits(), hits()][1] == 2


# ----------------------------------------------------------------------- private folders
@posix
def test_a_temporary_cache_is_private(temporary: Path) -> None:
    folder = cache_folder("kernels")
    assert folder == temporary / f"upgd-{os.geteuid()}" / "kernels"
    for each in (folder, folder.parent):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
        assert each.stat().st_uid == os.geteuid()
    assert cache_folder("kernels") == folder


@posix
@pytest.mark.parametrize("harm", ["open", "link", "file", "stranger", "around"])
def test_a_folder_of_strangers_is_not_used(harm: str, temporary: Path, tmp_path: Path) -> None:
    mine = temporary / f"upgd-{os.geteuid()}"
    if harm == "open":
        mine.mkdir()
        mine.chmod(0o777)
    elif harm == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        mine.symlink_to(tmp_path / "theirs")
    elif harm == "file":
        mine.write_text("")
    elif harm == "stranger":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        mine.mkdir(mode=0o700)
        os.chown(mine, 1234, 1234)
    else:  # anybody can rename what lies there
        temporary.chmod(0o777)
    assert cache_folder("kernels") is None


@posix
def test_a_cache_that_strangers_can_write_is_passed_over(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "cache" / "upgd" / "kernels"
    theirs.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder("kernels") == theirs
    theirs.chmod(0o777)
    assert cache_folder("kernels") == temporary / f"upgd-{os.geteuid()}" / "kernels"


def test_other_libraries_are_told_only_where_their_own_fails(
    temporary: Path, tmp_path: Path, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("THEIR_CACHE", raising=False)
    use_cache("THEIR_CACHE", "theirs", tmp_path / "usual")
    assert "THEIR_CACHE" not in os.environ
    use_cache("THEIR_CACHE", "theirs", tmp_path / "usual", nowhere)
    assert Path(os.environ["THEIR_CACHE"]).parent.parent == temporary
    monkeypatch.setenv("THEIR_CACHE", "chosen")
    use_cache("THEIR_CACHE", "theirs", nowhere)
    assert os.environ["THEIR_CACHE"] == "chosen"
