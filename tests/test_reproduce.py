"""Figures and claims from the command line, on an experiment small enough for a test."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

import torch
from typer.testing import CliRunner

import upgd
from tests import searched
from upgd.cli import app
from upgd.lab import reproducing
from upgd.ledger import Ledger, Result, RunSpec, Series, StudyError
from upgd.metrics import DIAGNOSTICS, STRIDED, UTILITIES
from upgd.pages import colours
from upgd.paper import (
    claims,
    drawing,
    experiments,
    figures,
    judging,
    provenance,
    results,
    utility_quality,
)
from upgd.paper.drawing import draw, missing
from upgd.paper.experiments import Arm, Experiment
from upgd.paper.figures import Figure, Panel
from upgd.paper.looks import look
from upgd.paper.quotations import QUOTED
from upgd.paper.sets import BEST, MAIN, METHODS, TOYS, best

NAMES = ("sgdw", "upgd")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure of two methods on digits: tasks of 100 samples, points of 50."""
    arms = (
        Arm("sgdw", "SGDW", "sgdw", {"lr": 0.01, "weight_decay": 0.001}),
        Arm("upgd", "UPGD-W", "upgd", experiments.best("input-permuted-mnist", "upgd")),
    )
    options = {"task_length": 100, "window": 50, "hidden": "8-6", "stride": 10}
    experiment = Experiment("tiny", "label-permuted-digits", arms, 2, 4_000, options)
    panels = (
        Panel("tiny", "accuracy", NAMES),
        Panel("tiny", "accuracy", NAMES, "Closer", "tasks"),
        Panel("tiny", "plasticity", NAMES, kind="scatter"),
        Panel("tiny", "zero_activations", NAMES, dashed="plasticity"),
    )
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", experiment)  # type: ignore[arg-type]
    figure = Figure("figtiny", "Two methods.", panels, 2)
    monkeypatch.setitem(figures.FIGURES, "figtiny", figure)  # type: ignore[arg-type]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_a_figure_from_nothing(tiny: None, tmp_path: Path) -> None:
    command = ("reproduce", "figtiny", "--scale", "0.2", "--study", str(tmp_path))
    first = run(*command)
    assert first.exit_code == 0, first.output
    assert "4 of 4 runs to do" in first.output
    assert "time: about" in first.output
    for suffix in ("png", "svg"):
        assert f"figtiny.{suffix}" in first.output.replace("\n", "")
    assert (tmp_path / "figtiny.png").read_bytes().startswith(b"\x89PNG")
    assert "UPGD-W" in (tmp_path / "figtiny.svg").read_text()
    drawn = (tmp_path / "figtiny.svg").read_bytes()
    table = tmp_path / "results" / "tiny" / "series.csv.gz"
    kept = results.read(table, "tiny")
    with Ledger.open(tmp_path, create=False, read_only=True) as ledger:
        for found in ledger.runs():
            series = ledger.series(found.key, "accuracy")
            mine = kept.of(found.spec.method, "accuracy")[found.spec.seed]
            np.testing.assert_allclose(mine, series, rtol=1e-4)
            assert len(series) == 800 / 50
    assert run(*command, "--quiet").exit_code == 0  # nothing is left to do
    assert (tmp_path / "figtiny.svg").read_bytes() == drawn
    assert run(*command, "--quiet", "--seeds", "3", "--format", "png").exit_code == 0
    with Ledger.open(tmp_path, create=False, read_only=True) as ledger:
        assert ledger.counts()["done"] == 6


