"""CONTRIBUTING's example of a new method touches two files, and nothing more is needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[1]
PROGRAM = """
import json, sys
from pathlib import Path
import upgd
from upgd import lab
from upgd.optim.registry import METHODS

found = {"package": str(Path(upgd.__file__).parent), "accuracy": {}, "engines": {}}
small = dict(seeds=2, steps=300, window=100, hidden="8")
for engine in ("eager", "batched"):
    study = lab.Study(engine, quiet=True, engine=engine, workers=1)
    study.run("label-permuted-digits", "anchored", **small)
    found["accuracy"][engine] = list(study.frame("accuracy")["accuracy"])
    found["engines"][engine] = [run.result.engine.partition("-")[0] for run in study.runs()]
checks = lab.check("anchored")
found["checks"] = {each.check: each.verdict for each in checks}
found["table"] = str(checks)
print(json.dumps(found, default=float))
"""


def blocks() -> list[str]:
    """The Python code of CONTRIBUTING's section on methods."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = text.partition("## Add a method in two places")[2].partition("\n## ")[0]
    found = re.findall(r"^ *```python\n(.*?)^ *```", section, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(each) for each in found]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the example's method in it."""
    folder = tmp_path_factory.mktemp("copy")
    package = folder / "upgd"
    shutil.copytree(ROOT / "upgd", package, ignore=shutil.ignore_patterns("__pycache__"))
    file, row = blocks()
    name = re.match(r"# upgd/(\S+)\n", file)
    assert name is not None
    (package / name[1]).write_text(file)
    imported, added = (line for line in row.splitlines() if line)
    registry = package / "optim" / "registry.py"
    text = registry.read_text("utf-8")
    first = "from upgd.optim.base import"
    text = text.replace(first, f"{imported}\n{first}", 1)
    place = '    yield Row("pgd", '
    registry.write_text(text.replace(place, f"    {added}\n{place}", 1), "utf-8")
    return folder


def python(copy: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_files_change(copy: Path) -> None:
    before, after = contents(ROOT / "upgd"), contents(copy / "upgd")
    differ = [name for name in after if after[name] != before.get(name)]
    assert sorted(differ) == ["optim/anchored.py", "optim/registry.py"]
    assert before.keys() <= after.keys()
    old, new = (each["optim/registry.py"].splitlines() for each in (before, after))
    assert len(new) == len(old) + 2  # the import and the row


def test_the_command_line_lists_it(copy: Path) -> None:
    listed = json.loads(python(copy, "-m", "upgd.cli", "list", "methods", "--json"))
    assert listed["anchored"]["title"] == "Anchored"
    assert listed["anchored"]["hyper"] == {"lr": 0.01, "kappa": 0.1, "beta_weight": 0.999}


def test_every_engine_runs_it(copy: Path) -> None:
    found = json.loads(python(copy, "-c", PROGRAM))
    assert found["package"] == str(copy / "upgd")
    assert found["engines"] == {"eager": ["eager"] * 2, "batched": ["batched"] * 2}
    assert found["accuracy"]["eager"] == found["accuracy"]["batched"]
    assert len(found["accuracy"]["eager"]) == 6
    assert "FAILED" not in found["checks"].values(), found["table"]
    assert found["checks"]["general stack = eager"] == "ok"
