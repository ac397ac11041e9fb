"""The Python door: a study is run, resumed, compared and drawn, and is the command line's study."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from upgd import lab
from upgd.cli import app
from upgd.kernels import announcing
from upgd.lab import display
from upgd.optim.registry import METHODS
from upgd.paper import theorems
from upgd.study import learners
from upgd.study.execution import Progress

PROBLEM = "label-permuted-digits"
SMALL: dict[str, Any] = {"seeds": 2, "steps": 40, "window": 10, "hidden": "4"}
FLAGS = ("--seeds", "2", "--steps", "40", "--window", "10", "--hidden", "4")
FILE = """
    import torch
    from torch import nn
    from upgd import lab

    class Half(torch.optim.SGD):
        def __init__(self, params, lr=0.1):
            super().__init__(params, lr=0.5 * lr)

    def register():
        lab.optimizer("half", Half)
        lab.network("narrow", lambda inputs, outputs: nn.Linear(inputs, outputs))

    if __name__ != "distributed":
        register()
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> lab.Study:
    """Two methods, two seeds; sgd with two step sizes."""
    found = lab.Study(tmp_path_factory.mktemp("lab") / "study", quiet=True)
    found.run(PROBLEM, ["upgd-w", "sgd"], lr=0.05, **SMALL)
    found.sweep(PROBLEM, "sgd", {"lr": [0.05, 0.0001], "weight_decay": [0.0]}, **SMALL)
    return found


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments])


# ---------------------------------------------------------------------------------- answers
def test_a_table_has_a_row_per_setting(study: lab.Study) -> None:
    table = study.table()
    assert [(row["method"], row["seeds"]) for row in table] == [("upgd-w", 2)] + [("sgd", 2)] * 2
    text = str(table).splitlines()
    assert text[0].startswith("label-permuted-digits, 40")
    assert text[1].split()[:2] == ["method", "seeds"]
    assert "sgd lr=0.0001" in text[4]
    assert "<td>sgd lr=0.0001</td>" in table._repr_html_()
    assert len(study.table(method="sgd")) == 2


def test_the_best_set(study: lab.Study) -> None:
    best = study.best()
    accuracy = {row["hyper"]["lr"]: row["mean"] for row in study.table() if row["method"] == "sgd"}
    assert best.winners["sgd"]["lr"] == max(accuracy, key=accuracy.__getitem__)
    assert len(best) == 2
    assert "weight_decay=0" in str(best)
    assert best._repr_html_().startswith("<table>")
    with pytest.raises(ValueError, match=r"no run of rotating; there are .*sgd"):
        study.best("rotating")


def test_runs_of_other_lengths_or_tasks_are_not_compared(tmp_path: Path) -> None:
    """README's sequence: a run with short tasks, then a sweep with the problem's."""
    study = lab.Study(tmp_path / "study", quiet=True)
    small: dict[str, Any] = {"seeds": 3, "window": 10, "hidden": "4"}
    study.run(PROBLEM, ["upgd", "sgd"], steps=60, task_length=20, **small)
    study.sweep(PROBLEM, ["sgdw", "pgd"], {"lr": [0.1, 0.01]}, steps=40, **small)
    study.run(PROBLEM, "pgd", steps=40, lr=0.1, stride=20, **small)  # measures more, no more
    titles = [
        "label-permuted-digits, 60 steps, hidden=4 task_length=20 window=10",
        "label-permuted-digits, 40 steps, hidden=4 window=10",
    ]
    for found in (study.best(), study.table()):
        assert [part.title for part in found.parts()] == titles
        first, second = ({row[0].split()[0] for row in part.cells[1:]} for part in found.parts())
        assert first == {"upgd", "sgd"}
        assert second == {"sgdw", "pgd"}
    shown = call("best", study.folder, "--plot", tmp_path / "s.png")
    assert [shown.output.count(title) for title in titles] == [1, 1]
    assert "a table for each" in shown.output
    assert (tmp_path / "s.png").is_file()  # of the sweep; the other runs vary nothing


def test_sets_in_shorter_runs_are_counted_and_told(tmp_path: Path) -> None:
    study = lab.Study(tmp_path / "study", quiet=True)
    small: dict[str, Any] = {"seeds": 1, "window": 10, "hidden": "4"}
    study.run(PROBLEM, "sgd", steps=40, lr=0.1, **small)
    study.sweep(PROBLEM, "sgd", {"lr": [0.1, 0.01, 0.001]}, steps=20, **small)
    [ranking] = study.best()
    assert (ranking.dropped, ranking.lengths) == (2, (20,))
    assert (
        "sgd: 2 sets more in runs of other lengths; --steps 20" in call("best", study.folder).output
    )


