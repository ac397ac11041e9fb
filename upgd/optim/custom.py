"""A method from a plain function: what a user writes becomes a row like those of the registry.

:func:`rule_row` checks a rule where it is defined, so that what is wrong with it is said there in
one line and not by an executor later.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
import keyword
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from upgd.kernels.rules import MOST_NUMBERS, MOST_STATES, describe, inputs_of
from upgd.optim.base import Common, RuleOptimizer
from upgd.optim.checks import CLOCK
from upgd.optim.program import Program
from upgd.optim.registry import Row
from upgd.rules.ops import FUNCTIONS
from upgd.rules.symbols import Symbol
from upgd.rules.vocabulary import Method, Phase, Reduce, as_numbers

Rule = Callable[..., Any]
_READ = ("w", "g", "h", "noise")
_RESERVED = {*_READ, "f", "s", "eta", *CLOCK, *Common.__annotations__}
_RESERVED |= {"self", "params", "param_names", "method", "hyper", "options", "noise_step"}
_RESERVED |= {"torch", "len", *keyword.kwlist}
_TAKEN = re.compile(r"c_.*|r\d+")  # bias corrections, and what programs call their registers


def rule_row(
    name: str,
    rule: Rule | tuple[Rule, Rule],
    *,
    title: str | None = None,
    states: Mapping[str, Any] | Sequence[str] = (),
    decays: Mapping[str, str] | None = None,
    reduce: Reduce | None = None,
    writes: Sequence[Any] | None = None,
    power: int = 2,
    period: str | None = None,
    **defaults: Any,
) -> Row:
    """The method called `name` whose update is `rule`.

    A rule is a function of scalars (:mod:`upgd.rules.vocabulary`): its argument names say what it
    reads, it uses ``+ - * /``, small whole powers and the functions of :mod:`upgd.rules.ops`, and
    it returns the new weight, or that and all new states in the order of `states`. States that
    start as the weight may be left out altogether: they stay what they were.

    Args:
        name: On the command line and in results: lower-case letters, digits and ``-``.
        rule: The function; or two, of which the first returns the trace, the first of `states`
            (and may return those that follow), and the second reads ``eta``.
        title: In tables and figures; by default `name`.
        states: What is kept per weight: names, with ``"weight"`` for a state that starts as a copy
            of the weight and ``"zero"`` for others; or names alone.
        decays: For each trace whose bias correction ``c_<trace>`` is read, or that makes ``eta``,
            the hyperparameter by which it decays.
        reduce: How ``eta`` comes from the trace: its ``"max"`` over all weights, or its
            ``"row_norm"`` (:class:`~upgd.rules.vocabulary.Phase`).
        writes: What the rule returns, where it is not the above; of two, a pair of such lists.
        power: How many weights and derivatives it multiplies with each other at most.
        period: The name of the hyperparameter at whose multiples ``due`` is 1.
        defaults: Its hyperparameters, under any names. ``lr`` must be among them. ``sigma``, if it
            is there, scales the noise: none is drawn where it is 0.

    Raises:
        TypeError, ValueError: In one line, what is wrong with the rule.

    Example:
        >>> def l2_start(w, g, start, lr, kappa):
        ...     return w - lr * (g + kappa * (w - start))
        >>> row = rule_row("l2-start", l2_start, states={"start": "weight"}, lr=0.01, kappa=0.01)
        >>> row.optimizer.__name__, row.defaults
        ('L2Start', {'lr': 0.01, 'kappa': 0.01})
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9]*([-_.][a-z0-9]+)*", name):
        raise ValueError(
            f"a method's name must be lower-case letters and digits, with '-' between words, such "
            f"as 'l2-start'; got {name!r}"
        )
    try:
        given = _Given(rule, states, decays or {}, reduce, defaults, period)
        method = given.method(writes, power)
        for hyperparameter in method.hyperparameters.values():
            hyperparameter.check(name, defaults[hyperparameter.name])
    except _RuleError as wrong:
        raise wrong.kind(f"{name}: {wrong}") from None
    return Row(
        name, title or name, optimizer_class(name, method, defaults), method, source=_digest(method)
    )


class _RuleError(Exception):
    """What is wrong with a rule, and as what to raise it."""

    def __init__(self, text: str, kind: type[Exception] = ValueError) -> None:
        super().__init__(text)
        self.kind = kind


