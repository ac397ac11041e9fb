"""Learn from a Redis stream; nothing is learned twice or lost, even if the learner is killed.

    pip install ".[stream]" redis
    python examples/redis_stream.py demo

The demo starts a Redis server of its own (``redis-server``, Debian's package of that name; or
``--url`` for one that is running) and three processes:

    producer ──samples──▶ learner ──predictions──▶ consumer

It kills the learner with SIGKILL several times, whatever it is doing, starts it again, and checks
at the end that it is bit for bit the learner that was never interrupted. ``producer``, ``learner``
and ``consumer`` are commands as well, each with ``--url``. Why nothing is learned twice or lost:

- The position in the stream is saved *in the same file* as the weights, which is replaced in one
  step. So a learner that is started again reads on after the last message that its weights know;
  what it had learned since is learned again, from weights that do not know it. A consumer group's
  acknowledgements would be a second truth that a crash can separate from the first.
- Learning is deterministic, so a message that is learned again gets the same prediction. It is
  published under the message's own id, and Redis refuses an id that is not larger than the last:
  what was published before the crash is not published again.
- Predictions are published before the position is saved: else a crash in between would lose them.
- A message that cannot be learned (no JSON, a feature that is a list, no class) changes nothing in
  the learner. An error is published under its id, and learning goes on after it: else the learner
  would stop at the same message at every start.

Redis keeps both streams in memory until they are trimmed, which this example leaves to you, as only
you know who has read them: ``XTRIM upgd:samples MINID <last_id of the saved file>`` and ``XTRIM
upgd:predictions MINID <id in the last line of the slowest consumer>``. Do not delete the stream of
predictions instead: Redis would forget its last id, and accept predictions a second time.
"""

import argparse
import hashlib
import json
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

try:
    import redis
except ImportError:
    sys.exit("this example needs redis-py: pip install redis")

SAMPLES, PREDICTIONS, FIRST = "upgd:samples", "upgd:predictions", "0-0"  # streams, lowest id
Message = tuple[str, dict[str, str]]


def connect(url: str) -> Any:
    """A client whose answers are strings."""
    return redis.Redis.from_url(url, decode_responses=True, protocol=2)


def read_after(client: Any, stream: str, last_id: str, most: int) -> list[Message]:
    """The messages after an id, at most so many; waits up to a second for the first."""
    found = client.xread({stream: last_id}, count=most, block=1000)
    return found[0][1] if found else []  # there is one stream


