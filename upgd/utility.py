"""How useful weights and features are: truly, and by the paper's approximations.

The utility of a weight (or of a feature) is the loss without it minus the loss with it. The
true one takes a forward pass for each of them; :func:`true_utility` runs many of those at once.
The approximations take derivatives: ``-g·w`` (first order) and ``½·h·w² - g·w`` (second order),
and the same with gates fixed at 1 for features.

Functions that take a `model` and a `loss` expect a loss without arguments that runs the model,
such as ``lambda: F.mse_loss(model(x), y)``, and return a dict with an entry per parameter or per
layer of features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from upgd import curvature
from upgd.curvature import Curvature
from upgd.curvature.walk import TAPS, unobserved
from upgd.optim.features import FeatureLayer, Features

Utilities: TypeAlias = dict[str, Tensor]
Loss: TypeAlias = Callable[[], Tensor]
Kind: TypeAlias = Literal["second", "first", "squared_gradient", "magnitude", "random"]
Scope: TypeAlias = Literal["global", "local"]
MEMORY = 256 * 2**20


# ------------------------------------------------------------------- the true utility
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
        memory: Roughly how many bytes the counterfactual forward passes that run at one
            time may take.

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
    found = {}
    for name, value in given.items():
        flat = value.flatten(1) if stacked else value.flatten()
        count = flat.shape[-1]
        places = torch.arange(count, device=value.device)

        def without(
            index: Tensor,
            name: str = name,
            value: Tensor = value,
            flat: Tensor = flat,
            places: Tensor = places,
        ) -> Tensor:
            removed = torch.where(places == index, 0, flat)
            return loss({**given, name: removed.reshape(value.shape)})

        # Per pass: the tensor with a hole, twice, and an operation's input, output and workspace.
        each = 2 * value.nbytes + 3 * max(largest.bytes, 1)
        chunk = max(1, min(count, memory // each))
        every = torch.func.vmap(without, randomness="same")
        # The loss as it is comes from the same call, so that a weight without effect has the
        # utility 0 and not the rounding error between two ways to compute the same number.
        nothing = places.new_full((1,), -1)
        losses = [every(torch.cat([nothing, part])) for part in places.split(chunk)]
        differences = torch.cat([part[1:] - part[:1] for part in losses])
        found[name] = differences.movedim(0, -1).reshape(value.shape)
    return found


class _LargestOutput(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

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
    _check_loss(loss)
    runner = _Runner(model, loss)

    def loss_of(values: Utilities) -> Tensor:
        named = {f"model.{name}": value for name, value in values.items()}
        result: Tensor = torch.func.functional_call(runner, named, ())
        return result

    weights = {name: p.detach() for name, p in model.named_parameters()}
    return true_utility(loss_of, weights, memory=memory)


class _Runner(nn.Module):
    """Makes a loss that runs a model something that ``functional_call`` can call."""

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
    _check_loss(loss)
    places = _gate_places(model, loss, features)
    like = {layer.name: layer.params[0] for layer in places.values()}
    ones = {n: torch.ones(p.shape[0], dtype=p.dtype, device=p.device) for n, p in like.items()}

    def loss_of(gates: Utilities) -> Tensor:
        with _gated(model, places, gates):
            return loss()

    return true_utility(loss_of, ones, memory=memory)


def _gate_places(model: nn.Module, loss: Loss, features: Features) -> dict[int, FeatureLayer]:
    """After which of the modules' calls, counted from the loss's start, a gate sits."""
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


# --------------------------------------------------------------- approximated utilities
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
    """An approximated utility of every weight and bias; gradients are left as they are.

    Example:
        >>> import torch, upgd
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> loss = lambda: model(torch.ones(1, 2)).square().sum()
        >>> upgd.utility.weight_utility(model, loss)  # exact: the loss is quadratic
        {'weight': tensor([[-3., -3.]])}
    """
    _check_loss(loss)
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
    _check_loss(loss)
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
    """For every feature the sum of `weights` (utilities, magnitudes, ...) over those that leave it.

    A layer's outgoing weights are those of the next linear or convolutional layer in the
    order of ``model.modules()``, which is meant for chains.

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
        with unobserved(value.grad_fn):
            gradients = torch.autograd.grad(value, wanted, retain_graph=second, allow_unused=True)
        seconds: list[Tensor | None] = [None] * len(wanted)
        if second:
            seconds = list(curvature.diagonal(value, wanted, method=method))
    zeros = [torch.zeros_like(t) for t in wanted]
    return [z if g is None else g for g, z in zip(gradients, zeros, strict=True)], seconds


