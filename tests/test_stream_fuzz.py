"""500 malformed samples between good ones: learned or refused, and the learner stays whole."""

from __future__ import annotations

import datetime
import math
import re
from collections import ChainMap, OrderedDict, defaultdict
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="needs the extra stream")

from tests.stream_learners import assert_same_state, state
from upgd.stream import Classifier, Regressor

GOOD = ("a", "b", "c")
COUNT = 500


class Hostile:
    """Every conversion raises something else."""

    def __float__(self) -> float:
        raise RuntimeError("no float")

    def __int__(self) -> int:
        raise KeyError("no integer")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise OSError("no array")

    def __repr__(self) -> str:
        return "<hostile>"


class Tricky(float):
    """A float whose own conversion lies."""

    def __float__(self) -> float:
        return math.inf


def objects(*rows: list[Any]) -> Any:
    found = np.empty((len(rows), len(rows[0])), object)
    for place, row in zip(found, rows, strict=True):
        for i, value in enumerate(row):
            place[i] = value
    return found


class Huge(dict):  # type: ignore[type-arg]
    """A dict's subclass."""


VALUES: list[Any] = [
    *(None, math.nan, math.inf, -math.inf, 1e308, -1e308, 1e101, 1e99, -1e99, 5e-324, -0.0),
    *(10**50, 10**400, -(10**400), 2**63, 2**64, -(2**63) - 1, True, False),
    *("", "text", "1", "nan", "inf", "1e400", "x" * 10_000, "\ud800", "a\0b", "é\n\t", "<other>"),
    *(b"1", b"", bytearray(b"12"), memoryview(b"12"), "1".encode("utf-16")),
    *([], [1], [1.0, 2.0], [[1], [2, 3]], [1, [2]], (), (1,), {1}, frozenset({1}), {"a": 1}, {}),
    *(1j, complex("nan"), np.complex64(1), np.complex128(math.inf)),
    *(datetime.datetime(2020, 1, 1), datetime.date(2020, 1, 1), datetime.timedelta(1)),
    *(datetime.time(1), np.datetime64("2020-01-01"), np.datetime64(1, "ns"), np.datetime64("NaT")),
    *(np.timedelta64(1, "ns"), np.timedelta64("NaT")),
    *(Decimal("1.5"), Decimal("NaN"), Decimal("sNaN"), Decimal("1e400"), Decimal("-Infinity")),
    *(Fraction(1, 3), Fraction(10**400, 3), Fraction(1, 10**400)),
    *(np.float32("inf"), np.float16(6e4), np.longdouble("1e4000"), np.int8(-128), np.uint64(2**63)),
    *(np.str_("s"), np.bytes_(b"s"), np.void(b"ab"), np.bool_(True), np.array(3), np.array("3")),
    *(np.array([1.0]), np.zeros(0), np.zeros((2, 2)), np.array([1, "a"], object), np.array(None)),
    *(np.array([(1, 2.0)], [("x", int), ("y", float)])[0], np.ma.masked, np.ma.array(1, mask=True)),
    *(torch.tensor(1.0), torch.tensor([1.0]), torch.tensor(1j), torch.tensor(math.nan)),
    *(torch.zeros(0), torch.tensor(1e300), torch.tensor(7, dtype=torch.bfloat16)),
    *(object(), Hostile(), Tricky(1.0), int, len, lambda: 1, NotImplemented, ..., range(3)),
    *(iter([1]), (i for i in [1]), Exception("x"), slice(1), type("T", (), {})()),
]
NAMES: list[Any] = [
    *("a", "b", "new", "", " ", "a=b", "<other>", "x" * 10_000, "\ud800", "a\0", "1", "é\n"),
    *(0, 1, True, False, -1, 10**50, 10**400, 1.0, 0.5, math.nan, math.inf, -0.0, np.int64(1)),
    *(
        None,
        (),
        (1, 2),
        ("a",),
        b"a",
        1j,
        frozenset({1}),
        Decimal(1),
        Fraction(1, 2),
        np.float32(2),
    ),
    *(np.str_("a"), np.datetime64("2020-01-01"), datetime.date(2020, 1, 1), object(), int),
    *(Hostile(), ..., np.timedelta64(1, "ns"), np.bool_(True)),
]
WEIGHTS: list[Any] = [
    *(0, 0.5, 1, 2, 10.0, 0.0, -0.0, np.float32(3), True, Fraction(1, 2), Decimal(2)),
    *(-1, -1e-300, math.nan, math.inf, -math.inf, 1e9, 1e308, 10**400, None, "1", b"1", [1.0], {}),
    *(1j, np.array([1.0]), np.array([1.0, 2.0]), torch.tensor(1.0), torch.tensor([1.0, 2.0])),
    *(
        object(),
        Hostile(),
        Tricky(1.0),
        datetime.timedelta(1),
        Decimal("sNaN"),
        np.datetime64(1, "s"),
    ),
]
ROWS: list[Any] = [  # where a dict is expected
    *(None, 5, "text", b"x", [], [1, 2], ("a", 1), {"a"}, np.zeros(3), torch.zeros(3), object()),
    *({}, Huge(a=1.0), OrderedDict(b=2.0), ChainMap({"a": 1.0}, {"b": "x"}), Hostile()),
    *(MappingProxyType({"c": 1.0}), defaultdict(float, a=1.0), iter([("a", 1)]), dict, ...),
]
TABLES: list[Any] = [  # where an array, a frame or dicts are expected, for two targets
    *(None, 5, "text", b"xx", [], [[]], [[], []], [1, 2], [[1, 2, 3]], [[1, 2, 3], [4, 5]]),
    *([[1, 2, 3], [4, 5, "x"]], [[1, 2, 3], [4, 5, None]], [[1, 2, 3], [4, 5, math.inf]]),
    *([[1, 2, 3], [4, 5, 10**400]], [[1, 2, 3], [4, 5, 1j]], [[1, 2, 3], [4, 5, {6}]]),
    *([{"a": 1.0}, {"b": object()}], [{"a": 1.0}, None], [{"a": 1.0}, [1, 2, 3]], [{}, {}], [{}]),
    *([{"fresh 1": 1.0}, {"fresh 2": math.inf}], [{"fresh 3": "x"}, {0.5: 1.0}]),
    *([{"a": 1.0}] * 3, {"a": [1.0, 2.0]}, {1, 2}, iter([{"a": 1.0}]), range(2), object()),
    *(np.zeros((2, 3), complex), np.zeros((2, 3), "M8[s]"), np.zeros((2, 3), "U3"), np.zeros(())),
    *(np.zeros((2, 4)), np.zeros((2, 0)), np.zeros((0, 3)), np.zeros((3, 3)), np.zeros((2, 3, 1))),
    *(np.full((2, 3), 1e200), np.full((2, 3), -math.inf), np.zeros((2, 3), "V4"), Hostile()),
    *(objects([1, 2, 3], [4, 5, Hostile()]), np.array([{"a": 1}, {"b": 2}], object)),
    *(torch.zeros(2, 5), torch.zeros(2, 3, dtype=torch.complex64), torch.zeros(2, 3).to_sparse()),
    *(torch.zeros(2, 3, dtype=torch.bfloat16), torch.full((2, 3), math.inf)),
]
TARGETS: list[Any] = [
    *(None, 5, "text", [], [1], [1, 2, 3], [[1, 2], [3, 4]], [1, None], [1, math.nan], [1, b"x"]),
    *([1, object()], [1, [2]], [1, {2}], np.zeros((2, 2)), np.zeros(3), np.zeros(0), np.zeros(())),
    *(np.array([1, math.inf]), np.array([1, 1e200]), np.zeros(2, "M8[s]"), np.zeros(2, complex)),
    *(np.array([1, None], object), {"a": 1}, {1, 2}, iter([1, 2]), range(3), Hostile()),
    *(torch.zeros(3), torch.zeros(2, 2), torch.tensor([1j, 2j]), [Hostile(), 1], [1e200, 1]),
]
LABELS: list[Any] = [  # not learned: a class more for each would make the test slow
    *(None, math.nan, math.inf, 0.5, 10**400, b"a", [], [1], {}, {1}, 1j, object(), Hostile()),
    *(datetime.date(2020, 1, 1), np.datetime64(1, "ns"), np.timedelta64(1, "s"), Decimal(1)),
    *(Fraction(1, 2), np.array([1, 2]), torch.zeros(2), torch.tensor(0.5), np.void(b"a"), int, ...),
    *("yes", np.str_("yes"), True, np.bool_(False), torch.tensor(1), np.array("no"), 1.0, "\ud800"),
]


