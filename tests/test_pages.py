"""Pages about results: made of committed numbers alone, and up to date."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from upgd import timing
from upgd.cli import app
from upgd.ledger import Ledger, RunSpec
from upgd.ledger.records import Result, Series
from upgd.paper import provenance, tables, update_time
from upgd.paper.beside import sentences
from upgd.paper.experiments import EXPERIMENTS
from upgd.paper.figures import FIGURES
from upgd.paper.found import read
from upgd.paper.measured import MEASURED, of_folder
from upgd.paper.measuring import How
from upgd.paper.pages import BLOCKS, FIGURES_FOLDER, Site, fill, folder_name, heading
from upgd.paper.results import TABLE, Results, find, gather, write
from upgd.paper.sets import METHODS, best
from upgd.streams import get as get_problem

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PAGES = [ROOT / "docs" / "paper.md", ROOT / "README.md", ROOT / "docs" / "index.md"]


@pytest.fixture(scope="module")
def site() -> Site:
    return Site(RESULTS)


@pytest.fixture(scope="module")
def texts(site: Site) -> dict[Path, str]:
    """All pages; their statistics take long."""
    return site.texts(PAGES)


# ------------------------------------------------------------------------ what is committed
def test_no_page_drifts_from_the_results(texts: dict[Path, str]) -> None:
    for path, text in texts.items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: 'make results' writes it anew"


def test_committed_pages_and_figures_may_be_replaced(site: Site) -> None:
    site.check()


def test_notes_were_written_for_these_results() -> None:
    """What is written by hand has numbers, too: whoever changes a table reads its notes again."""
    for notes in RESULTS.rglob("notes.md"):
        digest = hashlib.sha256()
        for table in sorted(notes.parent.rglob("*.csv.gz")):
            digest.update(table.read_bytes())
        mark = f"<!-- written for tables {digest.hexdigest()[:12]} -->"
        text = notes.read_text(encoding="utf-8")
        assert mark in text, f"{notes}: compare its numbers with the new tables, then say {mark}"


def test_every_picture_is_there(texts: dict[Path, str]) -> None:
    for path, text in texts.items():
        for target in re.findall(r"\]\(([^)#]+\.(?:png|md|py))\)", text):
            assert (path.parent / target).exists(), f"{path}: {target}; 'make results' draws"


def test_pages_show_the_claims_that_the_command_prints(site: Site) -> None:
    """The table, and the sentence that sums it up, in README, on the site and in the command."""
    table = "\n".join(BLOCKS["claims"](site, ""))
    assert table in (RESULTS / "README.md").read_text(encoding="utf-8")
    done = CliRunner().invoke(app, ["claims", str(RESULTS), "--markdown"])
    printed = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(printed) == 16
    assert "\n".join(printed) in table
    [sentence] = [line for line in done.stdout.splitlines() if line.startswith("Of 14 claims")]
    for page in (*PAGES, RESULTS / "README.md"):
        assert sentence in page.read_text(encoding="utf-8"), page


def test_every_table_says_where_it_comes_from(site: Site) -> None:
    assert site.folders
    for folder in site.folders:
        known = provenance.read(folder)
        assert known is not None, folder
        text = (folder / provenance.NAME).read_text(encoding="utf-8")
        assert not re.search(r'"/|[A-Z]:\\\\|/home|/work|/root|/tmp', text), folder
        if of_folder(folder) is None:
            results = site.results[known.experiment]
            experiment = EXPERIMENTS[known.experiment]
            assert known.outdated(experiment) == [], folder
            again = provenance.command(experiment, known.steps, known.over, known.parts)
            assert known.command == again, folder
            assert {a: len(s) for a, s in known.seeds.items()} == {
                arm: len(results.of(arm, next(iter(results.series)))) for arm in results.arms
            }


# ----------------------------------------------------------------------------- from scratch
def made_up(name: str, tasks: int = 60, seeds: int = 3) -> Results:
    rng = np.random.default_rng(0)
    experiment = EXPERIMENTS[name]
    arms = [arm.name for arm in experiment.arms if arm.name not in experiment.twins()]
    metrics = ("loss", "plasticity") if name.startswith("toy") else ("accuracy", "plasticity")
    series = {
        m: {arm: {s: rng.uniform(0.2, 0.9, tasks) for s in range(seeds)} for arm in arms}
        for m in metrics
    }
    return Results(name, get_problem(experiment.problem).window, series)


@pytest.mark.parametrize(
    "name", ["label-permuted-emnist", "toy-changing-inputs", "ablation-label-permuted-emnist"]
)
def test_a_new_table_has_a_page(name: str, tmp_path: Path) -> None:
    folder = tmp_path / folder_name(name)
    folder.mkdir()
    results = made_up(name)
    write(results, folder / TABLE)
    (folder / "notes.md").write_text("By hand.\n")
    texts = Site(tmp_path).texts()
    page = texts[folder / "README.md"]
    assert page.startswith("<!-- generated")
    assert f"# {heading(name)}" in page
    assert page.endswith("By hand.\n")
    for arm in EXPERIMENTS[name].arms:
        assert f"| {arm.title} |" in page
    assert f"[{folder.name}]({folder.name}/README.md)" in texts[tmp_path / "README.md"]
    shown = [f.name for f in FIGURES.values() if name in f.experiments]
    assert any(f"{FIGURES_FOLDER}/{figure}.png" in page for figure in shown)


def test_a_figure_says_which_metrics_have_fewer_seeds(tmp_path: Path) -> None:
    folder = tmp_path / folder_name("input-permuted-mnist")
    folder.mkdir()
    results = made_up("input-permuted-mnist", seeds=4)
    fewer = {arm: {0: curves[0]} for arm, curves in results.series["accuracy"].items()}
    some = {**results.series, "weight_l2": fewer}
    write(Results(results.name, results.window, some), folder / TABLE)
    page = Site(tmp_path).texts()[folder / "README.md"]
    assert "It lacks" in page
    assert page.count("1 of 4 seeds measured weight_l2.") == 1
    assert page.count("seeds measured") == 1


def test_numbers_of_a_table_are_those_of_the_series() -> None:
    results = made_up("label-permuted-emnist")
    curves = np.stack(list(results.of("upgd", "accuracy").values()))
    [row] = [line for line in tables.numbers(results) if line.startswith("| UPGD-W |")]
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells[0] == f"{100 * curves.mean():.2f}"
    change = (curves[:, 40:60].mean(1) - curves[:, 10:30].mean(1)).mean()
    assert cells[4].split()[0] == f"{100 * change:+.2f}".replace("-", "−")
    forgotten = (curves[:, :2].mean(1) - curves[:, -2:].mean(1)).mean()
    assert cells[6].split()[0] == f"{100 * forgotten:+.2f}".replace("-", "−")


def test_sets_that_were_found_stand_beside_the_printed_ones() -> None:
    """Every method of the figure has its row; differences are of seeds and tasks that both have."""
    name = "label-permuted-emnist"
    printed, found = made_up(name, seeds=3), made_up(f"best-sets-{name}", seeds=5)
    short = {arm: {s: x[:50] for s, x in some.items()} for arm, some in _accuracies(found).items()}
    found = replace(found, series={"accuracy": short})
    rows = [line.split("|")[1:-1] for line in tables.beside_printed(found, printed)[2:-2]]
    arms = EXPERIMENTS[found.name].arms
    assert arms
    assert [row[0].strip() for row in rows] == [arm.title for arm in arms]
    for arm, (_, mine, first, theirs, second, less) in zip(arms, rows, strict=True):
        for told, hyper in ((mine, arm.hyper), (theirs, best(name, arm.name))):
            assert [float(part.split()[-1]) for part in told.split(",")] == [
                hyper[key] for key in tables._NAMES if key in hyper
            ]
        a, b = (
            np.array([r.of(arm.name, "accuracy")[seed][:50].mean() for seed in range(3)])
            for r in (found, printed)
        )
        assert (first.strip(), second.strip()) == (f"{100 * a.mean():.2f}", f"{100 * b.mean():.2f}")
        mean, low, high = (float(x) for x in re.findall(r"[+-][\d.]+", less.replace("−", "-")))
        wide = stats.t.ppf(0.975, 2) * (a - b).std(ddof=1) / 3**0.5
        expected = 100 * (a - b).mean() + 100 * wide * np.array([0, -1, 1])
        np.testing.assert_allclose([mean, low, high], expected, atol=0.006)


def test_a_set_that_diverged_stands_there_too() -> None:
    name = "label-permuted-emnist"
    printed, found = made_up(name, seeds=3), made_up(f"best-sets-{name}", seeds=3)
    first, second = (arm.name for arm in EXPERIMENTS[found.name].arms[:2])
    kept = {arm: some for arm, some in _accuracies(found).items() if arm != first}
    kept[second] = {seed: x for seed, x in kept[second].items() if seed > 0}
    gone = {first: [0, 1, 2], second: [0]}
    table = tables.beside_printed(replace(found, series={"accuracy": kept}, diverged=gone), printed)
    rows = [line.split("|")[1:-1] for line in table[2:4]]
    assert "(3 of 3 seeds diverged)" in rows[0][1]
    assert [cell.strip() for cell in rows[0][2::2]] == ["-", "-"]
    assert "(1 of 3 seeds diverged)" in rows[1][1]
    assert "diverged" not in rows[1][3]
    assert float(rows[1][2]) == pytest.approx(
        100 * np.mean([kept[second][seed] for seed in (1, 2)]), abs=0.006
    )


def _accuracies(results: Results) -> Mapping[str, Mapping[int, NDArray[np.float64]]]:
    return results.series["accuracy"]


def test_a_method_that_diverged_is_told_of(tmp_path: Path) -> None:
    some = made_up("toy-changing-sign")
    kept = {m: {a: x for a, x in arms.items() if a != "pgd"} for m, arms in some.series.items()}
    without = Results(some.name, some.window, kept)
    assert not any("| PGD |" in line for line in tables.numbers(without))
    gone = replace(without, diverged={"pgd": [0, 1], "upgd": [7]})
    assert any("| PGD | diverged |" in line for line in tables.numbers(gone))
    seeds = len(some.of("upgd", "loss"))
    told = f"UPGD (1 of {seeds + 1} seeds"
    assert any(f"| {told} diverged) | " in line for line in tables.numbers(gone))
    folder = tmp_path / folder_name(some.name)
    folder.mkdir()
    write(gone, folder / TABLE)
    [caption] = [x for x in Site(tmp_path).figure(FIGURES["toys"], "") if x.startswith("*")]
    assert f" Diverged: toy-changing-sign (PGD, {told}))." in caption


def test_a_figure_says_which_sets_were_searched_in_part() -> None:
    name = "variants-emnist"
    arms = EXPERIMENTS["variants-label-permuted-emnist"].arms
    known = read()["label-permuted-emnist"]
    sets = {arm.name: replace(known[arm.name], sets=320) for arm in arms}
    whole = {"label-permuted-emnist": sets}
    assert tables.searched_in_part(FIGURES[name], whole) == ""
    sets[arms[0].name] = replace(known[arms[0].name], sets=7)
    told = " An arm was searched over 7 of 320 sets of the grid."
    assert tables.searched_in_part(FIGURES[name], whole) == told
    sets[arms[0].name] = replace(sets[arms[0].name], hyper={"lr": 7.0})  # not the set that ran
    assert tables.searched_in_part(FIGURES[name], whole) == ""


def test_a_part_may_be_a_piece_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"one": lambda site, up: ["a", "b"]}
    monkeypatch.setattr("upgd.paper.pages.BLOCKS", made)
    page = tmp_path / "x.md"
    mark = "generated by upgd results"
    page.write_text(
        f"- x <!-- one: {mark} -->old<!-- /one --> y\n<!-- one: {mark} -->\n<!-- /one -->"
    )
    filled = fill(Site(tmp_path), page)
    assert filled.startswith(f"- x <!-- one: {mark} -->a b<!-- /one --> y\n")
    assert filled.endswith(f"<!-- one: {mark} -->\n\na\nb\n\n<!-- /one -->")
    page.write_text(filled)
    assert fill(Site(tmp_path), page) == filled


def test_what_was_found_beside_the_claims(tmp_path: Path) -> None:
    """Who is ahead of UPGD-W; what other sets gain for a method that was tuned on slips."""
    levels = {"shrink-and-perturb": 0.72, "s-ewc": 0.71, "upgd": 0.7}

    def made(name: str, arms: dict[str, float]) -> Results:
        curves = {
            arm: {s: np.full(200, level + 1e-4 * s) for s in range(3)}
            for arm, level in arms.items()
        }
        return Results(name, 5_000, {"accuracy": curves})

    name, best_sets = "input-permuted-mnist", "best-sets-input-permuted-mnist"
    results = {name: made(name, dict.fromkeys(METHODS, 0.5) | levels)}
    [ahead] = sentences(results, tmp_path)
    assert "ahead of UPGD-W are S&P by 2.0 points [2.0, 2.0] and S-EWC by 1.0 points" in ahead
    results[name] = made(name, dict.fromkeys(METHODS, 0.5) | {"upgd": 0.7, "pgd": 0.6})
    results[best_sets] = made(best_sets, {"s-rwalk": 0.55, "upgd": 0.8})
    ahead, retuned = sentences(results, tmp_path)
    assert "UPGD-W is ahead of all; of PGD, the next, by 10.0 points" in ahead
    assert retuned.startswith("- S-RWalk's printed sets")
    assert "they gain 5.0 points [5.0, 5.0]" in retuned
    assert sentences({}, tmp_path) == []


def test_how_few_steps_the_gate_changes_is_told(tmp_path: Path) -> None:
    """The last 20 tasks count: there 1 in 400 and 3 in 400 weights are not in the middle bin."""
    name = "label-permuted-emnist"
    shares = {s: np.repeat([0.5, 1 - (1 + 2 * s) / 400], [180, 20]) for s in range(2)}
    series = {"utility_5_of_9": {"upgd": shares}}
    [told] = sentences({name: Results(name, 2_500, series)}, tmp_path)
    assert told.endswith("for one weight in 200 (Label-permuted EMNIST).")


def test_where_agents_end_is_told_of_long_runs(tmp_path: Path) -> None:
    """The last tenth of a hundred windows, of the four seeds that both have."""
    window = 30_000

    def made(windows: int, seeds: int = 4, **more: Any) -> dict[str, Results]:
        rising = {s: 10.0 * np.arange(windows) + s for s in range(seeds)}
        flat = {s: np.full(windows, 100.0) + np.arange(windows) / 1e6 for s in range(9)}
        series = {"return": {"ada-upgd": rising, "adam": flat}}
        return {"ppo-ant": Results("ppo-ant", window, series, **more)}

    [told] = sentences(made(100), tmp_path)
    # 10 * 94.5 + 1.5 in the mean; its seeds differ as 0, 1, 2, 3 do: 1.29 / 2 * 3.18
    assert "in the last tenth of 3\u202f000\u202f000 steps" in told
    assert told.endswith("(seeds that both have): Ant 946 and 100 (+846 [+844, +849]).")
    assert sentences(made(90), tmp_path) == []
    assert sentences(made(100, seeds=2), tmp_path) == []
    assert sentences(made(100, diverged={"adam": [8]}), tmp_path) == []


def test_an_unknown_part_is_a_mistake(tmp_path: Path) -> None:
    page = tmp_path / "x.md"
    page.write_text("<!-- weather: generated by upgd results -->\n<!-- /weather -->\n")
    with pytest.raises(ValueError, match="nothing makes 'weather'"):
        fill(Site(tmp_path), page)


def test_the_command_writes_pages_and_figures(tmp_path: Path) -> None:
    folder = tmp_path / "toy_changing_sign"
    folder.mkdir()
    write(made_up("toy-changing-sign"), folder / TABLE)
    page = tmp_path / "x.md"
    page.write_text("# Mine\n\n<!-- grids: generated by upgd results -->\n<!-- /grids -->\n")
    done = CliRunner().invoke(app, ["results", str(tmp_path), "--page", str(page)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / FIGURES_FOLDER / "toys.png").exists()
    assert "| UPGD-W |" in page.read_text()
    again = CliRunner().invoke(app, ["results", str(tmp_path), "--no-figures"])
    assert again.output == ""


# ------------------------------------------------------------------------------- provenance
def finished(folder: Path, specs: list[RunSpec], when: float, device: str) -> None:
    with Ledger.open(folder) as ledger:
        ledger.add(specs)
        for claim in ledger.claim("me", 60, limit=len(specs)):
            series = {"accuracy": Series(np.full(4, claim.spec.seed), 5_000)}
            facts: dict[str, Any] = {"machine": "x", "runs_in_stack": 2}
            ledger.finish(
                claim,
                Result(
                    *("batched-dense", device), versions={"torch": "2"}, host=facts,
                    started=when, finished=when + 10, wall=10.0, series=series,
                ),
            )  # fmt: skip


def test_runs_of_several_days_are_merged(tmp_path: Path) -> None:
    experiment = EXPERIMENTS["input-permuted-mnist"]
    runs = experiment.specs(scale=0.02, seeds=4)
    finished(tmp_path / "a", runs["upgd"][:2], 1e9, "NVIDIA H200")
    finished(tmp_path / "b", runs["upgd"][1:] + runs["sgdw"][:2], 1.1e9, "cpu")
    folders = (tmp_path / "a", tmp_path / "b")
    with Ledger.open(folders[0], read_only=True) as a, Ledger.open(folders[1], read_only=True) as b:
        found = find([a, b], experiment)
        results = gather(found, experiment.name)
    assert results is not None
    assert sorted(results.of("upgd", "accuracy")) == [0, 1, 2, 3]
    told = provenance.describe(found, experiment, {"name": "mnist"})
    assert told.seeds == {"upgd": [0, 1, 2, 3], "sgdw": [0, 1]}
    assert told.learner_steps == 6 * 20_000
    assert [(part.began, part.runs, part.seconds) for part in told.parts] == [
        ("2001-09-09", 2, 10.0),
        ("2004-11-09", 4, 20.0),
    ]
    assert told.command == "upgd reproduce fig3 --scale 0.02 --seeds 4 --device cuda"
    told.write(tmp_path)
    assert provenance.read(tmp_path) == told
    assert told.outdated(experiment) == []
    other = replace(experiment, arms=[replace(arm, hyper={"lr": 7}) for arm in experiment.arms])
    assert told.outdated(other) == ["upgd", "sgdw"]
    (tmp_path / provenance.NAME).write_text(json.dumps({"parts": []}))
    with pytest.raises(ValueError, match="does not say where"):
        provenance.read(tmp_path)


# ------------------------------------------------------------------------------------- time
def test_time_of_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_time, "SETTINGS", (update_time.Setting((6, 5, 4), 2),))

    def counted(calls: Any, *rest: Any) -> dict[str, list[float]]:
        for call in calls.values():
            call()  # every method makes an update
        return {name: [i + 1.0, i + 2.0] for i, name in enumerate(calls)}

    monkeypatch.setattr(timing, "measure", counted)
    how = How(seeds=2)
    update_time.measure(how, tmp_path, lambda text: None)
    [methods] = update_time.load(tmp_path).values()
    assert list(methods) == [update_time.PEER, *update_time.order()]
    assert update_time.ratio(methods, "shrink-and-perturb").estimate == pytest.approx((3 + 2) / 2)
    [path] = update_time.draw(tmp_path, tmp_path, ["svg"])
    assert "UPGD, 2nd order" in path.read_text()
    assert "| S&P | 3500.00 |" in "\n".join(update_time.page(tmp_path))
    assert "2 rounds" in update_time.plan(how)
    assert of_folder(tmp_path) is MEASURED["time"]
