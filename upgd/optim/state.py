"""The state of an optimizer: counts, traces, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from upgd.optim.batch import compute_dtype
from upgd.optim.checks import CLOCK, MASTER, checked_seed, plain
from upgd.optim.configured import ConfiguredOptimizer
from upgd.optim.noise import PhiloxNoise
from upgd.optim.rounding import BITS, Rounding
from upgd.optim.shards import local, place_like
from upgd.rules.vocabulary import HYPERPARAMETERS

PLANS = ("_plan", "_fused_step")
"""What an optimizer remembers of its last step, to save time."""
IGNORED = "ignored"
"""Names the hyperparameters of a saved group that are not the optimizer's own."""


class StatefulOptimizer(ConfiguredOptimizer):
    """An optimizer whose state is lazy, exact to save and load, and counted on the device.

    Every parameter has a *clock*, a pair of zero-dimensional tensors: ``attempts`` counts
    its steps, ``step`` those that were not skipped. Parameters that have always been updated
    together share one, so that counting costs one operation and not one per parameter.
    """

    rounding: Rounding
    trace_dtype: torch.dtype | None
    master_weights: bool

    @property
    def skipped_steps(self) -> Tensor:
        """The most steps skipped for any parameter because of non-finite values.

        It stays on the device until it is read.
        """
        clocks = {id(s["step"]): s for s in self.state.values() if "step" in s}.values()
        if not clocks:
            return torch.zeros((), dtype=torch.int64)
        counts = [clock["attempts"] - clock["step"] for clock in clocks]
        return torch.stack([count.to(counts[0].device) for count in counts]).amax()

    def _ensure_state(self, params: list[Tensor]) -> None:
        """Create missing state, and separate the clocks of parameters that step apart."""
        fresh: dict[torch.device, dict[str, Tensor]] = {}
        for p in params:
            if "step" not in self.state[p]:
                if p.device not in fresh:
                    fresh[p.device] = _clock(p.device)
                self.state[p].update(fresh[p.device])
                self._init_state(p, self.state[p])
            state = self.state[p]
            for name in self._state_names():  # the model may have been cast meanwhile
                if name in state and state[name].dtype != (dtype := self._state_dtype(p, name)):
                    state[name] = state[name].to(dtype)
            if not self.master_weights or p.dtype not in BITS:
                self.state[p].pop(MASTER, None)
            elif MASTER not in self.state[p]:
                self.state[p][MASTER] = p.detach().to(torch.float32)
        if len(params) < sum("step" in state for state in self.state.values()):
            self._part_clocks(set(params))

    def _init_state(self, p: Tensor, state: dict[str, Any]) -> None:
        for name in self.method.states:
            state[name] = self._fresh(p, name)

    def _fresh(self, p: Tensor, name: str) -> Tensor:
        """A state as it begins."""
        dtype = self._state_dtype(p, name)
        if name in self.method.starts_as_weight:
            return p.detach().to(dtype, copy=True)
        return torch.zeros_like(p, dtype=dtype)

    def _forget_plans(self) -> None:
        """Have the next step find its tensors again."""
        for name in PLANS:
            self.__dict__.pop(name, None)

    # ---------------------------------------------------------------- precision
    def _state_dtype(self, p: Tensor, name: str) -> torch.dtype:
        """The dtype in which a state is kept."""
        dtype = compute_dtype(p.dtype)
        narrow = self.trace_dtype is not None and name in self._weight_states()
        return self.trace_dtype or dtype if narrow and dtype == torch.float32 else dtype

    @property
    def _rounds(self) -> bool:
        """Whether random bits may be needed."""
        return self.rounding == "stochastic" or self.trace_dtype in BITS

    def _rounded(self, names: Collection[str]) -> dict[str, int]:
        """Which of `names`, kept in 16 bits, are rounded stochastically, and by which bits."""
        slots = {"w": 0, **{name: k + 1 for k, name in enumerate(self.method.states)}}
        kept = slots if self.rounding == "stochastic" else self.method.states
        return {name: slots[name] for name in kept if name in names}

    @property
    def _bits(self) -> PhiloxNoise:
        """Where the random bits come from; the optimizer's noise may come from elsewhere."""
        bits: PhiloxNoise = self.__dict__.setdefault("_bit_source", PhiloxNoise())
        return bits

    def _part_clocks(self, active: set[Tensor]) -> None:
        """Give parameters that step now their own clock if another one pauses."""
        paused = {id(s["step"]) for p, s in self.state.items() if p not in active and "step" in s}
        parted: dict[int, dict[str, Tensor]] = {}
        for p in active:
            state = self.state[p]
            key = id(state["step"])
            if key in paused:
                parted.setdefault(key, {k: state[k].clone() for k in CLOCK})
                state.update(parted[key])

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, as :meth:`torch.optim.Optimizer.state_dict`.

        A group that a framework gave a hyperparameter of another optimizer (Transformers sets
        ``weight_decay`` in all groups) names it under ``"ignored"``.
        """
        saved: dict[str, Any] = super().state_dict()
        for group in saved.get("param_groups", ()):  # a hook may have changed it
            ignored = sorted((group.keys() & HYPERPARAMETERS.keys()) - self.defaults.keys())
            if ignored:
                group[IGNORED] = ignored
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; nothing is shared with it.

        Traces are converted to the precision in which this optimizer keeps them; the float32 copies
        of ``master_weights=True`` are dropped by an optimizer that keeps none.

        Options that an older dict lacks keep the group's value; hyperparameters that had another
        meaning are converted, with a warning. An invalid dict is refused as a whole.

        Raises:
            ValueError, TypeError: It is another optimizer's or another model's, or has values that
                the constructor would refuse. Nothing was loaded.
        """
        # The base class casts every state to its parameter's dtype. Restore the saved values
        # after the hooks that may replace the dict, and before those that read the result.
        taken: dict[str, Any] = {}

        def check(_: Any, given: Any) -> dict[str, Any]:
            taken.update(self._checked_state_dict(given))
            return taken

        hooks = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(lambda _: self._restore(taken), prepend=True),
        )
        try:
            with self._lock:
                super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _restore(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["state"]
        clocks: dict[Any, dict[str, Tensor]] = {}
        cut = {*self._weight_states(), MASTER}
        for key, p in self._by_key(state_dict):
            if key in saved:
                state = {
                    k: (place_like(p, v) if k in cut else v).to(p.device, copy=True)
                    if isinstance(v, Tensor)
                    else copy.deepcopy(v)
                    for k, v in saved[key].items()
                }
                if "step" in state:
                    counts = [int(saved[key][k]) for k in CLOCK]
                    clock = {
                        k: torch.tensor(n, dtype=torch.int64, device=p.device)
                        for k, n in zip(CLOCK, counts, strict=True)
                    }
                    state.update(clocks.setdefault((p.device, *counts), clock))
                for name in self._state_names():
                    if name in state:
                        state[name] = state[name].to(self._state_dtype(p, name))
                if not self.master_weights:
                    state.pop(MASTER, None)
                self.state[p] = state

    def _checked_state_dict(self, given: Any) -> dict[str, Any]:
        """The dict, completed; raises unless it is this optimizer's and valid."""
        owner = type(self).__name__
        states, groups = (
            (given.get("state"), given.get("param_groups"))
            if isinstance(given, Mapping)
            else (None, None)
        )
        if not isinstance(states, Mapping) or not isinstance(groups, list | tuple):
            raise ValueError(
                f"{owner}: a state dict has a dict 'state' and a list 'param_groups'; this has not"
            )
        pairs = zip(groups, self.param_groups, strict=False)
        full = [self._completed(group, own, place) for place, (group, own) in enumerate(pairs)]
        sizes = [len(group["params"]) for group in full] + [0] * (len(groups) - len(full))
        ours = [len(group["params"]) for group in self.param_groups]
        if sizes != ours:
            raise ValueError(
                f"{owner}: this state dict has groups of {sizes} parameters, the optimizer {ours}"
            )
        checked = {**given, "param_groups": full}
        keys = [key for group in full for key in group["params"]]
        if not all(isinstance(key, Hashable) for key in keys) or len(set(keys)) < len(keys):
            raise ValueError(f"{owner}: the groups of this state dict list a parameter twice")
        places = dict(self._by_key(checked))
        for key, state in states.items():
            if key not in places or not isinstance(state, Mapping):
                raise ValueError(
                    f"{owner}: the state {key!r} of this state dict is none of a parameter of its "
                    "groups"
                )
            self._check_saved_names(state)
        for key, state in states.items():
            if state:
                self._check_saved_state(state, places[key])
        return checked

    def _completed(self, group: Any, own: dict[str, Any], place: int) -> dict[str, Any]:
        """A saved group, checked; missing options are taken from our group."""
        owner = type(self).__name__
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            raise ValueError(f"{owner}: group {place} of this state dict lists no parameters")
        required = {*self.method.hyper, "seed", "noise_step"} - self.method.added
        # What this optimizer ignores was a framework's when it was saved, and is its own now.
        ignored = {*own, *group.get(IGNORED, ())}
        foreign = (group.keys() & HYPERPARAMETERS.keys()) - self.defaults.keys() - ignored
        self._refuse_state("groups", required - group.keys(), foreign)
        full = {**{k: own[k] for k in self.defaults if k in own}, **self._converted(group)}
        full.pop(IGNORED, None)
        full |= plain(full, self.method.hyperparameters)
        try:
            checked_seed(owner, full["seed"], drawn=False)
            self._check_group({**full, **{k: own[k] for k in own if k.startswith("param")}})
        except (TypeError, ValueError) as error:
            where = f"it is in group {place} of the state dict; nothing was loaded"
            raise type(error)(f"{error}: {where}") from None
        return full

    def _converted(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """A saved group with hyperparameters as this version understands them."""
        return group

    def _check_saved_names(self, state: Mapping[str, Any]) -> None:
        """Raise unless the names in a state are those that this optimizer keeps."""
        if state:
            missing = {*CLOCK, *self._weight_states()} - state.keys()
            foreign = {str(name) for name in state} - {*CLOCK, *self._state_names(), MASTER}
            self._refuse_state("states", missing, foreign)

    def _check_saved_state(self, state: Mapping[str, Any], p: Tensor) -> None:
        """Raise if a saved state has wrong shapes or impossible values."""
        owner = type(self).__name__
        for name in (*self._state_names(), MASTER):
            shape = p.shape if name == MASTER else self._state_shape(p, name)
            if name not in state:
                continue
            if not isinstance(state[name], Tensor):
                found = type(state[name]).__name__
                raise TypeError(f"{owner}: this state dict has a {name} of type {found}")
            if shape is not None and state[name].shape != shape:
                raise ValueError(
                    f"{owner}: this state dict is another model's or optimizer's; it has a {name} "
                    f"of shape {tuple(state[name].shape)} for a parameter where {tuple(shape)} is "
                    "kept"
                )
            if not state[name].is_floating_point() or not _is_finite(state[name]):
                raise ValueError(
                    f"{owner}: this state dict has a {name} that is not finite, for a parameter of "
                    f"shape {tuple(p.shape)}; nothing was loaded"
                )
        step, attempts = (_count(state[name]) for name in CLOCK)
        if step is None or attempts is None or step > attempts:
            found = ", ".join(f"{name} {state[name]!r}" for name in CLOCK).replace("\n", " ")
            raise ValueError(
                f"{owner}: counts in a state dict are integers, 0 <= step <= attempts; this has "
                f"{found}"
            )

    def _refuse_state(self, where: str, missing: set[str], foreign: set[str]) -> None:
        for names, what in ((missing, "lack"), (foreign, "have")):
            if names:
                raise ValueError(
                    f"{type(self).__name__}: this state dict is another optimizer's; its {where} "
                    f"{what} {', '.join(sorted(names))}"
                )

    def _by_key(self, state_dict: dict[str, Any]) -> Iterable[tuple[Any, Tensor]]:
        """Each parameter with its key in a state dict."""
        keys = [k for group in state_dict["param_groups"] for k in group["params"]]
        return zip(keys, (p for group in self.param_groups for p in group["params"]), strict=False)

    def _state_names(self) -> tuple[str, ...]:
        """All states that a parameter may have, besides its clock."""
        return self.method.states

    def _state_shape(self, p: Tensor, name: str) -> torch.Size | None:
        """The shape of a parameter's state; None if it is not fixed."""
        return p.shape

    def _state_shapes(self, p: Tensor) -> dict[str, torch.Size | None]:
        """Names and shapes that a parameter's state must have once it exists."""
        shapes: dict[str, torch.Size | None] = dict.fromkeys(CLOCK, torch.Size([]))
        held = [n for n in self._state_names() if n in self._weight_states() or n in self.state[p]]
        own = {MASTER: p.shape} if MASTER in self.state[p] else {}
        return {**shapes, **{name: self._state_shape(p, name) for name in held}, **own}

    def _weight_states(self) -> tuple[str, ...]:
        """States that are kept for every weight."""
        return self.method.states

    def __getstate__(self) -> dict[str, Any]:
        torchs = ("_optimizer_", "_zero_grad_profile", "_warned_capturable")
        skipped = (*PLANS, "_step_lock", "_meeting", "_task", "_bit_source")
        own = {
            k: v for k, v in self.__dict__.items() if k not in skipped and not k.startswith(torchs)
        }
        return {**super().__getstate__(), **own}

    @property
    def _lock(self) -> AbstractContextManager[Any]:
        """Serialises the steps of several threads."""
        lock: AbstractContextManager[Any] = self.__dict__.setdefault("_step_lock", RLock())
        return lock

    def _noise_step(self, device: torch.device) -> int | Tensor:
        """The number of this draw: an integer, or a tensor on the device for CUDA graphs.

        On the device it is the sum of all parameters' attempted steps, which grows with every
        step.
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


def _is_finite(t: Tensor) -> bool:
    return not t.is_meta and bool(local(t).isfinite().all())


def _count(value: Any) -> int | None:
    """A saved count as an integer; None if it is invalid."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.dim() == 0 and not value.is_meta:
        value = value.item()
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
    return int(value) if whole and 0 <= value < 2**63 else None
