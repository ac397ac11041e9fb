"""What an optimizer keeps from step to step: counts, traces, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from upgd.optim.batch import compute_dtype
from upgd.optim.checks import CLOCK
from upgd.rules.vocabulary import HYPERPARAMETERS, Method


class StatefulOptimizer(Optimizer):
    """An optimizer whose state is lazy, exact to save and load, and counted on the device.

    Every parameter has a *clock*, a pair of zero-dimensional tensors: ``attempts`` counts
    its steps, ``step`` those that were not skipped. Parameters that have always been updated
    together share one, so that counting costs one operation and not one per parameter.
    """

    method: Method

    @property
    def skipped_steps(self) -> Tensor:
        """The most steps that non-finite gradients left out for any parameter.

        It stays on the device until it is read.
        """
        clocks = {id(s["step"]): s for s in self.state.values() if "step" in s}.values()
        if not clocks:
            return torch.zeros((), dtype=torch.int64)
        counts = [clock["attempts"] - clock["step"] for clock in clocks]
        return torch.stack([count.to(counts[0].device) for count in counts]).amax()

    def _ensure_state(self, params: list[Tensor]) -> None:
        """Create missing state, and see that parameters share a clock only with their peers."""
        fresh: dict[torch.device, dict[str, Tensor]] = {}
        for p in params:
            if "step" not in self.state[p]:
                if p.device not in fresh:
                    fresh[p.device] = _clock(p.device)
                self.state[p].update(fresh[p.device])
                self._init_state(p, self.state[p])
            for name in self.method.states:  # the model may have been cast meanwhile
                if name in self.state[p]:
                    self.state[p][name] = self.state[p][name].to(compute_dtype(p.dtype))
        if len(params) < sum("step" in state for state in self.state.values()):
            self._part_clocks(set(params))

    def _init_state(self, p: Tensor, state: dict[str, Any]) -> None:
        dtype = compute_dtype(p.dtype)
        for name in self.method.states:
            if name in self.method.starts_as_weight:
                state[name] = p.detach().to(dtype, copy=True)
            else:
                state[name] = torch.zeros_like(p, dtype=dtype)

    def _part_clocks(self, active: set[Tensor]) -> None:
        """Give parameters that step now a clock of their own where a peer pauses."""
        paused = {id(s["step"]) for p, s in self.state.items() if p not in active and "step" in s}
        parted: dict[int, dict[str, Tensor]] = {}
        for p in active:
            state = self.state[p]
            key = id(state["step"])
            if key in paused:
                parted.setdefault(key, {k: state[k].clone() for k in CLOCK})
                state.update(parted[key])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; traces keep their precision, and nothing is shared with it."""
        self._check_state_dict(state_dict)
        # The base class casts every state to its parameter's dtype. After the hooks that may
        # exchange the dict, and before those that look at the result, take it as it was saved.
        taken: dict[str, Any] = {}
        hooks = (
            self.register_load_state_dict_pre_hook(lambda _, given: taken.update(given)),
            self.register_load_state_dict_post_hook(lambda _: self._restore(taken), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _restore(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["state"]
        clocks: dict[Any, dict[str, Tensor]] = {}
        for key, p in self._by_key(state_dict):
            if key in saved:
                state = {
                    k: torch.as_tensor(v).to(p.device, copy=True) for k, v in saved[key].items()
                }
                if "step" in state:
                    reading = (p.device, *[int(state[k]) for k in CLOCK])
                    state.update(clocks.setdefault(reading, {k: state[k] for k in CLOCK}))
                self.state[p] = state

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse another optimizer's state before anything is loaded."""
        from upgd.optim.registry import METHODS

        states = {name for row in METHODS.values() for name in row.states}
        own = {*CLOCK, *self.method.states}
        for group in state_dict["param_groups"]:
            # Loading makes PyTorch add a default that earlier dicts do not have.
            missing = self.defaults.keys() - group.keys() - {"differentiable"}
            foreign = (group.keys() & HYPERPARAMETERS.keys()) - self.defaults.keys()
            self._refuse_state("groups", missing, foreign)
        for state in state_dict["state"].values():
            missing = {*CLOCK, *self._weight_states()} - state.keys()
            self._refuse_state("states", missing, (state.keys() & states) - own)
        for key, p in self._by_key(state_dict):
            state, shape = state_dict["state"].get(key, {}), self._state_shape(p)
            wrong = [n for n in self.method.states if n in state and state[n].shape != shape]
            if wrong and shape is not None:
                raise ValueError(
                    f"{type(self).__name__}: this state dict is another model's or optimizer's; "
                    f"it has a {wrong[0]} of shape {tuple(state[wrong[0]].shape)} for a parameter "
                    f"where {tuple(shape)} is kept"
                )

    def _refuse_state(self, where: str, missing: set[str], foreign: set[str]) -> None:
        for names, what in ((missing, "lack"), (foreign, "have")):
            if names:
                raise ValueError(
                    f"{type(self).__name__}: this state dict is another optimizer's; its {where} "
                    f"{what} {', '.join(sorted(names))}"
                )

    def _by_key(self, state_dict: dict[str, Any]) -> Iterable[tuple[Any, Tensor]]:
        """Each parameter with the key that a state dict has for it."""
        keys = [k for group in state_dict["param_groups"] for k in group["params"]]
        return zip(keys, (p for group in self.param_groups for p in group["params"]), strict=False)

    def _state_shape(self, p: Tensor) -> torch.Size | None:
        """The shape of what is kept for a parameter; None where anything goes."""
        return p.shape

    def _state_shapes(self, p: Tensor) -> dict[str, torch.Size | None]:
        """What a parameter's state must hold once there is one, and of which shape."""
        shapes: dict[str, torch.Size | None] = dict.fromkeys(CLOCK, torch.Size([]))
        held = [n for n in self.method.states if n in self._weight_states() or n in self.state[p]]
        return {**shapes, **dict.fromkeys(held, self._state_shape(p))}

    def _weight_states(self) -> tuple[str, ...]:
        """States that are kept for every weight."""
        return self.method.states

    def __getstate__(self) -> dict[str, Any]:
        torchs = ("_optimizer_", "_zero_grad_profile", "_warned_capturable")
        skipped = ("_plan", "_fused_step")
        own = {
            k: v for k, v in self.__dict__.items() if k not in skipped and not k.startswith(torchs)
        }
        return {**super().__getstate__(), **own}

    def _noise_step(self, device: torch.device) -> int | Tensor:
        """The number of this draw: from the host, or from the device where a graph may replay it.

        On the device it is the sum of all parameters' attempted steps: every step makes
        it larger, whichever parameters take part.
        """
        if device.type != "cuda" or not any(g["capturable"] for g in self.param_groups):
            return int(self.param_groups[0]["noise_step"])
        clocks: dict[int, tuple[int, dict[str, Any]]] = {}
        for state in self.state.values():
            if "step" in state and state["step"].device == device:
                count, _ = clocks.get(id(state["step"]), (0, state))
                clocks[id(state["step"])] = (count + 1, state)
        attempts = [n * state["attempts"] for n, state in clocks.values()]
        return attempts[0] if len(attempts) == 1 else torch.stack(attempts).sum()


def _clock(device: torch.device) -> dict[str, Tensor]:
    return {name: torch.zeros((), dtype=torch.int64, device=device) for name in CLOCK}