def good(random: np.random.Generator) -> tuple[dict[str, Any], bool, float]:
    """A sample, its class and its number."""
    x = {name: float(random.normal()) for name in GOOD}
    value = x["a"] - x["b"]
    return x, value > 0, 10 + 5 * value


def malformed(learner: Any, random: np.random.Generator, number: int) -> Callable[[], Any]:
    """A call with something wrong in it; names of features that may be learned are few."""
    pick = lambda values: values[random.integers(len(values))]  # noqa: E731
    x, label, value = good(random)
    target = label if isinstance(learner, Classifier) else value
    kind = number % 7
    if kind == 0:
        x[pick(GOOD)] = pick(VALUES)
    elif kind == 1:
        x = {**x, pick(NAMES): pick(VALUES)}
    elif kind == 2:
        x = {pick(NAMES): pick(VALUES) for _ in range(3)}
    elif kind == 3:
        target = pick(LABELS if isinstance(learner, Classifier) else VALUES)
    elif kind == 4:
        weight = pick(WEIGHTS)
        return lambda: learner.learn_one(x, target, weight)
    elif kind == 5:
        rows = pick(ROWS)
        return lambda: learner.learn_one(rows, target)
    else:
        X, y, weights = [x, dict(x)], [target, target], None
        which = random.integers(3)
        if which == 0:
            X = pick(TABLES)
        elif which == 1:
            y = pick(TARGETS)
        else:
            weights = pick([[1.0, pick(WEIGHTS)], pick(WEIGHTS), np.zeros((2, 2)), [1.0]])
        method = pick(("partial_fit", "fit", "predict_then_learn"))
        return lambda: getattr(learner, method)(X, y, sample_weight=weights)
    return lambda: learner.learn_one(x, target)


