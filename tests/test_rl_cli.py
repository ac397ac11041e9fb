"""Agents as runs of a study: what is kept of them, how they go on, and how mistakes are told."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("gymnasium", reason="needs the extra rl")
pytest.importorskip("mujoco", reason="needs the extra rl")
pytest.importorskip("numba", reason="needs the extra rl")
from typer.main import get_command
from typer.testing import CliRunner

from tests.running import work
from upgd.cli import app
from upgd.lab import reproducing as reproduce
from upgd.lab.reproducing import Reproduction
from upgd.lab.study import Study
from upgd.ledger import Ledger, Result, RunSpec, Series, SpecError, StudyError
from upgd.ledger.versions import OF_AGENTS, versions
from upgd.paper import provenance
from upgd.paper.experiments import AGENT_RIVALS, EXPERIMENTS, agents_name
from upgd.paper.figures import FIGURES
from upgd.paper.pages import Site
from upgd.rl import AgentGroup, Episode, Settings, learner
from upgd.rl.collapse import collapse
from upgd.rl.runs import PREFIX, plan
from upgd.rl.study import AgentsExecution, Curves
from upgd.rl.workers import Record, WorkerDiedError
from upgd.study import folder
from upgd.study.execution import Progress
from upgd.study.options import Options

ENV = "InvertedPendulum-v5"
OPTIONS = {"steps": 64, "epochs": 2, "minibatches": 4, "window": 128}
SMALL = [*(f"--ppo={k}={v}" for k, v in OPTIONS.items() if k != "window"), "--window=128"]
STEPS = 640
PAGE = Path(__file__).parents[1] / "docs" / "rl.md"
RESULTS = PAGE.parent / "results"


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def rl(study: Path, *arguments: object) -> Any:
    return call("rl", "InvertedPendulum", *SMALL, "--workers", 0, "--study", study, *arguments)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands start no processes for agents, which takes long."""

    def alone(*given: Any, **more: Any) -> AgentGroup:
        return AgentGroup(*given, **{**more, "workers": 0})

    monkeypatch.setattr("upgd.rl.study.AgentGroup", alone)


def specs(seeds: int, steps: int = STEPS) -> list[RunSpec]:
    return [
        RunSpec(f"{PREFIX}{ENV}", method, {}, seed, steps, OPTIONS)
        for method in ("adam", "ada-upgd")
        for seed in range(seeds)
    ]


def series(study: Path) -> dict[tuple[str, str, int], Any]:
    with Ledger.open(study, create=False, read_only=True) as ledger:
        runs = {run.key: run.spec for run in ledger.runs()}
        return {
            (kept.metric, runs[kept.key].name, runs[kept.key].seed): kept.values
            for kept in ledger.each_series()
        }


def same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[key], other[key], equal_nan=True) for key in one
    )


