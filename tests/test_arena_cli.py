"""``upgd arena`` at a small scale: runs, resumes, adds rows, makes pages that are up to date."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.test_arena import fabricated, spread
from upgd.arena import board, evidence, grids, protocol
from upgd.arena.protocol import SCALES, Entrant, Scale, choose_streams
from upgd.arena.scores import judge
from upgd.cli import app
from upgd.lab import competing
from upgd.lab.competing import Contest, numbers_per_weight
from upgd.lab.study import Study
from upgd.ledger import StudyError
from upgd.optim.registry import METHODS
from upgd.study import learners

ROOT = Path(__file__).parents[1]
COMMITTED = sorted(path.parent for path in ROOT.glob("docs/results/arena/*/arena.json"))
TINY = Scale(
    "tiny",
    "for tests",
    ("recurring-label-permuted-digits", "both-permuted-digits"),
    steps=80,
    seeds=2,
    sets=2,
    search_seeds=1,
    share=0.5,
    task_length=20,
    hidden="4",
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A scale of some milliseconds; steps are timed briefly."""
    monkeypatch.setattr(protocol, "SCALES", {**SCALES, "tiny": TINY})
    monkeypatch.setattr(learners, "SECONDS", 0.01)
    monkeypatch.setattr(grids, "GRIDS", dict(grids.GRIDS))
    before = dict(METHODS)
    for name in [name for name, row in METHODS.items() if row.source]:
        del METHODS[name]
    yield
    METHODS.clear()
    METHODS.update(before)


def call(*words: object) -> Any:
    return CliRunner().invoke(app, ["arena", *map(str, words), "--scale", "tiny"])


@pytest.fixture(scope="module")
def contest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two methods that is over."""
    folder = tmp_path_factory.mktemp("arena") / "study"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "SCALES", {**SCALES, "tiny": TINY})
        patch.setattr(learners, "SECONDS", 0.01)
        done = call("sgd", "pgd", "--study", folder, "--alone", "--baseline", "sgd", "--quiet")
    assert done.exit_code == 0, done.output
    return folder


def test_the_arena_runs_and_writes_its_tables(contest: Path) -> None:
    found = evidence.read(contest / "results")
    assert list(found.entrants) == ["sgd", "pgd"]
    assert list(found.streams) == list(TINY.streams)
    for mode in ("tuned", "one"):
        table = judge(found, mode)
        assert sorted(row.rank or 0 for row in table.rows) in ([1, 2], [1, 1])
        best = [table.row(name).entries[s].relative.estimate for s, name in table.best.items()]
        assert best == [1.0, 1.0]
    assert sum(part.runs for part in found.parts) == len(Study(contest).runs())
    assert found.data["digits"]["samples"]["train"] == 1438
    assert {name: cost.floats for name, cost in found.costs.items()} == {"sgd": 1, "pgd": 1}
    assert all((cost.seconds or 0) > 0 for cost in found.costs.values())
    for path in board.outputs(contest / "results"):
        assert path.stat().st_size > 1000, path
    html = (contest / "results" / board.HTML).read_text()
    assert "One set for all streams" in html
    assert "data:image/png" in html


def test_choices_in_files_follow_from_the_search(contest: Path) -> None:
    found = evidence.read(contest / "results")
    check_choices(found)


def check_choices(found: evidence.Evidence) -> None:
    for name in found.entrants:
        mine = {key[1:]: cells for key, cells in found.search.items() if key[0] == name}
        if len(found.entrants[name].sets) == 1:
            assert not mine
            assert found.choices[name] == protocol.Choice(dict.fromkeys(found.streams, 0), 0)
        else:
            assert protocol.choose(mine, found.streams.values()) == found.choices[name]


def test_the_same_command_runs_nothing_again(contest: Path) -> None:
    before = {run.key for run in Study(contest).runs()}
    done = call("sgd", "pgd", "--study", contest, "--alone", "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert {row["method"] for row in facts["one"]} == {"sgd", "pgd"}
    assert set(facts["tuned"][0]["accuracy"]) == set(TINY.streams)
    assert {run.key for run in Study(contest).runs()} == before


def test_results_that_are_their_own_rivals_are_counted_once(contest: Path, tmp_path: Path) -> None:
    """As in a clone, where the results of a scale are the package's."""
    folder = shutil.copytree(contest / "results", tmp_path / "results")
    before = evidence.read(folder)
    arguments = ("--study", tmp_path / "study", "--against", folder, "--results", folder)
    done = call("sgd", "pgd", *arguments, "--no-run", "--quiet")
    assert done.exit_code == 0, done.output
    assert evidence.read(folder) == before