def test_intervals_need_three_seeds(tmp_path: Path) -> None:
    """The same numbers everywhere: Student's of three seeds, none of two."""
    study = lab.Study(tmp_path / "study", quiet=True)
    small: dict[str, Any] = {"steps": 40, "window": 10, "hidden": "4"}
    study.run(PROBLEM, "sgd", seeds=3, **small)
    study.run(PROBLEM, "adam", seeds=2, **small)
    sgd, adam = study.table().rows
    values = [run.result.summary["accuracy"] for run in study.runs(method="sgd") if run.result]
    half = 4.302652729911275 * np.std(values, ddof=1) / math.sqrt(3)
    assert sgd["low"] == pytest.approx(np.mean(values) - half)
    assert sgd["high"] == pytest.approx(np.mean(values) + half)
    assert (adam["low"], adam["high"]) == (None, None)
    text = f"{sgd['mean']:.4f} [{sgd['low']:.4f}, {sgd['high']:.4f}]"
    for command in ("show", "best"):
        shown = call(command, study.folder).output
        assert text in shown
        assert shown.count("[") == 1 + shown.count("[Student's 95%]")
        assert "intervals need 3" in shown


@pytest.mark.parametrize("name", ["sgdw", "SGD", "Sgd"])
def test_every_filter_knows_aliases(study: lab.Study, name: str, tmp_path: Path) -> None:
    assert {row["method"] for row in study.table(method=name)} == {"sgd"}
    assert [ranking.family.method for ranking in study.best(methods=[name])] == ["sgdw"]
    for command in ("show", "best", "plot", "report", "watch --once", "export"):
        first, *rest = command.split()
        target = {"plot": "a.png", "report": "a.html", "export": "a.csv"}.get(first)
        output = ("--output", tmp_path / target) if target else ()
        shown = call(first, study.folder, "--method", name, *rest, *output)
        assert shown.exit_code == 0, shown.output
        assert "upgd-w" not in shown.output
    rows = (tmp_path / "a.csv").read_text().splitlines()
    assert len(rows) == 1 + len(study.runs(method="sgd"))
    assert "upgd-w" not in (tmp_path / "a.html").read_text("utf-8")


def test_an_alias_without_runs_is_explained(study: lab.Study) -> None:
    for command in ("show", "best", "plot", "report", "watch", "export"):
        shown = call(command, study.folder, "--method", "N-UPGD-W")
        assert shown.exit_code == 2
        told = " ".join(shown.output.split())
        assert "no run of N-UPGD-W (n-upgd with weight_decay=0.001); there are" in told


