"""The arena's rules: grids, choices and scores, on fabricated evidence."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from upgd.arena import board, grids
from upgd.arena import evidence as evidences
from upgd.arena.evidence import Cost, Evidence, cells_of, joined
from upgd.arena.protocol import (
    SCALES,
    Cell,
    Choice,
    Entrant,
    Stream,
    choose,
    choose_scale,
    choose_streams,
    forecast_specs,
    search_specs,
    upcoming,
)
from upgd.arena.scores import accuracies, judge, searched, versus
from upgd.ledger import RunSpec
from upgd.ledger.records import Result, Run
from upgd.metrics import mean_interval
from upgd.optim.custom import rule_row
from upgd.optim.registry import METHODS, Row, register, scalars
from upgd.study.kinds import kind_of
from upgd.study.options import Options

SEEDS = (0, 1, 2, 3, 4)
STREAMS = {name: Stream(name, 100, 10, SEEDS, (9,), 10) for name in ("east", "west")}


def fabricated(**accuracies: dict[str, Any]) -> Evidence:
    """By entrant and stream, the score's cells; every entrant has one set."""
    entrants = {name: Entrant(name, name, ({"lr": 0.1},)) for name in accuracies}
    choice = Choice(dict.fromkeys(STREAMS, 0), 0)
    score = {
        (name, stream, 0): cells
        for name, some in accuracies.items()
        for stream, cells in some.items()
    }
    search = {(name, stream, 0): [0.5] for name in entrants for stream in STREAMS}
    return Evidence("made", STREAMS, entrants, dict.fromkeys(entrants, choice), search, score)


def spread(mean: float, by: float = 0.0) -> list[Cell]:
    return [mean + by * k for k in (-2, -1, 0, 1, 2)]


# ------------------------------------------------------------------------------------ grids
UNTUNED = {"self-tuned-sgd"}
"""Entrants with their defaults alone."""


@pytest.mark.parametrize("name", grids.GRIDS)
def test_every_grid_has_twelve_sets_that_can_be_run(name: str) -> None:
    entrant = Entrant.named(name)
    known, count = scalars(entrant.method), 1 if name in UNTUNED else grids.SETS
    assert len(entrant.sets) == count
    hypers = {tuple(RunSpec("x", entrant.method, one).hyper.items()) for one in entrant.sets}
    assert len(hypers) == count
    for one in entrant.sets:
        assert {key.rpartition(".")[2] for key in one} <= known.keys()
    stream = SCALES["smoke"].stream("both-permuted-digits")
    kind_of(stream.name).check(stream.search(entrant, 0)[0], Options("cpu", "auto"))


def test_a_grid_is_found_under_the_name_that_it_was_registered_with() -> None:
    grids.register("S&P", [{"lr": 0.5}])
    try:
        assert grids.sets("s&p") == [{"lr": 0.5}]
    finally:
        del grids.GRIDS["s&p"]


@pytest.mark.parametrize("name", grids.GRIDS)
def test_fewer_sets_differ_in_every_hyperparameter(name: str) -> None:
    every, some = grids.sets(name), grids.sets(name, 4)
    assert len(some) == min(4, len(every))
    assert all(one in every for one in some)
    for hyper in every[0]:
        if len({one[hyper] for one in every}) > 1:
            assert len({one[hyper] for one in some}) > 1, hyper


def test_no_value_around_the_defaults_is_out_of_its_range() -> None:
    def heavy(w: Any, g: Any, velocity: Any, lr: Any, momentum: Any) -> Any:
        velocity = momentum * velocity + g
        return w - lr * velocity, velocity

    register(rule_row("heavy", heavy, states=["velocity"], lr=0.1, momentum=0.9))
    try:
        assert len(grids.sets("heavy")) == 12
        for one in grids.sets("heavy"):
            METHODS["heavy"].make(nn.Linear(2, 1), **one)  # ten times 0.9 would be refused
    finally:
        del METHODS["heavy"]