def test_tables_of_several_studies(tiny: None, tmp_path: Path) -> None:
    first, second = (str(tmp_path / name) for name in "ab")
    tables = tmp_path / "results"
    folder = tables / "tiny"
    short = ("reproduce", "figtiny", "--scale", "0.1", "--format", "png", "--results", str(tables))
    nothing = run(*short, "--no-run", "--study", first)
    assert nothing.exit_code == 0, nothing.output
    assert "figtiny lacks tiny" in nothing.output
    assert run(*short, "--quiet", "--seeds", "1", "--study", first).exit_code == 0
    planned = run(*short, "--seeds", "2", "--study", second, "--study", first, "--dry-run")
    assert "2 of 4 runs to do" in planned.output  # the first study has the others
    both = ("--study", second, "--study", first)
    assert run(*short, "--quiet", "--seeds", "2", *both).exit_code == 0
    told = provenance.read(folder)
    assert told is not None
    assert told.seeds == {"sgdw": [0, 1], "upgd": [0, 1]}
    assert told.command == "upgd reproduce figtiny --scale 0.1"
    assert told.learner_steps == 4 * 400
    assert told.data is not None
    assert told.data["samples"] == {"train": 1438, "test": 359}
    assert told.parts[0].versions["upgd"] == upgd.__version__
    assert str(tmp_path) not in (folder / "provenance.json").read_text()
    assert sorted(results.read(folder / "series.csv.gz", "tiny").of("upgd", "accuracy")) == [0, 1]
    fewer = run(*short, "--no-run", "--study", first)
    assert "kept" in fewer.output
    assert provenance.read(folder) == told
    table = results.read(folder / "series.csv.gz", "tiny")
    draw(figures.FIGURES["figtiny"], {"tiny": table}, tmp_path / "x.png")
    assert (tmp_path / "a" / "figtiny.png").read_bytes() == (tmp_path / "x.png").read_bytes()


