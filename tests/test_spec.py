"""Specifications of runs: one form, one key, and clear words for what is none."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upgd.ledger import RULES_VERSION, RunSpec, SpecError
from upgd.optim.registry import METHODS
from upgd.optim.registry import scalars as scalars_of

names = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False)
integers = st.integers(-(2**63) + 1, 2**63 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = st.none() | st.booleans() | integers | numbers | text
specs = st.builds(
    RunSpec,
    problem=names,
    method=names,
    hyper=st.dictionaries(
        names.filter(lambda name: name != "betas"), numbers | integers, max_size=5
    ),
    seed=st.integers(0, 2**63 - 1),
    steps=st.integers(1, 2**63 - 1),
    options=st.dictionaries(names, scalars, max_size=5),
    rules=st.integers(1, 10),
)


@given(specs)
def test_json_round_trip(spec: RunSpec) -> None:
    again = RunSpec.from_json(spec.to_json())
    assert again == spec
    assert (again.key, hash(again), again.label()) == (spec.key, hash(spec), spec.label())
    assert again.to_json() == spec.to_json()
    assert dict(again.hyper) == dict(spec.hyper)
    assert dict(again.options) == dict(spec.options)
    assert spec.to_json().isascii()


@given(specs)
def test_copies_are_equal(spec: RunSpec) -> None:
    assert copy.deepcopy(spec) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec


@given(specs, specs)
def test_equal_exactly_where_the_key_is(one: RunSpec, other: RunSpec) -> None:
    assert (one == other) == (one.key == other.key)


@given(specs, st.randoms())
def test_order_and_spaces_do_not_matter(spec: RunSpec, random: Any) -> None:
    def shuffled(mapping: Any) -> dict[str, Any]:
        pairs = list(mapping.items())
        random.shuffle(pairs)
        return dict(pairs)

    content = shuffled(json.loads(spec.to_json()))
    content["hyper"] = shuffled(content["hyper"])
    content["options"] = shuffled(content["options"])
    assert RunSpec.from_json(json.dumps(content, indent=2)).key == spec.key
    assert list(RunSpec.from_json(json.dumps(content)).hyper) == sorted(spec.hyper)


@given(specs)
def test_every_field_is_in_the_key(spec: RunSpec) -> None:
    others = [
        replace(spec, problem=spec.problem + "x"),
        replace(spec, method=spec.method + "x"),
        replace(spec, hyper={**spec.hyper, "new": 0.0}),
        replace(spec, seed=spec.seed ^ 1),
        replace(spec, steps=spec.steps % (2**63 - 1) + 1),
        replace(spec, options={**spec.options, "new": None}),
        replace(spec, rules=spec.rules + 1),
    ]
    assert len({spec.key, *(other.key for other in others)}) == len(others) + 1


@given(st.integers(-(2**53), 2**53))
def test_numbers_that_are_equal_are_the_same(n: int) -> None:
    forms = [n, float(n), np.int64(n), np.float64(n)]
    assert len({RunSpec("p", "m", hyper={"lr": form}).key for form in forms}) == 1
    assert len({RunSpec("p", "m", options={"a": form}).key for form in forms}) == 1


@given(numbers, numbers)
def test_neighbouring_floats_differ(x: float, y: float) -> None:
    for a, b in ((x, y), (x, float(np.nextafter(x, 0.0)))):
        one, other = (RunSpec("p", "m", hyper={"lr": value}) for value in (a, b))
        assert (one.key == other.key) == (a == b)


def test_signed_zero_and_booleans() -> None:
    assert RunSpec("p", "m", {"lr": -0.0}) == RunSpec("p", "m", {"lr": 0})
    assert str(RunSpec("p", "m", {"lr": -0.0}).hyper["lr"]) == "0.0"
    assert RunSpec("p", "m", options={"a": -0.0}) == RunSpec("p", "m", options={"a": 0})
    assert RunSpec("p", "m", options={"a": True}) != RunSpec("p", "m", options={"a": 1})


def test_key_is_the_documented_hash() -> None:
    spec = RunSpec("digits", "theirs", {"sigma": 0.001, "lr": 1}, 3, 500, {"batch": 32.0})
    plain = (
        '{"hyper":{"lr":1.0,"sigma":0.001},"method":"theirs","options":{"batch":32},'
        f'"problem":"digits","rules":{RULES_VERSION},"seed":3,"steps":500}}'
    )
    assert spec.key == hashlib.sha256(plain.encode()).hexdigest()[:32]


DIGITS = "label-permuted-digits"
SAME = {
    "an alias, without defaults and with them": (
        RunSpec(DIGITS, "sgd"),
        RunSpec(DIGITS, "sgd", {"lr": 0.01, "weight_decay": 0}),
    ),
    "an alias and its row": (
        RunSpec(DIGITS, "sgd", {"lr": 0.5}),
        RunSpec(DIGITS, "sgdw", {"lr": 0.5, "weight_decay": 0.0}),
    ),
    "upper and lower case": (RunSpec(DIGITS, "UPGD-W"), RunSpec(DIGITS, "upgd-w")),
    "UPGD-W": (RunSpec(DIGITS, "upgd-w"), RunSpec(DIGITS, "upgd", {"weight_decay": 0.001})),
    "another name": (RunSpec(DIGITS, "s&p"), RunSpec(DIGITS, "shrink-and-perturb")),
    "a pair": (
        RunSpec(DIGITS, "adam", {"betas": (0.5, 0.75)}),
        RunSpec(DIGITS, "adamw", {"beta1": 0.5, "beta2": 0.75, "weight_decay": 0}),
    ),
    "options that change nothing": (
        RunSpec(DIGITS, "pgd"),
        RunSpec(
            *(DIGITS, "pgd"),
            options={"batch": 1, "restart": False, "held_out": 0, "stride": 0, "window": 2500}
            | {"task_length": 2500, "hidden": "300-150"},
        ),
    ),
    "a window of one task": (
        RunSpec(DIGITS, "pgd", options={"task_length": 100}),
        RunSpec(DIGITS, "pgd", options={"task_length": 100, "window": 100}),
    ),
    "an agent": (
        RunSpec("ppo/Hopper-v5", "Adam"),
        RunSpec(
            *("ppo/Hopper-v5", "adamw", {"weight_decay": 0, "lr": 3e-4, "eps": 1e-5}),
            options={"anneal": True, "hidden": "64-64", "gamma": 0.99, "window": 20_480},
        ),
    ),
}


@pytest.mark.parametrize("what", SAME)
def test_a_run_has_one_key_however_it_is_written(what: str) -> None:
    one, other = SAME[what]
    assert one == other
    assert (one.key, one.label()) == (other.key, other.label())


def test_what_changes_a_run_is_kept() -> None:
    different = [
        RunSpec(DIGITS, "pgd", options=options)
        for options in (
            {},
            {"batch": 2},
            {"restart": True},
            {"held_out": 1},
            {"stride": 5},
            {"window": 100},
            {"task_length": 100},
            {"task_length": 100, "window": 2500},
            {"hidden": "none"},
            {"hidden": "8"},
            {"unknown": 0},
        )
    ]
    different += [RunSpec("ppo/X", "pgd", options=o) for o in ({}, {"anneal": False}, {"batch": 1})]
    different += [
        RunSpec(DIGITS, "sgdw"),
        RunSpec(DIGITS, "sgd"),
        RunSpec(DIGITS, "sgd", {"no": 1}),
    ]
    assert len({spec.key for spec in different}) == len(different)


@pytest.mark.parametrize("row", METHODS.values(), ids=METHODS)
def test_every_name_of_a_method_leads_to_its_row(row: Any) -> None:
    for name in (row.name, *row.aliases):
        spec = RunSpec(DIGITS, name.upper())
        assert (spec.method, dict(spec.hyper)) == (row.name, scalars_of(name))
        assert spec.is_called(name)
        assert spec.is_called(row.name)
        if row.aliases.get(name):
            assert spec.name == name  # people see the alias that they asked for
        assert RunSpec(DIGITS, spec.name, spec.hyper) == spec


def test_what_is_not_registered_stays_as_it_is() -> None:
    options = {"batch": 1, "window": 2500}
    spec = RunSpec("Theirs", "Mine", {"lr": 1}, options=options)
    assert (spec.problem, spec.method, spec.name) == ("Theirs", "Mine", "Mine")
    assert (dict(spec.hyper), dict(spec.options)) == ({"lr": 1.0}, options)
    assert dict(RunSpec("Theirs", "sgd", options=options).options) == options
    assert RunSpec(DIGITS, "Mine", options=options).options == {}


def test_what_was_written_does_not_change_with_the_registries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A method that is registered later, another default, a changed source: the same run."""
    written = RunSpec("p", "mine", {"lr": 0.5}, sources={"method": "0123456789abcdef"}).to_json()

    @dataclass
    class Mine:
        name: str = "mine"
        source: str = "fedcba9876543210"
        aliases: Any = field(default_factory=dict)
        defaults: Any = field(default_factory=lambda: {"lr": 0.1, "kappa": 2.0})

    monkeypatch.setitem(METHODS, "mine", Mine())
    stored = RunSpec.from_json(written)
    assert stored.to_json() == written
    assert pickle.loads(pickle.dumps(stored)) == stored
    new = RunSpec("p", "mine", {"lr": 0.5})
    assert dict(new.hyper) == {"kappa": 2.0, "lr": 0.5}
    assert dict(new.sources) == {"method": "fedcba9876543210"}
    assert new.key != stored.key
    assert json.loads(new.to_json())["sources"] == {"method": "fedcba9876543210"}
    assert "sources" not in RunSpec(DIGITS, "sgd").to_json()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hyper": {"betas": (0.9,)}}, "two numbers"),
        ({"hyper": {"betas": 0.9}}, "two numbers"),
        ({"hyper": {"betas": (0.9, 0.9), "beta1": 0.9}}, "one of them"),
        ({"hyper": {"betas": (0.9, "x")}}, "number"),
        ({"sources": {"weights": "0123"}}, "sources of its method, problem, network"),
        ({"sources": {"method": 7}}, "name"),
    ],
)
def test_pairs_and_sources_that_are_none(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        RunSpec("p", "adam", **fields)


def test_cannot_be_changed() -> None:
    hyper = {"lr": 0.1}
    spec = RunSpec("p", "m", hyper)
    hyper["lr"] = 0.2
    assert spec.hyper["lr"] == 0.1
    with pytest.raises(TypeError):
        spec.hyper["lr"] = 0.2  # type: ignore[index]
    with pytest.raises(AttributeError):
        spec.seed = 1  # type: ignore[misc]


MALFORMED = {
    "empty problem": ({"problem": ""}, "problem"),
    "problem with a newline": ({"problem": "a\nb"}, "problem"),
    "problem with a surrogate": ({"problem": "\ud800"}, "problem"),
    "problem that is a number": ({"problem": 3}, "problem"),
    "method with spaces around": ({"method": " upgd"}, "method"),
    "method too long": ({"method": "m" * 201}, "method"),
    "method that is null": ({"method": None}, "method"),
    "hyper that is a list": ({"hyper": [1]}, "hyper"),
    "hyper with text": ({"hyper": {"lr": "0.1"}}, "hyper 'lr'"),
    "hyper with a boolean": ({"hyper": {"lr": True}}, "hyper 'lr'"),
    "hyper nan": ({"hyper": {"lr": float("nan")}}, "finite"),
    "hyper inf": ({"hyper": {"lr": float("-inf")}}, "finite"),
    "hyper too large": ({"hyper": {"lr": 10**400}}, "finite"),
    "hyper far too large": ({"hyper": {"lr": 10**5000}}, "finite"),
    "hyper with an empty name": ({"hyper": {"": 1.0}}, "name in hyper"),
    "hyper nested": ({"hyper": {"lr": {"a": 1}}}, "hyper 'lr'"),
    "seed negative": ({"seed": -1}, "seed"),
    "seed too large": ({"seed": 2**63}, "seed"),
    "seed a float": ({"seed": 1.0}, "seed"),
    "seed a boolean": ({"seed": True}, "seed"),
    "steps zero": ({"steps": 0}, "steps"),
    "steps negative": ({"steps": -5}, "steps"),
    "steps a float": ({"steps": 1e6}, "steps"),
    "steps text": ({"steps": "100"}, "steps"),
    "options nested": ({"options": {"a": [1]}}, "options 'a'"),
    "options nan": ({"options": {"a": float("nan")}}, "finite"),
    "options too large": ({"options": {"a": 2**63}}, "options 'a'"),
    "options bad text": ({"options": {"a": "\ud800"}}, "options 'a'"),
    "options complex": ({"options": {"a": 1j}}, "options 'a'"),
    "rules zero": ({"rules": 0}, "rules"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_values_are_named(name: str) -> None:
    fields, words = MALFORMED[name]
    with pytest.raises(SpecError, match=words) as caught:
        RunSpec(**{"problem": "p", "method": "m", **fields})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not the JSON"),
        ("{", "not the JSON"),
        ("[" * 100_000, "not the JSON"),
        ("[1]", "object"),
        ("null", "object"),
        ('"text"', "object"),
        ("{}", "needs the field 'problem'"),
        ('{"problem": "p"}', "needs the field 'method'"),
        ('{"problem": "p", "method": "m", "sed": 1}', "no field 'sed'"),
        ('{"problem": "p", "problem": "q", "method": "m"}', "'problem' twice"),
        ('{"problem": "p", "method": "m", "hyper": {"lr": NaN}}', "NaN"),
        ('{"problem": "p", "method": "m", "hyper": {"lr": 1e999}}', "finite"),
        ('{"problem": "p", "method": "m", "seed": ' + "9" * 6000 + "}", "JSON|seed"),
        (None, "not the JSON"),
    ],
)
def test_malformed_json_is_refused(text: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        RunSpec.from_json(text)
    assert "\n" not in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
fields = st.sampled_from(
    ["problem", "method", "hyper", "seed", "steps", "options", "rules", "sources", "x"]
)


@given(st.dictionaries(fields, json_values) | json_values)
def test_any_json_is_a_run_or_a_clear_error(content: Any) -> None:
    spec, message = None, ""
    try:
        spec = RunSpec.from_json(json.dumps(content))
    except SpecError as error:
        message = str(error)
    if spec is None:
        assert len(message.splitlines()) == 1
    else:
        assert RunSpec.from_json(spec.to_json()) == spec
