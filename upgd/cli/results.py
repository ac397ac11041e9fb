"""``upgd results``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from upgd.cli.app import app, mistakes_are_one_line, out, printable
from upgd.paper.pages import Site
from upgd.study import write_atomically


@app.command()
@mistakes_are_one_line
def results(
    folder: Annotated[Path, typer.Argument(help="Tables of 'upgd reproduce', as docs/results.")],
    page: Annotated[
        list[Path] | None,
        typer.Option(help="A page with parts to make anew, such as README.md. Repeatable."),
    ] = None,
    figures: Annotated[bool, typer.Option(help="Draw the figures too.")] = True,
) -> None:
    """Make pages and figures of tables: one per experiment, an index, and parts of other pages."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; 'upgd reproduce' writes STUDY/results")
    site = Site(folder)
    written = site.draw() if figures else []
    for path, text in site.texts(page or []).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text.encode())
            written.append(path)
    for path in written:
        out.print(f"wrote {printable(path)}", highlight=False, markup=False, soft_wrap=True)
