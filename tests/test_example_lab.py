"""The example of a laboratory of one's own: as a script, and from the command line."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

EXAMPLE = Path(__file__).parents[1] / "examples" / "my_lab.py"
METHODS = ("upgd-w", "sgd", "l2-start", "sign-sgd")


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(EXAMPLE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("example")


@pytest.fixture(scope="module")
def ran(folder: Path) -> subprocess.CompletedProcess[str]:
    return python(folder, str(EXAMPLE))


@pytest.mark.slow
def test_the_script_compares_all_in_one_study(
    ran: subprocess.CompletedProcess[str], folder: Path
) -> None:
    assert ran.returncode == 0, ran.stderr
    *lines, figure = ran.stdout.splitlines()
    assert lines[0].startswith("rotating, ")
    rows = [line.split() for line in lines[2:]]
    assert [tuple(row[:3]) for row in rows] == [(method, "3", "accuracy") for method in METHODS]
    assert all(0.5 < float(row[3]) <= 1 for row in rows)
    assert (folder / figure).read_bytes()[:4] == b"\x89PNG"
    assert "3 runs of sign-sgd one at a time, since sign-sgd is an optimizer" in ran.stderr


@pytest.mark.slow
def test_the_command_line_means_the_same_runs(
    ran: subprocess.CompletedProcess[str], folder: Path
) -> None:
    command = ["-m", "upgd.cli", "run", "rotating", *METHODS, "--use", str(EXAMPLE), "--seeds"]
    assert ran.returncode == 0, ran.stderr
    same = python(folder, *command, "3", "--dry-run")
    assert same.stdout.startswith("0 of 12 runs to do in studies/rotating"), same.stderr
    more = python(folder, *command, "4", "--dry-run")
    assert more.stdout.startswith("4 of 16 runs to do"), more.stderr
    short = python(folder, *command, "1", "--steps", "150", "--study", "short", "--json")
    assert short.returncode == 0, short.stderr
    assert short.stdout.count('"seeds": 1') == len(METHODS)


def test_it_is_short() -> None:
    """Thirty lines of code, apart from docstrings and blank lines."""
    text = EXAMPLE.read_text()
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.strip()}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    assert len(lines) <= 30
