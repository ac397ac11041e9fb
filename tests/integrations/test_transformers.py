"""Hugging Face transformers: ``Trainer`` makes the optimizer from a class, or is given one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import upgd
from tests.integrations import plain

transformers = pytest.importorskip("transformers", reason="needs the extra integrations")
pytest.importorskip("accelerate", reason="Trainer needs accelerate")

STEPS, TOKENS = 6, 12


def model() -> Any:
    """A GPT-2 of one block, always with the same weights."""
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, n_positions=TOKENS, vocab_size=11,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return transformers.GPT2LMHeadModel(config)


class Text(IterableDataset[dict[str, torch.Tensor]]):
    """Always the same sequences in the same order, without end."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(2)
        while True:
            tokens = torch.randint(11, (TOKENS,), generator=generator)
            labels = tokens.clone()
            labels[0] = -100  # nothing predicts it, and Trainer divides by the number of labels
            yield {"input_ids": tokens, "labels": labels}


def trainer(path: Path, steps: int = STEPS, net: Any = None, **more: Any) -> Any:
    keys = ("weight_decay", "save_steps")
    arguments = transformers.TrainingArguments(
        output_dir=str(path),
        max_steps=steps,
        learning_rate=0.01,
        warmup_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **{key: more.pop(key) for key in keys if key in more},
    )
    return transformers.Trainer(net or model(), arguments, train_dataset=Text(), **more)


def plain_loop(net: Any, opt: Any, schedule: Any, steps: int = STEPS) -> None:
    data = iter(Text())
    for _ in range(steps):
        opt.zero_grad()
        batches = [[next(data)["input_ids"] for _ in range(2)] for _ in range(2)]
        for tokens in map(torch.stack, batches):
            out = net(input_ids=tokens).logits[:, :-1]
            loss = nn.functional.cross_entropy(
                out.reshape(-1, 11), tokens[:, 1:].reshape(-1), reduction="sum"
            )
            (loss / (2 * 2 * (TOKENS - 1))).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()
        schedule.step()


def assert_close(net: nn.Module, other: nn.Module, **tolerance: float) -> None:
    start = model().state_dict()
    for name, weight in net.state_dict().items():
        torch.testing.assert_close(weight, other.state_dict()[name], **tolerance)
    assert any(not torch.equal(w, start[name]) for name, w in net.state_dict().items())


@plain.choices
def test_train_is_the_plain_loop(choice: tuple[Any, dict[str, Any]], tmp_path: Path) -> None:
    """A class and its arguments: warm-up, accumulated and clipped gradients, decay in one group."""
    optimizer, options = choice
    runs = trainer(tmp_path, optimizer_cls_and_kwargs=choice, weight_decay=0.1)
    runs.train()

    net = model()
    names = runs.get_decay_parameter_names(net)
    split: list[list[Any]] = [[], []]
    for name, p in net.named_parameters():
        split[name not in names].append(p)
    groups = [{"params": split[0]}, {"params": split[1]}]
    if "weight_decay" in optimizer(net.parameters()).defaults:
        groups = [groups[0] | {"weight_decay": 0.1}, groups[1] | {"weight_decay": 0.0}]
    opt = optimizer(groups, **options)
    schedule = transformers.get_linear_schedule_with_warmup(opt, 2, STEPS)
    plain_loop(net, opt, schedule)
    assert_close(runs.model, net, rtol=1e-5, atol=1e-6)
    assert [group["weight_decay"] for group in runs.optimizer.optimizer.param_groups] == [0.1, 0.0]


@plain.choices
def test_resumed_is_never_stopped(choice: tuple[Any, dict[str, Any]], tmp_path: Path) -> None:
    """From the checkpoint in the middle."""
    more = {"optimizer_cls_and_kwargs": choice, "weight_decay": 0.1, "save_steps": STEPS // 2}
    whole = trainer(tmp_path, **more)
    whole.train()
    resumed = trainer(tmp_path, **more)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert resumed.state.global_step == STEPS
    assert_close(resumed.model, whole.model, rtol=0, atol=0)


def test_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    """``optimizers=``: the same as by class, here without decay."""
    optimizer, options = plain.CHOICES["AdaUPGD"]
    net = model()
    opt = optimizer(net.parameters(), weight_decay=0.0, **options)
    schedule = torch.optim.lr_scheduler.ConstantLR(opt, 0.5, 2)
    trainer(tmp_path, net=net, optimizers=(opt, schedule)).train()

    other = model()
    opt = optimizer(other.parameters(), weight_decay=0.0, **options)
    plain_loop(other, opt, torch.optim.lr_scheduler.ConstantLR(opt, 0.5, 2))
    assert_close(net, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layers", [False, True])
def test_the_callback_logs_and_changes_nothing(layers: bool, tmp_path: Path) -> None:
    from upgd.integrations.transformers import MonitorCallback

    more = {"optimizer_cls_and_kwargs": plain.CHOICES["AdaUPGD"], "save_steps": 4}
    runs, other = trainer(tmp_path, **more), trainer(tmp_path / "other", **more)
    callback = MonitorCallback(runs, every=2, layers=layers)
    runs.add_callback(callback)
    runs.train()
    other.train()
    assert_close(runs.model, other.model, rtol=0, atol=0)
    rows = [row for row in runs.state.log_history if "monitor/weight_norm" in row]
    assert [row["step"] for row in rows] == [2, 4, 6]
    newest = callback.monitor.scalars()
    logged = {n: x for n, x in newest.items() if layers or "/" not in n}
    assert {n for n in newest if "/" in n}
    assert {n: x for n, x in rows[-1].items() if n.startswith("monitor/")} == {
        f"monitor/{n}": x for n, x in logged.items()
    }

    resumed = trainer(tmp_path, **more)
    resumed.add_callback(MonitorCallback(resumed, every=2))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert [r["step"] for r in resumed.state.log_history if "monitor/eta" in r] == [2, 4, 6]


def test_features(tmp_path: Path) -> None:
    """Only parameters arrive where a class is chosen: make the optimizer early, then watch."""
    options = plain.FEATURES | {"lr": 0.02}
    runs = trainer(tmp_path, optimizer_cls_and_kwargs=(upgd.FeatureUPGD, options))
    runs.create_optimizer()
    runs.optimizer.watch(runs.model)
    runs.train()

    net = model()
    names = runs.get_decay_parameter_names(net)
    split: list[list[Any]] = [[], []]
    for name, p in net.named_parameters():
        split[name not in names].append(p)
    opt = upgd.FeatureUPGD([{"params": each} for each in split], upgd.Features(net), **options)
    plain_loop(net, opt, transformers.get_linear_schedule_with_warmup(opt, 2, STEPS))
    assert_close(runs.model, net, rtol=1e-5, atol=1e-6)
    assert opt.utility(net.transformer.h[0].mlp.c_fc.weight).shape == (32,)
