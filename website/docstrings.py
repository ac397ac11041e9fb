"""Docstrings as the site shows them: Sphinx's roles, formulas and tables become Markdown."""

from __future__ import annotations

import ast
import re
import textwrap
from typing import Any

from griffe import Extension, NameResolutionError, Object

from website.formulas import to_mathml

ROLE = re.compile(r":(?:func|class|mod|meth|attr|data|obj|exc):`(~?)([^`]+)`")
INLINE = re.compile(r":math:`([^`]+)`")
DISPLAY = re.compile(r"^( *)\.\. math::(.*(?:\n+\1 +\S.*|\n\1 +\S.*)*)", re.M)
TABLE = re.compile(r"^( *)(=+(?: +=+)+)\n((?:.*\n)*?)\1\2 *$", re.M)


class Docstrings(Extension):
    """Rewrites the docstring of every object once it is loaded."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrites the docstring of one object, if it has one."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value + _added(obj), obj)


def _added(obj: Object) -> str:
    """What ``Consolidation`` adds to the docstrings of its subclasses when they are made."""
    if not obj.is_class or "Consolidation" not in map(str, getattr(obj, "bases", ())):
        return ""
    text = ast.literal_eval(str(obj.module.members["_ARGUMENTS"].value))
    return "\n" + textwrap.dedent(text).format(name=obj.name)


def to_markdown(text: str, obj: Object | None = None) -> str:
    """A docstring in Markdown; names that the site documents become links."""
    text = DISPLAY.sub(_display, text)
    text = INLINE.sub(_inline, text)
    text = TABLE.sub(_table, text)
    text = ROLE.sub(lambda m: _reference(m[2], bool(m[1]), obj), text)
    text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.M)
    return re.sub(r"(?<=\S)::$", ":", text, flags=re.M)  # an indented block is code


def _display(match: re.Match[str]) -> str:
    formula = to_mathml(" ".join(match[2].split()), display=True)
    return f'{match[1]}<div class="formula">{formula}</div>'


def _inline(match: re.Match[str]) -> str:
    """In a span, since Markdown takes a line that begins with ``<math>`` for a block."""
    return f'<span class="formula-inline">{to_mathml(" ".join(match[1].split()))}</span>'


def _reference(name: str, short: bool, obj: Object | None) -> str:
    shown = name.rsplit(".", 1)[-1] if short else name
    return f'<autoref optional identifier="{_path(name, obj)}"><code>{shown}</code></autoref>'


def _path(name: str, obj: Object | None) -> str:
    """The whole path of a name, which may be relative to the object that mentions it."""
    while obj is not None and not name.startswith(("upgd.", "torch.")):
        if name in obj.members:
            return f"{obj.path}.{name}"
        try:
            return obj.resolve(name)
        except NameResolutionError:
            obj = obj.parent
    return name


def _table(match: re.Match[str]) -> str:
    """Columns between runs of ``=``; a row without a first cell continues the one above it."""
    spans = [m.span() for m in re.finditer("=+", match[2])]
    rows: list[list[str]] = []
    for line in match[3].splitlines():
        line = line[len(match[1]) :]
        ends = [*(start for start, _ in spans[1:]), None]
        cells = [line[start:end].strip() for (start, _), end in zip(spans, ends, strict=True)]
        if cells[0] or not rows:
            rows.append(cells)
        else:
            rows[-1] = [f"{a} {b}".strip() for a, b in zip(rows[-1], cells, strict=True)]
    head = [" "] * len(spans)
    lines = [head, ["---"] * len(spans), *rows]
    return "\n".join(f"{match[1]}| {' | '.join(row)} |" for row in lines)
