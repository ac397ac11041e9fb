"""Imports point one way: down the layers, and without cycles inside a folder.

All imports count, also those inside functions. Within a folder, imports under ``TYPE_CHECKING`` do
not: they serve annotations only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

LAYERS = """
cli
lab
arena
paper
report
rl
study
pipe
integrations
stream
engine
kept
ledger
networks
streams
upgd
monitor
utility
optim
curvature
kernels
rules metrics pages sources caches extras filesystem processes text threads timing
"""
"""Folders and modules of the package, top to bottom; ``upgd`` is the package's ``__init__``.

A name may import names on lower lines. Names on one line do not import each other.
"""

CYCLES = {
    # One backend of the fused step per device; the CUDA one shares the plan's helpers.
    ("upgd.optim.fused_cuda", "upgd.optim.fused"),
    # A scheduler makes its pool by name, and pools share their base class.
    ("upgd.study.ray_pool", "upgd.study.pools"),
}
"""Imports that close a cycle today, as (importer, imported). Remove them; do not add any."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, ast.Module]:
    return {module_name(p): ast.parse(p.read_text("utf-8")) for p in ROOT.glob("upgd/**/*.py")}


def nodes(tree: ast.AST, typing: bool) -> Iterator[ast.AST]:
    """All nodes of a module; without `typing`, not those under ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if typing or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from nodes(node, typing)


def imported(name: str, typing: bool) -> set[str]:
    """The package's modules that a module imports."""
    found = set()
    for node in nodes(modules()[name], typing):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules() else str(node.module))
    return {each for each in found if each in modules()}


def layer(module: str) -> str:
    """The folder or module below the package that a module belongs to."""
    return [*module.split("."), "upgd"][1]


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """The modules of one cycle, or none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(edges[name]):
            found = visit(other, [*path, name])
            if found:
                return found
        done.add(name)
        return []

    return next(filter(None, (visit(name, []) for name in sorted(edges))), [])


def edges(without: set[tuple[str, str]]) -> dict[str, set[str]]:
    """What each module imports of its own layer at run time."""
    return {
        name: {
            other
            for other in imported(name, typing=False)
            if layer(other) == layer(name) and (name, other) not in without
        }
        for name in modules()
    }


def test_every_folder_and_module_has_a_layer() -> None:
    assert sorted(LAYERS.split()) == sorted({layer(name) for name in modules()})


def test_imports_point_down() -> None:
    rank = {n: i for i, line in enumerate(LAYERS.strip().splitlines()) for n in line.split()}
    wrong = [
        f"{name} imports {other}"
        for name in modules()
        for other in imported(name, typing=True)
        if layer(name) != layer(other) and rank[layer(name)] >= rank[layer(other)]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_cycles_inside_a_folder() -> None:
    assert cycle(edges(CYCLES)) == []


def test_known_cycles_are_still_there() -> None:
    """A cycle that was removed is removed from the list, too."""
    for each in CYCLES:
        assert cycle(edges(CYCLES - {each})), f"{each} closes no cycle any more"


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
