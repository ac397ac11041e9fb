"""``upgd learn``: what it learns from lines, what it refuses, and what a killed run leaves."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("sklearn")
from typer.testing import CliRunner

from tests.ledgers import PROCESSES, crash_at, forking, posix
from tests.waiting import PATIENCE, wait_for
from upgd.cli import app
from upgd.ledger import crash_points as crash
from upgd.pipe.lines import LONGEST, Lines, PipeSource
from upgd.pipe.outputs import Output
from upgd.pipe.parameters import parse_parameters
from upgd.pipe.pipe import MOST_REASONS, Pipe
from upgd.pipe.task import Task, guess_kind
from upgd.stream import Classifier, Regressor

NETWORK = (8,)
SAME = ("--network", "8")  # one network with noise: most sensitive to the order of things
Record = tuple[dict[str, Any], Any]  # features (None: missing) and target (None: unknown)


# ------------------------------------------------------------------------------- streams
def records(count: int = 150, seed: int = 0, regression: bool = False) -> list[Record]:
    """Numbers and strings, some missing; a column, strings and a class that appear later."""
    rng = random.Random(seed)
    colours = ["red", 'say "blue"', "green, or\nnot", "déjà vu"]
    found: list[Record] = []
    for t in range(count):
        a, b = rng.gauss(0, 1), rng.gauss(5, 2)
        x: dict[str, Any] = {"a": a, "b": None if t % 7 == 3 else b}
        x["colour"] = None if t % 11 == 5 else colours[rng.randrange(2 if t < 50 else 4)]
        x["late"] = rng.random() if t > 60 and t % 2 else None
        x["mixed"] = rng.choice(["none", 1.5, -2e3])
        y = "up" if a + 0.1 * b > 0.5 else "down"
        found.append((x, 3 * a + 100 if regression else "new" if t > 90 and t % 9 == 0 else y))
    return found


def as_csv(rows: Sequence[Record], delimiter: str = ",") -> str:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow([*rows[0][0], "y"])
    for x, y in rows:
        writer.writerow(["" if value is None else value for value in (*x.values(), y)])
    return text.getvalue()


def as_json(rows: Sequence[Record]) -> str:
    lines = []
    for t, (x, y) in enumerate(rows):
        known = {k: v for k, v in x.items() if v is not None or t % 2}  # null, or not there at all
        lines.append(json.dumps({**known, "y": y}) + "\n")
    return "".join(lines)


def one_by_one(rows: Sequence[Record], cls: Any = Classifier, **parameters: Any) -> Any:
    """The learner that saw the same rows with learn_one."""
    learner = cls(**{"network": NETWORK, **parameters})
    for x, y in rows:
        if y is not None:
            learner.learn_one(x, y)
    return learner


def state(learner: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays, facts = learner._state()
    return {k: (v.dtype, v.shape, np.asarray(v).tobytes()) for k, v in arrays.items()}, facts


def same(one: Any, other: Any) -> bool:
    """Whether two learners are alike, bit for bit."""
    (arrays, facts), (others, more) = state(one), state(other)
    assert [k for k in arrays if arrays[k] != others[k]] == []
    assert facts == more
    return True


def call(*arguments: object, input: str | bytes | None = None) -> Any:
    found = CliRunner().invoke(app, ["learn", *map(str, arguments)], input=input)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert "Traceback" not in found.stderr
    return found


def learned(path: Path, *arguments: object, input: str | bytes | None = None) -> Any:
    """The facts of a run that succeeds."""
    found = call("--state", path, "--json", *arguments, input=input)
    assert found.exit_code == 0, found.stderr
    return json.loads(found.stdout)


# ------------------------------------------------------------------------------- learning
@pytest.mark.parametrize("network", ["8", "small"])
@pytest.mark.parametrize("kind", ["classify", "regress"])
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_learns_what_learn_one_learns(tmp_path: Path, network: str, kind: str, form: str) -> None:
    rows = records(regression=kind == "regress")
    file, kept = tmp_path / f"stream.{form}", tmp_path / "state"
    file.write_text(as_csv(rows) if form == "csv" else as_json(rows))
    facts = learned(kept, "--target", "y", "--network", network, file)
    assert (facts["kind"], facts["learned"], facts["bad"]) == (kind, len(rows), 0)
    cls = Classifier if kind == "classify" else Regressor
    expected = one_by_one(rows, cls, network=NETWORK if network == "8" else network)
    assert same(cls.load(kept), expected)
    if kind == "classify":
        assert (facts["accuracy"], facts["classes"]) == (expected.accuracy_, 3)
    else:
        assert facts["mean_absolute_error"] == expected.mean_absolute_error_


def test_pieces_and_places_make_no_difference(tmp_path: Path) -> None:
    rows = records()
    text = as_csv(rows)
    expected = one_by_one(rows)
    (tmp_path / "file.csv").write_text(text)
    (tmp_path / "tabs.tsv").write_text(as_csv(rows, "\t"))
    (tmp_path / "windows").write_bytes(b"\xef\xbb\xbf" + as_csv(rows, ";").encode())
    learned(tmp_path / "1", "--target", "y", *SAME, "--save-every", "7", tmp_path / "file.csv")
    learned(tmp_path / "2", "--target", "y", *SAME, input=text)
    learned(tmp_path / "3", "--target", "y", *SAME, tmp_path / "tabs.tsv")
    learned(tmp_path / "4", "--target", "y", *SAME, tmp_path / "windows")
    names, rest = text.split("\n", 1)
    learned(tmp_path / "5", "--target", "y", *SAME, "--columns", names, "--format=csv", input=rest)
    for number in "12345":
        assert same(Classifier.load(tmp_path / number), expected)


def test_parameters_and_ignored_columns(tmp_path: Path) -> None:
    rows = records()
    options = ("--ignore", "colour", "--ignore", "mixed", "--set", "horizon=50")
    options += ("--set", "missing=zero", "--set", "replay=20", "--set", "lr=0.05")
    learned(tmp_path / "s", "--target", "y", *SAME, *options, input=as_json(rows))
    left = [({k: x[k] for k in x if k in ("a", "b", "late")}, y) for x, y in rows]
    seen = [({k: v for k, v in x.items() if v is not None or t % 2}, y)
            for t, (x, y) in enumerate(left)]  # fmt: skip
    parameters = {"horizon": 50, "missing": "zero", "replay": 20, "hyper": {"lr": 0.05}}
    assert same(Classifier.load(tmp_path / "s"), one_by_one(seen, **parameters))


def test_predictions_are_those_before_each_row(tmp_path: Path) -> None:
    rows = [(x, None if t % 13 in (4, 5) else y) for t, (x, y) in enumerate(records())]
    found = tmp_path / "predictions.csv"
    text = as_csv(rows)
    facts = learned(tmp_path / "s", "--target", "y", *SAME, "--predict", found, input=text)
    assert facts["predicted"] == sum(y is None for _, y in rows)
    learner, expected = Classifier(network=NETWORK), []
    for (x, y), line in zip(rows, line_numbers(text), strict=True):
        chances = learner.predict_proba_one(x)
        guess = learner.predict_one(x)
        chance = "" if guess is None else f"{chances[guess]:.6g}"
        expected.append([str(line), guess or "", chance, y or ""])
        if y is not None:
            learner.learn_one(x, y)
    with open(found, newline="") as file:
        assert list(csv.reader(file)) == [["line", "prediction", "probability", "truth"], *expected]
    assert same(Classifier.load(tmp_path / "s"), learner)


def line_numbers(text: str) -> list[int]:
    """Where the records of a CSV begin, by the csv module's own count of lines."""
    reader = csv.reader(io.StringIO(text, newline=""))
    next(reader)
    found, before = [], reader.line_num
    for _ in reader:
        found.append(before + 1)
        before = reader.line_num
    return found


