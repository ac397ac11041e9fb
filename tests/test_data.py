"""Data files are read back as written, and anything wrong with one is said clearly."""

from __future__ import annotations

import gzip
import importlib
import logging
import pickle
import struct
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from upgd.streams import (
    DataError,
    DataNotFoundError,
    Dataset,
    check,
    load,
    read_cifar_binary,
    read_idx,
    read_image_folder,
    read_npz,
    search_path,
    write_npz,
)

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (5, 28, 28), dtype=np.uint8)
LABELS = np.array([3, 1, 4, 1, 5], dtype=np.uint8)
CIFAR = RNG.integers(0, 256, (4, 3072), dtype=np.uint8)


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the data of the machine that it runs on."""
    monkeypatch.delenv("UPGD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "cache"))


def idx(array: np.ndarray[Any, Any]) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def put_idx(folder: Path, prefix: str = "", part: str = "train", zipped: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind, array in (("images-idx3", IMAGES), ("labels-idx1", LABELS)):
        content = gzip.compress(idx(array)) if zipped else idx(array)
        name = f"{prefix}{part}-{kind}-ubyte" + (".gz" if zipped else "")
        (folder / name).write_bytes(content)


def refused(call: Any, file: str, what: str) -> None:
    """The error names the file, what is wrong, and is one line."""
    with pytest.raises(DataError) as caught:
        call()
    message = str(caught.value)
    assert file in message
    assert what in message
    assert ";" in message
    assert "\n" not in message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


# ---- idx


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("sub", ["", "mnist", "MNIST/raw"])
def test_mnist_is_read_back(tmp_path: Path, zipped: bool, sub: str) -> None:
    put_idx(tmp_path / sub, zipped=zipped)
    data = load("mnist", data_dir=tmp_path)
    assert_array_equal(data.inputs, IMAGES)
    assert_array_equal(data.labels, LABELS)
    assert data.labels.dtype == np.int64
    assert data.classes == 10


@pytest.mark.parametrize("prefix", ["emnist-balanced-", "emnist-bymerge-", "emnist47-subset-"])
def test_emnist_is_transposed(tmp_path: Path, prefix: str) -> None:
    put_idx(tmp_path, prefix, "test")
    data = load("emnist47", "test", tmp_path)
    assert_array_equal(data.inputs[2][:, 7], IMAGES[2][7])
    assert data.classes == 47


BROKEN = {
    "empty": (b"", "begins with"),
    "magic": (b"\x89PNG" + bytes(100), "begins with"),
    "type": (b"\0\0\x0d\x03" + idx(IMAGES)[4:], "begins with"),
    "header": (idx(IMAGES)[:9], "truncated in its header"),
    "short": (idx(IMAGES)[:-1], "truncated"),
    "long": (idx(IMAGES) + b"\0", "more than"),
    "huge": (struct.pack(">BBBBIII", 0, 0, 8, 3, *[2**32 - 1] * 3) + bytes(9), "truncated"),
    "labels": (idx(LABELS), "dimensions"),
    "small": (idx(IMAGES[:, :9]), "shape (9, 28)"),
    "count": (idx(IMAGES[:3]), "5 labels for the 3 images"),
    "none": (idx(IMAGES[:0]), "5 labels for the 0 images"),
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", BROKEN)
def test_broken_idx_files(tmp_path: Path, kind: str, zipped: bool) -> None:
    put_idx(tmp_path, zipped=zipped)
    content, what = BROKEN[kind]
    file = tmp_path / ("train-images-idx3-ubyte" + (".gz" if zipped else ""))
    file.write_bytes(gzip.compress(content) if zipped else content)
    refused(lambda: load("mnist", data_dir=tmp_path), "idx", what)


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(2, 10**6))
def test_a_gzip_cut_anywhere_is_noticed(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = gzip.compress(idx(IMAGES))
    file = tmp_path_factory.mktemp("cut") / "images.gz"
    file.write_bytes(whole[: cut % (len(whole) - 2) + 2])
    if len(file.read_bytes()) < len(whole):
        refused(lambda: read_idx(file, 3), "images.gz", "truncated")


def test_corrupted_gzip_is_noticed(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(idx(IMAGES)))
    whole[-6] ^= 1  # the checksum
    (tmp_path / "images.gz").write_bytes(whole)
    refused(lambda: read_idx(tmp_path / "images.gz"), "images.gz", "truncated or not gzip")


def test_wrong_labels_and_a_missing_partner(tmp_path: Path) -> None:
    put_idx(tmp_path, zipped=False)
    file = tmp_path / "train-labels-idx1-ubyte"
    file.write_bytes(idx(LABELS + 6))
    refused(lambda: load("mnist", data_dir=tmp_path), file.name, "labels from 7 to 11")
    file.unlink()
    refused(lambda: load("mnist", data_dir=tmp_path), file.name, "is missing")


# ---- CIFAR-10


def put_binary(file: Path, labels: list[int]) -> Path:
    rows = np.concatenate([np.array(labels, np.uint8)[:, None], CIFAR[: len(labels)]], 1)
    file.write_bytes(rows.tobytes())
    return file


def test_binary_batches(tmp_path: Path) -> None:
    binary = [put_binary(tmp_path / f"{i}.bin", [9, 0, 3, 3]) for i in range(2)]
    images, labels = read_cifar_binary(binary)
    assert_array_equal(images, np.concatenate([CIFAR, CIFAR]).reshape(-1, 3, 32, 32))
    assert_array_equal(labels, [9, 0, 3, 3] * 2)


@pytest.mark.parametrize("folder", ["cifar10", "cifar10/cifar-10-batches-py"])
@pytest.mark.parametrize(("split", "name"), [("train", "data_batch_1"), ("test", "test_batch")])
def test_python_batches_are_not_read(tmp_path: Path, folder: str, split: Any, name: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / name).write_bytes(pickle.dumps({}))
    refused(
        lambda: load("cifar10", split, tmp_path),
        name,
        "get the binary version: upgd data fetch cifar10",
    )


def test_broken_binary_batches(tmp_path: Path) -> None:
    file = put_binary(tmp_path / "data_batch_1.bin", [1, 2])
    refused(lambda: read_cifar_binary([file], records=3), file.name, "2 images, 3 expected")
    file.write_bytes(file.read_bytes()[:-1])
    refused(lambda: read_cifar_binary([file]), file.name, "not a multiple")
    put_binary(file, [1, 10])
    refused(lambda: read_cifar_binary([file]), file.name, "labels from 1 to 10")


def test_whole_cifar_batches_are_found_and_short_ones_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    with (folder / "test_batch.bin").open("wb") as file:
        file.truncate(10_000 * 3073)
    assert load("cifar10", "test", tmp_path).inputs.shape == (10_000, 3, 32, 32)
    put_binary(folder / "test_batch.bin", [1, 2])
    refused(lambda: load("cifar10", "test", tmp_path), "test_batch.bin", "10000 expected")
    put_binary(folder / "data_batch_4.bin", [1, 2])
    refused(lambda: load("cifar10", "train", tmp_path), "data_batch_1.bin", "is missing")


# ---- .npz and images


def test_npz_round_trip(tmp_path: Path) -> None:
    train, test = (Dataset("mnist", IMAGES[i:], LABELS[i:].astype(np.int64), 10) for i in (0, 2))
    write_npz(tmp_path / "mnist.npz", train, test)
    assert [p.name for p in tmp_path.iterdir()] == ["mnist.npz"]
    for split, original in (("train", train), ("test", test)):
        data = load("mnist", split, tmp_path)  # type: ignore[arg-type]
        assert_array_equal(data.inputs, original.inputs)
        assert_array_equal(data.labels, original.labels)
    assert [facts.samples for facts in check("mnist", tmp_path)] == [5, 3]


def test_companded_features(tmp_path: Path) -> None:
    codes = RNG.integers(0, 256, (3, 2048), dtype=np.uint8)
    scale = RNG.random(2048).astype(np.float32)
    np.savez(tmp_path / "mini-imagenet.npz", inputs=codes, labels=[0, 99, 5], scale=scale)
    data = load("mini-imagenet", data_dir=tmp_path)
    np.testing.assert_allclose(data.scaled(slice(None)), (codes * scale) ** 2, rtol=1e-6)
    assert data.inputs.dtype == np.float32
    assert [facts.split for facts in check("mini-imagenet", tmp_path)] == ["train"]
    refused(lambda: load("mini-imagenet", "test", tmp_path), "mini-imagenet.npz", "test_inputs")


GOOD = {"inputs": np.ones((2, 3), np.float32), "labels": np.array([0, 1])}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"labels": None}, "has no labels"),
        ({"labels": np.array([0.0, 1.0])}, "do not fit"),
        ({"labels": np.array([0, 1, 2])}, "do not fit"),
        ({"labels": np.array([-1, 0])}, "labels from -1"),
        ({"labels": np.array([0, {}], dtype=object)}, "not a readable .npz"),
        ({"inputs": np.full((2, 3), np.nan)}, "not all finite"),
        ({"inputs": np.ones((2, 3), np.int64)}, "inputs are int64"),
        ({"inputs": np.ones(2)}, "shape (2,)"),
        ({"scale": np.float32(2)}, "scale"),
        ({"inputs": np.ones((2, 3), np.uint8), "scale": np.ones(7)}, "scale of shape"),
        ({"top": np.array(0)}, "top"),
        ({"inputs": np.full((2, 3), 17, np.uint8), "top": np.array(16)}, "values up to 17"),
        ({"inputs": np.ones((0, 3)), "labels": np.zeros(0, np.int64)}, "no samples"),
    ],
)
def test_wrong_npz(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    file = tmp_path / "mine.npz"
    np.savez(file, **{k: v for k, v in (GOOD | changes).items() if v is not None})
    refused(lambda: load(str(file)), "mine.npz", what)


def test_npz_cut_anywhere_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "mine.npz"
    np.savez(file, **GOOD)  # type: ignore[arg-type]
    whole = file.read_bytes()
    for cut in range(0, len(whole), 7):
        file.write_bytes(whole[:cut])
        refused(lambda: read_npz(file), "mine.npz", "not a readable .npz")
    np.save(tmp_path / "one.npy", np.ones(3))
    refused(lambda: read_npz(tmp_path / "one.npy"), "one.npy", "single array")


def test_npz_with_a_flipped_byte_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "mine.npz"
    inputs = np.arange(3000, dtype=np.float32).reshape(3, 1000)
    np.savez(file, inputs=inputs, labels=[0, 1, 2])
    content = bytearray(file.read_bytes())
    content[content.index(inputs.tobytes()) + 5000] ^= 1
    file.write_bytes(content)
    refused(lambda: read_npz(file), "mine.npz", "CRC")


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_image_folders(tmp_path: Path, mode: str) -> None:
    image = pytest.importorskip("PIL.Image")
    shape = (4, 6, 5) if mode == "L" else (4, 6, 5, 3)
    pixels = RNG.integers(0, 256, shape, dtype=np.uint8)
    for i, name in enumerate(("b/0.png", "a/1.png", "b/2.png", "a/0.png")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        image.fromarray(pixels[i]).save(tmp_path / name)
    inputs, labels = read_image_folder(tmp_path)
    expected = pixels[[3, 1, 0, 2]]
    assert_array_equal(inputs, expected if mode == "L" else expected.transpose(0, 3, 1, 2))
    assert_array_equal(labels, [0, 0, 1, 1])
    image.fromarray(pixels[0][:3]).save(tmp_path / "b" / "9.png")
    refused(lambda: read_image_folder(tmp_path), "9.png", "shape")
    (tmp_path / "b" / "9.png").write_bytes(b"no image")
    refused(lambda: read_image_folder(tmp_path), "9.png", "not an image")


def test_empty_image_folders(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    refused(lambda: read_image_folder(tmp_path), tmp_path.name, "no sub-folders")
    (tmp_path / "cats").mkdir()
    refused(lambda: read_image_folder(tmp_path), "cats", "no images")


# ---- finding, scaling, downloading


def test_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPGD_DATA", str(tmp_path / "variable"))
    folders = [tmp_path / "argument", tmp_path / "variable", tmp_path / "cache" / "upgd"]
    assert search_path(folders[0]) == folders
    for folder in reversed(folders):
        put_idx(folder)
        assert Path(load("mnist", data_dir=folders[0]).source).parent == folder


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    put_idx(tmp_path, zipped=False)
    first = load("mnist", data_dir=tmp_path)
    assert load("mnist", data_dir=tmp_path) is first
    assert not first.inputs.flags.writeable
    for kind, array in (("images-idx3", IMAGES), ("labels-idx1", LABELS)):
        (tmp_path / f"train-{kind}-ubyte").write_bytes(idx(array[:2]))
    assert len(load("mnist", data_dir=tmp_path)) == 2


@pytest.mark.parametrize("name", ["mnist", "emnist47", "cifar10", "mini-imagenet"])
def test_missing_data_says_what_to_put_where(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataNotFoundError) as caught:
        load(name, data_dir=tmp_path / "here")
    message = str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)
    assert message.index(str(tmp_path / "here")) < message.index(str(tmp_path / "cache"))
    assert f"{name}.npz" in message
    assert "download" in message


def test_wrong_names() -> None:
    with pytest.raises(ValueError, match="did you mean 'mnist'"):
        load("mnst")
    with pytest.raises(ValueError, match="unknown split"):
        load("digits", "valid")  # type: ignore[arg-type]
    with pytest.raises(DataNotFoundError, match="no such file"):
        load("nowhere.npz")


def test_scaling() -> None:
    images = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    scaled = Dataset("ramp", images, np.zeros(1, np.int64), 1).scaled([0])
    np.testing.assert_allclose(scaled.ravel(), (np.arange(256) / 255 - 0.5) / 0.5, atol=1e-7)
    assert (scaled.min(), scaled.max(), scaled.dtype) == (-1, 1, np.float32)


def test_digits_are_scikit_learns() -> None:
    bundle = importlib.import_module("sklearn.datasets").load_digits()
    train, test = load("digits"), load("digits", "test")
    both = np.concatenate([train.inputs, test.inputs]).reshape(-1, 64)
    assert sorted(map(tuple, both)) == sorted(map(tuple, bundle.data.astype(np.uint8)))
    assert set(train.labels) == set(test.labels) == set(range(10))
    assert (train.scaled(slice(None)).min(), train.scaled(slice(None)).max()) == (-1, 1)


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = importlib.import_module("upgd.streams.datasets")
    monkeypatch.setattr(datasets, "_LOADED", {})
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install .*'scikit-learn"):
        load("digits")


def pooch_with(create: Any) -> Any:
    return types.SimpleNamespace(create=create, get_logger=lambda: logging.getLogger("pooch"))


def test_download_goes_to_the_first_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pooch that writes files: what it is asked for is what is then found."""
    asked = {}

    def create(path: Path, base_url: str, registry: dict[str, str], retry_if_failed: int) -> Any:
        def fetch(file: str, processor: Any, progressbar: bool) -> None:
            asked[base_url + file] = registry[file]
            put_idx(path)

        assert retry_if_failed > 0
        return types.SimpleNamespace(fetch=fetch)

    monkeypatch.setitem(sys.modules, "pooch", pooch_with(create))  # type: ignore[misc]
    data = load("mnist", data_dir=tmp_path / "new", download=True)
    assert Path(data.source).parent == tmp_path / "new" / "mnist"
    assert len(asked) == 4
    assert all(url.startswith("https://") and md5[:4] == "md5:" for url, md5 in asked.items())
    asked.clear()
    load("mnist", data_dir=tmp_path / "new", download=True)
    assert not asked


def test_downloads_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(**_: Any) -> Any:
        raise OSError("no network")

    refused(lambda: load("mini-imagenet", download=True), "mini-imagenet", "cannot be downloaded")
    monkeypatch.setitem(sys.modules, "pooch", pooch_with(create))  # type: ignore[misc]
    refused(lambda: load("cifar10", data_dir=tmp_path, download=True), "cifar-10", "no network")
    monkeypatch.setitem(sys.modules, "pooch", None)  # type: ignore[arg-type]
    refused(lambda: load("mnist", download=True), "mnist", "needs pooch")
