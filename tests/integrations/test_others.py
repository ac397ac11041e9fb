"""What `make test` does not install (torchrl, Hydra, deep-river), and PyTorch's own checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint

import upgd
from tests.integrations import plain


@plain.choices
def test_distributed_checkpoints_of_one_process(
    choice: tuple[Any, dict[str, Any]], tmp_path: Path
) -> None:
    """DCP saves the optimizer by names of parameters."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    optimizer, options = choice
    data = plain.batches(6)

    def both() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = plain.network()
        return model, optimizer(model.parameters(), **options)

    def state(model: nn.Module, opt: torch.optim.Optimizer) -> dict[str, Any]:
        return dict(zip(("model", "opt"), get_state_dict(model, opt), strict=True))

    first, opt = both()
    plain.train(first, opt, data[:3])
    checkpoint.save(state(first, opt), checkpoint_id=tmp_path, no_dist=True)
    second, opt = both()
    saved = state(second, opt)
    checkpoint.load(saved, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(second, opt, model_state_dict=saved["model"], optim_state_dict=saved["opt"])
    plain.train(second, opt, data[3:])

    whole, opt = both()
    plain.train(whole, opt, data)
    plain.assert_same(second, whole)


def test_hydra() -> None:
    """``instantiate``: a partial in a config, whose lists are ListConfig."""
    hydra = pytest.importorskip("hydra", reason="needs hydra-core")
    from omegaconf import OmegaConf

    settings = {"lr": 0.01, "betas": [0.8, 0.99], "eps": 1e-5, "seed": 3}
    config = OmegaConf.create({"_target_": "upgd.AdaUPGD", "_partial_": True, **settings})
    model, other = plain.network(), plain.network()
    plain.train(model, hydra.utils.instantiate(config)(model.parameters()), plain.batches(3))
    plain.train(other, upgd.AdaUPGD(other.parameters(), **settings), plain.batches(3))
    plain.assert_same(model, other)


@pytest.mark.slow
def test_torchrl() -> None:
    """A loss module; its parameters are functional ones, its targets are not trained."""
    pytest.importorskip("torchrl", reason="needs torchrl")
    from tensordict import TensorDict
    from torchrl.data import OneHot
    from torchrl.modules import QValueActor
    from torchrl.objectives import DQNLoss

    data, (x, y) = TensorDict(batch_size=[8]), plain.samples(8)
    data["observation"], data["next", "observation"] = x, x.flip(0)
    data["action"] = nn.functional.one_hot(y, plain.CLASSES)
    data["next", "reward"] = torch.ones(8, 1)
    data["next", "done"] = data["next", "terminated"] = torch.zeros(8, 1, dtype=torch.bool)

    model = plain.network()
    actor = QValueActor(model, in_keys=["observation"], spec=OneHot(plain.CLASSES))
    loss = DQNLoss(actor, delay_value=True)
    loss.make_value_estimator(gamma=0.9)
    opt = upgd.UPGD(loss.parameters(), **plain.CHOICES["UPGD"][1])
    other, target = plain.network(), plain.network()
    plain_opt = upgd.UPGD(other.parameters(), **plain.CHOICES["UPGD"][1])
    for _ in range(4):
        opt.zero_grad()
        loss(data)["loss"].backward()
        opt.step()

        plain_opt.zero_grad()
        with torch.no_grad():
            goal = 1 + 0.9 * target(x.flip(0)).amax(1)
        nn.functional.mse_loss(other(x).gather(1, y[:, None])[:, 0], goal).backward()
        plain_opt.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    assert not torch.equal(model[0].weight, target[0].weight)


class Net(nn.Module):
    """A class that deep-river can make again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = plain.network()

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


@pytest.mark.slow
def test_deep_river(tmp_path: Path) -> None:
    """One sample at a time, saved and loaded in between."""
    pytest.importorskip("deep_river", reason="needs deep-river", exc_type=ImportError)
    from deep_river.classification import Classifier

    x, y = plain.samples(12)[0], torch.arange(12) % plain.CLASSES  # it numbers classes as they come
    rows = [dict(zip("abcdef", row.tolist(), strict=True)) for row in x]
    model = Classifier(Net(), "cross_entropy", upgd.UPGD, lr=0.05, seed=3)
    seed = model.optimizer.param_groups[0]["seed"]
    for i, (row, label) in enumerate(zip(rows, y.tolist(), strict=True)):
        model.learn_one(row, label)
        if i == 5:
            model.save(tmp_path / "model.pkl")
            model = Classifier.load(tmp_path / "model.pkl")

    other = plain.network()
    opt = upgd.UPGD(other.parameters(), lr=0.05, seed=seed)
    plain.train(other, opt, list(zip(x.split(1), y.split(1), strict=True)))
    plain.assert_same(model.module.layers, other)