# ------------------------------------------------------------------------------- results
@pytest.mark.slow
def test_the_ledger_has_what_the_agents_told(tmp_path: Path) -> None:
    study = tmp_path / "study"
    arguments = ("--optimizers", "adam,adaupgd:sigma=0.01", "--seeds", 2, "--steps", STEPS)
    assert "4 of 4 runs to do" in rl(study, *arguments, "--dry-run").output
    assert not study.exists()
    done = rl(study, *arguments, "--json")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.output.splitlines()[-1])
    assert shown["counts"]["done"] == 4
    assert [row["method"] for row in shown["results"]] == ["adam", "ada-upgd"]
    assert shown["results"][1]["hyper"]["sigma"] == 0.01
    settings = Settings(steps=64, epochs=2, minibatches=4)
    agents = [learner("ada-upgd", seed, sigma=0.01) for seed in range(2)]
    with AgentGroup(ENV, agents, settings, steps=STEPS, workers=0) as group:
        records = [group.iterate()[1] for _ in range(10)]
    kept = series(study)
    losses = np.array([record.values["value_loss"] for record in records])
    mine = kept["value_loss", "ada-upgd", 1]
    np.testing.assert_allclose(mine, losses.reshape(5, 2).mean(1), rtol=1e-6)
    returns = [e.reward for record in records[:2] for e in record.episodes]
    assert kept["return", "ada-upgd", 1][0] == pytest.approx(np.mean(returns))
    for name in ("episode_length", "approx_kl", "clip_fraction", "explained_variance"):
        assert len(kept[name, "adam", 0]) == 5
    for part in ("policy", "value"):
        for name in ("dead_units", "saturated", "weight_l2", "gradient_norm"):
            assert np.isfinite(kept[f"{part}_{name}", "adam", 0]).all()
        assert (kept[f"{part}_utility_l2", "ada-upgd", 0] > 0).all()
    with Ledger.open(study, create=False, read_only=True) as ledger:
        run = next(iter(ledger.runs(method="adam")))
        assert run.result is not None
        assert run.result.engine == "ppo-cpu"
        assert {"gymnasium", "mujoco"} <= run.result.versions.keys()
        assert run.spec.problem == f"ppo/{ENV}"
        found = collapse(kept["return", "adam", run.spec.seed])
        for name, value in found.items():
            assert run.result.summary[name] == pytest.approx(value, rel=1e-5)
    assert "drop after peak" in call("show", study).output
    assert call("plot", study, "--output", tmp_path / "return.png").exit_code == 0
    assert call("export", study, "--metric", "return").exit_code == 0
    assert call("watch", study, "--once").exit_code == 0
    best = json.loads(call("best", study, "--json").output)
    assert "return" in json.dumps(best)
    assert "diverged with" not in call("best", study).output
    assert call("report", study).exit_code == 0
    # The last two settings make another learner, and the first ones are not run again.
    again = rl(study, *arguments, "--set", "ada-upgd:lr=6e-4", "--dry-run")
    assert "2 of 4 runs to do" in again.output


def test_windows_without_an_episode_have_no_return() -> None:
    curves = Curves(2)
    curves.add(Record(64, [], {"value_loss": 1.0}))
    curves.add(Record(128, [], {"value_loss": 3.0, "late": 5.0}))
    curves.add(Record(192, [Episode(150, 7.0, 20), Episode(180, 9.0, 30)], {"value_loss": 2.0}))
    restored = Curves(2)
    restored.restore(*curves.state())
    for each in (curves, restored):
        each.add(Record(256, [], {"value_loss": float("nan")}))
        found = each.series()
        np.testing.assert_array_equal(found["return"], [np.nan, 8.0])
        np.testing.assert_array_equal(found["episode_length"], [np.nan, 25.0])
        np.testing.assert_array_equal(found["value_loss"], [2.0, 2.0])
        np.testing.assert_array_equal(found["late"], [5.0, np.nan])


# ------------------------------------------------------------------------------ going on
class Stop:
    """Interrupts after so many iterations."""

    def __init__(self, iterations: int) -> None:
        self.left = iterations

    def __call__(self, progress: Progress) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.slow
def test_interrupted_agents_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with Ledger.open(whole) as ledger:
        ledger.add(specs(2))
        assert work(ledger, workers=0).done == 4
    with Ledger.open(parts) as ledger:
        ledger.add(specs(1))
        with pytest.raises(KeyboardInterrupt):
            work(ledger, workers=0, on_progress=Stop(7))
        assert ledger.counts()["pending"] == 2
        # New ones are behind; so is one whose checkpoint is gone. They catch up.
        ledger.add(specs(2))
        next((parts / "checkpoints").glob("*.npz")).unlink()
        with pytest.raises(KeyboardInterrupt):
            work(ledger, workers=0, on_progress=Stop(3))
    ended = call("resume", parts)
    assert ended.exit_code == 0, ended.output
    assert same(series(whole), series(parts))
    assert not list((parts / "checkpoints").glob("*.npz"))


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_is_not_used(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs(1))
        with pytest.raises(KeyboardInterrupt):
            work(ledger, workers=0, on_progress=Stop(3))
        for path in (tmp_path / "checkpoints").glob("*.npz"):
            path.write_bytes(b"nonsense")
        assert work(ledger, workers=0).done == 2


