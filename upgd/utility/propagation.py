"""The recursive propagation of utilities (appendix B of the paper)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from upgd import curvature


class LayerUtility(NamedTuple):
    """First- and second-order part of the utilities of a layer's weights and biases.

    A layer without biases has biases without utility.
    """

    first: Tensor
    second: Tensor
    first_bias: Tensor
    second_bias: Tensor

    @property
    def total(self) -> Tensor:
        """The utility of the weights."""
        return self.first + self.second


def propagated_utility(
    model: nn.Sequential, x: Tensor, loss: Callable[[Tensor], Tensor]
) -> list[LayerUtility]:
    """Weight utilities by the paper's recursion, layer by layer from the output down.

    The recursion (appendix B) needs the utilities of the layer above and this layer's
    values, no derivatives of the loss. It divides by the features: the utility into a
    feature that is zero is 0 if the activation is flat there, otherwise undefined (NaN).

    Args:
        model: Linear layers with elementwise activations between them.
        x: One sample.
        loss: A function of the model's output.

    Example:
        >>> import torch, upgd
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> layers = upgd.utility.propagated_utility(model, torch.ones(1, 3), lambda y: y.square())
        >>> [layer.total.shape for layer in layers]
        [torch.Size([4, 3]), torch.Size([1, 4])]
    """
    linears, activations = _chain(model)
    if x.reshape(-1, linears[0].in_features).shape[0] != 1:
        raise ValueError("propagated_utility: utilities propagate per sample; give one")
    with torch.no_grad():
        values = [x.reshape(linears[0].in_features)]
        sums = []
        for linear, activation in zip(linears, [*activations, nn.Identity()], strict=True):
            sums.append(linear(values[-1]))
            values.append(activation(sums[-1]))
    output = sums[-1].reshape(1, -1).requires_grad_()
    value = loss(output).sum()
    (gradient,) = torch.autograd.grad(value, output, retain_graph=True)
    (second,) = curvature.diagonal(value, [output])
    found: list[LayerUtility] = []
    # -∂L/∂a and ∂²L/∂a² of the layer at hand; at the output they come from the loss.
    down, bend = -gradient[0], second[0]
    for index in reversed(range(len(linears))):
        linear = linears[index]
        h, weight = values[index], linear.weight.detach()
        first = down[:, None] * h * weight
        curved = 0.5 * bend[:, None] * (h * weight) ** 2
        bias = torch.zeros_like(down) if linear.bias is None else linear.bias.detach()
        found.append(LayerUtility(first, curved, down * bias, 0.5 * bend * bias**2))
        if index > 0:
            slope, curve = _slopes(activations[index - 1], sums[index - 1])
            above, above_second = first.sum(0), curved.sum(0)
            flat = (h == 0) & (slope == 0) & (curve == 0)
            down = torch.where(flat, 0, slope / h * above)
            bend = torch.where(flat, 0, 2 * above_second * (slope / h) ** 2 - curve / h * above)
            undefined = (h == 0) & ~flat
            down, bend = (torch.where(undefined, torch.nan, t) for t in (down, bend))
    return found[::-1]


def _chain(model: nn.Sequential) -> tuple[list[nn.Linear], list[nn.Module]]:
    modules = [m for m in model if not isinstance(m, nn.Flatten)]
    linears, activations = modules[::2], modules[1::2]
    fits = all(isinstance(m, nn.Linear) for m in linears) and len(linears) == len(activations) + 1
    if not fits or any(isinstance(m, nn.Linear) for m in activations):
        raise ValueError(
            "propagated_utility: the model must be an nn.Sequential of linear layers with one "
            "elementwise activation between each two"
        )
    return linears, activations  # type: ignore[return-value]


def _slopes(activation: nn.Module, a: Tensor) -> tuple[Tensor, Tensor]:
    """σ' and σ'' of an elementwise activation."""
    with torch.enable_grad():
        a = a.detach().requires_grad_()
        (slope,) = torch.autograd.grad(activation(a).sum(), a, create_graph=True)
        if not slope.requires_grad:
            return slope, torch.zeros_like(a)
        (curve,) = torch.autograd.grad(slope.sum(), a, allow_unused=True)
    return slope.detach(), torch.zeros_like(a) if curve is None else curve
