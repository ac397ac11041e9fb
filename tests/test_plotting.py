"""The style of figures: names at lines and their order, twins, seeds, axes, files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from upgd.metrics import UTILITIES, Interval
from upgd.paper import drawing, figures
from upgd.paper.experiments import AGENT_RIVALS, EXPERIMENTS
from upgd.paper.results import Results
from upgd.report import figures as curves_of_studies
from upgd.report import plotting
from upgd.report import sensitivity as sens
from upgd.report.figures import Curve, draw_curves
from upgd.study.selection import Candidate, Family, Ranking

pytest.importorskip("matplotlib")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Figures that would be written."""
    found: list[Any] = []
    for module in (drawing, curves_of_studies, sens):
        monkeypatch.setattr(module, "save", lambda figure, *_: found.append(figure))
    yield found
    for figure in found:
        plotting.pyplot().close(figure)


def names(axes: Any) -> list[str]:
    """The names at the lines from top to bottom, by where they stand in the picture."""
    texts = [text for text in axes.texts if text.get_color() != plotting.SOFT]
    places = {text.get_text(): text.get_window_extent().y0 for text in texts}
    return sorted(places, key=lambda name: -places[name])


def notes(axes: Any) -> str:
    return " ".join(t.get_text() for t in axes.texts if t.get_color() == plotting.SOFT)


def level(*heights: float, seeds: int = 2) -> dict[str, Curve]:
    return {
        f"line {n}": Curve(10, np.full((seeds, 5), height, np.float32))
        for n, height in enumerate(heights)
    }