class _Given:
    """What a user gave for a method, checked."""

    def __init__(
        self,
        rule: Any,
        states: Any,
        decays: Any,
        reduce: Any,
        defaults: Mapping[str, Any],
        period: Any = None,
    ) -> None:
        self.rules = _rules(rule, reduce)
        self.reduce: Reduce | None = reduce
        self.starts = _starts(states)
        self._check_names(defaults)
        self.defaults, self.numbers = defaults, tuple(as_numbers(defaults))
        self.decays = self._checked_decays(decays)
        self.period = self._checked_period(period)
        self.others = (*(f"c_{state}" for state in self.decays), *self.numbers, "bound")
        for each in self.rules:
            last = each is self.rules[-1]
            more = ["eta"] * (each is not self.rules[0])
            more += ["due"] * (last and self.period is not None)  # unless it is a name of its own
            _check_reads(each, [*_READ, *more, *self.starts, *self.others])

    def method(self, writes: Sequence[Any] | None, power: Any) -> Method:
        """The method, if all that the rules read, return and use is possible."""
        written = self._writes(writes)
        self._check_use(written)
        if isinstance(power, bool) or not isinstance(power, int) or power < 2:
            raise _RuleError(f"power must be a whole number, 2 or more, got {power!r}")
        phases = [Phase(fn, names) for fn, names in zip(self.rules, written, strict=True)]
        if self.reduce is not None:
            phases[0] = Phase(self.rules[0], written[0], self.reduce)
        trace = written[0][0]
        method = Method(
            hyper=tuple(self.defaults),
            phases=tuple(phases),
            states=tuple(sorted(self.starts, key=lambda state: state != trace)),  # read first
            decays=self.decays,
            starts_as_weight=frozenset(s for s, start in self.starts.items() if start == "weight"),
            power=power,
            period=self.period,
        )
        check_sizes(method)
        _check_programs(method)
        return method

    # --------------------------------------------------------------------------- arguments
    def _check_names(self, defaults: Mapping[str, Any]) -> None:
        if "lr" not in defaults:
            raise _RuleError(
                "no hyperparameter is called lr; schedulers look for it, so give the step size "
                "that name and a default, such as lr=0.01"
            )
        pair = defaults.get("betas", (0.0, 0.0))
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _RuleError(f"betas must be two numbers, got {pair!r}; call one number beta")
        twice = self.starts.keys() & as_numbers(defaults).keys()
        if "betas" in defaults:
            twice |= {"beta1", "beta2"} & defaults.keys()
        for each in sorted(twice):
            raise _RuleError(f"{each!r} is the name of two things; rename one")
        for each in (*self.starts, *defaults):
            if not each.isidentifier() or each in _RESERVED or _TAKEN.fullmatch(each):
                raise _RuleError(f"{each!r} has a meaning of its own or is no name; rename it")

    def _checked_decays(self, decays: Any) -> dict[str, str]:
        if not isinstance(decays, Mapping):
            raise _RuleError(
                f"decays must be a mapping from states to names, got {decays!r}", TypeError
            )
        for state, decay in decays.items():
            if state not in self.starts:
                hint = _hint(state, self.starts)
                raise _RuleError(f"decays names {state!r}, which is no state{hint}")
            if decay not in self.numbers:
                hint = _hint(decay, self.numbers)
                raise _RuleError(f"{state} decays by {decay!r}, which is no hyperparameter{hint}")
        return dict(decays)

    def _checked_period(self, period: Any) -> str | None:
        if period is not None and period not in self.numbers:
            hint = _hint(period, self.numbers)
            raise _RuleError(
                "period must be the name of a hyperparameter, such as period='every' beside "
                f"every=1000; got {period!r}{hint}"
            )
        return None if period is None else str(period)

    # ----------------------------------------------------------------------------- results
    def _writes(self, given: Sequence[Any] | None) -> list[tuple[str, ...]]:
        """For each rule the names of what it returns, checked against what it does return."""
        env = {each: Symbol("input", each, is_list=True) for each in (*_READ, *self.starts)}
        env |= {each: Symbol("input", each, is_list=False) for each in ("eta", "due", *self.others)}
        asked = self._asked(given)
        left = list(self.starts)
        found: list[tuple[str, ...]] = []
        for place, rule in enumerate(self.rules):
            results = _evaluated(rule, env)
            last = place == len(self.rules) - 1
            names = asked[place] if asked else self._named(len(results), left, last)
            if len(names) != len(results):
                few = "few" if len(results) < len(names) else "many"
                raise _RuleError(
                    f"{_called(rule)} returns too {few} values, {len(results)} where "
                    f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} written"
                )
            for each, result in zip(names, results, strict=True):
                if not isinstance(result, Symbol) or not result.is_list:
                    kind = "a hyperparameter" if isinstance(result, Symbol) else repr(result)
                    raise _RuleError(
                        f"{_called(rule)} returns {kind} for {each}; it must be something that "
                        "varies with the weight",
                        TypeError,
                    )
            if not last:
                allowed = {"w", "g", "h", names[0], "bound", *self.numbers}
                for each in sorted(inputs_of([results[0]]) - allowed):
                    raise _RuleError(
                        f"{_called(rule)} makes eta from {each!r}; the trace {names[0]} may depend "
                        "on w, g, h, itself, bound and hyperparameters"
                    )
                env |= {each: Symbol("input", each, is_list=True) for each in names}
            left = [state for state in left if state not in names]
            found.append(names)
        return found

    def _named(self, count: int, left: list[str], last: bool) -> tuple[str, ...]:
        """What `count` values are, of all the states that no rule before has written."""
        if not last:
            return tuple(left[: max(1, count)]) or ("a state",)
        constant = all(self.starts[state] == "weight" for state in left)
        return ("w",) if constant and count == 1 else ("w", *left)

    def _asked(self, given: Sequence[Any] | None) -> list[tuple[str, ...]]:
        if given is None:
            return []
        rules = len(self.rules)
        lists = [tuple(each) for each in given] if rules == 2 else [tuple(given)]
        names = [each for part in lists for each in part]
        if isinstance(given, str) or len(lists) != rules or "w" not in lists[-1] or not all(lists):
            raise _RuleError(
                "writes must be names with 'w' among them, such as ('w', 'momentum'); of two "
                f"rules, a pair of such lists; got {given!r}"
            )
        known = ["w", *self.starts]
        for each in names:
            if each not in known:
                hint = _hint(each, known)
                raise _RuleError(f"writes names {each!r}; there are {', '.join(known)}{hint}")
            if names.count(each) > 1:
                raise _RuleError(f"writes names {each!r} twice")
        if rules == 2 and "w" in lists[0]:
            raise _RuleError("the first of two rules makes eta; the second writes w")
        return lists

    def _check_use(self, written: list[tuple[str, ...]]) -> None:
        """Raise where a state is never written, or a name never read."""
        reads = {each for rule in self.rules for each in inspect.signature(rule).parameters}
        writes = {each for names in written for each in names}
        for state, start in self.starts.items():
            if start == "zero" and state not in writes:
                raise _RuleError(
                    f"{_called(self.rules[-1])} returns too few values: the state {state} starts "
                    "at zero and is never written; return it too, or let it start as 'weight'"
                )
            if start == "weight" and state not in reads | writes:
                raise _RuleError(f"no rule reads the state {state}; leave it out")
        for each in self.numbers:
            if each not in reads | {*self.decays.values(), self.period}:
                hint = _hint(each, reads - {each})
                raise _RuleError(f"no rule reads the hyperparameter {each}; leave it out{hint}")


