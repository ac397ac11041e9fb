"""The eager engine: one learner, any module, one sample after the other. The reference.

A step in order: predict, score, differentiate, update, score the same sample again.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from upgd.engine.dense import Learner
from upgd.engine.general import zero_outputs
from upgd.engine.measuring import is_measured
from upgd.engine.packing import (
    Random,
    UnpackableError,
    beside,
    from_before,
    pack,
    put_beside,
    unpack,
)
from upgd.engine.precision import full_float32
from upgd.metrics import UTILITIES, Meter, sample_plasticity
from upgd.monitor.measures import histogram, mean_effective_rank, norms, pooled_share
from upgd.networks import OnlineNorm
from upgd.optim.base import RuleOptimizer
from upgd.optim.convention import ConventionWarning
from upgd.optim.feature_upgd import FeatureUPGD
from upgd.optim.noise import PhiloxNoise
from upgd.optim.upgd import UtilityOptimizer
from upgd.text import error_line

RANK_WINDOWS = 10  # ranks are taken in every so many windows


@dataclass(frozen=True)
class Setting:
    """How a learner is run; the defaults are the paper's.

    Attributes:
        method: A name of the registry.
        hyper: Its hyperparameters; missing ones take the registry's defaults.
        seed: Determines perturbations and, at restarts, fresh weights.
        window: Samples per window of the metrics.
        batch: Samples per step.
        restart: Begin every task with a fresh network and optimizer.
        held_out: Held-out samples to predict after each task.
        stride: One of so many steps is measured (:mod:`upgd.engine.measuring`); 0 for none.
            Weights are measured at the end of each window.
    """

    method: str
    hyper: Mapping[str, float]
    seed: int
    window: int
    batch: int = 1
    restart: bool = False
    held_out: int = 0
    stride: int = 0

    def measures(self, step: int) -> bool:
        """Whether diagnostics are taken at this step."""
        return is_measured(step, self.stride)

    def weighs(self, step: int) -> bool:
        """Whether weights are measured after this step: it ends a window."""
        return self.stride > 0 and self.next_weighing(step) == step

    def next_weighing(self, step: int) -> int:
        """The first step from `step` on that ends a window."""
        steps = self.window // self.batch
        return (step // steps + 1) * steps - 1

    def ranks(self, step: int) -> bool:
        """Whether ranks are measured, too, which takes far longer: in every tenth window."""
        return self.weighs(step) and step * self.batch // self.window % RANK_WINDOWS == 0


class Divergence(ArithmeticError):  # noqa: N818 - it is a result, not a mistake
    """The loss or a gradient is not finite; the run ends with this step."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"diverged at step {step}: {what}")
        self.step = step


class LearnerError(RuntimeError):
    """A user's optimizer or network raised something; the run fails."""


