"""Help pages: quick, complete, one line per command, with examples that can be called."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("typer")
from typer.main import get_command
from typer.testing import CliRunner

import upgd.cli
from tests.waiting import PATIENCE
from upgd.arena.protocol import SCALES
from upgd.cli import app
from upgd.cli.app import _TYPERS, OnDemand
from upgd.cli.commands import COMMANDS, SECTIONS
from upgd.lab import demo, sweeping

HEAVY = ("torch", "numpy", "matplotlib")


def shown(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def python(code: str, **variables: str) -> str:
    command, environment = [sys.executable, "-c", code], {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def commands() -> Iterator[tuple[str, Any]]:
    """Every command, also those of groups, by the words that call it."""
    for name, one in OnDemand().items():
        inner = getattr(one, "commands", {})
        yield from ((f"{name} {sub}", command) for sub, command in inner.items())
        if not inner:
            yield name, one


# -------------------------------------------------------------------------------- quick
def test_no_help_page_imports_torch() -> None:
    pages = ["--version", "--help", *(f"{name} --help" for name, _ in commands()), "data --help"]
    code = f"""
import sys
from upgd.cli import app
for page in {pages!r}:
    try:
        app(page.split())
    except SystemExit as ended:
        assert not ended.code, page
    found = [name for name in {HEAVY!r} if name in sys.modules]
    assert not found, (page, found)
"""
    assert python(code).count("Usage: ") == len(pages) - 1


def processor_seconds(code: str) -> float:
    """Of a process; the time that it waits for a processor does not count."""
    before = os.times()
    python(code)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])  # user and system time of children


def test_help_takes_a_fraction_of_what_torch_takes() -> None:
    code = "import sys; sys.argv[1:] = ['--help']; import upgd.cli.__main__"
    helped = min(processor_seconds(code) for _ in range(3))
    assert helped < processor_seconds("import torch") / 3


# ----------------------------------------------------------------------------- complete
def test_the_table_has_every_command_with_its_summary() -> None:
    for module in pkgutil.iter_modules(upgd.cli.__path__):
        if module.name != "__main__":
            importlib.import_module(f"upgd.cli.{module.name}")
    assert sorted(COMMANDS) == sorted(_TYPERS)
    for name, command in OnDemand().items():
        assert command.name == name
        assert command.help.splitlines()[0] == COMMANDS[name][1]


def test_every_command_has_one_line_under_its_section() -> None:
    lines = shown("--help").splitlines()
    assert max(map(len, lines)) <= 80
    for section, rows in SECTIONS.items():
        start = lines.index(f"{section}:") + 1
        found = [line.split(maxsplit=1) for line in lines[start : start + len(rows)]]
        assert found == [[name, text.rstrip(".")] for name, (_, text) in rows.items()]
    for line in shown("data", "--help").partition("Commands:")[2].splitlines():
        assert not line or re.match(r"  \w", line), line


def test_an_unknown_command_and_its_neighbour() -> None:
    result = CliRunner().invoke(app, ["swep"])
    assert result.exit_code == 2
    assert result.stderr.startswith("upgd: No such command 'swep'. Did you mean 'sweep'?")


def test_completion() -> None:
    code = "from upgd.cli import main; main()"
    asked = {"_UPGD_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    assert python(code, COMP_WORDS="upgd re", **asked).split() == [
        *("resume", "report", "reproduce", "results")
    ]
    asked["COMP_CWORD"] = "2"
    assert "--checkpoint-seconds" in python(code, COMP_WORDS="upgd run --ch", **asked)


# ----------------------------------------------------------------------------- examples
@pytest.mark.parametrize("name", [name for name, _ in commands()])
def test_examples_can_be_called(name: str) -> None:
    command = dict(commands())[name]
    page = shown(*name.split(), "--help")
    examples = page.partition("\nExamples:\n")[2].splitlines()
    assert examples
    assert max(map(len, page.splitlines())) <= 80
    for example in examples:
        words = shlex.split(example, comments=True)
        called = ["upgd", *name.split()]
        assert words[: len(called)] == called
        with command.make_context(name, words[len(called) :]) as context:
            assert context.params


def test_options_are_in_sections() -> None:
    page = shown("run", "--help")
    titles = re.findall(r"^(\w[\w ]*):$", page, re.M)
    assert titles == [
        *("Arguments", "Options", "Stream and network", "Execution", "Output", "Examples")
    ]
    execution = page.partition("\nExecution:\n")[2].partition("\nOutput:\n")[0]
    command = get_command(app).commands["run"]  # type: ignore[attr-defined]
    expected = {p.opts[0] for p in command.params if p.rich_help_panel == "Execution"}
    assert {"--device", "--workers"} <= expected
    assert set(re.findall(r"^  (--[\w-]+)", execution, re.M)) == expected


def test_numbers_in_help_texts_are_those_of_the_code() -> None:
    *some, last = SCALES
    assert f"{', '.join(some)} or {last}." in shown("arena", "--help")
    assert demo.STEPS == 12 * demo.TASK_LENGTH
    assert "default twelve tasks" in shown("demo", "--help")
    page = " ".join(shown("sweep", "--help").split())
    assert f"more runs; default {sweeping.MOST_RUNS:_}".replace("_", " ") in page
