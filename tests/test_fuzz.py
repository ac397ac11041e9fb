"""Malformed arguments, studies and files, by class: each case ends in a clear error or is right.

A class is a name, a strategy of cases and what is done with one. No case may end in a traceback,
take long, or leave half a study.
"""

from __future__ import annotations

import atexit
import copy
import gzip
import io
import json
import math
import os
import shutil
import signal
import sqlite3
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("typer")
from typer.testing import CliRunner

from tests.cases import PATHS
from tests.running import work
from tests.test_pages import made_up
from tests.waiting import PATIENCE
from upgd.cli import app
from upgd.cli.arguments import seed_list
from upgd.engine import EagerRun, Setting
from upgd.ledger import (
    Ledger,
    Result,
    RunSpec,
    Series,
    SpecError,
    StudyError,
    load_checkpoint,
    save_checkpoint,
)
from upgd.networks import build
from upgd.optim.registry import METHODS
from upgd.paper.results import TABLE, write
from upgd.streams import (
    PROBLEMS,
    DataError,
    DataNotFoundError,
    StreamEndedError,
    check,
    from_iterable,
    load,
    read_cifar_binary,
    read_idx,
    read_image_folder,
)
from upgd.study.execution import Progress

SOME, EACH = 6, 44  # cases of each class: always, and in the slow tests
TOY, DIGITS = "toy-changing-inputs", "label-permuted-digits"
EAGER = ("--engine", "eager")
SHORT = ("--seeds", "1", "--steps", "4", "--window", "2", "--hidden", "4", *EAGER)

Act = Callable[[Path, Any], None]
CLASSES: dict[str, tuple[st.SearchStrategy[Any], Act]] = {}


def fuzz(name: str, cases: st.SearchStrategy[Any]) -> Callable[[Act], Act]:
    """Register a class of malformed input."""

    def register(act: Act) -> Act:
        assert name not in CLASSES
        CLASSES[name] = (cases, act)
        return act

    return register


# ---- what every case is held against