def test_a_method_without_a_grid_is_searched_around_its_defaults() -> None:
    for name in METHODS:
        found, usual = grids.all_sets(grids.around(name)), scalars(name)
        assert len({tuple(one.items()) for one in found}) == grids.SETS
        steps = {one["lr"] for one in found}
        assert min(steps) < usual["lr"] <= max(steps)
        assert all(METHODS[name].hyper[h].admits(v) for one in found for h, v in one.items())


def test_users_bring_a_grid_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "GRIDS", dict(grids.GRIDS))
    row = METHODS["sgdw"]
    register(Row("mine", "Mine", row.optimizer, row.method))
    assert len(Entrant.named("mine").sets) == grids.SETS
    grids.register("Mine", [{"lr": 0.1}, {"lr": 0.2, "weight_decay": 0.1}])
    assert Entrant.named("mine").sets == ({"lr": 0.1}, {"lr": 0.2, "weight_decay": 0.1})
    assert Entrant.named("mine").source == METHODS["mine"].source != ""
    for wrong in ([], {"lr": [0.1 * k for k in range(1, 14)]}):
        with pytest.raises(ValueError, match="1 to 12 sets"):
            grids.register("mine", wrong)


def test_one_method_enters_under_several_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "GRIDS", dict(grids.GRIDS))
    monkeypatch.setattr(grids, "_METHODS", {})
    assert grids.registered() == []
    grids.register("Fast=1", [{"lr": 1.0}], method="SGDW+input_norm")
    grids.register("sgdw", [{"lr": 0.5}])
    assert grids.registered() == ["sgdw", "fast=1"]
    found = Entrant.named("fast=1")
    assert found == Entrant("fast=1", "sgdw", ({"lr": 1.0},), {"input_norm": True})
    assert Entrant.named("sgdw").sets == ({"lr": 0.5},)
    for taken in ("sgd", "one,two"):
        with pytest.raises(ValueError, match="choose another"):
            grids.register(taken, [{}], method="sgdw")
    with pytest.raises(KeyError, match="did you mean 'sgdw'"):
        grids.register("new", [{}], method="sgdww")


def test_names_of_entrants() -> None:
    assert Entrant.named("SGDW+input_norm+layer_norm").name == "sgdw+layer_norm+input_norm"
    assert Entrant.named("sgdw+input_norm").options == {"input_norm": True}
    with pytest.raises(ValueError, match="'dropout'"):
        Entrant.named("sgdw+dropout")
    with pytest.raises(KeyError, match="did you mean 'sgdw'"):
        Entrant.named("sgdww+layer_norm")


# --------------------------------------------------------------------------------- protocol
def test_scales_keep_their_promises() -> None:
    full = SCALES["full"]
    assert full.steps >= 500_000
    assert full.seeds >= 5
    assert full.sets == grids.SETS
    streams = choose_streams(full)
    assert len(streams) >= 8
    for stream in streams.values():
        assert set(stream.seeds).isdisjoint(stream.search_seeds)
        assert stream.search_steps == 50_000
    long, short = (SCALES[name].stream("label-permuted-emnist") for name in ("long", "full"))
    assert long.steps == 5_000_000
    entrant = Entrant.named("sgdw")
    assert long.search(entrant, 3) == short.search(entrant, 3)  # is run once


def test_every_entrant_has_the_same_budget_and_seeds() -> None:
    streams = choose_streams(SCALES["smoke"]).values()
    counts = []
    for name in grids.GRIDS.keys() - UNTUNED:
        entrant = Entrant.named(name, SCALES["smoke"].sets)
        specs = search_specs([entrant], streams)
        counts.append(sorted((s.problem, s.seed, s.steps) for s in specs))
    assert all(each == counts[0] for each in counts)
    assert len(counts[0]) == 4 * len(list(streams))


def test_the_set_for_all_streams_has_the_best_worst_case() -> None:
    sets = {0: (0.9, 0.4), 1: (0.8, 0.7), 2: (0.5, 0.8)}  # relative: (1, .5), (.89, .875), (.56, 1)
    names = tuple(STREAMS)
    search = {(names[k], n): [acc[k]] for n, acc in sets.items() for k in (0, 1)}
    assert choose(search, STREAMS.values()) == Choice({"east": 0, "west": 2}, 1)


