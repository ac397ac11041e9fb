"""Tables and figures of a study: groups, names, the best settings, bulk reading."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from upgd.cli import app
from upgd.ledger import Ledger, Result, RunSpec, Series, StudyError
from upgd.ledger import crash_points as crash
from upgd.report import figures, tables
from upgd.report.figures import Curve, draw_curves

PROBLEM = "label-permuted-digits"


def fill(folder: Path, specs: list[RunSpec], accuracy: Any = None, order: Any = None) -> None:
    """A study whose runs have series that tell them apart."""
    with Ledger.open(folder) as ledger:
        ledger.add(specs)
        claims = ledger.claim("me", 60, limit=len(specs))
        for claim in order(claims) if order else claims:
            spec = claim.spec
            level = accuracy(spec) if accuracy else 0.5
            if level is None:
                ledger.finish(claim, Result("eager", diverged_at=3))
                continue
            values = np.full(4, level) + np.arange(4) / 100 + spec.seed / 1000
            series = {"accuracy": Series(values, 10), "loss": Series(1 - values[:3], 20)}
            summary = {"accuracy": float(values.mean()), "loss": float(1 - values[:3].mean())}
            ledger.finish(claim, Result("eager", series=series, summary=summary))


def grid(methods: int, settings: int, seeds: int) -> list[RunSpec]:
    return [
        RunSpec(PROBLEM, f"m{m}", {"lr": float(s), "beta": 0.9}, seed, 40)
        for m in range(methods)
        for s in range(settings)
        for seed in range(seeds)
    ]


def test_bulk_reading_is_reading_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upgd.ledger.queries.PAGE", 35)
    specs = grid(2, 10, 3)

    def shuffled(claims: list[Any]) -> list[Any]:
        return random.Random(0).sample(claims, len(claims))

    fill(tmp_path, specs, order=shuffled)
    with Ledger.open(tmp_path) as ledger:
        ledger.add(grid(3, 1, 1))  # one without a result
        plain = [
            (key, metric, window, ledger.series(key, metric).tolist())
            for key in (spec.key for spec in specs)
            for metric, window in ledger.metrics(key).items()
        ]
        assert len(plain) == 120
        bulk = [(*kept[:3], kept.values.tolist()) for kept in ledger.each_series()]
        assert bulk == plain
        some = {spec.key for spec in specs if spec.seed == 1}
        chosen = [kept.key for kept in ledger.each_series(["loss"], some)]
        assert chosen == [spec.key for spec in specs if spec.seed == 1]
        assert list(ledger.each_series([])) == []
        assert ledger.all_metrics() == ["accuracy", "loss"]
    with Ledger.open(tmp_path / "empty") as ledger:
        assert list(ledger.each_series()) == []


def slow_varying(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By definition: a value is told if another row has not the same.

    Of hyperparameters, another row of the method; of options, any row of the problem.
    """
    told = []
    for row in found:
        others = [other for other in found if other["problem"] == row["problem"]]
        same = [other for other in others if other["method"] == row["method"]]
        parts = (("hyper", same), ("options", others))
        told.append(
            {
                name: value
                for part, rows in parts
                for name, value in row[part].items()
                if any(other[part].get(name) != value for other in rows)
            }
        )
    return told


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_told_apart_by_what_differs(seed: int) -> None:
    rng = random.Random(seed)
    rows = [
        {
            "problem": rng.choice("pq"),
            "method": rng.choice("ab"),
            "hyper": {k: rng.choice([0.1, 0.2]) for k in "xyz" if rng.random() < 0.8},
            "options": {"batch": rng.choice([1, 2])} if rng.random() < 0.5 else {},
        }
        for _ in range(rng.randrange(7))
    ]
    assert tables.varying(rows) == slow_varying(rows)


def test_best_settings_are_the_largest_area_without_divergence(tmp_path: Path) -> None:
    def accuracy(spec: RunSpec) -> float | None:
        if spec.name == "m1" and spec.hyper["lr"] == 4 and spec.seed == 0:
            return None  # the largest area, but one seed diverged
        return spec.hyper["lr"] / 10 if spec.name == "m1" else 0.9 - spec.hyper["lr"] / 10

    fill(tmp_path, grid(2, 5, 2), accuracy)
    with Ledger.open(tmp_path) as ledger:
        best = tables.best_settings(tables.group(ledger.runs()))
    assert {(key.method, dict(key.hyper)["lr"]): among for key, among in best.items()} == {
        ("m0", 0.0): 5,
        ("m1", 3.0): 5,
    }


