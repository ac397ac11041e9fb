"""Files that commands write: what they may replace, where links lead, who may read them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from tests.running import work
from tests.test_pages import made_up
from upgd.cli import app
from upgd.ledger import Ledger, RunSpec, StudyError, save_checkpoint, write_atomically
from upgd.paper.pages import PAGE_MARK
from upgd.paper.results import TABLE, write

posix = pytest.mark.skipif(os.name == "nt", reason="permissions and pipes of POSIX")
TOY = "toy-changing-inputs"


@pytest.fixture(scope="module")
def made_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs") / "study"
    with Ledger.open(folder) as ledger:
        options = {"window": 2, "hidden": "4"}
        ledger.add([RunSpec(TOY, "sgd", {"lr": lr}, 0, 4, options) for lr in (0.1, 0.01)])
        work(ledger)
    return folder


@pytest.fixture
def study(made_study: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made_study, tmp_path / "study"))


def cli(*arguments: Any) -> Any:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result


def refused(*arguments: Any) -> str:
    """Exit code 2 and one line, which is returned."""
    result = cli(*arguments)
    assert result.exit_code == 2, result.output
    [line] = result.stderr.splitlines()
    assert line.startswith("upgd: ")
    return str(line)


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# By name, the arguments that make a command write a file.
WRITERS: dict[str, tuple[str, Callable[[Path, Path], list[Any]]]] = {
    "export": (".csv", lambda study, path: ["export", study, "--output", path]),
    "series": (".csv", lambda study, path: ["export", study, "--metric=loss", "--output", path]),
    "plot": (".svg", lambda study, path: ["plot", study, "--output", path]),
    "best": (".png", lambda study, path: ["best", study, "--plot", path]),
    "report": (".html", lambda study, path: ["report", study, "--output", path]),
    "search": (
        ".json",
        lambda study, path: ["search", "toys", "--no-run", "--study", study, "--save", path],
    ),
}
writers = pytest.mark.parametrize("name", WRITERS)


def write_by(name: str, study: Path, path: Path) -> Any:
    result = cli(*WRITERS[name][1](study, path))
    assert result.exit_code == 0, result.output
    return result


# ------------------------------------------------------------------ what a name leads to
@posix
@writers
def test_a_link_stays_and_its_file_is_replaced(name: str, study: Path, tmp_path: Path) -> None:
    suffix = WRITERS[name][0]
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / f"file{suffix}", tmp_path / f"link{suffix}"
    for made in (False, True):  # the file is not there yet, and is
        link.unlink(missing_ok=True)
        link.symlink_to(Path("there") / target.name)
        assert target.exists() == made
        write_by(name, study, link)
        assert link.is_symlink()
        assert target.stat().st_size > 0
        assert os.listdir(target.parent) == [target.name]


@posix
@writers
@pytest.mark.parametrize(
    "mode", [0o640, *(pytest.param(m, marks=pytest.mark.slow) for m in (0o600, 0o444))]
)
def test_permissions_stay(name: str, mode: int, study: Path, tmp_path: Path) -> None:
    path = tmp_path / f"file{WRITERS[name][0]}"
    path.write_bytes(b"")
    path.chmod(mode)
    write_by(name, study, path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.stat().st_size > 0


@posix
def test_a_new_file_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "new", b"1")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


@posix
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_the_owner_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    os.chown(path, 1234, 2345)
    write_atomically(path, b"new")
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 2345)


@posix
@writers
def test_a_pipe_is_written_to(name: str, study: Path, tmp_path: Path) -> None:
    pipe = tmp_path / f"pipe{WRITERS[name][0]}"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_by(name, study, pipe)
    reader.join(timeout=60)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert read[0]


@posix
@pytest.mark.parametrize("name", ["export", "series", "search"])
def test_a_device_stays_a_device(name: str, study: Path, tmp_path: Path) -> None:
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    write_by(name, study, link)
    assert link.is_symlink()
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@posix
@pytest.mark.parametrize("kind", ["pipe", pytest.param("file", marks=pytest.mark.slow)])
def test_standard_output_gets_the_table_alone(kind: str, study: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "upgd.cli", "export", str(study), "--output", "/dev/stdout"]
    if kind == "pipe":
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        table = done.stdout
    else:
        with open(tmp_path / "table.csv", "w") as file:
            file.write("before\n")
            file.flush()
            subprocess.run(command, stdout=file, stderr=subprocess.PIPE, check=True)
        before, _, table = (tmp_path / "table.csv").read_text().partition("\n")
        assert before == "before"
    assert table.startswith("key,problem,")
    assert len(table.splitlines()) == 3


# ------------------------------------------------------------------- what is never replaced
@writers
@pytest.mark.parametrize("place", ["ledger", "link", "wal", "shm", "new", "checkpoint", "worker"])
def test_a_study_is_not_replaced(name: str, place: str, study: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(study, tmp_path / "other"))
    suffix = WRITERS[name][0]
    (other / "checkpoints").mkdir(exist_ok=True)
    (other / "workers").mkdir(exist_ok=True)
    (tmp_path / "empty").mkdir()
    moved = tmp_path / f"moved{suffix}"
    shutil.copy(other / "ledger.sqlite", moved)
    (tmp_path / f"link{suffix}").symlink_to(other / "ledger.sqlite")
    path = {
        "ledger": moved,
        "link": tmp_path / f"link{suffix}",
        "wal": other / "ledger.sqlite-wal",
        "shm": other / "ledger.sqlite-shm",
        "new": tmp_path / "empty" / "ledger.sqlite",
        "checkpoint": other / "checkpoints" / f"x{suffix}",
        "worker": other / "workers" / f"x{suffix}",
    }[place]
    before = content(tmp_path)
    refused(*WRITERS[name][1](study, path))
    assert content(tmp_path) == before


def test_checkpoints_are_still_saved(study: Path) -> None:
    (study / "checkpoints").mkdir(exist_ok=True)
    save_checkpoint(study / "checkpoints" / "x.npz", {"w": np.ones(2)}, {})
    with pytest.raises(StudyError, match="a study keeps its own files there"):
        write_atomically(study / "checkpoints" / "x.npz", b"")


@posix
def test_converted_data_keep_links_and_permissions(tmp_path: Path) -> None:
    np.savez(tmp_path / "source.npz", inputs=np.zeros((2, 3), np.float32), labels=[0, 1])
    target, link = tmp_path / "file.npz", tmp_path / "link.npz"
    target.write_bytes(b"")
    target.chmod(0o600)
    link.symlink_to(target.name)
    done = cli("data", "convert", tmp_path / "source.npz", link, "--force", "--quiet")
    assert done.exit_code == 0, done.output
    assert link.is_symlink()
    assert target.stat().st_size > 0
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_converted_data_replace_no_checkpoint(study: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "source.npz", inputs=np.zeros((2, 3), np.float32), labels=[0, 1])
    (study / "checkpoints").mkdir(exist_ok=True)
    save_checkpoint(study / "checkpoints" / "x.npz", {"w": np.ones(2)}, {})
    before = content(tmp_path)
    target = study / "checkpoints" / "x.npz"
    refused("data", "convert", tmp_path / "source.npz", target, "--force")
    assert content(tmp_path) == before


# ----------------------------------------------------------------- what nobody named
@pytest.fixture
def tables(tmp_path: Path) -> Path:
    folder = tmp_path / "tables"
    (folder / "toy_changing_sign").mkdir(parents=True)
    write(made_up("toy-changing-sign"), folder / "toy_changing_sign" / TABLE)
    return folder


@pytest.mark.parametrize(
    "name", ["README.md", "toy_changing_sign/README.md", "figures/toys.png", "figures/toys.svg"]
)
def test_results_replaces_nothing_that_it_did_not_write(name: str, tables: Path) -> None:
    mine = tables / name
    mine.parent.mkdir(exist_ok=True)
    block = "<!-- grids: generated by upgd results -->\n<!-- /grids -->\n"  # a part, not a page
    mine.write_text(f"# Mine\n\n{block}")
    before = content(tables)
    assert name in refused("results", tables)
    assert content(tables) == before


@pytest.mark.slow  # draws all figures
def test_results_replaces_what_it_wrote(tables: Path) -> None:
    assert cli("results", tables).exit_code == 0
    page = tables / "README.md"
    written = page.read_text(encoding="utf-8")
    page.write_text(f"{PAGE_MARK} of last year -->\n")
    assert cli("results", tables).exit_code == 0
    assert page.read_text(encoding="utf-8") == written


def test_results_needs_tables(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Mine\n")
    before = content(tmp_path)
    assert "no tables" in refused("results", tmp_path)
    assert content(tmp_path) == before


@pytest.mark.slow
def test_results_writes_nothing_where_a_page_is_wrong(tables: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- weather: generated by upgd results -->\n<!-- /weather -->\n")
    before = content(tables)
    assert "nothing makes 'weather'" in refused("results", tables, "--page", page)
    assert content(tables) == before
    assert not (tables / "figures").exists()


@pytest.mark.parametrize(("command", "name"), [("plot", "loss.png"), ("report", "report.html")])
def test_a_file_that_nobody_named_is_kept(command: str, name: str, study: Path) -> None:
    mine = study / name
    mine.write_bytes(b"mine")
    assert name in refused(command, study)
    assert mine.read_bytes() == b"mine"
    mine.unlink()
    for _ in range(2):
        assert cli(command, study).exit_code == 0
    assert mine.stat().st_size > 1000


@pytest.mark.parametrize("name", ["demo.png", "demo.html"])
def test_the_demo_keeps_files_of_others(name: str, tmp_path: Path) -> None:
    study = tmp_path / "demo"
    study.mkdir()
    (study / name).write_bytes(b"mine")
    assert name in refused("demo", "--study", study)
    assert os.listdir(study) == [name]


def test_reproduce_keeps_files_of_others(tmp_path: Path) -> None:
    study = tmp_path / "study"
    study.mkdir()
    (study / "toys.png").write_bytes(b"mine")
    arguments = ("reproduce", "toys", "--study", study, "--scale", "0.001", "--seeds", "1")
    assert "toys.png" in refused(*arguments)
    assert os.listdir(study) == ["toys.png"]


# ------------------------------------------------------- mistakes are found before the work
@pytest.mark.parametrize(
    "arguments",
    [
        ("reproduce", "toys", "--format", "png,exe"),
        ("reproduce", "toys", "--format", ","),
        ("reproduce", "toys", "--results", "{file}"),
        ("reproduce", "toys", "--results", "{file}/x"),
        ("demo", "--output", "{file}/page.html"),
        ("demo", "--output", "{folder}/page.html"),
        ("search", "toys", "--save", "{folder}"),
        ("search", "toys", "--save", "{folder}/nowhere/x.json"),
        ("search", "toys", "--save", "{file}"),
    ],
)
def test_a_wrong_output_is_refused_before_anything_runs(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder" / "page.html").mkdir(parents=True)
    named = {"file": tmp_path / "file", "folder": tmp_path / "folder"}
    refused(*(a.format(**named) for a in arguments), "--study", tmp_path / "study")
    assert not (tmp_path / "study").exists()
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("command", [("plot", "--output"), ("best", "--plot")])
def test_a_figure_without_a_format_is_refused_before_the_study_is_read(
    command: tuple[str, str], tmp_path: Path
) -> None:
    line = refused(command[0], tmp_path / "nowhere", command[1], tmp_path / "figure.exe")
    assert ".exe" in line
    assert "png" in line
