"""Layers of a network: which parameters belong to which, their roles, their first weights' bounds.

A network's first linear or convolutional layer is its ``input``, its last one its ``head``, and
those between are ``hidden``. The only layer of a network is its head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def bounds(shapes: Sequence[tuple[int, ...]]) -> list[float]:
    """``1 / sqrt(fan_in)`` of each parameter's layer, from the shapes of parameters in order.

    A parameter with one dimension has the bound of the weight right before it, or 1 if there is
    none: normalisations, which follow a bias, have 1.

    >>> bounds([(8, 4), (8,), (8,), (8,), (3, 1, 2, 2)])
    [0.5, 0.5, 1.0, 1.0, 0.5]
    """
    before = [(), *shapes]
    return [bound(x if len(x) > 1 else y) for x, y in zip(shapes, before, strict=False)]


def bound(shape: Sequence[int]) -> float:
    """``1 / sqrt(fan_in)`` of a weight of this shape; 1 for what is no weight."""
    return 1 / math.sqrt(max(1, math.prod(shape[1:]))) if len(shape) > 1 else 1.0


def role(place: int, count: int) -> str:
    """The role of layer number `place` of `count`."""
    return "head" if place == count - 1 else "hidden" if place else "input"


# --------------------------------------------------------------------------------- modules
def is_layer(module: nn.Module) -> bool:
    """Whether a module is a linear or convolutional layer."""
    return isinstance(module, (nn.Linear, *CONVOLUTIONS)) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether it is a linear layer with a weight of [inputs, outputs]: Transformers' ``Conv1D``."""
    weight = getattr(module, "weight", None)
    named = type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.dim() == 2
    return named and getattr(module, "nf", None) == weight.shape[1]  # type: ignore[union-attr]


def output_layers(
    owner: str, candidates: Sequence[str], output: str | Iterable[str] | None
) -> list[str]:
    """The names of a model's output layers: the last of `candidates`, unless `output` names them.

    Raises:
        ValueError: There is no such layer.
    """
    if not candidates:
        raise ValueError(f"{owner}: the model has no linear or convolutional layer")
    output = candidates[-1] if output is None else output
    outputs = [output] if isinstance(output, str) else list(output)
    check_layers(owner, candidates, outputs)
    return outputs


def check_layers(owner: str, candidates: Sequence[str], names: Iterable[str]) -> None:
    """Raise ValueError unless `names` are among those of a model's layers."""
    for name in names:
        if name not in candidates:
            raise ValueError(
                f"{owner}: {name!r} is not a linear or convolutional layer of the model; "
                f"these are: {', '.join(candidates)}"
            )


def roles(model: nn.Module, output: str | Iterable[str] | None = None) -> list[str]:
    """The role of each of a model's parameters, in their order.

    Parameters of other modules, such as normalisations, have the role of the layer before them,
    and ``hidden`` before the first.

    Raises:
        ValueError: The model has no linear or convolutional layer, or none that is called `output`.
    """
    modules = dict(model.named_modules())
    layers = [name for name, module in modules.items() if is_layer(module)]
    heads = output_layers("layer_groups", layers, output)
    others = [name for name in layers if name not in heads]
    of = dict.fromkeys(others, "hidden") | dict.fromkeys(others[:1], "input")
    of |= dict.fromkeys(heads, "head")
    found: dict[Tensor, str] = {}
    current = "hidden"
    for name, module in modules.items():
        current = of.get(name, current)
        for p in module.parameters(recurse=False):
            if p not in found or name in of:  # a weight that is tied has its last layer's role
                found[p] = current
    return [found[p] for p in model.parameters()]


def ordered_groups(
    model: nn.Module, options: Mapping[str, Mapping[str, Any]], trained: bool = False
) -> list[dict[str, Any]]:
    """Groups of all parameters of `model` in their order, with options by role.

    A role's parameters are in several groups where others lie between them; noise depends on the
    order. With `trained`, frozen parameters are left out.
    """
    pairs = [
        (role if role in options else "", p)
        for role, p in zip(roles(model), model.parameters(), strict=True)
        if p.requires_grad or not trained
    ]
    return [
        {"params": [p for _, p in some], **options.get(role, {})}
        for role, some in groupby(pairs, key=lambda pair: pair[0])
    ]
