"""Looking at a study from outside: ``upgd watch``, and TensorBoard's event files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from tests.ledgers import Clock
from upgd.cli import app
from upgd.ledger import Ledger, Result, RunSpec, Series, save_checkpoint
from upgd.report.tensorboard import place
from upgd.report.watching import MethodProgress, Paces, View, look, progress

PROBLEM = "label-permuted-digits"


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def specs(method: str, count: int, steps: int = 1000) -> list[RunSpec]:
    return [RunSpec(PROBLEM, method, {"lr": 0.1}, seed, steps) for seed in range(count)]


def checkpoint(folder: Path, spec: RunSpec, step: int, wall: float) -> None:
    (folder / "checkpoints").mkdir(exist_ok=True)
    facts = {"run": {"step": step}, "wall": wall}
    save_checkpoint(folder / "checkpoints" / f"{spec.key}.npz", {"w": np.zeros(9)}, facts)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Two methods: of the first some are over and two run; the other waits."""
    with Ledger.open(tmp_path) as ledger:
        ledger.add([*specs("upgd", 6), *specs("sgd", 2)])
        claims = ledger.claim("me", 1e6, limit=5)
        ledger.finish(claims[0], Result("eager", wall=4.0, summary={"accuracy": 0.5}))
        ledger.finish(claims[1], Result("eager", wall=0.1, diverged_at=10))
        ledger.fail(claims[2], "[bold]out of\x1b memory[/bold]\nand more", retry=False)
    checkpoint(tmp_path, claims[3].spec, 400, 8.0)
    return tmp_path


def test_progress_by_hand(study: Path) -> None:
    with Ledger.open(study, create=False, read_only=True) as ledger:
        view = look(ledger)
    first, second = view.rows
    assert first.counts == {"pending": 1, "running": 2, "done": 1, "diverged": 1, "failed": 1}
    assert (first.method, first.runs, first.to_do, first.steps) == ("upgd", 6, 3, 6000)
    assert first.done == 3 * 1000 + 400
    # One has done 400 steps in 8 s; the other is as fast as the one that finished.
    assert first.pace == pytest.approx(400 / 8 + 1000 / 4)
    assert first.seconds_left == pytest.approx(2600 / 300)
    assert (second.method, second.to_do, second.pace, second.seconds_left) == ("sgd", 2, 0, None)
    assert view.total.seconds_left == pytest.approx(4600 / 300)
    assert [spec.seed for spec, _ in view.failures] == [2]


def test_a_frame(study: Path) -> None:
    shown = call("watch", study, "--once")
    assert shown.exit_code == 0, shown.output
    assert "3/6" in shown.output
    assert "1 failed" in shown.output
    assert r"[bold]out of\x1b memory[/bold]" in shown.output.replace("\n", "")
    assert "and more" not in shown.output
    assert "\x1b" not in shown.output
    facts = json.loads(call("watch", study, "--json").stdout)
    assert facts["all"]["counts"]["pending"] == 3
    assert facts["methods"][0]["seconds_left"] == pytest.approx(2600 / 300)


def test_runs_that_nobody_holds_are_told(tmp_path: Path) -> None:
    clock = Clock()
    with Ledger.open(tmp_path, now=clock) as ledger:
        ledger.add(specs("upgd", 2))
        ledger.claim("me", 60, limit=1)
        clock.time += 61
        (row,) = look(ledger).rows
    assert row.counts == {"pending": 1, "running": 0, "left": 1}
    assert (row.to_do, row.pace) == (2, 0)
    said = call("watch", tmp_path, "--once").output
    assert "1 run left by processes that ended" in said
    assert "nobody works on it" in said


def test_what_interrupted_runs_have_done_counts(study: Path) -> None:
    """They are given back with their checkpoints."""
    checkpoint(study, specs("sgd", 2)[1], 250, 2.0)
    with Ledger.open(study, create=False, read_only=True) as ledger:
        first, second = look(ledger).rows
    assert (first.done, second.done) == (3 * 1000 + 400, 250)


def test_the_pace_is_that_of_the_last_minutes() -> None:
    """100 steps/s for ten minutes, then 20; a checkpoint each 20 s."""
    paces, told = Paces(), {}
    for now in range(0, 1500, 2):
        since = now - now % 20 - 7  # when the last checkpoint was written
        done = 100 * since if since < 600 else 60_000 + 20 * (since - 600)
        row = MethodProgress(PROBLEM, "upgd", {"running": 1}, 10**6, done, pace=55.0)
        paces.update(View([row], []), float(now))
        told[now] = row.pace
    assert told[0] == told[30] == 55.0  # less than two checkpoints were seen
    assert told[100] == told[598] == pytest.approx(100)
    assert 20 < told[700] < 100
    assert told[960] == told[1498] == pytest.approx(20)


