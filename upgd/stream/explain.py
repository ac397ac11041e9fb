"""Which inputs and hidden units carry utility now."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd.pages import alike, as_table, grouped
from upgd.stream.values import Name

if TYPE_CHECKING:
    from upgd.stream.committee import Core
    from upgd.stream.learner import StreamLearner
    from upgd.stream.members import Member

Utilities = NDArray[np.float64]
NEGLIGIBLE = 1e-6
"""A weight with at most this share of its network's largest utility is unused."""
MOST = 20_000
"""Answers that are computed to measure what the loss would be without an input."""


class Shares(NamedTuple):
    """Shares of a layer's weights, biases included, by their utility."""

    useful: float  # positive: without the weight, the loss would be larger
    unused: float  # of no account beside the network's largest; see NEGLIGIBLE
    harmful: float  # negative


@dataclass(frozen=True)
class NetworkUtility:
    """One network of a learner.

    Attributes:
        name: Its optimizer and its units per layer.
        weight: Of its answers in the mixture.
        inputs: The utility of each column; None if there are none, as with plain gradient descent.
        units: Of each hidden layer, the utilities of its units.
        layers: Of each layer, which shares of its weights are useful.
    """

    name: str
    weight: float
    inputs: Utilities | None = None
    units: tuple[Utilities, ...] = ()
    layers: tuple[Shares, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """Which inputs and hidden units carry utility.

    The utility of an input is ``-x·∂L/∂x``, averaged over about the last hundred samples (as the
    optimizer's ``beta_utility`` says): to first order, how much the loss L would grow if the input
    always were zero, which is its mean where inputs are normalised. That of a hidden unit is the
    same of its output. Networks count as much as their answers do in the mixture; those that keep
    no utility per weight are left out. Where a network has found a minimum, the gradient and so all
    utilities are zero on average, and what remains is noise.

    So the loss itself is measured, too: of the newest samples, answered by the whole mixture, with
    a feature's values set to zero.

    Attributes:
        samples: How many were learned so far.
        growth: How much larger the mean loss of the newest samples is without a feature, the
            largest first: the cross entropy, or the squared error of scaled targets. Empty for a
            learner that was loaded, until it has learned again.
        features: The utility of each feature, the largest first; that of a feature of strings is
            the sum of its columns'.
        inputs: The utility of each column, the largest first.
        networks: Each network's own.
        top: How many inputs are shown.
    """

    samples: int
    growth: dict[Name, float]
    features: dict[Name, float]
    inputs: dict[Name, float]
    networks: tuple[NetworkUtility, ...]
    top: int = 10

    @property
    def mixture(self) -> dict[str, float]:
        """The weight of each network's answers."""
        return {network.name: network.weight for network in self.networks}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, lists and dicts."""
        networks = []
        for each in self.networks:
            inputs = None if each.inputs is None else each.inputs.tolist()
            units = [layer.tolist() for layer in each.units]
            layers = [shares._asdict() for shares in each.layers]
            networks.append({**asdict(each), "inputs": inputs, "units": units, "layers": layers})
        plain = {"samples": self.samples, "growth": dict(self.growth)}
        plain |= {"features": dict(self.features), "inputs": dict(self.inputs)}
        return {**plain, "networks": networks}

    # ------------------------------------------------------------------------- showing
    def _tables(self) -> Iterable[tuple[str, Sequence[str], list[list[str]]]]:
        """Captions, headers and rows."""
        after = f"after {grouped(self.samples)} samples"
        names = list(dict.fromkeys([*self.growth, *self.features]))
        header: tuple[str, ...]
        if names:
            header = ("feature", "loss without it", "utility")
            yield f"Features {after}", header, self._shown(names, self.growth, self.features)
        if len(self.features) < len(self.inputs):
            header = ("column", "utility")
            yield f"Columns {after}", header, self._shown(list(self.inputs), self.inputs)
        header = ("network", "weight", "layer", "useful", "unused", "harmful", "best units")
        rows = [row for each in self.networks for row in self._rows_of(each)]
        yield (
            f"Networks {after}: their weights in the mixture, shares of useful weights",
            header,
            rows,
        )

    def _shown(self, names: list[Name], *found: dict[Name, float]) -> list[list[str]]:
        """The first names with their numbers."""
        some = names[: self.top]
        columns = [alike(*(values.get(name, math.nan) for name in some)) for values in found]
        rows = [[str(name), *row] for name, *row in zip(some, *columns, strict=True)]
        if left := len(names) - len(some):
            rows.append([f"({left} more)", *("" for _ in found)])
        return rows

    def _rows_of(self, network: NetworkUtility) -> list[list[str]]:
        first = [network.name, f"{network.weight:.3f}"]
        if network.inputs is None and not network.layers:
            return [[*first, "", "", "", "", "keeps no utilities"]]
        rows = []
        for number, shares in enumerate(network.layers):
            best = ""
            if number < len(network.units):
                units = network.units[number]
                chosen = np.argsort(-units, kind="stable")[:5]
                best = ", ".join(str(unit) for unit in chosen if units[unit] > 0)
            named = first if number == 0 else ["", ""]
            rows.append([*named, str(number + 1), *(f"{s:.0%}" for s in shares), best])
        return rows

    def __str__(self) -> str:
        return "\n\n".join(
            f"{caption}\n{_aligned([header, *rows])}" for caption, header, rows in self._tables()
        )

    def _repr_html_(self) -> str:
        return "\n".join(as_table(*table) for table in self._tables())


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


# -------------------------------------------------------------------------- measuring
def explain(learner: StreamLearner, top: int) -> Explanation:
    """See :meth:`StreamLearner.explain`."""
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise ValueError(f"top must be a positive integer, got {top!r}")
    committee, columns = learner.committee_, learner._columns
    assert committee is not None
    weights = committee.mixture.weights.tolist()
    members = zip(learner._members, committee.cores, weights, strict=True)
    networks = tuple(_network(*each) for each in members)
    known = [each.weight * each.inputs for each in networks if each.inputs is not None]
    inputs: dict[Name, float] = {}
    features: dict[Name, float] = {}
    if known:
        total = np.sum(known, 0).tolist()
        for name, feature, value in zip(columns.names, columns.features(), total, strict=True):
            inputs[name] = inputs.get(name, 0.0) + value
            features[feature] = features.get(feature, 0.0) + value
    return Explanation(
        learner.n_samples_seen_,
        _sorted(_growth(learner, features)),
        _sorted(features),
        _sorted(inputs),
        networks,
        top,
    )


def _growth(learner: StreamLearner, utilities: dict[Name, float]) -> dict[Name, float]:
    """How much the mean loss of the newest samples grows without each feature.

    Where there are many features, fewer samples; at most :data:`MOST`, those of most utility.
    """
    committee = learner.committee_
    assert committee is not None
    places: dict[Name, list[int]] = {}
    for place, feature in enumerate(learner._columns.features()):
        places.setdefault(feature, []).append(place)
    rows, targets = learner._recent.newest(max(1, MOST // len(places)), committee.shape[0])
    if not len(rows):
        return {}

    def loss() -> float:
        answers = committee.answer(rows)
        if learner._squared:
            return float(np.square(answers - targets).mean())
        return -float(answers[np.arange(len(rows)), targets].mean())

    before, found = loss(), {}
    most = sorted(places, key=lambda feature: -abs(utilities.get(feature, 0.0)))[:MOST]
    for feature in most:
        kept = rows[:, places[feature]]
        rows[:, places[feature]] = 0
        found[feature] = loss() - before
        rows[:, places[feature]] = kept
    return found


def _network(member: Member, core: Core, weight: float) -> NetworkUtility:
    hidden = member.hidden
    sizes = core.sizes if isinstance(hidden, tuple) else ("module",)
    if isinstance(hidden, tuple) and len(sizes) == 2:
        sizes = (core.sizes[0], *hidden, core.sizes[-1])
    name = f"{member.optimizer} {'-'.join(map(str, sizes))}"
    layers = core.utilities()
    if not layers:
        return NetworkUtility(name, weight)
    # What leads out of an input or a unit is a column of the layer that follows.
    out = [layer[:, :-1].sum(0, dtype=np.float64) for layer in layers]
    inputs = out[0] if len(out[0]) == core.sizes[0] else None
    follow = [len(layer) for layer in layers[:-1]] == [len(each) for each in out[1:]]
    least = NEGLIGIBLE * max(float(abs(layer).max()) for layer in layers)
    shares = tuple(_shares(layer, least) for layer in layers)
    return NetworkUtility(name, weight, inputs, tuple(out[1:]) if follow else (), shares)


def _shares(layer: NDArray[np.float32], least: float) -> Shares:
    useful, harmful = float((layer > least).mean()), float((layer < -least).mean())
    return Shares(useful, max(0.0, 1 - useful - harmful), harmful)


def _sorted(found: dict[Name, float]) -> dict[Name, float]:
    return dict(sorted(found.items(), key=lambda item: -item[1]))