@pytest.fixture
def table(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of tables of a study that is gone: two methods, a seed. Nothing is drawn."""
    monkeypatch.setattr(reproducing, "draw", lambda *_: [])
    place = tmp_path / "tables"
    gone = ("--study", str(tmp_path / "gone"), "--results", str(place))
    assert run(*SHORT, "--seeds", "1", *gone).exit_code == 0
    return place


SHORT = ("reproduce", "figtiny", "--scale", "0.1", "--format", "png", "--quiet")


@pytest.mark.parametrize("own", [(), (Arm("mine", "Mine", "pgd", {"lr": 0.02, "sigma": 0.01}),)])
def test_seeds_and_arms_are_added_to_tables(
    own: tuple[Arm, ...], table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if all had been run in one study."""
    tiny = experiments.EXPERIMENTS["tiny"]
    more = replace(tiny, arms=(*tiny.arms, *own))
    new = {("sgdw", 1), ("upgd", 1), *((arm.method, seed) for arm in own for seed in range(2))}
    runs = 2 + len(new)
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", more)  # type: ignore[arg-type]
    both = ("--study", str(tmp_path / "new"), "--study", str(table), "--results", str(table))
    plan = run(*SHORT[:-1], "--seeds", "2", *both, "--dry-run")
    assert f"{len(new)} of {runs} runs to do" in plan.output
    assert run(*SHORT, "--seeds", "2", *both).exit_code == 0
    whole = tmp_path / "whole"
    assert run(*SHORT, "--seeds", "2", "--study", str(whole)).exit_code == 0
    name = "tiny/series.csv.gz"
    assert (table / name).read_bytes() == (whole / "results" / name).read_bytes()
    told, other = provenance.read(table / "tiny"), provenance.read(whole / "results" / "tiny")
    assert told is not None
    assert other is not None
    alike = ("command", "steps", "seeds", "learner_steps", "options", "data", "diverged", "sets")
    assert {n: getattr(told, n) for n in alike} == {n: getattr(other, n) for n in alike}
    assert sum(part.runs for part in told.parts) == told.runs == runs
    assert [part.runs for part in told.parts] == [part.runs for part in other.parts]
    with Ledger.open(tmp_path / "new", create=False, read_only=True) as ledger:
        assert {(r.spec.method, r.spec.seed) for r in ledger.runs()} == new
    for study in (tmp_path / "empty", whole):  # nothing is run, and nothing counts twice
        again = run(*SHORT[:-1], "--seeds", "2", "--study", str(study), *both[2:])
        assert f"0 of {runs} runs to do" in again.output
        assert provenance.read(table / "tiny") == told


def aged(folder: Path) -> provenance.Provenance:
    """A table as if its diagnostics were of an older definition, and of other values."""
    kept = results.read(folder / "series.csv.gz", "tiny")
    old = {
        name: {
            arm: {seed: x + 7 for seed, x in seeds.items()} if name in STRIDED else seeds
            for arm, seeds in arms.items()
        }
        for name, arms in kept.series.items()
    }
    results.write(replace(kept, series=old), folder / "series.csv.gz")
    told = provenance.read(folder)
    assert told is not None
    assert told.diagnostics == DIAGNOSTICS
    content = json.loads((folder / "provenance.json").read_text())
    del content["diagnostics"]  # as older files have it
    (folder / "provenance.json").write_text(json.dumps(content))
    return told


def test_older_diagnostics_are_measured_again_and_replaced(table: Path, tmp_path: Path) -> None:
    name = "tiny/series.csv.gz"
    fresh = (table / name).read_bytes()
    told = aged(table / "tiny")
    assert (table / name).read_bytes() != fresh
    both = ("--study", str(tmp_path / "new"), "--study", str(table), "--results", str(table))
    plan = run(*SHORT[:-1], "--seeds", "1", *both, "--dry-run")
    assert "2 of 2 runs to do" in plan.output
    assert run(*SHORT, "--seeds", "1", *both).exit_code == 0
    assert (table / name).read_bytes() == fresh
    now = provenance.read(table / "tiny")
    assert now is not None
    assert (now.diagnostics, now.learner_steps) == (DIAGNOSTICS, told.learner_steps)
    assert sum(part.runs for part in now.parts) == now.runs == 2
    again = run(*SHORT[:-1], "--seeds", "1", *both, "--dry-run")
    assert "0 of 2 runs to do" in again.output


def test_a_figure_without_diagnostics_leaves_runs_and_mixes_no_definitions(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = figures.FIGURES["figtiny"]
    accuracy = replace(figure, panels=figure.panels[:1])
    monkeypatch.setitem(figures.FIGURES, "figtiny", accuracy)  # type: ignore[arg-type]
    aged(table / "tiny")
    both = ("--study", str(tmp_path / "new"), "--study", str(table), "--results", str(table))
    nothing = run(*SHORT[:-1], "--seeds", "1", *both)
    assert "0 of 2 runs to do" in nothing.output
    kept = results.read(table / "tiny" / "series.csv.gz", "tiny")
    assert list(kept.of("upgd", "gradient_l1")) == [0]
    assert run(*SHORT, "--seeds", "2", *both).exit_code == 0  # two more runs
    kept = results.read(table / "tiny" / "series.csv.gz", "tiny")
    assert list(kept.of("upgd", "accuracy")) == [0, 1]
    assert [list(kept.of("upgd", name)) for name in STRIDED] == [[1]] * 4
    now = provenance.read(table / "tiny")
    assert now is not None
    assert (now.diagnostics, now.runs) == (DIAGNOSTICS, 4)


def test_older_runs_of_a_study_keep_what_is_comparable(tiny: None, tmp_path: Path) -> None:
    experiment = experiments.EXPERIMENTS["tiny"]
    [spec] = experiment.specs(0.1, seeds=1)["upgd"]
    content = json.loads(spec.to_json())
    assert content["options"].pop("diagnostics") == DIAGNOSTICS
    old = RunSpec.from_json(json.dumps(content))
    series = {name: Series(np.ones(8), 50) for name in ("accuracy", *STRIDED)}
    with Ledger.open(tmp_path) as ledger:
        ledger.add([old])
        [claim] = ledger.claim("me", 60)
        ledger.finish(claim, Result("eager", series=series))
        found = results.collect(ledger, experiment)
        assert found is not None
        assert list(found.series) == ["accuracy"]
        assert results.lacking([spec], ledger.runs()) == [spec]
        ledger.add([spec])
        [claim] = ledger.claim("me", 60)
        ledger.finish(claim, Result("eager", series=series))
        found = results.collect(ledger, experiment)
        assert found is not None
        assert set(found.series) == {"accuracy", *STRIDED}
        assert results.lacking([spec], ledger.runs()) == []


def changed(monkeypatch: pytest.MonkeyPatch, **second: Any) -> None:
    """The second arm becomes another."""
    tiny = experiments.EXPERIMENTS["tiny"]
    other = replace(tiny, arms=(tiny.arms[0], replace(tiny.arms[1], **second)))
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hyper": {"lr": 0.5}}, "other sets (upgd)"),
        ({"name": "mine"}, "arms that are not known here (upgd)"),
        ({"options": {"hidden": "5-5"}}, "another problem or other options"),
    ],
)
def test_a_table_of_something_else_does_not_count(
    change: dict[str, Any],
    says: str,
    table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed(monkeypatch, **change)
    plan = run(*SHORT, "--dry-run", "--study", str(tmp_path / "new"), "--study", str(table))
    assert f"does not count, it has {says}" in plan.output.replace("\n", " ")
    assert "4 of 4 runs to do" in plan.output


def test_another_set_for_an_arm_does_not_cost_the_others(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a study that has the new set alone, nothing is put in place of the table."""
    changed(monkeypatch, hyper={"lr": 0.02})
    before = (table / "tiny" / "series.csv.gz").read_bytes()
    [spec] = experiments.EXPERIMENTS["tiny"].specs(0.1, 1)["upgd"]
    finished(tmp_path / "new", spec)
    both = ("--study", str(tmp_path / "new"), "--study", str(table), "--results", str(table))
    kept = run(*SHORT, "--no-run", *both)
    assert "other sets (upgd), and more runs of the others" in kept.output.replace("\n", " ")
    assert (table / "tiny" / "series.csv.gz").read_bytes() == before


def finished(study: Path, *specs: RunSpec, diverged_at: int | None = None) -> None:
    """Put runs into a study that are over."""
    with Ledger.open(study) as ledger:
        ledger.add(specs)
        for claim in ledger.claim("me", 60, limit=len(specs)):
            if diverged_at is not None:
                ledger.finish(claim, Result("eager", diverged_at=diverged_at))
            else:
                series = {"accuracy": Series(np.zeros(claim.spec.steps // 50), 50)}
                ledger.finish(claim, Result("eager", series=series))


def test_runs_that_all_diverged_are_added_to_a_table(table: Path, tmp_path: Path) -> None:
    second = [runs[1] for runs in experiments.EXPERIMENTS["tiny"].specs(0.1, 2).values()]
    finished(tmp_path / "new", *second, diverged_at=7)
    both = ("--study", str(tmp_path / "new"), "--study", str(table), "--results", str(table))
    drawn = run(*SHORT, "--no-run", *both)
    assert drawn.exit_code == 0, drawn.output
    told = provenance.read(table / "tiny")
    assert told is not None
    assert told.seeds == {"sgdw": [0], "upgd": [0]}
    assert told.diverged == {"sgdw": [1], "upgd": [1]}
    assert (told.runs, told.learner_steps) == (2, 2 * 400 + 2 * 7)
    assert results.read(table / "tiny" / "series.csv.gz", "tiny").diverged == told.diverged


def test_a_run_that_diverges_replaces_a_finished_one(table: Path, tmp_path: Path) -> None:
    """One that is measured again, with other versions, say: a seed is not both."""
    specs = experiments.EXPERIMENTS["tiny"].specs(0.1, 2)
    aged(table / "tiny")
    finished(tmp_path / "new", specs["upgd"][0], diverged_at=7)
    finished(tmp_path / "new", *specs["sgdw"], specs["upgd"][1])
    both = ("--study", str(tmp_path / "new"), "--study", str(table), "--results", str(table))
    drawn = run(*SHORT, "--no-run", *both)
    assert drawn.exit_code == 0, drawn.output
    told = provenance.read(table / "tiny")
    assert told is not None
    assert told.seeds == {"sgdw": [0, 1], "upgd": [1]}
    assert told.learner_steps == 3 * 400 + 7
    kept = results.read(table / "tiny" / "series.csv.gz", "tiny")
    assert told.diverged == kept.diverged == {"upgd": [0]}
    assert list(kept.of("upgd", "accuracy")) == [1]


def test_joined_runs_replace_in_both_ways() -> None:
    done = results.Results("tiny", 50, {"accuracy": {"upgd": {0: np.ones(2)}}})
    gone = results.Results("tiny", 50, {}, {"upgd": [0]})
    assert results.joined(done, gone) == gone
    assert results.joined(gone, done) == done


def test_short_runs_of_a_trial_hide_no_others(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a new arm that was first tried beside the others, for fewer steps."""
    tiny = experiments.EXPERIMENTS["tiny"]
    mine = Arm("mine", "Mine", "pgd", {"lr": 0.02, "sigma": 0.01})
    more = replace(tiny, arms=(*tiny.arms, mine))
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", more)  # type: ignore[arg-type]
    finished(tmp_path / "new", *(some[0] for some in more.specs(0.05, 1).values()))
    finished(tmp_path / "new", *more.specs(0.1, 1)["mine"])
    both = ("--study", str(tmp_path / "new"), "--study", str(table), "--results", str(table))
    assert run(*SHORT, "--no-run", *both).exit_code == 0
    told = provenance.read(table / "tiny")
    assert told is not None
    assert told.seeds == {"sgdw": [0], "upgd": [0], "mine": [0]}


def test_twins_are_not_run_again(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = experiments.EXPERIMENTS["tiny"]
    more = replace(tiny, arms=(*tiny.arms, replace(tiny.arms[1], name="twin")))
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", more)  # type: ignore[arg-type]
    both = ("--study", str(tmp_path / "new"), "--study", str(table))
    plan = run(*SHORT, "--seeds", "1", "--dry-run", *both)
    assert "0 of 2 runs to do" in plan.output


def test_folders_of_tables_are_no_studies(table: Path, tmp_path: Path) -> None:
    alone = run(*SHORT, "--study", str(table))
    assert alone.exit_code == 2
    assert "has tables, and is no study" in alone.output.replace("\n", " ")
    wrong = run(*SHORT, "--study", str(tmp_path / "new"), "--study", str(tmp_path / "nothing"))
    assert wrong.exit_code == 2
    assert "neither a study nor a folder of tables" in wrong.output.replace("\n", " ")
    both = ("--study", str(table), "--study", str(table))
    twice = run(*SHORT, "--dry-run", "--study", str(tmp_path / "new"), *both)
    assert "another folder has one" in twice.output.replace("\n", " ")


def test_windows_of_other_lengths_do_not_go_together() -> None:
    values = {"accuracy": {"upgd": {0: np.zeros(4)}}}
    one, other = (results.Results("tiny", window, values) for window in (50, 100))
    with pytest.raises(ValueError, match="windows of 50 and of 100 samples"):
        results.joined(one, other)


def test_runs_of_another_length_are_not_put_into_a_table(table: Path, tmp_path: Path) -> None:
    before = provenance.read(table / "tiny")
    both = ("--study", str(tmp_path / "new"), "--study", str(table), "--results", str(table))
    longer = run(*SHORT, "--scale", "0.2", "--seeds", "1", *both)
    assert "they are not put together" in longer.output.replace("\n", " ")
    assert before is not None
    told = provenance.read(table / "tiny")
    assert told is not None
    assert (before.steps, told.steps, told.runs) == (400, 800, 2)


def test_a_table_of_other_data_does_not_count(table: Path, tmp_path: Path) -> None:
    file = table / "tiny" / "provenance.json"
    content = json.loads(file.read_text())
    content["data"]["sha256"]["train"] = "0" * 64
    file.write_text(json.dumps(content))
    plan = run(*SHORT, "--dry-run", "--study", str(tmp_path / "new"), "--study", str(table))
    assert "does not count, it has other digits data" in plan.output.replace("\n", " ")
    assert "4 of 4 runs to do" in plan.output


def test_a_figure_that_is_measured_in_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utility_quality, "ACTIVATIONS", {"relu": torch.nn.ReLU})
    command = ("reproduce", "fig2", "--scale", "0.01", "--seeds", "2", "--study", str(tmp_path))
    assert "has not been measured" in run(*command, "--no-run").output
    assert "2 seeds of 50 steps" in run(*command, "--dry-run").output
    first = run(*command, "--format", "png")
    assert first.exit_code == 0, first.output
    assert (tmp_path / "fig2.png").exists()
    assert "remove" in run(*command, "--format", "png").output  # it is not measured again


def test_runs_longer_than_asked_for_are_told(tiny: None, tmp_path: Path) -> None:
    command = ("reproduce", "figtiny", "--dry-run", "--study", str(tmp_path))
    raised = run(*command, "--scale", "0.01")
    assert (
        "tiny: 200 steps instead of 40, since a run has at least 4 windows of 50" in raised.output
    )
    assert "instead" not in run(*command, "--scale", "0.05").output
    nothing = run(*command, "--scale", "0")
    assert nothing.exit_code == 2
    assert "--scale must be above 0" in nothing.output


def test_a_figure_of_one_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utility_quality, "ACTIVATIONS", {"relu": torch.nn.ReLU})
    command = ("reproduce", "fig2", "--scale", "0.01", "--seeds", "1", "--study", str(tmp_path))
    told = run(*command, "--format", "png")
    assert told.exit_code == 0, told.output
    assert "1 seed of 50 steps" in told.output
    assert provenance.read(tmp_path / "results" / "utility_quality").runs == 2  # type: ignore[union-attr]


def test_a_plan_runs_nothing(tiny: None, tmp_path: Path) -> None:
    command = ("reproduce", "figtiny", "--dry-run", "--study", str(tmp_path / "x"))
    shown = run(*command)
    assert "4 of 4 runs to do" in shown.output
    nowhere = run(*command, "--device", "meta")  # there is nothing to time
    assert nowhere.exit_code == 2
    assert "cannot run on device 'meta'" in nowhere.output
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [("fig9", "unknown figure 'fig9'"), ("tme", "did you mean 'time'?")],
)
def test_mistakes_are_told_in_one_line(name: str, says: str) -> None:
    told = run("reproduce", name)
    assert told.exit_code == 2
    assert says in told.output.replace("\n", " ")


