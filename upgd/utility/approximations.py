"""Approximated utilities of weights and of features, from derivatives."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from upgd import curvature
from upgd.curvature import Curvature
from upgd.optim.features import FeatureLayer, Features
from upgd.utility.common import Kind, Loss, Utilities, check_loss


def approximate(
    kind: Kind,
    value: Tensor,
    gradient: Tensor,
    second: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One approximation of the utility of `value`, elementwise.

    ``"second"`` is ``½·h·w² - g·w``, ``"first"`` is ``-g·w``, ``"squared_gradient"`` ``g²``,
    ``"magnitude"`` ``|w|`` and ``"random"`` uniform noise, a baseline.

    Example:
        >>> import torch
        >>> from upgd.utility import approximate
        >>> approximate("second", torch.tensor(2.0), torch.tensor(1.0), torch.tensor(3.0))
        tensor(4.)
    """
    if kind == "second":
        if second is None:
            raise ValueError("the second-order utility needs second derivatives")
        return 0.5 * second * value * value - gradient * value
    if kind == "first":
        return -gradient * value
    if kind == "squared_gradient":
        return gradient * gradient
    if kind == "magnitude":
        return value.abs()
    if kind == "random":
        return torch.rand(value.shape, generator=generator, dtype=value.dtype, device=value.device)
    raise ValueError(f"kind must be one of {', '.join(map(repr, get_args(Kind)))}; got {kind!r}")


def weight_utility(
    model: nn.Module, loss: Loss, kind: Kind = "second", curvature: Curvature = "hesscale"
) -> Utilities:
    """An approximated utility of every weight and bias; does not change gradients.

    Example:
        >>> import torch, upgd
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> loss = lambda: model(torch.ones(1, 2)).square().sum()
        >>> upgd.utility.weight_utility(model, loss)  # exact: the loss is quadratic
        {'weight': tensor([[-3., -3.]])}
    """
    check_loss(loss)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients, seconds = _derivatives(loss, list(named.values()), kind, curvature)
    return {
        name: approximate(kind, p.detach(), g, h)
        for (name, p), g, h in zip(named.items(), gradients, seconds, strict=True)
    }


def feature_utility(
    model: nn.Module,
    loss: Loss,
    features: Features,
    order: int = 2,
    source: Literal["gates", "preactivations", "outgoing"] = "gates",
    curvature: Curvature = "hesscale",
) -> Utilities:
    """The approximated utility of every feature, from one of three sources.

    ``"gates"``: derivatives with respect to a gate on the feature's output, ``½·s - f``.
    ``"preactivations"``: ``½·∂²L/∂a²·a² - ∂L/∂a·a``, the feature's input set to zero; for
    activations with σ(0) = 0. ``"outgoing"``: the sum of the utilities of its outgoing
    weights, where interactions between those are dropped. ``order=1`` leaves the second
    derivatives out.

    Example:
        >>> import torch, upgd
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> features, x = upgd.Features(model), torch.ones(1, 3)
        >>> loss = lambda: model(x).square().sum()
        >>> upgd.utility.feature_utility(model, loss, features)["0"].shape
        torch.Size([4])
    """
    check_loss(loss)
    kind: Kind = "second" if order == 2 else "first"
    if source == "outgoing":
        return outgoing_sums(model, weight_utility(model, loss, kind, curvature), features)
    if source == "preactivations":
        return _from_preactivations(loss, features, kind, curvature)
    if source != "gates":
        raise ValueError(f"source must be 'gates', 'preactivations' or 'outgoing', got {source!r}")
    return _from_gates(model, loss, features, kind, curvature)


def _from_gates(
    model: nn.Module, loss: Loss, features: Features, kind: Kind, method: Curvature
) -> Utilities:
    saved = [(p, p.grad) for p in model.parameters()]
    measured = [(layer, layer.first, layer.second) for layer in features.layers]
    features.reset()
    for p, _ in saved:
        p.grad = None
    try:
        with torch.enable_grad():
            value = loss()
            if kind == "second":
                curvature.backward(value, (), method=method, features=features)
            else:
                value.backward()
        found = {}
        for layer in features.layers:
            if layer.first is None:
                raise ValueError(f"feature_utility: the loss did not run layer {layer.name!r}")
            found[layer.name] = approximate(
                kind, torch.ones_like(layer.first), layer.first, layer.second
            )
        return found
    finally:
        for p, gradient in saved:
            p.grad = gradient
        for layer, first, second in measured:
            layer.first, layer.second = first, second


def _from_preactivations(
    loss: Loss, features: Features, kind: Kind, method: Curvature
) -> Utilities:
    inputs: list[tuple[FeatureLayer, Tensor]] = []

    def note(layer: FeatureLayer, module: nn.Module, args: Any, output: Tensor) -> None:
        inputs.append((layer, output))

    handles = [
        layer.module.register_forward_hook(partial(note, layer)) for layer in features.layers
    ]
    try:
        gradients, seconds = _derivatives(loss, lambda: [a for _, a in inputs], kind, method)
    finally:
        for handle in handles:
            handle.remove()
    found: Utilities = {}
    for (layer, a), g, h in zip(inputs, gradients, seconds, strict=True):
        elements = approximate(kind, a.detach(), g, h).movedim(layer.axis(a), 0)
        utility = elements.reshape(layer.size, -1).sum(1)
        found[layer.name] = found.get(layer.name, torch.zeros_like(utility)) + utility
    return found


def outgoing_sums(model: nn.Module, weights: Utilities, features: Features) -> Utilities:
    """For every feature, the sum of `weights` (such as utilities) over its outgoing weights.

    A layer's outgoing weights are those of the next linear or convolutional layer in the
    order of ``model.modules()``; this fits sequential models.

    Example:
        >>> import torch, upgd
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 5))
        >>> ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
        >>> upgd.utility.outgoing_sums(model, ones, upgd.Features(model))
        {'0': tensor([5., 5.])}
    """
    names = [
        name
        for name, m in model.named_modules()
        if isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
    ]
    found = {}
    for layer in features.layers:
        index = names.index(layer.name) + 1
        following = names[index] if index < len(names) else None
        weight = None if following is None else weights.get(f"{following}.weight")
        if weight is None or weight.shape[1] % layer.size:
            raise ValueError(
                f"outgoing_sums: no layer with inputs from the {layer.size} features of "
                f"{layer.name!r} follows it"
            )
        # After a flattened convolution, a feature has as many inputs as it has positions.
        parts = weight.reshape(weight.shape[0], layer.size, -1)
        found[layer.name] = parts.sum((0, 2))
    return found


def _derivatives(
    loss: Loss, tensors: Any, kind: Kind, method: Curvature
) -> tuple[list[Tensor], list[Tensor | None]]:
    """First and, where `kind` needs them, second derivatives with respect to `tensors`."""
    with torch.enable_grad():
        value = loss()
        wanted: list[Tensor] = tensors() if callable(tensors) else tensors
        second = kind == "second"
        gradients = torch.autograd.grad(value, wanted, retain_graph=second, allow_unused=True)
        seconds: list[Tensor | None] = [None] * len(wanted)
        if second:
            seconds = list(curvature.diagonal(value, wanted, method=method))
    zeros = [torch.zeros_like(t) for t in wanted]
    return [z if g is None else g for g, z in zip(gradients, zeros, strict=True)], seconds
