"""``upgd data``: list, download, check and convert datasets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from upgd.cli import options as o
from upgd.cli.app import command, err, new_typer, out, say, tell, wrote
from upgd.cli.commands import COMMANDS

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    from upgd.streams import Facts
    from upgd.streams.convert import Content
    from upgd.streams.readers import OnProgress

data = new_typer("data", help=COMMANDS["data"][1], no_args_is_help=True)
command = partial(command, group=data, interrupted="no file was half written")

SHOWN = 3  # problems of a dataset that the list names
DATA_DIR = Annotated[
    Path | None,
    Option(help="Searched first; then $UPGD_DATA, then the user's cache.", show_default=False),
]
AS_JSON = o.FACTS
QUIET = Annotated[bool, o.OUTPUT("--quiet", help="No progress, no summary.")]
FORCE = Annotated[bool, o.OUTPUT("--force", help="Replace TARGET if it exists.")]
NAME = Annotated[
    str,
    Option(
        help="The dataset, whose shape and classes are checked; default: as TARGET's name says.",
        show_default=False,
    ),
]


@command("list", examples=("upgd data list", "upgd data list --data-dir ~/data"))
def list_(data_dir: DATA_DIR = None, as_json: AS_JSON = False) -> None:
    """Show every dataset: where it is, its samples, and who needs it.

    Reads only what is needed to count samples; 'upgd data check' reads everything.
    """
    from rich.table import Column, Table

    from upgd.streams import search_path

    _must_exist(data_dir)
    found = {name: _look(name, data_dir) for name in _names()}
    if as_json:
        searched = [str(folder) for folder in search_path(data_dir)]
        print(json.dumps({"searched": searched, "datasets": found}))
        return
    columns = (Column(name, no_wrap=True) for name in ("dataset", "samples", "needed by"))
    table = Table(*columns, Column("found", overflow="fold"))
    for name, facts in found.items():
        samples = [str(n) for n in facts["samples"].values() if n is not None] or ["-"]
        where = facts["error"] or facts["source"] or "missing"
        table.add_row(name, " + ".join(samples), "\n".join(_first(facts["problems"])), where)
    out.print(table)
    out.print(f"searched: {', '.join(map(str, search_path(data_dir)))}", soft_wrap=True)
    if any(facts["error"] or not facts["source"] for facts in found.values()):
        out.print("'upgd data check NAME' says what is wrong and what to put where")


def _names() -> tuple[str, ...]:
    """All datasets: the embedded one, and those that need files."""
    from upgd.streams import DATASETS

    return ("digits", *DATASETS)


def _first(problems: list[str]) -> list[str]:
    """Some problems of a dataset, and how many there are besides."""
    shown = problems[:SHOWN]
    return [*shown, f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else shown


def _look(name: str, data_dir: Path | None) -> dict[str, Any]:
    """The location and size of a dataset, without reading it."""
    from upgd.streams import PROBLEMS, DataError, load, search_path
    from upgd.streams.datasets import splits_of
    from upgd.streams.files import find

    facts: dict[str, Any] = {"source": None, "samples": {}, "error": None}
    facts["problems"] = [p.name for p in PROBLEMS.values() if p.dataset == name]
    for split in splits_of(name):
        facts["samples"][split] = None
        try:
            if name == "digits":
                where, count = "scikit-learn", len(load(name, split))
            elif source := find(name, split, search_path(data_dir)):
                where, count = str(source.paths[0]), source.samples()
            else:
                continue
        except (DataError, ImportError, OSError) as error:
            facts["error"] = str(error)
            continue
        facts["source"] = facts["source"] or where
        facts["samples"][split] = count
    return facts


@command(examples=("upgd data fetch mnist", "upgd data fetch emnist47 cifar10 --data-dir ~/data"))
def fetch(
    names: Annotated[list[str], Argument(help="mnist, emnist47, cifar10.")],
    data_dir: DATA_DIR = None,
    quiet: QUIET = False,
) -> None:
    """Download public datasets, with checksums.

    They go into the first folder that is searched. Existing files are not downloaded again. Without
    a network, says which file to put where.
    """
    from upgd.streams import DataNotFoundError, search_path
    from upgd.streams import check as check_data
    from upgd.streams.datasets import splits_of
    from upgd.streams.files import fetch as download

    for name in names:
        splits_of(name)  # all names, before the first download
    for name in names:
        try:
            facts = check_data(name, data_dir)
        except DataNotFoundError:
            with _download_bar(name, quiet) as bar:
                download(name, search_path(data_dir)[0], bar)
            facts = check_data(name, data_dir)
        if not quiet:
            _say_facts(name, facts)


@command(examples=("upgd data check", "upgd data check mnist mine.npz"))
def check(
    names: Annotated[
        list[str] | None, Argument(help="Datasets or .npz files; default all.")
    ] = None,
    data_dir: DATA_DIR = None,
    as_json: AS_JSON = False,
) -> None:
    """Read whole datasets, and name truncated or wrong files.

    Exit code 2: one is wrong.
    """
    from upgd.streams import DataError, DataNotFoundError
    from upgd.streams import check as check_data
    from upgd.streams.datasets import splits_of

    _must_exist(data_dir)
    for name in names or []:
        if not name.endswith(".npz"):
            splits_of(name)
    told: dict[str, Any] = {}
    for name in names or _names():
        try:
            facts = check_data(name, data_dir)
        except (DataError, DataNotFoundError, ImportError) as error:
            absent = not names and isinstance(error, DataNotFoundError)
            told[name] = {"missing" if absent else "error": str(error)}
            if absent and not as_json:
                out.print(f"{name}: missing", highlight=False)
            elif not as_json:
                tell(str(error))
        else:
            told[name] = {"splits": [f._asdict() for f in facts]}
            if not as_json:
                _say_facts(name, facts)
    if as_json:
        print(json.dumps(told))
    if any("error" in entry for entry in told.values()):
        raise Exit(2)


@command(
    examples=(
        "upgd data convert ~/cifar-10-batches-bin ~/data/cifar10.npz",
        "upgd data convert images/ mine.npz --force",
    )
)
def convert(
    source: Annotated[Path, Argument(help="A folder, or an .npz with other names.")],
    target: Annotated[Path, Argument(help="The file to write, NAME.npz.")],
    name: NAME = "",
    force: FORCE = False,
    quiet: QUIET = False,
    as_json: AS_JSON = False,
) -> None:
    """Convert a dataset to one .npz, which replaces the original files.

    SOURCE may be a folder with idx files (MNIST, EMNIST; .gz or not), with CIFAR-10's binary
    batches, with images in a sub-folder per class (directly, or below train and test), or
    with sprites: large images that are grids of small square ones, and a labels.npz with the
    labels of each under its name. Or an .npz with inputs, images, features or codes (uint8, with
    scale: a feature is (code * scale) ** 2) and labels.
    """
    from upgd.streams.convert import read_source

    known = _target(target, name, force)
    with _bar(f"reading {source.name}", quiet or as_json) as on_progress:
        content = read_source(source, known, on_progress)
    _write(target, content, known, quiet, as_json)


@command(examples=("upgd data features ~/mini-imagenet ~/data/mini-imagenet.npz --device cuda",))
def features(
    images: Annotated[Path, Argument(help="A folder; an image's class is its folder.")],
    target: Annotated[Path, Argument(help="The file to write, such as mini-imagenet.npz.")],
    weights: Annotated[
        Path | None,
        Option(
            help="State dict of a ResNet-50; default torchvision's download.", show_default=False
        ),
    ] = None,
    device: o.DEVICE = "cpu",
    batch: Annotated[int, o.EXECUTION(min=1, help="Images at a time.")] = 64,
    name: NAME = "",
    force: FORCE = False,
    quiet: QUIET = False,
    as_json: AS_JSON = False,
) -> None:
    """Compute features of images with a ResNet-50: 2048 numbers each.

    The network is ImageNet's, and frozen. Images are cut to their middle square and scaled to
    84x84; features are averages over the last layer's places. mini-ImageNet's train, val and test
    folders may lie side by side in IMAGES: they make one dataset. Needs torchvision.
    """
    import numpy as np

    from upgd.streams import DATASETS, DataError
    from upgd.streams.extract import extract, list_images

    known = _target(target, name, force)
    files, labels, classes = list_images(images)
    if known and len(classes) > DATASETS[known].classes:
        wrong = f"has {len(classes)} classes, {known} has {DATASETS[known].classes}"
        raise DataError(images, wrong, "give TARGET another name")
    with _bar(f"{len(files)} images", quiet or as_json) as on_progress:
        seen = extract(files, weights, device, batch, on_progress)
    content = {"inputs": seen, "labels": np.array(labels), "names": np.array(classes)}
    _write(target, content, known, quiet, as_json)


# ---- what they share


def _must_exist(data_dir: Path | None) -> None:
    from upgd.streams.datasets import expanded

    if data_dir is not None and not expanded(data_dir).is_dir():
        raise ValueError(f"{data_dir}: no such folder; --data-dir is where the data are")


def _say_facts(name: str, facts: list[Facts]) -> None:
    from upgd.streams import DATASETS

    published = DATASETS[name].published if name in DATASETS else ()
    parts = []
    for i, split in enumerate(facts):
        fewer = i < len(published) and split.samples < published[i]
        more = f" (published: {published[i]})" if fewer else ""
        parts.append(f"{split.samples} {split.split}{more}")
    shape = "×".join(map(str, facts[0].shape))
    line = f"{name}: {' + '.join(parts)} of {shape}, {facts[0].classes} classes, fine"
    say(f"{line}  {facts[0].source}")


def _target(target: Path, name: str, force: bool) -> str | None:
    """Check an output path before any work; returns its dataset, if known."""
    from upgd.ledger.files import check_output
    from upgd.streams import DATASETS
    from upgd.streams.datasets import splits_of

    if target.suffix != ".npz":
        raise ValueError(f"{target} must end in .npz; such as {target.with_suffix('.npz').name}")
    if target.is_dir():
        raise ValueError(f"{target} is a folder; name a file in it")
    if target.exists() and not force:
        raise ValueError(f"{target} exists; --force replaces it")
    if target.exists() and not target.is_file():
        raise ValueError(f"{target} is not a regular file; name one")
    check_output(target, make_folders=True)
    if name and name not in DATASETS:
        splits_of(name)
        raise ValueError(f"{name} is embedded and needs no file; there are {', '.join(DATASETS)}")
    return name or (target.stem if target.stem in DATASETS else None)


def _write(target: Path, content: Content, known: str | None, quiet: bool, as_json: bool) -> None:
    from rich import filesize

    from upgd.streams.convert import describe, write_content

    with _bar(f"writing {target.name}", quiet or as_json):
        write_content(target, content, known)
    splits, size = describe(content), target.stat().st_size
    if as_json:
        facts = {"target": str(target), "bytes": size, "dataset": known}
        print(json.dumps(facts | {"splits": [split._asdict() for split in splits]}))
    elif not quiet:
        for split in splits:
            shape = "×".join(map(str, split.shape))
            line = f"{split.split}: {split.samples} of {shape}, {split.dtype}"
            out.print(f"{line}, {split.classes} classes", highlight=False)
        wrote(target, f" ({filesize.decimal(size)})")


def _progress(column: ProgressColumn) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), column, TimeRemainingColumn())
    return Progress(*columns, console=err, transient=True)


@contextmanager
def _bar(what: str, quiet: bool) -> Iterator[OnProgress | None]:
    """A progress bar, if there is a terminal."""
    if quiet or not err.is_terminal:
        yield None
        return
    from rich.progress import MofNCompleteColumn

    with _progress(MofNCompleteColumn()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Bytes:
    """A progress bar with pooch's interface."""

    def __init__(self, progress: Progress, name: str) -> None:
        self.progress, self.task = progress, progress.add_task(name, total=None)

    @property
    def total(self) -> float | None:
        return self.progress.tasks[self.task].total

    @total.setter
    def total(self, size: int) -> None:
        self.progress.reset(self.task, total=size)

    def update(self, size: int) -> None:
        self.progress.advance(self.task, size)

    def reset(self) -> None:
        self.progress.reset(self.task)

    def close(self) -> None:
        """Does nothing: the next file continues in the same line."""


@contextmanager
def _download_bar(name: str, quiet: bool) -> Iterator[Any]:
    if quiet or not err.is_terminal:
        yield False
        return
    from rich.progress import DownloadColumn

    with _progress(DownloadColumn()) as bar:
        yield _Bytes(bar, name)
