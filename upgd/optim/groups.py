"""Parameter groups of a model: what noise and gates should leave alone, and layers by role."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from upgd.optim.base import RuleOptimizer
from upgd.optim.roles import roles
from upgd.optim.upgd import UPGD
from upgd.rules.vocabulary import ROLES

Kind: TypeAlias = Literal["norms", "embeddings", "biases"]

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_QUIET = {"sigma": 0.0, "protect": False, "weight_decay": 0.0}
_SPARED: dict[str, dict[str, Any]] = {
    "norms": _QUIET,
    "embeddings": _QUIET,
    "biases": {"weight_decay": 0.0},
}


def param_groups(
    model: nn.Module,
    *,
    spare: Kind | Iterable[Kind] = ("norms", "embeddings"),
    optimizer: Callable[..., Any] = UPGD,
    **options: Any,
) -> list[dict[str, Any]]:
    """Groups of all parameters of `model`, with those of some layers spared.

    *Norms* and *embeddings* get ``sigma=0``, ``protect=False`` and ``weight_decay=0``, so that
    UPGD's step is SGD's there. A scale of a normalisation multiplies a whole channel, and what
    disturbs it disturbs all weights before it. Of an embedding, a step uses the rows of the tokens
    that are in the batch; noise and decay would move all others, too, and the row at
    ``padding_idx``, which must stay zero. *Biases* (of other layers) get ``weight_decay=0`` if
    asked for.

    A normalisation is one of PyTorch's, or a module whose class is named ``...Norm``; an embedding
    one of PyTorch's, or a module whose class is named ``...Embedding(s)``. Weights that are tied
    appear once, spared if one of their layers is.

    Args:
        model: Any module.
        spare: What to spare.
        optimizer: The class that the groups are for: options that its constructor does not take
            are left out (``protect`` of :class:`torch.optim.SGD`).
        options: Hyperparameters of all groups, such as ``lr``; those above come first.

    Returns:
        One to three groups with the names of their parameters.

    Example:
        >>> import torch, upgd
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4))
        >>> for group in upgd.param_groups(model, lr=0.1):
        ...     print(group["param_names"], group["lr"], group.get("sigma"))
        ['1.weight', '1.bias'] 0.1 None
        ['0.weight', '2.weight', '2.bias'] 0.1 0.0
        >>> opt = upgd.UPGD(upgd.param_groups(model, lr=0.1), sigma=0.01)
    """
    kinds = [spare] if isinstance(spare, str) else list(spare)
    for kind in kinds:
        if kind not in _SPARED:
            known = ", ".join(map(repr, _SPARED))
            raise ValueError(f"param_groups: spare must be some of {known}, got {kind!r}")
    taken = _arguments(optimizer)
    special = _kinds(model)
    found: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
    for name, p in model.named_parameters():
        what = special.get(p, "biases" if name.endswith("bias") else "others")
        own = _SPARED[what] if what in kinds else {}
        own = {key: value for key, value in own.items() if key in taken}
        group = found.setdefault(
            tuple(own.items()), {"params": [], "param_names": [], **options, **own}
        )
        group["params"].append(p)
        group["param_names"].append(name)
    if not found:
        raise ValueError(f"param_groups: {type(model).__name__} has no parameters")
    return sorted(found.values(), key=lambda group: sum(key in group for key in _QUIET))


def layer_groups(
    model: nn.Module,
    *,
    input: Mapping[str, Any] | None = None,
    hidden: Mapping[str, Any] | None = None,
    head: Mapping[str, Any] | None = None,
    output: str | Iterable[str] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Groups of all parameters of `model` by the role of their layer, for any optimizer.

    The head is the last linear or convolutional layer in the order of ``model.modules()``, the
    input is the first, and all others are hidden; an only layer is the head. Parameters of other
    modules, such as normalisations, go with the layer before them, and embeddings before the first
    layer with the hidden ones. A weight that is tied goes with the last layer that has it.

    Args:
        model: Any module.
        input: Options of the first layer's group, such as ``{"lr": 0.01}``.
        hidden: Options of the layers between.
        head: Options of the last layer's group.
        output: The name or names of the head's layers, where the last one is not the head.
        options: Options of all groups; a role's own come first.

    Returns:
        A group per role that the model has, with the names of its parameters.

    Raises:
        ValueError: A role has options, and the model no layer of that role.

    Example:
        >>> import torch, upgd
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
        >>> for group in upgd.layer_groups(model, head={"weight_decay": 0.1}, lr=0.01):
        ...     print(group["param_names"], group["lr"], group.get("weight_decay"))
        ['0.weight', '0.bias', '1.weight', '1.bias'] 0.01 None
        ['3.weight', '3.bias'] 0.01 0.1
        >>> opt = torch.optim.SGD(upgd.layer_groups(model, head={"weight_decay": 0.1}), lr=0.01)
    """
    given = dict(zip(ROLES, (input, hidden, head), strict=True))
    found: dict[str, dict[str, Any]] = {}
    for role, (name, p) in zip(roles(model, output), model.named_parameters(), strict=True):
        group = found.setdefault(
            role, {"params": [], "param_names": [], **options, **(given[role] or {})}
        )
        group["params"].append(p)
        group["param_names"].append(name)
    for role, own in given.items():
        if own and role not in found:
            kind = type(model).__name__
            raise ValueError(f"layer_groups: {role}={own!r}, and {kind} has no such layer")
    return [found[role] for role in ROLES if role in found]


def _arguments(optimizer: Callable[..., Any]) -> set[str]:
    """What a constructor takes by name."""
    if isinstance(optimizer, type) and issubclass(optimizer, RuleOptimizer):
        return set(optimizer._arguments())
    return set(inspect.signature(optimizer).parameters)


def _kinds(model: nn.Module) -> dict[Tensor, str]:
    """The parameters of normalisations and embeddings."""
    found: dict[Tensor, str] = {}
    for module in model.modules():
        name = type(module).__name__
        kind = ""
        if isinstance(module, _NORMS) or name.endswith("Norm"):
            kind = "norms"
        elif isinstance(module, _EMBEDDINGS) or re.search("Embeddings?$", name):
            kind = "embeddings"
        if kind:
            found |= dict.fromkeys(module.parameters(recurse=False), kind)
    return found
