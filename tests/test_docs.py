"""Documentation that can be checked is checked."""

from __future__ import annotations

import ast
import hashlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from upgd.curvature import RULES
from upgd.monitor.alarms import RULES as RULES_OF_WARNINGS
from upgd.monitor.page import MEASURES
from upgd.optim.memory import memory_table
from upgd.optim.registry import table
from upgd.rules.vocabulary import HYPERPARAMETERS

ROOT = Path(__file__).parents[1]
FIRST = [ROOT / "README.md", ROOT / "docs" / "optimizers.md", ROOT / "docs" / "curvature.md"]
PAGES = FIRST + [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if "```python\n" in page.read_text("utf-8")
    and page not in FIRST
    and page.name not in ("frameworks.md", "notes.md")
]
"""Pages whose examples are run; docs/frameworks.md is run section by section."""

FRAMEWORKS = ROOT / "docs" / "frameworks.md"


def test_the_table_of_methods_is_the_registry() -> None:
    assert table() in PAGES[1].read_text()
    assert memory_table() in PAGES[1].read_text()


def test_the_vocabulary_is_documented() -> None:
    text = PAGES[1].read_text()
    assert all(f"`{name}`" in text for name in HYPERPARAMETERS)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # examples save files
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert blocks
    known = dict(RULES)
    try:
        for block in blocks:
            exec(compile(block, str(page), "exec"), {})
    finally:  # a page may register rules of its own
        RULES.clear()
        RULES.update(known)


def recipes() -> Iterator[Any]:
    """The examples of docs/frameworks.md, by their section."""
    sections = re.split(r"^## ", FRAMEWORKS.read_text(), flags=re.M)[1:]
    for section in sections:
        for block in re.findall(r"```python\n(.*?)```", section, re.S):
            yield pytest.param(block, id=section.splitlines()[0])


@pytest.mark.parametrize("block", list(recipes()))
@pytest.mark.filterwarnings("ignore")  # the frameworks' own
def test_recipes_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where their libraries are; process groups have one process."""
    names = [each for node in ast.walk(ast.parse(block)) for each in imported(node)]
    for name in names:
        pytest.importorskip(name, reason=f"needs {name}", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")  # any that is free
    with torch.random.fork_rng():
        try:
            exec(compile(block, str(FRAMEWORKS), "exec"), {"__name__": "__main__"})
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def imported(node: ast.AST) -> list[str]:
    """The libraries that an import statement names."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and node.module:
        names.append(node.module)
    return [top for top in (name.split(".")[0] for name in names) if top not in ("torch", "upgd")]


def test_every_framework_of_the_table_has_its_test_and_version() -> None:
    """Versions are those of constraints.txt, where it has the library."""
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.M))
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| (.+) \|$", FRAMEWORKS.read_text(), re.M
    )
    distributions = {"Ignite": "pytorch-ignite"}
    checked = 0
    for name, version, tried, test in rows[1:]:
        if tried == "every change" and "PyTorch" not in name:
            assert pins[distributions.get(name, name.lower())] == version, name
            checked += 1
        if test.startswith("`"):
            assert (ROOT / test.strip("`")).exists(), test
    assert checked == 7


@pytest.mark.parametrize(
    "page", [*PAGES, FRAMEWORKS, ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_speed_is_what_was_measured() -> None:
    """The numbers in the guide come from the committed benchmark pages."""
    table = PAGES[1].read_text().split("<!-- speed", 1)[1].split("<!-- /speed", 1)[0]
    lines = re.findall(r"^\| (.+?) \| ([\d.]+) \| ([\d.]+) \|$", table, re.M)
    assert len(lines) >= 4
    assert sum("fused" in label for label, _, _ in lines) >= 2
    for label, paper, stack in lines:
        device, name = label.split(", ", 1)
        kind = f"fused_{device.lower()}" if "fused" in name else device.lower()
        page = (ROOT / f"docs/benchmarks/optimizer_step_{kind}.md").read_text()
        rows = re.findall(rf"^\| {re.escape(name.strip('`'))} \| \d+ \| ([\d.]+) \|", page, re.M)
        assert rows == [paper, stack], label


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_prose_was_written_for_these_benchmarks(page: Path) -> None:
    """Whoever measures anew reads again what a page says about the numbers."""
    text = page.read_text()
    for name in set(re.findall(r"\]\((benchmarks/\w+\.md)", text)):
        digest = hashlib.sha256((page.parent / name).read_bytes()).hexdigest()[:12]
        mark = f"<!-- written for {name} {digest} -->"
        assert mark in text, f"{page}: compare its numbers with {name}, then say {mark}"
    for name, digest in re.findall(r"<!-- written for (\S+/\S+) (\w{12}) -->", text):
        now = hashlib.sha256((page.parent / name).read_bytes()).hexdigest()[:12]
        assert now == digest, f"{page}: compare its numbers with {name}, then mark it with {now}"


def test_the_monitors_rules_and_numbers_are_documented() -> None:
    text = (ROOT / "docs" / "monitor.md").read_text()
    assert all(f"| {rule.when} |" in text for rule in RULES_OF_WARNINGS)
    assert all(f"`{name}" in text for name in MEASURES)


def test_every_promise_has_its_test() -> None:
    text = (ROOT / "docs" / "promises.md").read_text()
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", text)
    assert len(named) > 40
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"
    promises = [row for row in text.splitlines() if row.startswith("| ") and "shown by" not in row]
    assert all("::test_" in row for row in promises)


def test_the_list_of_rules_is_the_registry() -> None:
    names = textwrap.fill(", ".join(sorted(RULES)), 98)
    assert f"```text\n{names}\n```" in (ROOT / "docs" / "curvature.md").read_text()


def test_the_first_run_is_what_was_measured() -> None:
    """The laboratory's accuracies come from the page that it links to."""
    text = (ROOT / "docs" / "laboratory.md").read_text()
    told = text.split("With everybody's defaults", 1)[1].split("\n\n", 1)[0]
    page = (ROOT / "docs/benchmarks/first_run.md").read_text()
    numbers = re.findall(r"\b0\.\d{3}\b", told)
    assert len(numbers) == 3
    assert all(f"{number} ±" in page for number in numbers)
