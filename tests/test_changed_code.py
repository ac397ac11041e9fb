"""A changed definition never mixes with old results, and every run that is left says why."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from upgd import lab
from upgd.cli import app
from upgd.ledger import Ledger, RunSpec, SpecError, StudyError
from upgd.optim.registry import METHODS
from upgd.study.options import Options
from upgd.study.prepare import plan
from upgd.study.run import run_pending, run_specs

SMALL: dict[str, Any] = {"seeds": 2, "steps": 20, "window": 10, "hidden": "4"}
PROBLEM = "label-permuted-digits"
FILE = """
    from upgd import lab

    def pulled(w, g, start, lr, kappa):
        return w - lr * (g + kappa * (w - start))

    lab.method("pulled", pulled, states={"start": "weight"}, lr=0.05, kappa=0.1)
"""


def define(factor: float) -> str:
    """Registers a rule; returns the digits of its code."""
    rules = {
        1: lambda w, g, lr: w - lr * g,
        2: lambda w, g, lr: w - lr * (g + g),
    }
    return str(lab.method("mine", rules[int(factor)], lr=0.05).source)


@pytest.fixture
def begun(tmp_path: Path) -> tuple[lab.Study, str, str]:
    """A study with one done and two pending runs of a rule that has changed since."""
    old = define(1)
    study = lab.Study(tmp_path / "study", quiet=True)
    study.run(PROBLEM, "mine", **SMALL | {"seeds": 1})
    with Ledger.open(study.folder) as ledger:
        ledger.add(study.specs(PROBLEM, "mine", **SMALL | {"seeds": 3}))
    return study, old, define(2)


@pytest.mark.slow
def test_a_resumed_study_leaves_runs_of_old_code_alone(
    begun: tuple[lab.Study, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    study, old, new = begun
    study.resume()
    with study.read() as ledger:
        assert ledger.counts() == {"pending": 2, "running": 0, "done": 1} | {
            state: 0 for state in ledger.counts() if state not in ("pending", "running", "done")
        }
    [line] = study.tally.refused
    assert line == (
        f"2 runs of mine left pending: method mine has changed since the run was added (source "
        f"{old[:8]}, now {new[:8]}); run it again as a new run, or load the old code with --use"
    )
    assert line in capsys.readouterr().err
    define(1)
    study.resume()
    assert [run.state for run in study.runs()] == ["done"] * 3


def test_new_runs_stand_beside_old_ones(begun: tuple[lab.Study, str, str]) -> None:
    study, old, new = begun
    table = study.run(PROBLEM, ["mine", "sgd"], **SMALL)
    assert [row["seeds"] for row in table.rows] == [2, 2]
    assert len(study.runs()) == 3 + 4
    named = {row[0] for part in study.table().parts() for row in part.cells[1:]}
    assert named == {f"mine@{old[:4]}", f"mine@{new[:4]}", "sgd"}
    assert {ranking.name for ranking in study.best(seeds=[0])} == named
    shown = CliRunner().invoke(app, ["show", str(study.folder)])
    best = CliRunner().invoke(app, ["best", str(study.folder), "--json"])
    assert f"mine@{old[:4]}" in shown.output
    assert {each["method"] for each in json.loads(best.output)["best"]} == named
    assert study.plot(metric="loss").path.exists()


def test_no_suffix_where_there_is_one_code(tmp_path: Path) -> None:
    define(1)
    lab.network("thin", lambda inputs, outputs: torch.nn.Linear(inputs, outputs))
    study = lab.Study(tmp_path, quiet=True)
    study.run(PROBLEM, "mine", seeds=1, steps=20, window=10, hidden="4")
    study.run(PROBLEM, "mine", seeds=1, steps=20, window=10, network="thin")
    assert not any("@" in row[0] for part in study.table().parts() for row in part.cells)


def test_code_that_is_not_here(begun: tuple[lab.Study, str, str]) -> None:
    study, old, _ = begun
    del METHODS["mine"]
    study.resume()
    [line] = study.tally.refused
    assert f"method mine (source {old[:8]}) is not known here; name the file" in line


@pytest.mark.parametrize("what", ["problem", "network"])
def test_changed_problems_and_networks(what: str, tmp_path: Path) -> None:
    def define(size: int) -> None:
        x, y = np.eye(4, dtype=np.float32)[np.arange(40) % 4], np.arange(40) % 4
        lab.problem("tiny", (x, y + 0 * size if what == "network" else (y + size) % 4))
        width = size if what == "network" else 1
        lab.network("own", lambda i, o: torch.nn.Sequential(*[torch.nn.Linear(i, o)][:width]))

    define(1)
    study = lab.Study(tmp_path, quiet=True)
    with Ledger.open(study.folder) as ledger:
        ledger.add(study.specs("tiny", "sgd", seeds=1, steps=20, window=10, network="own"))
    define(2)
    study.resume()
    name = {"problem": "tiny", "network": "own"}[what]
    assert f"{what} {name} has changed since" in study.tally.refused[0]
    assert [run.state for run in study.runs()] == ["pending"]


def test_a_run_of_old_code_cannot_be_prepared() -> None:
    define(1)
    spec = RunSpec.from_json(RunSpec(PROBLEM, "mine", {}, steps=20).to_json())
    plan(spec)
    define(2)
    with pytest.raises(SpecError, match="method mine has changed"):
        plan(spec)


def test_the_command_line_says_so(tmp_path: Path) -> None:
    file, study = tmp_path / "my_lab.py", tmp_path / "study"
    file.write_text(textwrap.dedent(FILE))
    common = ["--study", str(study), "--use", str(file), "--steps", "20", "--window", "10"]
    run = ["run", PROBLEM, "pulled", "--hidden", "4", "--quiet", *common]
    assert CliRunner().invoke(app, [*run, "--seeds", "1"]).exit_code == 0
    with Ledger.open(study) as ledger:
        old = next(iter(ledger.runs())).spec
        ledger.add([RunSpec(**{**_fields(old), "seed": 7})])
    file.write_text(textwrap.dedent(FILE).replace("kappa * (w", "2 * kappa * (w"))
    resumed = CliRunner().invoke(app, ["resume", str(study), "--use", str(file), "--quiet"])
    assert resumed.exit_code == 1
    assert "1 run of pulled left pending: method pulled has changed since" in resumed.output
    assert CliRunner().invoke(app, [*run, "--seeds", "1"]).exit_code == 0
    with Ledger.open(study) as ledger:
        sources = [dict(run.spec.sources)["method"] for run in ledger.runs(state="done")]
    assert len(set(sources)) == 2


def _fields(spec: RunSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in ("problem", "method", "hyper", "steps")} | {
        "options": spec.options,
        "sources": spec.sources,
    }


# ----------------------------------------------------------------------------- one at a time
@pytest.mark.slow
def test_runs_that_cannot_be_in_a_stack_say_why(tmp_path: Path) -> None:
    lab.optimizer("their-sgd", torch.optim.SGD, lr=0.01)
    lab.network(
        "dropping", lambda i, o: torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(i, o))
    )
    study = lab.Study(tmp_path, quiet=True, workers=1)
    study.run(PROBLEM, ["their-sgd", "sgd"], **SMALL)
    assert study.tally.notes == [
        "2 runs of their-sgd one at a time, since their-sgd is an optimizer of its own, not a rule"
    ]
    study.run(PROBLEM, ["sgd", "upgd"], batch=5, **SMALL)
    assert study.tally.notes == [
        "4 runs of sgd, upgd one at a time, since a stack takes one sample per step, not 5"
    ]
    study.run(PROBLEM, ["sgd", "upgd"], seeds=1, steps=20, window=10, network="dropping")
    assert study.tally.notes == [
        "2 runs of sgd, upgd one at a time, since network 'dropping' draws random numbers, as "
        "dropout does"
    ]
    study.run(PROBLEM, "sgd", **SMALL | {"steps": 30})
    assert study.tally.notes == []


def test_the_batched_engine_names_what_it_leaves(tmp_path: Path) -> None:
    lab.optimizer("their-sgd", torch.optim.SGD, lr=0.01)
    study = lab.Study(tmp_path, quiet=True, engine="batched")
    study.run(PROBLEM, ["their-sgd", "sgd"], **SMALL)
    told = (
        "2 runs of their-sgd left pending by the batched engine, since their-sgd is an optimizer "
        "of its own, not a rule; 'auto' can"
    )
    assert study.tally.refused == [told]
    specs = study.specs(PROBLEM, ["their-sgd", "sgd"], **SMALL)
    with Ledger.open(tmp_path) as ledger:
        with pytest.raises(StudyError) as raised:
            run_specs(ledger, specs, Options(engine="batched"))
        assert str(raised.value) == told
        assert run_pending(ledger, Options(engine="eager")).done == 2