def test_an_agent_whose_checkpoint_does_not_fit_begins_anew_alone(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs(1))
        with pytest.raises(KeyboardInterrupt):
            work(ledger, workers=0, on_progress=Stop(7))
        path = sorted((tmp_path / "checkpoints").glob("*.npz"))[0]
        with np.load(path) as saved:
            arrays = dict(saved)
        [name] = [name for name in arrays if name.endswith("agent/normalisers")]
        np.savez(path, **{**arrays, name: arrays[name][:1]})
        told: list[str] = []
        steps: list[tuple[int, int]] = []
        tally = work(
            *(ledger,),
            workers=0,
            on_note=told.append,
            on_progress=lambda p: steps.append((p.step, 1 + len(p.others))),
        )
    [note] = told
    assert tally.notes == told
    assert "restarts: its checkpoint does not fit: an array is (1,)" in note
    assert steps[0] == (64, 1)  # it alone catches up
    assert steps[7] == (8 * 64, 2)
    assert tally.done == 2


def test_agents_are_not_begun_anew_by_another_simulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs(1))
        with pytest.raises(KeyboardInterrupt):
            work(ledger, workers=0, on_progress=Stop(3))
        before = {path: path.read_bytes() for path in (tmp_path / "checkpoints").glob("*.npz")}
        assert len(before) == 2
        with monkeypatch.context() as patched:
            here = {**versions(OF_AGENTS), "mujoco": "9.9"}
            patched.setattr(folder, "versions", lambda *_: here)
            with pytest.raises(StudyError, match=r"2 runs have been started with mujoco .* 9\.9:"):
                work(ledger, workers=0)
        assert all(path.read_bytes() == content for path, content in before.items())
        assert work(ledger, workers=0).done == 2


@pytest.mark.slow
def test_a_process_that_dies_while_agents_are_restored_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(group: AgentGroup, states: Any) -> None:
        raise WorkerDiedError("gone")

    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs(1))
        with pytest.raises(KeyboardInterrupt):
            work(ledger, workers=0, on_progress=Stop(7))
        with monkeypatch.context() as patched:
            patched.setattr(AgentGroup, "restore", die)
            with pytest.raises(StudyError, match="'upgd resume' goes on"):
                work(ledger, workers=0)
        steps: list[int] = []
        work(ledger, workers=0, on_progress=lambda told: steps.append(told.step))
        assert steps[0] == 8 * 64


def test_a_process_that_dies_ends_the_work_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(group: AgentGroup) -> list[Record]:
        if group.iteration == 5:
            raise WorkerDiedError("gone")
        return iterate(group)

    iterate = AgentGroup.iterate
    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs(1))
        with monkeypatch.context() as patched:
            patched.setattr(AgentGroup, "iterate", die)
            with pytest.raises(StudyError, match="'upgd resume' goes on"):
                work(ledger, workers=0, checkpoint_seconds=0.0)
        assert ledger.counts()["pending"] == 2
        steps: list[int] = []
        work(ledger, workers=0, on_progress=lambda told: steps.append(told.step))
        assert steps[0] == 6 * 64
        assert ledger.counts()["done"] == 2


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_resume_finishes_runs_of_all_kinds(tmp_path: Path) -> None:
    options = {"window": 100}
    ordinary = RunSpec("label-permuted-digits", "sgd", {"lr": 0.01}, 0, 200, options)
    with Ledger.open(tmp_path) as ledger:
        ledger.add([ordinary, *specs(1, 128)])
        ledger.claim("a dead process", 600, limit=2, where={"problem": f"ppo/{ENV}"})
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "a%20dead%20process.lock").touch()
    ended = call("resume", tmp_path, "--quiet")
    assert ended.exit_code == 0, ended.output
    with Ledger.open(tmp_path, create=False) as ledger:
        assert ledger.counts()["done"] == 3
        engines = {run.result.engine for run in ledger.runs() if run.result is not None}
    assert "ppo-cpu" in engines
    assert len(engines) == 2


def test_an_agent_that_diverges_leaves_the_others_alone(tmp_path: Path) -> None:
    wild = RunSpec(f"{PREFIX}{ENV}", "sgd", {"lr": 1e30}, 0, STEPS, OPTIONS)
    calm = RunSpec(f"{PREFIX}{ENV}", "adam", {}, 0, STEPS, OPTIONS)
    with Ledger.open(tmp_path) as ledger:
        ledger.add([wild, calm])
        tally = work(ledger, workers=0)
        assert (tally.done, tally.diverged) == (1, 1)
        result = ledger.get(wild.key).result
        assert result is not None
        assert result.diverged_at == 64