@contextmanager
def no_hang() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"a case takes longer than {PATIENCE} s")

    if os.name == "nt" or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def cli(*arguments: Any, codes: tuple[int, ...] = (0, 2)) -> Any:
    """Run a command; a mistake is one line that begins with ``upgd:``, and exit code 2."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    assert result.exit_code in codes, (arguments, result.exit_code, result.output)
    if result.exit_code == 2:
        lines = result.stderr.rstrip("\n").split("\n")
        assert len(lines) == 1, lines
        assert lines[0].startswith("upgd: ")
        assert len(lines[0]) > len("upgd: ")
    assert "Traceback" not in result.output
    return result


def check_study(folder: Path, left: tuple[str, ...] = ()) -> dict[str, int]:
    """There is no study, or a whole one: readable, consistent, with no run under way."""
    if not folder.is_dir() or not (folder / "ledger.sqlite").exists():
        return {}
    db = sqlite3.connect(folder / "ledger.sqlite")
    try:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
    finally:
        db.close()
    with Ledger.open(folder, create=False) as ledger:
        counts = ledger.counts()
        over = [run.key for run in ledger.runs() if run.state in ("done", "diverged")]
        assert over == [run.key for run in ledger.runs() if run.result is not None]
        assert ledger.leases() == []
    assert counts["running"] == 0
    assert all(counts[state] == 0 for state in ("pending", "failed") if state not in left)
    return counts


def run(folder: Path, *arguments: Any, codes: tuple[int, ...] = (0, 2)) -> Any:
    """``upgd run`` into a new study: afterwards there is none, or it is whole and done."""
    result = cli("run", *arguments, "--study", folder / "study", codes=codes)
    counts = check_study(folder / "study", left=("failed",) if 1 in codes else ())
    if result.exit_code == 2:
        assert counts == {}, result.output
        assert not (folder / "study").exists()
    elif "--dry-run" not in arguments and not result.output.startswith("Usage"):
        assert sum(counts.values()) > 0
    return result


def refused(call: Callable[[], Any], *errors: type[Exception]) -> Any:
    """The value, or None where the call raised one of our errors with a message of one line."""
    message = ""
    try:
        return call()
    except errors as error:
        message = str(error)
    assert message.strip()
    assert "\n" not in message, message
    return None


# ---- strategies

words = st.text(max_size=12) | st.text(st.characters(max_codepoint=127), max_size=12)
floats = (
    st.floats()
    | st.sampled_from([0.0, -0.0, 1e308, -1e308, 5e-324, 1e38, 1e-45, math.inf, -math.inf])
    | st.floats(-2, 2)
)
huge = st.integers(-(2**70), 2**70) | st.integers(-100, 100)
raw = st.binary(max_size=40)


def changed(text: str) -> st.SearchStrategy[str]:
    """A text with one character replaced, left out or added."""
    places = st.integers(0, len(text))
    return st.builds(
        lambda i, c, cut: text[:i] + c + text[i + cut :],
        places,
        st.characters() | st.just(""),
        st.integers(0, 2),
    ).filter(lambda other: other != text)


def mistyped(names: Any) -> st.SearchStrategy[str]:
    known = list(names)
    wrong = words | st.sampled_from(known).flatmap(changed)
    return wrong.filter(lambda name: name not in known and name != "--help")


def damage(size: int) -> st.SearchStrategy[Callable[[bytes], bytes]]:
    """Cuts, extensions and changed bytes."""

    def cut(at: int) -> Callable[[bytes], bytes]:
        return lambda content: content[: at % max(1, len(content))]

    def change(places: list[tuple[int, int]]) -> Callable[[bytes], bytes]:
        def apply(content: bytes) -> bytes:
            changed = bytearray(content)
            for place, value in places:
                if changed:
                    changed[place % len(changed)] ^= value
            return bytes(changed)

        return apply

    flips = st.lists(st.tuples(st.integers(0, size), st.integers(1, 255)), min_size=1, max_size=20)
    return (
        st.integers(0, size).map(cut)
        | flips.map(change)
        | st.binary(min_size=1, max_size=30).map(lambda more: lambda content: content + more)
        | st.binary(max_size=50).map(lambda other: lambda content: other)
    )


# ---- arguments


@fuzz("problem names", mistyped(PROBLEMS))
def _(folder: Path, name: str) -> None:
    assert run(folder, name, "sgd", *SHORT).exit_code == 2


KNOWN = [n for row in METHODS.values() for n in (row.name, *row.aliases)]


@fuzz("method names", st.lists(mistyped([*KNOWN, *(n.upper() for n in KNOWN)]), min_size=1))
def _(folder: Path, names: list[str]) -> None:
    assume(not {n.lower() for n in names} & set(KNOWN))
    assert run(folder, TOY, *names, *SHORT).exit_code == 2


@fuzz(
    "seeds",
    st.text("0123456789,-. e+_x", max_size=10)
    | words
    | st.sampled_from(
        ["0-99999999999", "9" * 5000, "5-2", ",", "-", "1e3", "-1", "3,-1", "٣", "0-"]
    ),
)
def _(folder: Path, text: str) -> None:
    found = refused(lambda: seed_list(text), ValueError)
    assume(found is None or len(found) < 20)
    result = run(folder, TOY, "sgd", *SHORT, f"--seeds={text}")
    if result.exit_code == 0:
        with Ledger.open(folder / "study") as ledger:
            assert [r.spec.seed for r in ledger.runs()] == list(dict.fromkeys(found or ()))
    assert (result.exit_code == 0) == (found is not None)


@fuzz(
    "steps",
    st.text("0123456789.-+e_", min_size=1, max_size=8) | floats.map(str) | words.filter(bool),
)
def _(folder: Path, text: str) -> None:
    result = run(folder, TOY, "sgd", "--window=1", f"--steps={text}", "--dry-run", "--seeds=1")
    if result.exit_code == 0:
        value = float(text)
        assert value.is_integer()
        assert 1 <= value < 2**63
        assert f"{int(value)} steps" in result.output


@fuzz("settings that are not name=number", words | st.tuples(words, words).map("=".join))
def _(folder: Path, text: str) -> None:
    name, _, value = text.partition("=")
    with_number = name in ("lr", "weight_decay") and refused(lambda: float(value), ValueError)
    assume(with_number is None or with_number is False)
    assert run(folder, TOY, "sgd", *SHORT, f"--set={text}").exit_code == 2


@fuzz(
    "settings given twice",
    st.tuples(
        st.sampled_from(["run", "sweep", "sweep --dry-run", "search", "rl", "rl --ppo", "rl arm"]),
        *[st.floats(1e-6, 1e-1)] * 2,
        st.booleans(),
    ),
)
def _(folder: Path, case: tuple[str, float, float, bool]) -> None:
    command, first, second, apart = case
    pairs = [f"lr={first!r}", f"lr={second!r}"]
    other = ["--set=weight_decay=0.001"] if apart else []
    sets = [f"--set={pairs[0]}", *other, f"--set={pairs[1]}"]
    arguments = {
        "run": ["run", TOY, "sgd", *SHORT, *sets],
        "sweep": ["sweep", TOY, "sgdw", *sets],
        "sweep --dry-run": ["sweep", TOY, "sgdw", "--dry-run", *sets],
        "search": ["search", TOY, *sets],
        "rl": ["rl", "Hopper", *sets],
        "rl --ppo": ["rl", "Hopper", "--ppo=gamma=0.9", "--ppo=gamma=0.99"],
        "rl arm": ["rl", "Hopper", f"--optimizers=adam:{pairs[0]}:{pairs[1]}"],
    }[command]
    line = cli(*arguments, "--study", folder / "study", codes=(2,)).stderr
    assert "twice" in line
    for each in ("gamma=0.9", "gamma=0.99") if command == "rl --ppo" else pairs:
        assert repr(each) in line
    assert not (folder / "study").exists()


AXES = ("lr", "sigma", "beta_utility", "weight_decay")


@fuzz(
    "grids that are too large",
    st.tuples(
        st.sampled_from(["sweep", "sweep --dry-run", "sweep --halving=3", "search", "file"]),
        st.lists(st.integers(50, 400), min_size=4, max_size=4),
        st.integers(1, 20),
    ),
)
def _(folder: Path, case: tuple[str, list[int], int]) -> None:
    command, counts, seeds = case
    axes = {
        name: [k / count for k in range(1, count)] for name, count in zip(AXES, counts, strict=True)
    }
    more = [f"--set={name}={','.join(map(str, values))}" for name, values in axes.items()]
    if command == "file":
        (folder / "grid.toml").write_text(
            "[upgd]\n" + "".join(f"{name} = {values}\n" for name, values in axes.items())
        )
        more = [f"--grid={folder}/grid.toml"]
    verb, _, option = command.replace("file", "sweep").partition(" ")
    arms = ["--arms=upgd"] if verb == "search" else ["upgd"]
    given = [verb, TOY, *arms, *filter(None, [option]), *more, f"--seeds={seeds}"]
    line = cli(*given, "--study", folder / "study", codes=(2,)).stderr
    assert str(math.prod(map(len, axes.values())) * seeds) in line
    assert not (folder / "study").exists()


HYPER = sorted(
    {(m, name) for m, row in METHODS.items() for name in row.defaults} - {("adamw", "betas")}
)


@fuzz("hyperparameters out of range", st.tuples(st.sampled_from(HYPER), floats))
def _(folder: Path, case: tuple[tuple[str, str], float]) -> None:
    (method, name), value = case
    names = ["beta1", "beta2"] if name == "betas" else [name]
    sets = [f"--set={n}={value!r}" for n in names]
    result = run(folder, TOY, method, *SHORT, *sets)
    if not math.isfinite(value):
        assert result.exit_code == 2


NUMBERS = ("--batch", "--window", "--stride", "--held-out", "--task-length")


@fuzz(
    "numbers out of range",
    st.dictionaries(st.sampled_from(NUMBERS), huge.map(str) | words, min_size=1, max_size=3),
)
def _(folder: Path, case: dict[str, str]) -> None:
    arguments = [f"{name}={value}" for name, value in case.items()]
    run(folder, TOY, "sgd", *SHORT, *arguments, codes=(0, 1, 2))


@fuzz(
    "held-out samples that a stream has not",
    st.tuples(st.sampled_from([TOY, DIGITS, "stationary-mnist"]), st.integers(360, 10**12)),
)
def _(folder: Path, case: tuple[str, int]) -> None:
    problem, count = case
    none = ("--data-dir", folder)
    arguments = ("--held-out", count, "--task-length=2", *none)
    assert run(folder, problem, "sgd", *SHORT, *arguments).exit_code == 2


@fuzz("hidden layers", st.text("0123456789-", max_size=14) | words)
def _(folder: Path, text: str) -> None:
    sizes = [int(part) for part in text.split("-") if part.isdecimal()]
    assume(math.prod(sizes) < 10**4 or math.prod(sizes) > 10**15)
    run(folder, TOY, "sgd", *SHORT, f"--hidden={text}", codes=(0, 1, 2))


OPTIONS = ("--seeds", "--steps", "--set", "--study", "--device", "--json", "--quiet", "--restart")


@fuzz(
    "unknown options and commands",
    st.lists(st.sampled_from(OPTIONS).flatmap(changed) | words, min_size=1, max_size=4),
)
def _(folder: Path, tokens: list[str]) -> None:
    known = {"list", "run", "resume", "show", "plot", "export", "data", "demo", "--help", "-"}
    assume(not known & set(tokens))
    assume(not any("--version".startswith(t) or "--help".startswith(t) for t in tokens if t))
    cli(*tokens, codes=(2,))
    assert not list(folder.iterdir())


KINDS = ("cpu", "cuda", "mps", "meta", "xla", "xpu", "hip", "vulkan", "fpga", "mkldnn", "hpu")


@fuzz(
    "devices",
    words
    | st.builds(lambda kind, n: f"{kind}:{n}", st.sampled_from(KINDS), st.integers(-2, 2**40))
    | st.sampled_from(KINDS),
)
def _(folder: Path, name: str) -> None:
    assume(not name.startswith("cuda"))  # there may be one here
    result = run(folder, TOY, "sgd", *SHORT, f"--device={name}")
    if not name.startswith(("cpu", "mps", "xpu")):
        assert result.exit_code == 2


# ---- places

names = st.text(st.characters(exclude_characters="/"), min_size=1, max_size=20)
bytes_names = st.binary(min_size=1, max_size=20).map(lambda b: b.replace(b"/", b"_"))


@fuzz("study names of any characters", names)
def _(folder: Path, name: str) -> None:
    assume(name not in (".", ".."))
    result = cli("run", TOY, "sgd", *SHORT, "--study", f"{folder}/{name}")
    if result.exit_code == 0:
        for command in ("show", "export"):
            cli(command, f"{folder}/{name}", codes=(0,))


@fuzz("study names that are not UTF-8", bytes_names)
def _(folder: Path, raw_name: bytes) -> None:
    name = os.fsdecode(raw_name)
    assume(name not in (".", ".."))
    result = cli("run", TOY, "sgd", *SHORT, "--study", f"{folder}/{name}")
    if result.exit_code == 0:
        for command in ("show", "export", "resume --engine=eager"):
            cli(*command.split(), f"{folder}/{name}", codes=(0,))


@fuzz(
    "studies where none can be",
    st.tuples(
        st.sampled_from(["file", "file/x", "link", "loop", "a" * 300, "deep/" * 1500 + "x", "dir"]),
        st.sampled_from(["run", "resume", "show", "plot", "export", "dry-run"]),
        names,
    ),
)
def _(folder: Path, case: tuple[str, str, str]) -> None:
    place, command, name = case
    (folder / "file").write_bytes(name.encode())
    (folder / "link").symlink_to(folder / "file")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "dir" / "ledger.sqlite").mkdir(parents=True)
    arguments = {"run": [TOY, "sgd", *SHORT, "--study"]}
    arguments["dry-run"] = ["--dry-run", *arguments["run"]]
    verb = "run" if command == "dry-run" else command
    codes = (0, 2) if command == "dry-run" else (2,)
    cli(verb, *arguments.get(command, []), f"{folder}/{place}", codes=codes)
    assert (folder / "file").read_bytes() == name.encode()


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may write everywhere: be somebody else."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@fuzz(
    "places that cannot be written",
    st.tuples(
        st.sampled_from(["run", "resume", "plot", "export", "show"]),
        names.filter(lambda n: n.isprintable()),
    ),
)
def _(folder: Path, case: tuple[str, str]) -> None:
    command, name = case
    study = folder / "study"
    shutil.copytree(small_study(), study)
    for file in study.rglob("*"):
        file.chmod(0o555 if file.is_dir() else 0o444)
    study.chmod(0o555)
    folder.chmod(0o555)
    before = (study / "ledger.sqlite").read_bytes()
    try:
        with as_nobody():
            if not os.access(study, os.R_OK | os.X_OK, effective_ids=True):
                pytest.skip("temporary folders are private here")
            if command == "run":
                cli("run", TOY, "sgd", *SHORT, "--study", folder / name, codes=(2,))
                assert not (folder / name).exists()
            else:
                cli(command, study, codes=(0,) if command == "show" else (2,))
    finally:
        folder.chmod(0o755)
        study.chmod(0o755)
        (study / "checkpoints").chmod(0o755)
        (study / "workers").chmod(0o755)
    assert (study / "ledger.sqlite").read_bytes() == before


# ---- studies


def temporary_folder() -> Path:
    """A folder for as long as this process lives."""
    folder = tempfile.mkdtemp(prefix="upgd-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def small_study() -> Path:
    """A study with runs that are done, diverged and pending; to be copied."""
    folder = temporary_folder()
    with Ledger.open(folder) as ledger:
        options = {"window": 2, "hidden": "4"}
        ledger.add([RunSpec(TOY, m, {"lr": 0.01}, 0, 4, options) for m in ("sgd", "upgd")])
        ledger.add([RunSpec(TOY, "sgd", {"lr": 1e9}, 0, 400, options)])
        work(ledger)
        ledger.add([RunSpec(TOY, "sgd", {"lr": 0.01}, 1, 4, options)])
    return folder


def copy_of(study: Path, folder: Path) -> Path:
    return Path(shutil.copytree(study, folder / "study"))


commands = st.sampled_from(
    ["show", "show --json", "plot", "export", "export --metric=loss", "resume --engine=eager"]
)


def told(command: str, study: Path, codes: tuple[int, ...] = (0,)) -> tuple[Any, ...] | None:
    """What a command says of a study, and writes; None if it is refused."""
    result = cli(*command.split(), study, codes=codes)
    if result.exit_code == 2:
        return None
    tables = {file.name: file.read_text() for file in sorted(study.glob("*.csv"))}
    text = result.stdout.replace(str(study), "STUDY")
    return result.exit_code, "".join(text.split()), tables  # a long path breaks lines


@cache
def told_of_the_small_study(command: str) -> tuple[Any, ...] | None:
    return told(command, copy_of(small_study(), temporary_folder()))


def check_told(command: str, study: Path) -> None:
    """A command says of a study what it says of the undamaged one, or it is refused."""
    assert told(command, study, codes=(0, 1, 2)) in (None, told_of_the_small_study(command))


@fuzz("ledgers cut and changed", st.tuples(damage(60_000), commands))
def _(folder: Path, case: tuple[Callable[[bytes], bytes], str]) -> None:
    harm, command = case
    file = copy_of(small_study(), folder) / "ledger.sqlite"
    file.write_bytes(harm(file.read_bytes()))
    check_told(command, file.parent)


@fuzz(
    "ledgers with flipped bits",
    st.tuples(st.integers(0, 60_000), st.integers(0, 7), st.booleans(), commands),
)
def _(folder: Path, case: tuple[int, int, bool, str]) -> None:
    """Anywhere, or where a page says what it holds."""
    place, bit, at_head, command = case
    file = copy_of(small_study(), folder) / "ledger.sqlite"
    content = bytearray(file.read_bytes())
    place = place // 60 % (len(content) // 4096) * 4096 + place % 60 if at_head else place
    content[place % len(content)] ^= 1 << bit
    file.write_bytes(content)
    check_told(command, file.parent)
    checked = cli("check", file.parent, codes=(0, 1, 2))
    if (
        checked.exit_code == 1
        and cli("check", file.parent, "--repair", codes=(0, 1, 2)).exit_code < 2
    ):
        cli("check", file.parent, codes=(0,))


@fuzz(
    "ledgers of other versions and programs",
    st.tuples(
        st.sampled_from(["user_version", "application_id"]),
        st.integers(-(2**31), 2**31 - 1),
        commands,
    ),
)
def _(folder: Path, case: tuple[str, int, str]) -> None:
    name, value, command = case
    file = copy_of(small_study(), folder) / "ledger.sqlite"
    db = sqlite3.connect(file)
    good = db.execute(f"PRAGMA {name}").fetchone()[0]
    assume(value != good and not (name == "user_version" and 1 <= value <= good))
    db.execute(f"PRAGMA {name} = {value}")
    db.close()
    before = file.read_bytes()
    cli(*command.split(), file.parent, codes=(2,))
    assert file.read_bytes() == before


CELLS = [
    *("runs.spec", "runs.method", "runs.seed", "runs.attempts", "runs.error", "runs.silent"),
    *("results.engine", "results.versions", "results.host", "results.wall", "results.summary"),
    *("results.diverged_at", "series.data", "series.window", "series.metric", "runs.key"),
]
values = (
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | raw
    | st.sampled_from(["{}", "[]", "null", '{"a": [1]}', '{"accuracy": "x", "loss": true}'])
)


@fuzz("ledgers with other cells", st.tuples(st.sampled_from(CELLS), values, commands))
def _(folder: Path, case: tuple[str, Any, str]) -> None:
    cell, value, command = case
    study = copy_of(small_study(), folder)
    table, column = cell.split(".")
    db = sqlite3.connect(study / "ledger.sqlite")
    try:
        db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = 1", (value,))
        db.commit()
    except sqlite3.Error:
        assume(False)  # the tables themselves refuse it
    finally:
        db.close()
    check_told(command, study)


@fuzz(
    "runs that nobody can run",
    st.builds(
        RunSpec,
        problem=st.sampled_from(["nowhere", TOY, DIGITS, "stationary-mnist\u00e9"]),
        method=st.sampled_from(["sgd", "upgd", "none", "adam"]),
        hyper=st.dictionaries(
            st.sampled_from(["lr", "kappa", "beta1", "momentum"]), st.floats(-2, 2)
        ),
        seed=st.integers(0, 2**63 - 1),
        steps=st.integers(1, 4),
        options=st.dictionaries(
            st.sampled_from(["window", "batch", "restart", "hidden", "task_length", "x", "stride"]),
            st.none() | st.booleans() | st.integers(-5, 5) | words | st.floats(-1, 1),
        ),
    ),
)
def _(folder: Path, spec: RunSpec) -> None:
    good = RunSpec(TOY, "sgd", {"lr": 0.01}, 0, 4, {"window": 2})
    with Ledger.open(folder / "study") as ledger:
        ledger.add([spec, good])
    result = cli("resume", folder / "study", *EAGER, codes=(0, 1))
    counts = check_study(folder / "study", left=("failed",))
    assert counts["failed"] == (result.exit_code == 1)
    with Ledger.open(folder / "study") as ledger:
        assert ledger.get(good.key).state == "done"  # the others are not held up
        bad = ledger.get(spec.key)
        assert (bad.state == "failed") == bool(bad.error)


@fuzz(
    "results that are none",
    st.tuples(
        st.dictionaries(st.text(max_size=5), floats | words | raw | st.none() | st.just({1})),
        st.sampled_from(["1-D", "2-D", "text", "objects", "ragged", "complex", "scalar", "none"]),
        huge,
    ),
)
def _(folder: Path, case: tuple[dict[str, Any], str, int]) -> None:
    summary, kind, window = case
    series: Any = {
        "1-D": [1.0, math.nan, 1e300],
        "2-D": np.ones((2, 2)),
        "text": ["a"],
        "objects": [object()],
        "ragged": [[1], [1, 2]],
        "complex": [1j],
        "scalar": 3.0,
        "none": None,
    }[kind]
    with Ledger.open(folder) as ledger:
        ledger.add([RunSpec("p", "m")])
        [claim] = ledger.claim("me", 60)

        def finish() -> bool:
            given = {"loss": Series(series, window)}
            ledger.finish(claim, Result("eager", summary=summary, series=given))
            return True

        if not refused(finish, StudyError):
            ledger.finish(claim, Result("eager"))  # nothing of it was kept
    assert check_study(folder)["done"] == 1


# ---- checkpoints


@cache
def interrupted_study() -> tuple[Path, list[float]]:
    """A study stopped in mid-run, and the loss of the uninterrupted run."""
    folder = temporary_folder()
    spec = RunSpec(TOY, "adam", {"lr": 0.01}, 0, 40, {"window": 10, "hidden": "4"})

    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    with Ledger.open(folder / "stopped") as ledger:
        ledger.add([spec])
        with pytest.raises(KeyboardInterrupt):
            work(ledger, on_progress=stop)
    with Ledger.open(folder / "whole") as ledger:
        ledger.add([spec])
        work(ledger)
        return folder / "stopped", ledger.series(spec.key, "loss").tolist()


def check_resumed(study: Path, expected: list[float]) -> None:
    cli("resume", study, *EAGER, codes=(0,))
    with Ledger.open(study) as ledger:
        [run] = ledger.runs()
        assert run.state == "done"
        assert ledger.series(run.key, "loss").tolist() == expected
    assert not list((study / "checkpoints").iterdir())


@fuzz("checkpoints cut and changed", damage(700_000))
def _(folder: Path, harm: Callable[[bytes], bytes]) -> None:
    stopped, expected = interrupted_study()
    study = copy_of(stopped, folder)
    [file] = (study / "checkpoints").iterdir()
    file.write_bytes(harm(file.read_bytes()))
    check_resumed(study, expected)


@fuzz(
    "checkpoints of something else",
    st.tuples(
        st.sampled_from(["drop", "shape", "add", "meta", "step", "stack", "group", "all"]),
        st.integers(0, 10**6),
        st.none() | huge | words | st.floats(allow_nan=False, allow_infinity=False),
    ),
)
def _(folder: Path, case: tuple[str, int, Any]) -> None:
    kind, number, value = case
    stopped, expected = interrupted_study()
    study = copy_of(stopped, folder)
    [file] = (study / "checkpoints").iterdir()
    arrays, meta = load_checkpoint(file)
    model = [name for name in arrays if name.startswith("model/")]
    name = model[number % len(model)]
    if kind == "drop":
        del arrays[name]
    elif kind == "shape":
        arrays[name] = np.ones(number % 7, np.float32)
    elif kind == "add":
        arrays["model/other"] = np.ones(number % 7)
    elif kind == "meta":
        del meta["run"][sorted(meta["run"])[number % len(meta["run"])]]
    elif kind == "step":
        assume(value not in (20, 20.0))
        meta["run"]["step"] = value
    elif kind == "stack":
        meta["stack"][sorted(meta["stack"])[number % len(meta["stack"])]] = value
    elif kind == "group":
        meta["run"]["groups"] = value
    else:
        arrays, meta = {}, {"run": value, "stack": meta["stack"], "wall": value}
    save_checkpoint(file, arrays, meta)
    if kind == "stack" and "started with" in cli("resume", study, *EAGER).stderr:
        file.unlink()  # of other versions, and one is told to remove it
    check_resumed(study, expected)


# ---- specifications

GOOD_SPEC = RunSpec(TOY, "sgd", {"lr": 0.01}, 3, 40, {"window": 10}).to_json()


@fuzz("specifications as text", changed(GOOD_SPEC) | words | st.text('{}[]":,0e-', max_size=30))
def _(folder: Path, text: str) -> None:
    spec = refused(lambda: RunSpec.from_json(text), SpecError)
    if spec is not None:
        assert RunSpec.from_json(spec.to_json()) == spec


# ---- data files

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (5, 28, 28), dtype=np.uint8)
LABELS = np.array([3, 1, 4, 1, 5], dtype=np.uint8)
CIFAR = RNG.integers(0, 256, (2, 3072), dtype=np.uint8)


def idx(array: np.ndarray[Any, Any]) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def put_mnist(folder: Path, images: bytes, labels: bytes) -> None:
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)


@fuzz("idx headers", st.tuples(st.binary(min_size=1, max_size=16), st.booleans()))
def _(folder: Path, case: tuple[bytes, bool]) -> None:
    head, labels = case
    contents = [idx(IMAGES), idx(LABELS)]
    contents[labels] = head + contents[labels][len(head) :]
    put_mnist(folder, *contents)
    found = refused(lambda: load("mnist", data_dir=folder), DataError)
    if found is not None:
        assert found.inputs.shape[1:] == (28, 28)
        assert len(found.inputs) == len(found.labels)
        assert found.labels.max() < 10


@fuzz("idx files cut and changed", st.tuples(damage(4000), st.booleans()))
def _(folder: Path, case: tuple[Callable[[bytes], bytes], bool]) -> None:
    harm, labels = case
    contents = [idx(IMAGES), idx(LABELS)]
    contents[labels] = harm(contents[labels])
    put_mnist(folder, *contents)
    found = refused(lambda: load("mnist", data_dir=folder), DataError)
    assert found is None or found.inputs.shape[1:] == (28, 28)


@fuzz("gzip files cut and changed", damage(4000))
def _(folder: Path, harm: Callable[[bytes], bytes]) -> None:
    file = folder / "images.gz"
    file.write_bytes(harm(gzip.compress(idx(IMAGES))))
    found = refused(lambda: read_idx(file, 3), DataError)
    if found is not None:  # what was changed does not matter, such as the time in the header
        np.testing.assert_array_equal(found, IMAGES)


@fuzz("CIFAR-10 binary batches", st.tuples(damage(6146), st.none() | st.integers(0, 3)))
def _(folder: Path, case: tuple[Callable[[bytes], bytes], int | None]) -> None:
    harm, records = case
    file = folder / "data_batch_1.bin"
    rows = np.concatenate([np.array([[1], [9]], np.uint8), CIFAR], 1)
    file.write_bytes(harm(rows.tobytes()))
    found = refused(lambda: read_cifar_binary([file], records), DataError)
    if found is not None:
        assert found[0].shape[1:] == (3, 32, 32)
        assert found[1].max() < 10


DTYPES = st.sampled_from(["f4", "f8", "u1", "i8", "bool", "c16", "U3", "S2", "M8[s]", "f2", "O"])
arrays = st.builds(
    lambda kind, shape, fill: np.full(shape, fill).astype(kind),
    DTYPES,
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(-2, 300),
)


@fuzz(
    ".npz files with other arrays",
    st.dictionaries(
        st.sampled_from(["inputs", "labels", "test_inputs", "scale", "top", "names", "x"]), arrays
    ),
)
def _(folder: Path, case: dict[str, Any]) -> None:
    np.savez(folder / "mine.npz", allow_pickle=True, **case)
    found = refused(lambda: load(str(folder / "mine.npz")), DataError)
    if found is not None:
        assert len(found.inputs) == len(found.labels) > 0
        assert np.isfinite(found.scaled(slice(None))).all()


def npz_bytes(**content: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **content)
    return file.getvalue()


@fuzz(".npz files cut and changed", damage(2000))
def _(folder: Path, harm: Callable[[bytes], bytes]) -> None:
    inputs, labels = RNG.random((3, 7)).astype(np.float32), np.array([0, 1, 2])
    (folder / "mine.npz").write_bytes(harm(npz_bytes(inputs=inputs, labels=labels)))
    found = refused(lambda: load(str(folder / "mine.npz")), DataError)
    if found is not None:
        np.testing.assert_array_equal(found.inputs, inputs)
        np.testing.assert_array_equal(found.labels, labels)


def picture(size: int, mode: str = "L") -> bytes:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new(mode, (size, size), 100).save(file, "PNG")
    return file.getvalue()


@fuzz(
    "image folders",
    st.dictionaries(
        st.tuples(names.filter(lambda n: n not in (".", "..")), st.sampled_from(["a", "b", "c"])),
        st.integers(1, 3).map(picture) | st.just(picture(2, "RGB")) | raw | st.none(),
        max_size=4,
    ),
)
def _(folder: Path, case: dict[tuple[str, str], bytes | None]) -> None:
    for (name, kind), content in case.items():
        try:
            (folder / "images" / kind).mkdir(parents=True, exist_ok=True)
            if content is not None:
                (folder / "images" / kind / f"{name}.png").write_bytes(content)
        except (OSError, ValueError):
            assume(False)  # no name for a file
    found = refused(lambda: read_image_folder(folder / "images"), DataError)
    if found is not None:
        assert len(found[0]) == len(found[1]) > 0


@fuzz(
    "runs on malformed data",
    st.tuples(st.sampled_from(["npz", "images", "labels"]), damage(4000)),
)
def _(folder: Path, case: tuple[str, Callable[[bytes], bytes]]) -> None:
    kind, harm = case
    place = folder / "data"
    place.mkdir()
    if kind == "npz":
        good = npz_bytes(inputs=IMAGES, labels=LABELS, test_inputs=IMAGES, test_labels=LABELS)
        (place / "mnist.npz").write_bytes(harm(good))
    else:
        contents = [idx(IMAGES), idx(LABELS)]
        contents[kind == "labels"] = harm(contents[kind == "labels"])
        put_mnist(place, *contents)
    result = run(folder, "stationary-mnist", "sgd", *SHORT, "--data-dir", place)
    fine = refused(lambda: check("mnist", place), DataError) is not None
    assert (result.exit_code == 0) == fine


@fuzz("data folders and dataset names", st.tuples(names | bytes_names.map(os.fsdecode), words))
def _(folder: Path, case: tuple[str, str]) -> None:
    place, name = case
    assume(name not in ("", "digits", "--help") and not name.startswith("-"))
    run(folder, "stationary-mnist", "sgd", *SHORT, f"--data-dir={folder}/{place}")
    cli("data", "check", name, f"--data-dir={folder}/{place}", codes=(2,))
    cli("data", "convert", f"{folder}/{place}", f"{folder}/{name}.npz", codes=(2,))
    refused(lambda: load(name, data_dir=folder), DataError, DataNotFoundError, ValueError)


# ---- what is asked of a study


@fuzz("metrics and figures", st.tuples(words, names | bytes_names.map(os.fsdecode)))
def _(folder: Path, case: tuple[str, str]) -> None:
    metric, name = case
    study = copy_of(small_study(), folder)
    assume(metric not in ("", "loss", "plasticity"))
    assume(Path(folder, "nowhere", name).parent != folder)  # "nowhere/." is a file in this folder
    for command in ("plot", "export"):
        cli(command, study, f"--metric={metric}", codes=(2,))
        cli(command, study, f"--output={folder}/nowhere/{name}", codes=(2,))
    known = {"checkpoints", "workers", "ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm"}
    assert {file.name for file in study.iterdir()} <= known
    if name not in (".", "..", "study"):
        cli("plot", study, f"--output={folder}/{name}")
        cli("export", study, f"--output={folder}/{name}")


@fuzz("filters", st.tuples(words, words).filter(any))
def _(folder: Path, case: tuple[str, str]) -> None:
    problem, method = case
    study = small_study()
    for command in ("show", "plot"):
        cli(command, study, f"--problem={problem}", f"--method={method}", codes=(2,))
    assume(f"{problem}{method}".lower() not in ("problems", "methods", "all", *KNOWN))
    cli("list", "--", f"{problem}{method}", codes=(2,))


# ---- outputs, terminals and caches

OUTPUTS = {
    "export": ["export", "{study}", "--output={path}"],
    "plot": ["plot", "{study}", "--output={path}"],
    "report": ["report", "{study}", "--output={path}"],
    "search": ["search", TOY, "--no-run", "--study={study}", "--save={path}"],
}
TAKEN = ("ledger", "moved", "link", "wal", "checkpoint", "folder", "loop", "dangling", "mode")


@fuzz(
    "outputs over something else",
    st.tuples(st.sampled_from(sorted(OUTPUTS)), st.sampled_from(TAKEN), raw),
)
def _(folder: Path, case: tuple[str, str, bytes]) -> None:
    command, kind, content = case
    study, end = copy_of(small_study(), folder), ".html" if command == "report" else ""
    ledger, path = study / "ledger.sqlite", folder / f"output{end}"
    before, codes = ledger.read_bytes(), (2,)
    if kind == "ledger":
        path = ledger
    elif kind == "moved":
        shutil.copy(ledger, path)
    elif kind == "link":
        path.symlink_to(ledger)
    elif kind == "wal":
        path = study / "ledger.sqlite-wal"
    elif kind == "checkpoint":
        path = study / "checkpoints" / path.name
        path.write_bytes(content)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "dangling":
        path.symlink_to(folder / "target")
        codes = (0,)
    else:
        path.write_bytes(b"")
        path.chmod(0o600)
        codes = (0,)
    kept = path.read_bytes() if path.is_file() else None
    given = [a.format(study=study, path=path) for a in OUTPUTS[command]]
    cli(*given, codes=codes)
    assert ledger.read_bytes() == before
    if codes == (2,):
        assert kept == (path.read_bytes() if path.is_file() else None)
    elif kind == "dangling":
        assert path.is_symlink()
        assert (folder / "target").stat().st_size > 0
    else:
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.stat().st_size > 0


@fuzz(
    "pages and figures of others",
    st.tuples(
        st.sampled_from(["README.md", "toy_changing_sign/README.md", "figures/toys.png"]),
        raw
        | words.map(str.encode)
        | st.just(b"# Mine\n\n<!-- claims: generated by upgd results -->\n<!-- /claims -->\n"),
        st.booleans(),
    ),
)
def _(folder: Path, case: tuple[str, bytes, bool]) -> None:
    name, content, tables = case
    (folder / "figures").mkdir()
    (folder / "toy_changing_sign").mkdir()
    if tables:
        write(made_up("toy-changing-sign"), folder / "toy_changing_sign" / TABLE)
    (folder / name).write_bytes(content)
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    cli("results", folder, codes=(2,))
    assert files == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@fuzz(
    "encodings and widths of terminals",
    st.tuples(
        st.sampled_from(
            ["show", "list", "best", "export", "watch --once", "show --problem=\u2113"]
        ),
        st.sampled_from(["ascii", "latin-1", "utf-8", "cp1252", "utf-16"]),
        st.integers(-5, 200).map(str) | st.text("0123456789", max_size=4) | st.just("wide"),
        bytes_names.map(os.fsdecode),
    ),
)
def _(folder: Path, case: tuple[str, str, str, str]) -> None:
    command, charset, columns, name = case
    assume(name not in (".", ".."))
    try:
        study = shutil.copytree(small_study(), folder / name)
    except (OSError, ValueError):
        assume(False)  # no name for a folder
    verb, *options = command.split()
    given = [verb, *options, *([] if verb == "list" else [f"{study}"])]
    runner = CliRunner(charset=charset, env={"COLUMNS": columns})
    result = runner.invoke(app, given)
    assert result.exit_code == (2 if options == ["--problem=\u2113"] else 0), result.output
    assert "codec" not in result.output


@fuzz(
    "cached code cut and changed", st.tuples(damage(20_000), st.sampled_from(["nbi", "nbc", "py"]))
)
def _(folder: Path, case: tuple[Callable[[bytes], bytes], str]) -> None:
    pytest.importorskip("numba")
    from tests.test_caches import hits

    harm, suffix = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UPGD_CACHE", str(folder))
        assert hits() == 0
        for file in folder.rglob(f"*.{suffix}"):
            file.write_bytes(harm(file.read_bytes()))
        hits()
        assert hits() == 2


# ---- streams of one's own

things = st.none() | floats | words | huge | st.lists(floats, max_size=3) | st.just({}) | raw


@fuzz(
    "iterables of other things",
    st.tuples(
        st.lists(st.tuples(things, things) | things, max_size=4),
        st.sampled_from([(), (1,), (2,), (2, 2)]),
        st.sampled_from(["cross_entropy", "squared_error"]),
        st.integers(1, 2),
    ),
)
def _(folder: Path, case: tuple[list[Any], tuple[int, ...], Any, int]) -> None:
    samples, shape, loss, batch = case
    stream = from_iterable(samples, shape, 2, loss)
    for step in range(3):
        found = refused(lambda s=step: stream.at(s, batch), ValueError, StreamEndedError)  # type: ignore[misc]
        if found is None:
            break
        assert found.x.shape == (batch, *shape)
        assert found.y.shape == ((batch,) if loss == "cross_entropy" else (batch, 2))


@fuzz(
    "settings of the engine",
    st.builds(
        Setting,
        method=st.sampled_from(["sgd", "upgd", "none"]),
        hyper=st.dictionaries(st.sampled_from(["lr", "sigma", "x"]), floats),
        seed=st.integers(0, 2**63 - 1) | st.sampled_from([0, 2**63 - 1]),
        window=st.integers(-3, 8),
        batch=st.integers(-3, 8),
        restart=st.booleans(),
        held_out=st.integers(-3, 8),
        stride=st.integers(-3, 8),
    ),
)
def _(folder: Path, setting: Setting) -> None:
    stream = from_iterable([([1.0, 2.0], 1), ([0.0, 1.0], 0)] * 40, (2,), 2)

    def make() -> EagerRun:
        return EagerRun(stream, lambda seed, task: build([2, 3, 2], seed), setting)

    engine = refused(make, ValueError, KeyError)
    if engine is not None:
        refused(lambda: engine.advance(4), ArithmeticError)
        state = json.dumps(engine.state()[1])
        assert json.loads(state)["step"] == engine.step


# ---- optimizers

WEIGHTWISE = ["upgd", "upgd-2nd-local", "ada-upgd", "s-rwalk", "sgdw", "pgd"]
SHAPES = ((4, 3), (3, 3), (5,))
KERNELS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "upgd"


class Learner:
    """Three parameters, an optimizer that has made a step, and derivatives for the next ones."""

    def __init__(self, method: str, path: str) -> None:
        os.environ.setdefault("UPGD_CACHE", str(KERNELS))  # not in a folder that must stay empty
        self.row = METHODS[method]
        generator = torch.Generator().manual_seed(1)
        self.params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        self.opt = self.row.optimizer(self.params, seed=3, **self.row.options, **PATHS[path])
        self.derive()
        self.opt.step()
        self.derive()

    def derive(self) -> None:
        for p in self.params:
            p.grad, p.curvature = torch.ones_like(p), torch.ones_like(p)  # type: ignore[attr-defined]

    def step(self) -> Any:
        errors = (ValueError, TypeError, FloatingPointError)
        return refused(lambda: self.opt.step() or True, *errors)

    @property
    def tensors(self) -> list[torch.Tensor]:
        states = [t for s in self.opt.state.values() for t in s.values()]
        return [*(p.detach() for p in self.params), *states]

    def assert_finite(self) -> None:
        assert all(bool(t.isfinite().all()) for t in self.tensors)


def same(a: Any, b: Any) -> bool:
    """Whether two state dicts are equal."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def resized_storage(t: torch.Tensor, number: int) -> None:
    t.untyped_storage().resize_(number)


