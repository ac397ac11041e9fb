"""Which inputs and units are called useful: against autograd, and on streams with a known truth."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.exceptions import NotFittedError
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from upgd.stream import Classifier, Regressor
from upgd.stream.explain import Explanation
from upgd.stream.recent import Recent

pytest.importorskip("numba")
BETA = 0.97


def plain_utilities(
    module: nn.Module, rows: NDArray[Any], targets: Tensor, squared: bool
) -> list[NDArray[np.float64]]:
    """-x·∂L/∂x of inputs and of hidden units, averaged with weights βᵏ of the k-th newest row."""
    module = module.double()
    found: list[list[Tensor]] = []
    for x, y in zip(torch.from_numpy(rows).double(), targets, strict=True):
        hidden: list[Tensor] = [x[None].requires_grad_()]
        for layer in module:  # type: ignore[attr-defined]
            hidden.append(layer(hidden[-1]))
        z = hidden[-1]
        loss = mse_loss(z, y[None].double()) if squared else cross_entropy(z, y[None])
        # What a linear layer reads: inputs, and outputs of activations.
        read = [h for h, layer in zip(hidden, module, strict=False) if isinstance(layer, nn.Linear)]  # type: ignore[arg-type]
        slopes = torch.autograd.grad(loss, read)
        found.append([-(h * slope)[0].detach() for h, slope in zip(read, slopes, strict=True)])
    age = torch.arange(len(found) - 1, -1, -1, dtype=torch.float64)
    share = BETA**age / (BETA**age).sum()
    return [(share @ torch.stack(each)).numpy() for each in zip(*found, strict=True)]


def check(found: Explanation, expected: list[NDArray[np.float64]]) -> None:
    inputs = [found.inputs[i] for i in range(len(expected[0]))]
    np.testing.assert_allclose(inputs, expected[0], rtol=1e-4, atol=1e-6)
    units = found.networks[0].units
    assert len(units) == len(expected) - 1 > 0
    for some, values in zip(units, expected[1:], strict=True):
        assert np.abs(values).max() > 1e-3
        np.testing.assert_allclose(some, values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["upgd", "ada-upgd"])
@pytest.mark.parametrize("squared", [False, True])
def test_utilities_are_those_of_autograd(method: str, squared: bool) -> None:
    """With step size 0 the network stays the same, so that all samples meet the same weights."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(420, 5))
    targets = rows[:, :2] @ random.normal(size=(2, 3))
    learner: Classifier | Regressor
    hyper = {"beta_utility": BETA}
    kind = Regressor if squared else Classifier
    learner = kind((9, 6), optimizer=method, hyper=hyper, normalize=False)
    learner.partial_fit(rows[:300], targets[:300] if squared else targets[:300].argmax(1))
    assert learner.committee_ is not None
    core = learner.committee_.cores[0]
    core.lr = 0.0
    core.forget_utilities()  # those of the time when it learned
    if isinstance(learner, Regressor):
        scaler = copy.deepcopy(learner._target_scaler)
        encoded = torch.from_numpy(scaler.learn(targets[300:]))
        learner.partial_fit(rows[300:], targets[300:])
    else:
        places = [learner.output_classes_.tolist().index(best) for best in targets[300:].argmax(1)]
        encoded = torch.tensor(places)
        learner.partial_fit(rows[300:], targets[300:].argmax(1))
    ((module, _),) = learner.to_torch()
    check(learner.explain(), plain_utilities(module, rows[300:], encoded, squared))


def test_utilities_of_a_module_are_those_of_autograd() -> None:
    random = np.random.default_rng(0)
    rows, labels = random.normal(size=(120, 5)), random.integers(0, 3, 120)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 6, bias=False), nn.Linear(6, 3))
    learner = Classifier(net, hyper={"lr": 0.0, "beta_utility": BETA}, normalize=False)
    learner.partial_fit(rows, labels, classes=[0, 1, 2])
    ((module, _),) = learner.to_torch()
    check(learner.explain(), plain_utilities(module, rows, torch.from_numpy(labels), False))


