"""The command line: what it runs, shows and draws, and how it tells mistakes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

import upgd
from tests.waiting import PATIENCE, states, wait_for
from upgd.cli import app
from upgd.lab import Study
from upgd.ledger import Ledger, RunSpec, SpecError
from upgd.ledger.checkpoints import load_checkpoint, save_checkpoint
from upgd.ledger.versions import versions
from upgd.study.execution import Recorder
from upgd.study.prepare import prepare

PROBLEM = "label-permuted-digits"


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_version_and_facts() -> None:
    assert call("--version").output.strip() == f"upgd {upgd.__version__}"
    facts = json.loads(call("list", "--json").output)
    assert facts["problems"]["input-permuted-mnist"]["network"] == "784-300-150-10"
    assert facts["methods"]["upgd"]["hyper"]["lr"] == 0.01
    assert facts["methods"]["sgdw"]["aliases"]["sgd"] == {"weight_decay": 0.0}


def test_the_command_line_and_python_mean_the_same_run(tmp_path: Path) -> None:
    options = ("--seeds", "1", "--steps", "40", "--window", "20", "--study", str(tmp_path))
    done = call("run", PROBLEM, "sgd", *options, "--task-length", "20", "--engine", "eager")
    assert done.exit_code == 0, done.output
    with Ledger.open(tmp_path, create=False) as ledger:
        [run] = ledger.runs()
        spec = RunSpec(PROBLEM, "sgd", {}, 0, 40, {"task_length": 20})
        assert (run.key, run.spec) == (spec.key, spec)
        assert ledger.add([spec]) == (0, 1)
    same = ("--set", "weight_decay=0", "--task-length", "20", "--dry-run")
    assert "0 of 1 runs to do" in call("run", PROBLEM, "SGDW", "sgd", *options, *same).output
    shown = json.loads(call("show", str(tmp_path), "--json").output)
    assert [row["method"] for row in shown["results"]] == ["sgd"]


def test_run_show_and_plot(tmp_path: Path) -> None:
    study = tmp_path / "study"
    arguments = ("run", PROBLEM, "sgd", "upgd", "--seeds", "2", "--steps", "400")
    arguments = (*arguments, "--window", "100", "--study", str(study))
    dry = call(*arguments, "--dry-run")
    assert "4 of 4 runs" in dry.output
    assert not study.exists()
    done = call(*arguments, "--set", "sigma=0.02", "--json")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.output)
    assert shown["counts"]["done"] == 4
    by_method = {row["method"]: row for row in shown["results"]}
    assert by_method["upgd"]["hyper"]["sigma"] == 0.02
    assert "sigma" not in by_method["sgd"]["hyper"]
    # The table is the ledger's, and the ledger's what the engine gives.
    with Ledger.open(study, create=False) as ledger:
        runs = list(ledger.runs(method="sgd"))
        means = [run.result.summary["accuracy"] for run in runs]
        assert by_method["sgd"]["mean"] == pytest.approx(np.mean(means))
        again = prepare(runs[0].spec)
        again.advance(400)
        np.testing.assert_array_equal(
            ledger.series(runs[0].key, "accuracy"), again.meter.series("accuracy").astype("f4")
        )
    assert "0 of 4 runs" in call(*arguments, "--set", "sigma=0.02", "--dry-run").output
    assert call("show", study).exit_code == 0
    assert call("plot", study).exit_code == 0
    assert (study / "accuracy.png").stat().st_size > 1000
    assert "there are" in call("plot", study, "--metric", "nothing").output


def test_tasks_of_another_length(tmp_path: Path) -> None:
    arguments = ("run", PROBLEM, "sgd", "--seeds", "1", "--steps", "120", "--study", tmp_path)
    assert call(*arguments, "--task-length", "40", "--quiet").exit_code == 0
    with Ledger.open(tmp_path, create=False) as ledger:
        (run,) = ledger.runs()
        assert run.spec.options == {"task_length": 40}
        assert ledger.metrics(run.key)["accuracy"] == 40  # a point is a task still
    stream = prepare(run.spec).stream
    assert [stream.task(step) for step in (0, 39, 40, 80)] == [0, 0, 1, 2]
    toy = RunSpec("toy-changing-sign", "sgd", {}, 0, 10, {"task_length": 5})
    assert prepare(toy).setting.window == 20 * 5
    for wrong in (0, -1, 2.5, True, "ten"):
        with pytest.raises(SpecError, match="task_length must be a whole number"):
            prepare(RunSpec(PROBLEM, "sgd", {}, 0, 10, {"task_length": wrong}))
    with pytest.raises(SpecError, match="has no tasks"):
        prepare(RunSpec("stationary-mnist", "sgd", {}, 0, 10, {"task_length": 5}))


def test_networks_of_another_size(tmp_path: Path) -> None:
    arguments = ("run", PROBLEM, "sgd", "--seeds", "1", "--steps", "40", "--study", tmp_path)
    assert call(*arguments, "--window", "40", "--hidden", "7-5", "--quiet").exit_code == 0
    with Ledger.open(tmp_path, create=False) as ledger:
        (run,) = ledger.runs()
    shapes = [tuple(p.shape) for p in prepare(run.spec).model.parameters() if p.ndim == 2]
    assert shapes == [(7, 64), (5, 7), (10, 5)]
    for wrong in ("", "0", "64-", "-64", "64,32", "6.4", "64-32\n", 64, True):
        with pytest.raises(SpecError, match="hidden is the units"):
            prepare(RunSpec(PROBLEM, "sgd", {}, 0, 10, {"hidden": wrong}))
    with pytest.raises(SpecError, match="convolutional"):
        prepare(RunSpec("label-permuted-cifar10", "sgd", {}, 0, 10, {"hidden": "9"}))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "digits", "upgd"), "did you mean"),
        (("run", PROBLEM, "updg"), "did you mean 'upgd'"),
        (("run", PROBLEM, "upgd", "--seeds", "none"), "seeds are a number"),
        (("run", PROBLEM, "upgd", "--seeds", "0"), "seeds are a number"),
        (("run", PROBLEM, "upgd", "--steps", "1.5"), "whole number"),
        (("run", PROBLEM, "upgd", "--steps", "-3"), "whole number"),
        (("run", PROBLEM, "upgd", "--set", "lr"), "name=number"),
        (("run", PROBLEM, "upgd", "--set", "lr=fast"), "name=number"),
        (("run", PROBLEM, "upgd", "--set", "lr=nan"), "lr"),
        (("run", PROBLEM, "upgd", "--set", "lr=-1"), "lr"),
        (("run", PROBLEM, "upgd", "--set", "kappa=1"), "none of upgd has"),
        (("run", PROBLEM, "upgd", "--batch", "7"), "whole number of batches"),
        (("run", "stationary-mnist", "upgd", "--data-dir", "nowhere"), "mnist"),
        (("show", "nowhere"), "nowhere"),
        (("resume", "nowhere"), "nowhere"),
        (("plot", "nowhere"), "nowhere"),
        (("list", "cats"), "problems and methods"),
    ],
)
def test_mistakes_are_one_line(
    arguments: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UPGD_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "studies").exists()


def test_divergence_ends_a_run_and_not_the_study(tmp_path: Path) -> None:
    result = call(
        *("run", "toy-changing-inputs", "sgd", "--seeds", "2", "--steps", "4000"),
        *("--set", "lr=1e6", "--study", tmp_path, "--json"),
    )
    assert result.exit_code == 0
    with Ledger.open(tmp_path, create=False) as ledger:
        runs = list(ledger.runs())
        assert [run.state for run in runs] == ["diverged", "diverged"]
        assert all(run.result.diverged_at < 4000 for run in runs)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.slow
def test_a_script_s_background_job_can_be_terminated(tmp_path: Path) -> None:
    """Shells start such jobs with SIGINT ignored."""
    command = (
        *(sys.executable, "-m", "upgd.cli", "run", "label-permuted-digits", "sgd"),
        *("--seeds", "1", "--steps", "1e7", "--engine", "eager", "--study", str(tmp_path / "s")),
    )
    job = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        wait_for(lambda: states(tmp_path / "s").get("running"))
        job.terminate()
        assert job.wait(PATIENCE) == 130
    finally:
        job.kill()
    assert states(tmp_path / "s") == {"pending": 1}


@pytest.mark.parametrize("engine", ["eager", "batched"])
def test_a_run_begun_with_other_versions_goes_on_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    study, batch = tmp_path / "s", (["--batch", "5"] if engine == "eager" else [])
    command = ["run", PROBLEM, "sgd", "--seeds", "2", "--steps", "200", "--engine", engine]
    command += ["--window", "100", "--checkpoint-seconds", "0", *batch, "--study"]

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def begun_with(version: str) -> list[bytes]:
        for path in (study / "checkpoints").glob("*.npz"):
            arrays, facts = load_checkpoint(path)
            save_checkpoint(path, arrays, facts | {"stack": facts["stack"] | {"torch": version}})
        return [path.read_bytes() for path in (study / "checkpoints").glob("*.npz")]

    here = versions()["torch"]
    with monkeypatch.context() as patched:
        patched.setattr(Recorder, "result", stop)
        assert call(*command, str(study)).exit_code == 130
        before = begun_with("1.9")
        assert before
        told = call("resume", str(study))
        assert told.exit_code == 2
        *_, line = told.stderr.splitlines()
        assert f"started with torch 1.9, and here is torch {here}" in line
        assert [path.read_bytes() for path in (study / "checkpoints").glob("*.npz")] == before
        shutil.copytree(study, tmp_path / "anew")
        assert call("resume", str(study), "--other-versions").exit_code == 130
        begun_with("2.0")  # as if that had been the second of three
    assert call("resume", str(study), "--other-versions", "--quiet").exit_code == 0
    assert states(study) == {"done": 2}
    runs = list(Study(study, quiet=True).runs())
    assert call(*command, str(tmp_path / "at once"), "--quiet").exit_code == 0
    plain = {run.spec.key: run.result for run in Study(tmp_path / "at once", quiet=True).runs()}
    for run in runs:
        assert run.result.series == plain[run.spec.key].series
    kept = {run.result.versions["torch"] for run in runs}
    assert f"1.9 then 2.0 then {here}" in kept
    for path in (tmp_path / "anew" / "checkpoints").glob("*.npz"):
        path.unlink()
    assert call("resume", str(tmp_path / "anew"), "--quiet").exit_code == 0
    assert states(tmp_path / "anew") == {"done": 2}
