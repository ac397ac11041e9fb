"""Compiled rules compute what the rules say, in as few passes as a person would need."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases import every_rule
from upgd.optim.program import Program
from upgd.optim.registry import METHODS, Row
from upgd.rules.vocabulary import Phase

SHAPES = [(3, 4), (5,), (2, 3, 2)]
LISTS = {"w", "g", "h", "f", "s", "noise"}


def values_for(row: Row, phase: Phase, packed: bool) -> tuple[dict[str, Any], frozenset[str]]:
    torch.manual_seed(0)
    lists = frozenset(phase.reads) & (LISTS | set(row.states))
    values: dict[str, Any] = {}
    for name in phase.reads:
        if name in lists:
            tensors = [torch.randn(s, dtype=torch.float64) for s in SHAPES]
            if name == "second_moment":
                tensors = [t.abs() for t in tensors]
            values[name] = torch.cat([t.flatten() for t in tensors]) if packed else tensors
        elif name == "eta" or name.startswith("c_"):
            values[name] = torch.tensor(0.7, dtype=torch.float64)
        else:
            values[name] = 0.3
    return values, lists


def clone(values: dict[str, Any]) -> dict[str, Any]:
    def copy(v: Any) -> Any:
        if isinstance(v, list):
            return [t.clone() for t in v]
        return v.clone() if isinstance(v, torch.Tensor) else v

    return {name: copy(v) for name, v in values.items()}


def flat(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.cat([t.flatten() for t in value])


@every_rule
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("silent", [True, False])
def test_programs_equal_their_rules(row: Row, packed: bool, own: bool, silent: bool) -> None:
    for phase in row.method.phases:
        values, lists = values_for(row, phase, packed)
        absent = frozenset({"noise"} & set(phase.reads)) if silent else frozenset()
        program = Program(
            phase.fn,
            phase.reads,
            phase.writes,
            lists=lists,
            on_device=frozenset(n for n in values if n == "eta" or n.startswith("c_")),
            absent=absent,
            owned=lists & {*phase.writes, "noise"} if own else frozenset(),
            packed=packed,
        )
        arguments = [
            0.0 if n in absent else flat(values[n]) if n in lists else values[n]
            for n in phase.reads
        ]
        expected = phase.fn(*arguments)
        expected = expected if isinstance(expected, tuple) else (expected,)
        given = clone(values)
        results = dict(program(given))
        for name, right in zip(phase.writes, expected, strict=True):
            torch.testing.assert_close(flat(results[name]), right, rtol=1e-12, atol=1e-14)
        for name in lists - (set(phase.writes) | {"noise"} if own else set()):
            assert torch.equal(flat(given[name]), flat(values[name])), f"{name} was overwritten"


def lines_of(name: str, phase: int) -> list[str]:
    row = METHODS[name]
    chosen = row.method.phases[phase]
    values, lists = values_for(row, chosen, packed=True)
    device = frozenset(n for n in values if n == "eta" or n.startswith("c_"))
    owned = lists & {*chosen.writes, "noise"}
    program = Program(
        chosen.fn,
        chosen.reads,
        chosen.writes,
        lists=lists,
        on_device=device,
        owned=owned,
        packed=True,
    )
    return program.source.splitlines()[1:-1]


@pytest.mark.parametrize(
    ("name", "phase", "calls"),
    [("upgd", 0, 2), ("upgd", 1, 5), ("n-upgd", 1, 5), ("sgdw", 0, 2), ("adamw", 0, 9)],
)
def test_programs_are_short(name: str, phase: int, calls: int) -> None:
    """AdamW takes PyTorch's own foreach version ten calls."""
    assert len(lines_of(name, phase)) <= calls


def test_a_moving_average_is_one_call() -> None:
    lines = [line for line in lines_of("s-ewc", 0) if "weight_trace" in line]
    assert "lerp_" in lines[0]


def test_rules_may_only_use_what_is_offered() -> None:
    def bad(w: Any, lr: Any) -> Any:
        return w * lr.sqrt()

    with pytest.raises(TypeError, match="sqrt is taken of hyperparameters alone"):
        Program(bad, ("w", "lr"), ("w",), lists=frozenset({"w"}))
    with pytest.raises(TypeError, match="varies with the weight"):
        Program(lambda w, lr: lr * 2, ("w", "lr"), ("w",), lists=frozenset({"w"}))
