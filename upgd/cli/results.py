"""``upgd results``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from upgd.cli.app import command, wrote


@command(examples=("upgd results studies/paper/results", "upgd results docs/results --no-figures"))
def results(
    folder: Annotated[Path, Argument(help="Tables of 'upgd reproduce', as docs/results.")],
    page: Annotated[
        list[Path] | None, Option(help="A page with generated parts. Repeatable.")
    ] = None,
    figures: Annotated[bool, Option(help="Draw the figures too.")] = True,
) -> None:
    """Generate pages and figures from tables of results.

    A page per experiment, an index, and the generated parts of other pages.
    """
    from upgd.ledger import write_atomically
    from upgd.paper.pages import Site

    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; 'upgd reproduce' writes STUDY/results")
    site = Site(folder)
    if not site.folders:
        raise ValueError(f"{folder} has no tables; 'upgd reproduce' writes some to STUDY/results")
    site.check(figures)
    texts = site.texts(page or [])  # a mistake in one is found before anything is written
    written = site.draw() if figures else []
    for path, text in texts.items():
        if not path.exists() or path.read_bytes() != text.encode():
            write_atomically(path, text.encode())
            written.append(path)
    for path in written:
        wrote(path)
