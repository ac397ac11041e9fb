"""``lab.check``: what is right passes, and each kind of wrong method is found out."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from upgd import lab
from upgd.engine.general import GeneralStack
from upgd.optim.custom import rule_row
from upgd.optim.foreign import torch_row
from upgd.optim.registry import METHODS, Row
from upgd.rules.ops import sigmoid


def pulled(w: Any, g: Any, start: Any, noise: Any, lr: Any, kappa: Any, sigma: Any) -> Any:
    """Towards the start, perturbed."""
    return w - lr * (g + kappa * (w - start) + sigma * noise)


def worth_trace(w: Any, g: Any, worth: Any, memory: Any) -> Any:
    """A trace."""
    return memory * worth + (1 - memory) * (-g * w)


def guarded(w: Any, g: Any, worth: Any, eta: Any, lr: Any) -> Any:
    """Gated by it."""
    return w - lr * g * sigmoid(worth / -eta)


def climbing(w: Any, g: Any, lr: Any) -> Any:
    """Away from the minimum."""
    return w + lr * g


def verdicts(method: Any) -> dict[str, tuple[str, str]]:
    return {each.check: (each.verdict, each.detail) for each in lab.check(method)}


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Any:
    def register(row: Row) -> str:
        monkeypatch.setitem(METHODS, row.name, row)  # type: ignore[arg-type]
        return row.name

    return register


def test_good_rules_pass(own: Any) -> None:
    one = rule_row("pulled", pulled, states={"start": "weight"}, lr=0.05, kappa=0.1, sigma=0.01)
    two = rule_row(
        "guarded", (worth_trace, guarded), states=["worth"], reduce="max", lr=0.1, memory=0.9
    )
    for row in (one, two):
        found = lab.check(own(row))
        assert found.ok, str(found)
        assert [each.verdict for each in found].count("ok") >= 9
        assert str(found).splitlines()[0].split() == [row.name, "verdict", "detail"]
        assert "<td>ok</td>" in found._repr_html_()


def test_a_torch_optimizer_passes(own: Any) -> None:
    found = lab.check(own(torch_row("heavy-ball", torch.optim.SGD, lr=0.01, momentum=0.9)))
    assert [each.verdict for each in found] == ["ok"] * 4, str(found)


def test_a_rule_that_climbs_does_not_learn(own: Any) -> None:
    found = verdicts(own(rule_row("climbing", climbing, lr=0.1)))
    assert found["loss falls"][0] == "FAILED"
    assert found["foreach = plain"][0] == "ok"


def test_an_executor_that_differs_is_found(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own(rule_row("pulled", pulled, states={"start": "weight"}, lr=0.05, kappa=0.1, sigma=0.01))
    right = GeneralStack._update

    def wrong(self: Any, group: Any, states: Any) -> None:
        right(self, group, states)
        self.weights += 1e-8

    monkeypatch.setattr(GeneralStack, "_update", wrong)
    found = verdicts("pulled")
    assert found["general stack = eager"][0] == "FAILED"
    assert "e-07, more than 1e-09" in found["general stack = eager"][1]
    assert not lab.check("pulled").ok


class Forgetful(torch.optim.SGD):
    """Its step size depends on a counter that no checkpoint has."""

    count = itertools.count()

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.01 / (1 + next(Forgetful.count))
        return super().step(closure)


class Moody(torch.optim.SGD):
    """Draws from a generator that nobody seeds."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = np.random.default_rng().uniform(0.01, 0.02)
        return super().step(closure)


class Broken(torch.optim.SGD):
    """Raises."""

    def step(self, closure: Any = None) -> Any:
        raise IndexError("no such thing\nand more")


@pytest.mark.parametrize(
    ("cls", "failed"),
    [(Forgetful, "run resumed"), (Moody, "same seed, same bits"), (Broken, "loss falls")],
)
def test_a_wrong_optimizer_is_found(own: Any, cls: Any, failed: str) -> None:
    verdict, detail = verdicts(own(torch_row("wrong", cls, lr=0.01)))[failed]
    assert verdict == "FAILED"
    assert "\n" not in detail
    assert cls is not Broken or detail == "IndexError: no such thing"


def test_a_class_that_overrides_step_is_not_stacked(own: Any) -> None:
    row = METHODS["sgdw"]

    class Halved(row.optimizer):  # type: ignore[name-defined, misc]
        """SGDW with another step."""

        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    own(Row("halved", "Halved", Halved, row.method, source="0" * 16))
    verdict, detail = verdicts("halved")["stack on CPU = eager"]
    assert (verdict, detail) == ("skipped", "Halved overrides step()")


def test_unknown_methods() -> None:
    with pytest.raises(KeyError, match="unknown method 'l3-init'"):
        lab.check("l3-init")