# ------------------------------------------------------------------------------- figure 8
def test_figure_8_is_drawn_from_a_study(tmp_path: Path) -> None:
    """With made-up returns: the real ones take hours."""
    experiment, rng = EXPERIMENTS["ppo-hopper"], np.random.default_rng(0)
    with Ledger.open(tmp_path) as ledger:
        for runs in experiment.specs(seeds=3).values():
            ledger.add(runs)
        for claim in ledger.claim("me", 60, limit=100):
            returns = np.linspace(0, 2000, 146) + rng.normal(size=146)
            if claim.spec.name == "adam":
                returns[73:] -= np.linspace(0, 1000, 73)
            series = {"return": Series(returns, 20480)}
            ledger.finish(claim, Result("ppo-cpu", series=series, wall=1.0))
    drawn = call("reproduce", "fig8", "--no-run", "--study", tmp_path, "--format", "svg")
    assert drawn.exit_code == 0, drawn.output
    assert (tmp_path / "fig8.svg").stat().st_size > 10_000
    text = (tmp_path / "fig8.svg").read_text()
    assert "Hopper" in text
    assert "HalfCheetah" not in text  # whose agents did not run
    assert "fig8 lacks ppo-halfcheetah" in drawn.output
    folder = tmp_path / "results" / "ppo_hopper"
    assert {path.name for path in folder.iterdir()} == {"series.csv.gz", "provenance.json"}
    facts = json.loads((folder / "provenance.json").read_text())
    assert facts["problem"] == "ppo/Hopper-v5"
    assert facts["command"] == "upgd reproduce fig8 --environments Hopper --seeds 3"
    assert facts["options"] == {"anneal": False}
    for place in (tmp_path, tmp_path / "results"):
        found = json.loads(call("claims", place, "--json").output)
        [ninth] = [claim for claim in found if claim["number"] == 9]
        mine = [s for s in ninth["statements"] if s["statement"].startswith("Hopper")]
        assert [s["verdict"] for s in mine] == ["confirmed", "confirmed", "confirmed"]
        assert ninth["verdict"] == "undecided"
    assert call("report", tmp_path).exit_code == 0
    text = Site(tmp_path / "results").texts()[folder / "README.md"]
    assert text.splitlines()[2] == "# PPO on Hopper-v5"