def test_a_run_that_begins_anew_has_no_pace_of_late() -> None:
    paces = Paces()
    for now, done in ((0, 100), (40, 200), (80, 300), (120, 50), (160, 100)):
        row = MethodProgress(PROBLEM, "upgd", {"running": 1}, 1000, done, pace=7.0)
        paces.update(View([row], []), now)
        assert row.pace == (2.5 if now == 80 else 7.0)


def test_it_ends_by_itself(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs("upgd", 1))
        [claim] = ledger.claim("me", 60)
        ledger.finish(claim, Result("eager"))
    done = call("watch", tmp_path, "--every", "0.1")
    assert done.exit_code == 0
    assert "1/1" in done.output


def test_it_reads_while_another_writes(study: Path) -> None:
    with Ledger.open(study) as writer, Ledger.open(study, create=False, read_only=True) as reader:
        before = look(reader).total
        [claim] = writer.claim("other", 60)
        writer.finish(claim, Result("eager", wall=1.0))
        after = look(reader).total
    assert (before.to_do, after.to_do) == (5, 4)
    assert call("watch", study / "nowhere", "--once").exit_code == 2


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half of one", None])
def test_checkpoints_that_cannot_be_read_tell_nothing(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "c.npz"
    if content is not None:
        path.write_bytes(content)
    assert progress(path) == (0, 0.0)


# ---------------------------------------------------------------------------- event files
def test_events_are_the_ledgers_series(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    study, logs = tmp_path / "study", tmp_path / "logs"
    values = np.random.default_rng(0).random((3, 7)).astype(np.float32)
    values[:, 2] = np.nan
    with Ledger.open(study) as ledger:
        ledger.add([*specs("upgd", 2), *specs("s&p", 2)])
        for i, claim in enumerate(ledger.claim("me", 60, limit=3)):
            series = {"accuracy": Series(values[i], 50), "loss": Series(values[i] * 2, 50)}
            result = Result("eager", series=series, started=100.0, finished=170.0)
            ledger.finish(claim, result)
    said = call("export", study, "--tensorboard", logs)
    assert said.exit_code == 0, said.output
    assert "wrote 3 runs" in said.output
    with Ledger.open(study) as ledger:
        for run in ledger.runs(state="done"):
            events = EventAccumulator(str(logs / place(run.spec)))
            events.Reload()
            assert sorted(events.Tags()["scalars"]) == ["accuracy", "loss"]
            for metric in ("accuracy", "loss"):
                kept = ledger.series(run.key, metric)
                found = {e.step: e.value for e in events.Scalars(metric)}
                wanted = {50 * (i + 1): float(v) for i, v in enumerate(kept) if np.isfinite(v)}
                assert found == wanted
            assert events.Scalars("loss")[-1].wall_time == pytest.approx(170.0)
        assert len(list(logs.rglob("events.*"))) == 3
        [claim] = ledger.claim("me", 60)
        ledger.finish(claim, Result("eager", series={"loss": Series([1.0], 50)}))
    again = call("export", study, "--tensorboard", logs)
    assert "wrote 1 runs" in again.output
    assert "3 were there" in again.output
    assert len(list(logs.rglob("events.*"))) == 4
    assert not list(logs.rglob("*.partial"))


def test_places_tell_runs_apart() -> None:
    near = [0.1, 0.1 + 1e-9, 0.1 + 2e-9]
    found = [RunSpec("p", m, {"lr": lr}, 0, 10) for lr in near for m in ("s&p", "s_p", "../x")]
    found += [RunSpec("p", "m" * n, {"lr": 0.1}, 0, 10) for n in (150, 151)]
    places = {place(spec) for spec in found}
    assert len(places) == len(found)
    assert all(".." not in path.parts and max(map(len, path.parts)) < 140 for path in places)


def test_no_tensorboard_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Ledger.open(tmp_path).close()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    said = call("export", tmp_path, "--tensorboard", tmp_path / "logs")
    assert said.exit_code == 2
    assert said.output == "upgd: event files need tensorboard: pip install 'tensorboard>=2.14'\n"
    both = call("export", tmp_path, "--tensorboard", tmp_path / "logs", "--metric", "loss")
    assert both.exit_code == 2
