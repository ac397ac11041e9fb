"""The example of a queue: nothing is learned twice or lost, wherever the learner is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE

EXAMPLE = Path(__file__).parents[1] / "examples" / "redis_stream.py"
redis = pytest.importorskip("redis")
pytest.importorskip("numba")
if shutil.which("redis-server") is None:
    pytest.skip("redis-server is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("redis_stream", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def url(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server, found = example.start_server(tmp_path_factory.mktemp("redis"))
    yield found
    server.kill()
    server.wait()


@pytest.fixture
def client(example: Any, url: str) -> Any:
    found = example.connect(url)
    found.flushall()
    return found


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


class Mortal:
    """A client under which the process dies at the n-th prediction, before or after it is sent."""

    def __init__(self, client: Any, number: int, sent: bool) -> None:
        self._client, self._left, self._sent = client, number, sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def xadd(self, *args: Any, **kwargs: Any) -> Any:
        self._left -= 1
        if self._left == 0 and not self._sent:
            raise Killed
        try:
            return self._client.xadd(*args, **kwargs)
        finally:
            if self._left == 0:
                raise Killed


@pytest.mark.parametrize("sent", [False, True])
def test_a_learner_that_dies_again_and_again_learns_all_once(
    example: Any, client: Any, tmp_path: Path, sent: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    state, out = tmp_path / "learner.npz", tmp_path / "consumed.jsonl"
    example.produce(client, 120)
    for number in (1, 25, 7, 31, 30):  # 15 messages are learned between two times of saving
        with pytest.raises(Killed):
            example.learn(Mortal(client, number, sent), state, 120, 15)
    example.learn(client, state, 120, 15)
    example.consume(client, out, 120)
    rows = example.consumed(out)
    assert example.verify(client.xrange(example.SAMPLES), state, rows)
    printed = capsys.readouterr().out
    assert printed.count("yes") == 4
    assert "120 messages" in printed


def test_a_learner_that_dies_while_it_saves(
    example: Any, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from upgd.ledger import crash_points

    state, out = tmp_path / "learner.npz", tmp_path / "consumed.jsonl"
    example.produce(client, 60)
    seen: list[str] = []
    monkeypatch.setattr(crash_points, "point", seen.append)
    example.learn(client, tmp_path / "probe.npz", 10, 10)
    client.delete(example.PREDICTIONS)
    points = [name for name in dict.fromkeys(seen) if name.startswith("write")]
    assert len(points) >= 3
    for place in points:

        def die(name: str, place: str = place) -> None:
            if name == place:
                raise Killed

        monkeypatch.setattr(crash_points, "point", die)
        with pytest.raises(Killed):
            example.learn(client, state, 60, 10)
    monkeypatch.undo()
    example.learn(client, state, 60, 10)
    example.consume(client, out, 60)
    assert example.verify(client.xrange(example.SAMPLES), state, example.consumed(out))


def test_the_checks_find_what_is_wrong(example: Any, client: Any, tmp_path: Path) -> None:
    state, out = tmp_path / "learner.npz", tmp_path / "consumed.jsonl"
    example.produce(client, 40)
    example.learn(client, state, 40, 10)
    example.consume(client, out, 40)
    messages, rows = client.xrange(example.SAMPLES), example.consumed(out)
    assert example.verify(messages, state, rows)
    assert not example.verify(messages, state, [*rows, rows[-1]])  # one came twice
    assert not example.verify(messages, state, rows[:-1])  # one was lost
    learner, extra = example.load(state)
    _, twice = example.learn_message(learner, extra, messages[-1])
    learner.save(state, twice)
    assert not example.verify(messages, state, rows)


def test_a_consumer_reads_on_after_a_line_that_was_cut_off(
    example: Any, client: Any, tmp_path: Path
) -> None:
    out = tmp_path / "consumed.jsonl"
    for number in range(1, 31):
        client.xadd(example.PREDICTIONS, {"guess": json.dumps(number), "y": "1"}, id=f"{number}-0")
    example.consume(client, out, 10)  # reads up to 100 at a time
    with out.open("r+b") as file:
        file.truncate(out.stat().st_size - 5)
    assert len(example.consumed(out)) == 29
    example.consume(client, out, 30)
    guesses = [json.loads(answer["guess"]) for _, answer in example.consumed(out)]
    assert guesses == list(range(1, 31))


REFUSED = [
    {"x": "no JSON", "y": "buys"},
    {"x": '{"age": [1]}', "y": "buys"},
    {"x": '{"age": Infinity}', "y": "buys"},
    {"x": "[1, 2]", "y": "buys"},
    {"x": "[" * 100_000, "y": "buys"},
    {"x": '{"age": 1}'},
    {"y": "buys"},
]


def test_a_message_that_is_refused_is_published_as_an_error_and_passed(
    example: Any, client: Any, tmp_path: Path
) -> None:
    state, out = tmp_path / "learner.npz", tmp_path / "consumed.jsonl"
    bad = [client.xadd(example.SAMPLES, fields) for fields in REFUSED]  # before anything is learned
    example.produce(client, 20)
    bad += [client.xadd(example.SAMPLES, fields) for fields in REFUSED]
    example.produce(client, 20)
    messages = client.xrange(example.SAMPLES)
    for until in range(3, len(messages) + 1, 3):  # it is started again and again
        example.learn(client, state, until, 3)
    example.learn(client, state, len(messages), 3)
    extra = example.load(state)[1]
    assert (extra["learned"], extra["refused"]) == (40, len(bad))
    assert extra["last_id"] == messages[-1][0]
    example.consume(client, out, len(messages))
    rows = example.consumed(out)
    assert [message_id for message_id, answer in rows if "error" in answer] == bad
    assert all(answer["error"] for message_id, answer in rows if message_id in bad)
    assert example.verify(messages, state, rows)

    plain, none = example.load(tmp_path / "none.npz")  # never saw a refused message
    for message in messages:
        if message[0] not in bad:
            _, none = example.learn_message(plain, none, message)
    plain.save(tmp_path / "plain.npz", extra)
    assert (tmp_path / "plain.npz").read_bytes() == state.read_bytes()


def test_a_trimmed_stream_of_predictions_gets_none_twice(
    example: Any, client: Any, tmp_path: Path
) -> None:
    state = tmp_path / "learner.npz"
    example.produce(client, 30)
    with pytest.raises(Killed):
        example.learn(Mortal(client, 25, True), state, 30, 10)  # 20 are saved
    client.xtrim(example.PREDICTIONS, maxlen=0)
    example.learn(client, state, 30, 10)
    ids = [message_id for message_id, _ in client.xrange(example.SAMPLES)]
    assert [message_id for message_id, _ in client.xrange(example.PREDICTIONS)] == ids[25:]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [str(EXAMPLE.parents[1]), os.environ.get("PYTHONPATH", "")]
    search = os.pathsep.join(filter(None, paths))
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        env={**os.environ, "PYTHONPATH": search, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.slow
def test_the_demo_kills_real_processes() -> None:
    done = run("demo", "--count", "900", "--kills", "2", "--every", "50")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["killed"] * 2 + ["yes"] * 4 + ["900"]


def test_the_demo_touches_no_streams_of_others(example: Any, client: Any, url: str) -> None:
    client.xadd(example.SAMPLES, {"x": "{}", "y": "mine"})
    done = run("demo", "--url", url)
    assert done.returncode == 1
    assert "the demo would remove them" in done.stderr
    assert client.xlen(example.SAMPLES) == 1


def test_a_missing_server_is_told() -> None:
    done = run("demo", PATH="")
    assert done.returncode == 1
    assert "redis-server is not installed: apt install redis-server" in done.stderr
