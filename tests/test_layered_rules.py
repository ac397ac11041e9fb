"""Which layered methods are refused, in one line, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from tests import layered_methods
from upgd.optim.custom_layered import layered_row
from upgd.optim.registry import METHODS
from upgd.rules.layered import check
from upgd.rules.vocabulary import Method, Phase, Place, Recycle


def power(x: Any) -> Any:
    return x**2


def centre(x: Any, mean: Any) -> Any:
    return mean + 0.1 * (x - mean)


def activity(x: Any, score: Any) -> Any:
    return 0.9 * score + 0.1 * x


def descend(w: Any, g: Any, lr: Any) -> Any:
    return w - lr * g


def measured(w: Any, g: Any, lr: Any) -> Any:
    return w - lr * g, g * g


def centred(w: Any, g: Any, d: Any, mean: Any, lr: Any) -> Any:
    return w - lr * (g - d * mean)


def perturbed(w: Any, g: Any, noise: Any, lr: Any) -> Any:
    return w - lr * (g + noise)


MOVE, MOVE_BIAS = Phase(descend, ("w",)), Phase(descend, ("w",), over="biases")
POWER = Phase(power, over="inputs", sums=("power",))
MEAN = Phase(centre, ("mean",), over="inputs")
SCORE = Phase(activity, ("score",), over="features")


def of(
    *phases: Phase, kept: dict[Place, tuple[str, ...]] | None = None, **more: Any
) -> Callable[[], None]:
    """What checks a method."""
    return lambda: check(Method(("lr",), phases, kept=kept or {}, **more))


MEANS: dict[Place, tuple[str, ...]] = {"inputs": ("mean",)}
SCORES: dict[Place, tuple[str, ...]] = {"features": ("score",)}
REFUSED = {
    "'power' is the name of two states": of(POWER, MOVE, kept={"inputs": ("power",)}),
    "'bound' is the name of a state, and": of(POWER, MOVE, kept={"layers": ("bound",)}),
    "'lr' is the name of a state, and": of(POWER, MOVE, kept={"layers": ("lr",)}),
    "two phases sum up 'size'": of(
        Phase(measured, ("w",), sums=("size",)),
        Phase(measured, ("w",), over="biases", sums=("size",)),
    ),
    "decays: 'mean' is no state of weights": of(MEAN, MOVE, kept=MEANS, decays={"mean": "lr"}),
    "decays: 'beta' is no hyperparameter": of(
        POWER, MOVE, states=("trace",), decays={"trace": "beta"}
    ),
    "power is 2 at least": of(POWER, MOVE, power=1),
    "no phase writes w": of(POWER),
    "descend runs over inputs and reads 'w'": of(Phase(descend, ("w",), over="inputs"), MOVE),
    "descend writes 'v'; over weights there are": of(Phase(descend, ("v",)), MOVE, MOVE_BIAS),
    "descend has reduce='max'; layered methods have sums": of(
        POWER, Phase(descend, ("w",), reduce="max")
    ),
    "centred reads 'mean' of inputs, which biases do not have": of(
        MEAN, Phase(centred, ("w",)), kept=MEANS
    ),
    "activity sums up over features": of(
        MOVE, Phase(activity, over="features", sums=("all",)), kept=SCORES
    ),
    "measured returns 2 values; written or summed are w": of(POWER, Phase(measured, ("w",))),
    "give either share or threshold": of(MOVE, SCORE, kept=SCORES, recycle=Recycle("score")),
    "'worth' is no state of features": of(MOVE, recycle=Recycle("worth", share="lr")),
    "'rho' is no hyperparameter": of(
        MOVE, SCORE, kept=SCORES, recycle=Recycle("score", share="rho")
    ),
    "fresh weights take the noise": of(
        Phase(perturbed, ("w",)), SCORE, kept=SCORES, recycle=Recycle("score", share="lr")
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_no_executor_could_run_is_refused(reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        REFUSED[reason]()


def test_what_is_nearly_that_is_accepted() -> None:
    of(MEAN, Phase(centred, ("w",)), MOVE_BIAS, kept=MEANS)()
    of(MOVE, SCORE, kept=SCORES, recycle=Recycle("score", share="lr"))()


@pytest.mark.parametrize("name", [n for n, row in METHODS.items() if row.method.layered])
def test_own_methods_keep_to_it(name: str) -> None:
    check(METHODS[name].method)


@pytest.mark.parametrize("name", layered_methods.METHODS)
def test_methods_that_stacks_are_tested_with_keep_to_it(name: str) -> None:
    check(layered_methods.METHODS[name])


def averaged(w: Any, g: Any, power: Any, trace: Any, c_trace: Any, lr: Any, beta: Any) -> Any:
    trace = beta * trace + (1 - beta) * g
    return w - lr * trace / c_trace / (1 + power), trace


def test_a_users_method_corrects_its_traces() -> None:
    """Two steps with the same sample: the corrected trace is the gradient's weighted mean."""
    phases = [POWER, Phase(averaged, ("w", "trace"))]
    given: dict[str, Any] = {"states": ["trace"], "decays": {"trace": "beta"}}
    row = layered_row("averaged", phases, **given, lr=0.5, beta=0.75)
    assert layered_row("averaged", phases, **given, power=3, lr=0.5, beta=0.75).source != row.source
    model, x = nn.Linear(2, 1, dtype=torch.float64), torch.tensor([[1.0, -2.0]]).double()
    weights, opt = [model.weight.detach().clone()], row.make(model)
    for _ in range(2):
        opt.zero_grad()
        model(x).sum().backward()  # whose gradient is x
        opt.step()
        weights.append(model.weight.detach().clone())
    for before, after in pairwise(weights):
        torch.testing.assert_close(before - after, 0.5 * x / (1 + 5))


def test_a_method_that_sees_no_layers_is_no_layered_one() -> None:
    with pytest.raises(ValueError, match=r"plain: no phase sees layers; use lab\.method"):
        layered_row("plain", [MOVE], lr=0.1)