def test_the_list_names_all() -> None:
    shown = run("reproduce", "list").output
    assert all(name in shown for name in figures.FIGURES)


# ------------------------------------------------------------------------------- figures
def made_up(name: str) -> results.Results:
    rng = np.random.default_rng(0)
    metrics = [*[*figures.AXES][:-2], *UTILITIES]
    experiment = experiments.EXPERIMENTS[name]
    arms = [arm.name for arm in experiment.arms if arm.name not in experiment.twins()]
    series = {
        metric: {arm: {s: rng.uniform(0.2, 0.9, 240) for s in range(3)} for arm in arms}
        for metric in metrics
    }
    return results.Results(name, int(experiment.options.get("window", 0)) or 2_500, series)


def look_and(save: Any, outside: list[str]) -> Any:
    """Saves, and notes what of the legend and of the axes' texts does not fit into the picture."""

    def watched(picture: Any, *paths: Path) -> Any:
        picture.canvas.draw()
        texts = [text for legend in picture.legends for text in legend.get_texts()]
        texts += [text for axes in picture.axes for text in axes.texts]
        for text in texts:
            box = text.get_window_extent()
            if not (picture.bbox.contains(*box.min) and picture.bbox.contains(*box.max)):
                outside.append(text.get_text())
        return save(picture, *paths)

    return watched