@pytest.mark.slow
def test_an_interrupted_arena_continues(contest: Path, tmp_path: Path) -> None:
    """With half of the runs in another study, the other half is run, and the table is the same."""
    streams = choose_streams(TINY)
    first = Contest(Study(tmp_path / "new", quiet=True), ["sgd", "pgd"], "tiny", others=[contest])
    assert first.upcoming() == []
    alone = Contest(Study(tmp_path / "new", quiet=True), ["sgd", "pgd"], "tiny")
    every = alone.upcoming()
    alone.study.run_specs(every[::2])
    assert alone.upcoming() == every[1::2]
    alone.run()
    assert alone.upcoming() == []
    whole, again = evidence.read(contest / "results"), alone.gather(measure=False)
    assert again.search == {k: pytest.approx(v, abs=1e-6) for k, v in whole.search.items()}
    assert again.choices == whole.choices
    assert [s.facts() for s in streams.values()] == [s.facts() for s in again.streams.values()]


def test_rivals_on_other_streams_are_left_out_before_anything_runs(
    contest: Path, tmp_path: Path
) -> None:
    arguments = ("--against", contest / "results", "--streams", "stationary-digits")
    done = call("sgd", *arguments, "--study", tmp_path / "study")
    assert done.exit_code == 0, done.output
    assert "none of these streams and protocols" in done.output
    found = evidence.read(tmp_path / "study" / "results")
    assert list(found.entrants) == ["sgd"]
    assert list(found.streams) == ["stationary-digits"]


def test_a_method_of_ones_own_joins_the_committed_rivals(contest: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from upgd import lab\n"
        "from upgd.arena import grids\n"
        "def halved(w, g, lr):\n    return w - lr * g / 2\n"
        "lab.method('halved', halved, lr=0.1)\n"
        "grids.register('halved', {'lr': [0.1, 1.0]})\n"
    )
    done = call("--use", mine, "--study", tmp_path / "s", "--against", contest / "results")
    assert done.exit_code == 0, done.output
    found = evidence.read(tmp_path / "s" / "results")
    assert list(found.entrants) == ["sgd", "pgd", "halved"]
    assert found.entrants["halved"].source == METHODS["halved"].source
    assert found.entrants["halved"].sets == ({"lr": 0.1}, {"lr": 1.0})
    assert len([run for run in Study(tmp_path / "s").runs() if run.spec.method != "halved"]) == 0
    assert "tuned per stream" in done.output
    assert "halved" in (tmp_path / "s" / "results" / "README.md").read_text()