# ------------------------------------------------------------------------------- producer
def produce(client: Any, count: int) -> None:
    """Add visitors of a shop to the stream; half way, what makes them buy turns around."""
    draw = random.Random(0)
    for number in range(count):
        x: dict[str, Any] = {name: draw.gauss(0, 1) for name in ("age", "price", "visits")}
        x["from"] = draw.choice(["search", "advert"])
        wants = x["age"] + (x["visits"] if x["from"] == "search" else -x["price"])
        y = "buys" if (wants > 0) == (number < count // 2) else "leaves"
        client.xadd(SAMPLES, {"x": json.dumps(x), "y": y})  # Redis gives it an id
        time.sleep(0.001)


# -------------------------------------------------------------------------------- learner
def load(state: Path) -> tuple[Any, dict[str, Any]]:
    """The learner of a file with what was saved beside it; a new one if there is no file."""
    from upgd.stream import Classifier

    if not state.exists():
        return Classifier("small"), {"last_id": FIRST, "learned": 0, "refused": 0, "digest": ""}
    learner = Classifier.load(state)
    return learner, learner.extra


def learn_message(
    learner: Any, before: dict[str, Any], message: Message
) -> tuple[dict[str, str], dict[str, Any]]:
    """Predict, then learn. Returns what to publish, and what to save beside the weights.

    The digest is of all ids in the order in which they came: proof for the demo.
    """
    last_id, fields = message
    digest = hashlib.sha256((before["digest"] + last_id).encode()).hexdigest()
    after = {**before, "last_id": last_id, "digest": digest}
    try:
        x, y = json.loads(fields["x"]), fields["y"]
        guess = learner.predict_one(x)
        learner.learn_one(x, y)
    except KeyError as error:
        answer = {"error": f"the message has no field {error}"}
    except (TypeError, ValueError, RecursionError) as error:  # the learner is as it was before
        answer = {"error": str(error)}
    else:
        return {"guess": json.dumps(guess), "y": y}, {**after, "learned": before["learned"] + 1}
    return answer, {**after, "refused": before["refused"] + 1}


def learn(client: Any, state: Path, until: int, every: int) -> None:
    """Learn all messages, from where the saved file stands; save after every `every` of them."""
    learner, extra = load(state)
    while extra["learned"] + extra["refused"] < until:
        messages = read_after(client, SAMPLES, extra["last_id"], every)
        for message in messages:
            answer, extra = learn_message(learner, extra, message)
            publish(client, message[0], answer)
        if messages and extra["learned"]:  # a learner that has seen nothing cannot be saved
            learner.save(state, extra)  # weights and position, in one step


def publish(client: Any, message_id: str, answer: dict[str, str]) -> None:
    """Publish a prediction or an error under the message's id, unless that was done before."""
    try:
        client.xadd(PREDICTIONS, answer, id=message_id)
    except redis.ResponseError as error:
        if "equal or smaller" not in str(error):
            raise


# ------------------------------------------------------------------------------- consumer
def consume(client: Any, out: Path, until: int) -> None:
    """Append predictions to a file; its last line says where to read on, so none comes twice."""
    rows = consumed(out)
    with out.open("a", encoding="utf-8") as file:
        while len(rows) < until:
            last_id = rows[-1][0] if rows else FIRST
            for message_id, answer in read_after(client, PREDICTIONS, last_id, 100):
                rows.append([message_id, answer])
                file.write(f"{json.dumps(rows[-1])}\n")
            file.flush()


def consumed(out: Path) -> list[list[Any]]:
    """What is in a consumer's file: ids and answers. Removes a line that was cut off."""
    text = out.read_bytes() if out.exists() else b""
    whole = text[: text.rfind(b"\n") + 1]
    with out.open("ab") as file:
        file.truncate(len(whole))
    return [json.loads(line) for line in whole.splitlines()]


# ----------------------------------------------------------------------------------- demo
def start_server(folder: Path) -> tuple[Any, str]:
    """A Redis server on a free port of this machine, which keeps nothing on disk."""
    if shutil.which("redis-server") is None:
        sys.exit("redis-server is not installed: apt install redis-server, or give --url")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f"redis-server --port {port} --bind 127.0.0.1 --appendonly no --save".split()
    server = subprocess.Popen([*command, "", "--dir", str(folder)], stdout=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}"
    while server.poll() is None:
        try:
            connect(url).ping()
            return server, url
        except redis.ConnectionError:
            time.sleep(0.05)
    sys.exit(f"redis-server ended with {server.returncode}; start one by hand and give --url")


def demo(url: str | None, count: int, kills: int, every: int) -> bool:
    """Run the three roles, kill the learner again and again, check what came of it."""
    with tempfile.TemporaryDirectory() as name:
        folder, running = Path(name), {}
        state, out = folder / "learner.npz", folder / "consumed.jsonl"

        def start(role: str, *options: Any) -> None:
            command = [sys.executable, __file__, role, "--url", url, *map(str, options)]
            running[role] = subprocess.Popen(command)

        learner = ("learner", "--state", state, "--until", count, "--every", every)
        if url is None:
            running["server"], url = start_server(folder)
        client = connect(url)
        if client.exists(SAMPLES, PREDICTIONS):
            sys.exit(f"{url} has streams {SAMPLES} or {PREDICTIONS}; the demo would remove them")
        try:
            start("producer", "--count", count)
            start("consumer", "--out", out, "--until", count)
            start(*learner)
            for kill in range(1, kills + 1):
                moment = kill * count // (kills + 1) + random.randrange(every)
                while client.xlen(PREDICTIONS) < moment and running["learner"].poll() is None:
                    time.sleep(0.001)
                running["learner"].kill()  # SIGKILL: it has no time to save anything
                running["learner"].wait()
                saved, told = load(state)[1]["learned"], client.xlen(PREDICTIONS)
                print(f"killed after message {told}: {told - saved} are learned again", flush=True)
                start(*learner)
            if any(running[role].wait() for role in ("producer", "learner", "consumer")):
                sys.exit("a process failed; its message is above")
            return verify(client.xrange(SAMPLES), state, consumed(out))
        finally:
            if "server" not in running:
                client.delete(SAMPLES, PREDICTIONS)
            for process in running.values():
                process.kill()
                process.wait()


def verify(messages: list[Message], state: Path, rows: list[list[Any]]) -> bool:
    """Learn the same messages without interruption, compare, and print what was found."""
    other = state.with_name("uninterrupted.npz")
    (learner, extra), answers = load(other), []
    for message in messages:
        answer, extra = learn_message(learner, extra, message)
        answers.append(answer)
    learner.save(other, extra)
    same, ids = state.read_bytes() == other.read_bytes(), [message[0] for message in messages]
    checks = {
        "every message was learned exactly once, in order": load(state)[1] == extra,
        "weights, traces and counts are bit for bit those of an uninterrupted run": same,
        "every prediction was consumed exactly once, in order": [row[0] for row in rows] == ids,
        "predictions are those of an uninterrupted run": [row[1] for row in rows] == answers,
    }
    for what, holds in checks.items():
        print(f"{'yes' if holds else 'NO '}  {what}")
    guesses = [answer for _, answer in rows if "guess" in answer]
    share = sum(json.loads(answer["guess"]) == answer["y"] for answer in guesses) / len(guesses)
    print(f"{len(guesses)} messages, {share:.1%} predicted correctly before they were learned")
    return all(checks.values())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("role", choices=["demo", "producer", "learner", "consumer"])
    add("--url", help="of a Redis server; the demo starts one by default")
    add("--count", type=int, default=5000, help="messages of the producer")
    add("--kills", type=int, default=3, help="times that the demo kills the learner")
    add("--every", type=int, default=200, help="messages after which the learner saves")
    add("--until", type=int, default=sys.maxsize, help="messages after which a role ends")
    add("--state", type=Path, default=Path("learner.npz"), help="the learner's file")
    add("--out", type=Path, default=Path("consumed.jsonl"), help="the consumer's file")
    given = parser.parse_args()
    if given.role == "demo":
        sys.exit(not demo(given.url, given.count, given.kills, given.every))
    client = connect(given.url or "redis://127.0.0.1:6379")
    if given.role == "producer":
        produce(client, given.count)
    elif given.role == "learner":
        learn(client, given.state, given.until, given.every)
    else:
        consume(client, given.out, given.until)


if __name__ == "__main__":
    main()
