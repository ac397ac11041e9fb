"""Models that change while they learn: parameters that grow, traces that are forgotten."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from upgd.optim.batch import DTYPES
from upgd.optim.checks import CLOCK, MASTER, parameter_name
from upgd.optim.shards import is_cut
from upgd.optim.state import StatefulOptimizer

_OF_ADAM = ("amsgrad", "differentiable", "decoupled_weight_decay", "foreach", "fused")
_OF_SGD = ("dampening", "nesterov", "differentiable", "foreach", "fused")


class GrowingOptimizer(StatefulOptimizer):
    """An optimizer whose parameters may be replaced and whose traces may be forgotten."""

    @torch.no_grad()
    def replace(self, old: Tensor, new: Tensor) -> None:
        """Put `new` in the place of `old`, as where a head gets more classes.

        The traces of `old` are carried into the block that both shapes have in common, from the
        first row and column on. What is new begins with fresh traces, but with `old`'s step count:
        traces of old weights stay corrected as they were. The group, its hyperparameters and the
        name remain. The weights are yours to copy.

        Args:
            old: A parameter of this optimizer.
            new: Another one with as many dimensions; it may be smaller or larger.

        Raises:
            ValueError: One of them cannot take part; nothing was changed.

        Example:
            >>> import torch, upgd
            >>> head = torch.nn.Linear(4, 2)
            >>> opt = upgd.UPGD(head.parameters())
            >>> head(torch.ones(1, 4)).sum().backward()
            >>> opt.step()
            >>> larger = torch.nn.Linear(4, 3)
            >>> with torch.no_grad():
            ...     _ = larger.weight[:2].copy_(head.weight), larger.bias[:2].copy_(head.bias)
            >>> opt.replace(head.weight, larger.weight)
            >>> opt.replace(head.bias, larger.bias)
            >>> opt.utility(larger.weight).shape, bool(opt.utility(larger.weight)[2].any())
            (torch.Size([3, 4]), False)
        """
        with self._lock:
            group, index = self._find(old)
            self._check_new(old, new)
            group["params"][index] = new
            self._follow(old, new)
            state = self.state.pop(old, None)
            if state is not None:
                kept = {k: v.to(new.device) if k in CLOCK else v for k, v in state.items()}
                for name in self._state_names():
                    if name in state:
                        kept[name] = _carried(state[name], self._fresh(new, name))
                if MASTER in state:
                    exact = new.detach().to(torch.float32, copy=True)
                    kept[MASTER] = _carried(state[MASTER], exact)
                self.state[new] = kept
            self._forget_plans()

    @torch.no_grad()
    def reset(self, params: Tensor | Iterable[Tensor], rows: Any = None) -> None:
        """Forget the traces of `params`, or of some of their rows.

        Args:
            params: One or several parameters of this optimizer.
            rows: Which entries of dimension 0: numbers, a mask or a slice (:class:`FeatureUPGD`:
                which features). Their traces begin again at zero (or at the weights), under the
                old step count. By default all, and the step count begins again, too.

        Example:
            >>> import torch, upgd
            >>> model = torch.nn.Linear(4, 2)
            >>> opt = upgd.UPGD(model.parameters())
            >>> model(torch.ones(1, 4)).sum().backward()
            >>> opt.step()
            >>> opt.reset(model.parameters(), rows=[1])
            >>> opt.utility(model.weight).any(1).tolist()
            [True, False]
        """
        with self._lock:
            some = [params] if isinstance(params, Tensor) else list(params)
            for p in some:
                self._find(p)
            keepers = dict.fromkeys(self._keeper(p) for p in some)
            if rows is None:
                for p in keepers:
                    self.state.pop(p, None)
            else:
                if any(map(is_cut, keepers)):
                    raise ValueError(
                        f"{type(self).__name__}: rows of sharded parameters cannot be reset; leave "
                        "out rows"
                    )
                held = [(p, name) for p in keepers for name in self._row_states()]
                held = [(p, name) for p, name in held if name in self.state.get(p, ())]
                # All rows are looked up before any is changed: one may be out of range.
                fresh = [self._fresh(p, name)[rows] for p, name in held]
                for (p, name), values in zip(held, fresh, strict=True):
                    self.state[p][name][rows] = values
            self._forget_plans()

    def _row_states(self) -> tuple[str, ...]:
        """States whose dimension 0 is the parameter's."""
        return self.method.states

    def _find(self, p: Tensor) -> tuple[dict[str, Any], int]:
        """The group of a parameter and its place there."""
        for group in self.param_groups:
            for index, q in enumerate(group["params"]):
                if q is p:
                    return group, index
        what = f"this tensor of shape {tuple(p.shape)}" if isinstance(p, Tensor) else repr(p)
        raise ValueError(f"{type(self).__name__}: {what} is not a parameter of this optimizer")

    def _check_new(self, old: Tensor, new: Tensor) -> None:
        problem = ""
        if not isinstance(new, Tensor) or not new.is_leaf:
            problem = "must be a leaf tensor, such as an nn.Parameter"
        elif any(new is p for group in self.param_groups for p in group["params"]):
            problem = "is a parameter of this optimizer already"
        elif new.requires_grad and new.dtype not in DTYPES:
            problem = f"is {new.dtype}, not floating-point of 16, 32 or 64 bits"
        elif is_cut(new) or is_cut(old):
            problem = "is sharded, or it is; replace parameters before the model is sharded"
        elif new.dim() != old.dim():
            problem = f"has {new.dim()} dimensions; only as many, {old.dim()}, can carry traces"
        if problem:
            group, index = self._find(old)
            place = next(i for i, g in enumerate(self.param_groups) if g is group)
            name = parameter_name(group, index, place)
            raise ValueError(f"{type(self).__name__}: what replaces {name} {problem}")

    def _follow(self, old: Tensor, new: Tensor) -> None:
        """Tell others that `new` is in the place of `old`."""

    def _keeper(self, p: Tensor) -> Tensor:
        """The parameter under which the traces of `p` are kept."""
        return p