def _rules(rule: Any, reduce: Any) -> tuple[Rule, ...]:
    rules = tuple(rule) if isinstance(rule, tuple | list) else (rule,)
    for each in rules:
        if not callable(each):
            raise _RuleError(f"a rule must be a function, got {each!r}", TypeError)
    if len(rules) > 2:
        raise _RuleError(f"a method is one rule or two, got {len(rules)}")
    if len(rules) == 2 and reduce not in ("max", "row_norm"):
        raise _RuleError(f"two rules need reduce='max' or 'row_norm', got {reduce!r}")
    if len(rules) == 1 and reduce is not None:
        raise _RuleError(f"reduce={reduce!r} needs two rules, (trace, update)")
    return rules


def _starts(states: Any) -> dict[str, str]:
    """For each state, ``"weight"`` or ``"zero"``."""
    if not isinstance(states, Mapping):
        if isinstance(states, str) or not all(isinstance(state, str) for state in states):
            raise _RuleError(
                f"states must be names, such as ('momentum',); got {states!r}", TypeError
            )
        states = dict.fromkeys(states, "zero")
    for state, start in states.items():
        if start not in ("weight", "zero") and (isinstance(start, bool) or start != 0):
            raise _RuleError(f"the state {state!r} must start as 'weight' or 'zero', got {start!r}")
    return {state: "weight" if start == "weight" else "zero" for state, start in states.items()}