def test_settings_with_other_options_are_not_compared(tmp_path: Path) -> None:
    """The toys' linear baseline and SGD are one method on two networks: both are shown."""
    plain = grid(1, 5, 1)
    linear = [replace(spec, options={"hidden": "none"}) for spec in plain]
    fill(tmp_path, [*plain, *linear], lambda spec: spec.hyper["lr"] / 10 + len(spec.options) / 100)
    with Ledger.open(tmp_path) as ledger:
        best = tables.best_settings(tables.group(ledger.runs()))
    assert {(dict(key.options).get("hidden"), dict(key.hyper)["lr"]) for key in best} == {
        (None, 4.0),
        ("none", 4.0),
    }
    assert list(best.values()) == [5, 5]


def test_what_is_measured_makes_no_other_learner(tmp_path: Path) -> None:
    plain = grid(1, 5, 1)
    measured = [replace(spec, options={"stride": 100}) for spec in plain[:2]]
    fill(tmp_path, [*plain, *measured], lambda spec: spec.hyper["lr"] / 10)
    with Ledger.open(tmp_path) as ledger:
        [(best, among)] = tables.best_settings(tables.group(ledger.runs())).items()
    assert (dict(best.hyper)["lr"], best.options, among) == (4.0, (), 7)


def drawn(folder: Path, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What ``upgd plot`` hands to the figure, and what it says."""
    curves: dict[str, Curve] = {}
    monkeypatch.setattr(figures, "draw_curves", lambda c, *rest: curves.update(c))
    result = CliRunner().invoke(app, ["plot", str(folder), *arguments])
    assert result.exit_code == 0, result.output
    return curves, result.output


def test_plot_draws_the_best_of_many_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, grid(3, 6, 2), lambda spec: spec.hyper["lr"] / 10)
    curves, said = drawn(tmp_path, monkeypatch=monkeypatch)
    assert list(curves) == [f"m{m} lr=5, best of 6" for m in range(3)]
    values = 0.5 + np.arange(4) / 100 + np.arange(2)[:, None] / 1000
    for window, found, family in curves.values():
        assert (window, family[0]) == (10, "m")
        np.testing.assert_allclose(found, values, rtol=1e-6)
    assert "best of 18 settings" in said
    curves, said = drawn(tmp_path, "--all", "--metric", "loss", monkeypatch=monkeypatch)
    assert len(curves) == 18
    assert curves["m2 lr=5"].window == 20
    assert "--all" not in said
    curves, said = drawn(tmp_path, "--method", "m1", monkeypatch=monkeypatch)
    assert list(curves) == [f"m1 lr={lr}" for lr in range(6)]


def test_wrong_choices_are_told(tmp_path: Path) -> None:
    fill(tmp_path, grid(1, 1, 1))
    for arguments, said in (
        (["plot", "--metric", "speed"], "there are accuracy, loss"),
        (["export", "--metric", "speed"], "there are accuracy, loss"),
        (["show", "--method", "m9"], "there are label-permuted-digits m0"),
        (["plot", "--problem", "mnist"], "there are label-permuted-digits m0"),
    ):
        command, *rest = arguments
        result = CliRunner().invoke(app, [command, str(tmp_path), *rest])
        assert result.exit_code == 2
        assert said in result.output
        assert result.output.startswith("upgd: ")
        assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("count", "suffix"), [(1, ".png"), (8, ".svg"), (8, ".pdf"), (8, ""), (30, ".png")]
)
def test_figures_are_written_whole(tmp_path: Path, count: int, suffix: str) -> None:
    path = tmp_path / f"figure{suffix}"
    values = np.random.default_rng(0).random((3, 5)).astype(np.float32)
    values[:, 2] = np.nan
    curves = {f"line {n} $x": Curve(10, values, f"family {n % 2}") for n in range(count)}
    draw_curves(curves, "accuracy", "a $title", path)
    start = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF", "": b"\x89PNG"}[suffix]
    assert path.read_bytes().startswith(start)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_figure_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = {"line": (10, np.ones((2, 5), np.float32))}
    with pytest.raises(StudyError, match="cannot write"):
        draw_curves(curves, "accuracy", "title", tmp_path / "figure.docx")
    path = tmp_path / "figure.png"
    path.write_bytes(b"old")

    def crashed(name: str) -> None:
        if name == "write: before replace":
            raise InterruptedError

    monkeypatch.setattr(crash, "point", crashed)
    with pytest.raises(StudyError):
        draw_curves(curves, "accuracy", "title", path)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["figure.png"]