def is_clear(message: str) -> bool:
    """Whether a message names what is wrong, in a few lines."""
    named = r"feature|class|label|target|weight|\bX\b|\by\b|dict|array|rows|table"
    return len(message) < 1000 and re.search(named, message) is not None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"network": (8,), "normalize": False}])
@pytest.mark.parametrize("kind", [Classifier, Regressor])
def test_malformed_samples_between_good_ones(kind: Any, options: dict[str, Any]) -> None:
    random = np.random.default_rng(0)
    learner = kind(warm_start=True, epochs=1, **{"network": "small", **options})
    learned = refused = 0

    def learn(count: int) -> None:
        for _ in range(count):
            x, label, value = good(random)
            learner.learn_one(x, label if kind is Classifier else value)

    learn(10)
    for number in range(COUNT):
        learn(2)
        before, call = state(learner), malformed(learner, random, number)
        try:
            call()
        except (TypeError, ValueError) as error:
            message = str(error)
        else:
            message = None
        if message is None:
            learned += 1
        else:
            refused += 1
            assert is_clear(message), message
            assert_same_state(state(learner), before)
        arrays, _ = learner._state()
        for name, array in arrays.items():
            assert np.isfinite(array).all(), name
    assert learned > 50
    assert refused > 250

    learn(1500)
    tests = [good(random) for _ in range(200)]
    X, labels, values = ([each[i] for each in tests] for i in range(3))
    if kind is Classifier:
        assert np.isfinite(learner.predict_log_proba(X)).all()
        right = np.mean(
            [learner.predict_one(x) == label for x, label in zip(X, labels, strict=True)]
        )
        assert right > 0.9
    elif options:  # without scaling of inputs, an outlier is learned as it is
        assert np.isfinite(learner.predict(X)).all()
    else:
        assert learner.score(X, values) > 0.9