def test_choices_with_diverged_missing_and_equal_sets() -> None:
    search: dict[tuple[str, int], list[Cell]] = {
        ("east", 0): ["diverged", 0.9],  # (0.1 + 0.9) / 2
        ("east", 1): [0.6, 0.6],
        ("east", 2): [0.99, None],  # cannot be chosen
        ("east", 3): [0.6, 0.6],  # as good as 1, and later
        ("west", 0): [0.2, 0.2],
        ("west", 1): [0.1, 0.1],
        ("west", 2): [0.9, 0.9],
    }
    choice = choose(search, STREAMS.values())
    assert choice == Choice({"east": 1, "west": 2}, 0)  # 0.83·0.22 … against 1·0.11
    assert choice.numbers("east") == [1, 0]
    assert Choice({"east": 1}, 1).numbers("east") == [1]
    assert choose({("east", 0): [None]}, STREAMS.values()) == Choice({}, None)


def over(spec: RunSpec, accuracy: float, state: str = "done") -> Run:
    """A run that is over."""
    result = None if state == "failed" else Result("eager", summary={"accuracy": accuracy})
    return Run(spec, spec.key, state, 1, None, result)


def test_the_next_runs_follow_from_the_ledger() -> None:
    scale = replace(SCALES["smoke"], streams=("label-permuted-digits", "input-permuted-digits"))
    streams = choose_streams(scale)
    entrants = [Entrant.named(name, 2) for name in ("sgd", "upgd-w")]
    first = upcoming({}, entrants, streams.values())
    assert first == search_specs(entrants, streams.values())
    assert len(first) == 2 * 2 * 2
    best = {"sgd": 1, "upgd-w": 0}
    runs = []
    for entrant in entrants:
        for stream in streams.values():
            for number in range(2):
                [spec] = stream.search(entrant, number)
                runs.append(over(spec, 0.5 + 0.1 * (best[entrant.name] == number)))
    assert upcoming(cells_of(runs[:-1]), entrants, streams.values()) == [runs[-1].spec]
    scored = upcoming(cells_of(runs), entrants, streams.values())
    expected = [
        spec
        for e in entrants
        for stream in streams.values()
        for spec in stream.score(e, best[e.name])
    ]
    assert scored == expected  # one set is best in both ways, and is run once
    every = cells_of([*runs, *(over(s, 0.6) for s in scored)])
    assert upcoming(every, entrants, streams.values()) == []
    planned = forecast_specs(entrants, streams.values())
    assert set(expected) < set(planned)
    found = evidences.gather(runs, "smoke", entrants, streams)
    assert found.choices["sgd"] == Choice(dict.fromkeys(streams, 1), 1)
    assert found.search["sgd", "label-permuted-digits", 1] == [0.6]
    assert found.score["sgd", "label-permuted-digits", 1] == [None, None, None]


def test_failed_runs_are_over_and_have_no_result() -> None:
    streams = choose_streams(SCALES["smoke"], ["label-permuted-digits"])
    entrant = Entrant.named("sgd", 2)
    specs = search_specs([entrant], streams.values())
    runs = [over(specs[0], 0.0, "failed"), over(specs[1], 0.3)]
    known, keys = cells_of(runs), [run.key for run in runs]
    scored = upcoming(known, [entrant], streams.values(), keys)
    assert {spec.hyper["lr"] for spec in scored} == {entrant.sets[1]["lr"]}