def other_data(t: torch.Tensor, number: int) -> None:
    t.data = torch.ones((number, 3) if number % 2 else (number,))


def other_layout(t: torch.Tensor, number: int) -> None:
    t.data = t.data.t() if number % 2 else t.data.flatten()[:1].expand(t.shape)


def other_type(t: torch.Tensor, number: int) -> None:
    t.data = t.data.to([torch.float64, torch.float16, torch.bfloat16][number % 3])


def other_size(t: torch.Tensor, number: int) -> None:
    learned = t.requires_grad
    t.requires_grad_(False).resize_(number, 2).fill_(1).requires_grad_(learned)


@fuzz(
    "tensors changed between steps",
    st.tuples(
        st.sampled_from(WEIGHTWISE),
        st.sampled_from(list(PATHS)),
        st.sampled_from(["weight", "gradient", "state", "replaced state", "clock"]),
        st.sampled_from([resized_storage, other_data, other_layout, other_type, other_size]),
        st.integers(0, 60),
    ),
)
def _(folder: Path, case: tuple[str, str, str, Callable[[torch.Tensor, int], None], int]) -> None:
    method, path, which, change, number = case
    learner = Learner(method, path)
    p = learner.params[1]
    state = learner.opt.state[p]
    names = learner.row.states if which.endswith("state") else ("step",)
    assume(names)
    name = names[number % len(names)]
    if which == "replaced state" or (path == "packed" and which == "state"):
        state[name] = state[name].clone()  # packed states share a storage with others
    target = {"weight": p, "gradient": p.grad}.get(which, state[name])
    assert target is not None
    try:
        change(target, number)
    except RuntimeError:  # PyTorch refuses it
        assume(False)
    before = learner.opt.param_groups[0]["noise_step"]
    if learner.step() is None:
        assert learner.opt.param_groups[0]["noise_step"] == before
        return
    learner.assert_finite()
    learner.derive()
    if learner.step() is not None:
        learner.assert_finite()


