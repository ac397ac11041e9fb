"""The ledger and its files on disks that are full, read-only or of the network."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ledgers import (
    PROCESSES,
    CrashError,
    check,
    forking,
    posix,
    result_of,
    specs,
)
from tests.waiting import PATIENCE
from upgd.ledger import (
    CheckpointError,
    Ledger,
    LedgerError,
    StudyError,
    load_checkpoint,
    save_checkpoint,
    write_atomically,
)
from upgd.ledger import network_disks as disks

# ---- disks


def test_network_disks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "network_filesystem", lambda path: "nfs4")
    with pytest.raises(LedgerError, match=r"nfs4.*--study.*exclusive=True"):
        Ledger.open(tmp_path)
    with Ledger.open(tmp_path, exclusive=True) as ledger:
        ledger.add(specs(1))
        [claim] = ledger.claim("me", 60)
        ledger.finish(claim, result_of(claim.spec))
        monkeypatch.setattr("upgd.ledger.database.BUSY_SECONDS", 0.1)
        with pytest.raises(LedgerError, match="in use by another process"):
            Ledger.open(tmp_path, exclusive=True)
    assert [file.name for file in tmp_path.iterdir()] == ["ledger.sqlite"]
    monkeypatch.setattr(disks, "network_filesystem", lambda path: None)
    with Ledger.open(tmp_path) as ledger:
        assert ledger.counts()["done"] == 1


def test_the_deepest_mount_counts() -> None:
    mounts = disks.parse_mounts(
        "/dev/sda / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\n"
        "/dev/sdb /home/ann/local\\040disk xfs rw 0 0\nann@b: /mnt/b fuse.sshfs rw 0 0\nodd\n"
    )
    where = {
        "/home/ann/study": "nfs4",
        "/home": "nfs4",
        "/homes/ann": "ext4",
        "/home/ann/local disk/study": "xfs",
        "/mnt/b/x": "fuse.sshfs",
        "/": "ext4",
    }
    assert {path: disks.filesystem_of(path, mounts) for path in where} == where
    assert {"nfs4", "cifs", "smbfs", "9p", "fuse.sshfs"} <= disks.NETWORK


@contextlib.contextmanager
def read_only_study(before: Callable[[Path], None] | None = None) -> Iterator[Path]:
    """A study with a done run in a folder that cannot be written, as a user who is not root."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Ledger.open(folder) as ledger:
            ledger.add(specs(2))
            [claim] = ledger.claim("me", 60)
            ledger.finish(claim, result_of(claim.spec))
        if before:
            before(folder)
        root = os.geteuid() == 0
        for file in folder.iterdir():
            file.chmod(0o444)
        folder.chmod(0o555)
        if root:
            os.seteuid(65534)
        try:
            if not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
                pytest.skip("temporary folders are private here")
            yield folder
        finally:
            if root:
                os.seteuid(0)
            folder.chmod(0o755)


@posix
def test_read_only_folder(tmp_path: Path) -> None:
    with read_only_study() as folder:
        with pytest.raises(LedgerError, match="cannot be opened or written") as caught:
            Ledger.open(folder)
        assert "\n" not in str(caught.value)
        with pytest.raises(LedgerError, match="cannot use"):
            Ledger.open(folder / "new")
        with Ledger.open(folder, read_only=True) as ledger:
            assert [run.state for run in ledger.runs()] == ["done", "pending"]
            with pytest.raises(LedgerError, match="cannot be opened or written"):
                ledger.add(specs(3))
            assert ledger.counts()["done"] == 1
        with pytest.raises(StudyError, match="cannot write"):
            write_atomically(folder / "x", b"")


def _add_and_die(folder: Path) -> None:
    ledger = Ledger.open(folder)
    ledger.add(specs(5))
    os._exit(0)


@forking
@pytest.mark.parametrize("index", [True, False])
def test_read_only_folder_of_a_killed_process(index: bool) -> None:
    def kill(folder: Path) -> None:
        process = PROCESSES.Process(target=_add_and_die, args=(folder,))
        process.start()
        process.join(PATIENCE)
        if not index:
            (folder / "ledger.sqlite-shm").unlink()

    with read_only_study(kill) as folder:
        if index:
            with Ledger.open(folder, read_only=True) as ledger:
                assert ledger.counts()["pending"] == 4
        else:
            with pytest.raises(LedgerError, match="copy the folder"):
                Ledger.open(folder, read_only=True)


