"""``upgd list``: problems and methods on one screen, details on request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from tests.waiting import PATIENCE
from upgd.cli import app
from upgd.optim.registry import METHODS, get
from upgd.streams import PROBLEMS
from upgd.streams.problems import families


def call(*arguments: str) -> Any:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["list", *arguments])
    assert result.exit_code == 0, result.output
    return result


def test_all_fits_a_screen() -> None:
    lines = call().output.splitlines()
    assert 24 <= len(lines) <= 40
    assert max(map(len, lines)) <= 80
    text = " ".join(lines)
    first = {row.optimizer.__module__: row.name for row in reversed(METHODS.values())}
    for name in (*first.values(), "sgd", "adam", "upgd-w", "s&p", "input-permuted-mnist"):
        assert f" {name}, " in text or f" {name} " in text


def test_families_are_all_problems() -> None:
    found = families()
    data = found.pop("DATA")
    names = [name for some in found.values() for name in some]
    assert {n.replace("DATA", d) for n in names for d in data} == set(PROBLEMS)


def test_details_have_every_name_and_value() -> None:
    problems, methods = call("problems").output, call("methods").output
    assert max(map(len, problems.splitlines())) <= 80
    for name, problem in PROBLEMS.items():
        [line] = [line for line in problems.splitlines() if line.split()[0] == name]
        assert f"{problem.steps} steps" in line
        assert str(problem.task_length or "") in line
    words = {line.split()[0] for line in methods.splitlines()}
    assert {n for row in METHODS.values() for n in (row.name, *row.aliases)} <= words
    assert "head.protecting=0" in methods


def test_one_of_them() -> None:
    shown = call("UPGD-W").output
    assert "weight_decay=0.001" in shown
    assert "utility-based perturbed gradient descent" in shown
    facts = json.loads(call("adam", "--json").output)
    assert facts["hyper"] == json.loads(json.dumps(get("adam")[1]))
    facts = json.loads(call("stationary-mnist", "--json").output)
    assert facts["problem"] == "stationary-mnist"
    assert facts["task"] is None
    assert "784-300-150-10" in call("stationary-mnist").output


def test_a_neighbour_of_what_is_unknown() -> None:
    result = CliRunner().invoke(app, ["list", "updg"])
    assert result.exit_code == 2
    assert "did you mean 'upgd'?" in result.stderr


def test_your_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from upgd import lab\n"
        "import numpy as np\n"
        "def plain(w, g, lr):\n    return w - lr * g\n"
        "lab.method('plain', plain, lr=0.5)\n"
        "lab.problem('spinning', (np.eye(9, dtype='f4'), np.arange(9)))\n"
    )
    shown = call("--use", str(file)).output
    assert shown.count("your own") == 2
    assert "plain" in shown
    assert "spinning" in shown
    assert "lr=0.5" in call("methods", "--use", str(file)).output
    assert "lr=0.5" in call("plain", "--use", str(file)).output


CALLS = """
import sys
from typer.testing import CliRunner
from upgd.cli import app
for words in (["list"], ["list", "methods"], ["list", "adam"], ["list", "--json"]):
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, words)
    assert result.exit_code == 0, result.output
    print(result.output)
print("torch" in sys.modules, file=sys.stderr)
"""


def test_the_second_time_needs_no_torch_and_shows_the_same(tmp_path: Path) -> None:
    command, variables = [sys.executable, "-c", CALLS], {**os.environ, "UPGD_CACHE": str(tmp_path)}
    made = [
        subprocess.run(command, env=variables, capture_output=True, text=True, timeout=PATIENCE)
        for _ in range(2)
    ]
    assert [one.stderr.strip() for one in made] == ["True", "False"]
    assert made[0].stdout == made[1].stdout
    assert "betas=(0.9, 0.999)" in made[1].stdout