def test_results_alone_are_enough_to_go_on() -> None:
    """Runs of a study that is lost are known from its results; a grid may have changed since."""
    scale = replace(SCALES["smoke"], streams=("label-permuted-digits", "input-permuted-digits"))
    streams = choose_streams(scale)
    entrants = {name: Entrant.named(name, 2) for name in ("sgd", "upgd-w")}
    specs = search_specs(entrants.values(), streams.values())
    runs = [over(spec, 0.5 + 0.01 * k) for k, spec in enumerate(specs)]
    before = evidences.gather(runs[:-1], "smoke", entrants.values(), streams)
    assert sum(part.runs for part in before.parts) == len(specs) - 1
    known = before.known(entrants)
    assert known == cells_of(runs[:-1])
    assert upcoming(known, list(entrants.values()), streams.values()) == specs[-1:]
    after = evidences.gather(runs, "smoke", entrants.values(), streams, known)
    assert sum(part.runs for part in after.parts) == 1  # the others are in the earlier results
    assert after.search == evidences.gather(runs, "smoke", entrants.values(), streams).search
    turned = {"sgd": replace(entrants["sgd"], sets=entrants["sgd"].sets[::-1])}
    again = evidences.gather([], "smoke", turned.values(), streams, before.known(turned))
    for stream in streams:
        assert again.search["sgd", stream, 0] == before.search["sgd", stream, 1]
    other = {"sgd": replace(entrants["sgd"], source="def rule(w, g, lr): return w")}
    assert before.known(other) == {}


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'quick'"):
        choose_scale("quik")
    with pytest.raises(ValueError, match="no classes"):
        choose_streams(SCALES["smoke"], ["toy-changing-sign"])
    with pytest.raises(ValueError, match="did you mean 'both-permuted-mnist'"):
        choose_streams(SCALES["smoke"], ["both-permuted-mnst"])


# ----------------------------------------------------------------------------------- scores
def test_known_winners_are_found() -> None:
    made = fabricated(
        first={"east": spread(0.8, 0.01), "west": spread(0.4, 0.02)},
        second={"east": spread(0.6, 0.01), "west": spread(0.5, 0.02)},
        third={"east": spread(0.4, 0.01), "west": spread(0.1, 0.02)},
    )
    table = judge(made, "tuned")
    assert table.best == {"east": "first", "west": "second"}
    assert [row.entrant for row in table.rows] == ["first", "second", "third"]
    assert [row.rank for row in table.rows] == [1, 2, 3]
    first = table.row("first")
    ratios = np.array(spread(0.4, 0.02)) / np.array(spread(0.5, 0.02))
    assert first.worst is not None
    assert first.mean is not None
    assert first.worst_stream == "west"
    assert first.worst.estimate == pytest.approx(ratios.mean(), abs=1e-12)
    half = 2.7764451051978 * ratios.std(ddof=1) / math.sqrt(5)
    assert first.entries["west"].relative.low == pytest.approx(ratios.mean() - half, abs=1e-9)
    assert first.mean.estimate == pytest.approx((1 + ratios.mean()) / 2)
    assert first.entries["east"].relative == (1.0, 1.0, 1.0)
    third = table.row("third")
    assert third.worst_stream == "west"
    assert third.worst is not None
    lows = [entry.relative.low for entry in third.entries.values()]
    assert third.worst.low == min(lows)


def test_pairs_cancel_what_makes_seeds_differ() -> None:
    hard: list[Cell] = [0.3, 0.5, 0.7, 0.4, 0.6]
    less: list[Cell] = [0.9 * float(x) for x in hard if isinstance(x, float)]
    made = fabricated(a={"east": hard, "west": hard}, b={"east": less, "west": less})
    entry = judge(made, "one").row("b").entries["east"]
    assert entry.relative == pytest.approx((0.9, 0.9, 0.9))
    assert entry.accuracy.high - entry.accuracy.low > 0.3


def test_a_diverged_run_counts_as_chance() -> None:
    good: list[Cell] = [0.5] * 5
    bad: list[Cell] = ["diverged", 0.5, 0.5, 0.5, 0.5]
    table = judge(fabricated(a={"east": good, "west": good}, b={"east": bad, "west": good}), "one")
    row = table.row("b")
    assert row.diverged == 1
    assert row.entries["east"].accuracy.estimate == pytest.approx((0.1 + 4 * 0.5) / 5)
    assert row.entries["east"].relative.estimate == pytest.approx((0.2 + 4) / 5)
    assert row.rank == 2


