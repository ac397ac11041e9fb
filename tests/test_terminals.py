"""Commands on terminals without Unicode, on narrow ones, and with names that are not UTF-8."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from tests.running import work
from tests.test_pages import RESULTS, made_up
from upgd.cli import app
from upgd.cli.commands import COMMANDS as COMMAND_TABLE
from upgd.ledger import Ledger, RunSpec
from upgd.paper.results import TABLE, write

TOY = "toy-changing-inputs"
ODD = os.fsdecode(b"st\xffudy \xe9") if os.name != "nt" else "study \u2113"
SHORT = ("--seeds=2", "--steps=4", "--window=2", "--hidden=4", "--engine=eager")
COMPARE = ("compare", "{samples}", "--hidden=none", "--steps=2", "--seeds=2", "--factors=1")
LEARN = ("learn", "{study}.tsv", "--target=\u00b1", "--network=4")
COMMANDS: dict[str, tuple[str, ...]] = {
    "help": ("--help",),
    "version": ("--version",),
    "list": ("list",),
    "list --json": ("list", "--json"),
    "run": ("run", TOY, "pgd", *SHORT, "--study={study}"),
    "run --dry-run": ("run", TOY, "adam", *SHORT, "--study={study}", "--dry-run"),
    "resume": ("resume", "{study}", "--engine=eager"),
    "show": ("show", "{study}"),
    "show --json": ("show", "{study}", "--json"),
    "plot": ("plot", "{study}"),
    "plot --output": ("plot", "{study}", "--output={study}.svg"),
    "export": ("export", "{study}"),
    "export --output": ("export", "{study}", "--metric=loss", "--output={study}.csv"),
    "check": ("check", "{study}"),
    "best": ("best", "{study}"),
    "best --json": ("best", "{study}", "--json"),
    "best --plot": ("best", "{study}", "--plot={study}.png"),
    "report": ("report", "{study}"),
    "report --output": ("report", "{study}", "--output={study}.html"),
    "watch": ("watch", "{study}", "--once"),
    "watch --json": ("watch", "{study}", "--json"),
    "sweep": ("sweep", TOY, "sgdw", "--set=lr=0.1,0.2", *SHORT, "--study={study}", "--best"),
    "sweep --dry-run": ("sweep", TOY, "sgdw", *SHORT, "--study={study}", "--dry-run"),
    "arena list": ("arena", "list"),
    "search list": ("search", "list"),
    "search --save": ("search", TOY, "--no-run", "--study={study}", "--save={study}.json"),
    "reproduce list": ("reproduce", "list"),
    "reproduce": ("reproduce", "toys", "--no-run", "--study={study}", "--results={study}-tables"),
    "rl --list": ("rl", "--list"),
    "data list": ("data", "list", "--data-dir={study}"),
    "data check": ("data", "check", "--data-dir={study}"),
    "data convert": ("data", "convert", "{images}", "{study}.npz"),
    "compare": (*COMPARE, "--output={study}.svg"),
    "compare --json": (*COMPARE, "--output={study}.png", "--json"),
    "demo --help": ("demo", "--help"),
    "learn": (*LEARN, "--predict={study}.csv", "--state={study}.state"),
    "learn --json": (*LEARN, "--json"),
    "learn files": (*LEARN, "{study}.tsv", "--predict=-"),
}
FAST = {"arena list", "reproduce list", "data list", "rl --list", "list --json"}
MISTAKES: dict[str, tuple[str, ...]] = {
    "command": ("{odd}",),
    "option": ("list", "--{odd}"),
    "list": ("list", "{odd}"),
    "run": ("run", "{odd}", "sgd"),
    "method": ("run", TOY, "{odd}"),
    "setting": ("run", TOY, "sgd", "--set={odd}=1"),
    "engine": ("run", TOY, "sgd", "--device={odd}", "--study={study}"),
    "show": ("show", "{odd}"),
    "show --problem": ("show", "{study}", "--problem={odd}"),
    "plot --metric": ("plot", "{study}", "--metric={odd}"),
    "plot --output": ("plot", "{study}", "--output={odd}/{odd}.png"),
    "plot suffix": ("plot", "{study}", "--output={study}.{odd}"),
    "export --metric": ("export", "{study}", "--metric={odd}"),
    "report --metric": ("report", "{study}", "--metric={odd}"),
    "best --method": ("best", "{study}", "--method={odd}"),
    "resume": ("resume", "{odd}"),
    "watch": ("watch", "{odd}", "--once"),
    "claims": ("claims", "{odd}"),
    "results": ("results", "{odd}"),
    "reproduce": ("reproduce", "{odd}"),
    "reproduce --format": ("reproduce", "toys", "--format={odd}"),
    "search": ("search", "{odd}"),
    "sweep --grid": ("sweep", TOY, "sgd", "--grid={odd}"),
    "rl": ("rl", "{odd}"),
    "data check": ("data", "check", "{odd}"),
    "data --data-dir": ("data", "list", "--data-dir={odd}"),
    "data home": ("data", "list", "--data-dir=~{odd}/x"),
    "data convert": ("data", "convert", "{odd}", "{odd}.npz"),
    "compare": ("compare", "{odd}.npz", "--hidden=4"),
    "compare file": ("compare", "{odd}.py"),
    "data features": ("data", "features", "{odd}", "{odd}.npz"),
    "learn": ("learn", "{odd}", "--target=y"),
    "learn --target": ("learn", "--target={odd}"),
    "learn --set": ("learn", "--target=y", "--set={odd}=1"),
    "learn --state": ("learn", "--target=y", "--state={odd}/{odd}"),
    "learn --predict": ("learn", "--target=y", "--predict={study}"),
    "demo --output": ("demo", "--output={odd}", "--study={study}"),
}
TERMINALS: dict[str, tuple[str, dict[str, str]]] = {
    "ascii": ("ascii", {"LC_ALL": "C"}),
    "narrow": ("utf-8", {"COLUMNS": "20", "TERM": "dumb"}),
    "narrow ascii": ("ascii", {"COLUMNS": "1", "NO_COLOR": "1"}),
    "no size": ("latin-1", {"COLUMNS": "wide", "LINES": "-1", "TERM": ""}),
}
OFTEN = "narrow ascii"  # the oddest in every way; the others when there is time
terminals = pytest.mark.parametrize(
    "terminal", [t if t == OFTEN else pytest.param(t, marks=pytest.mark.slow) for t in TERMINALS]
)


@pytest.fixture(scope="module")
def made_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("terminals") / "study"
    with Ledger.open(folder) as ledger:
        options = {"window": 2, "hidden": "4"}
        ledger.add(
            RunSpec(TOY, "sgd", {"lr": lr}, seed, 4, options)
            for lr in (0.1, 0.01)
            for seed in (0, 1)
        )
        work(ledger)
    return folder


@pytest.fixture
def study(made_study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study whose name is not UTF-8."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UPGD_DATA", str(tmp_path))
    return Path(shutil.copytree(made_study, tmp_path / ODD))


def call(terminal: str, arguments: tuple[str, ...], study: Path) -> Any:
    charset, variables = TERMINALS[terminal]
    named = {
        "study": str(study),
        "odd": f"{ODD} \u00b1",
        "images": str(study.parent / "images.npz"),
        "samples": str(study.parent / "samples.npz"),
    }
    given = [argument.format(**named) for argument in arguments]
    result = CliRunner(charset=charset, env=variables).invoke(app, given)
    assert isinstance(result.exception, SystemExit | None), result.exception
    for text in (result.stdout, result.stderr):
        assert "codec" not in text
        assert "Traceback" not in text
    return result


@terminals
@pytest.mark.parametrize(
    "name",
    [
        # Variants of a command print by the same code.
        pytest.param(name, marks=[pytest.mark.slow] * (" " in name and name not in FAST))
        for name in COMMANDS
    ],
)
def test_commands_on_odd_terminals(name: str, terminal: str, study: Path) -> None:
    if name == "rl --list":
        pytest.importorskip("gymnasium")
    if name == "data convert":
        numpy = pytest.importorskip("numpy")
        numpy.savez(study.parent / "images.npz", inputs=numpy.zeros((2, 3), "f4"), labels=[0, 1])
    if name.startswith("compare"):
        numpy = pytest.importorskip("numpy")
        numpy.savez(study.parent / "samples.npz", x=numpy.eye(8), y=numpy.arange(8) % 2)
    if name.startswith("learn"):
        pytest.importorskip("sklearn")
        rows = "a\tb\t\u00b1\n" + "1\tx\tup\n2\t\u00b1\tdown\nbad\u00b1\n" * 9
        Path(f"{study}.tsv").write_text(rows, "utf-8")
    result = call(terminal, COMMANDS[name], study)
    assert result.exit_code == 0, result.output
    assert result.output
    for suffix in (".svg", ".csv", ".png", ".html", ".json", ".npz"):
        if any(argument.endswith(f"{{study}}{suffix}") for argument in COMMANDS[name]):
            assert os.path.getsize(f"{study}{suffix}") > 0


@terminals
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_on_odd_terminals(name: str, terminal: str, study: Path) -> None:
    result = call(terminal, MISTAKES[name], study)
    assert result.exit_code == 2, result.output
    [line] = result.stderr.splitlines()
    assert line.startswith("upgd: ")
    assert len(line) > len("upgd: ")


SLOW: dict[str, tuple[str, ...]] = {
    "demo": ("demo", "--steps=500", "--seeds=1", "--study={study}-demo"),
    "demo --json": ("demo", "--steps=500", "--seeds=1", "--study={study}-demo", "--json"),
    "claims": ("claims", str(RESULTS)),
    "claims --details": ("claims", str(RESULTS), "--details"),
    "claims --markdown": ("claims", str(RESULTS), "--markdown"),
    "results": ("results", "{study}-tables"),
}


@pytest.mark.slow
@terminals
@pytest.mark.parametrize("name", SLOW)
def test_slow_commands_on_odd_terminals(name: str, terminal: str, study: Path) -> None:
    tables = Path(f"{study}-tables", "toy_changing_sign")
    tables.mkdir(parents=True)
    write(made_up("toy-changing-sign"), tables / TABLE)
    result = call(terminal, SLOW[name], study)
    assert result.exit_code == 0, result.output
    assert result.output


def test_no_command_is_left_out() -> None:
    known = {arguments[0] for some in (COMMANDS, SLOW) for arguments in some.values()}
    assert {"run", "data", "watch"} <= set(COMMAND_TABLE) <= known


def test_event_files_need_a_name_in_utf8(study: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = f"--tensorboard={study.parent}/{ODD} events"
    result = call("ascii", ("export", str(study), folder), study)
    assert result.exit_code == 2
    assert "UTF-8" in result.stderr


def upgd(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "upgd.cli", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, timeout=300, **options)


def test_a_process_without_utf8(study: Path) -> None:
    """The encodings of files and arguments are ASCII, too."""
    none = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHONIO"))}
    done = upgd("show", str(study), env={**kept, **none}, stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"+-" in done.stdout
    assert done.stdout.isascii()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a full disk")
def test_output_that_cannot_be_written() -> None:
    with open("/dev/full", "wb") as full:
        done = upgd("--help", stdout=full)
    assert done.returncode == 2
    assert done.stderr == b"upgd: No space left on device\n"
