"""What learners of streams are given: features that come and go, frames, weights, pieces."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("sklearn", reason="needs the extra stream")

from tests.stream_learners import assert_same, assert_same_state, state
from upgd.stream import Classifier, Regressor, StreamWarning
from upgd.stream.columns import Columns

pytestmark = pytest.mark.filterwarnings("error::upgd.stream.StreamWarning")
NAN = math.nan
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # it takes minutes


def small(kind: Any = Classifier, **options: Any) -> Any:
    return kind(**{"network": (6,), **options})


def learned(samples: Any, kind: Any = Classifier, **options: Any) -> Any:
    learner = small(kind, **options)
    for x, y in samples:
        learner.learn_one(x, y)
    return learner


# ------------------------------------------------------------------- columns: the mapping
def test_numbers_have_a_column_and_strings_one_for_each() -> None:
    columns = Columns()
    assert columns.row({"b": 2, "a": True, "colour": "red"}, True).tolist() == [1, 2, 1]
    assert columns.names == ["a", "b", "colour=red"]  # in the order of names
    assert columns.row({"colour": "blue", "a": 3.5}, True)[[0, 2, 3]].tolist() == [3.5, 0, 1]
    # Unknown: without a column it is left out; a feature that is absent is missing.
    row = columns.row({"new": 1.0, "colour": "green"}, False)
    np.testing.assert_array_equal(row, [NAN, NAN, 0, 0])
    assert len(columns) == 4


def test_a_feature_may_be_a_number_and_a_string() -> None:
    columns = Columns()
    columns.row({"a": 1.0}, True)
    np.testing.assert_array_equal(columns.row({"a": "high"}, True), [NAN, 1])
    np.testing.assert_array_equal(columns.row({"a": 2.0}, True), [2, NAN])


@pytest.mark.parametrize("absent", [NAN, 0.0])
def test_missing(absent: float) -> None:
    """Absent is NaN, or zero for sparse dicts; None and the like are missing in both."""
    pandas_na: list[Any] = []
    try:
        import pandas

        pandas_na = [pandas.NA, pandas.NaT]
    except ImportError:
        pass
    columns = Columns(absent=absent)
    columns.row({"a": 1.0, "b": 2.0, "c": "x"}, True)
    np.testing.assert_array_equal(columns.row({"a": 1.0}, True), [1, absent, absent])
    for missing in [
        None,
        NAN,
        np.nan,
        np.float32("nan"),
        Decimal("NaN"),
        torch.tensor(NAN),
        *pandas_na,
    ]:
        np.testing.assert_array_equal(columns.row({"a": 3, "b": missing}, True)[:2], [3, NAN])


def test_what_is_missing_from_the_beginning_has_no_column() -> None:
    columns = Columns()
    columns.row({"a": None, "b": 1.0}, True)
    assert columns.names == ["b"]
    columns.row({"a": 1.0}, True)
    assert columns.names == ["b", "a"]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1.0),
        (np.bool_(True), 1.0),
        (np.uint8(200), 200.0),
        (np.float16(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        (Decimal("0.25"), 0.25),
        (Fraction(1, 8), 0.125),
        (2**70, 2.0**70),
        (np.array(4), 4.0),
        (torch.tensor(5), 5.0),
        (torch.tensor(5.0, requires_grad=True), 5.0),
        (-1e100, -1e100),
        (5e-324, 5e-324),
    ],
)
def test_what_counts_as_a_number(value: Any, number: float) -> None:
    columns = Columns()
    for _ in range(3):  # the first, the usual way, and the usual way once more
        assert columns.row({"a": value}, True).tolist() == [number]


class Colour(str, Enum):
    RED = "red"


def test_what_counts_as_a_string() -> None:
    columns = Columns()
    for value in ("red", np.str_("red"), Colour.RED, np.array("red")):
        columns.row({"colour": value, np.str_("s"): 1, Colour.RED: 2}, True)
    assert columns.names == ["colour=red", "red", "s"]
    assert all(type(name) is str for name in columns.names)


def test_names_that_are_equal_are_one_feature() -> None:
    """1, True and 1.0 are the same key of a dict; "1" is another."""
    columns = Columns()
    columns.row({1: 5.0, "1": 6.0}, True)
    for x in ({True: 5.0, "1": 6.0}, {1.0: 5.0, "1": 6.0}, {np.int64(1): 5.0, np.str_("1"): 6.0}):
        assert columns.row(x, True).tolist() == [5, 6]
    assert columns.names == [1, "1"]


def test_names_of_categories_and_numbers_do_not_collide() -> None:
    columns = Columns(most_categories=2)
    columns.row({"a=b": 7.0}, True)
    columns.row({"a": "b"}, True)
    columns.row({1: "x", "1": "x"}, True)
    x = {"a=b": 7.0, "a": "b", 1: "x", "1": "x"}
    assert columns.row(x, True).tolist() == [7, 1, 1, 1]
    again = Columns(most_categories=2)
    again.restore(columns.state())
    assert again.row(x, True).tolist() == [7, 1, 1, 1]
    # A string like our own name for the rest is a string like any other.
    columns = Columns(most_categories=2)
    for value in ("<other>", "b"):
        columns.row({"a": value}, True)
    with pytest.warns(StreamWarning, match="more than 2"):
        columns.row({"a": "c"}, True)
    assert columns.row({"a": "<other>"}, True).tolist() == [1, 0, 0]
    assert columns.row({"a": "d"}, True).tolist() == [0, 0, 1]


def test_strings_beyond_the_limit_share_a_column() -> None:
    learner = small()
    for i in range(100):
        learner.learn_one({"id": f"user {i}"}, i % 2)
    with pytest.warns(StreamWarning, match="'id' has more than 100"):
        learner.learn_one({"id": "user 100"}, 0)
    learner.learn_one({"id": "user 101"}, 0)  # warnings are errors here
    assert learner.n_features_in_ == 101
    row = learner._columns.row({"id": "never seen"}, False)
    assert row[-1] == 1
    assert row.sum() == 1


def test_features_beyond_the_limit_are_left_out() -> None:
    learner = small(max_features=3)
    learner.learn_one({"a": 1.0, "b": 2.0}, 0)
    with pytest.warns(StreamWarning, match="there are 3 columns"):
        learner.learn_one({"a": 1.0, "new": 1.0, "word": "x"}, 1)
    for i in range(50):
        learner.learn_one({"a": 1.0, f"new {i}": 1.0, f"word {i}": "x"}, 1)
    assert learner.n_features_in_ == 3
    assert len(learner._columns._categories) <= 1  # nothing is kept of those left out
    with pytest.raises(ValueError, match="max_features, which is 3"):
        small(max_features=3).partial_fit(np.zeros((2, 4)), [0, 1])


# --------------------------------------------------------- features that come and vanish
def test_features_appear_and_vanish() -> None:
    """A new feature changes no answer; what is learned of it then helps."""
    random = np.random.default_rng(0)
    learner = small(network=(16,))
    for _ in range(300):
        learner.learn_one({"noise": random.normal()}, int(random.integers(2)))
    before = learner.predict_proba_one({"noise": 0.5})
    assert learner.predict_proba_one({"noise": 0.5, "signal": 1.0}) == before
    for _ in range(1500):
        y = int(random.integers(2))
        learner.learn_one({"noise": random.normal(), "signal": 2.0 * y - 1}, y)
    for noise in random.normal(size=50).tolist():
        assert learner.predict_one({"noise": noise, "signal": -1.0}) == 0
        assert learner.predict_one({"noise": noise, "signal": 1.0}) == 1
    assert learner.predict_one({"signal": 1.0}) == 1
    assert learner.predict_one({}) in (0, 1)


@pytest.mark.parametrize("kind", [Classifier, Regressor])
def test_a_stream_may_begin_without_features(kind: Any) -> None:
    learner = small(kind, network=(16,))
    for y in (0, 1, 0):
        learner.learn_one({}, y)
    assert learner.n_features_in_ == 0
    for i in range(1000):
        learner.learn_one({"a": float(i % 2), "b": None}, i % 2)
    assert learner.n_features_in_ == 1
    assert learner.predict_one({"a": 1.0}) > 0.8
    assert learner.predict_one({"a": 0.0}) < 0.2


def test_the_order_of_a_dict_does_not_matter() -> None:
    random = np.random.default_rng(0)
    one, other = small(), small()
    for _ in range(40):
        x = {name: random.normal() for name in "dacb" if random.random() < 0.7}
        y = int(random.integers(3))
        names = list(x)
        random.shuffle(names)
        one.learn_one(x, y)
        other.learn_one({name: x[name] for name in names}, y)
    assert_same(one, other)


def test_missing_values_are_the_mean() -> None:
    """A missing number is answered like one that equals the mean of the known ones."""
    X = np.random.default_rng(0).normal(3, 2, size=(200, 2))
    learner = small().partial_fit(X, X[:, 0] > 3)
    other = small().partial_fit(X, X[:, 0] > 3)
    mean = other._scaler.mean[1]
    a = learner.predict_proba_one({0: 1.0})
    assert a == learner.predict_proba_one({0: 1.0, 1: None})
    both = dict(zip(learner.classes_, learner.predict_proba([[1.0, NAN]])[0], strict=True))
    assert a == both
    assert a == pytest.approx(other.predict_proba_one({0: 1.0, 1: mean}), rel=1e-6)


def test_sparse_dicts_leave_out_zeros() -> None:
    """With missing="zero", a dict without zeros is the dict with them."""
    random = np.random.default_rng(0)
    X = random.integers(0, 3, size=(80, 4)).astype(float)
    X[0] = 1  # all features are there from the beginning
    y = (X[:, 0] > 0).astype(int)
    samples = list(zip(X, y.tolist(), strict=True))
    full = learned([(dict(enumerate(row)), t) for row, t in samples], missing="zero")
    sparse = learned(
        [({j: v for j, v in enumerate(row) if v}, t) for row, t in samples], missing="zero"
    )
    assert_same(full, sparse)


# ------------------------------------------------------------------------------- classes
@pytest.mark.parametrize(
    ("given", "classes"),
    [
        (["b", "a", "b"], ["b", "a"]),
        (np.array(["b", "a", "b"]), ["b", "a"]),
        (np.array(["b", "a", "b"], object), ["b", "a"]),
        ([True, False, True], [True, False]),
        (np.array([True, False, True]), [True, False]),
        ([3, -1, 3], [3, -1]),
        (np.array([3, 1, 3], np.uint8), [3, 1]),
        ([2.0, 1.0, 2.0], [2.0, 1.0]),
        (torch.tensor([3, 1, 3]), [3, 1]),
        ([2**80, 1, 2**80], [2**80, 1]),
        ([2**63, -1, 2**63], [2**63, -1]),  # NumPy would make floats of these
        ([1, "1", True], [1, "1"]),  # True is 1
        (["a", 2, None, "a"][:2], ["a", 2]),
        (["a\0", "a", "a\0"], ["a\0", "a"]),  # NumPy would drop the zero
        (["\ud800", "é", "\ud800"], ["\ud800", "é"]),
        ([Colour.RED, "red", "blue"], ["red", "blue"]),
    ],
)
def test_classes_of_any_type(given: Any, classes: list[Any]) -> None:
    """They come back as they were given, together as one by one."""
    rows = [{"a": float(i)} for i in range(len(given))]
    learner = small().partial_fit(rows, given)
    assert learner.output_classes_.tolist() == classes
    assert [type(c) for c in learner.output_classes_.tolist()] == [type(c) for c in classes]
    assert set(learner.classes_.tolist()) == set(classes)
    one = learned(zip(rows, given.tolist() if hasattr(given, "tolist") else given, strict=True))
    assert_same(one, learner)
    assert type(one.predict_one({"a": 0.0})) in {type(c) for c in classes}
    assert one.predict_one({"a": 0.0}) in classes
    assert learner.predict(rows).tolist()[0] in classes
    assert list(one.predict_proba_one({"a": 0.0})) == classes


def test_frames_of_classes() -> None:
    X = [{"a": float(i)} for i in range(4)]
    expected = small().partial_fit(X, ["u", "v", "u", "w"])
    polars = pytest.importorskip("polars")
    assert_same(small().partial_fit(X, polars.Series(["u", "v", "u", "w"])), expected)
    pandas = pytest.importorskip("pandas")
    for dtype in (None, "category", "string"):
        y = pandas.Series(["u", "v", "u", "w"], index=[5, 6, 7, 8], dtype=dtype)
        assert_same(small().partial_fit(X, y), expected)


@pytest.mark.parametrize(
    ("y", "error", "message"),
    [
        ([0, None], ValueError, "missing"),
        ([0, NAN], ValueError, "missing"),
        (np.array([0, NAN]), ValueError, "missing"),
        ([0, 0.5], ValueError, "Unknown label type"),
        (np.array([0, 0.5]), ValueError, "Unknown label type"),
        ([0, math.inf], ValueError, "inf"),
        ([b"a", b"b"], TypeError, "bytes"),
        ([0, 1j], TypeError, "complex"),
        ([0, (1, 2)], ValueError, "inhomogeneous|1d"),
        ([[0, 1], [1, 0]], ValueError, "1d"),
        (np.array(["2020-01-01", "2021-01-01"], "datetime64[ns]"), TypeError, "datetime"),
        ([0], ValueError, "2 rows and 1 targets"),
        ([0, 1, 2], ValueError, "2 rows and 3 targets"),
        (0, ValueError, "1d"),
        (None, ValueError, "y is None"),
        ([10**5000, 1], ValueError, "bits"),
    ],
)
def test_classes_that_are_refused(y: Any, error: Any, message: str) -> None:
    learner = small().partial_fit([[1.0], [2.0]], [0, 1])
    before = state(learner)
    with pytest.raises(error, match=message):
        learner.partial_fit([[1.0], [2.0]], y)
    assert_same_state(state(learner), before)


def test_classes_are_sorted() -> None:
    X = np.arange(4.0)[:, None]
    assert small(epochs=1).fit(X, ["c", "a", "b", "a"]).classes_.tolist() == ["a", "b", "c"]
    learner = small().partial_fit(X, ["c", "a", "c", "a"], classes=["z", "a", "c"])
    assert learner.classes_.tolist() == ["a", "c", "z"]
    assert learner.predict_proba(X).shape == (4, 3)
    learner.partial_fit(X[:1], ["new"])
    assert learner.classes_.tolist() == ["a", "c", "new", "z"]
    assert learner.output_classes_.tolist() == ["a", "c", "z", "new"]
    assert learner.predict_proba(X)[:, 2].tolist() == [
        learner.predict_proba_one({0: value})["new"] for value in X[:, 0].tolist()
    ]


@pytest.mark.parametrize("optimizer", ["upgd", "ada-upgd", "feature-upgd", "sgd", "upgd-2nd"])
def test_a_new_class_in_the_middle_keeps_the_rest(optimizer: str) -> None:
    """Old weights and traces are kept to the bit; old logits, too, whatever is added."""
    random = np.random.default_rng(0)
    X, y = random.normal(size=(60, 3)), random.integers(0, 2, 60)
    learner = small(optimizer=optimizer).partial_fit(X, y)
    core = learner.committee_.cores[0]
    numbers = [[m.copy() for m in core.matrices(each)] for each in core._numbers()]
    rows = learner._scaled(X, False)
    logits = core.answer(rows)
    learner._know(["new", "newer"])
    learner._shape(3, 4)
    assert core.sizes == (3, 6, 4)
    for old, new in zip(numbers, core._numbers(), strict=True):
        for a, b in zip(old, core.matrices(new), strict=True):
            np.testing.assert_array_equal(a, b[: len(a)])
            assert not b[len(a) :].any()
    np.testing.assert_array_equal(core.answer(rows)[:, :2], logits)
    np.testing.assert_array_equal(core.answer(rows)[:, 2:], 0)


def test_a_class_is_never_guessed_before_it_was_seen() -> None:
    """Predictions made while learning are those that ``predict_one`` makes just before."""
    random = np.random.default_rng(0)
    X = random.normal(size=(120, 3))
    y = (random.integers(0, 2, 120) + np.arange(120) // 30 * 2).tolist()
    guesses = small().predict_then_learn(X, y)
    learner = small()
    right = 0
    for t in range(120):
        x = dict(enumerate(X[t]))
        guess = learner.predict_one(x)
        if t:
            assert guess == guesses[t]
            assert guess in y[:t]
        right += guess == y[t]
        learner.learn_one(x, y[t])
    assert learner.accuracy_ == pytest.approx(right / 120)


# -------------------------------------------------------------------- frames and arrays
MIXED = [
    {"b": 1.0, "a": None, "s": "x", "f": True},
    {"b": 2.5, "a": 3, "s": None, "f": False},
    {"b": None, "a": 4, "s": "y", "f": None},
    {"b": -1.0, "a": None, "s": "x", "f": True},
]


@pytest.mark.parametrize("names", ["bas", "ba", "b", "asbf"])
def test_frames_are_their_dicts(names: str) -> None:
    polars = pytest.importorskip("polars")
    records = [{name: x[name] for name in names} for x in MIXED]
    expected = learned(zip(records, [0, 1, 1, 0], strict=True))
    frame = polars.DataFrame(records)
    assert_same(small().partial_fit(records, [0, 1, 1, 0]), expected)
    assert_same(small().partial_fit(frame, [0, 1, 1, 0]), expected)
    answers = expected.predict_proba(records)
    np.testing.assert_array_equal(expected.predict_proba(frame), answers)
    np.testing.assert_array_equal(expected.predict_proba(frame[list(reversed(names))]), answers)
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(records, index=[9, 8, 7, 6])
    for each in (table, table.convert_dtypes(), table.astype(object)):
        assert_same(small().partial_fit(each, [0, 1, 1, 0]), expected)
        np.testing.assert_array_equal(expected.predict_proba(each), answers)


def test_frames_of_numbers() -> None:
    """The quick way for numbers is the slow one; columns appear with their first value."""
    polars = pytest.importorskip("polars")
    records = [
        {"z": None, "y": 1, "x": None},
        {"z": 2, "y": None, "x": 4},
        {"z": 3, "y": 5, "x": 6},
    ]
    frame = polars.DataFrame(records)
    assert learned(zip(records, [0, 1, 0], strict=True))._columns.names == ["y", "x", "z"]
    assert_same(
        small().partial_fit(frame, [0, 1, 0]), learned(zip(records, [0, 1, 0], strict=True))
    )
    categories = frame.with_columns(z=polars.col("z").cast(polars.String).cast(polars.Categorical))
    assert "z=2" in small().partial_fit(categories, [0, 1, 0])._columns.names


@pytest.mark.parametrize("library", ["polars", "pandas"])
def test_frames_that_are_refused(library: str) -> None:
    module = pytest.importorskip(library)
    import datetime

    learner = small().partial_fit(module.DataFrame({"a": [1.0, 2.0]}), [0, 1])
    before = state(learner)
    wrong = [
        ({"a": [1.0, math.inf]}, ValueError, "'a' is inf"),
        ({"a": [1.0, 1e200]}, ValueError, "'a' is 1e\\+200"),
        ({"new": [1.0, 2.0], "when": [datetime.date(2020, 1, 1)] * 2}, TypeError, "'when'"),
        ({"new": [1.0, 2.0], "list": [[1], [2]]}, TypeError, "'list'"),
        ({"new": [1.0]}, ValueError, "1 rows and 2 targets"),
        ({"a": []}, ValueError, "0 rows"),
    ]
    for columns, error, message in wrong:
        with pytest.raises(error, match=message):
            learner.partial_fit(module.DataFrame(columns), [0, 1])
        assert_same_state(state(learner), before)


def test_two_columns_of_one_name() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ValueError, match="two columns 'a'"):
        small().partial_fit(pandas.DataFrame([[1.0, 2.0]] * 2, columns=["a", "a"]), [0, 1])


def _arrays() -> dict[str, Any]:
    whole = np.random.default_rng(0).integers(0, 8, size=(30, 4)).astype(float)
    wide = np.zeros((60, 8))
    wide[::2, ::2] = whole
    frozen = whole.copy()
    frozen.flags.writeable = False
    return {
        "list": whole.tolist(),
        "tuples": tuple(map(tuple, whole.tolist())),
        "Fortran": np.asfortranarray(whole),
        "not contiguous": wide[::2, ::2],
        "backwards": whole[::-1, ::-1].copy()[::-1, ::-1],
        "read-only": frozen,
        "big-endian": whole.astype(">f8"),
        "float32": whole.astype(np.float32),
        "float16": whole.astype(np.float16),
        "longdouble": whole.astype(np.longdouble),
        "int64": whole.astype(int),
        "uint8": whole.astype(np.uint8),
        "objects": whole.astype(object),
        "tensor": torch.tensor(whole),
        "float32 tensor": torch.tensor(whole, dtype=torch.float32, requires_grad=True),
        "int tensor": torch.tensor(whole).long(),
        "transposed tensor": torch.tensor(whole.T.copy()).T,
        "dicts": [dict(enumerate(row)) for row in whole.tolist()],
        "a dict's subclass": [OrderedDict(enumerate(row)) for row in whole.tolist()],
    }  # fmt: skip


@pytest.mark.parametrize("form", _arrays())
@pytest.mark.parametrize("kind", [Classifier, Regressor])
def test_arrays_of_all_kinds(kind: Any, form: str) -> None:
    given = _arrays()[form]
    whole = np.array(_arrays()["list"])
    y = (whole[:, 0] > 3).astype(int)
    expected = small(kind).partial_fit(whole[:20], y[:20]).partial_fit(whole[20:], y[20:])
    learner = small(kind).partial_fit(given[:20], y[:20])
    learner.partial_fit(given[20:], y[20:])
    assert_same(learner, expected)
    np.testing.assert_array_equal(learner.predict(given), expected.predict(whole))


def test_booleans_are_zeros_and_ones() -> None:
    X = np.random.default_rng(0).integers(0, 2, size=(20, 3)).astype(bool)
    assert_same(small().partial_fit(X, X[:, 0]), small().partial_fit(X.astype(float), X[:, 0]))


def test_arrays_and_names_do_not_mix() -> None:
    """Columns of an array have numbers; where features have names, their order is unknown."""
    learner = learned([({"b": 1.0, "a": 2.0}, 0), ({"b": 2.0, "a": 1.0}, 1)])
    for call in (learner.predict, lambda X: learner.partial_fit(X, [0])):
        with pytest.raises(ValueError, match="no names of features"):
            call(np.zeros((1, 2)))
    # Integers are names of an array's columns, in whatever order they appeared.
    learner = learned([({1: 5.0}, 0), ({0: 7.0}, 1), ({0: 1.0, 1: 2.0}, 0)])
    assert learner._columns.names == [1, 0]
    expected = learner.predict_proba_one({0: 1.0, 1: 2.0})
    np.testing.assert_array_equal(learner.predict_proba([[1.0, 2.0]])[0], list(expected.values()))
    # A feature that learn_one adds makes the array too narrow.
    learner = small().partial_fit(np.zeros((2, 2)), [0, 1])
    learner.learn_one({0: 1.0, 2: 3.0}, 0)
    with pytest.raises(ValueError, match="2 features, but Classifier is expecting 3"):
        learner.predict(np.zeros((1, 2)))
    assert learner.predict(np.zeros((1, 3))).shape == (1,)


@pytest.mark.parametrize(
    ("X", "error", "message"),
    [
        (np.zeros((2, 3)), ValueError, "3 features"),
        (np.zeros(2), ValueError, "2D array"),
        (np.zeros((2, 2, 2)), ValueError, "dim 3|3D|dimension"),
        (np.zeros((0, 2)), ValueError, "0 sample"),
        ([[1.0, 2.0], [1.0]], ValueError, "inhomogeneous"),
        ([[1.0, 2.0], [1.0, math.inf]], ValueError, "infinity"),
        ([[1.0, 2.0], [1.0, 1e101]], ValueError, "column 1 of X"),
        (np.array([[1.0, 2.0], [1.0, -1e101]]), ValueError, "column 1 of X"),
        (np.array([[1, 2], [1, 2]], complex), ValueError, "[Cc]omplex"),
        (np.array([["a", "b"], ["c", "d"]]), ValueError, "could not convert|not supported"),
        ([{"a": 1.0}, 5], TypeError, "dict of features expected"),
        ([{"a": 1.0}, {"b": {1}}], TypeError, "'b' is of type set"),
        ({"a": 1.0}, TypeError, "list of dicts"),
        (None, (TypeError, ValueError), "2D array|None"),
        ("text", ValueError, "2D array|text"),
    ],
)  # fmt: skip
def test_arrays_that_are_refused(X: Any, error: Any, message: str) -> None:
    learner = small().partial_fit(np.eye(2), [0, 1])
    before = state(learner)
    with pytest.raises(error, match=message):
        learner.partial_fit(X, [0, 1])
    with pytest.raises(error, match=message):
        learner.predict(X)
    assert_same_state(state(learner), before)


def test_fit_keeps_what_was_learned_if_its_data_are_refused() -> None:
    for options in ({}, {"warm_start": True}):
        learner = small(**options).partial_fit(np.eye(2), [0, 1])
        before = state(learner)
        wrong: list[tuple[Any, Any, Any]] = [
            ([[1.0, math.inf]], [0], None),
            ([{"new": 1.0}, {"newer": 2.0}], [0, 1], [0.0, 0.0]),
            ([{"new": 1.0}], [NAN], None),
            ([{"new": 1.0}], [0], [-1.0]),
        ]
        for X, y, weights in wrong:
            with pytest.raises(ValueError, match=r"."):
                learner.fit(X, y, sample_weight=weights)
            assert_same_state(state(learner), before)


def test_a_network_that_cannot_grow_refuses_features_and_stays_whole() -> None:
    body = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 1), torch.nn.Flatten(), torch.nn.Linear(4, 2))
    module = torch.nn.Sequential(torch.nn.Unflatten(1, (1, 2)), body)
    learner = Classifier(module, optimizer="sgd", hyper={"lr": 0.01})
    learner.learn_one({"a": 1.0, "b": 2.0}, 0)
    before = state(learner)
    with pytest.raises(ValueError, match="cannot take 3"):
        learner.learn_one({"a": 1.0, "c": 2.0}, "new")
    with pytest.raises(ValueError, match="cannot take 4"):
        learner.partial_fit([{"a": 1.0}, {"c": "x"}, {"c": "y"}], ["new", 0, 1])
    assert_same_state(state(learner), before)
    learner.learn_one({"a": 2.0}, 0)


# ------------------------------------------------------------------------------- weights
@pytest.mark.parametrize("kind", [Classifier, Regressor])
def test_a_weight_multiplies_the_loss(kind: Any) -> None:
    """Against PyTorch: SGD on weight x loss, one step per row."""
    random = np.random.default_rng(0)
    X = random.normal(size=(40, 3))
    y = random.integers(0, 2, 40) if kind is Classifier else X[:, 0]
    weights = random.choice([0.0, 0.5, 1.0, 2.0, 7.0], 40)
    options = {"network": (), "optimizer": "sgd", "hyper": {"lr": 0.05}}
    learner = kind(**options)
    if kind is Classifier:
        learner.partial_fit(X, y, classes=[0, 1], sample_weight=weights)
    else:
        learner.partial_fit(X, y, sample_weight=weights)

    scaler = kind(**options).partial_fit(X[:1], y[:1])._scaler  # only for its type
    mine = type(scaler)(3, learner.horizon)
    rows = torch.tensor(mine.learn(X))
    outputs = 2 if kind is Classifier else 1
    targets: Any = torch.tensor(y)
    if kind is Regressor:
        targets = torch.tensor(type(scaler)(1, 10 * learner.horizon).learn(y[:, None]))
    model = torch.nn.Linear(3, outputs)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    for row, target, weight in zip(rows, targets, weights, strict=True):
        z = model(row)
        if kind is Classifier:
            loss = torch.nn.functional.cross_entropy(z, target)
        else:
            loss = (z - target).square().mean()
        model.zero_grad()
        (weight * loss).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
    found = learner.committee_.cores[0].matrices(learner.committee_.cores[0].stack.weights[0])[0]
    np.testing.assert_allclose(found[:, :-1], model.weight.detach(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[:, -1], model.bias.detach(), rtol=1e-4, atol=1e-6)


def test_a_weight_of_zero_changes_no_weight_of_sgd() -> None:
    X = np.random.default_rng(0).normal(size=(30, 3))
    learner = small(optimizer="sgd").partial_fit(X, X[:, 0] > 0)
    weights = learner.committee_.cores[0].stack.weights.copy()
    learner.partial_fit(X, X[:, 1] > 0, sample_weight=np.zeros(30))
    learner.learn_one({0: 5.0}, True, w=0.0)
    np.testing.assert_array_equal(learner.committee_.cores[0].stack.weights, weights)


@pytest.mark.parametrize("kind", [Classifier, Regressor])
def test_weights_of_all_forms(kind: Any) -> None:
    X = np.random.default_rng(0).normal(size=(12, 2))
    y = (X[:, 0] > 0).astype(int)
    expected = small(kind).partial_fit(X, y, sample_weight=np.full(12, 2.0))
    forms = [[2] * 12, 2, 2.0, np.full(12, 2), torch.full((12,), 2.0), np.full(24, 2.0)[::2]]
    for form in forms:
        assert_same(small(kind).partial_fit(X, y, sample_weight=form), expected)
    one = small(kind)
    for row, target in zip(X, y, strict=True):
        one.learn_one(dict(enumerate(row)), target, Fraction(2))
    assert_same(one, expected)
    plain = small(kind).partial_fit(X, y)
    assert_same(small(kind).partial_fit(X, y, sample_weight=np.ones(12)), plain)


@pytest.mark.parametrize(
    ("weights", "error"),
    [
        ([1.0], ValueError),
        ([[1.0], [1.0]], ValueError),
        ([1.0, -1.0], ValueError),
        ([1.0, NAN], ValueError),
        ([1.0, math.inf], ValueError),
        ([1.0, 1001.0], ValueError),
        (["a", "b"], ValueError),
        ([1.0, None], (TypeError, ValueError)),
    ],
)
def test_weights_that_are_refused(weights: Any, error: Any) -> None:
    learner = small().partial_fit(np.eye(2), [0, 1])
    before = state(learner)
    with pytest.raises(error, match="weight"):
        learner.partial_fit(np.eye(2), ["new", 1], sample_weight=weights)
    one = weights[-1]
    if len(weights) == 2 and not isinstance(one, list):
        with pytest.raises((TypeError, ValueError), match="the weight of a sample"):
            learner.learn_one({"new": 1.0}, "new", one)
    assert_same_state(state(learner), before)


# -------------------------------------------------------------------------------- pieces
VARIANTS: dict[str, dict[str, Any]] = {
    "noise": {},
    "mixture": {"network": "small"},
    "sparse": {"missing": "zero", "optimizer": "ada-upgd"},
    "features": {"optimizer": "feature-upgd"},
    "replay": {"replay": 10, "replay_samples": 2},
    "not normalised": {"normalize": False},
    "PyTorch": {
        "network": torch.nn.Sequential(
            torch.nn.Linear(1, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)
        )
    },
}


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[Any], list[float], list[int]]:
    """Dicts with features that come and go, classes, weights, and where the stream is cut."""
    number = st.one_of(st.none(), st.floats(-100, 100, width=32), st.sampled_from(["x", "y", "z"]))
    count = draw(st.integers(1, 24))
    rows = draw(
        st.lists(
            st.dictionaries(st.sampled_from(["a", "b", "c", 0, 1]), number, max_size=4),
            min_size=count, max_size=count,
        )
    )  # fmt: skip
    classes = st.sampled_from(["u", "v", 1, 2, True])
    y = draw(st.lists(classes, min_size=count, max_size=count))
    weights = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=count, max_size=count))
    cuts = draw(st.lists(st.integers(0, count), max_size=5))
    return rows, y, weights, sorted({0, count, *cuts})


def _pieces(learner: Any, rows: Any, y: Any, weights: Any, cuts: list[int]) -> Any:
    for begin, end in pairwise(cuts):
        some = slice(begin, end)
        learner.partial_fit(rows[some], y[some], sample_weight=weights[some])
    return learner


DIVERGES = (
    [
        {0: 46.92284393310547, "a": "y", "b": None, 1: 82.53118133544922},
        {1: None, "a": None, "b": None, "c": None},
        {1: -50.37557601928711, 0: "y", "b": None, "a": -90.98902130126953},
        {0: None, "c": 81.55099487304688},
        {0: "x", "c": None, "a": "z", "b": -30.98229217529297},
        {"c": None, "b": None, 1: 3.196531295776367, "a": 93.39260864257812},
        {0: 84.97582244873047, "c": "z"},
        {"b": -3.250174045562744, 1: "z", 0: -70.30396270751953},
        {"b": 15.499367713928223},
        {"a": None, 0: None, "c": 0.22499999403953552},
        {"c": 47.94887161254883, 1: "z", "b": -0.0},
        {"c": 25.911958694458008},
        {"c": None, 0: 6.506514549255371},
    ],
    [2, 1, 2, "v", 1, "v", "v", "u", "v", "u", "v", "u", 2],
    [0.5, 0.0, 0.5, 0.0, 0.0, 0.5, 1.0, 0.5, 1.0, 0.0, 0.5, 0.0, 1.0],
    [0, 2, 7, 13],
)
"""A regressor whose inputs are not normalised diverges on these."""


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", [Classifier, Regressor])
@settings(max_examples=5, deadline=None, phases=NO_SHRINKING)
@example(drawn=DIVERGES)
@given(drawn=streams())
def test_one_by_one_together_or_in_pieces(kind: Any, variant: str, drawn: Any) -> None:
    """Bit for bit, with dicts whose features and classes appear anywhere."""
    warnings.filterwarnings("ignore", "a network diverged", StreamWarning)  # pytest resets it
    rows, y, weights, cuts = drawn
    if kind is Regressor:
        y = [float(len(str(label))) + i for i, label in enumerate(y)]
    options = VARIANTS[variant]
    if variant == "PyTorch" and not any(isinstance(v, float | str) for v in rows[0].values()):
        rows = [{"a": 1.0}, *rows[1:]]  # its first layer has one input
    if variant == "PyTorch":
        rows = [{"a": 1.0}, *rows]
        y, weights, cuts = [y[0], *y], [1.0, *weights], [0, *[c + 1 for c in cuts]]
    one, answers, grown = small(kind, **options), [], []
    for x, target, weight in zip(rows, y, weights, strict=True):
        answers.append(one.predict_one(x))
        columns = len(one._columns) if answers[1:] else 0
        before = state(one) if one.__sklearn_is_fitted__() else None
        one.predict_one(x)
        if before is not None:
            one.predict([x])
            assert_same_state(state(one), before)
        one.learn_one(x, target, weight)
        grown.append(len(one._columns) != columns)
    together = _pieces(small(kind, **options), rows, y, weights, [0, len(rows)])
    assert_same(together, one)
    pieces = small(kind, **options)
    assert_same(_pieces(pieces, rows, y, weights, cuts), one)
    guesses = small(kind, **options).predict_then_learn(rows, y, sample_weight=weights)
    for guess, answer, new in list(zip(guesses, answers, grown, strict=True))[1:]:
        if new and kind is Regressor:  # in a wider row, sums have another order
            assert guess == pytest.approx(answer, rel=1e-4, abs=1e-4)
        elif not new:
            assert guess == answer


@settings(max_examples=15, deadline=None, phases=NO_SHRINKING)
@given(cuts=st.lists(st.integers(0, 2500), max_size=6), seed=st.integers(0, 3))
def test_pieces_of_arrays_across_copies(cuts: list[int], seed: int) -> None:
    """Longer than the distance of copies, with a network that diverges on the way."""
    random = np.random.default_rng(seed)
    X = random.normal(size=(2500, 3))
    y = X[:, 0] + 1
    cuts = sorted({0, 2500, *cuts})
    options = {"network": (), "optimizer": "sgd", "hyper": {"lr": 0.3}}
    weights = np.ones(2500)
    weights[random.integers(0, 2500, 12)] = 1000
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StreamWarning)
        together = small(Regressor, **options).partial_fit(X, y, sample_weight=weights)
        pieces = _pieces(small(Regressor, **options), X, y, weights, cuts)
    assert_same(together, pieces)
    assert together.restarts_ > 0
    assert all(np.isfinite(a).all() for a in together._state()[0].values())


@pytest.mark.parametrize("method", ["predict", "predict_proba", "predict_log_proba", "score"])
def test_predicting_changes_nothing(method: str) -> None:
    X = np.random.default_rng(0).normal(size=(50, 3))
    learner = small(network="small", replay=5).partial_fit(X, X[:, 0] > 0)
    before = state(learner)
    given = X * 100
    copy = given.copy()
    getattr(learner, method)(*((given, X[:, 0] > 0) if method == "score" else (given,)))
    learner.predict_one({0: 1e99, "new": "thing"})
    learner.predict_proba_one({})
    assert_same_state(state(learner), before)
    np.testing.assert_array_equal(given, copy)


@pytest.mark.parametrize("kind", [Classifier, Regressor])
def test_inputs_are_not_changed(kind: Any) -> None:
    X = np.random.default_rng(0).normal(size=(20, 2))
    X[3, 1] = NAN
    y, weights = (X[:, 0] > 0).astype(float), np.full(20, 2.0)
    copies = [each.copy() for each in (X, y, weights)]
    for call in ("partial_fit", "fit"):
        getattr(small(kind, epochs=2), call)(X, y, sample_weight=weights)
    for mine, copy in zip((X, y, weights), copies, strict=True):
        np.testing.assert_array_equal(mine, copy)
    x = {"a": 1.0, "b": None, "c": "x"}
    small(kind).learn_one(x, 1)
    assert x == {"a": 1.0, "b": None, "c": "x"}
