"""Damaged ledgers: what is printed is what was written, or an error; and the way back."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from tests.ledgers import CrashError, crash_at, raise_crash
from tests.running import work
from tests.test_ledger_crashes import old_ledger
from upgd.cli import app
from upgd.ledger import Ledger, LedgerError, Result, RunSpec, Series, save_checkpoint, schema
from upgd.ledger import crash_points as crash
from upgd.ledger.errors import DamagedError

TOY = "toy-changing-inputs"


def toy(seed: int, **options: Any) -> RunSpec:
    return RunSpec(TOY, "sgd", {"lr": 0.01}, seed, 4, {"window": 2, "hidden": "4", **options})


def call(*arguments: Any) -> Any:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    return result


def fill(folder: Path, runs: int, windows: int) -> None:
    """A study with runs in every state that a study at rest has."""
    rng = np.random.default_rng(0)
    with Ledger.open(folder) as ledger:
        ledger.add(toy(seed) for seed in range(runs))
        for claim in ledger.claim("me", 60, limit=runs - 1):
            values = rng.random((2, windows))
            series = {"accuracy": Series(values[0], 2), "loss": Series(values[1], 2)}
            summary = {"accuracy": values[0].mean(), "loss": values[1].mean()}
            result = Result("eager", wall=0.5, summary=summary, series=series)
            kind = claim.spec.seed % 8
            if kind == 5:
                ledger.finish(claim, replace(result, diverged_at=3))
            elif kind == 6:
                ledger.fail(claim, f"seed {claim.spec.seed} had no luck", retry=False)
            else:
                ledger.finish(claim, result)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be copied."""
    folder = tmp_path_factory.mktemp("whole")
    fill(folder, runs=24, windows=60)
    return folder


def printed(folder: Path) -> dict[str, str]:
    """By command, what is told of a study; an error where there is one."""
    found = {}
    table = folder / "table.csv"
    for command in ("show", "show --json", "export", "export --metric loss"):
        name, *options = command.split()
        table.unlink(missing_ok=True)
        to = ("--output", table) if name == "export" else ()
        result = call(name, folder, *options, *to)
        if result.exit_code == 0:
            text = table.read_text() if to else result.stdout
            found[command] = text.replace(str(folder), "STUDY")
            continue
        assert result.exit_code == 2
        assert result.stderr.startswith("upgd: ")
        assert result.stderr.count("\n") == 1
        assert not table.exists()
        found[command] = "refused"
    return found