def test_an_entrant_that_lacks_a_run_is_not_ranked() -> None:
    good: list[Cell] = [0.5] * 5
    lacking: list[Cell] = [0.9, 0.9, None, 0.9, 0.9]
    made = fabricated(a={"east": good, "west": good}, b={"east": lacking, "west": good})
    table = judge(made, "tuned")
    assert table.best["east"] == "a"  # what is incomplete is nobody's yardstick
    row = table.row("b")
    assert (row.rank, row.mean, row.worst) == (None, None, None)
    assert list(row.entries) == ["west"]
    assert table.rows[-1] is row
    none = judge(fabricated(a={"east": good, "west": good}, b={}), "tuned").row("b")
    assert none.rank is None


def test_equal_entrants_share_a_rank() -> None:
    good: list[Cell] = [0.5, 0.6, 0.5, 0.6, 0.5]
    low = [0.9 * float(x) for x in good if isinstance(x, float)]
    both = {"east": good, "west": good}
    table = judge(fabricated(a=both, b=dict(both), c={"east": low, "west": low}), "tuned")
    assert {row.entrant: row.rank for row in table.rows} == {"a": 1, "b": 1, "c": 3}


def test_one_seed_has_no_interval() -> None:
    streams = {name: replace(stream, seeds=(0,)) for name, stream in STREAMS.items()}
    made = replace(fabricated(a={"east": [0.5], "west": [0.4]}), streams=streams)
    row = judge(made, "tuned").row("a")
    assert row.worst is not None
    assert row.worst.estimate == 1.0
    assert math.isnan(row.worst.low)


def test_intervals_hold_for_five_seeds() -> None:
    """Of 95% intervals from five noisy seeds about 95% contain the truth."""
    generator = np.random.default_rng(0)
    inside = 0
    for _ in range(1_000):
        best = generator.normal(0.8, 0.02, 5)
        ratios = generator.normal(0.9, 0.03, 5)
        made = fabricated(
            a={"east": list(best), "west": list(best)},
            b={"east": list(best * ratios), "west": list(best * ratios)},
        )
        interval = judge(made, "one").row("b").entries["east"].relative
        inside += interval.low <= 0.9 <= interval.high
    assert 0.93 < inside / 1_000 < 0.97


def test_modes_have_their_own_sets() -> None:
    made = fabricated(a={"east": [0.5] * 5, "west": [0.5] * 5})
    more = {("a", "east", 1): [0.7] * 5, **made.score}
    made = replace(made, score=more, choices={"a": Choice({"east": 1, "west": 0}, 0)})
    tuned, one = (accuracies(made, "a", "east", mode) for mode in ("tuned", "one"))
    assert tuned is not None
    assert one is not None
    assert (tuned.mean(), one.mean()) == pytest.approx((0.7, 0.5))
    assert searched(made, "a", "east") == [0.5]


# ---------------------------------------------------------------------------------- evidence
def test_evidence_survives_its_files(tmp_path: Path) -> None:
    cells: list[Cell] = [0.123456, "diverged", None, 0.5, 1.0]
    made = fabricated(a={"east": cells, "west": [0.5] * 5}).with_costs({"a": Cost(2.0, 1e-6, "x")})
    evidences.write(made, tmp_path)
    found = evidences.read(tmp_path)
    assert found == replace(made, parts=[], data={})
    for name in (evidences.SEARCH, evidences.FACTS):
        (tmp_path / name).write_text("{}")
        with pytest.raises(ValueError, match="no results of the arena"):
            evidences.read(tmp_path)