@fuzz(
    "numbers that a step reads",
    st.tuples(
        st.sampled_from(WEIGHTWISE),
        st.sampled_from(list(PATHS)),
        st.lists(
            st.tuples(st.sampled_from(["weight", "gradient", "curvature"]), st.floats(width=32)),
            min_size=1,
            max_size=4,
        ),
    ),
)
def _(folder: Path, case: tuple[str, str, list[tuple[str, float]]]) -> None:
    method, path, planted = case
    learner = Learner(method, path)
    for which, number in planted:
        learner.derive()
        p = learner.params[0]
        kept = p.detach().clone()
        target = {"weight": p.data, "gradient": p.grad, "curvature": p.curvature}[which]  # type: ignore[attr-defined]
        assert target is not None
        target[1, 2] = number
        before = [t.clone() for t in learner.tensors]
        skipped = int(learner.opt.skipped_steps)
        done = learner.step() is not None and int(learner.opt.skipped_steps) == skipped
        if done:
            learner.assert_finite()
        else:
            pairs = zip(before, learner.tensors, strict=True)
            assert all(
                x.dim() == 0 or torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs
            )
            p.data.copy_(kept)


def entries(saved: Any) -> list[tuple[Any, Any]]:
    """All places of a state dict: container and key."""
    found = []
    pairs = saved.items() if isinstance(saved, dict) else enumerate(saved)
    for key, value in pairs:
        found.append((saved, key))
        if isinstance(value, dict | list):
            found += entries(value)
    return found