def _check_loss(loss: Any) -> None:
    if not callable(loss):
        raise TypeError(
            "the loss must be a function without arguments that runs the model, such as "
            f"lambda: F.mse_loss(model(x), y); got {type(loss).__name__}"
        )


# ------------------------------------------------------------------ rank correlation
def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's rank correlation with average ranks, over the last dimension.

    NaN where it is undefined: where either side is constant, shorter than two, or not finite.

    Example:
        >>> import torch
        >>> from upgd.utility import spearman
        >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 30.0, 20.0]))
        tensor(0.5000, dtype=torch.float64)
    """
    if a.shape != b.shape:
        raise ValueError(f"spearman: shapes {tuple(a.shape)} and {tuple(b.shape)} differ")
    ranks = [_ranks(x) for x in (a, b)]
    x, y = (r - r.mean(-1, keepdim=True) for r in ranks)
    scale = (x * x).sum(-1).sqrt() * (y * y).sum(-1).sqrt()
    value = (x * y).sum(-1) / scale
    finite = a.isfinite().all(-1) & b.isfinite().all(-1)
    return torch.where((scale > 0) & finite, value, torch.nan)


def _ranks(x: Tensor) -> Tensor:
    """Ranks from 1, ties sharing their average."""
    ordered = x.contiguous().sort(-1).values
    below = torch.searchsorted(ordered, x.contiguous(), right=False)
    through = torch.searchsorted(ordered, x.contiguous(), right=True)
    return (below + through + 1).double() / 2


class Correlation(NamedTuple):
    """A rank correlation, and over how many tensors it could not be had."""

    value: Tensor
    undefined: Tensor


def rank_correlation(
    true: Utilities, approximated: Utilities, scope: Scope = "global", *, stacked: bool = False
) -> Correlation:
    """Spearman's correlation between two utilities.

    ``"global"`` ranks all elements together; ``"local"`` is the mean over tensors of more than
    one element of the correlation within each. Undefined values are left out and counted.

    Example:
        >>> import torch
        >>> from upgd.utility import rank_correlation
        >>> true = {"w": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([0.0])}
        >>> rank_correlation(true, {"w": torch.tensor([1.0, 2.0, 4.0]), "b": torch.tensor([1.0])})
        Correlation(value=tensor(0.9487, dtype=torch.float64), undefined=tensor(0))
    """
    if scope not in get_args(Scope):
        raise ValueError(f"scope must be 'global' or 'local', got {scope!r}")
    if true.keys() != approximated.keys():
        raise ValueError(
            f"rank_correlation: different names: {sorted(true)} and {sorted(approximated)}"
        )
    start = 1 if stacked else 0
    pairs = [(true[n].flatten(start), approximated[n].flatten(start)) for n in true]
    if scope == "global":
        pairs = [(torch.cat([a for a, _ in pairs], -1), torch.cat([b for _, b in pairs], -1))]
    else:
        pairs = [(a, b) for a, b in pairs if a.shape[-1] > 1]
    values = torch.stack([spearman(a, b) for a, b in pairs])
    return Correlation(values.nanmean(0), values.isnan().sum(0))


# -------------------------------------------------------------------- propagation
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