def _carried(old: Tensor, fresh: Tensor) -> Tensor:
    """`fresh` with the block that it has in common with `old`."""
    block = tuple(slice(min(a, b)) for a, b in zip(old.shape, fresh.shape, strict=True))
    fresh[block] = old[block].to(fresh.device, fresh.dtype)
    return fresh


# ------------------------------------------------------------- from other optimizers
def taken_groups(
    opt: Optimizer, dropped: Iterable[str], arguments: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The groups of another optimizer without what is `dropped` or given as an argument."""
    without = {*dropped, *arguments}
    return [{k: v for k, v in group.items() if k not in without} for group in opt.param_groups]


def groups_of_adam(owner: str, adam: Any, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of :class:`torch.optim.Adam` or ``AdamW``, for :class:`~upgd.AdaUPGD`."""
    if not isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
        raise _not_taken(owner, "takes a torch.optim.Adam or AdamW, not", type(adam).__name__)
    for group in adam.param_groups:
        decoupled = group.get("decoupled_weight_decay", isinstance(adam, torch.optim.AdamW))
        if group["amsgrad"]:
            raise _not_taken(owner, "has no maximum of second moments, that of amsgrad=True")
        if group.get("differentiable"):
            raise _not_taken(owner, "has no steps to differentiate through, differentiable=True")
        if group["weight_decay"] != 0 and not decoupled:
            raise _not_taken(
                owner,
                "decays weights apart from the moments, as AdamW; Adam's",
                f"weight_decay={group['weight_decay']!r} is part of its moments, so no decay does "
                "the same. Set it to 0 in its groups first",
            )
    return taken_groups(adam, _OF_ADAM, arguments)


def groups_of_sgd(owner: str, sgd: Any, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of :class:`torch.optim.SGD`, for :class:`~upgd.UPGD`."""
    if not isinstance(sgd, torch.optim.SGD):
        raise _not_taken(owner, "takes a torch.optim.SGD, not", type(sgd).__name__)
    for group in sgd.param_groups:
        for name in ("dampening", "nesterov", "differentiable"):
            if group.get(name):
                raise _not_taken(owner, "has no counterpart of", f"{name}={group[name]!r}")
        if group["weight_decay"] != 0 and group["momentum"] != 0:
            raise _not_taken(
                owner,
                "decays weights apart from the velocity; SGD's",
                f"weight_decay={group['weight_decay']!r} is part of it where there is momentum, so "
                "no decay does the same. Set it to 0 in its groups first",
            )
    return taken_groups(sgd, _OF_SGD, arguments)


def _not_taken(owner: str, *words: str) -> ValueError:
    return ValueError(f"{owner}.from_optimizer: {owner} {' '.join(words)}")


@torch.no_grad()
def take_states(
    opt: GrowingOptimizer, other: Optimizer, names: Mapping[str, str], counted: bool
) -> None:
    """Copy the states of another optimizer of the same parameters.

    Args:
        opt: Takes them.
        other: Keeps them.
        names: For states of `opt`, what they are called in `other`.
        counted: Whether `other` counts steps; else they begin at zero.
    """
    clocks: dict[Any, dict[str, Tensor]] = {}
    for p, theirs in other.state.items():
        if any(theirs.get(name) is None for name in names.values()):
            continue
        count = int(theirs["step"]) if counted else 0
        clock = {k: torch.tensor(count, dtype=torch.int64, device=p.device) for k in CLOCK}
        opt.state[p].update(clocks.setdefault((p.device, count), clock))
        for name in opt.method.states:
            fresh = opt._fresh(p, name)
            opt.state[p][name] = fresh.copy_(theirs[names[name]]) if name in names else fresh
