"""The appendix's figure of computational time: how long a single update takes.

An update is what a learner does with a batch: forward pass, backward pass (with curvature where a
method needs it) and step. Methods take turns on one device, and are compared with PyTorch's SGD
within a round. The inputs are random numbers of MNIST's shape. On CPU the time is the processor
time of one thread.
"""

from __future__ import annotations

import csv
import gzip
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from upgd import timing
from upgd.ledger import write_atomically
from upgd.ledger.versions import processor
from upgd.metrics import Interval, bootstrap, standard_error
from upgd.networks import mlp
from upgd.optim.registry import METHODS as REGISTRY
from upgd.pages.colours import EDGE, SOFT
from upgd.paper import provenance
from upgd.paper.looks import ARMS, colour
from upgd.paper.measuring import How, Say, note
from upgd.paper.results import table_rows
from upgd.paper.sets import METHODS
from upgd.report.plotting import BAND, canvas, footnote, save, styled
from upgd.threads import one_thread

NAME = "time"
CAPTION = "Computational time needed to make a single update."
TABLE = "times.csv.gz"
PEER = "SGD (PyTorch)"
ROUNDS = 20
TARGET = 0.1
"""Seconds for each method in each round."""
TINY_LR = 1e-7  # weights must not change much during the timing


class Setting(NamedTuple):
    """A network and batch: units per layer, samples in a batch."""

    sizes: tuple[int, ...]
    batch: int

    def __str__(self) -> str:
        return f"{'-'.join(map(str, self.sizes))}, batch of {self.batch}"


SETTINGS = (
    Setting((784, 1024, 512, 10), 100),
    Setting((784, 1024, 512, 10), 1),
    Setting((784, 2048, 1024, 10), 100),
)
"""The paper's setting, batches of one sample, and a larger network."""

Times = Mapping[str, Mapping[str, NDArray[np.float64]]]
"""By setting and method, seconds in each round."""


# ------------------------------------------------------------------------- measuring
def folder(how: How) -> str:
    """One per kind of device."""
    return f"update_time_{how.device.partition(':')[0]}"


def plan(how: How) -> str:
    """How long it takes."""
    calls, rounds = len(SETTINGS) * (len(REGISTRY) + 1), how.seeds or ROUNDS
    least = calls * rounds * TARGET * how.scale
    return f"{calls} kinds of updates, {rounds} rounds: {least / 60:.0f} minutes or more"


def measure(how: How, folder: Path, say: Say) -> None:
    """Time every method; `scale` shortens rounds, `seeds` is how many there are."""
    began, rounds = time.time(), how.seeds or ROUNDS
    times: dict[str, dict[str, NDArray[np.float64]]] = {}
    clock = time.perf_counter if how.device.startswith("cuda") else time.process_time
    with one_thread():
        for setting in SETTINGS:
            calls = dict(_updates(setting, how.device))
            found = timing.measure(calls, how.device, rounds, TARGET * how.scale, clock)
            times[str(setting)] = {name: np.array(values) for name, values in found.items()}
            say(f"{setting}: done")
    write_atomically(folder / TABLE, _pack(times))
    seeds = {name: list(range(rounds)) for name in next(iter(times.values()))}
    gpu = how.device.startswith("cuda")
    where = torch.cuda.get_device_name(how.device) if gpu else f"{processor()}, one thread"
    note(how, NAME, where, "eager", "float32", 0, seeds, 0, began).write(folder)


def _updates(setting: Setting, device: str) -> Iterator[tuple[str, timing.Call]]:
    """The update of every method, each with a network of its own."""
    torch.manual_seed(0)
    x = torch.randn(setting.batch, setting.sizes[0], device=device)
    y = torch.randint(setting.sizes[-1], (setting.batch,), device=device)
    for name in (PEER, *order()):
        model = mlp(setting.sizes).to(device)
        sgd = torch.optim.SGD(model.parameters(), lr=TINY_LR)
        opt = sgd if name == PEER else REGISTRY[name].make(model, lr=TINY_LR)
        yield name, _update(model, opt, x, y)


def _update(
    model: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> timing.Call:
    backward = getattr(opt, "backward", torch.Tensor.backward)

    def update() -> None:
        opt.zero_grad()
        backward(nn.functional.cross_entropy(model(x), y))
        opt.step()

    return update


def order() -> list[str]:
    """The paper's ten methods, then the others."""
    return [*METHODS, *(name for name in REGISTRY if name not in METHODS)]


# ----------------------------------------------------------------------------- tables
def _pack(times: Times) -> bytes:
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["setting", "method", "round", "seconds"])
    for setting, methods in times.items():
        for method, values in methods.items():
            out.writerows([setting, method, i, f"{x:.4g}"] for i, x in enumerate(values))
    return gzip.compress(text.getvalue().encode(), mtime=0)