def test_rows_are_added_where_the_protocol_is_the_same() -> None:
    others = fabricated(a={"east": [0.5] * 5, "west": [0.5] * 5}, b={"east": [0.1] * 5})
    mine = fabricated(b={"east": [0.9] * 5, "west": [0.4] * 5})
    both, left = joined(mine, others)
    assert list(both.entrants) == ["a", "b"]
    assert both.score["b", "east", 0] == [0.9] * 5
    assert left == []
    longer = {**STREAMS, "west": replace(STREAMS["west"], steps=200)}
    both, left = joined(replace(mine, streams=longer), others)
    assert (list(both.streams), left) == (["east"], ["west"])
    assert all(stream == "east" for _, stream, _ in (*both.score, *both.search))
    with pytest.raises(ValueError, match="no stream has the same protocol"):
        joined(replace(mine, streams={"west": longer["west"]}), others)


def test_streams_that_few_have_do_not_count() -> None:
    """Others would have no rank for the sake of a stream that has hardly begun."""
    full, half = {"east": spread(0.8), "west": spread(0.8)}, {"east": spread(0.4)}
    found = fabricated(a=full, b=half, c=dict(half)).against("b")
    table = judge(found, "tuned")
    assert table.counted == ["east"]
    assert [(row.entrant, row.rank) for row in table.rows] == [("a", 1), ("b", 2), ("c", 2)]
    assert set(table.row("a").entries) == {"east", "west"}  # is shown nevertheless
    apart = versus(found, "b").others["a"].mean
    assert apart is not None
    assert apart.estimate == pytest.approx(0.4)
    assert judge(fabricated(a=full, b=dict(full), c=half), "tuned").counted == ["east", "west"]
    alone = judge(fabricated(a=half, b={}, c={}), "tuned")
    assert alone.counted == ["east"]  # nothing counts for more


def test_curves_are_means_of_equal_parts(tmp_path: Path) -> None:
    streams = choose_streams(SCALES["smoke"], ["label-permuted-digits"])
    entrant = Entrant.named("self-tuned-sgd")
    [stream] = streams.values()
    specs = stream.score(entrant, 0)
    times = np.arange(100)
    series = {s.key: list(0.1 * k + 0.001 * times) for k, s in enumerate(specs)}
    runs = [over(spec, 0.5) for spec in specs]
    found = evidences.gather(runs, "smoke", [entrant], streams, series=series)
    line = found.curves["self-tuned-sgd", stream.name, 0]
    assert line == pytest.approx(0.1 + 0.001 * (2 * np.arange(50) + 0.5))
    assert "curves" in board.figures(found)
    evidences.write(found, tmp_path)
    again = evidences.read(tmp_path)
    assert again.curves == {
        key: pytest.approx(some, abs=1e-4) for key, some in found.curves.items()
    }
    known = evidences.gather([], "smoke", [entrant], streams, again.known({entrant.name: entrant}))
    assert known.curves == {}
    assert known.with_curves(again).curves == again.curves  # when the study is gone
    other = {entrant.name: replace(entrant, source="another rule")}
    assert known.with_curves(replace(again, entrants=other)).curves == {}
    series[specs[0].key] = [0.5] * 99  # was cut
    assert evidences.gather(runs, "smoke", [entrant], streams, series=series).curves == {}


def test_an_entrant_with_one_set_is_not_searched() -> None:
    streams = choose_streams(SCALES["smoke"])
    entrant = Entrant.named("self-tuned-sgd")
    assert search_specs([entrant], streams.values()) == []
    scored = upcoming({}, [entrant], streams.values())
    assert scored == [spec for s in streams.values() for spec in s.score(entrant, 0)]
    assert forecast_specs([entrant], streams.values()) == scored
    found = evidences.gather([over(spec, 0.5) for spec in scored], "smoke", [entrant], streams)
    assert found.search == {}
    assert judge(found, "tuned").row("self-tuned-sgd").rank == 1
    assert judge(found, "one").row("self-tuned-sgd").rank == 1
    assert board.modes(found) == ["one"]
    assert board.figures(found) == ["scores"]
    assert board.figures(found.against("self-tuned-sgd")) == ["scores", "differences"]


