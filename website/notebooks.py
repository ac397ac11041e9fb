"""Tutorials: executes the notebooks of ``docs/tutorials`` and shows them as pages.

Notebooks are committed without outputs. What an execution gave is kept under ``build/notebooks``
until the notebook or the package changes. ``UPGD_DOCS_NOTEBOOKS=0`` shows them unexecuted.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from website.formulas import to_mathml

ROOT = Path(__file__).parents[1]
FOLDER = "tutorials"
KEPT = ROOT / "build" / "notebooks"
LONGEST = 600  # seconds that a cell may take
FORMULA = re.compile(
    r"```.*?```|`[^`]*`|\$\$(?P<display>.+?)\$\$|(?<!\\)\$(?P<inline>[^$\n]+?)\$", re.S
)
log = logging.getLogger("mkdocs.hooks.notebooks")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for every notebook, and its figures."""
    for path in sorted(Path(config.docs_dir, FOLDER).glob("*.ipynb")):
        page, images = to_markdown(executed(path), path.stem)
        files.append(File.generated(config, f"{FOLDER}/{path.stem}.md", content=page))
        for name, content in images.items():
            files.append(File.generated(config, f"{FOLDER}/{name}", content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to notebooks lead to their pages."""
    return re.sub(r"\]\(([\w./-]+)\.ipynb(#[^)]*)?\)", r"](\1.md\2)", markdown)


def executed(path: Path) -> Any:
    """The notebook with its outputs, from an earlier build where nothing has changed since."""
    notebook: Any = nbformat.read(path, as_version=4)
    if os.environ.get("UPGD_DOCS_NOTEBOOKS") == "0":
        return notebook
    kept = KEPT / f"{path.stem}-{_version(path)}.ipynb"
    if kept.exists():
        return nbformat.read(kept, as_version=4)
    from nbclient import NotebookClient

    started = time.perf_counter()
    os.environ.setdefault("PYTHONPATH", str(ROOT))  # for the kernel
    with tempfile.TemporaryDirectory() as folder:  # what a notebook writes does not stay
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=LONGEST, resources=resources).execute()
    log.info("executed %s in %.0f s", path.name, time.perf_counter() - started)
    KEPT.mkdir(parents=True, exist_ok=True)
    for old in KEPT.glob(f"{path.stem}-*.ipynb"):
        old.unlink()
    nbformat.write(notebook, kept)
    return notebook


def _version(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes())
    for source in sorted(ROOT.glob("upgd/**/*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def to_markdown(notebook: Any, stem: str) -> tuple[str, dict[str, bytes]]:
    """The page of a notebook, and the images that it shows by their names."""
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(FORMULA.sub(_formula, cell.source))
        elif cell.cell_type == "code" and cell.source.strip():
            parts.append(fenced(cell.source, "python"))
            for output in merged(cell.get("outputs", [])):
                parts.append(_shown(output, stem, images))
    parts.append(f'<a href="{stem}.ipynb" download>This page as a notebook</a>')
    return "\n\n".join(part for part in parts if part) + "\n", images


def _formula(match: re.Match[str]) -> str:
    """A formula between dollars as MathML; code stays as it is."""
    if match["display"]:
        return f'<div class="formula">{to_mathml(match["display"], display=True)}</div>'
    inline = match["inline"]
    return f'<span class="formula-inline">{to_mathml(inline)}</span>' if inline else match[0]


def merged(outputs: list[Any]) -> Iterator[Any]:
    """Outputs with neighbouring pieces of a stream in one; standard error is not shown."""
    text: list[str] = []
    for output in outputs:
        if output.output_type == "stream":
            text += [output.text] if output.name == "stdout" else []
            continue
        if text:
            yield {"data": {"text/plain": "".join(text)}}
            text = []
        yield output
    if text:
        yield {"data": {"text/plain": "".join(text)}}


def _shown(output: Any, stem: str, images: dict[str, bytes]) -> str:
    """An output as Markdown: a figure, a table, or text."""
    data = output.get("data", {})
    if "image/png" in data:
        name = f"{stem}_{len(images) + 1}.png"
        images[name] = base64.b64decode(data["image/png"])
        return f"![Figure {len(images)}]({name})"
    if "text/html" in data:
        table = re.sub(r"\n\s*", "", data["text/html"])  # a blank line would end it
        return f'<div class="output">{table}</div>'
    if "text/plain" in data:
        lines = [line.rsplit("\r", 1)[-1] for line in data["text/plain"].rstrip().split("\n")]
        return fenced("\n".join(lines), "text")
    return ""


def fenced(text: str, language: str) -> str:
    """A code block; its fence is longer than any in the text."""
    longest = max(map(len, re.findall("`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