def test_numbers_are_predicted_before_each_row(tmp_path: Path) -> None:
    rows = records(80, regression=True)
    found = call("--target", "y", *SAME, "--predict", "-", input=as_csv(rows))
    assert found.exit_code == 0
    [header, *lines] = csv.reader(io.StringIO(found.stdout))
    assert header == ["line", "prediction", "truth"]
    learner = Regressor(network=NETWORK)
    for (x, y), (_, guess, truth) in zip(rows, lines, strict=True):
        if learner.__sklearn_is_fitted__():
            assert float(guess) == learner.predict_one(x)
        else:
            assert guess == ""
        assert float(truth) == y
        learner.learn_one(x, y)


@pytest.mark.parametrize(
    ("targets", "kind"),
    [
        (["a", "b"], "classify"),
        (["0", "1", "1"], "classify"),
        (["1.0", "2.0"], "classify"),
        (["0.5", "1"], "regress"),
        ([str(i) for i in range(30)], "regress"),
        ([True, False], "classify"),
        ([3], "classify"),
        ([1, 2.5], "regress"),
    ],
)
def test_the_kind_is_guessed_from_the_first_targets(targets: list[Any], kind: str) -> None:
    assert guess_kind(targets)[0] == kind


def test_a_guess_is_told_and_can_be_overruled(tmp_path: Path) -> None:
    text = "a,y\n" + "".join(f"{i % 5},{i % 3}\n" for i in range(30))
    assert "guessed --classify" in call("--target", "y", *SAME, input=text).stderr
    facts = learned(tmp_path / "s", "--target", "y", "--regress", *SAME, input=text)
    assert facts["kind"] == "regress"


# ------------------------------------------------------------------------------ bad lines
def malformed_csv(rng: random.Random, good: str) -> bytes:
    fields = good.split(",")
    place = rng.randrange(len(fields) - 1)

    def put(text: str) -> bytes:
        return ",".join([*fields[:place], text, *fields[place + 1 :]]).encode()

    return rng.choice([
        good.rpartition(",")[0].encode(),  # a field too few
        (good + ",1").encode(),
        b",".join([b"\xff\xfe", *good.encode().split(b",")[1:]]),
        good.encode()[:-3] + b"\0" + good.encode()[-3:],
        put("inf"),
        put("-Infinity"),
        put("1e999"),
        put("1e200"),
        put('"not closed'),
        put('"closed" too early'),
        ",".join([*fields[:-1], ""]).encode(),  # no target
        ",".join([*fields[:-1], "NA"]).encode(),
        b"a,b,c,y",  # the header again
        b"lorem ipsum",
        b"\x80\x81\x82",
        b'"',
        bytes(rng.randrange(1, 256) for _ in range(20)).replace(b"\n", b"") + b"\xff",
        b"x" * (LONGEST + 5),
    ])  # fmt: skip


