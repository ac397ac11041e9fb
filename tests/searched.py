"""Sets as if all searches had been done."""

from __future__ import annotations

import pytest

from upgd.paper import experiments, figures
from upgd.paper.found import Found, Sets
from upgd.paper.searches import SEARCHES, learner


def made_up() -> Sets:
    """By problem and arm, the last set of each grid."""
    return {
        problem: {
            arm: Found(
                learner(arm)[0],
                search.sets(arm)[-1],
                "loss",
                *(0.1, 0.05, 0.15),
                (1000, 1001),
                *(search.stages[-1].steps, len(search.sets(arm)), 0),
                options=learner(arm)[1],
            )
            for arm in search.arms
        }
        for problem, search in SEARCHES.items()
    }


def take(found: Sets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let experiments and figures have these sets."""
    for name, experiment in experiments.declare(found).items():
        monkeypatch.setitem(experiments.EXPERIMENTS, name, experiment)  # type: ignore[arg-type]
    for name, figure in figures.declare().items():
        monkeypatch.setitem(figures.FIGURES, name, figure)  # type: ignore[arg-type]