SOME = ("fig1a", "fig1c", "fig4", "fig7b", "utilities", "variants-cifar10")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SOME else pytest.mark.slow)
        for name in figures.FIGURES
    ],
)
def test_every_figure_can_be_drawn(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched.take(searched.made_up(), monkeypatch)
    figure = figures.FIGURES[name]
    found = {each: made_up(each) for each in figure.experiments}
    outside: list[str] = []
    monkeypatch.setattr(drawing, "save", look_and(drawing.save, outside))
    assert draw(figure, found, tmp_path / "x.svg") == []
    assert outside == []
    text = (tmp_path / "x.svg").read_text()
    for panel in figure.panels:
        assert figures.AXES[panel.metric].split(" (")[0] in text
    with pytest.raises(StudyError, match="nothing to draw"):
        draw(figure, {}, tmp_path / "y.svg")


def test_tasks_are_whole_numbers(tmp_path: Path) -> None:
    some = made_up("input-permuted-mnist")
    short = {
        m: {a: {s: x[:4] for s, x in c.items()} for a, c in arms.items()}
        for m, arms in some.series.items()
    }
    draw(
        figures.FIGURES["fig3"],
        {some.name: results.Results(some.name, 5_000, short)},
        tmp_path / "x.svg",
    )
    ticks = re.findall(
        r">(\d+(?:\.\d+)?)<", (tmp_path / "x.svg").read_text().split("Task number")[0]
    )
    assert {"1", "2", "3", "4"} <= set(ticks)
    assert "1.5" not in ticks


def test_a_figure_says_what_it_lacks(tmp_path: Path) -> None:
    figure = figures.FIGURES["fig6"]
    some = made_up("label-permuted-emnist")
    fewer = {m: {a: x for a, x in arms.items() if a != "pgd"} for m, arms in some.series.items()}
    part = results.Results(some.name, some.window, fewer)
    lacking = draw(figure, {some.name: part}, tmp_path / "x.png")
    assert "label-permuted-cifar10" in lacking
    assert "label-permuted-emnist: pgd" in lacking
    only = {"accuracy": some.series["accuracy"]}
    [lacks, *_] = missing(
        figures.FIGURES["statistics-emnist"],
        {some.name: results.Results(some.name, some.window, only)},
    )
    assert lacks == "label-permuted-emnist: plasticity"
    some_gone = results.Results(some.name, some.window, some.series, {"pgd": [99]})
    without = {**some_gone.series, "loss": fewer["loss"]}
    more = results.Results(some.name, some.window, without, {"pgd": [99]})
    assert missing(figures.FIGURES["statistics-emnist"], {some.name: some_gone}) == []
    assert missing(figures.FIGURES["statistics-emnist"], {some.name: more}) == [
        "label-permuted-emnist: pgd"
    ]


def test_without_searched_sets_a_figure_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched.take({}, monkeypatch)
    told = run("reproduce", "stationary", "--study", str(tmp_path)).output.replace("\n", " ")
    assert "'upgd search stationary-mnist' finds some" in told
    assert "stationary lacks stationary-mnist" in told
    toys = {name: made_up(name) for name in TOYS}
    lacking = draw(figures.FIGURES["toys"], toys, tmp_path / "x.svg")
    assert lacking == [f"{name}: sets of 14 arms" for name in TOYS]


def test_sets_found_are_dots_and_printed_ones_rings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One problem was searched for two methods, one has all printed sets as its best."""
    first, second, *_ = MAIN
    made = searched.made_up()
    few = {name: made[first][name] for name in ("upgd", "sgdw")}
    same = {n: replace(made[second][n], hyper=best(second, n)) for n in BEST[second]}
    searched.take({first: few, second: same}, monkeypatch)
    found = {name: made_up(name) for name in (first, second, f"best-sets-{first}")}
    half = found[f"best-sets-{first}"].series["accuracy"]
    half["upgd"] = {seed: curve[:100] for seed, curve in half["upgd"].items()}  # type: ignore[index]
    pictures: list[Any] = []
    monkeypatch.setattr(drawing, "save", lambda picture, _: pictures.append(picture))
    told = draw(figures.FIGURES["best-sets"], found, tmp_path / "x.png")
    assert f"best-sets-{first}: sets of 8 arms" in told
    assert not any(f"best-sets-{second}" in each for each in told)
    [picture] = pictures
    shown = [axes for axes in picture.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == [figures.LONG[first], figures.LONG[second]]
    marks = [
        {
            (METHODS[int(line.get_ydata()[0])], line.get_markerfacecolor() == "none"): float(
                line.get_xdata()[0]
            )
            for line in axes.get_lines()
            if line.get_marker() == "o" and len(line.get_xdata())
        }
        for axes in shown
    ]
    rings = {(method, True) for method in METHODS}
    assert marks[0].keys() == {*rings, ("upgd", False), ("sgdw", False)}
    assert marks[1].keys() == rings
    assert "100 tasks" in shown[0].get_xlabel()
    for (method, printed), mean in marks[0].items():
        name = first if printed else f"best-sets-{first}"
        curves = found[name].of(method, "accuracy").values()
        assert mean == pytest.approx(np.mean([curve[:100] for curve in curves]))


def test_every_arm_has_its_look() -> None:
    for figure in figures.FIGURES.values():
        for panel in figure.panels:
            looks = [(look(arm)["color"], str(look(arm)["linestyle"])) for arm in panel.arms]
            assert len(set(looks)) == len(looks)
            assert {colour for colour, _ in looks} <= {*colours.LIGHT, colours.INK}


# -------------------------------------------------------------------------------- claims
def test_claims_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = tuple(c for c in claims.CLAIMS if c.number != 13)  # which computes for seconds
    monkeypatch.setattr(claims, "CLAIMS", quick)
    folder = tmp_path / "input_permuted_mnist"
    folder.mkdir()
    results.write(made_up("input-permuted-mnist"), folder / results.TABLE)
    shown = json.loads(run("claims", str(tmp_path), "--json").output)
    assert shown[1]["judged by"] == "0.6 of the steps, 3 seeds"
    assert [claim["number"] for claim in shown] == [1, *(c.number for c in quick)]
    others = {claim["verdict"] for claim in shown if claim["judged by"] == "-"}
    assert others == {"undecided"}
    told = run("claims", str(tmp_path / "nowhere"))
    assert told.exit_code == 2
    assert "is no folder" in told.output
    (tmp_path / "empty").mkdir()
    told = run("claims", str(tmp_path / "empty"))
    assert told.exit_code == 2
    assert "no results in" in told.output
    page = run("claims", str(tmp_path), "--markdown").output
    assert page.count("\n|") == len(quick) + 3
    details = run("claims", str(tmp_path), "--details").output
    assert "S-EWC decays" in details
    assert "[of" in details  # words in brackets are no markup
    assert "[…]" in details
    assert "3 seeds" in details


def test_theorems_hold() -> None:
    [theorems] = [c for c in claims.CLAIMS if c.number == 13]
    found = theorems.check({})
    verdicts = [finding.verdict for finding in found]
    assert {verdict: verdicts.count(verdict) for verdict in verdicts} == {
        "confirmed": 4,
        "not judged": 4,
    }
    assert {f.part for f in found} == {quote.part for quote in QUOTED[13]}
    told = {f.statement: f.found for f in found if f.verdict == "not judged"}
    [second] = [value for text, value in told.items() if "second-order" in text]
    [sampled] = [value for text, value in told.items() if "β = 0 " in text]
    assert second is not None
    assert sampled is not None
    assert second.estimate > 0.1  # it is not conserved
    assert np.isnan(second.low)  # a median of networks
    assert 1 < sampled.low < sampled.estimate < sampled.high  # the bound is violated


def test_a_small_study_gets_no_verdict(tiny: None, tmp_path: Path) -> None:
    """Two seeds, and a fiftieth of the steps, of the claims about Input-permuted MNIST."""
    for seeds, windows in ((2, 200), (5, 4)):
        folder = tmp_path / f"{seeds}" / "input_permuted_mnist"
        folder.mkdir(parents=True)
        few = {
            metric: {
                arm: {s: curves[s % 3][:windows] for s in range(seeds)}
                for arm, curves in arms.items()
            }
            for metric, arms in made_up("input-permuted-mnist").series.items()
        }
        results.write(results.Results("input-permuted-mnist", 5_000, few), folder / results.TABLE)
        judged = [c for c in judging.judge([tmp_path / f"{seeds}"]) if c.number in (2, 3, 4, 8)]
        assert {claim.verdict for claim in judged} == {"undecided"}
        assert all(any(f.found is not None for f in claim.findings) for claim in judged)