def _hint(word: Any, known: Any) -> str:
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _called(rule: Rule) -> str:
    return str(getattr(rule, "__name__", rule))


def _check_reads(rule: Rule, readable: Sequence[str]) -> None:
    for each, parameter in inspect.signature(rule).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise _RuleError(
                f"{_called(rule)} must name its arguments one by one, without * and **; "
                f"got {parameter}",
                TypeError,
            )
        if each not in readable:
            hint = _hint(each, readable) or f". A hyperparameter needs a default, {each}=0.1"
            raise _RuleError(
                f"{_called(rule)} reads {each!r}; it may read {', '.join(readable)}{hint}"
            )


def _evaluated(rule: Rule, env: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a rule returns for symbols."""
    try:
        found = rule(*[env[each] for each in inspect.signature(rule).parameters])
    except Exception as error:  # whatever a user's function may raise
        code = getattr(rule, "__code__", None)
        frames = traceback.extract_tb(error.__traceback__)
        own = [f.lineno for f in frames if code is not None and f.filename == code.co_filename]
        where = f", line {own[-1]}" if own else ""
        what = str(error).splitlines()[0] if str(error) else ""
        raise _RuleError(
            f"{_called(rule)}{where} cannot be a rule: {type(error).__name__}: {what}. A rule uses "
            f"+ - * / and {', '.join(FUNCTIONS)} or clip of upgd.lab",
            TypeError,
        ) from None
    return found if isinstance(found, tuple) else (found,)


def check_sizes(method: Method) -> None:
    """Raise where a method has more states or hyperparameters than kernels have room for."""
    sizes = {"states": (method.states, MOST_STATES)}
    sizes["hyperparameters"] = (method.numbers, MOST_NUMBERS)
    for what, (names, most) in sizes.items():
        if len(names) > most:
            listed = ", ".join(names)
            raise _RuleError(f"it has {len(names)} {what}, {listed}; kernels have room for {most}")


def _check_programs(method: Method) -> None:
    """Raise where no program can be written for lists of tensors."""
    lists = frozenset({*_READ, *method.states})
    for phase in method.phases:
        on_device = frozenset(n for n in phase.reads if n in ("eta", "due") or n.startswith("c_"))
        try:
            Program(phase.fn, phase.reads, phase.writes, lists=lists, on_device=on_device)
        except (TypeError, ValueError) as error:
            raise _RuleError(f"{_called(phase.fn)} cannot be a rule: {error}", TypeError) from None


def optimizer_class(
    name: str, method: Method, defaults: Mapping[str, Any], base: type[Any] = RuleOptimizer
) -> type[Any]:
    """A class like those of the package, whose signature has the hyperparameters."""
    kinds = inspect.Parameter
    named = [kinds(each, kinds.POSITIONAL_OR_KEYWORD) for each in ("self", "params")]
    hyper = [kinds(n, kinds.POSITIONAL_OR_KEYWORD, default=value) for n, value in defaults.items()]
    signature = inspect.Signature([*named, *hyper, kinds("common", kinds.VAR_KEYWORD)])

    def make(self: Any, params: Any, *values: Any, **given: Any) -> None:
        bound = signature.bind(self, params, *values, **given)
        bound.apply_defaults()
        hyper = {each: bound.arguments[each] for each in defaults}
        base.__init__(self, params, method, hyper, **bound.arguments["common"])

    make.__signature__ = signature  # type: ignore[attr-defined]
    last = method.phases[-1].fn
    content = {
        "__init__": make,
        "__doc__": inspect.getdoc(last) or f"The method {name}.",
        "__module__": getattr(last, "__module__", __name__),
    }
    title = "".join(part[:1].upper() + part[1:] for part in re.split(r"[-_.]", name))
    return type(title, (base,), content)


def _digest(method: Method) -> str:
    """16 hex digits of what a method computes: not of comments, layout or default values."""
    facts = {
        "rules": describe(method),
        "states": sorted(method.states),
        "decays": dict(method.decays),
        "starts": sorted(method.starts_as_weight),
        "reduce": [phase.reduce for phase in method.phases],
        "hyper": sorted(method.hyper),
        "power": method.power,
    }
    if method.period is not None:
        facts["period"] = method.period
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
