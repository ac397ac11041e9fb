"""benchmarks/stream.py: its compiled loops are the peers' own; its scores, by scikit-learn's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from sklearn import metrics

pytest.importorskip("river")
pytest.importorskip("numba")
SCRIPT = "stream"
Program = Callable[..., None]


@pytest.mark.slow
def test_compiled_loops_are_the_peers_own(program: Program) -> None:
    program("check")


def test_streams_are_a_function_of_the_seed(script: ModuleType) -> None:
    for name, kind in script.STREAMS.items():
        if name in ("elec2", "weather") or name.startswith("mnist"):
            continue  # files
        whole, again, part, other = (
            [np.concatenate(arrays) for arrays in zip(*kind.blocks(seed, n, None), strict=True)]
            for seed, n in ((1, 500), (1, 500), (1, 300), (2, 500))
        )
        for a, b, c, d in zip(whole, again, part, other, strict=True):
            np.testing.assert_array_equal(a, b, name)
            np.testing.assert_array_equal(a[:300], c, name)
            assert np.array_equal(a, d) == kind.fixed, name
        assert whole[0].shape == (500, kind.features), name
        assert not kind.classes or set(whole[1]) <= set(range(kind.classes)), name


def test_scores_are_scikit_learns(script: ModuleType) -> None:
    runs = importlib.import_module("prequential.runs")
    draw = np.random.default_rng(0)
    y = draw.integers(3, size=200)
    p = np.where(draw.random(200) < 0.7, y, draw.integers(-1, 3, size=200))
    windows, _, scores = runs.classification(y, p, 30, 3)
    assert sum(windows) == (y == p).sum()
    assert len(windows) == 7
    assert scores["accuracy"] == pytest.approx(metrics.accuracy_score(y, p))
    assert scores["last"] == pytest.approx(metrics.accuracy_score(y[-20:], p[-20:]))
    assert scores["kappa"] == pytest.approx(metrics.cohen_kappa_score(y, p))
    recalls = metrics.recall_score(y, p, labels=[0, 1, 2], average="macro")
    assert scores["balanced"] == pytest.approx(recalls)


def test_regression_is_relative_to_the_running_mean(script: ModuleType) -> None:
    runs = importlib.import_module("prequential.runs")
    y, p = np.array([1.0, 3.0, 5.0, 4.0]), np.array([9.0, 2.0, 4.0, 4.0])
    # Means of the past are 1, 2 and 3; errors of the learner 1, 1, 0 and of the mean 2, 3, 1.
    windows, reference, scores = runs.regression(y, p, 2)
    assert windows == [[2, 2], [0, 0]]
    assert reference == [[13, 5], [1, 1]]
    assert scores["r2"] == pytest.approx(1 - 2 / 14)
    assert scores["relative"] == pytest.approx(2 / 6)
    assert runs.regression(y, np.array([0, np.inf, 0, 0]), 2)[2] is None


@pytest.mark.slow
def test_a_run_does_what_is_missing(
    program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "runs.jsonl.gz"
    words = ["run", "--streams", "sea", "phishing", "--samples", 300, "--output", output]
    program(*words, "--learners", "linear", "prior", "--seeds", "0-1")
    assert "6 runs, 6 to do" in capsys.readouterr().out  # no randomness: a file is read once
    program(*words, "--learners", "linear", "adam-0.001-scaled", "--seeds", "0-1")
    assert "7 runs, 4 to do" in capsys.readouterr().out
    page, picture = tmp_path / "page.md", tmp_path / "page.png"
    program("table", output, "--output", page)
    program("figure", output, "--output", picture)
    text = page.read_text()
    assert "| river linear model, scaled | 300 | 2 |" in text.split("### sea")[1]
    assert "| river linear model, scaled | 300 | 1 |" in text.split("### phishing")[1].split("#")[0]
    assert picture.stat().st_size > 1000


def test_scores_at_fewer_samples_are_those_of_a_shorter_run(script: ModuleType) -> None:
    runs = importlib.import_module("prequential.runs")
    evidence = importlib.import_module("prequential.evidence")
    for stream in ("sea", "friedman-abrupt"):
        long, short = (runs.Run(stream, "linear", n, 0) for n in (750, 500))
        found = {run: runs.execute(run, None) for run in (long, short)}
        cut = evidence.score_at(long, found[long], 500)
        # A window of regression begins with the second sample, so the cut has one sample more.
        accuracy = {"sea": 1e-12, "friedman-abrupt": 0.02}[stream]
        assert cut == pytest.approx(evidence.score_at(short, found[short], 500), abs=accuracy)
