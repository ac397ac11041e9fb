"""The wheel: built, and imported where there is nothing but torch, numpy and what they need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[1]

pytest.importorskip("hatchling", reason="building the wheel needs hatchling (make test has it)")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE)
    return next(out.glob("*.whl"))


def closure(names: list[str]) -> set[str]:
    """These distributions and all that they require, without extras."""
    found: set[str] = set()
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in found:
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # for another platform
        found.add(name)
        names += [re.split(r"[\s;<>=!~(\[]", r)[0] for r in requires if "extra ==" not in r]
    return found


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel and the closure of torch and numpy, nothing else."""
    home = tmp_path_factory.mktemp("bare") / "env"
    venv.create(home, with_pip=False, symlinks=True)
    site = next(home.glob("lib*/python*/site-packages"), home / "Lib" / "site-packages")
    for name in closure(["torch", "numpy"]):
        for file in metadata.files(name) or []:
            top = file.parts[0]
            link = site / top
            if top not in ("..", ".", "__pycache__") and not link.exists():
                link.symlink_to(Path(str(metadata.distribution(name).locate_file(top))))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return next(p for p in (home / "bin" / "python", home / "Scripts" / "python.exe") if p.exists())


def run(python: Path, code: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    result = subprocess.run(
        [python, "-I", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_imports_and_learns_in_a_bare_environment(bare: Path) -> None:
    code = """
import importlib.util
for name in ("pytest", "hypothesis", "scipy", "sklearn", "matplotlib"):
    assert importlib.util.find_spec(name) is None, name
import torch, upgd, upgd.optim.registry
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
opt = upgd.UPGD(model.parameters())
model(torch.ones(1, 3)).sum().backward()
opt.step()
print(upgd.__version__, "site-packages" in upgd.__file__)
"""
    import upgd

    assert run(bare, code) == f"{upgd.__version__} True"


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {"upgd/py.typed", "upgd/pages/page.css", "upgd/report/assets/report.js"} <= {*names}
    assert all(name.startswith(("upgd/", "upgd-")) for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_hard_dependencies_are_two() -> None:
    requires = [r for r in metadata.requires("upgd") or [] if "extra ==" not in r]
    assert sorted(re.split(r"[<>=!~ ]", r)[0] for r in requires) == ["numpy", "torch"]


def test_importing_does_not_import_the_compiler() -> None:
    """Which takes as long as all of PyTorch; it is there once a step is done."""
    code = "import sys, upgd, upgd.cli; upgd.UPGD; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