@pytest.mark.slow
def test_earlier_rows_stay_and_other_streams_are_refused(contest: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    shutil.copytree(contest / "results", results)
    words = ("--study", tmp_path / "s", "--results", results, "--alone", "--quiet")
    done = call("sgdw", *words)
    assert done.exit_code == 0, done.output
    assert list(evidence.read(results).entrants) == ["sgd", "pgd", "sgdw"]
    done = call("sgdw", *words, "--streams", "both-permuted-digits")
    assert done.exit_code == 2
    assert "would replace" in done.output


def test_a_dry_run_says_how_much_there_is(tmp_path: Path) -> None:
    done = call("sgd", "--study", tmp_path / "s", "--alone", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "1 method, 2 streams, up to 2 sets each; at most 12 of 12 runs to do" in done.output
    assert "time: about" in done.output
    assert not (tmp_path / "s").exists()


def test_without_running_there_is_nothing_to_rank(tmp_path: Path) -> None:
    done = call("sgd", "--study", tmp_path / "s", "--alone", "--no-run")
    assert done.exit_code == 0, done.output
    assert "nothing is scored" in (tmp_path / "s" / "results" / "README.md").read_text()


def test_mistakes_end_in_one_line(contest: Path, tmp_path: Path) -> None:
    study = ("--study", tmp_path / "s", "--alone")
    for words, told in (
        (("sgdd", *study), "did you mean 'sgd'"),
        (("sgd", *study, "--streams", "nowhere"), "unknown problem 'nowhere'"),
        (("sgd", "--study", tmp_path / "s", "--against", tmp_path), "no results of the arena"),
        (("sgd", *study, "--study", tmp_path / "none"), "there is no study in"),
        (("--page", tmp_path), "no results of the arena"),
        (("--page", contest / "results", "--baseline", "adam"), "no baseline 'adam'"),
        (("sgd", *study, "--baseline", "adam"), "the baseline adam is no entrant"),
        (("sgd", *study, "--baseline", "adamm"), "did you mean 'adam'"),
    ):
        done = call(*words)
        assert done.exit_code == 2, done.output
        assert told in done.output
        assert len(done.output.strip().splitlines()) == 1
    foreign = tmp_path / "results"
    foreign.mkdir()
    (foreign / "README.md").write_text("mine")
    done = call("sgd", *study, "--results", foreign)
    assert done.exit_code == 2
    assert "was not made by upgd" in done.output


def test_lists_name_scales_and_methods() -> None:
    done = call("list")
    for word in (*SCALES, *grids.GRIDS, *SCALES["full"].streams):
        assert word in done.output


def test_a_page_is_made_again_from_its_tables(contest: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(contest / "results", folder)
    page = (folder / "README.md").read_text()
    (folder / "README.md").write_text(page.replace("sgd", "dgs"))
    done = call("--page", folder)
    assert done.exit_code == 0, done.output
    assert (folder / "README.md").read_text() == page
    (folder / "README.md").write_text("mine")
    with pytest.raises(StudyError, match="not made by upgd"):
        competing.page(folder)


def test_a_page_compares_with_a_baseline(contest: Path, tmp_path: Path) -> None:
    """Also after another entrant has joined, and in a page that is made again."""
    folder = tmp_path / "copy"
    shutil.copytree(contest / "results", folder)
    done = call("--page", folder, "--baseline", "SGD")
    assert done.exit_code == 0, done.output
    page = (folder / "README.md").read_text()
    assert evidence.read(folder).baseline == "sgd"
    assert page.startswith("<!-- generated by upgd arena;")
    assert "# The arena: tiny, against sgd\n" in page
    assert "## Against sgd\n" in page
    words = ("--study", tmp_path / "s", "--results", folder, "--alone", "--json")
    done = call("sgdw", *words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["against"] == "sgd"
    assert set(json.loads(done.stdout)["differences"]) == {"pgd", "sgdw"}
    assert call("--page", folder).exit_code == 0
    assert "\n| sgdw | " in (folder / "README.md").read_text().partition("## Against sgd\n")[2]


def test_pages_say_what_scores_say() -> None:
    made = fabricated(
        first={"east": spread(0.8, 0.01), "west": spread(0.4)},
        second={"east": spread(0.4), "west": ["diverged", *spread(0.5)[1:]]},
    )
    page = board.markdown(made)
    row = judge(made, "tuned").row("second")
    assert row.worst is not None
    assert f"| 2 | second | {board.bounds(row.worst)} | east |" in page
    assert "42.0 ± 22.2 ★" in page  # (0.1 + 4·0.5) / 5, and 2.776 · 0.179 / √5
    assert page.count("80.0 ± ") == 1  # nobody has a choice of sets
    assert "Tuned per stream" not in page
    both = Entrant("second", "second", ({"lr": 0.1}, {"lr": 0.2}))
    page = board.markdown(replace(made, entrants={**made.entrants, "second": both}))
    assert page.count("80.0 ± ") == 2
    assert page.index("Tuned per stream") < page.index("One set for all streams")
    assert page.index("One set for all streams") < page.index("](scores.png)")


def test_numbers_per_weight_are_those_of_states() -> None:
    known = {"sgdw": 1, "upgd-w": 2, "adamw": 3, "s-ewc": 3, "s-si": 5, "sgdw+layer_norm": 1}
    for name, numbers in known.items():
        assert numbers_per_weight(Entrant.named(name)) == pytest.approx(numbers, abs=0.01), name


# ------------------------------------------------------------------------- committed results
@pytest.mark.parametrize("folder", COMMITTED, ids=lambda path: path.name)
def test_committed_pages_are_up_to_date(folder: Path) -> None:
    found = evidence.read(folder)
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert page == board.markdown(found, folder), (
        f"run: upgd arena --page {folder.relative_to(ROOT)}"
    )
    assert found.scale == folder.name or folder.name not in SCALES
    check_choices(found)
    for stream in found.streams.values():
        assert stream.facts() == SCALES[found.scale].stream(stream.name).facts()


def test_something_is_committed() -> None:
    assert COMMITTED


def test_the_guide_says_how_large_scales_are() -> None:
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", (ROOT / "docs" / "arena.md").read_text(), re.M)
    assert [name for name, _ in rows] == list(SCALES)
    for name, row in rows:
        streams, steps, seeds, sets, _ = (cell.strip() for cell in row.split("|"))
        scale = SCALES[name]
        assert streams.split()[0] == str(len(scale.streams))
        assert steps.startswith(f"{scale.steps:,}".replace(",", " "))
        assert (seeds, sets) == (str(scale.seeds), str(scale.sets))