def changing(count: int, seed: int, squared: bool) -> Iterator[tuple[list[int], Any, Any]]:
    """Ten inputs, of which the first two matter, then two others; in pieces."""
    random = np.random.default_rng(seed)
    for matter in ([0, 1], [7, 8]):
        for _ in range(count // 250):
            rows = random.normal(size=(250, 10))
            score = rows[:, matter] @ [1.0, -1.0] + 0.3 * random.normal(size=250)
            yield matter, rows, 100 + 5 * score if squared else score > 0


@pytest.mark.parametrize("kind", [Classifier, Regressor])
@pytest.mark.parametrize("network", ["small", (32,)])
def test_the_inputs_that_matter_lead(kind: type[Classifier | Regressor], network: Any) -> None:
    """At any time: all other inputs leave the loss as it is."""
    learner = kind(network)
    for number, (matter, rows, targets) in enumerate(changing(3000, 0, kind is Regressor)):
        learner.partial_fit(rows, targets)
        if number % 12 >= 6:
            growth = learner.explain().growth
            assert set(list(growth)[:2]) == set(matter)
            others = [value for name, value in growth.items() if name not in matter]
            assert min(growth[matter[0]], growth[matter[1]]) > 5 * max(map(abs, others))


@pytest.mark.parametrize("kind", [Classifier, Regressor])
def test_utilities_that_are_averaged_for_long_lead_too(kind: type[Classifier | Regressor]) -> None:
    learner = kind((32,), hyper={"beta_utility": 0.999, "sigma": 0.0})
    for number, (matter, rows, targets) in enumerate(changing(6000, 1, kind is Regressor)):
        learner.partial_fit(rows, targets)
        if number % 24 == 23:
            assert set(list(learner.explain().inputs)[:2]) == set(matter)


def strings() -> Classifier:
    random = np.random.default_rng(0)
    learner = Classifier("small")
    for _ in range(600):
        colour = str(random.choice(["red", "green", "blue"]))
        x = {"colour": colour, "size": random.normal(), "<b>": random.normal()}
        learner.learn_one(x, "warm" if colour == "red" else "cold")
    return learner


def test_columns_of_a_feature_are_summed() -> None:
    found = strings().explain()
    assert set(found.features) == set(found.growth) == {"colour", "size", "<b>"}
    of_colour = [value for name, value in found.inputs.items() if str(name).startswith("colour=")]
    assert len(of_colour) == 3
    assert found.features["colour"] == pytest.approx(sum(of_colour))
    assert next(iter(found.growth)) == "colour"


def test_members_count_as_much_as_in_the_mixture() -> None:
    learner = strings()
    found = learner.explain()
    assert found.mixture == {each.name: each.weight for each in found.networks}
    for member, network in zip(learner._members, found.networks, strict=True):
        assert (network.inputs is None) == (member.optimizer in ("sgd", "self-tuned-sgd"))
    known = [each for each in found.networks if each.inputs is not None]
    total = sum(each.weight * each.inputs for each in known)  # type: ignore[operator,misc]
    np.testing.assert_allclose(sorted(found.inputs.values()), np.sort(total))


def test_shares_of_weights_add_up_and_know_dead_inputs() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(500, 6))
    rows[:, 3:] = 0  # no weight of theirs was ever used
    found = Classifier((8,)).partial_fit(rows, rows[:, 0] > 0).explain()
    for layer in found.networks[0].layers:
        assert sum(layer) == pytest.approx(1)
    assert found.networks[0].layers[0].unused >= 3 / 7
    assert [found.inputs[i] for i in (3, 4, 5)] == [found.growth[i] for i in (3, 4, 5)] == [0, 0, 0]


def test_an_explanation_can_be_read() -> None:
    learner = strings()
    found = learner.explain(top=2)
    text = str(found)
    assert "after 600 samples" in text.replace("\N{NARROW NO-BREAK SPACE}", "")
    assert "colour" in text
    assert "(1 more)" in text
    assert "keeps no utilities" in text
    page = learner.explain()._repr_html_()
    assert page.count("<table") == page.count("</table>") == 3
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["samples"] == 600
    assert plain["features"] == found.features
    assert len(plain["networks"]) == len(found.networks)


def test_looking_changes_nothing() -> None:
    one, other = strings(), strings()
    for _ in range(3):
        one.explain()
    x = {"colour": "red", "size": 0.5}
    for learner in (one, other):
        learner.learn_one(x, "warm")
    assert one.predict_proba_one(x) == other.predict_proba_one(x)


def test_learners_without_utilities_and_without_samples(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(300, 4))
    learner = Classifier((8,), optimizer="adam").partial_fit(rows, rows[:, 2] > 0)
    found = learner.explain()
    assert found.inputs == {}
    assert next(iter(found.growth)) == 2
    assert "keeps no utilities" in str(found)
    learner.save(tmp_path / "learner")
    loaded = Classifier.load(tmp_path / "learner")
    assert loaded.explain().growth == {}
    assert str(loaded.explain())
    loaded.partial_fit(rows[:100], rows[:100, 2] > 0)
    assert next(iter(loaded.explain().growth)) == 2
    with pytest.raises(NotFittedError):
        Classifier().explain()
    with pytest.raises(ValueError, match="top must be a positive integer, got 0"):
        learner.explain(0)


def test_the_newest_samples_are_kept_however_they_come() -> None:
    random = np.random.default_rng(0)
    rows, targets = random.normal(size=(100, 3)).astype(np.float32), np.arange(100)
    for pieces in ([100], [1] * 100, [30, 1, 1, 60, 8], [3, 97]):
        recent = Recent(20)
        begin = 0
        for count in pieces:
            recent.add(rows[begin : begin + count], targets[begin : begin + count])
            begin += count
        for wanted in (1, 7, 20):
            found, which = recent.newest(wanted, 3)
            np.testing.assert_array_equal(found, rows[-wanted:])
            np.testing.assert_array_equal(which, targets[-wanted:])
        wide, _ = recent.newest(5, 4)
        np.testing.assert_array_equal(wide[:, 3], 0)
    assert len(Recent(20).newest(5, 3)[0]) == 0
