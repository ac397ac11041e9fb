"""The configuration of an optimizer: its arguments and its parameter groups."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from torch.optim import Optimizer

from upgd.optim import checks
from upgd.rules.vocabulary import Method

Nonfinite: TypeAlias = Literal["raise", "skip"]


class ConfiguredOptimizer(Optimizer):
    """An optimizer whose groups hold a method's hyperparameters, checked."""

    method: Method
    nonfinite: Nonfinite | None
    _warned = False  # of hyperparameters in groups that are not the method's

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its hyperparameters are checked, missing ones take the defaults."""
        self._refuse_own(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.update(checks.plain(group, self.method.hyperparameters))
        try:
            self._check_group(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if not self._warned:
            owner = type(self).__name__
            self._warned = checks.warn_ignored(owner, group, self.defaults)
        # All groups draw from one sequence; a new group joins at its current position.
        group["noise_step"] = self.param_groups[0]["noise_step"]
        group["seed"] = self.param_groups[0]["seed"]
        self._group_added()

    def _group_added(self) -> None:
        """What a subclass knows of its parameters may have changed."""

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise if a group's options or parameters are invalid."""
        place, hyper = len(self.param_groups) - 1, self.method.hyperparameters.values()
        checks.check_group(type(self).__name__, group, place, hyper, self.nonfinite)

    def _refuse_own(self, group: Any) -> None:
        """Raise if a group sets an option that all groups share."""
        names = [n for n in self._arguments() if hasattr(self, n) and n not in self.defaults]
        shared = {name: getattr(self, name) for name in names}
        if self.param_groups:
            shared["seed"] = self.param_groups[0]["seed"]
        checks.refuse_own(type(self).__name__, group, shared)

    @classmethod
    def _arguments(cls) -> tuple[str, ...]:
        return checks.arguments_of(cls, ConfiguredOptimizer)