@fuzz(
    "state dicts of optimizers",
    st.tuples(
        st.sampled_from(WEIGHTWISE),
        st.sampled_from(list(PATHS)),
        st.integers(0, 200),
        things | st.builds(torch.full, st.tuples(st.integers(0, 4)), st.floats(-3, 3)),
        st.booleans(),
    ),
)
def _(folder: Path, case: tuple[str, str, int, Any, bool]) -> None:
    method, path, place, value, remove = case
    learner = Learner(method, path)
    saved = copy.deepcopy(learner.opt.state_dict())
    places = entries(saved)
    container, key = places[place % len(places)]
    if remove:
        container.pop(key)
    else:
        container[key] = value
    before = copy.deepcopy(learner.opt.state_dict())
    loaded = refused(
        lambda: learner.opt.load_state_dict(saved) or True,
        ValueError,
        TypeError,  # type: ignore[func-returns-value]
    )
    if loaded is None:
        assert same(learner.opt.state_dict(), before)
    large = [v for v in learner.opt.param_groups[0].values() if isinstance(v, float) and v > 1e3]
    if not large:  # such settings are allowed, and may overflow a weight at once
        learner.derive()
        learner.step()
        learner.assert_finite()


# ---- all of them


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("many", [SOME, pytest.param(EACH, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CLASSES)
def test_malformed(name: str, many: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cases, act = CLASSES[name]
    monkeypatch.setenv("UPGD_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    count = 0

    @settings(
        max_examples=many,
        phases=[Phase.generate],  # a case is small; making it smaller takes minutes
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def each(case: Any) -> None:
        nonlocal count
        with tempfile.TemporaryDirectory() as folder, no_hang():
            os.chmod(folder, 0o755)
            act(Path(folder), case)
        count += 1

    each()
    assert count >= many, f"only {count} cases"
    left = {path.name for path in tmp_path.iterdir()} - {"matplotlib"}  # its list of fonts
    assert not left


def test_there_are_enough() -> None:
    assert len(CLASSES) >= 20
    assert len(CLASSES) * EACH >= 2000
