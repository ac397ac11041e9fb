"""Any PyTorch module as a network of a stream learner."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from upgd.engine.packing import pack, unpack
from upgd.optim.noise import PhiloxNoise
from upgd.optim.registry import create
from upgd.optim.upgd import UtilityOptimizer


class ModuleCore:
    """A module with one of the package's optimizers, learning in steps of `batch` rows.

    The last linear layer is the head: it grows with the classes, and outputs without a class are
    left out of the loss.

    Args:
        module: Copied, not changed.
        inputs: Numbers per row.
        outputs: Classes, or numbers per target.
        method: A name of the registry.
        hyper: Hyperparameters; the rest have the class's defaults.
        seed: Of the noise.
        squared: Whether the loss is the squared error; else it is the cross entropy.
        batch: Rows per step.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: int,
        outputs: int,
        method: str,
        hyper: Mapping[str, Any],
        seed: int,
        squared: bool,
        batch: int = 1,
    ) -> None:
        self.squared, self.batch = squared, batch
        self._given, self._rule = (module, inputs), (method, dict(hyper), seed)
        self.sizes: tuple[int, ...] = (inputs, outputs)
        self.restart()

    def restart(self) -> None:
        """Begin with nothing learned, with as many inputs and outputs as now."""
        wanted, (given, inputs), (method, hyper, seed) = self.sizes, self._given, self._rule
        self.module = copy.deepcopy(given).train()
        self.diverged_at: int | None = None
        self.opt = create(method, self.module, seed=seed, noise=PhiloxNoise(), **hyper)
        layers = [each for each in self.module.modules() if isinstance(each, nn.Linear)]
        if not layers:
            raise ValueError("the network has no nn.Linear layer, so no head that could grow")
        self._first, self._head = layers[0], layers[-1]
        self.sizes = (inputs, self._head.out_features)
        self.grow(*wanted)

    # ----------------------------------------------------------------------- learning
    def learn(
        self,
        rows: NDArray[np.float32],
        targets: NDArray[Any],
        importance: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """See :class:`upgd.stream.committee.Core`; `batch` rows share a step and its answers."""
        x = torch.from_numpy(np.ascontiguousarray(rows))
        y = torch.from_numpy(np.array(targets, np.float32 if self.squared else np.int64))
        weights = None if importance is None else torch.from_numpy(importance)
        answers = []
        for begin in range(0, len(x), self.batch):
            some = slice(begin, begin + self.batch)
            z = self._outputs(x[some])
            answers.append(z.detach().numpy())
            loss = self._losses(z, y[some])
            if weights is not None:
                loss = loss * weights[some]
            total = loss.mean()
            if not bool(torch.isfinite(total)):
                if self.diverged_at is None:
                    self.diverged_at = begin + len(z) - 1
                continue
            self.opt.zero_grad()
            self.opt.backward(total)
            self.opt.step()
        return np.concatenate(answers) if answers else np.zeros((0, self.sizes[-1]), np.float32)

    def _outputs(self, x: Tensor) -> Tensor:
        z: Tensor = self.module(x)
        return z.reshape(len(x), -1)[:, : self.sizes[-1]]

    def _losses(self, z: Tensor, y: Tensor) -> Tensor:
        if self.squared:
            return (z - y).square().mean(1)
        return functional.cross_entropy(z, y, reduction="none")

    @torch.no_grad()
    def answer(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """The outputs in evaluation mode."""
        self.module.eval()
        found: NDArray[np.float32] = self._outputs(torch.from_numpy(rows)).numpy().copy()
        self.module.train()
        return found

    @property
    def lr(self) -> float:
        """The step size."""
        return float(self.opt.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self.opt.param_groups:
            group["lr"] = value

    # ------------------------------------------------------------------------ growing
    def check_inputs(self, inputs: int) -> None:
        """Only a network that begins with a linear layer can have more."""
        if inputs > self.sizes[0] and self._first.in_features != self.sizes[0]:
            raise ValueError(
                f"the network takes {self.sizes[0]} inputs and does not begin with a linear "
                f"layer of them, so it cannot take {inputs}"
            )

    def grow(self, inputs: int, outputs: int) -> None:
        """See :class:`upgd.stream.committee.Core`; raises ValueError if inputs cannot be added."""
        self.check_inputs(inputs)
        if inputs > self.sizes[0]:
            self._replace(self._first, inputs, self._first.out_features)
        if outputs > self._head.out_features:
            self._replace(self._head, self._head.in_features, outputs)
        self.sizes = (inputs, outputs)

    @torch.no_grad()
    def _replace(self, layer: nn.Linear, inputs: int, outputs: int) -> None:
        old = layer.weight
        new = nn.Parameter(old.new_zeros(outputs, inputs))
        new[: old.shape[0], : old.shape[1]] = old
        layer.weight, layer.in_features, layer.out_features = new, inputs, outputs
        self.opt.replace(old, new)
        if layer.bias is not None and len(layer.bias) < outputs:
            old, bias = layer.bias, nn.Parameter(old.new_zeros(outputs))
            bias[: len(old)] = old
            layer.bias = bias
            self.opt.replace(old, bias)

    @torch.no_grad()
    def load_weights(self, layers: Sequence[NDArray[Any]]) -> None:
        """See :class:`upgd.stream.committee.Core`."""
        mine = [each for each in self.module.modules() if isinstance(each, nn.Linear)]
        for layer, given in zip(mine, layers, strict=True):
            values = torch.from_numpy(np.array(given, np.float32))
            layer.weight.copy_(values[:, :-1])
            layer.bias.copy_(values[:, -1])

    # ------------------------------------------------------------------------- traces
    def utilities(self) -> list[NDArray[np.float32]] | None:
        """See :class:`upgd.stream.committee.Core`; zeros for layers without bias."""
        if not isinstance(self.opt, UtilityOptimizer) or "gates" in self.opt.method.needs:
            return None
        found = []
        for layer in self.module.modules():
            if isinstance(layer, nn.Linear):
                if any("utility" not in self.opt.state.get(p, {}) for p in layer.parameters()):
                    return None
                whole = np.zeros((layer.out_features, layer.in_features + 1), np.float32)
                whole[:, :-1] = self.opt.utility(layer.weight).numpy()
                if layer.bias is not None:
                    whole[:, -1] = self.opt.utility(layer.bias).numpy()
                found.append(whole)
        return found

    def forget_utilities(self) -> None:
        """Set the traces of utility to zero."""
        for state in self.opt.state.values():
            if "utility" in state:
                state["utility"].zero_()

    # -------------------------------------------------------------------------- state
    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Everything that learning on depends on: arrays, and what fits into JSON."""
        arrays: dict[str, NDArray[Any]] = {}
        facts = {
            "model": pack(dict(self.module.state_dict()), "model", arrays),
            "optimizer": pack(self.opt.state_dict(), "optimizer", arrays),
        }
        return arrays, facts

    def restore(self, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self.module.load_state_dict(unpack(facts["model"], arrays))
        self.opt.load_state_dict(unpack(facts["optimizer"], arrays))
        self.diverged_at = None