def malformed_json(rng: random.Random, good: str) -> bytes:
    whole = good.encode()
    return rng.choice([
        whole[: rng.randrange(1, len(whole) - 1)],
        whole + b"}",
        whole.replace(b'"a"', b'"b"'),  # a name twice
        whole[:-1] + b', "z": {"nested": 1}}',
        whole[:-1] + b', "z": [1, 2]}',
        whole[:-1] + b', "z": 1e999}',
        whole[:-1] + b', "z": Infinity}',
        whole[:-1] + b', "z": ' + b"9" * 400 + b"}",
        whole[:-1] + b', "z": ' + b"9" * 5000 + b"}",
        whole[:-1] + b', "z": "\\ud800"}',
        b"[" * 100_000,
        b"[1, 2, 3]",
        b"null",
        b'{"a": 1}',
        b'{"a": 1, "y": null}',
        b'{"a": 1, "y": [1]}',
        b'{"a": 1, "y": 1e999}',
        b"{'a': 1}",
        b"\xff" + whole,
        whole.replace(b":", b"\0", 1),
        b'{"a": "' + b"x" * LONGEST + b'"}',
    ])  # fmt: skip


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_malformed_lines_are_skipped_counted_and_kept(tmp_path: Path, form: str) -> None:
    rng = random.Random(1)
    rows, lines, bad = [], [], []
    if form == "csv":
        lines.append(b"a,b,c,y")
    for t in range(300):
        x = {"a": rng.gauss(0, 1), "b": rng.gauss(0, 1), "c": rng.choice(["left", "right"])}
        y = "up" if x["a"] > 0 else "down"
        good = f"{x['a']},{x['b']},{x['c']},{y}" if form == "csv" else json.dumps({**x, "y": y})
        for _ in range(2 if t < 200 else 1):
            make = malformed_csv if form == "csv" else malformed_json
            bad.append(make(rng, good))
            lines.append(bad[-1])
        lines.append(good.encode())
        rows.append((x, y))
    assert len(bad) == 500
    kept, state_file = tmp_path / "bad", tmp_path / "s"
    options = ("--target", "y", *SAME, "--format", form, "--bad-file", kept, "--json")
    found = call("--state", state_file, *options, input=b"\n".join(lines) + b"\n")
    assert found.exit_code == 0, found.stderr
    facts = json.loads(found.stdout)
    assert (facts["learned"], facts["bad"]) == (300, 500)
    assert found.stderr.count("skipped standard input, line") == 10
    assert same(Classifier.load(state_file), one_by_one(rows))
    told = [each if len(each) <= LONGEST else each[:200] for each in bad]
    assert kept.read_bytes() == b"".join(each + b"\n" for each in [*lines[: form == "csv"], *told])


def test_what_a_learner_refuses_is_a_bad_line(tmp_path: Path) -> None:
    lines = ['{"a": 1, "y": 0}', '{"a": 2, "y": 1.5}', '{"a": 3, "y": 1.0}', '{"a": 4, "y": true}']
    lines += ['{"a": 1e20, "y": 1}', '{"a": 5, "y": ' + "9" * 400 + "}", '{"b": -1e19, "y": 0}']
    options = ("--target", "y", "--classify", *SAME, "--set", "normalize=false")
    facts = learned(tmp_path / "s", *options, input="\n".join(lines))
    assert (facts["learned"], facts["bad"]) == (3, 4)
    rows = [({"a": 1.0}, 0), ({"a": 3.0}, 1.0), ({"a": 4.0}, True)]
    assert same(Classifier.load(tmp_path / "s"), one_by_one(rows, normalize=False))


def test_reasons_that_quote_values_take_bounded_memory(tmp_path: Path) -> None:
    lines = [f"{t},v{t}" for t in range(2500)] + [f"1,{'x' * 5000}{t}" for t in range(20)]
    (tmp_path / "a.csv").write_text("a,y\n1,2\n" + "\n".join(lines) + "\n")
    given = Task([str(tmp_path / "a.csv")], "y", kind="regress", parameters={"network": NETWORK})
    pipe = Pipe(given)
    pipe.run()
    assert len(pipe.reasons) == MOST_REASONS + 1
    assert sum(pipe.reasons.values()) == pipe.counts.bad == 2520
    assert pipe.reasons.most_common(1) == [("other", 1520)]
    lines.reverse()
    (tmp_path / "a.csv").write_text("a,y\n" + "\n".join(lines) + "\n")
    pipe = Pipe(given)
    with pytest.raises(ValueError, match="mostly: the target is 'xxx"):
        pipe.run()  # the 20 long ones are one reason, and other is none
    assert max(map(len, pipe.reasons)) < 250


