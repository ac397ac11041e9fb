"""Small functions that turn numbers, names and intervals into the text of pages and commands."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from upgd import metrics
from upgd.cli.arguments import all_methods
from upgd.metrics import Interval
from upgd.pages import alike, colours
from upgd.paper import evidence, experiments, grids, pages, provenance, tables, verdicts
from upgd.paper.measuring import How
from upgd.paper.results import Results
from upgd.paper.searches import variants
from upgd.paper.sets import best
from upgd.paper.verdicts import NO, TOLD, UNKNOWN, YES, Finding, worst
from upgd.report import html, sections, verdict
from upgd.text import ranges


def test_a_finding_is_shown_with_its_interval_and_unit() -> None:
    finding = Finding("UPGD-W holds", Interval(-0.001, -0.002, 0.0), YES)
    assert verdicts.shown(finding) == "−0.1 points [−0.2, 0.0]"
    alone = Finding("", Interval(0.5, math.nan, math.nan), TOLD, verdicts.PLAIN)
    assert verdicts.shown(alone) == "0.5"


@pytest.mark.parametrize(
    ("found", "expected"),
    [([YES, UNKNOWN], UNKNOWN), ([YES, UNKNOWN, NO], NO), ([YES, TOLD], YES), ([], UNKNOWN)],
)
def test_a_claim_is_as_good_as_its_worst_statement(
    found: list[verdicts.Verdict], expected: str
) -> None:
    assert worst(found) == expected


def test_the_extent_says_what_is_too_short_and_too_few() -> None:
    curves = {"upgd": {0: np.zeros(4), 1: np.zeros(4)}}
    found = evidence.extent([Results("input-permuted-mnist", 5_000, {"accuracy": curves})])
    assert found == "0.02 of the steps (too short), 2 seeds (too few)"


def test_names_of_methods_experiments_and_figures() -> None:
    assert experiments.title("upgd") == "UPGD-W"
    assert experiments.title("feature-n-upgd-local") == "Feature-wise N-UPGD-W, local"
    assert experiments.title("sgdw", decay=False) == "SGD"
    assert experiments.agents_name("Walker2d") == "ppo-walker2d"
    assert experiments.agents_name("Ant", annealed=True) == "ppo-ant-annealed"
    assert variants("n-upgd", order=2)[:3] == (
        "n-upgd-2nd",
        "feature-n-upgd-2nd",
        "n-upgd-2nd-local",
    )
    assert pages.heading("ablation-input-permuted-mnist") == "Input-permuted MNIST, ablation"
    assert pages._called("fig7a") == "Figure 7a"
    assert pages._called("toys") == "toys"
    assert all_methods(["upgd,pgd", "adamw"]) == ["upgd", "pgd", "adamw"]


def test_grids_have_all_combinations_and_sets_have_names() -> None:
    found = grids.sets({"lr": (0.1, 0.01), "sigma": (1.0,)})
    assert found == [{"lr": 0.1, "sigma": 1.0}, {"lr": 0.01, "sigma": 1.0}]
    assert best("input-permuted-mnist", "upgd")["beta_utility"] == 0.9999


def test_commands_repeat_what_was_run() -> None:
    command = How(0.1, 5, "cuda").command("time")
    assert command == "upgd reproduce time --scale 0.1 --seeds 5 --device cuda"
    hopper = experiments.EXPERIMENTS["ppo-hopper"]
    assert hopper.length(float(provenance._scale(1_000_000, hopper) or "nan")) == 1_000_000
    assert provenance._scale(10**7, hopper) is None
    assert [provenance._listed(s) for s in ([0, 1, 2], [3, 5], [5])] == ["0-2", "3,5", "5-5"]


@pytest.mark.parametrize("numbers", [[], [5], [0, 1, 2, 3, 7], [1, 3, 4, 9]])
def test_ranges_are_read_back(numbers: list[int]) -> None:
    assert provenance.from_ranges(ranges(numbers)) == numbers


def test_times_are_utc() -> None:
    assert provenance.day(1e9) == "2001-09-09"
    assert html._time(1e9) == "2001-09-09 01:46 UTC"
    assert html._time(0) == "–"


def test_the_jackknife_of_a_mean_is_students_interval() -> None:
    rows = np.arange(5.0)
    assert np.allclose(metrics.jackknife(np.mean, rows), metrics.mean_interval(rows))


def test_numbers_of_pages() -> None:
    missing = ["toys: loss", "toys: plasticity", "figure-1"]
    assert tables.listed(missing) == "toys (loss, plasticity), figure-1"
    assert tables._number(0.78123, "accuracy") == "78.12"
    assert tables._number(-0.0000123, "loss", "+") == "−1.23e-05"
    assert tables.spaced(1_000_000) == "1 000 000"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.25, -0.00001), ["0.2500", "−0.0000"]),
        ((12345.6, 7), ["12346", "7"]),
        ((-1e-5,), ["−1e-05"]),
        ((math.nan,), ["–"]),
        ((12.34567, 1.0), ["12.346", "1.000"]),
        ((337.5991,), ["337.6"]),
    ],
)
def test_numbers_beside_each_other_have_the_same_decimals(
    values: tuple[float, ...], expected: list[str]
) -> None:
    assert alike(*values) == expected


def test_json_in_a_page_cannot_end_its_script() -> None:
    content = ["</script>", "a & b"]
    text = html.embedded(content)
    assert not set("<>&") & set(text)
    assert json.loads(text) == content


def test_packed_numbers_are_exact() -> None:
    assert html.packed(np.array([1.0], np.float32)) == {"type": "f4", "data": "AACAPw=="}


def test_lines_repeat_colours_with_other_dashes() -> None:
    assert [colours.style(n) for n in (0, 7, 24)] == [(0, 0), (1, 1), (0, 0)]
    assert colours.css(("#000000", "#ffffff")) == "--c0: #000000; --c1: #ffffff;"


def test_the_mean_leaves_out_what_is_missing() -> None:
    found = sections.mean(np.array([[1.0, np.nan], [3.0, np.nan]]), 0)
    assert np.array_equal(found, [2.0, np.nan], equal_nan=True)
    assert sections.tally([]) == "no runs"


def test_words_of_sentences() -> None:
    assert verdict.Parts.of(16) == (range(4, 8), range(12, 16))
    assert verdict.Parts.of(3) == (range(1), range(2, 3))
    assert verdict.told(range(12, 16)) == "tasks 13–16"
    assert verdict.told(range(2, 3), "window") == "window 3"
    assert verdict.trend(Interval(0.03, 0.01, 0.05)) == "improved"
    assert verdict.trend(Interval(0.03, -0.01, 0.07)) == "no clear trend"
    assert verdict.points(Interval(0.1, 0.05, 0.15)) == "10.0 points (95% interval 5.0 to 15.0)"


def test_a_headline_compares_seed_by_seed() -> None:
    better = {seed: np.array([0.5, 0.8 + 0.05 * seed]) for seed in range(3)}
    worse = {seed: np.array([0.5, 0.6 + 0.05 * seed]) for seed in range(3)}
    assert verdict.headline({"UPGD-W": better, "SGD": worse}, "UPGD-W") == (
        "UPGD-W ends ahead: in task 2 of 2, UPGD-W gets 85.0% right, SGD 65.0%; it leads SGD by "
        "20.0 points (95% interval 20.0 to 20.0)."
    )


def test_a_thinned_line_has_means_of_consecutive_windows() -> None:
    line = sections.Line(10, (0,), np.array([[1.0, 3.0, 4.0, 6.0, 9.0]], np.float32))
    found = sections.thin(line, 3)
    assert (found.samples.tolist(), found.values.tolist()) == ([20, 40, 50], [[2, 5, 9]])
    assert found.factor == 2
