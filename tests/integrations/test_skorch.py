"""skorch: the optimizer is a class and keyword arguments of the net."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import upgd
from tests.integrations import plain

skorch = pytest.importorskip("skorch", reason="needs the extra integrations")
pytest.importorskip("sklearn", reason="skorch needs scikit-learn")


def net(optimizer: Any, epochs: int, **arguments: Any) -> Any:
    return skorch.NeuralNetClassifier(
        plain.network,
        criterion=nn.CrossEntropyLoss,
        optimizer=optimizer,
        max_epochs=epochs,
        batch_size=plain.BATCH,
        iterator_train__shuffle=False,
        train_split=None,
        verbose=0,
        **arguments,
    )


def named(options: dict[str, Any]) -> dict[str, Any]:
    return {f"optimizer__{name}": value for name, value in options.items()}


@plain.choices
def test_fit_is_the_plain_loop(choice: tuple[Any, dict[str, Any]]) -> None:
    """With a schedule and clipped gradients, as skorch has them."""
    optimizer, options = choice
    clip = skorch.callbacks.GradientNormClipping(0.5)
    decay = skorch.callbacks.LRScheduler(
        torch.optim.lr_scheduler.StepLR, step_size=2, step_every="batch"
    )
    x, y = plain.samples(6 * plain.BATCH)
    fitted = net(optimizer, 2, callbacks=[("clip", clip), ("decay", decay)], **named(options)).fit(
        x, y
    )

    model = plain.network()
    opt = optimizer(model.parameters(), **options)
    schedule = torch.optim.lr_scheduler.StepLR(opt, step_size=2)
    plain.train(model, opt, plain.batches(6) * 2, schedule=schedule, clip=0.5)
    plain.assert_same(fitted.module_, model)


@plain.choices
def test_saved_and_loaded_is_never_stopped(
    choice: tuple[Any, dict[str, Any]], tmp_path: Path
) -> None:
    optimizer, options = choice
    x, y = plain.samples(5 * plain.BATCH)
    files = {"f_params": tmp_path / "weights.pt", "f_optimizer": tmp_path / "optimizer.pt"}
    first = net(optimizer, 2, **named(options)).fit(x, y)
    first.save_params(**files)
    second = net(optimizer, 1, **named(options)).initialize()
    second.load_params(**files)
    second.partial_fit(x, y)

    whole = net(optimizer, 3, **named(options)).fit(x, y)
    plain.assert_same(second.module_, whole.module_)


def test_groups_by_name() -> None:
    """``optimizer__param_groups`` spares a layer the noise: at σ = 0 this is one loop."""
    x, y = plain.samples(3 * plain.BATCH)
    groups = [("4.*", {"sigma": 0.0, "protect": False})]
    options = plain.CHOICES["UPGD"][1]
    fitted = net(upgd.UPGD, 1, optimizer__param_groups=groups, **named(options)).fit(x, y)

    model = plain.network()
    spared = {"params": list(model[4].parameters()), "sigma": 0.0, "protect": False}
    others = [*model[0].parameters(), *model[2].parameters()]
    opt = upgd.UPGD([spared, {"params": others}], **options)
    plain.train(model, opt, plain.batches(3))
    plain.assert_same(fitted.module_, model)


def test_features_are_watched_after_initialize() -> None:
    x, y = plain.samples(4 * plain.BATCH)
    fitted = net(upgd.FeatureUPGD, 1, **named(plain.FEATURES)).initialize()
    fitted.optimizer_.watch(fitted.module_)
    fitted.partial_fit(x, y)

    model = plain.network()
    opt = upgd.FeatureUPGD(model.parameters(), upgd.Features(model), **plain.FEATURES)
    plain.train(model, opt, plain.batches(4))
    plain.assert_same(fitted.module_, model)


def test_grid_search() -> None:
    """scikit-learn clones nets and sets hyperparameters by name."""
    from sklearn.model_selection import GridSearchCV

    x, y = plain.samples(24)
    grid = {"optimizer__sigma": [0.0, 0.1], "lr": [0.01, 0.1]}
    search = GridSearchCV(net(upgd.UPGD, 1), grid, cv=2, error_score="raise")
    search.fit(x.numpy(), y.numpy())
    best = search.best_estimator_.optimizer_.param_groups[0]
    assert best["sigma"] in (0.0, 0.1)
    assert {p["lr"] for p in search.cv_results_["params"]} == {0.01, 0.1}
    assert best["lr"] == search.best_params_["lr"]