def flip_bit(content: bytearray, rng: random.Random) -> None:
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def flip_in_a_page_s_head(content: bytearray, rng: random.Random) -> None:
    """Where SQLite says what the page is, how many rows it has and where they are."""
    place = 4096 * rng.randrange(len(content) // 4096)
    content[place + rng.randrange(60 if place else 160)] ^= 1 << rng.randrange(8)


def erase(content: bytearray, rng: random.Random) -> None:
    start, size = rng.randrange(len(content)), rng.choice([16, 512, 4096])
    content[start : start + size] = bytes(min(size, len(content) - start))


def swap_pages(content: bytearray, rng: random.Random) -> None:
    first, other = (4096 * rng.randrange(1, len(content) // 4096) for _ in range(2))
    one, two = content[first : first + 4096], content[other : other + 4096]
    content[first : first + 4096], content[other : other + 4096] = two, one


HARM = [flip_bit, flip_in_a_page_s_head, erase, swap_pages]


@pytest.mark.parametrize("many", [40, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("harm", HARM)
def test_damage_is_never_printed(
    study: Path, tmp_path: Path, harm: Callable[[bytearray, random.Random], None], many: int
) -> None:
    shutil.copytree(study, tmp_path / "copy")
    whole = (study / "ledger.sqlite").read_bytes()
    expected = printed(tmp_path / "copy")
    assert "refused" not in expected.values()
    rng, noticed = random.Random(harm.__name__), 0
    for number in range(many):
        content = bytearray(whole)
        harm(content, rng)
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "ledger.sqlite").write_bytes(content)
        found = printed(folder)
        for command, text in found.items():
            assert text in ("refused", expected[command]), (number, command)
        noticed += "refused" in found.values()
        shutil.rmtree(folder)
    assert noticed > 0


# ---- each cell that is printed

CHANGES = {
    "a state": "UPDATE runs SET state = 'failed' WHERE id = 2",
    "a specification": "UPDATE runs SET spec = replace(spec, '0.01', '0.02') WHERE id = 2",
    "attempts": "UPDATE runs SET attempts = 3 WHERE id = 2",
    "an error": "UPDATE runs SET error = 'out of memory' WHERE id = 7",
    "a seed": "UPDATE runs SET seed = 99 WHERE id = 2",
    "a summary": "UPDATE results SET summary = replace(summary, '0.', '1.') WHERE rowid = 2",
    "an engine": "UPDATE results SET engine = 'batched' WHERE rowid = 2",
    "seconds": "UPDATE results SET wall = 0.25 WHERE rowid = 2",
    "a window": "UPDATE series SET window = 3 WHERE rowid = 4",
    "values": "UPDATE series SET data = (SELECT data FROM series WHERE rowid = 2) WHERE rowid = 4",
    "a metric": "UPDATE series SET metric = 'lass' WHERE rowid = 4",
    "a lost series": "DELETE FROM series WHERE rowid = 4",
    "a lost result": "DELETE FROM results WHERE rowid = 2",
    "a lost run": "DELETE FROM runs WHERE id = 24",
    "swapped results": (
        "UPDATE results SET (summary, contents, checksum) = "
        "(SELECT summary, contents, checksum FROM results WHERE rowid = 3) WHERE rowid = 2"
    ),
}


def change(folder: Path, statement: str) -> None:
    db = sqlite3.connect(folder / "ledger.sqlite")
    db.execute(statement)
    db.commit()
    db.close()


@pytest.mark.parametrize("what", CHANGES)
def test_every_printed_cell_has_a_checksum(study: Path, tmp_path: Path, what: str) -> None:
    folder = shutil.copytree(study, tmp_path / "study")
    change(folder, CHANGES[what])
    key = toy(6 if what == "an error" else 1).key
    refused = [call("export", folder), call("export", folder, "--metric", "loss")]
    told = [one.stderr for one in refused if one.exit_code == 2]
    assert told, what
    for line in told:
        assert what == "a lost run" or key in line
        assert f"'upgd check {folder}'" in line
        assert "--repair" in line
    if what in ("a window", "values", "a lost series"):
        assert "'loss'" in told[0]
    found = call("check", folder)
    assert found.exit_code == 1
    assert "damaged: " in found.stdout
    lost = what in ("a lost run", "a specification")  # nothing says what it was
    assert call("check", folder, "--repair").exit_code == (1 if lost else 0)
    again = call("check", folder)
    assert (again.exit_code, "whole" in again.stdout) == (0, True)


def test_a_run_s_checksum_is_not_made_right_by_a_change(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add([toy(0), toy(1)])
        [claim] = ledger.claim("dead", 60)
        change(tmp_path, "UPDATE runs SET attempts = 7 WHERE id = 1")
        ledger.evict("dead")
        with pytest.raises(DamagedError, match=claim.spec.key):
            ledger.get(claim.spec.key)
        assert [one.spec for one in ledger.claim("me", 60, limit=9)] == [toy(1)]


@pytest.mark.slow
def test_one_damaged_run_does_not_hold_up_the_others(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add([toy(seed) for seed in range(4)])
    change(tmp_path, "UPDATE runs SET attempts = 7 WHERE id = 2")
    resumed = call("resume", tmp_path, "--engine", "eager", "--quiet")
    assert resumed.exit_code == 2
    assert toy(1).key in resumed.stderr
    assert call("check", tmp_path, "--repair").exit_code == 0
    with Ledger.open(tmp_path) as ledger:
        assert [run.state for run in ledger.runs()] == ["done", "pending", "done", "done"]
    assert call("resume", tmp_path, "--engine", "eager", "--quiet").exit_code == 0
    assert call("show", tmp_path).exit_code == 0


# ---- older ledgers


def test_older_ledgers_get_checksums(tmp_path: Path) -> None:
    old_ledger(tmp_path)
    assert "it has no checksums yet" in call("check", tmp_path).stdout
    assert call("export", tmp_path).exit_code == 0
    change(
        tmp_path, "UPDATE runs SET spec = replace(spec, '\"seed\":1', '\"seed\":3') WHERE id = 2"
    )
    with Ledger.open(tmp_path) as ledger:
        [key, other] = [
            run[0] for run in ledger._database._usable().execute("SELECT key FROM runs ORDER BY id")
        ]
        assert ledger.series(key, "loss").tolist() == [1.0, 2.0]
        with pytest.raises(DamagedError, match=other):  # a checksum does not make it right
            ledger.get(other)
    change(tmp_path, "UPDATE series SET data = x'0000803f' WHERE metric = 'loss'")
    with Ledger.open(tmp_path, read_only=True) as ledger:
        assert ledger.series(key, "accuracy").tolist() == [1.0, 2.0]
        with pytest.raises(DamagedError, match=f"'loss' of run {key}"):
            ledger.series(key, "loss")


def test_damaged_tables_are_told_in_one_line(study: Path, tmp_path: Path) -> None:
    """SQLite's message quotes them, whatever they hold."""
    content = (study / "ledger.sqlite").read_bytes()
    for damage in (b"\n", b"\xbf", b"\0", b"'"):
        (tmp_path / "ledger.sqlite").write_bytes(
            content.replace(b" NOT NULL", b"(" + 8 * damage, 1)
        )
        with pytest.raises(DamagedError) as caught:
            Ledger.open(tmp_path, read_only=True)
        assert "\n" not in str(caught.value)
        assert call("check", tmp_path, "--repair").exit_code == 2
        assert call("check", tmp_path).exit_code == 1
    assert not list(tmp_path.glob("*damaged*"))  # there is nothing to keep a copy for


def test_a_version_that_cannot_be_is_damage(study: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(study, tmp_path / "study")
    for version in range(schema.CHECKSUMS):
        change(folder, f"PRAGMA user_version = {version}")
        for read_only in (True, False):
            with pytest.raises(DamagedError, match=f"of version {version}"):
                Ledger.open(folder, create=False, read_only=read_only)
    assert call("check", folder, "--repair").exit_code == 0


# ---- repair


def run_results(folder: Path) -> dict[str, Any]:
    with Ledger.open(folder, read_only=True) as ledger:
        return {
            run.key: (run, [ledger.series(run.key, m).tobytes() for m in ledger.metrics(run.key)])
            for run in ledger.runs()
        }


def test_repair_keeps_what_is_sound(study: Path, tmp_path: Path) -> None:
    """A damaged state is known from the result; a damaged series is computed again."""
    folder = shutil.copytree(study, tmp_path / "study")
    expected = run_results(folder)
    for what in ("a state", "a window"):
        change(folder, CHANGES[what])
    change(folder, "UPDATE series SET data = x'00' WHERE rowid = 6")
    change(folder, "UPDATE runs SET key = 'x' WHERE id = 9 AND state = 'pending'")
    before = (folder / "ledger.sqlite").read_bytes()
    mended = call("check", folder, "--repair")
    assert mended.exit_code == 0, mended.stdout
    copied = (folder / "ledger.damaged-1.sqlite").read_bytes()
    assert copied[100:] == before[100:]  # all but what the header says about the log
    assert f"2 runs must be computed again: 'upgd resume {folder}'" in mended.stdout
    found = run_results(folder)
    assert list(found) == list(expected)
    for key, (run, series) in expected.items():
        if run.spec.seed in (1, 2):
            assert (found[key][0].state, found[key][0].result) == ("pending", None)
        else:
            assert found[key] == (run, series)


@pytest.mark.parametrize("page", range(2, 8))
def test_repair_after_a_page_is_erased(study: Path, tmp_path: Path, page: int) -> None:
    folder = shutil.copytree(study, tmp_path / "study")
    expected = run_results(folder)
    content = bytearray((folder / "ledger.sqlite").read_bytes())
    content[4096 * page : 4096 * (page + 1)] = bytes(4096)
    (folder / "ledger.sqlite").write_bytes(content)
    assert call("check", folder).exit_code == 1
    mended = call("check", folder, "--repair")
    found = run_results(folder)
    assert found.keys() <= expected.keys()
    assert (mended.exit_code == 1) == (len(found) < len(expected))
    for key, (run, series) in found.items():
        if run.result is not None:
            assert (run.result, series) == (expected[key][0].result, expected[key][1])
    assert call("check", folder).exit_code == 0


def test_a_crash_while_repairing_leaves_the_old_ledger_or_the_new_one(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    damage = CHANGES["a window"]
    whole = shutil.copytree(study, tmp_path / "whole")
    change(whole, damage)
    with monkeypatch.context() as patch:
        patch.setattr(crash, "point", names.append)
        assert call("check", whole, "--repair").exit_code == 0
    assert "repair: before commit" in names
    for number, name in enumerate(names):
        if name.startswith("migrate"):  # of the new tables, which are in no file yet
            continue
        folder = shutil.copytree(study, tmp_path / str(number))
        change(folder, damage)
        with monkeypatch.context() as patch:
            patch.setattr(crash, "point", crash_at(number, raise_crash))
            with pytest.raises(CrashError):
                call("check", folder, "--repair")
        assert call("check", folder).exit_code == (0 if name == "repair: after commit" else 1)
        assert call("check", folder, "--repair").exit_code == 0
        assert run_results(folder) == run_results(whole)


def test_a_study_at_work_is_not_repaired(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(study, tmp_path / "study")
    change(folder, CHANGES["a window"])
    monkeypatch.setattr("upgd.ledger.repairing.SECONDS", 0.1)
    with Ledger.open(folder) as ledger:
        refused = call("check", folder, "--repair")
        assert refused.exit_code == 2
        assert "in use by another process" in refused.stderr
        with pytest.raises(LedgerError):
            list(ledger.each_series())
    assert call("check", folder, "--repair").exit_code == 0


# ---- checkpoints


def test_checkpoints_are_checked(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add([toy(0), toy(1), toy(2)])
        work(ledger, where={"seed": 0})
    folder = tmp_path / "checkpoints"
    good = {"stack": {"run": toy(1).key}}
    for name in (toy(1).key, toy(2).key, "0" * 32):
        save_checkpoint(folder / f"{name}.npz", {"w": np.ones(50)}, good)
    (folder / f"{toy(0).key}.npz").write_bytes(b"PK")
    checked = call("check", tmp_path)
    assert checked.exit_code == 1
    lines = checked.stdout.splitlines()
    assert [sum(toy(seed).key in line for line in lines) for seed in range(3)] == [1, 2, 1]
    assert sum(line.startswith("damaged: checkpoint") for line in lines) == 3
    assert call("check", tmp_path, "--repair").exit_code == 0
    assert [file.stem for file in folder.glob("*.npz")] == [toy(1).key]
    assert call("resume", tmp_path, "--engine", "eager", "--quiet").exit_code == 0


def test_whole_studies_and_none(study: Path, tmp_path: Path) -> None:
    before = (study / "ledger.sqlite").read_bytes()
    whole = call("check", study, "--repair")  # there is nothing to repair
    assert whole.exit_code == 0
    assert whole.stdout.startswith("24 runs, 40 series, 0 checkpoints: whole")
    assert (study / "ledger.sqlite").read_bytes() == before
    assert call("check", tmp_path).exit_code == 2
    (tmp_path / "ledger.sqlite").write_text("a shopping list")
    assert call("check", tmp_path, "--repair").exit_code == 2
    assert (tmp_path / "ledger.sqlite").read_text() == "a shopping list"
