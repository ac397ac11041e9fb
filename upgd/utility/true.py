"""True utilities: the loss without each weight or feature, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from upgd.curvature.walk import TAPS
from upgd.optim.features import FeatureLayer, Features
from upgd.utility.common import Loss, Utilities, check_loss

MEMORY = 256 * 2**20


@torch.no_grad()
def true_utility(
    loss: Callable[[Utilities], Tensor],
    values: Mapping[str, Tensor],
    *,
    stacked: bool = False,
    memory: int = MEMORY,
) -> Utilities:
    """The loss with each element of `values` set to zero in turn, minus the loss as it is.

    Args:
        loss: A function of tensors with the names and shapes of `values`; it must not
            change anything.
        values: Weights, or gates.
        stacked: All tensors, and what `loss` returns, have a leading dimension of
            independent learners, in which an element is removed from all at once.
        memory: Approximate limit in bytes for the forward passes that run at one time.

    Returns:
        Tensors of the names and shapes of `values`.

    Example:
        >>> import torch
        >>> from upgd.utility import true_utility
        >>> w = torch.tensor([1.0, 2.0])
        >>> true_utility(lambda v: (v["w"].sum() - 3) ** 2, {"w": w})
        {'w': tensor([1., 4.])}
    """
    given = dict(values)
    with _LargestOutput() as largest:  # type: ignore[no-untyped-call]
        loss(given)

    def without(name: str, flat: Tensor, places: Tensor, index: Tensor) -> Tensor:
        removed = torch.where(places == index, 0, flat)
        return loss({**given, name: removed.reshape(given[name].shape)})

    found = {}
    for name, value in given.items():
        flat = value.flatten(1) if stacked else value.flatten()
        count = flat.shape[-1]
        places = torch.arange(count, device=value.device)
        # Per pass: the tensor with a hole, twice, and an operation's input, output and workspace.
        each = 2 * value.nbytes + 3 * max(largest.bytes, 1)
        chunk = max(1, min(count, memory // each))
        every = torch.func.vmap(partial(without, name, flat, places), randomness="same")
        # The loss as it is comes from the same call, so that a weight without effect has the
        # utility 0 and not the rounding error between two ways to compute the same number.
        nothing = places.new_full((1,), -1)
        losses = [every(torch.cat([nothing, part])) for part in places.split(chunk)]
        differences = torch.cat([part[1:] - part[:1] for part in losses])
        found[name] = differences.movedim(0, -1).reshape(value.shape)
    return found


class _LargestOutput(TorchDispatchMode):
    """Records the size of the largest tensor."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [t.nbytes for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.bytes = max([self.bytes, *sizes])
        return result


def true_weight_utility(model: nn.Module, loss: Loss, *, memory: int = MEMORY) -> Utilities:
    """The true utility of every weight and bias of `model`.

    Batch normalisation must be in eval mode; dropout has one mask for all passes.

    Example:
        >>> import torch, upgd
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> upgd.utility.true_weight_utility(model, lambda: model(torch.ones(1, 2)).square().sum())
        {'weight': tensor([[-3., -3.]])}
    """
    check_loss(loss)
    runner = _Runner(model, loss)

    def loss_of(values: Utilities) -> Tensor:
        named = {f"model.{name}": value for name, value in values.items()}
        result: Tensor = torch.func.functional_call(runner, named, ())
        return result

    weights = {name: p.detach() for name, p in model.named_parameters()}
    return true_utility(loss_of, weights, memory=memory)


class _Runner(nn.Module):
    """Wraps a loss as a module for ``functional_call``."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self) -> Tensor:
        return self.loss()


def true_feature_utility(
    model: nn.Module, loss: Loss, features: Features, *, memory: int = MEMORY
) -> Utilities:
    """The true utility of every feature: the loss with its output set to zero, minus the loss.

    Features are removed where `features` put their gates. The keys are its layers' names.

    Example:
        >>> import torch, upgd
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> features, x = upgd.Features(model), torch.ones(1, 3)
        >>> loss = lambda: model(x).square().sum()
        >>> upgd.utility.true_feature_utility(model, loss, features)["0"].shape
        torch.Size([4])
    """
    check_loss(loss)
    places = _gate_places(model, loss, features)
    like = {layer.name: layer.params[0] for layer in places.values()}
    ones = {n: torch.ones(p.shape[0], dtype=p.dtype, device=p.device) for n, p in like.items()}

    def loss_of(gates: Utilities) -> Tensor:
        with _gated(model, places, gates):
            return loss()

    return true_utility(loss_of, ones, memory=memory)


def _gate_places(model: nn.Module, loss: Loss, features: Features) -> dict[int, FeatureLayer]:
    """The number of the module call, within one loss, that each gate follows."""
    outputs: list[Tensor | None] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output if isinstance(output, Tensor) else None)

    handles = [module.register_forward_hook(note) for module in model.modules()]
    try:
        with torch.enable_grad():
            value = loss()
    finally:
        for handle in handles:
            handle.remove()
    del value
    places: dict[int, FeatureLayer] = {}
    seen = set()
    for call, output in enumerate(outputs):
        if output is None or output.grad_fn is None:
            continue
        metadata: dict[str, Any] = output.grad_fn.metadata  # type: ignore[assignment]
        for tap in metadata.get(TAPS, ()):
            mine = tap.owner in features.layers and tap.output == output.output_nr
            if mine and tap not in seen:  # a container's output is its last module's
                seen.add(tap)
                places[call] = tap.owner
    missing = [layer.name for layer in features.layers if layer not in places.values()]
    if missing:
        raise ValueError(
            f"true_feature_utility: the loss did not run layers {', '.join(missing)} of the model "
            "that was given to Features"
        )
    return places


@contextmanager
def _gated(model: nn.Module, places: dict[int, FeatureLayer], gates: Utilities) -> Iterator[None]:
    """Multiply features with gates while the loss runs."""
    calls = 0

    def multiply(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal calls
        layer = places.get(calls)
        calls += 1
        if layer is None:
            return None
        gate = gates[layer.name]
        return output * gate.reshape(-1, *[1] * (output.dim() - 1 - layer.axis(output)))

    handles = [module.register_forward_hook(multiply) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
