"""The comparisons of layered stacks bite: each deliberate error in their kernels is noticed.

The kernels are executed by Python (:mod:`tests.plain_numba`), so that no mutant is compiled.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("numba")

from tests import layered_methods, plain_numba
from tests.stacks import Trace, feed, plain, small
from upgd.engine.dense import Learner
from upgd.engine.layered_cpu import LayeredCpuStack
from upgd.kernels.layout import Layout
from upgd.networks import build

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # overflow, division by zero
SIZES = (16, 6, 5, 10)
CUTS = (1, 7, 16)
NORMS = {"layer_norm": True, "input_norm": True}


class Mutant(NamedTuple):
    """An error: what stands in the source, what takes its place, and a method that shows it."""

    old: str
    new: str
    method: str = "everywhere"

    def __call__(self, text: str) -> str:
        assert text.count(self.old) == 1, f"{self.old!r} stands there {text.count(self.old)} times"
        return text.replace(self.old, self.new)


MUTANTS = {
    "inputs not less their mean": Mutant(
        "(acts[place + j] - statistics[0, j]) / math", "acts[place + j] / math"
    ),
    "variance before the sample": Mutant("rest * (statistics[1, j] +", "(statistics[1, j] +"),
    "the next chunk's sample counted twice": Mutant("if turn + 1 < steps:", "if turn < steps:"),
    "LayerNorm not differentiated": Mutant(
        "scale * (delta[i] - plain - normed[i] * along)", "scale * delta[i]"
    ),
    "steps from 0 on": Mutant("step - began[0] + 1, step, key", "step - began[0], step, key"),
    "the first layer is the head": Mutant(
        "ONE if layer == count - 1 else ZERO", "ONE if layer == 0 else ZERO"
    ),
    "biases are weights": Mutant('ends = "inputs - whole" if', 'ends = "inputs - whole + 1" if'),
    "a sum of the last row": Mutant("+= np.float64(total(sum_", "= np.float64(total(sum_"),
    "biases within sizes": Mutant(
        "inside = less(lanes() + _U(j), spread(_U(fan_in)))",
        "inside = less(lanes() + _U(j), spread(_U(fan_in + 1)))",
    ),
    "products before the biases": Mutant(
        'calls.append("products(w, layers, acts, here, following, pre)")', "pass", "biases-after"
    ),
    "biases in the pass that sums": Mutant(
        "if not summed & set(phase.reads):", "if True:", "biases-after"
    ),
    "the best units go": Mutant(
        "kept[score + i] < kept[score + best]", "kept[score + i] > kept[score + best]", "recycled"
    ),
    "outputs are lost": Mutant("if average >= 0:", "if average < -1:", "recycled"),
    "old products of new units": Mutant(
        "if layer == 1:\n                row", "if layer == 2:\n                row", "recycled"
    ),
    "units are born old": Mutant("+ first + unit] = starts[k]", "+ first + unit] += 0", "recycled"),
    "uniform variance without its third": Mutant("* 3.0**-0.5", "", "recycled"),
    "states that forget the weight": Mutant("if not copied[k]:", "if True:", "dormant"),
    "every step": Mutant("if every >= 0 and t %", "if every >= 9 and t %", "dormant"),
}  # fmt: skip


@cache
def expected(name: str) -> tuple[Trace, Any]:
    """What the plain optimizer gives, and the optimizer."""
    kept: list[Any] = []
    model = build(SIZES, 3, "tanh", **NORMS)
    return plain(learner(name), small(3, 100), CUTS[-1], SIZES, model=model, kept=kept), kept[0]


def learner(name: str) -> Learner:
    quick = {"rate": 0.3, "maturity": 2.0} if name == "recycled" else {}
    return Learner(name, quick | ({"tau": 0.9, "period": 3.0} if name == "dormant" else {}), 3)


def run_and_compare(name: str) -> None:
    common: dict[str, Any] = {"loss": "cross_entropy", "steps": CUTS[-1], "window": 1, "threads": 1}
    common |= {"activation": "tanh", "dtype": np.float64, **NORMS}
    stack = LayeredCpuStack(Layout(SIZES), [learner(name)], **common)
    samples = feed([learner(name)], lambda seed: small(seed, 100))
    for start, stop in zip((0, *CUTS), CUTS, strict=False):
        stack.advance(samples.chunk(start, stop - start))
    layered_methods.compare(stack, *expected(name))


@pytest.mark.parametrize("name", sorted({m.method for m in MUTANTS.values()}))
def test_the_kernels_pass(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    layered_methods.add()
    plain_numba.execute(monkeypatch, "cpu_layered", lambda text: text, tmp_path)
    run_and_compare(name)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    layered_methods.add()
    plain_numba.execute(monkeypatch, "cpu_layered", MUTANTS[name], tmp_path)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run_and_compare(MUTANTS[name].method)
