"""The demo: its runs go through the ledger, and its page says what they show and no more."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("plotly")
from typer.testing import CliRunner

from tests.running import drive
from tests.waiting import PATIENCE, states, wait_for
from upgd.cli import app
from upgd.lab import demo as demo_module
from upgd.ledger import Ledger, Result, Series, StudyError
from upgd.study.pools import LocalPool

ROOT = Path(__file__).parents[1]


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def fabricate(study: Path, levels: dict[str, tuple[float, float]], seeds: int = 5) -> None:
    """A finished study of the demo whose curves go straight from one level to another."""
    noise = np.random.default_rng(0)
    with Ledger.open(study) as ledger:
        ledger.add(demo_module.specs(list(range(seeds)), demo_module.STEPS))
        for claim in ledger.claim("me", 60, limit=100):
            first, last = levels[claim.spec.name]
            tasks = claim.spec.steps // demo_module.TASK_LENGTH
            curve = np.linspace(first, last, tasks) + noise.normal(0, 0.002)
            series = {"accuracy": Series(curve, demo_module.TASK_LENGTH)}
            result = Result("eager", summary={"accuracy": float(curve.mean())}, series=series)
            if np.isnan(last):
                ledger.finish(claim, Result("eager", diverged_at=7))
            else:
                ledger.finish(claim, result)


def test_demo_runs_resumes_and_writes_a_page(tmp_path: Path) -> None:
    study = tmp_path / "a study & <more>"
    page = tmp_path / "pages" / "demo.html"
    arguments = ("demo", "--seeds", 1, "--steps", 500, "--workers", 1)
    arguments = (*arguments, "--study", study, "--output", page)
    done = call(*arguments, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert {row["method"] for row in told["results"]} == set(demo_module.SETTINGS)
    assert Path(told["page"]).read_text() == page.read_text()
    assert Path(told["figure"]).read_bytes()[:4] == b"\x89PNG"
    with Ledger.open(study, create=False, read_only=True) as ledger:
        runs = list(ledger.runs())
        assert [run.attempts for run in runs] == [1, 1, 1]
        assert all(run.spec.options == dict(demo_module.OPTIONS) for run in runs)
    again = call(*arguments)
    assert again.exit_code == 0
    assert told["summary"] in again.stdout
    assert str(page) in again.stdout
    with Ledger.open(study, create=False, read_only=True) as ledger:
        assert [run.attempts for run in ledger.runs()] == [1, 1, 1]  # nothing is run again
    text = page.read_text()
    assert f"<h1>{demo_module.TITLE}</h1>" in text
    for paragraph in (told["summary"], *demo_module.ABOUT):
        assert f"<p>{escape(paragraph)}</p>" in text
    assert "one seed is an example" in told["summary"]


@pytest.mark.parametrize(
    ("levels", "said", "never"),
    [
        (
            {"upgd-w": (0.5, 0.9), "adam": (0.7, 0.5), "sgd": (0.6, 0.6)},
            "UPGD-W ends ahead",
            "trail",
        ),
        (
            {"upgd-w": (0.5, 0.6), "adam": (0.5, 0.9), "sgd": (0.5, 0.8)},
            "UPGD-W ends behind",
            "leads",
        ),
        ({"upgd-w": (0.5, 0.8), "adam": (0.5, 0.8), "sgd": (0.5, 0.6)}, "No clear winner", "ahead"),
    ],
)
def test_the_sentence_is_the_datas(
    tmp_path: Path, levels: dict[str, tuple[float, float]], said: str, never: str
) -> None:
    fabricate(tmp_path, levels)
    output = " ".join(call("demo", "--study", tmp_path).stdout.split())
    page = (tmp_path / "demo.html").read_text()
    introduction = page.split("<main")[1].split("</p>")[0]
    for text in (output, introduction):
        assert said in text
        assert never not in text.split(said)[1].split("From tasks")[0]
    for method, (first, last) in levels.items():
        word = "improved" if last > first else "fell" if last < first else "held"
        assert f"{demo_module.TITLES[method]} {word}" in output


@pytest.mark.skipif(not shutil.which("chromium"), reason="no Chromium is installed")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """Without a complaint, in light and dark, on a desk and on a phone."""
    driver = pytest.importorskip("playwright.sync_api")
    fabricate(tmp_path, {"upgd-w": (0.5, 0.9), "adam": (0.7, 0.5), "sgd": (0.6, 0.6)})
    call("demo", "--study", tmp_path)
    address = (tmp_path / "demo.html").as_uri()
    complaints, colours = [], set()
    with driver.sync_playwright() as playwright:
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for scheme, width in (("light", 1280), ("dark", 375)):
            page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 700})
            page.on("console", lambda m: complaints.append(m.text))
            page.on("pageerror", lambda e: complaints.append(str(e)))
            page.goto(address)
            page.locator("svg.main-svg").first.wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") == width
            colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        browser.close()
    assert complaints == []
    assert len(colours) == 2


def test_a_method_that_diverged_is_told(tmp_path: Path) -> None:
    nothing = float("nan")
    fabricate(tmp_path / "a", {"upgd-w": (0.5, 0.9), "adam": (0.5, nothing), "sgd": (0.5, 0.6)})
    assert "SGD" in call("demo", "--study", tmp_path / "a").stdout
    page = (tmp_path / "a" / "demo.html").read_text()
    assert "0 done, 5 diverged" in page
    levels = {"upgd-w": (0.5, nothing), "adam": (0.5, 0.6), "sgd": (0.5, 0.6)}
    fabricate(tmp_path / "b", levels)
    assert "No run of UPGD-W finished" in call("demo", "--study", tmp_path / "b").stdout
    fabricate(tmp_path / "c", dict.fromkeys(levels, (0.5, nothing)))
    result = call("demo", "--study", tmp_path / "c")
    assert (result.exit_code, "every run of the demo diverged" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--seeds", "none"), "seeds are a number"),
        (("--steps", "many"), "whole number"),
        (("--steps", "10"), "at least one task"),
        (("--output", "demo.png"), "must end in .html"),
        (("--output", "folder.html"), "is a folder"),
        (("--workers", "-1"), "workers"),
        (("--study", "file"), "cannot use file"),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").touch()
    result = call("demo", *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert not (tmp_path / "studies").exists()


def test_plotly_is_asked_for_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    result = call("demo", "--study", tmp_path / "study")
    assert (result.exit_code, "pip install 'plotly>=" in result.output) == (2, True)
    assert not (tmp_path / "study").exists()


def test_the_settings_are_the_best_of_the_search() -> None:
    """The demo's settings are those that the committed search chose."""
    text = (ROOT / "docs" / "benchmarks" / "demo_search.md").read_text()
    sizes = set()
    for method, settings in demo_module.SETTINGS.items():
        table = text.split(f"## {method}\n")[1].split("##")[0]
        head, _, *rows = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in table.splitlines()
            if line.startswith("|")
        ]
        cells = [dict(zip(head, row, strict=True)) for row in rows]
        whole = [cell for cell in cells if cell["diverged"] == "0"]
        best = max(whole, key=lambda cell: float(cell["accuracy"]))
        assert {name: float(best[name]) for name in settings} == dict(settings)
        sizes.add(len(rows))
    assert sizes == {12}
    assert f"{demo_module.STEPS} steps" in text


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_an_interrupt_gives_every_run_back(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "upgd.cli", "demo", "--seeds", "2", "--steps", "1e6"]
    process = subprocess.Popen(
        [*command, "--workers", "2", "--study", tmp_path], stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: states(tmp_path).get("running"))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    with Ledger.open(tmp_path, create=False, read_only=True) as ledger:
        assert not ledger.leases()
        assert ledger.counts()["pending"] == 6


def test_a_worker_tells_what_is_wrong(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add(demo_module.specs([0], 500))
    (tmp_path / "checkpoints").touch()
    with (
        Ledger.open(tmp_path) as ledger,
        closing(LocalPool(1)) as pool,
        pytest.raises(StudyError, match="cannot keep checkpoints"),
    ):
        drive(ledger, pool)
