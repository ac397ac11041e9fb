"""Every command and example on the site is run, or says why not; all commands exist as written."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("typer")
import typer
from typer.testing import CliRunner

from tests.test_docs import FRAMEWORKS, PAGES
from upgd.cli import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = [p for p in sorted(DOCS.rglob("*.md")) if p.name != "notes.md"] + [ROOT / "CONTRIBUTING.md"]
MEASURED = ("benchmarks", "results")
"""Folders whose commands are those with which the page's numbers were measured."""

BLOCK = re.compile(
    r"^( *)(?:<!-- not run: (?P<why>[^\n]+?) -->\n *)?```(?P<language>\w*)\n(?P<text>.*?)^\1```",
    re.M | re.S,
)
PRINTS = re.compile(r"upgd (list|(arena|data|reproduce|search) list|rl --list)$")
"""Commands that only print; they are run wherever they stand."""


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    why: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(pages: list[Path]) -> Iterator[Block]:
    for page in pages:
        text = page.read_text("utf-8")
        for m in BLOCK.finditer(text):
            line = text[: m.start()].count("\n") + 1
            yield Block(page, line, m["language"], m["why"] or "", m["text"])


def commands(block: Block) -> Iterator[str]:
    """The commands of a block: one line each, without comments, pipes and redirections."""
    for line in block.text.replace("\\\n", " ").splitlines():
        line = re.sub(r"\s+#.*|^\s*#.*", "", line)
        line = re.sub(r"\[(--?[^\]]+|-o [^\]]+)\]", r"\1", line)  # [--option] in a form
        for part in re.split(r"[|;]|&&", line):
            part = re.sub(r"[<>] *\S+", "", part).strip()
            if part:
                yield part


SHELL = [b for b in blocks([*SITE, ROOT / "README.md"]) if b.language in ("", "bash", "sh")]
UPGD = sorted({c for b in SHELL for c in commands(b) if c.startswith("upgd ")})


def test_every_example_is_run_or_says_why_not() -> None:
    run = {*PAGES, FRAMEWORKS}
    silent = [
        str(b)
        for b in blocks(SITE)
        if not b.why
        and (b.language in ("", "bash", "sh") or (b.language == "python" and b.page not in run))
        and not set(b.page.relative_to(ROOT).parts) & set(MEASURED)
        and not all(PRINTS.match(c) for c in commands(b))
    ]
    assert not silent, f"say <!-- not run: reason --> above these, or have them run: {silent}"


def test_reasons_name_tests_that_exist() -> None:
    reasons = [b.why for b in blocks(SITE) if b.why]
    assert len(reasons) > 20
    for name in re.findall(r"\btest_\w+\.py", " ".join(reasons)):
        assert (ROOT / "tests" / name).exists(), name


@cache
def program() -> Any:
    return typer.main.get_command(app)


def parse(command: str) -> None:
    """Follow a command down its groups, and read its options as the program would."""
    words = [w for w in shlex.split(command)[1:] if w != "..."]
    here = program()
    context = here.make_context("upgd", [], resilient_parsing=True)
    while hasattr(here, "commands"):
        if words and words[0].startswith("-"):
            break
        name = words.pop(0) if words else ""
        assert name in here.commands, f"no command {name!r} in {command!r}"
        here = here.commands[name]
        context = here.make_context(here.name, [], parent=context, resilient_parsing=True)
    context.resilient_parsing = False  # now mistakes are errors
    here.make_parser(context).parse_args(words)


def test_commands_exist_as_written() -> None:
    assert len(UPGD) > 50
    for command in UPGD:
        parse(command)


@pytest.mark.parametrize("wrong", ["upgd runn x", "upgd run x --sedes 3", "upgd data fetsch"])
def test_commands_that_do_not_exist_are_noticed(wrong: str) -> None:
    with pytest.raises(Exception, match=r"runn|sedes|fetsch"):
        parse(wrong)


@pytest.mark.parametrize("command", [c for c in UPGD if PRINTS.match(c)])
def test_commands_that_print_run(command: str) -> None:
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert result.output.strip()


def test_other_commands_name_what_exists() -> None:
    """Files of ``python``, targets of ``make``, extras of ``pip install`` in a clone."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    extras = set(re.findall(r"^([a-z]+) = \[", project.split("optional-dependencies]")[1], re.M))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    seen = set()
    for block in SHELL:
        for command in commands(block):
            words = shlex.split(command)
            seen.add(words[0])
            if words[0] == "python":
                assert words[1] == "-m" or (ROOT / words[1]).exists(), f"{block}: {command}"
            elif words[0] == "make":
                assert words[1] in targets, f"{block}: {command}"
            elif words[:2] == ["pip", "install"]:
                what = re.fullmatch(r"\.(?:\[([\w,]+)\])?", words[2])
                assert what, f"{block}: {command} works from a clone only if it installs '.'"
                assert set((what[1] or "lab").split(",")) <= extras, f"{block}: {command}"
    assert {"python", "make", "pip"} <= seen
