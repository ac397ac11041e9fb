"""Steps that several processes take together."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from upgd.optim.batch import Member, wide_dtype
from upgd.optim.growing import GrowingOptimizer
from upgd.optim.noise import NoiseSource, PhiloxNoise
from upgd.optim.ranks import Ranks, meet
from upgd.optim.shards import Part


class CollectiveOptimizer(GrowingOptimizer):
    """An optimizer that knows which processes train its model, and what each holds of it."""

    process_group: Any = None
    noise: NoiseSource
    _meeting: Ranks | None = None
    _default_noise = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.process_group)] = self.process_group  # processes cannot be copied
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return new

    def _group_added(self) -> None:
        self._meeting = None

    def _meet(self) -> None:
        """Before the first step, or the first with other parameters: find out who holds what."""
        params = [p for group in self.param_groups for p in group["params"]]
        if self._meeting is not None and self._meeting.holds(params):
            return
        ranks = meet(self, params)
        self._refuse_shards(ranks)
        if ranks.sharded and not isinstance(self.noise, PhiloxNoise):
            if not self._default_noise:
                raise TypeError(
                    f"{type(self).__name__}: this process holds a part of the model, and only "
                    "upgd.optim.noise.PhiloxNoise, the default there, knows the noise of a part; "
                    f"got noise={self.noise!r}"
                )
            self.noise = PhiloxNoise()
        self._meeting = ranks
        self._describe_noise()

    @property
    def _ranks(self) -> Ranks:
        """The processes that take a step together, known from the first step on."""
        if self._meeting is None:
            self._meet()
        assert self._meeting is not None
        return self._meeting

    def _refuse_shards(self, ranks: Ranks) -> None:
        """Raise where a method cannot be run on parts of a model."""
        owner = type(self).__name__
        if ranks.sharded and "curvature" in self.method.needs:
            raise TypeError(
                f"{owner}: order=2 walks the graph of whole parameters, and this process holds a "
                "part of the model; use order=1, or DDP"
            )
        by_row = any(p.reduce == "row_norm" and p.over == "weights" for p in self.method.phases)
        if by_row and any(part.flat for part in ranks.parts):
            raise TypeError(
                f"{owner}: FSDP1 has flattened the parameters, and scaling='local' needs their "
                "rows; use fully_shard (FSDP2) or scaling='global'"
            )

    @property
    def _synchronises(self) -> bool:
        """Whether the processes wait for each other in every step."""
        return self._ranks.sharded or "curvature" in self.method.needs

    def _take_part(
        self, members: list[Member], checked: bool = False, raises: bool = False
    ) -> None:
        """A step of a process that holds no weight to update: others wait for its word.

        Args:
            members: Parameters of which it holds nothing; their steps are counted.
            checked: Whether it has been agreed already that the step is finite.
            raises: Whether the others raise if it is not.
        """
        if not self._ranks.sharded:
            return
        device = self._ranks.device
        ok = torch.tensor(True, device=device)
        if not checked:
            ok = self._combine_finite(ok)
        for phase in self.method.phases:
            if phase.reduce == "max":
                self._combine(torch.full((), -math.inf, dtype=wide_dtype(device), device=device))
            elif phase.reduce == "row_norm" and phase.over == "weights":
                self._combine_rows([])
        if raises and not ok:
            self._raise_nonfinite([])
        self._ensure_state([m.param for m in members])
        for clock in {id(s["step"]): s for s in (self.state[m.param] for m in members)}.values():
            clock["attempts"].add_(1)
            clock["step"].add_(ok)
        for group in self.param_groups:
            group["noise_step"] += 1

    def _combine(self, eta: Tensor) -> Tensor:
        """The maximum of `eta`, the largest corrected trace here, over all parts of the model."""
        return self._ranks.maximum(eta) if self._ranks.sharded else eta

    def _combine_finite(self, ok: Tensor) -> Tensor:
        """Whether the step is finite in all parts of the model."""
        return self._ranks.agree(ok) if self._ranks.sharded else ok

    def _combine_rows(self, held: list[tuple[Part, Tensor]]) -> None:
        """Complete the norms of rows of which other processes hold a part."""
        if self._ranks.sharded:
            self._ranks.whole_rows(held)

    def _share_derivatives(self, members: list[Member]) -> None:
        """Average over replicas what DDP does not: curvatures."""
        ranks = self._ranks
        if ranks.size == 1 or "curvature" not in self.method.needs or not members:
            return
        own = [self._curvature(m) for m in members]
        mean = ranks.mean(torch.cat([h.reshape(-1) for h in own]))
        for h, values in zip(own, mean.split([h.numel() for h in own]), strict=True):
            h.copy_(values.view(h.shape))

    def _agree(self, ok: bool) -> bool:
        """Whether all processes that wait for each other in a step say yes."""
        if self._ranks.size == 1 or not self._synchronises:
            return ok
        return bool(self._ranks.agree(torch.tensor(ok, device=self._ranks.device)))

    def _describe_noise(self) -> None:
        if isinstance(self.noise, PhiloxNoise):
            self.noise.describe(self._ranks.parts)
        if self._rounds:
            self._bits.first = getattr(self.noise, "first", 0)
            self._bits.describe(self._ranks.parts)

    def _restore(self, state_dict: dict[str, Any]) -> None:
        super()._restore(state_dict)
        self._meeting = None  # seeds and numbers of draws may be others

    def _curvature(self, m: Member) -> Tensor:
        raise NotImplementedError

    def _raise_nonfinite(self, members: list[Member]) -> None:
        raise NotImplementedError
