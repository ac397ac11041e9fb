"""Parameter groups of a model: what noise and gates should leave alone."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from upgd.optim.base import RuleOptimizer
from upgd.optim.upgd import UPGD

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