def asked_for(commands: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The runs that commands would do."""
    found: list[RunSpec] = []
    monkeypatch.setattr("upgd.cli.rl._outlook", lambda study, specs, *_: found.extend(specs))

    def outlook(asked: Reproduction) -> list[str]:
        found.extend(asked._all_specs())
        return []

    monkeypatch.setattr(Reproduction, "outlook", outlook)
    for line in commands.splitlines():
        ran = call(*shlex.split(line)[1:], "--dry-run")
        assert ran.exit_code == 0, ran.output
    return {spec.key for spec in found}


@pytest.mark.parametrize(
    ("name", "steps", "seeds"),
    [
        ("ppo-hopper", 3_000_000, {arm.name: [0, 1] for arm in EXPERIMENTS["ppo-hopper"].arms}),
        ("ppo-hopper", 3_000_000, {"adam": [0, 1], "ada-upgd": [0, 1], "ada-upgd-authors": [0, 1]}),
        ("ppo-hopper-annealed", 1_000_000, {"adam": [0], "ada-upgd": [0], "ada-upgd-authors": [0]}),
        ("ppo-hopper", 1_000_000, {"adam": [0, 1, 2], "ada-upgd": [0, 1, 2]}),
        ("ppo-humanoid", 10_000_000, {"adam": [3, 5], "ada-upgd": [4], "ada-upgd-authors": [4]}),
    ],
)
def test_the_command_that_is_told_gives_the_same_runs(
    name: str, steps: int, seeds: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = EXPERIMENTS[name]
    arms = {arm.name: arm for arm in experiment.arms}
    ran = [
        RunSpec(
            experiment.problem,
            arms[arm].method,
            arms[arm].hyper,
            seed,
            steps,
            {**experiment.options},
        )
        for arm in seeds
        for seed in seeds[arm]
    ]
    part = provenance.Portion("cpu", "ppo-cpu", {}, len(ran), 1.0, "2001-09-09", "2001-09-09")
    told = provenance.command(experiment, steps, seeds, [part])
    assert asked_for(told, monkeypatch) == {spec.key for spec in ran}
    assert told.startswith("upgd reproduce") == (seeds.keys() == arms.keys() and steps < 4_000_000)


@pytest.mark.parametrize("folder", sorted(RESULTS.glob("ppo_*")), ids=lambda path: path.name)
def test_committed_commands_give_the_same_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = provenance.read(folder)
    assert known is not None
    arms = {arm.name: arm for arm in EXPERIMENTS[known.experiment].arms}
    hyper = {name: arm.hyper for name, arm in arms.items()} | dict(known.sets)
    ran = {
        RunSpec(known.problem, arms[arm].method, hyper[arm], seed, known.steps, known.options).key
        for some in (known.seeds, known.diverged)
        for arm, seeds in some.items()
        for seed in seeds
    }
    assert asked_for(known.command, monkeypatch) == ran


def test_reproduce_leaves_agents_out_without_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(to_run: bool = True) -> list[Any]:
        return Reproduction(Study(tmp_path), ["all"], to_run=to_run).drawn

    names = {figure.name for figure in chosen()}
    assert {"fig8", "fig8-annealed", "fig3"} <= names
    monkeypatch.setattr(reproduce, "find_spec", lambda name: None)
    assert len(chosen(to_run=False)) == len(names)
    fewer = {figure.name for figure in chosen()}
    assert names - fewer == {"fig8", "fig8-annealed"}


def test_reproduce_takes_some_environments() -> None:
    figure = FIGURES["fig8"]
    chosen = reproduce._experiments([figure], environments="Hopper, ant")
    assert chosen == ("ppo-hopper", "ppo-ant")
    assert len(reproduce._experiments([figure])) == 6
    narrow = reproduce._narrowed(figure, ("ppo-hopper", "ppo-ant"))
    assert [panel.title for panel in narrow.panels] == ["Hopper", "Ant"]
    assert reproduce._narrowed(figure, figure.experiments) == figure
    both = [FIGURES["ablation"], figure]
    some = reproduce._experiments(both, "Input-permuted-mnist", "Hopper")
    assert some == ("ablation-input-permuted-mnist", "ppo-hopper")
    assert reproduce._experiments(both, "input-permuted-mnist") == some[:1]
    panels = reproduce._narrowed(both[0], some).panels
    assert {panel.experiment for panel in panels} == {"ablation-input-permuted-mnist"}
    found = call("reproduce", "ablation", "--problems", "mnist", "--dry-run")
    assert found.exit_code == 2
    assert "no problem 'mnist'; there are input-permuted-mnist" in found.output
    found = call("reproduce", "fig8", "--environments", "Hoper", "--dry-run")
    assert found.exit_code == 2
    assert "no environment 'hoper'; there are HalfCheetah" in found.output


# -------------------------------------------------------------------------- documentation
def test_the_page_s_examples_run_and_its_links_lead_somewhere() -> None:
    text = PAGE.read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(block, str(PAGE), "exec"), {})
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (PAGE.parent / target).exists(), target


def test_the_page_s_commands_are_right() -> None:
    """Options and their kinds; nothing is run."""
    commands = get_command(app)
    lines = re.findall(r"^upgd (.+?)(?:  +#.*)?$", PAGE.read_text(), re.M)
    assert len(lines) > 8
    for line in lines:
        name, *arguments = shlex.split(line)
        commands.commands[name].make_context(name, arguments)  # type: ignore[attr-defined]


def test_the_page_s_longer_runs_are_figure_8_s_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = re.findall(r"^upgd rl .*--steps 1e7.*$", PAGE.read_text(), re.M)
    named = [shlex.split(line)[2] for line in lines]
    assert named == ["Hopper", "Humanoid"]
    for line, environment in zip(lines, named, strict=True):
        experiment = EXPERIMENTS[agents_name(environment)]
        expected = {
            replace(spec, steps=10**7).key
            for arm, specs in experiment.specs(seeds=10).items()
            for spec in specs
            if arm not in AGENT_RIVALS
        }
        assert asked_for(line, monkeypatch) == expected


# ------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["Hoper"], "unknown environment 'Hoper'; did you mean 'Hopper'?"),
        (["CartPole-v1"], "continuous control"),
        ([], "name an environment"),
        (["Hopper", "--optimizers", "adm"], "unknown method 'adm'"),
        (["Hopper", "--optimizers", "adam:sigma=1"], "adam has no hyperparameter 'sigma'"),
        (["Hopper", "--optimizers", "upgd-2nd"], "only gradients"),
        (["Hopper", "--optimizers", ","], "name an optimizer"),
        (["Hopper", "--set", "sgd:lr=1"], "--set sgd:lr=1 fits none of adam, ada-upgd"),
        (["Hopper", "--set", "lr"], "name=number"),
        (["Hopper", "--set", "lr=-1"], "lr"),
        (["Hopper", "--steps", "2000"], "2000 steps are not one iteration of 2048"),
        (["Hopper", "--steps", "4096"], "less than one window of 20480"),
        (["Hopper", "--window", "3000"], "whole iterations of 2048 steps"),
        (["Hopper", "--ppo", "gama=1"], "a setting of PPO is name=value"),
        (["Hopper", "--ppo", "epochs=x"], "epochs is a whole number"),
        (["Hopper", "--ppo", "minibatches=33"], "do not make 33 minibatches"),
        (["Hopper", "--seeds", "-1"], "seeds are"),
        (["Hopper", "--device", "gpu"], "cannot run on device 'gpu'"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: list[str], told: str) -> None:
    found = call("rl", *arguments, "--study", tmp_path / "study")
    assert found.exit_code == 2
    lines = found.output.strip().splitlines()
    assert len(lines) == 1, found.output
    assert told in lines[0]
    assert not (tmp_path / "study").exists()


def test_without_the_extra_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    for arguments in (["Hopper"], ["--list"]):
        found = call("rl", *arguments, "--study", tmp_path)
        assert found.exit_code == 2
        told = "upgd: reinforcement learning needs gymnasium: pip install 'gymnasium[mujoco]>="
        assert found.output.startswith(told)


def test_specifications_that_do_not_fit_are_refused() -> None:
    for options in ({"gama": 1}, {"hidden": "0-1"}, {"gamma": "x"}, {"window": 100}):
        with pytest.raises(SpecError):
            plan(RunSpec(f"ppo/{ENV}", "adam", {}, 0, 100_000, options))
    with pytest.raises(SpecError):
        plan(RunSpec("label-permuted-digits", "adam", {}, 0, 100_000))
    given = {"hidden": "32-32", "gamma": 1, "anneal": False}
    settings = plan(RunSpec(f"ppo/{ENV}", "adam", {}, 0, 100_000, given)).settings
    assert (settings.hidden, settings.gamma, settings.anneal) == ((32, 32), 1.0, False)


def test_environments_are_listed() -> None:
    found = json.loads(call("rl", "--list", "--json").output)
    names = {each["name"]: each for each in found}
    assert "Hopper-v5" in names or "Hopper-v4" in names
    assert not any(name.startswith("CartPole") for name in names)
    assert names["Pendulum-v1"]["actions"] == 1


def test_the_end_of_a_run_is_told_even_if_nothing_was_due() -> None:
    """A run of a second would be over while a progress bar still says "starting"."""
    told: list[int] = []

    class Silent:
        def load(self, spec: RunSpec) -> None: ...

        def save(self, spec: RunSpec, arrays: Any, facts: Any) -> None: ...

        def alive(self) -> None: ...

        def wants_progress(self) -> bool:
            return False

        def progress(self, progress: Any) -> None:
            told.append(progress.step)

        def finish(self, results: Any) -> None: ...

    options = {"steps": 128, "minibatches": 4, "window": 128}
    spec = RunSpec("ppo/Hopper-v5", "adam", {}, 0, 384, options)
    AgentsExecution(cast(Any, Silent()), [spec], Options(workers=0)).execute()
    assert told == [384]
