"""What tests of studies share that earlier versions made."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.ledgers import PROCESSES, crash_at
from tests.waiting import PATIENCE
from upgd.cli import app
from upgd.ledger import Ledger, load_checkpoint, save_checkpoint
from upgd.ledger import crash_points as crash
from upgd.ledger.checking import check_study
from upgd.ledger.records import from_blob
from upgd.ledger.versions import versions

DATA = Path(__file__).parent / "data"


def copied(old: Path, folder: Path) -> Path:
    """A copy whose checkpoints are of the libraries that are installed here."""
    shutil.copytree(old, folder)
    for path in (folder / "checkpoints").iterdir():
        arrays, facts = load_checkpoint(path)
        facts["stack"] |= versions()
        save_checkpoint(path, arrays, facts)
    return folder


def rows(old: Path) -> Iterator[dict[str, Any]]:
    """What an old ledger has, read without upgd."""
    db = sqlite3.connect(f"{old.as_uri()}/ledger.sqlite?immutable=1", uri=True)
    db.row_factory = sqlite3.Row
    query = "SELECT runs.*, summary, started FROM runs LEFT JOIN results USING (key)"
    for row in db.execute(query).fetchall():
        series = db.execute("SELECT metric, data FROM series WHERE key = ?", (row["key"],))
        yield {**dict(row), "series": {metric: from_blob(data) for metric, data in series}}
    db.close()


def dump(folder: Path) -> list[str]:
    """All tables of a ledger."""
    db = sqlite3.connect(folder / "ledger.sqlite")
    found = list(db.iterdump())
    db.close()
    return found


def content(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def _open_and_exit(folder: Path, number: int) -> None:
    crash.point = crash_at(number, lambda: os._exit(7))
    Ledger.open(folder).close()


def assert_kills_lose_nothing(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int, checkpoints: int
) -> None:
    """Wherever the first opening is killed, the next one ends it; `kept` runs are left."""
    whole = tmp_path / "whole"
    shutil.copytree(study, whole)
    names: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(crash, "point", names.append)
        Ledger.open(whole).close()
    assert sum(name == "write: before replace" for name in names) == checkpoints
    expected, files = dump(whole), content(whole / "checkpoints")
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        shutil.copytree(study, folder)
        process = PROCESSES.Process(target=_open_and_exit, args=(folder, number))
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == 7, name
        with Ledger.open(folder, read_only=True) as ledger:
            assert sum(ledger.counts().values()) == kept, name
        Ledger.open(folder).close()
        assert dump(folder) == expected, name
        assert content(folder / "checkpoints").items() >= files.items(), name
        assert check_study(folder).lines == [], name
