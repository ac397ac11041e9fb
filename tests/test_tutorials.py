"""The notebooks of docs/tutorials run on what is installed, and show something."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
pytest.importorskip("ipykernel", reason="needs ipykernel")
pytest.importorskip("matplotlib", reason="needs matplotlib")
pytest.importorskip("sklearn", reason="needs scikit-learn")

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "tutorials"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PATIENCE = 600  # seconds for a cell; only guards against hanging

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def text(notebook: Any, kind: str) -> str:
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == kind)


@pytest.mark.slow  # `make docs` executes them all
@notebooks
def test_a_notebook_runs_and_draws(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own assertions hold what its text says."""
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = read(path)
    kept = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=PATIENCE, resources=kept).execute()
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", [])]
    figures = [each["data"]["image/png"] for each in outputs if "image/png" in each.get("data", {})]
    assert figures
    assert all(base64.b64decode(each).startswith(b"\x89PNG") for each in figures)
    warned = [each.text for each in outputs if each.get("name") == "stderr"]
    assert not warned


@notebooks
def test_a_notebook_is_committed_without_outputs(path: Path) -> None:
    notebook = read(path)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
        assert not cell.metadata
    assert notebook.metadata.kernelspec.name == "python3"
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert path.read_text() == nbformat.writes(notebook) + "\n"


@notebooks
def test_a_notebook_uses_public_names(path: Path) -> None:
    code = text(read(path), "code")
    assert not re.findall(r"(?:^|[\s.])_[a-z]\w*", code)
    assert "assert " in code  # something that its text says is checked


@notebooks
def test_links_of_a_notebook_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text(read(path), "markdown"))
    assert targets
    missing = [target for target in targets if not (FOLDER / target).exists()]
    assert not missing


def test_the_index_lists_all_notebooks_in_order() -> None:
    listed = re.findall(r"\]\((\d\d_\w+\.ipynb)\)", (FOLDER / "index.md").read_text())
    assert listed == [path.name for path in NOTEBOOKS]
