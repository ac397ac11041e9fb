"""PyTorch-Ignite: a trainer is made of a model, an optimizer and a loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations import plain

pytest.importorskip("ignite", reason="needs the extra integrations")
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import LRScheduler


@plain.choices
def test_stopped_and_resumed_is_the_plain_loop(choice: tuple[Any, dict[str, Any]]) -> None:
    """Engine, weights, optimizer and schedule are saved by their state dicts after one epoch."""
    optimizer, options = choice

    def objects() -> dict[str, Any]:
        model = plain.network()
        opt = optimizer(model.parameters(), **options)
        trainer = create_supervised_trainer(model, opt, nn.functional.cross_entropy)
        schedule = LRScheduler(torch.optim.lr_scheduler.ExponentialLR(opt, 0.9))
        trainer.add_event_handler(Events.ITERATION_COMPLETED, schedule)
        return {"trainer": trainer, "model": model, "opt": opt, "schedule": schedule}

    data = plain.batches(5)
    first, second = objects(), objects()
    first["trainer"].run(data, max_epochs=1)
    for name, each in second.items():
        each.load_state_dict(first[name].state_dict())
    second["trainer"].run(data, max_epochs=2)
    assert second["trainer"].state.iteration == 10

    model = plain.network()
    opt = optimizer(model.parameters(), **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    plain.train(model, opt, data + data, schedule=schedule)
    plain.assert_same(second["model"], model)
