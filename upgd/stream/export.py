"""A learner's networks as PyTorch modules with optimizers."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from upgd.engine.dense import ACTIVATIONS
from upgd.engine.layered import LayeredStack
from upgd.kernels.layered import kept_names
from upgd.kernels.layout import Layer
from upgd.networks import mlp
from upgd.optim.base import RuleOptimizer
from upgd.optim.layered import LayerOptimizer
from upgd.optim.noise import PhiloxNoise
from upgd.optim.registry import create
from upgd.stream.module import ModuleCore

if TYPE_CHECKING:
    from upgd.stream.committee import Core
    from upgd.stream.dense import DenseCore


class TorchNetwork(NamedTuple):
    """A network and the optimizer that goes on with it."""

    module: nn.Module
    optimizer: RuleOptimizer | LayerOptimizer


def to_torch(core: Core) -> TorchNetwork:
    """A copy of a network, with an optimizer that has its traces, step counts and noise.

    A compiled network becomes the module of :func:`upgd.networks.mlp`. What it learns from the same
    rows differs by rounding only.
    """
    if isinstance(core, ModuleCore):
        return TorchNetwork(*copy.deepcopy((core.module, core.opt)))
    return _from_dense(cast("DenseCore", core))


@torch.no_grad()
def _from_dense(core: DenseCore) -> TorchNetwork:
    stack = core.stack
    learner = stack.learners[0]
    module = mlp(core.sizes, ACTIVATIONS[stack.activation])
    for p, values in zip(module.parameters(), _parts(core, stack.weights[0]), strict=True):
        p.copy_(torch.from_numpy(values))
    noise = PhiloxNoise()
    opt = create(learner.method, module, seed=learner.seed, noise=noise, **learner.hyper)
    for group in opt.param_groups:
        group["lr"] = core.lr  # smaller than at the beginning if it has diverged
    if core.steps:
        opt.load_state_dict(_state_dict(core, opt))
    return TorchNetwork(module, opt)


def _state_dict(core: DenseCore, opt: RuleOptimizer | LayerOptimizer) -> dict[str, Any]:
    """The state of an optimizer that has made the steps of a compiled network.

    Noise is a function of the step and traces are corrected by it. Utilities that were forgotten
    have a correction of their own in the compiled network. An optimizer has no such thing, and
    needs none to learn: utilities are divided by the largest of them.
    """
    stack, count = core.stack, torch.tensor(core.steps)
    saved = opt.state_dict()
    states: list[dict[str, Any]] = [
        {"step": count.clone(), "attempts": count.clone()} for _ in range(2 * len(core.sizes) - 2)
    ]
    for k, name in enumerate(core.states):
        parts = _parts(core, stack.states[0][k, 0])
        for state, values in zip(states, parts, strict=True):
            state[name] = torch.from_numpy(values)
    if stack.groups[0].features:  # kept with the weights that lead into hidden units
        for number, layer in enumerate(core.layout.layers[:-1]):
            mine = stack.utilities[0][0, layer.row_at : layer.row_at + layer.outputs]
            states[2 * number]["utility"] = torch.from_numpy(mine.copy())
    if isinstance(stack, LayeredStack):
        for number, layer in enumerate(core.layout.layers):
            states[2 * number] |= _kept(stack, layer)
    saved["state"] = dict(enumerate(states))
    for group in saved["param_groups"]:
        group["noise_step"] = core.steps
    return saved


def _kept(stack: LayeredStack, layer: Layer) -> dict[str, torch.Tensor]:
    """What a layered method keeps with a layer's weights, and with the first one's of the network.

    An optimizer keeps states of features with the layer that reads them.
    """
    found, kept, values = {}, stack.layouts[0], stack.kept[0][0]
    sizes = {"inputs": layer.inputs, "features": layer.inputs, "units": layer.outputs}
    for place, name in kept_names(kept.method):
        owner = layer.number - (place == "features")
        if owner >= 0 and (place != "network" or layer.number == 0):
            at = kept.at(place, name, owner)
            mine = torch.from_numpy(values[at : at + sizes.get(place, 1)].copy())
            found[f"{place}.{name}"] = mine if place in sizes else mine.reshape(())
    return found


def _parts(core: DenseCore, numbers: NDArray[Any]) -> list[NDArray[np.float32]]:
    """A compiled network's numbers as copies, each layer's for its weight and its bias."""
    found = []
    for matrix in core.matrices(numbers):
        found += [matrix[:, :-1].copy(), matrix[:, -1].copy()]
    return found