def test_reading_beside_a_writer(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as writer:
        writer.add(specs(2))
        with Ledger.open(tmp_path, read_only=True) as reader:
            assert reader.counts()["pending"] == 2
            writer.add(specs(5))
            assert reader.counts()["pending"] == 5
            with pytest.raises(LedgerError):
                reader.claim("me", 60)
            assert len(writer.claim("me", 60, limit=9)) == 5


@contextlib.contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """What a full disk looks like: writes fail from some point on."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@posix
@pytest.mark.parametrize("room", [0, 40_000, 300_000])
def test_full_disk(tmp_path: Path, room: int) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs(50))
        claims = ledger.claim("me", 60, limit=50)
        ledger.finish(claims[0], result_of(claims[0].spec))
        finished = 1

        def finish_all() -> None:
            nonlocal finished
            for claim in claims[1:]:
                ledger.finish(claim, result_of(claim.spec, windows=5000))
                finished += 1

        with no_file_larger_than(room):
            with pytest.raises(LedgerError, match="the disk is full or failing") as caught:
                finish_all()
            assert "\n" not in str(caught.value)
            assert ledger.counts()["done"] == finished
            assert len(list(ledger.runs(state="done"))) == finished
            with pytest.raises(StudyError, match="cannot write"):
                write_atomically(tmp_path / "file", bytes(room + 1))
        assert not (tmp_path / "file").exists()
        for claim in claims[finished:]:
            ledger.finish(claim, result_of(claim.spec))
        assert ledger.counts()["done"] == 50
    check(tmp_path)


@posix
def test_full_disk_at_the_start(tmp_path: Path) -> None:
    with no_file_larger_than(0), pytest.raises(LedgerError, match="full or failing"):
        Ledger.open(tmp_path)
    with Ledger.open(tmp_path) as ledger:
        assert ledger.add(specs(3)) == (3, 0)
    with no_file_larger_than(0), Ledger.open(tmp_path, read_only=True) as ledger:
        assert ledger.counts()["pending"] == 3


# ---- files


def test_a_failing_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def half(file: Any) -> None:
        file.write(b"ne")
        raise CrashError

    with pytest.raises(CrashError):
        write_atomically(path, half)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


dtypes = st.sampled_from(["float32", "float64", "float16", "int64", "uint8", "bool", "U3"])
shapes = st.lists(st.integers(0, 3), max_size=3)
array_names = st.text(st.sampled_from("abw./_0ü"), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(array_names, st.tuples(dtypes, shapes), max_size=4),
    st.dictionaries(st.text(max_size=5), st.integers() | st.booleans() | st.none()),
    st.data(),
)
def test_checkpoints_round_trip_and_notice_damage(
    kinds: dict[str, Any], meta: dict[str, Any], data: st.DataObject
) -> None:
    arrays = {name: np.ones(shape).astype(dtype) for name, (dtype, shape) in kinds.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.npz"
        save_checkpoint(path, arrays, meta)
        loaded, facts = load_checkpoint(path)
        assert facts == meta
        assert list(loaded) == list(arrays)
        for name, array in arrays.items():
            assert loaded[name].dtype == array.dtype
            np.testing.assert_array_equal(loaded[name], array)
        whole = path.read_bytes()
        save_checkpoint(path, arrays, meta)
        assert path.read_bytes() == whole
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
            load_checkpoint(path)


def test_foreign_files_are_no_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_checkpoint(path)
    np.savez(path, w=np.ones(3))
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load_checkpoint(path)
    np.savez(path, **{"__meta__": np.array([{}], dtype=object)})
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load_checkpoint(path)
    save_checkpoint(path, {"file": np.ones(3), "w": np.zeros(1000)}, {})
    flipped = bytearray(path.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load_checkpoint(path)
    for arrays in ({"w": np.array([{}], dtype=object)}, {"__meta__": np.ones(1)}):
        with pytest.raises(ValueError, match="array"):
            save_checkpoint(path, arrays, {})
    with pytest.raises(ValueError, match="JSON"):
        save_checkpoint(path, {}, {"x": object()})