def test_claims_of_a_study_that_they_are_not_about(
    study: lab.Study, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It says what there is and what it shows, and what each claim needs."""
    monkeypatch.setattr(theorems, "findings", lambda: ())
    shown = call("claims", study.folder)
    assert shown.exit_code == 0, shown.output
    told = " ".join(shown.output.split())
    assert "6 runs, all done; none is a run of the paper's experiments" in told
    assert f"{PROBLEM}, 40 steps, seeds 0-1: upgd-w, sgd" in told
    assert "which 2 seeds cannot distinguish from zero" in told
    assert "a verdict needs" in told
    assert "label-permuted-cifar10: 10 methods" in told
    facts = json.loads(call("claims", study.folder, "--json").output)
    assert {claim["judged by"] for claim in facts} == {"-"}
    nothing = call("claims", tmp_path)
    assert nothing.exit_code == 2
    assert "no results in" in nothing.output


def test_pictures_and_pages(study: lab.Study, tmp_path: Path) -> None:
    picture = study.plot()
    assert picture.path == study.folder / "accuracy.png"
    assert (picture._repr_png_() or b"")[:4] == b"\x89PNG"
    vector = study.plot("loss", path=tmp_path / "loss.svg")
    assert "<svg" in (vector._repr_svg_() or "")
    assert vector._repr_png_() is None
    assert Path(vector) == Path(str(vector))
    page = study.report(tmp_path / "page.html", title="Mine")
    assert "Mine" in page.read_text("utf-8")


def test_a_frame_is_a_dict_of_arrays_without_pandas(
    study: lab.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    frame = study.frame()
    assert set(frame["method"]) == {"upgd-w", "sgd"}
    assert frame["lr"].dtype == np.float64
    assert np.isnan(frame["sigma"]).sum() == 4  # sgd has none
    by_method = {row["method"]: row["mean"] for row in study.table(method="upgd-w")}
    mine = frame["accuracy"][frame["method"] == "upgd-w"]
    assert mine.mean() == pytest.approx(by_method["upgd-w"])
    over_time = study.frame("loss")
    assert list(over_time["samples"][:4]) == [10, 20, 30, 40]
    assert len(over_time["loss"]) == 6 * 4


def test_a_frame_is_pandas_where_it_is_installed(
    study: lab.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pandas:
        DataFrame = dict

    monkeypatch.setitem(sys.modules, "pandas", Pandas)  # type: ignore[arg-type]
    frame = study.frame()
    assert len(frame["key"]) == len(set(frame["key"])) == 6


def test_what_it_prints_of_itself(study: lab.Study, tmp_path: Path) -> None:
    assert repr(study) == f"Study({str(study.folder)!r}): 6 done"
    assert repr(lab.Study(tmp_path / "new")) == f"Study({str(tmp_path / 'new')!r}): no runs yet"
    assert not (tmp_path / "new").exists()


# ------------------------------------------------------------------- Python and command line
def test_the_same_runs_from_both(study: lab.Study) -> None:
    told = call(
        "run",
        PROBLEM,
        "SGD",
        "upgd-w",
        "--set",
        "lr=0.05",
        *FLAGS,
        "--study",
        study.folder,
        "--dry-run",
    )
    assert told.output.startswith("0 of 4 runs to do")
    written = json.loads(call("show", study.folder, "--json").output)["results"]
    assert written == [dict(row) for row in study.table().rows]


def test_an_npz_file_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "mine.npz", x=rng.normal(size=(50, 3)), y=np.arange(50) % 2)
    monkeypatch.chdir(tmp_path)
    small = ("--seeds", 1, "--steps", 40, "--window", 10)
    result = call("run", "mine.npz", "upgd", *small, "--quiet")
    assert result.exit_code == 0, result.output
    found = lab.Study(tmp_path / "studies" / "mine", quiet=True)
    here = found.specs(tmp_path / "mine.npz", "upgd", seeds=1, steps=40, window=10)
    assert found.missing(here) == []


# ----------------------------------------------------------------------------------- running
def test_classes_are_methods(tmp_path: Path) -> None:
    study = lab.Study(tmp_path, quiet=True, workers=1)
    table = study.run(PROBLEM, [torch.optim.RMSprop, torch.optim.SGD], lr=0.01, **SMALL)
    assert [row["method"] for row in table] == ["rmsprop", "torch-sgd"]  # sgd is the package's
    row = lab.method("own", lambda w, g, lr: w - lr * g, lr=0.01)
    table = study.run(PROBLEM, [row, "sgd"], lr=0.01, **SMALL)
    assert table.rows[0]["mean"] == table.rows[1]["mean"]


def test_settings_that_nobody_has(tmp_path: Path) -> None:
    study = lab.Study(tmp_path, quiet=True)
    with pytest.raises(ValueError, match="none of sgd has a hyperparameter rate"):
        study.run(PROBLEM, "sgd", rate=0.1, **SMALL)
    with pytest.raises(ValueError, match="give at least one seed"):
        study.run(PROBLEM, "sgd", seeds=0)
    with pytest.raises(TypeError, match="a method is a name"):
        study.run(PROBLEM, 3)  # type: ignore[arg-type]
    assert not study.exists()


def test_an_interrupted_study_resumes(tmp_path: Path) -> None:
    """The same bits as without the interrupt."""
    lab.optimizer("theirs", torch.optim.RMSprop, lr=0.01)
    given: dict[str, Any] = SMALL | {"seeds": 1, "steps": 200}
    whole = lab.Study(tmp_path / "whole", quiet=True, workers=1)
    whole.run(PROBLEM, "theirs", **given)
    study = lab.Study(tmp_path / "cut", quiet=True, workers=1, checkpoint_seconds=0.0)
    calls = []

    class Interrupting(torch.optim.RMSprop):
        def step(self, closure: Any = None) -> Any:
            calls.append(1)
            if len(calls) == 10:  # in the first piece of 20 steps
                signal.raise_signal(signal.SIGINT)
            return super().step(closure)

    row = METHODS["theirs"]
    object.__setattr__(row, "factory", Interrupting)
    with pytest.raises(KeyboardInterrupt):
        study.run(PROBLEM, "theirs", **given)
    assert len(calls) == 20
    assert repr(study).endswith("1 pending")
    study.resume()
    assert len(calls) == 200
    a, b = (each.frame("loss") for each in (whole, study))
    assert list(a["loss"]) == list(b["loss"])


def test_quiet_and_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab.Study(tmp_path, quiet=True).run(PROBLEM, "sgd", **SMALL)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["jupyter", "terminal", "file"])
@pytest.mark.filterwarnings("error")
def test_progress_everywhere(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a notebook without widgets one line is written over and over."""
    console = Console(
        file=io.StringIO(), force_jupyter=kind == "jupyter", force_terminal=kind == "terminal"
    )
    monkeypatch.setattr(display, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(display, "find_spec", lambda name: None)
    monkeypatch.setattr(display.time, "monotonic", map(float, range(10**6)).__next__)
    spec, *others = lab.Study(tmp_path).specs(PROBLEM, "sgd", **SMALL)
    with display.progress(2, console) as on_progress:
        for step in (10, 40):
            on_progress(Progress(spec, step, 100.0, {"accuracy": 0.5}, tuple(others)))
    told = capsys.readouterr().err
    if kind == "terminal":
        assert "2 runs at step 40" in console.file.getvalue()  # type: ignore[attr-defined]
    elif kind == "jupyter":
        assert told.count("\r") == 2
        assert told.count("\n") == 1
    else:
        assert told.count("\n") == 2
    assert kind == "terminal" or "2.0 of 2 runs, 100 steps/s, 0:00 left" in told


def test_without_rich(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert len(lab.Study(tmp_path).run(PROBLEM, "sgd", **SMALL)) == 1


# --------------------------------------------------------------------------- other processes
@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "half_lab.py"
    path.write_text(textwrap.dedent(FILE))
    return path


@pytest.mark.slow
def test_workers_know_definitions_of_files_and_of_notebooks(file: Path, tmp_path: Path) -> None:
    lab.use(file)
    cell: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec(
        "class Cell(torch.optim.SGD):\n"
        "    def __init__(self, params, lr=0.1):\n"
        "        super().__init__(params, lr=0.5 * lr)\n"
        "def stream(seed):\n"
        "    while True:\n"
        "        yield [1.0, 0.5 * seed], seed % 2\n",
        cell,
    )
    lab.optimizer("cell", cell["Cell"])
    lab.problem("cells", cell["stream"], outputs=2, network="narrow")
    study = lab.Study(tmp_path / "study", quiet=True, workers=2)
    table = study.run("cells", ["half", "cell", "sgd"], seeds=1, steps=20, window=10)
    assert [row["seeds"] for row in table] == [1, 1, 1], study.tally.errors
    assert table.rows[0]["mean"] == table.rows[1]["mean"]
    alone = lab.Study(tmp_path / "alone", quiet=True, workers=1, engine="eager")
    again = alone.run("cells", ["half", "cell", "sgd"], seeds=1, steps=20, window=10)
    assert [row["mean"] for row in again] == [row["mean"] for row in table]


def test_an_installed_package_registers_by_its_entry_point(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "half_package-1.0.dist-info").mkdir(parents=True)
    (site / "half_package-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: half-package\nVersion: 1.0\n"
    )
    (site / "half_package-1.0.dist-info" / "entry_points.txt").write_text(
        "[upgd.lab]\nhalf-methods = distributed:register\n"
    )
    (site / "distributed.py").write_text(file.read_text())
    monkeypatch.syspath_prepend(str(site))
    listed = call("list", "methods", "--use", "half-methods", "--json")
    assert listed.exit_code == 0, listed.output
    assert json.loads(listed.output)["half"]["hyper"]["lr"] == 0.1
    study = ("--study", tmp_path / "study", "--quiet")
    ran = call("run", PROBLEM, "half", "--use", "half-methods", *FLAGS, *study)
    assert ran.exit_code == 0, ran.output
    assert repr(lab.Study(tmp_path / "study")).endswith("2 done")


def test_the_door_opens_when_it_is_used() -> None:
    """Importing the library does not import the laboratory; its attribute does."""
    code = "import sys, upgd; assert 'upgd.lab' not in sys.modules; print(upgd.lab.Study.__name__)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout == "Study\n", done.stderr


def test_kernels_are_announced_while_they_compile() -> None:
    """Ours by name, those of this process and what others hand on; not after the end."""
    numba = pytest.importorskip("numba")
    heard: list[str] = []

    def twice(x):  # type: ignore[no-untyped-def]
        return 2 * x

    for module, expected in (("upgd.kernels.made_up", ["twice"]), ("elsewhere", [])):
        twice.__module__ = module
        compiled = numba.njit(twice)
        with announcing.listening(heard.append):
            assert compiled(2.0) == compiled(2.0) == 4.0
        assert heard == expected
        heard.clear()
    with announcing.listening(heard.append):
        announcing.announce("from another process")
    announcing.announce("nobody listens")
    assert heard == ["from another process"]


def test_stacks_report_several_times_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a chunk may be, and with the same results."""
    found = []
    for seconds in (1e9, 1e-9):  # of a chunk: as long as may be, a step
        monkeypatch.setattr(learners, "CHUNK_SECONDS", seconds)
        steps: list[int] = []
        shown = nullcontext(lambda progress, steps=steps: steps.append(progress.step))
        monkeypatch.setattr(display, "progress", lambda total, console, shown=shown: shown)
        study = lab.Study(tmp_path / str(len(found)))
        study.run(PROBLEM, ["upgd", "sgd"], **SMALL)
        found.append((len(steps), [dict(row) for row in study.table()]))
    (few, first), (many, second) = found
    assert few < many
    assert first == second