def test_a_bad_line_is_refused_and_learning_goes_on_once_it_is_corrected(tmp_path: Path) -> None:
    rows = records(60)
    x = {"a": 1.0, "b": 2.0, "colour": "red", "late": None, "mixed": 1.5}
    lines = as_csv([*rows[:30], (x, "up")]).splitlines()
    file = tmp_path / "stream.csv"
    broken = "\n".join([*lines[:-1], "1,2"]) + "\n" + as_csv(rows[30:]).split("\n", 1)[1]
    file.write_text(broken)
    options = ("--state", tmp_path / "s", "--target", "y", *SAME, "--bad", "refuse", file)
    for _ in range(2):
        found = call(*options)
        assert found.exit_code == 2
        number = len(lines)
        assert f"stream.csv, line {number}: 2 fields, but the header has 6" in found.stderr
        assert same(Classifier.load(tmp_path / "s"), one_by_one(rows[:30]))
    file.write_text(broken.replace("\n1,2\n", "\n" + lines[-1] + "\n"))
    assert call(*options).exit_code == 0
    expected = one_by_one([*rows[:30], (x, "up"), *rows[30:]])
    assert same(Classifier.load(tmp_path / "s"), expected)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"", (), "is empty"),
        (b"\n\n\n", (), "is empty"),
        (b"a,b,Y\n1,2,3\n", (), "there is no target column 'y'; did you mean 'Y'?"),
        (b"a,targets\n1,2\n", ("--target=target",), "did you mean 'targets'?"),
        (b"a,a,y\n1,2,3\n", (), "column 'a' twice"),
        (b"y\n1\n", (), "no column to learn from beside the target"),
        (b"a,y\n1,2\n", ("--ignore=b",), "there is no ignored column 'b'"),
        (b"a,y\n1,2\n", ("--ignore=y",), "is the target and cannot be ignored"),
        (b"\xff\xfea\0,\0y\0\n\0", (), "UTF-16"),
        (b"\x1f\x8b\x08\0", (), "compressed"),
        (b"a,y\r1,2\r", (), "carriage returns"),
        (b"a\x80,y\n1,2\n", (), "the header, line 1, is bad: byte 2 is 0x80"),
        (b"a,y\0\n1,2\n", (), "the header, line 1, is bad: it has a NUL byte"),
        (b"x" * (LONGEST + 1) + b"\n", (), "the header, line 1, is bad: the line has"),
        (b"a,y\n1\n2\n", (), "nothing was learned: all of 2 lines are bad"),
        (b'{"a": 1, "yy": 2}\n', (), "the target 'y' is missing; did you mean 'yy'?"),
        (b"a,y\n1,2\n", ("--format=xml",), "format is csv or jsonl"),
        (b"a,y\n1,2\n", ("--delimiter=::",), "a delimiter is one character"),
        (b"a,y\n1,2\n", ("--classify", "--regress"), "exclude each other"),
        (b"a,y\n1,2\n", ("--set", "horizn=5"), "did you mean 'horizon'?"),
        (b"a,y\n1,2\n", ("--set", "horizon=1"), "horizon must be at least 2"),
        (b"a,y\n1,2\n", ("--set", "batch_size=4"), "sample by sample"),
        (b"a,y\n1,2\n", ("--set", "lr=0.1"), "--network 128"),
        (b"a,y\n1,2\n", ("--network", "huge"), "64-32"),
        (b"a,y\n1,2\n", ("--bad", "ignore"), "skip or refuse"),
        (b"a,y\n1,2\n", ("--save-every", "0"), "whole number from 1 on"),
        (b"a,y\n1,2\n", ("--predict", "-", "--json"), "both write to standard output"),
        (b"a,y\n1,2\n", ("--skip-seen",), "--skip-seen needs --state"),
        (b"a,y\n1,2\n", ("--state", "no/such/folder/s"), "no/such/folder/s"),
        (b"a,y\n1,2\n", ("no-such-file",), "no-such-file: No such file"),
        (b"a,y\n1,\n2,\n", ("--predict", "-"), "give --classify or --regress"),
        (b"a,y\n1,2\n", ("--predict", os.devnull, "--columns=a,b"), "no target column 'y'"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_line(
    content: bytes, options: tuple[str, ...], message: str
) -> None:
    target = () if any(each.startswith("--target") for each in options) else ("--target=y",)
    found = call(*target, *options, input=content)
    assert found.exit_code == 2
    assert message in found.stderr
    assert found.stderr.splitlines()[-1].startswith("upgd: ")


def test_the_target_must_be_named() -> None:
    assert "--target COLUMN" in call(input=b"a,y\n1,2\n").stderr


def test_lines_of_any_length_from_any_pieces() -> None:
    rng = random.Random(2)
    lengths = [0, 1, 5, LONGEST - 1, LONGEST, LONGEST + 1, 3 * LONGEST, 7]
    content = b"".join(b"x" * length + rng.choice([b"\n", b"\r\n"]) for length in lengths) + b"end"
    pieces = io.BytesIO(content)
    lines = Lines(PipeSource("test", lambda count: pieces.read(rng.randrange(1, count))))
    while not lines.has_ended:
        lines.fill(PATIENCE)
    found = list(lines.ready)
    assert [line.number for line in found] == list(range(1, len(lengths) + 2))
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    assert [line.end for line in found] == [*ends, len(content)]
    for line, length in zip(found, lengths, strict=False):
        if length < LONGEST:
            assert (line.raw, line.fault) == (b"x" * length, "")
        if length > LONGEST:
            assert len(line.raw) < 1000
            assert "bytes" in line.fault
    assert (found[-1].raw, found[-1].is_terminated) == (b"end", False)


def test_a_quote_that_is_not_closed_costs_one_line(tmp_path: Path) -> None:
    rows = [({"a": float(i), "s": "x"}, "even" if i % 2 == 0 else "odd") for i in range(40)]
    lines = as_csv(rows).splitlines()
    lines.insert(10, '1,"open,even')
    lines.insert(20, '2,"""",odd')  # one quote as text
    rows.insert(19 - 1, ({"a": 2.0, "s": '"'}, "odd"))
    facts = learned(tmp_path / "s", "--target", "y", *SAME, input="\n".join(lines))
    assert facts["bad"] == 1
    assert same(Classifier.load(tmp_path / "s"), one_by_one(rows))


# ----------------------------------------------------------------------- states, positions
def test_a_state_for_something_else_is_refused(tmp_path: Path) -> None:
    text, kept = as_csv(records(40)), tmp_path / "s"
    learned(kept, "--target", "y", *SAME, "--set", "replay=0", input=text)
    before = kept.read_bytes()
    for options, message in [
        (("--target", "a"), "target y, not a"),
        (("--regress",), "kind classify, not regress"),
        (("--network", "16"), "network 8, not 16"),
        (("--set", "replay=5"), "replay 0, not 5"),
        (("--set", "normalize=false"), "normalize True, not False"),
        (("--ignore", "late"), "ignored columns none, not late"),
    ]:
        found = call("--state", kept, *options, input=text)
        assert (found.exit_code, message in found.stderr) == (2, True), found.stderr
    assert kept.read_bytes() == before
    (tmp_path / "other").write_bytes(b"something else")
    found = call("--state", tmp_path / "other", "--target", "y", input=text)
    assert (found.exit_code, "is no saved learner" in found.stderr) == (2, True)
    assert (tmp_path / "other").read_bytes() == b"something else"


def test_a_state_goes_on_without_being_told_again(tmp_path: Path) -> None:
    rows = records(90)
    kept, options = tmp_path / "s", ("--ignore", "colour", "--set", "horizon=40")
    learned(kept, "--target", "y", *SAME, *options, input=as_csv(rows[:50]))
    facts = learned(kept, input=as_csv(rows[50:]))
    assert (facts["learned"], facts["samples_learned"]) == (40, 90)
    assert facts["all_runs"]["learned"] == 90
    left = [({k: v for k, v in x.items() if k != "colour"}, y) for x, y in rows]
    assert same(Classifier.load(kept), one_by_one(left, horizon=40))


def test_a_learner_saved_in_python_can_be_continued(tmp_path: Path) -> None:
    rows = records(80)
    learner = one_by_one(rows[:40])
    learner.save(tmp_path / "s", {"mine": 1})
    learned(tmp_path / "s", "--target", "y", input=as_csv(rows[40:]))
    found = Classifier.load(tmp_path / "s")
    assert same(found, one_by_one(rows))
    assert found.extra["mine"] == 1


def test_a_pipe_that_starts_again_can_be_skipped(tmp_path: Path) -> None:
    rows = records(100)
    text = as_csv(rows)
    lines = line_numbers(text)
    parts = text.splitlines(True)
    first = "".join([*parts[: lines[40] - 1], "bad\n", *parts[lines[40] - 1 : lines[60] - 1]])
    whole = first + "".join(parts[lines[60] - 1 :])
    learned(tmp_path / "s", "--target", "y", *SAME, input=first)
    found = call("--state", tmp_path / "s", "--skip-seen", "--json", input=whole)
    assert json.loads(found.stdout)["learned"] == 40
    assert same(Classifier.load(tmp_path / "s"), one_by_one(rows))


def test_files_go_on_where_they_were(tmp_path: Path) -> None:
    rows = records(120)
    text = as_csv(rows)
    starts = line_numbers(text)

    def part(count: int) -> str:
        return "".join(text.splitlines(True)[: starts[count] - 1])

    file, kept = tmp_path / "a.csv", tmp_path / "s"
    file.write_text(part(50))
    assert learned(kept, "--target", "y", *SAME, file)["learned"] == 50
    assert learned(kept, file)["learned"] == 0
    file.write_text(part(80))  # it grows
    assert learned(kept, file)["learned"] == 30
    moved = file.rename(tmp_path / "a.csv.1")  # and is rotated
    new = tmp_path / "a.csv"
    new.write_text(text.split("\n", 1)[0] + "\n" + text[len(part(80)) :])
    assert learned(kept, moved, new)["learned"] == 40
    assert same(Classifier.load(kept), one_by_one(rows))
    new.write_text(as_csv(records(120, seed=7)))
    found = call("--state", kept, moved, new)
    assert (found.exit_code, "has changed before byte" in found.stderr) == (2, True)
    assert same(Classifier.load(kept), one_by_one(rows))


def test_after_a_rotation_the_renamed_file_must_be_named(tmp_path: Path) -> None:
    rows = even_and_odd(40, True)
    file, kept = tmp_path / "app.csv", tmp_path / "s"
    file.write_text(as_csv(rows[:10]))
    learned(kept, "--target", "y", *SAME, file)
    with file.open("a") as more:
        more.write(as_csv(rows[:20]).partition("\n9.0,odd\n")[2])
    old = file.rename(tmp_path / "app.csv.1")
    file.write_text(as_csv(rows[20:]))
    found = call("--state", kept, file)
    assert found.exit_code == 2
    assert f"name the renamed file before it: {old} {file};" in found.stderr
    assert learned(kept, old, file)["learned"] == 30
    assert same(Classifier.load(kept), one_by_one(rows))
    file.write_text(as_csv(rows[::-1]))  # the same file with other content was not rotated
    found = call("--state", kept, file)
    assert ("has changed" in found.stderr, "renamed" in found.stderr) == (True, False)


def test_the_ends_of_what_was_learned_are_compared(tmp_path: Path) -> None:
    text = as_csv([({"a": 0.5}, "up" if t % 2 else "down") for t in range(2000)])
    file, kept = tmp_path / "a.csv", tmp_path / "s"
    file.write_text(text)
    learned(kept, "--target", "y", *SAME, file)
    for place, noticed in [
        (4, True), (4095, True), (4096, False), (len(text) - 4097, False), (len(text) - 4096, True)
    ]:  # fmt: skip
        with file.open("r+") as changed:
            changed.seek(place)
            changed.write("~")
        assert (call("--state", kept, file).exit_code == 2) == noticed
        file.write_text(text)


def test_an_empty_file_among_others_is_noted(tmp_path: Path) -> None:
    rows = even_and_odd(40, True)
    names = [tmp_path / f"day{number}.csv" for number in (1, 2, 3)]
    for name, text in zip(names, [as_csv(rows[:20]), "", as_csv(rows[20:])], strict=True):
        name.write_text(text)
    kept = tmp_path / "s"
    found = call("--state", kept, "--target", "y", *SAME, *names)
    assert (found.exit_code, "day2.csv is empty" in found.stderr) == (0, True)
    assert same(Classifier.load(kept), one_by_one(rows))
    names[1].write_text(as_csv(rows[:10]))  # it comes late
    assert learned(kept, *names)["learned"] == 10


def test_nothing_but_empty_files_is_refused(tmp_path: Path) -> None:
    names = [tmp_path / "a.csv", tmp_path / "b.csv"]
    for name in names:
        name.write_text("\n")
    found = call("--target", "y", *SAME, *names)
    assert found.exit_code == 2
    assert f"{names[0]}, {names[1]} are empty" in found.stderr.splitlines()[-1]


def test_a_redirected_file_goes_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, kept = records(60), str(tmp_path / "s")
    (tmp_path / "a.csv").write_text(as_csv(rows))
    found = []
    for _ in range(2):
        with open(tmp_path / "a.csv") as file, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", file)
            done = Pipe(Task(["-"], "y", parameters={"network": NETWORK}, state=kept)).run()
        found.append(done["learned"])
    assert found == [60, 0]
    assert same(Classifier.load(kept), one_by_one(rows))


def test_a_line_that_is_still_written_is_left_for_the_next_run(tmp_path: Path) -> None:
    rows = records(60)
    text = as_csv(rows)
    end = sum(map(len, text.splitlines(True)[: line_numbers(text)[30] - 1])) + 3
    file, kept = tmp_path / "a.csv", tmp_path / "s"
    file.write_text(text[:end])
    found = call("--state", kept, "--target", "y", *SAME, file)
    assert "left for the next run" in found.stderr
    file.write_text(text)
    assert learned(kept, file)["bad"] == 0
    assert same(Classifier.load(kept), one_by_one(rows))


def even_and_odd(count: int, numeric: bool) -> list[Record]:
    """Rows of numbers, which are read in a quick way, or with a string."""
    some = {} if numeric else {"b": "red"}
    return [({"a": float(t), **some}, "even" if t % 2 == 0 else "odd") for t in range(count)]


@pytest.mark.parametrize("numeric", [True, False])
def test_a_last_line_that_looks_whole_is_left_for_the_next_run(
    tmp_path: Path, numeric: bool
) -> None:
    rows = even_and_odd(30, numeric)
    text = as_csv(rows)
    file, kept = tmp_path / "a.csv", tmp_path / "s"
    first = text.index("\n20.0,") - 2  # 19.0,o
    for end, count in [(first, 19), (first + 1, 0), (first + 2, 0), (first + 3, 1)]:
        file.write_text(text[:end])
        found = call("--state", kept, "--target", "y", "--json", *SAME, file)
        facts = json.loads(found.stdout)
        assert (facts["learned"], facts["bad"]) == (count, 0)
        assert ("line 21 has no newline at its end" in found.stderr) == (end < first + 3)
    file.write_text(text)
    assert learned(kept, file)["learned"] == 10
    assert same(Classifier.load(kept), one_by_one(rows))


def test_a_line_that_is_left_does_not_decide_the_kind(tmp_path: Path) -> None:
    text = "a,y\n" + "".join(f"{t},{t}.5\n" for t in range(20))
    (tmp_path / "a.csv").write_text(text + "20,-")  # -20.5 to be
    assert learned(tmp_path / "s", "--target", "y", *SAME, tmp_path / "a.csv")["kind"] == "regress"


def test_a_closed_object_needs_no_newline(tmp_path: Path) -> None:
    rows = even_and_odd(30, True)
    text = as_json(rows)
    file, kept = tmp_path / "a.jsonl", tmp_path / "s"
    for end, count in [(text.index('\n{"a": 20.0'), 20), (-2, 9), (-1, 1), (len(text), 0)]:
        file.write_text(text[:end])
        facts = learned(kept, "--target", "y", *SAME, file)
        assert (facts["learned"], facts["bad"]) == (count, 0)
    assert same(Classifier.load(kept), one_by_one(rows))


def test_a_last_line_is_learned_where_there_is_no_next_run(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(as_csv(even_and_odd(30, True))[:-1])
    found = call("--target", "y", "--json", *SAME, tmp_path / "a.csv")
    assert json.loads(found.stdout)["learned"] == 30
    text = (tmp_path / "a.csv").read_text()
    assert learned(tmp_path / "s", "--target", "y", *SAME, input=text)["learned"] == 30  # a pipe


def test_a_complete_file_needs_no_last_newline(tmp_path: Path) -> None:
    rows = even_and_odd(30, True)
    text = as_csv(rows)
    file, kept = tmp_path / "a.csv", tmp_path / "s"
    file.write_text(text[: text.index("\n20.0,")])
    assert learned(kept, "--target", "y", *SAME, file)["learned"] == 19
    assert learned(kept, "--complete", file)["learned"] == 1
    file.write_text(text)
    facts = learned(kept, file)
    assert (facts["learned"], facts["bad"]) == (10, 0)
    assert same(Classifier.load(kept), one_by_one(rows))
    file.write_text(text + "30.0,ev")  # it is not complete, and the user is wrong
    learned(kept, "--complete", file)
    file.write_text(text + "30.0,even\n31.0,odd\n")
    found = call("--state", kept, "--json", file)
    assert json.loads(found.stdout)["learned"] == json.loads(found.stdout)["bad"] == 1
    assert "line 32: the rest of a line that was read before" in found.stderr
    last = [({"a": 30.0}, "ev"), ({"a": 31.0}, "odd")]
    assert same(Classifier.load(kept), one_by_one([*rows, *last]))


def test_another_process_with_the_same_state_is_noticed(tmp_path: Path) -> None:
    kept = tmp_path / "s"
    (tmp_path / "a.csv").write_text(as_csv(records(60)))
    pipe = Pipe(Task([str(tmp_path / "a.csv")], "y", state=str(kept)))
    learned(kept, "--target", "y", *SAME, input=as_csv(records(20)))
    before = kept.read_bytes()
    with pytest.raises(ValueError, match="written or removed by another process"):
        pipe.run()
    assert kept.read_bytes() == before


def test_outputs_do_not_replace_other_files(tmp_path: Path) -> None:
    data = tmp_path / "a.csv"
    data.write_text(as_csv(records(40)))
    other = tmp_path / "other.csv"
    other.write_text("precious\n")
    for options, message in [
        (("--predict", other), "is there already"),
        (("--bad-file", other), "is there already"),
        (("--predict", data), "is both input 1 and the predictions"),
        (("--state", other), "is no saved learner"),
        (("--predict", tmp_path / "p", "--bad-file", tmp_path / "p"), "name different files"),
        (("--predict", tmp_path), "it is a folder"),
    ]:
        found = call("--target", "y", *SAME, *options, data)
        assert (found.exit_code, message in found.stderr) == (2, True), found.stderr
    assert other.read_text() == "precious\n"
    assert data.read_text() == as_csv(records(40))
    for _ in range(2):  # but those of an earlier run
        assert call("--target", "y", *SAME, "--predict", tmp_path / "p", data).exit_code == 0
    assert len((tmp_path / "p").read_text().splitlines()) == 41


# ---------------------------------------------------------------------------------- kills
def stream_with_bad_lines(path: Path, count: int) -> list[Record]:
    rows = records(count)
    lines = as_csv(rows).splitlines(True)
    bad = [lines[0]]
    starts = set(line_numbers("".join(lines)))
    for number, line in enumerate(lines[1:], 2):
        if number in starts and number % 10 == 0:
            bad.append(f"bad line {number}\n")
        bad.append(line)
    path.write_text("".join(bad))
    return rows


def task(folder: Path, data: Path, every: int) -> Task:
    folder.mkdir(exist_ok=True)
    return Task(
        [str(data)], "y", kind="classify", parameters={"network": NETWORK}, save_every=every,
        state=str(folder / "s"), predict=str(folder / "p.csv"), bad_file=str(folder / "bad.csv"),
    )  # fmt: skip


def outcome(folder: Path) -> Any:
    learner = Classifier.load(folder / "s")
    counts = learner.extra["pipe"]["counts"]
    return (
        state(learner),
        counts,
        (folder / "p.csv").read_bytes(),
        (folder / "bad.csv").read_bytes(),
    )


def _run_until(folder: Path, data: Path, every: int, number: int) -> None:
    crash.point = crash_at(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
    Pipe(task(folder, data, every)).run()


def killed_everywhere(tmp_path: Path, count: int, every: int, some: slice) -> None:
    """Kill a run at each crash point, then run the same again: nothing twice, nothing lost."""
    data = tmp_path / "data.csv"
    rows = stream_with_bad_lines(data, count)
    names: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crash, "point", names.append)
        Pipe(task(tmp_path / "whole", data, every)).run()
    expected = outcome(tmp_path / "whole")
    assert expected[0] == state(one_by_one(rows))
    assert {"learn", "output", "write"} == {name.split(":")[0] for name in names}
    for number in range(len(names))[some]:
        folder = tmp_path / str(number)
        process = PROCESSES.Process(target=_run_until, args=(folder, data, every, number))
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == -signal.SIGKILL, names[number]
        if (folder / "s").exists():
            Classifier.load(folder / "s")
        if (folder / "bad.csv").exists() and not (folder / "s").exists():
            (folder / "bad.csv").unlink()  # a new run does not replace it
        Pipe(task(folder, data, every)).run()
        assert outcome(folder) == expected, names[number]


@forking
def test_killed_around_a_save_nothing_is_learned_twice_or_lost(tmp_path: Path) -> None:
    killed_everywhere(tmp_path, 80, 30, slice(0, None, 2))


def _predict_until(folder: Path, data: Path, number: int) -> None:
    crash.point = crash_at(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
    Pipe(Task([str(data)], state=str(folder / "s"), predict=str(folder / "p.csv"))).run()


@forking
def test_predictions_that_begin_with_a_resumed_run_are_not_there_twice(tmp_path: Path) -> None:
    data = tmp_path / "a.csv"
    text = as_csv(records(80))
    half = sum(map(len, text.splitlines(True)[: line_numbers(text)[40] - 1]))
    for number in range(30):
        folder = tmp_path / str(number)
        folder.mkdir()
        data.write_text(text[:half])
        learned(folder / "s", "--target", "y", *SAME, data)
        data.write_text(text)
        process = PROCESSES.Process(target=_predict_until, args=(folder, data, number))
        process.start()
        process.join(PATIENCE)
        was_killed = process.exitcode == -signal.SIGKILL
        learned(folder / "s", data, "--predict", folder / "p.csv")
        lines = (folder / "p.csv").read_text().splitlines()
        numbers = [int(line.split(",")[0]) for line in lines[1:]]
        assert numbers == line_numbers(text)[40:]
        if not was_killed:
            break
    assert not was_killed
    assert number > 5


@forking
@pytest.mark.slow
def test_killed_anywhere_nothing_is_learned_twice_or_lost(tmp_path: Path) -> None:
    killed_everywhere(tmp_path, 200, 25, slice(None))


def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}


@posix
@pytest.mark.slow
def test_kill_9_at_any_time(tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    rows = stream_with_bad_lines(data, 4000)
    command = [sys.executable, "-m", "upgd.cli", "learn", str(data), "--target=y", *SAME]
    command += ["--state=s", "--predict=p.csv", "--bad-file=bad.csv", "--save-every=50"]
    rng = random.Random(3)
    done, kills = -1, 0
    kept = tmp_path / "s"
    while done != 0:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
        )
        wait_for_save(process, kept)
        try:
            process.wait(rng.uniform(0, 0.2 * kills))
        except subprocess.TimeoutExpired:
            process.kill()
            kills += 1
        told = process.communicate()[1]
        done = process.returncode
        assert done in (0, -signal.SIGKILL), told
    assert kills
    arrays, counts, predictions, _ = outcome(tmp_path)
    assert arrays == state(one_by_one(rows))
    assert counts["learned"] == len(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        call(data, "--target=y", *SAME, "--predict=whole.csv")
    assert predictions == (tmp_path / "whole.csv").read_bytes()


def wait_for_save(process: subprocess.Popen[str], path: Path) -> None:
    """Wait until a process has saved something, or has ended."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    wait_for(
        lambda: process.poll() is not None or (path.exists() and path.stat().st_mtime_ns != before)
    )


@pytest.mark.slow
@posix
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_slow_pipe_is_learned_as_lines_come_and_a_signal_saves(
    tmp_path: Path, number: int
) -> None:
    rows = records(30)
    header, *lines = as_csv(rows).replace("green, or\nnot", "green").splitlines(True)
    command = [sys.executable, "-m", "upgd.cli", "learn", "--target=y", "--classify", *SAME]
    process = subprocess.Popen(
        [*command, "--state=s", "--predict=-"],
        cwd=tmp_path, env=environment(), bufsize=0,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(header.encode())
    for t, line in enumerate(lines):
        process.stdin.write(line.encode())
        if t == 0:
            assert process.stdout.readline() == b"line,prediction,probability,truth\n"
        assert process.stdout.readline().startswith(f"{t + 2},".encode())
    process.send_signal(number)
    _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number, told
    assert f"ended by {signal.Signals(number).name}".encode() in told
    assert b"Traceback" not in told
    assert same(Classifier.load(tmp_path / "s"), one_by_one(rows))


@posix
@pytest.mark.slow
def test_a_reader_that_closes_early_ends_it_quietly(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(as_csv(records(3000)))
    command = [sys.executable, "-m", "upgd.cli", "learn", "--target=y", "--classify", *SAME]
    process = subprocess.Popen(
        [*command, "--state=s", "--predict=-", "a.csv"],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    told = process.stderr.read()
    process.stderr.close()
    assert (process.wait(PATIENCE), told) == (1, b"")
    Classifier.load(tmp_path / "s")


# ---------------------------------------------------------------------------- parameters
def test_parameters_have_the_types_of_their_defaults() -> None:
    settings = ["horizon=inf", "normalize=no", "replay=1e3", "drift=adwin", "on_drift=scaler"]
    found = parse_parameters([*settings, "optimizer=adam", "lr=1e-3", "beta1=0.5"])
    assert found == {
        "horizon": math.inf, "normalize": False, "replay": 1000, "drift": "adwin",
        "on_drift": ("scaler",), "optimizer": "adam",
        "hyper": {"lr": 1e-3, "betas": [0.5, 0.999]},
    }  # fmt: skip
    for wrong in ("replay=1.5", "normalize=perhaps", "horizon=long", "lr", "=3", "hyper=1"):
        with pytest.raises(ValueError, match=r"got|cannot"):
            parse_parameters([wrong])


def test_rows_are_not_learned_twice_after_the_reader_of_predictions_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = records(2500)
    file, saved = tmp_path / "rows.csv", tmp_path / "state.upgd"
    file.write_text(as_csv(rows))
    task = Task([str(file)], "y", "classify", state=str(saved), predict=str(tmp_path / "p.csv"))

    def gone(self: Output, content: bytes) -> None:
        if content.count(b"\n") > 1:  # more than the header
            raise BrokenPipeError

    with monkeypatch.context() as patch:
        patch.setattr(Output, "write", gone)
        with pytest.raises(BrokenPipeError):
            Pipe(task).run()
    Pipe(replace(task, predict=None)).run()
    assert Classifier.load(saved).n_samples_seen_ == len(rows)