class EagerRun:
    """One learner on one stream, step by step, resumable bit for bit.

    PyTorch's global generator is the run's own while it learns: seeded by its seed, saved with its
    state, and the caller's again afterwards. So an optimizer or a network may draw from it.

    Args:
        stream: Has `loss`, `task_length` and ``at(step, batch)``, a function of the step.
        build: Makes the network from a seed and the number of a task.
        setting: How it learns and what is measured.
        device: Where it runs.

    Example:
        >>> from upgd.networks import mlp
        >>> class Coin:
        ...     loss, task_length = "cross_entropy", 10
        ...     def at(self, step, batch=1):
        ...         return np.full((batch, 2), step % 2, np.float32), np.full(batch, step % 2)
        >>> setting = Setting("upgd", {}, seed=0, window=10)
        >>> run = EagerRun(Coin(), lambda seed, task: mlp([2, 4, 2]), setting)
        >>> run.advance(20)
        >>> len(run.meter.series("accuracy"))
        2
    """

    def __init__(
        self,
        stream: Any,
        build: Callable[[int, int], nn.Module],
        setting: Setting,
        device: str | torch.device = "cpu",
    ) -> None:
        for name, least in (("window", 1), ("batch", 1), ("held_out", 0), ("stride", 0)):
            if getattr(setting, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(setting, name)}")
        if setting.window % setting.batch:
            wrong = f"a window of {setting.window} samples is not a whole number of batches"
            raise ValueError(f"{wrong} of {setting.batch}")
        if (setting.restart or setting.held_out) and stream.task_length is None:
            raise ValueError("restarts and held-out evaluation need a stream that has tasks")
        if setting.held_out and not hasattr(stream, "held_out"):
            raise ValueError("this stream has no held-out samples; leave held_out out")
        if setting.held_out:
            stream.held_out(0, setting.held_out)  # raises now, not after a task, if too many
        self.stream = stream
        self.setting = setting
        self.device = torch.device(device)
        self.step = 0
        self.meter = Meter(setting.window)
        self.offline: list[float] = []
        self._build = build
        self._random = Random(setting.seed, self.device)
        with self._random.in_place():
            self._begin(0)

    def _begin(self, task: int) -> None:
        """A fresh network and optimizer."""
        self.model = self._build(self.setting.seed, task).to(self.device)
        learner = Learner(self.setting.method, self.setting.hyper, self.setting.seed)
        self._foreign, hyper = bool(learner.row.source), learner.all_hyper()
        noise = PhiloxNoise([tuple(p.shape) for p in self.model.parameters()], self.step)
        with self._named("making the optimizer"):
            self.optimizer: Optimizer = learner.row.make(
                self.model, **hyper, seed=self.setting.seed, noise=noise
            )
        self._attributes()  # what a checkpoint could not keep is said now

    # --------------------------------------------------------------------- learning
    @full_float32()
    def advance(self, steps: int) -> None:
        """Learn from the next `steps` batches.

        Raises:
            Divergence: The loss or a gradient is not finite; the learner stands before that step.
        """
        with self._random.in_place():
            for _ in range(steps):
                self._learn()

    def _learn(self) -> None:
        setting, step = self.setting, self.step
        task_step = self._steps_per_task()
        if setting.restart and task_step and step and step % task_step == 0:
            self._begin(step // task_step)
        x, y = self._tensors(self.stream.at(step, setting.batch))
        measured = setting.measures(step)
        with zero_outputs(self.model, measured) as zeros, self._named("the network"):
            output = self.model(x)
        losses = self._losses(output, y)
        if not bool(losses.isfinite().all()):
            raise Divergence(step, "the loss is not finite")
        self._differentiate(losses.mean())
        values: dict[str, float] = {}
        if measured:
            gradient = norms(p.grad for p in self.model.parameters() if p.grad is not None)
            values.update(gradient_l0=gradient.l0, gradient_l1=gradient.l1, gradient_l2=gradient.l2)
            values["zero_activations"] = float(pooled_share(zeros)) if zeros else np.nan
        try:
            with self._named("step()"):
                self.optimizer.step()
        except FloatingPointError as error:
            raise Divergence(step, str(error)) from error
        except RuntimeError as error:
            if "without overflow" not in str(error):
                raise
            raise Divergence(step, "a factor of the update leaves the weights' range") from error
        before, after = losses.detach().cpu().numpy(), self._look_again(x, y).cpu().numpy()
        if setting.weighs(step):
            weights = norms(self.model.parameters())
            values.update(weight_l1=weights.l1, weight_l2=weights.l2)
            values |= self._utilities()
            if setting.ranks(step):
                values["effective_rank"] = mean_effective_rank(self.model)
        sums = {"loss": float(before.sum(dtype=np.float64))}
        sums["plasticity"] = float(sample_plasticity(before, after).sum())
        if self.stream.loss == "cross_entropy":
            sums["accuracy"] = float((output.argmax(1) == y).sum())
        # Diagnostics belong to the step: they count for each of its samples.
        self.meter.add(setting.batch, **sums, **{k: setting.batch * v for k, v in values.items()})
        self.step += 1
        if setting.held_out and task_step and self.step % task_step == 0:
            self.offline.append(self._predict_held_out(step // task_step))

    def _utilities(self) -> dict[str, float]:
        """The histogram of the weights' scaled utilities, where they have any."""
        opt = self.optimizer
        if not isinstance(opt, UtilityOptimizer) or isinstance(opt, FeatureUPGD):
            return {}
        scaled = torch.cat([u.flatten() for u in opt.scaled_utilities().values()])
        return dict(zip(UTILITIES, histogram(scaled).tolist(), strict=True))

    def _differentiate(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        backward = getattr(self.optimizer, "backward", None)
        with self._named("the backward pass"):
            if callable(backward):  # it may read more than gradients
                backward(loss)
            else:
                loss.backward()

    @torch.no_grad()
    def _look_again(self, x: Tensor, y: Tensor) -> Tensor:
        """The losses of the same samples after the update; running statistics count them once."""
        kept = [buffer.clone() for buffer in self.model.buffers()]
        online = [m for m in self.model.modules() if isinstance(m, OnlineNorm) and m.training]
        for norm in online:  # has counted the sample, which is to go in as it did before
            norm.eval()
        losses = self._losses(self.model(x), y)
        for norm in online:
            norm.train()
        for buffer, before in zip(self.model.buffers(), kept, strict=True):
            buffer.copy_(before)
        return losses

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Say in one line where a user's optimizer or network went wrong."""
        try:
            yield
        except (ArithmeticError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not self._foreign and isinstance(error, ValueError | RuntimeError):
                raise  # our own words
            where = f"{self.setting.method}, {what} at step {self.step}"
            raise LearnerError(f"{where}: {error_line(error)}") from error

    def _losses(self, output: Tensor, y: Tensor) -> Tensor:
        if self.stream.loss == "cross_entropy":
            return F.cross_entropy(output, y, reduction="none")
        return F.mse_loss(output, y, reduction="none").flatten(1).mean(1)

    def _tensors(self, sample: Any) -> tuple[Tensor, Tensor]:
        x, y = (torch.from_numpy(np.ascontiguousarray(part)) for part in sample)
        return x.to(self.device), y.to(self.device)

    def _steps_per_task(self) -> int | None:
        length = self.stream.task_length
        return None if length is None else max(1, length // self.setting.batch)

    @torch.no_grad()
    def _predict_held_out(self, task: int) -> float:
        x, y = self._tensors(self.stream.held_out(task, self.setting.held_out))
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            return float((self.model(x).argmax(1) == y).double().mean())
        finally:
            for module, training in modes:
                module.training = training

    # -------------------------------------------------------------------- checkpoints
    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """The complete state: arrays, and values for JSON.

        Raises:
            UnpackableError: The optimizer keeps something that is neither.
        """
        arrays: dict[str, NDArray[Any]] = {}
        params = list(self.model.parameters())
        saved = self.optimizer.state_dict()
        meta = {
            "step": self.step,
            "model": pack(dict(self.model.state_dict()), "model", arrays),
            "beside": pack(beside(self.model), "beside", arrays, params),
            "optimizer": pack(saved["state"], "optimizer", arrays, params),
            "groups": pack(saved["param_groups"], "groups", arrays),
            "rest": pack({k: v for k, v in saved.items() if k not in _USUAL}, "rest", arrays),
            "attributes": pack(self._attributes(), "attributes", arrays, params),
            "random": pack(self._random.states, "random", arrays),
            "meter": {k: getattr(self.meter, k) for k in ("count", "windows", "sums", "counts")},
            "offline": self.offline,
        }
        for name, values in self.meter.closed.items():
            arrays[f"meter/{name}"] = np.array(values)
        return arrays, json.loads(json.dumps(meta))

    def restore(self, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state` returned."""
        if "optimizer" not in meta:
            meta = from_before(arrays, meta)
        params = list(self.model.parameters())

        def found(name: str) -> Any:
            return unpack(meta[name], arrays, self.device, params)

        self.model.load_state_dict(found("model"))
        put_beside(self.model, found("beside"))
        self._restore_optimizer(found("optimizer"), found("groups"), found("rest"))
        for name, value in found("attributes").items():
            setattr(self.optimizer, name, value)
        if "random" in meta:
            self._random.states = found("random")
        closed = {k[6:]: list(map(float, v)) for k, v in arrays.items() if k.startswith("meter/")}
        self.meter = Meter(self.setting.window, **meta["meter"], closed=closed)
        self.offline = list(meta["offline"])
        self.step = int(meta["step"])
        seen = self.meter.windows * self.setting.window + self.meter.count
        if self.step * self.setting.batch != seen:
            raise ValueError(f"the state is of step {self.step}, and {seen} samples were counted")

    def _restore_optimizer(
        self, state: dict[Any, Any], groups: list[dict[str, Any]], rest: dict[str, Any]
    ) -> None:
        opt = self.optimizer
        with warnings.catch_warnings():  # the ledger has converted the run's specification, too
            warnings.simplefilter("ignore", ConventionWarning)
            opt.load_state_dict({"state": state, "param_groups": groups, **rest})
        if isinstance(opt, RuleOptimizer) or type(opt).load_state_dict is not _LOAD:
            return  # they keep what they are given
        # PyTorch turns what is loaded into the parameters' type, counters included.
        params = [p for group in opt.param_groups for p in group["params"]]
        for key, value in state.items():
            opt.state[params[key] if isinstance(key, int) else key] = value

    def _attributes(self) -> dict[str, Any]:
        """What a user's optimizer keeps beside its state dict and may change in a step."""
        opt = self.optimizer
        if not self._foreign or type(opt).state_dict is not _SAVE:
            return {}
        known = vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)).keys()
        found: dict[str, Any] = {}
        for name, value in vars(opt).items():
            if name in known or isinstance(value, _CODE):
                continue
            try:
                pack(value, f"{type(opt).__name__}.{name}", {}, list(self.model.parameters()))
            except UnpackableError:
                if isinstance(opt, RuleOptimizer):  # our own plans and noise, made anew
                    continue
                raise
            found[name] = value
        return found


_LOAD, _SAVE = Optimizer.load_state_dict, Optimizer.state_dict
_USUAL = ("state", "param_groups")
_CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, type, torch.device, torch.dtype)
