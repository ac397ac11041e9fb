"""What the site is built with: formulas, docstrings, notebooks, links."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("griffe")
pytest.importorskip("nbformat")
import nbformat

from website import notebooks, pages
from website.docstrings import to_markdown
from website.formulas import FormulaError, to_mathml

ROOT = Path(__file__).parents[1]


# ------------------------------------------------------------------------------ formulas
@pytest.mark.parametrize(
    ("latex", "mathml"),
    [
        (r"\frac12", "<mfrac><mn>1</mn><mn>2</mn></mfrac>"),
        (r"12 x", "<mn>12</mn><mi>x</mi>"),
        (r"w_i^2", "<msubsup><mi>w</mi><mi>i</mi><mn>2</mn></msubsup>"),
        (r"w^2_i", "<msubsup><mi>w</mi><mi>i</mi><mn>2</mn></msubsup>"),
        (r"\bar w^2", '<msup><mover accent="true"><mi>w</mi><mo>¯</mo></mover><mn>2</mn></msup>'),
        (r"\sqrt{a+b}", "<msqrt><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow></msqrt>"),
        (r"a < b", "<mi>a</mi><mo>&lt;</mo><mi>b</mi>"),
        (r"\operatorname{rms}", "<mtext>rms</mtext>"),
    ],
)
def test_formulas(latex: str, mathml: str) -> None:
    assert to_mathml(latex) == f"<math>{mathml}</math>"


def test_rows_of_a_formula() -> None:
    tree = ElementTree.fromstring(to_mathml(r"a &= b \\ c &= d + 1", display=True))
    assert [len(row) for row in tree.iter("mtr")] == [2, 2]
    assert tree.get("display") == "block"


@pytest.mark.parametrize("latex", [r"\unknown x", r"\frac{1}{2", r"\sqrt{x"])
def test_what_is_no_formula_is_an_error(latex: str) -> None:
    with pytest.raises(FormulaError):
        to_mathml(latex)


# ---------------------------------------------------------------------------- docstrings
def test_docstrings_become_markdown() -> None:
    text = to_markdown(
        "See :class:`~upgd.UPGD` and :math:`a^2`.\n\n"
        ".. math::\n    a \\\\\n    b\n\n"
        "===== ======\n``x`` first\n      more\n``y`` second\n===== ======\n\n"
        "Example:\n    >>> 1\n"
    )
    assert '<autoref optional identifier="upgd.UPGD"><code>UPGD</code></autoref>' in text
    assert "<math><msup><mi>a</mi><mn>2</mn></msup></math></span>." in text
    assert '<div class="formula"><math display="block"><mtable>' in text
    assert "| ``x`` | first more |\n| ``y`` | second |" in text
    assert "Examples:\n" in text
    assert ".. math" not in text


# ----------------------------------------------------------------------------- notebooks
def notebook(*cells: Any) -> Any:
    return nbformat.v4.new_notebook(cells=list(cells))


def test_a_notebook_becomes_a_page() -> None:
    v4 = nbformat.v4
    png = base64.b64encode(b"image").decode()
    outputs = [
        v4.new_output("stream", name="stdout", text="one\n"),
        v4.new_output("stream", name="stdout", text="10%\r100%\n"),
        v4.new_output("stream", name="stderr", text="a warning"),
        v4.new_output("display_data", data={"image/png": png, "text/plain": "<Figure>"}),
        v4.new_output("execute_result", data={"text/html": "<table>\n\n</table>"}),
    ]
    code = v4.new_code_cell("print('```')", outputs=outputs)
    text = v4.new_markdown_cell("# Title\n\n$a^2$, but `$HOME`")
    page, images = notebooks.to_markdown(notebook(text, code), "01_a")
    assert "<msup><mi>a</mi><mn>2</mn></msup></math></span>, but `$HOME`" in page
    assert page.split("`$HOME`")[1].startswith(
        "\n\n````python\nprint('```')\n````\n\n```text\none\n100%\n```"
    )
    assert images == {"01_a_1.png": b"image"}
    assert "![Figure 1](01_a_1.png)" in page
    assert '<div class="output"><table></table></div>' in page
    assert "warning" not in page
    assert "<Figure>" not in page
    assert page.endswith('<a href="01_a.ipynb" download>This page as a notebook</a>\n')


def test_links_to_notebooks_lead_to_their_pages() -> None:
    shown = notebooks.on_page_markdown("[a](tutorials/01_a.ipynb#x), `b.ipynb`, [c](c.md)")
    assert shown == "[a](tutorials/01_a.md#x), `b.ipynb`, [c](c.md)"


def test_notebooks_are_executed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setattr(notebooks, "KEPT", tmp_path / "kept")
    monkeypatch.delenv("UPGD_DOCS_NOTEBOOKS", raising=False)
    path = tmp_path / "01_a.ipynb"
    cell = f"with open({str(tmp_path / 'runs')!r}, 'a') as file:\n    file.write('x')\nprint(6 * 7)"
    nbformat.write(notebook(nbformat.v4.new_code_cell(cell)), path)
    for _ in range(2):
        assert "```text\n42\n```" in notebooks.to_markdown(notebooks.executed(path), "01_a")[0]
    assert (tmp_path / "runs").read_text() == "x"
    monkeypatch.setenv("UPGD_DOCS_NOTEBOOKS", "0")
    assert "```text" not in notebooks.to_markdown(notebooks.executed(path), "01_a")[0]


# ---------------------------------------------------------------------------------- links
@pytest.mark.parametrize(
    ("page", "link", "shown"),
    [
        ("a.md", "[x](b.md#c)", "[x](b.md#c)"),
        ("a.md", "[x](../CONTRIBUTING.md#tests)", "[x](contributing.md#tests)"),
        ("results/a.md", "[x](../../README.md)", "[x](../index.md)"),
        ("results/a.md", "[`x.py`](../../upgd/x.py)", "`x.py`"),
        ("a.md", "```\n[x](../upgd/x.py)\n```", "```\n[x](../upgd/x.py)\n```"),
    ],
)
def test_links_out_of_docs(page: str, link: str, shown: str) -> None:
    here: Any = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert pages.on_page_markdown(link, page=here) == shown


def test_a_folder_in_the_navigation_stands_for_its_pages(tmp_path: Path) -> None:
    for name in ("README", "b", "a", "notes"):
        path = tmp_path / "some" / f"{name}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<!-- generated -->\n\n# Page {name}\n")
    found = pages._expanded([{"Some": "some/"}, {"None": "empty/"}, "x.md"], tmp_path)
    expected = [{f"Page {n}": f"some/{n}.md"} for n in ("README", "a", "b")]
    assert found == [{"Some": expected}, "x.md"]


# ------------------------------------------------------------------------------- markdown
def swallowed(text: str) -> list[str]:
    """Numbered items that Python-Markdown makes part of the one before.

    After an item with paragraphs of its own, the next needs an empty line before it.
    """
    found, paragraphs, before = [], False, ""
    for line in text.splitlines():
        item = re.match(r"\d+\. ", line)
        if item and paragraphs and before:
            found.append(line)
        if item or (line and not line.startswith(" ")):
            paragraphs = False
        elif line and not before:
            paragraphs = True
        before = line
    return found


def test_items_of_numbered_lists_are_items() -> None:
    assert swallowed("1. One\n\n    more\n2. Two") == ["2. Two"]
    assert swallowed("1. One\n\n    more\n\n2. Two\n3. Three\n   and more\n4. Four") == []
    for path in (ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")):
        assert swallowed(path.read_text(encoding="utf-8")) == [], path


def test_what_follows_a_table_is_no_row() -> None:
    follows = re.compile(r"^\|.*\|\n(?!\||\n|\Z).*", re.M)
    assert follows.search("| a |\n|---|\n| 1 |\nText")
    assert not follows.search("| a |\n|---|\n| 1 |\n\nText\n\n| b |\n")
    for path in (ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")):
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        assert follows.search(text) is None, path