def load(folder: Path) -> Times:
    """Read a table."""
    found: dict[str, dict[str, list[float]]] = {}
    for setting, method, _round, seconds in table_rows(folder / TABLE)[1:]:
        found.setdefault(setting, {}).setdefault(method, []).append(float(seconds))
    return {s: {m: np.array(x) for m, x in methods.items()} for s, methods in found.items()}


def ratio(methods: Mapping[str, NDArray[np.float64]], name: str) -> Interval:
    """Time of an update over that of PyTorch's SGD in the same round."""
    return bootstrap(methods[name] / methods[PEER])


# ------------------------------------------------------------------------ what is told
def title(folder: Path) -> str:
    """A one-line description of a table."""
    return f"Computational time of an update on {_where(folder)}"


def _where(folder: Path) -> str:
    known = provenance.read(folder)
    return known.parts[0].device if known else folder.name.rpartition("_")[2]


def _title(name: str) -> str:
    return REGISTRY[name].title if name in REGISTRY else name


def pictures(folder: Path) -> dict[str, str]:
    """One picture."""
    kind = folder.name.rpartition("_")[2]
    return {f"{NAME}-{kind}": f"{title(folder)}; bars are standard errors."}


@styled()
def draw(folder: Path, target: Path, suffixes: Sequence[str]) -> list[Path]:
    """Milliseconds of an update, a bar per method and a panel per setting."""
    times = load(folder)
    names = list(next(iter(times.values())))
    picture, grid = canvas(1, len(times), (3.4 * len(times) + 1.4, 0.19 * len(names) + 1))
    for axes, (setting, methods) in zip(grid.flat, times.items(), strict=True):
        _bars(axes, setting, methods)
    for axes in grid.flat[1:]:
        axes.set_yticklabels([])
    [name] = pictures(folder)
    return save(picture, *(target / f"{name}.{suffix}" for suffix in suffixes))


def _bars(axes: Any, setting: str, methods: Mapping[str, NDArray[np.float64]]) -> None:
    means = [1e3 * values.mean() for values in methods.values()]
    errors = [1e3 * float(standard_error(values)) for values in methods.values()]
    colours = [colour(name) if name in ARMS else EDGE for name in methods]
    places = np.arange(len(means))
    axes.barh(places, means, xerr=errors, color=colours, height=0.7, error_kw={"linewidth": 1})
    axes.set_yticks(places, [_title(name) for name in methods])
    axes.invert_yaxis()
    axes.axvline(means[0], color=SOFT, linewidth=0.7, linestyle=":")
    axes.set_title(setting)
    axes.set(xlabel="Milliseconds of an update", ylim=(len(means) - 0.4, -0.6))
    rounds = {len(values) for values in methods.values()}
    footnote(axes, f"{max(rounds)} rounds; bars: {BAND}; dotted: {_title(PEER)}")


def _enough(times: Times) -> str:
    """Why these rounds suffice, by the intervals that they leave."""
    found = [ratio(m, name) for m in times.values() for name in m if name != PEER]
    widest = 100 * max((each.high - each.low) / 2 / each.estimate for each in found)
    return (
        "The paper's bars are of 10 000 updates in a row. Here each method makes in each round as "
        f"many as take {TARGET:g} s, times '--scale', at least one and at most 200. What varies is "
        "not single updates but the machine from round to round, and methods that take turns share "
        f"it: the widest interval of a ratio is ±{widest:.1f}%. More updates could reorder only "
        "methods that are closer than that."
    )


def page(folder: Path) -> list[str]:
    """The table of times."""
    times = load(folder)
    rounds = len(next(iter(next(iter(times.values())).values())))
    lines = [
        f"Forward pass, backward pass and step: milliseconds, mean over {rounds} rounds (on CPU of "
        f"one thread's own time); and how many times the time of {PEER} in the same round "
        "(interquartile mean, 95% interval).",
        "",
        _enough(times),
        "",
        "| method | " + " | ".join(f"{setting} | ÷ SGD" for setting in times) + " |",
        "|---|" + "---:|---:|" * len(times),
    ]
    for name in next(iter(times.values())):
        cells = []
        for methods in times.values():
            found = ratio(methods, name)
            shown = f"{found.estimate:.2f} [{found.low:.2f}, {found.high:.2f}]"
            cells += [f"{1e3 * methods[name].mean():.2f}", "1" if name == PEER else shown]
        lines.append(f"| {_title(name)} | {' | '.join(cells)} |")
    return [*lines, ""]  # notes may follow
