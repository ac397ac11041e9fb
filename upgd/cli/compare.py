"""``upgd compare``: UPGD and AdaUPGD against the user's optimizer, on the user's data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from upgd.cli import options as o
from upgd.cli.app import command, say, wrote
from upgd.cli.arguments import length, numbers, seed_list


@command(
    interrupted="nothing was written",
    examples=(
        "upgd compare mine.py                        # defines model and data",
        "upgd compare samples.npz --hidden 64-32 --stream",
    ),
)
def compare(
    what: Annotated[
        Path,
        Argument(help="A Python file that defines model and data, or an .npz file with x and y."),
    ],
    hidden: Annotated[
        str, Option(help="Hidden units of an MLP, such as 64-32, or none, instead of a model.")
    ] = "",
    steps: Annotated[
        str, Option(help="Updates per run; default 1000, or one pass over a stream.")
    ] = "",
    batch: Annotated[
        int | None, Option(min=1, help="Samples per update; default 32, 1 of a stream.")
    ] = None,
    held_out: Annotated[
        float | None, Option(help="The share of the data that is held out; default 0.2.")
    ] = None,
    stream: Annotated[
        bool, Option("--stream", help="Keep the data's order, and judge predictions online.")
    ] = False,
    seeds: o.SEEDS = "3",
    factors: Annotated[
        str, Option(help="Step sizes as multiples of each optimizer's own, such as 0.1,1,10.")
    ] = "",
    settings: Annotated[
        list[str] | None,
        Option("--set", help="Of UPGD and AdaUPGD, such as sigma=0.01. Repeatable."),
    ] = None,
    device: o.DEVICE = "cpu",
    output: Annotated[
        Path | None, o.OUTPUT("--output", "-o", help="The figure; default compare.png.")
    ] = None,
    quiet: o.QUIET = False,
    as_json: o.JSON = False,
) -> None:
    """Compare UPGD and AdaUPGD with your optimizer, on your own data.

    The file defines model and data, and if you like held_out, loss and optimizer, as upgd.lab's
    compare() takes them. Prints a table and a verdict, and draws a figure.
    """
    from upgd.lab.comparing import compare as run_comparison
    from upgd.lab.comparison import check_figure

    check_figure(output)
    found = run_comparison(
        **_arguments(what, hidden, held_out), steps=length(steps), batch=batch, stream=stream,
        seeds=seed_list(seeds), factors=_factors(factors), device=device,
        settings=numbers(settings or []), quiet=quiet or as_json,
    )  # fmt: skip
    figure = found.plot(output)
    if as_json:
        facts = {"metrics": list(found.metrics), "results": found.rows, "best": found.best}
        print(json.dumps({**facts, "verdict": found.verdict, "figure": str(figure)}))
    elif not quiet:
        for line in str(found).splitlines():
            say(line)
        wrote(figure)


def _arguments(what: Path, hidden: str, held_out: float | None) -> dict[str, Any]:
    """What a file and the options say of model and data."""
    from upgd.lab.comparing import from_file
    from upgd.study.prepare import units

    if what.suffix not in (".py", ".npz"):
        raise ValueError(f"{what} is neither a Python file nor an .npz file")
    found: dict[str, Any] = from_file(what) if what.suffix == ".py" else {"data": what}
    if hidden and "model" in found:
        raise ValueError(f"{what} defines a model; leave --hidden out")
    if hidden:
        found["model"] = units(hidden)
    if "model" not in found:
        raise ValueError(
            f"{what} has no model; define one in a Python file, or give --hidden 64-32"
        )
    return found if held_out is None else {**found, "held_out": held_out}


def _factors(text: str) -> list[float] | None:
    try:
        return [float(part) for part in text.split(",")] if text else None
    except ValueError:
        raise ValueError(f"factors are numbers, such as 0.1,1,10; got {text!r}") from None
