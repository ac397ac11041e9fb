"""The paper's grids: sizes counted by hand in its table, and the printed best sets on them."""

from __future__ import annotations

import pytest

from upgd.optim.registry import METHODS, scalars
from upgd.paper.grids import AXES, OUTSIDE, grid, printed_grid, sets
from upgd.paper.sets import BEST, best, from_paper
from upgd.paper.sets import METHODS as TEN
from upgd.streams import PROBLEMS

LABELS = {  # α, then as the columns of the table
    "sgdw": 4 * 5,
    "shrink-and-perturb": 4 * 4 * 5,
    "pgd": 4 * 4,
    "adamw": 4 * 2 * 3 * 3 * 5,
    **dict.fromkeys(("s-ewc", "s-mas", "s-si", "s-rwalk"), 4 * 5 * 4 * 4),
    **dict.fromkeys(("upgd", "n-upgd"), 4 * 4 * 4 * 5),
}
INPUTS = {name: n * 3 // 4 if name.startswith("s-") else n for name, n in LABELS.items()}
TOYS = {"sgdw": 4, "pgd": 16, "shrink-and-perturb": 64, "upgd": 64, "n-upgd": 64}


@pytest.mark.parametrize(
    ("problem", "sizes"),
    [
        ("label-permuted-emnist", LABELS),
        ("label-permuted-cifar10", LABELS),
        ("label-permuted-mini-imagenet", LABELS),
        ("label-permuted-digits", LABELS),
        ("input-permuted-mnist", INPUTS),
        ("input-permuted-digits", INPUTS),
        ("toy-changing-inputs", TOYS),
        ("toy-changing-sign", TOYS),
        ("stationary-mnist", TOYS),
    ],
)
def test_sizes_of_grids(problem: str, sizes: dict[str, int]) -> None:
    for method, size in sizes.items():
        found = sets(grid(problem, method))
        assert len(found) == size, method
        assert len({tuple(one.items()) for one in found}) == size


def test_every_problem_of_the_paper_has_a_grid_of_every_method() -> None:
    assert set(BEST) < set(AXES) < set(PROBLEMS)
    for problem in AXES:
        for method in METHODS:
            assert grid(problem, method).keys() == scalars(method).keys()
    with pytest.raises(ValueError, match="--grid"):
        grid("my-stream", "upgd")


def test_best_sets_are_on_the_grids_but_for_known_exceptions() -> None:
    outside = {
        (problem, method, name)
        for problem, methods in BEST.items()
        for method in methods
        for name, value in best(problem, method).items()
        if value not in grid(problem, method)[name]
    }
    assert outside == OUTSIDE


def test_variants_and_names_without_decay() -> None:
    for problem in AXES:
        for variant in ("n-upgd-2nd-local", "feature-upgd", "upgd-w", "feature-n-upgd-w-local"):
            assert printed_grid(problem, variant) == printed_grid(problem, "upgd")
            only = grid(problem, variant).keys() - printed_grid(problem, variant).keys()
            assert only == from_paper(variant, {}).keys()
        for name in ("sgd", "adam", "Adam"):
            assert grid(problem, name)["weight_decay"] == (0.0,)
        assert len(grid(problem, "s&p")["weight_decay"]) > 1
    assert set(TEN) <= set(METHODS)