# --------------------------------------------------------------------------------- names
def test_names_stand_at_the_ends_in_their_order(drawn: list[Any]) -> None:
    heights = (0.5, 0.9, 0.501, 0.1, 0.899, 0.502)
    draw_curves(level(*heights), "accuracy", "title", Path("x.png"))
    [figure] = drawn
    [axes] = figure.axes
    figure.canvas.draw()
    order = sorted(range(len(heights)), key=lambda n: -heights[n])
    assert names(axes) == [f"line {n}" for n in order]
    boxes = [t.get_window_extent() for t in axes.texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_long_names_are_a_legend_in_the_order_of_the_ends(drawn: list[Any]) -> None:
    long = {f"{name} with a name of many letters": c for name, c in level(0.2, 0.8, 0.5).items()}
    draw_curves(long, "accuracy", "title", Path("x.png"))
    [figure] = drawn
    [legend] = figure.legends
    assert [text.get_text().split(" with")[0] for text in legend.get_texts()] == [
        "line 1", "line 2", "line 0",
    ]  # fmt: skip


def test_places_are_the_nearest_that_do_not_overlap() -> None:
    """Against a search over all places of a fine grid."""
    rng = np.random.default_rng(0)
    grid = np.arange(0, 13) / 2
    for _ in range(8):
        wanted = np.sort(rng.choice(grid, 3))
        heights = rng.choice([0.5, 1.0, 1.5, 2.0], 3)
        gaps = (heights[1:] + heights[:-1]) / 2
        fine = np.arange(0, 6.01, 0.25)
        cost = min(
            float(np.sum((np.array(p) - wanted) ** 2))
            for p in itertools.product(fine, repeat=3)
            if p[1] - p[0] >= gaps[0] and p[2] - p[1] >= gaps[1]
        )
        found = plotting.spread(wanted, heights, 0, 6)
        assert np.all(np.diff(found) >= gaps - 1e-9)
        assert found.min() >= 0
        assert found.max() <= 6
        assert np.sum((found - wanted) ** 2) <= cost + 1e-9


def test_seeds_are_told() -> None:
    assert plotting.seeds([1]) == "1 seed"
    assert plotting.seeds([5, 5]) == "5 seeds"
    assert plotting.seeds([20, 5]) == "5 to 20 seeds"


def test_different_seeds_are_in_names_and_range(drawn: list[Any]) -> None:
    some = level(0.5, seeds=3) | {"other": Curve(10, np.zeros((1, 5), np.float32))}
    draw_curves(some, "accuracy", "title", Path("x.png"))
    [axes] = drawn[0].axes
    assert names(axes) == ["line 0\n(3 seeds)", "other (1 seed)"]
    assert notes(axes).startswith("1 to 3 seeds")


# ----------------------------------------------------------------------- the paper's figures
def made_up(name: str, ends: Mapping[str, float], seeds: int = 3) -> Results:
    series = {
        arm: {s: np.linspace(0.2, end, 240) for s in range(seeds)} for arm, end in ends.items()
    }
    return Results(name, 2_500, {"accuracy": series})


def test_twins_are_both_seen_and_named(drawn: list[Any]) -> None:
    ends = {"upgd": 0.6, "sgdw": 0.4, "n-upgd": 0.4, "adamw": 0.5}
    name = "label-permuted-cifar10"
    drawing.draw(figures.FIGURES["fig6"], {name: made_up(name, ends)}, Path("x.png"))
    axes = drawn[0].axes[0]
    drawn[0].canvas.draw()
    assert names(axes) == ["UPGD-W", "AdamW", "SGDW\n= N-UPGD-W"]
    assert "3 seeds" in notes(axes)
    lines = {line.get_label(): line for line in axes.get_lines()}
    under, over = lines["SGDW"], lines["N-UPGD-W"]
    assert over.get_zorder() > under.get_zorder()
    assert under.get_linestyle() == "-"
    assert over.get_linestyle() == "--"


def test_learners_that_are_stored_once_are_twins(drawn: list[Any]) -> None:
    name = "ablation-label-permuted-cifar10"
    twins = EXPERIMENTS[name].twins()
    arms = [arm.name for arm in EXPERIMENTS[name].arms if arm.name not in twins]
    ends = {arm: 0.3 + 0.05 * n for n, arm in enumerate(arms)}
    drawing.draw(figures.FIGURES["ablation-removed"], {name: made_up(name, ends)}, Path("x.png"))
    axes = next(a for a in drawn[0].axes if "CIFAR" in a.get_title())
    assert {"UPGD-W\n= UPGD-W−WP", "UPGD-W−WD\n= SGD+UG"} <= set(names(axes))


def test_agents_have_one_axis_and_one_kind_of_band(drawn: list[Any]) -> None:
    found = {}
    for name, points, seeds in (("ppo-halfcheetah", 146, 10), ("ppo-ant", 48, 3)):
        series = {
            arm.name: {s: np.linspace(0, 100 + s, points) for s in range(seeds)}
            for arm in EXPERIMENTS[name].arms
        }
        found[name] = Results(name, 20_480, {"return": series})
    drawing.draw(figures.FIGURES["fig8"], found, Path("x.png"))
    panels = [axes for axes in drawn[0].axes if axes.get_visible()]
    assert len(panels) == 2
    assert len({axes.get_xlim() for axes in panels}) == 1
    assert {axes.get_xlabel() for axes in panels} == {"Steps (millions)"}
    for axes, seeds in zip(panels, (10, 3), strict=True):
        assert notes(axes) == f"{seeds} seeds; bands: standard error; thin: not in the paper"
        [*bands] = axes.collections
        paper = [arm for arm in EXPERIMENTS["ppo-ant"].arms if arm.name not in AGENT_RIVALS]
        assert len(bands) == len(paper)
        ends = np.array([100 + s for s in range(seeds)])
        error = ends.std(ddof=1) / math.sqrt(seeds)
        top = bands[0].get_paths()[0].vertices[:, 1].max()
        assert top == pytest.approx(ends.mean() + error)


def test_utilities_are_histograms_of_the_first_task_and_the_last(drawn: list[Any]) -> None:
    name, bins = "input-permuted-mnist", len(UTILITIES)
    shares = np.random.default_rng(0).dirichlet(np.ones(bins), (3, 50))  # [seed, task, bin]
    series = {each: {"upgd": dict(enumerate(shares[..., k]))} for k, each in enumerate(UTILITIES)}
    drawing.draw(figures.FIGURES["utilities"], {name: Results(name, 5_000, series)}, Path("x.png"))
    axes = next(a for a in drawn[0].axes if "MNIST" in a.get_title())
    steps = {patch.get_label(): patch.get_data() for patch in axes.patches}
    for label, task in (("after the first task", 0), ("after the last task", -1)):
        np.testing.assert_allclose(steps[label].values, shares[:, task].mean(0))
        np.testing.assert_allclose(steps[label].edges, np.arange(bins + 1) / bins)
    assert axes.get_yscale() == "log"
    assert notes(axes) == "3 seeds; means"
    [legend] = drawn[0].legends
    assert {text.get_text() for text in legend.get_texts()} == steps.keys()
    others = {metric: {"n-upgd": arms["upgd"]} for metric, arms in series.items()}
    found = {name: Results(name, 5_000, others)}
    lacking = drawing.draw(figures.FIGURES["utilities"], found, Path("x.png"))
    assert f"{name}: upgd" in lacking
    axes = next(a for a in drawn[1].axes if "MNIST" in a.get_title())
    assert (len(axes.patches), notes(axes)) == (0, "no seeds; means")


def test_many_tasks_are_thinned_to_means(drawn: list[Any]) -> None:
    name = "label-permuted-emnist"
    values = np.random.default_rng(0).random(400)
    found = Results(name, 2_500, {"accuracy": {"upgd": {0: values}}})
    drawing.draw(figures.FIGURES["fig6"], {name: found}, Path("x.png"))
    axes = next(a for a in drawn[0].axes if "EMNIST" in a.get_title())
    [line] = [line for line in axes.get_lines() if line.get_label() == "UPGD-W"]
    np.testing.assert_allclose(line.get_xdata(), np.arange(4, 401, 4))
    np.testing.assert_allclose(line.get_ydata(), values.reshape(100, 4).mean(1), rtol=1e-6)
    assert notes(axes) == "1 seed; a point: 4 tasks"


# ------------------------------------------------------------------------------ sensitivity
def ranked(values: Mapping[float, float], diverged: tuple[float, ...] = ()) -> Ranking:
    good = [Candidate((("lr", lr),), {0: v, 1: v, 2: v}) for lr, v in values.items()]
    good.sort(key=lambda one: one.value)
    bad = [Candidate((("lr", lr),), {0: math.inf}, diverged=(0,)) for lr in diverged]
    family = Family("toy-changing-sign", "sgdw", 100, (), 1)
    return Ranking(family, "loss", (0, 1, 2), (*good, *bad), ())


def test_step_sizes_stand_on_a_logarithmic_axis() -> None:
    axis = sens.scale("lr", [0.001, 0.01, 1.0])
    assert [axis.places[v] for v in (0.001, 0.01, 1.0)] == pytest.approx([-3, -2, 0])
    assert list(axis.ticks.values()) == ["0.001", "0.01", "1"]
    with_zero = sens.scale("sigma", [0.0, 0.01, 0.1])
    assert with_zero.places[0.0] == pytest.approx(-3)
    assert list(with_zero.ticks.values()) == ["0", "0.01", "0.1"]
    betas = sens.scale("beta_utility", [0.0, 0.9, 0.999])
    assert [betas.places[v] for v in (0.0, 0.9, 0.999)] == pytest.approx([0, 1, 3])
    many = sens.scale("lr", list(np.geomspace(0.00123, 2.3, 40)))
    assert list(many.ticks.values()) == ["0.001", "0.01", "0.1", "1"]
    near = sens.scale("lr", [1.0, 2.0, 3.0])
    assert near.places == {1.0: 1.0, 2.0: 2.0, 3.0: 3.0}


def test_what_nearly_diverged_does_not_hide_the_rest(drawn: list[Any]) -> None:
    values = {0.001: 0.5, 0.01: 0.3, 0.1: 0.4, 0.3: 0.6, 1.0: 1e6}
    ranking = ranked(values, diverged=(10.0,))
    sens.draw_sensitivity({"sgd": ranking}, "title", Path("x.png"))
    axes = drawn[0].axes[0]
    low, high = axes.get_ylim()
    assert low < 0.3
    assert 0.6 < high < 2
    crosses = [line for line in axes.get_lines() if line.get_marker() == "x"]
    assert [float(line.get_xdata()[0]) for line in crosses] == pytest.approx([1.0], abs=0.1)
    assert "10" in [text.get_text() for text in axes.get_xticklabels()]
    assert notes(axes) == "3 seeds; bars: Student's 95%"
    assert sens.lost(ranking, "lr") == [10.0]


def test_limits_keep_what_is_near() -> None:
    assert sens.limits([0.1, 0.5, 0.6], "accuracy")[0] < 0.1
    assert sens.limits([0.5, 0.5], "accuracy") == pytest.approx((0.5, 0.5), abs=0.01)
    low, high = sens.limits([10.0, 11.0, 12.0, 1e9], "loss")
    assert low < 10
    assert 12 < high < 30


# ------------------------------------------------------------------------------------ files
@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_every_file_has_the_format_of_its_suffix(tmp_path: Path, suffix: str) -> None:
    name = "label-permuted-emnist"
    path, other = tmp_path / f"x.{suffix}", tmp_path / f"y.{suffix}"
    drawing.draw(figures.FIGURES["fig6"], {name: made_up(name, {"upgd": 0.5})}, path)
    ranking = ranked({0.1: 0.5, 0.01: 0.4})
    sens.draw_sensitivity({"sgd": ranking}, "title", other)
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(start)
    assert other.read_bytes().startswith(start)


def test_places_in_svg_are_short_and_texts_whole(tmp_path: Path) -> None:
    figure, [[axes]] = plotting.canvas(1, 1, (3, 2))
    axes.plot(np.arange(7) / 3, np.arange(7) / 7)
    axes.set(title="0.123456", xticks=[0.5], xticklabels=["0.000125"])
    [path] = plotting.save(figure, tmp_path / "x.svg")
    text = path.read_text()
    assert ">0.123456<" in text
    assert ">0.000125<" in text
    ways = [part.split('"')[0] for part in text.split(' d="')[1:]]
    assert ways
    assert all(len(x.partition(".")[2]) <= 2 for way in ways for x in way.split())


def test_a_notebooks_own_style_is_kept(drawn: list[Any]) -> None:
    settings = plotting.pyplot().rcParams
    before = dict(settings)
    draw_curves(level(0.5, 0.6), "accuracy", "title", Path("x.png"))
    assert dict(settings) == before
    assert drawn[0].axes[0].xaxis.label.get_size() == plotting.NORMAL


def test_intervals_of_sets_are_those_of_their_seeds() -> None:
    [first, _] = sens.sensitivity(ranked({0.1: 0.5, 0.01: 0.4}), "lr")
    assert first.value == 0.01
    assert first.best == pytest.approx(Interval(0.4, 0.4, 0.4))