def test_streams_that_nobody_has_are_left_out() -> None:
    """An arena under way ranks by the streams that are scored, and its page says so."""
    found = fabricated(a={"east": spread(0.8)}, b={"east": spread(0.4)}, c={})
    table = judge(found, "tuned")
    assert [(row.entrant, row.rank) for row in table.rows] == [("a", 1), ("b", 2), ("c", None)]
    assert table.row("b").worst == mean_interval(np.full(5, 0.5))
    assert "ranks and means are of the 1 stream" in board.introduction(found)
    assert "lacks 1 stream" in board.markdown(found)
    assert "Unfinished" not in board.introduction(fabricated(a=dict.fromkeys(STREAMS, spread(0.8))))


# ------------------------------------------------------------------------------- a baseline
def test_differences_are_paired_by_seeds() -> None:
    """Student's t for 4 degrees of freedom is 2.776; seeds differ by far more than entrants."""
    level = np.array([0.2, 0.8, 0.4, 0.9, 0.5])
    apart = np.array([0.01, 0.03, 0.02, 0.00, 0.04])
    made = fabricated(
        mine={"east": [*level], "west": [*level]},
        near={"east": [*(level - apart)], "west": [*(level + 0.05)]},
        far={"east": [*(level - 0.1)], "west": [*(level + 0.1)]},
    )
    found = versus(made, "mine")
    half = (
        2.7764451051978 * np.sqrt(0.00025) / np.sqrt(5)
    )  # of the mean of `apart`, variance 0.00025
    east, west = (found.others["near"].streams[stream] for stream in STREAMS)
    assert east.estimate == pytest.approx(-0.02)
    assert (east.low, east.high) == pytest.approx((-0.02 - half, -0.02 + half), abs=1e-5)
    assert (west.low, west.high) == pytest.approx((0.05, 0.05))
    mean = found.others["near"].mean
    assert mean is not None
    assert (mean.estimate, mean.high - mean.estimate) == pytest.approx((0.015, half / 2), abs=1e-5)
    assert list(found.others) == ["near", "far"]  # the largest mean first
    assert dict(found.best) == {"east": "near", "west": "far"}
    assert found.rest.streams["west"].estimate == pytest.approx(0.1)
    assert found.rest.mean is not None
    assert found.rest.mean.estimate == pytest.approx((-0.02 + 0.1) / 2)


def test_who_lacks_a_stream_has_no_mean_difference() -> None:
    made = fabricated(
        lacks={"east": spread(0.9)},
        mine={"east": spread(0.5), "west": spread(0.5)},
        gone={"east": ["diverged"] * 5, "west": spread(0.6)},
    )
    found = versus(made, "mine")
    assert list(found.others) == ["gone", "lacks"]
    assert found.others["lacks"].mean is None
    assert set(found.others["lacks"].streams) == {"east"}
    assert found.others["gone"].streams["east"].estimate == pytest.approx(0.1 - 0.5)  # chance
    nobody = versus(made, "lacks")
    assert set(nobody.rest.streams) == {"east"}
    assert nobody.rest.mean is None


def test_pages_compare_with_the_baseline(tmp_path: Path) -> None:
    made = fabricated(
        mine={"east": spread(0.5), "west": spread(0.5)},
        other={"east": spread(0.6), "west": [0.45, 0.5, 0.5, 0.5, 0.5]},
    )
    assert "Against" not in board.markdown(made)
    made = made.against("mine")
    evidences.write(made, tmp_path)
    page = board.markdown(evidences.read(tmp_path))
    half = 100 * 2.7764451051978 * np.std([0.45, 0.5, 0.5, 0.5, 0.5], ddof=1) / np.sqrt(5)
    row = f"+4.50 ± {half / 2:.2f} ▲ | +10.00 ± 0.00 ▲ | -1.00 ± {half:.2f} |"
    assert f"| other | {row}" in page
    assert f"| best of the others | {row[:-2].replace('▲ | -', '▲ (other) | -')} (other) |" in page
    with pytest.raises(ValueError, match="no baseline 'nobody' among mine, other"):
        made.against("nobody")
