"""``upgd data``: what it finds, fetches, checks and writes, and how it tells mistakes."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import json
import struct
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

pytest.importorskip("typer")
pytest.importorskip("PIL.Image")
from typer.testing import CliRunner

from upgd.cli import app
from upgd.streams import DATASETS, PROBLEMS, DataError, files, load, read_sprites
from upgd.streams.readers import save_npz

pillow: Any = importlib.import_module("PIL.Image")
RNG = np.random.default_rng(7)
DIGITS = RNG.integers(0, 256, (6, 28, 28), dtype=np.uint8)
COLOUR = RNG.integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)
LABELS = np.array([3, 1, 4, 1, 5, 9], dtype=np.uint8)


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the data of the machine that it runs on."""
    monkeypatch.delenv("UPGD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "cache"))


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


def done(*arguments: object) -> Any:
    """A call that must succeed; its JSON."""
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def refused(said: str, *arguments: object) -> str:
    """A call that must end in one line that says this."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.output.count("\n") == 1, result.output
    assert said in result.output
    assert ";" in result.output  # and the way out
    return str(result.output)


def put_idx(
    folder: Path,
    prefix: str = "",
    images: np.ndarray[Any, Any] = DIGITS,
    labels: np.ndarray[Any, Any] = LABELS,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "test" if prefix else "t10k"):
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            file = folder / f"{prefix}{part}-{kind}-ubyte.gz"
            file.write_bytes(gzip.compress(head + array.tobytes()))
    return folder


def put_cifar(folder: Path) -> Path:
    """Batches of one image each."""
    folder.mkdir(parents=True)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for name, image, label in zip(names, COLOUR, LABELS, strict=True):
        (folder / f"{name}.bin").write_bytes(bytes([label]) + image.tobytes())
    return folder


def put_sprites(folder: Path, suffix: str = ".png", grey: bool = False) -> Path:
    """Three sprites, the images of which are numbered; two to train with, named out of order."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = {}
    for name, images, grid in (
        ("batch_10", COLOUR[:4], (2, 2)),
        ("batch_9", COLOUR[:3], (1, 3)),
        ("test", COLOUR[4:], (2, 1)),
    ):
        rows, columns = grid
        canvas = pillow.new("L" if grey else "RGB", (32 * columns, 32 * rows))
        for i, image in enumerate(images):
            tile = image[0] if grey else image.transpose(1, 2, 0)
            place = (32 * (i % columns), 32 * (i // columns))
            canvas.paste(pillow.fromarray(np.ascontiguousarray(tile)), place)
        options = {"lossless": True} if suffix == ".webp" else {}
        canvas.save(folder / (name + suffix), **options)
        labels[name] = np.arange(len(images)) + (5 if name == "batch_9" else 0)
    np.savez(folder / "labels.npz", **labels)
    return folder


def put_images(folder: Path, names: dict[str, int], size: tuple[int, int] = (28, 28)) -> Path:
    """Grey images of one value each."""
    for name, value in names.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        pillow.new("L", size, value).save(file)
    return folder


# ---- list


def test_list_says_where_how_many_and_what_for(tmp_path: Path) -> None:
    put_idx(tmp_path / "here" / "mnist")
    facts = done("list", "--data-dir", tmp_path / "here")
    assert facts["searched"] == [str(tmp_path / "here"), str(tmp_path / "cache" / "upgd")]
    mnist = facts["datasets"]["mnist"]
    assert mnist["samples"] == {"train": 6, "test": 6}
    assert Path(mnist["source"]).parent == tmp_path / "here" / "mnist"
    assert facts["datasets"]["cifar10"]["source"] is None
    assert facts["datasets"]["digits"]["samples"] == {"train": 1438, "test": 359}
    needed = [p for facts in facts["datasets"].values() for p in facts["problems"]]
    assert sorted(needed) == sorted(p.name for p in PROBLEMS.values() if p.dataset)
    shown = call("list", "--data-dir", tmp_path / "here")
    assert shown.exit_code == 0
    for word in (*DATASETS, "6 + 6", "missing", "stationary-mnist"):
        assert word in shown.output


def test_list_counts_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_CIFAR_RECORDS", 1)
    names = {f"{split}/a/{i}.png": i for split in ("train", "test") for i in range(3)}
    for kind, expected in {
        "images": {"train": 3, "test": 3},
        "sprites": {"train": 7, "test": 2},
        "binary": {"train": 5, "test": 1},
        "npz": {"train": 2, "test": 1},
    }.items():
        folder = tmp_path / kind / "cifar10"
        if kind == "images":
            put_images(folder, names, (32, 32))
        elif kind == "sprites":
            put_sprites(folder)
        elif kind == "npz":
            arrays = {"inputs": COLOUR[:2], "labels": LABELS[:2]}
            save_npz(folder / "cifar10.npz", arrays | {"test_labels": LABELS[:1]})
        else:
            put_cifar(folder)
        facts = done("list", "--data-dir", tmp_path / kind)["datasets"]["cifar10"]
        assert facts["samples"] == expected, kind


def test_list_goes_on_past_a_broken_file(tmp_path: Path) -> None:
    (put_idx(tmp_path) / "train-labels-idx1-ubyte.gz").write_bytes(b"\x1f\x8b")
    facts = done("list", "--data-dir", tmp_path)["datasets"]["mnist"]
    assert "truncated" in facts["error"]


# ---- check


def test_check_names_the_bad_and_the_fine(tmp_path: Path) -> None:
    put_idx(tmp_path / "mnist")
    put_idx(tmp_path / "emnist47", "emnist-balanced-")
    fine = call("check", "--data-dir", tmp_path)
    assert fine.exit_code == 0, fine.output
    assert "mnist: 6 train (published: 60000) + 6 test" in fine.output
    assert "cifar10: missing" in fine.output
    bad = tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz"
    bad.write_bytes(bad.read_bytes()[:-20])
    result = CliRunner().invoke(app, ["data", "check", "--data-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "emnist47: 6 train" in result.stdout
    assert result.stderr.count("\n") == 1
    assert bad.name in result.stderr
    assert "truncated" in result.stderr
    refused(bad.name, "check", "mnist", "--data-dir", tmp_path)
    assert call("check", "emnist47", "--data-dir", tmp_path).exit_code == 0


def test_check_asked_for_what_is_missing(tmp_path: Path) -> None:
    said = refused("train-images-idx3-ubyte.gz", "check", "mnist")
    assert str(tmp_path / "cache" / "upgd") in said
    assert "upgd data fetch mnist" in said
    said = refused("mini-imagenet.npz", "check", "mini-imagenet")
    assert "upgd data features" in said


def test_check_takes_files(tmp_path: Path) -> None:
    """One of your own needs no test split, but half of one is none."""
    arrays = {"inputs": DIGITS, "labels": LABELS}
    file = tmp_path / "mine.npz"
    for more, splits in (({}, ["train"]), ({"test_" + k: v for k, v in arrays.items()}, None)):
        save_npz(file, arrays | more)
        told = done("check", file)[str(file)]["splits"]
        assert [facts["split"] for facts in told] == (splits or ["train", "test"])
    save_npz(file, arrays | {"test_labels": LABELS})
    refused("has no test_inputs", "check", file)
    refused("no such file", "check", tmp_path / "nowhere.npz")


def test_an_interrupted_command_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(np.lib.format, "write_array", interrupted)
    put_idx(tmp_path / "raw")
    result = call("convert", tmp_path / "raw", tmp_path / "new" / "mnist.npz")
    assert result.exit_code == 130
    assert "resume" not in result.output
    assert not list((tmp_path / "new").iterdir())


# ---- convert


@pytest.mark.parametrize("sub", ["", "mnist", "MNIST/raw"])
def test_idx_folders(tmp_path: Path, sub: str) -> None:
    put_idx(tmp_path / "raw" / sub)
    facts = done("convert", tmp_path / "raw", tmp_path / "new" / "mnist.npz")
    assert facts["dataset"] == "mnist"
    assert [s["samples"] for s in facts["splits"]] == [6, 6]
    assert facts["splits"][0] | {"split": "", "samples": 0} == {
        **{"split": "", "samples": 0, "shape": [28, 28], "dtype": "uint8"},
        "classes": 5,
    }
    for split in ("train", "test"):
        new, old = (load("mnist", split, tmp_path / d) for d in ("new", "raw"))
        assert new.source.endswith("mnist.npz")
        assert_array_equal(new.inputs, old.inputs)
        assert_array_equal(new.labels, LABELS)
    assert [f.name for f in (tmp_path / "new").iterdir()] == ["mnist.npz"]


def test_emnist_is_upright_once(tmp_path: Path) -> None:
    put_idx(tmp_path / "raw", "emnist-bymerge-")
    done("convert", tmp_path / "raw", tmp_path / "emnist47.npz")
    assert_array_equal(load("emnist47", data_dir=tmp_path).inputs, DIGITS.transpose(0, 2, 1))


def test_other_idx_files(tmp_path: Path) -> None:
    """Any shape, if they are to be nobody's dataset; one set of several is not guessed."""
    put_idx(tmp_path / "raw", "fashion-", images=DIGITS[:, :9, :5])
    facts = done("convert", tmp_path / "raw", tmp_path / "fashion.npz")
    assert facts["splits"][0]["shape"] == [9, 5]
    assert_array_equal(load(str(tmp_path / "fashion.npz")).inputs, DIGITS[:, :9, :5])
    refused("shape (9, 5)", "convert", tmp_path / "raw", tmp_path / "x.npz", "--name", "mnist")
    put_idx(tmp_path / "raw", "emnist-letters-")
    said = refused("2 sets", "convert", tmp_path / "raw", tmp_path / "x.npz")
    assert "emnist-letters-" in said


@pytest.mark.parametrize("name", ["cifar10", "mine"])
def test_cifar_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(files, "_CIFAR_RECORDS", 1)
    put_cifar(tmp_path / "raw")
    done("convert", tmp_path / "raw", tmp_path / f"{name}.npz")
    train, test = (load(str(tmp_path / f"{name}.npz"), s) for s in ("train", "test"))  # type: ignore[arg-type]
    assert_array_equal(np.concatenate([train.inputs, test.inputs]), COLOUR)
    assert_array_equal(np.concatenate([train.labels, test.labels]), LABELS)


def test_python_batches_are_not_converted(tmp_path: Path) -> None:
    (tmp_path / "test_batch").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    refused("binary version", "convert", tmp_path, tmp_path / "cifar10.npz")


@pytest.mark.parametrize(("suffix", "grey"), [(".png", True), (".png", False), (".webp", False)])
def test_sprites(tmp_path: Path, suffix: str, grey: bool) -> None:
    """Row by row, batch 9 before batch 10, whatever the grid."""
    if suffix == ".webp" and not pytest.importorskip("PIL.features").check("webp"):
        pytest.skip("this Pillow reads no WebP")
    folder = put_sprites(tmp_path / "raw", suffix, grey)
    facts = done("convert", folder, tmp_path / "mine.npz")
    assert [s["samples"] for s in facts["splits"]] == [7, 2]
    train, test = (load(str(tmp_path / "mine.npz"), s) for s in ("train", "test"))  # type: ignore[arg-type]
    images = COLOUR[:, 0] if grey else COLOUR
    assert_array_equal(train.inputs, np.concatenate([images[:3], images[:4]]))
    assert_array_equal(train.labels, [5, 6, 7, 0, 1, 2, 3])
    assert_array_equal(test.inputs, images[4:])


def test_sprites_are_data_as_they_are(tmp_path: Path) -> None:
    put_sprites(tmp_path / "cifar10")
    done("convert", tmp_path / "cifar10", tmp_path / "npz" / "cifar10.npz")
    for split in ("train", "test"):
        raw, npz = (load("cifar10", split, d) for d in (tmp_path, tmp_path / "npz"))
        assert raw.source != npz.source
        assert_array_equal(raw.inputs, npz.inputs)
        assert_array_equal(raw.labels, npz.labels)


@pytest.mark.parametrize(
    ("labels", "what"),
    [
        ({"batch_10": [0] * 3}, "64×64, not a full grid of 3"),
        ({"batch_10": [0] * 5000}, "not a full grid"),
        ({"batch_10": [0] * 16}, "shape (3, 16, 16)"),
        ({"batch_10": [0.5] * 4}, "float64 labels"),
        ({"batch_11": [0]}, "no such image"),
        ({}, "no training labels"),
    ],
)
def test_wrong_sprites(tmp_path: Path, labels: dict[str, Any], what: str) -> None:
    folder = put_sprites(tmp_path / "raw")
    np.savez(folder / "labels.npz", **({"batch_9": np.arange(3)} | labels if labels else {}))
    refused(what, "convert", folder, tmp_path / "mine.npz")
    with pytest.raises(DataError, match="raw"):
        read_sprites(folder)


@pytest.mark.parametrize("split", [True, False])
def test_image_folders(tmp_path: Path, split: bool) -> None:
    names = {"dog/1.png": 1, "cat/2.png": 2, "dog/0.png": 3}
    train = {f"train/{k}": v for k, v in names.items()} if split else names
    folder = put_images(tmp_path / "raw", train | ({"test/dog/9.png": 9} if split else {}))
    done("convert", folder, tmp_path / "pets.npz")
    data = load(str(tmp_path / "pets.npz"))
    assert_array_equal(data.inputs[:, 0, 0], [2, 3, 1])
    assert_array_equal(data.labels, [0, 1, 1])
    assert_array_equal(np.load(tmp_path / "pets.npz")["names"], ["cat", "dog"])
    if split:  # a class keeps its number where the other is absent
        assert_array_equal(load(str(tmp_path / "pets.npz"), "test").labels, [1])
        put_images(folder, {"test/cow/1.png": 1})
        refused("cow", "convert", folder, tmp_path / "more.npz")


def test_test_images_are_numbered_as_the_training_images(tmp_path: Path) -> None:
    names = {"train/a/1.png": 1, "train/b/1.png": 2, "test/b/1.png": 3}
    put_images(tmp_path / "mnist", names)
    assert_array_equal(load("mnist", "test", tmp_path).labels, [1])


def test_companded_features_stay_codes(tmp_path: Path) -> None:
    codes = RNG.integers(0, 256, (5, 2048), dtype=np.uint8)
    scale = RNG.random(2048).astype(np.float32)
    names = np.array([f"n{i:04}" for i in range(100)])
    labels = np.array([0, 99, 5, 5, 1], np.int64)
    np.savez(tmp_path / "raw.npz", codes=codes, scale=scale, labels=labels, wnids=names)
    facts = done("convert", tmp_path / "raw.npz", tmp_path / "mini-imagenet.npz")
    assert facts["splits"][0]["dtype"] == "uint8 codes"
    data = load("mini-imagenet", data_dir=tmp_path)
    assert_array_equal(data.inputs, (codes * scale) ** 2)
    assert data.inputs.dtype == np.float32
    assert_array_equal(data.labels, labels)
    with np.load(tmp_path / "mini-imagenet.npz") as written:
        assert_array_equal(written["names"], names)
        assert (written["inputs"].dtype, written["labels"].dtype) == (np.uint8, np.uint8)


def test_npz_with_the_names_of_keras(tmp_path: Path) -> None:
    pixels = np.ascontiguousarray(COLOUR.transpose(0, 2, 3, 1))
    arrays = {"x_train": pixels, "y_train": LABELS, "x_test": pixels[:2], "y_test": LABELS[:2]}
    np.savez(tmp_path / "raw.npz", **arrays)  # type: ignore[arg-type]
    done("convert", tmp_path / "raw.npz", tmp_path / "cifar10.npz")
    assert_array_equal(load("cifar10", data_dir=tmp_path).inputs, COLOUR)
    assert_array_equal(load("cifar10", "test", tmp_path).labels, LABELS[:2])


def test_same_source_same_bytes(tmp_path: Path) -> None:
    put_idx(tmp_path / "raw")
    digests = set()
    for name in ("a.npz", "b.npz"):
        done("convert", tmp_path / "raw", tmp_path / name)
        digests.add(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
    assert len(digests) == 1


def test_targets_are_kept_or_replaced_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_idx(tmp_path / "raw")
    target = tmp_path / "mnist.npz"
    target.write_bytes(b"precious")
    refused("--force", "convert", tmp_path / "raw", target)
    put_idx(tmp_path / "wrong", labels=LABELS + 50)
    refused("labels from 51", "convert", tmp_path / "wrong", target, "--force")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np.lib.format, "write_array", full)
        refused("No space left", "convert", tmp_path / "raw", target, "--force")
    assert target.read_bytes() == b"precious"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["mnist.npz", "raw", "wrong"]
    done("convert", tmp_path / "raw", target, "--force")
    assert len(load("mnist", data_dir=tmp_path)) == 6
    quiet = call("convert", tmp_path / "raw", target, "--force", "--quiet")
    assert (quiet.exit_code, quiet.output) == (0, "")


def test_a_summary_is_shown(tmp_path: Path) -> None:
    put_idx(tmp_path / "raw")
    shown = call("convert", tmp_path / "raw", tmp_path / "mnist.npz").output
    assert "train: 6 of 28×28, uint8, 5 classes" in shown
    assert "mnist.npz" in shown


def test_mistakes_in_converting(tmp_path: Path) -> None:
    target = tmp_path / "x.npz"
    refused("no such file or folder", "convert", tmp_path / "nowhere", target)
    (tmp_path / "empty").mkdir()
    refused("nothing that can be converted", "convert", tmp_path / "empty", target)
    refused("must end in .npz", "convert", tmp_path / "empty", tmp_path / "x.csv")
    refused("did you mean 'mnist'", "convert", tmp_path, target, "--name", "mnst")
    refused("needs no file", "convert", tmp_path, target, "--name", "digits")
    (tmp_path / "text.npz").write_text("no archive")
    refused("not a readable .npz", "convert", tmp_path / "text.npz", target)
    np.savez(tmp_path / "other.npz", pixels=DIGITS, labels=LABELS)
    assert "pixels" in refused("has none of", "convert", tmp_path / "other.npz", target)
    np.savez(tmp_path / "train.npz", images=DIGITS, labels=LABELS)
    mnist = tmp_path / "mnist.npz"
    refused("no test split", "convert", tmp_path / "train.npz", mnist)
    refused("cannot write", "convert", tmp_path / "train.npz", tmp_path / "text.npz" / "x.npz")
    (tmp_path / "folder.npz").mkdir()
    refused("is a folder", "convert", tmp_path / "train.npz", tmp_path / "folder.npz")
    for command in ("list", "check"):
        refused("no such folder", command, "--data-dir", tmp_path / "nowhere")
    refused("did you mean 'cifar10'", "check", "cifar")
    assert not target.exists()
    assert not mnist.exists()


def test_images_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_images(tmp_path / "raw", {"cat/1.png": 1})
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    refused("pip install pillow", "convert", tmp_path / "raw", tmp_path / "x.npz")


# ---- fetch


def fake_pooch(monkeypatch: pytest.MonkeyPatch, fetch: Any) -> list[str]:
    """A pooch whose stores call `fetch(path, file)`; gives the list of what was asked for."""
    asked: list[str] = []

    def create(path: Path, base_url: str, registry: dict[str, str], retry_if_failed: int) -> Any:
        def get(file: str, processor: Any, progressbar: Any) -> None:
            asked.append(base_url + file)
            assert registry[file].startswith("md5:")
            assert retry_if_failed > 0
            if progressbar:
                progressbar.total = 100
                progressbar.update(60)
                progressbar.reset()
                progressbar.update(100)
                progressbar.close()
            fetch(Path(path), file)

        return types.SimpleNamespace(fetch=get)

    module: Any = types.ModuleType("pooch")
    module.create = create
    module.get_logger = lambda: types.SimpleNamespace(setLevel=lambda level: None)
    module.Untar = module.Unzip = lambda members, extract_dir: (members, extract_dir)
    monkeypatch.setitem(sys.modules, "pooch", module)
    return asked


def test_fetch_then_there_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_pooch(monkeypatch, lambda path, file: put_idx(path))
    result = call("fetch", "mnist", "digits", "--data-dir", tmp_path / "new")
    assert result.exit_code == 0, result.output
    assert "mnist: 6 train" in result.output
    assert len(asked) == 4
    assert (tmp_path / "new" / "mnist").is_dir()
    assert call("fetch", "mnist", "--data-dir", tmp_path / "new", "--quiet").output == ""
    assert len(asked) == 4


def test_fetch_shows_a_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    screen = io.StringIO()
    module = importlib.import_module("upgd.cli.data")
    monkeypatch.setattr(module, "err", Console(file=screen, force_terminal=True, width=100))
    fake_pooch(monkeypatch, lambda path, file: put_idx(path))
    assert call("fetch", "mnist", "--data-dir", tmp_path).exit_code == 0
    assert "100/100 bytes" in screen.getvalue()


def test_fetch_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(path: Path, file: str) -> None:
        if file.startswith("train-images"):
            path.mkdir(parents=True)
            (path / file).touch()
            return
        raise ConnectionError("HTTPSConnectionPool\n(a long story with {braces})")

    fake_pooch(monkeypatch, offline)
    said = refused("no connection to", "fetch", "mnist", "--data-dir", tmp_path / "new")
    for part in ("train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz", "https://"):
        assert part in said
    assert f"into {tmp_path / 'new' / 'mnist'}" in said
    assert "put train-images" not in said  # that one is there
    said = refused("cifar-10-binary.tar.gz", "fetch", "cifar10", "--data-dir", tmp_path / "new")
    assert "unpacks it" in said
    refused("mini-imagenet.npz", "fetch", "mini-imagenet", "--data-dir", tmp_path / "new")
    refused("did you mean 'mnist'", "fetch", "cifar10", "mnst")
    monkeypatch.setitem(sys.modules, "pooch", None)  # type: ignore[arg-type]
    refused("pip install pooch", "fetch", "mnist", "--data-dir", tmp_path / "other")


def test_an_archive_put_there_by_hand_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real pooch: what the message of a failed download promises."""
    pytest.importorskip("pooch")
    monkeypatch.setattr(files, "_CIFAR_RECORDS", 1)
    raw = put_cifar(tmp_path / "cifar-10-batches-bin")
    archive = tmp_path / "data" / "cifar10" / "cifar-10-binary.tar.gz"
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(raw, raw.name)
    known = DATASETS["cifar10"]
    digest = hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest()
    item = known.downloads[0]._replace(checksum=f"md5:{digest}")
    changed = {**vars(known), "downloads": (item,)}
    monkeypatch.setitem(DATASETS, "cifar10", type(known)(**changed))
    result = call("fetch", "cifar10", "--data-dir", tmp_path / "data")
    assert result.exit_code == 0, result.output
    assert_array_equal(load("cifar10", data_dir=tmp_path / "data").inputs, COLOUR[:5])


# ---- features


class Net(torch.nn.Module):
    """Its features are the image's mean colours and 2045 ones; counts what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(3))
        self.fc = torch.nn.Linear(2048, 1000)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(tuple(x.shape))
        assert not self.training
        assert not torch.is_grad_enabled()
        colours = x.mean((2, 3)) * self.gain
        out: torch.Tensor = self.fc(torch.cat([colours, torch.ones(len(x), 2045)], 1))
        return out


@pytest.fixture
def vision(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A torchvision that gives a small network."""
    models: Any = types.ModuleType("torchvision.models")
    url = "https://example.org/resnet50.pth"
    models.ResNet50_Weights = types.SimpleNamespace(IMAGENET1K_V1=types.SimpleNamespace(url=url))
    models.asked, models.made = [], []

    def resnet50(weights: Any) -> Net:
        models.asked.append(weights)
        models.made.append(Net())
        return models.made[-1]  # type: ignore[no-any-return]

    models.resnet50 = resnet50
    package: Any = types.ModuleType("torchvision")
    package.models = models
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    return models


IMAGES = {"val/dog/1.png": 10, "train/cat/1.png": 20, "train/cat/0.png": 30, "val/dog/0.png": 40}


def test_features(tmp_path: Path, vision: Any) -> None:
    folder = put_images(tmp_path / "raw", IMAGES | {"train/ant/7.png": 50}, (84, 84))
    put_images(folder, {"train/ant/8.png": 60}, (200, 100))
    (folder / "train" / "readme.txt").touch()
    target = tmp_path / "mini-imagenet.npz"
    facts = done("features", folder, target, "--batch", 4)
    assert facts["splits"] == [
        {"split": "train", "samples": 6, "shape": [2048], "dtype": "float16", "classes": 3}
    ]
    assert vision.asked == [vision.ResNet50_Weights.IMAGENET1K_V1]
    assert vision.made[0].seen == [(4, 3, 84, 84), (2, 3, 84, 84)]
    data = load("mini-imagenet", data_dir=tmp_path)
    assert_array_equal(data.labels, [0, 0, 1, 1, 2, 2])
    values = np.array([50, 60, 30, 20, 40, 10])[:, None]  # by class, then by path
    normal = (values / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(data.inputs[:, :3], normal, rtol=1e-3)
    assert (data.inputs[:, 3:] == 1).all()
    assert_array_equal(np.load(target)["names"], ["ant", "cat", "dog"])
    refused("--force", "features", folder, target)


def test_features_with_weights_from_a_file(tmp_path: Path, vision: Any) -> None:
    folder = put_images(tmp_path / "raw", IMAGES)
    state = Net().state_dict() | {"gain": torch.tensor([0.0, 0.0, 2.0])}
    torch.save(state, tmp_path / "net.pth")
    target = tmp_path / "mine.npz"
    done("features", folder, target, "--weights", tmp_path / "net.pth")
    assert vision.asked == [None]
    assert (load(str(target)).inputs[:, :2] == 0).all()
    torch.save({"fc": torch.ones(1)}, tmp_path / "net.pth")
    arguments = ("features", folder, tmp_path / "x.npz", "--weights")
    refused("not the state dict", *arguments, tmp_path / "net.pth")
    (tmp_path / "net.pth").write_bytes(b"nothing")
    refused("not the state dict", *arguments, tmp_path / "net.pth")
    refused("no such file", *arguments, tmp_path / "nowhere.pth")


def test_features_show_progress_on_a_terminal(
    tmp_path: Path, vision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    screen = io.StringIO()
    module = importlib.import_module("upgd.cli.data")
    monkeypatch.setattr(module, "err", Console(file=screen, force_terminal=True, width=100))
    folder = put_images(tmp_path / "raw", IMAGES)
    assert call("features", folder, tmp_path / "x.npz", "--batch", 3).exit_code == 0
    assert "4/4" in screen.getvalue()


def test_mistakes_in_features(tmp_path: Path, vision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, target = put_images(tmp_path / "raw", IMAGES), tmp_path / "x.npz"
    refused("no such folder", "features", tmp_path / "nowhere", target)
    (tmp_path / "empty").mkdir()
    refused("no images", "features", tmp_path / "empty", target)
    refused("outside of any class", "features", folder / "val" / "dog", target)
    refused("cannot use device", "features", folder, target, "--device", "abacus")
    many = put_images(tmp_path / "many", {f"c{i}/1.png": 1 for i in range(101)}, (2, 2))
    refused("has 101 classes", "features", many, tmp_path / "mini-imagenet.npz")
    (folder / "val" / "dog" / "0.png").write_bytes(b"no image")
    refused("is not an image", "features", folder, target)

    def offline(weights: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(vision, "resnet50", offline)
    assert "--weights FILE" in refused("example.org", "features", folder, target)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    refused("pip install torchvision", "features", folder, target)
    assert not target.exists()


# ---- help


@pytest.mark.parametrize("command", ["list", "fetch", "check", "convert", "features"])
def test_help_teaches(command: str) -> None:
    shown = call(command, "--help")
    assert shown.exit_code == 0
    assert "--help" in shown.output
    assert command in call("--help").output
