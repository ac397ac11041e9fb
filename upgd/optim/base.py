"""The optimizer that every rule shares.

:class:`RuleOptimizer` knows no method. It gathers parameters and gradients, keeps
state, counts steps, draws noise, decides what to do about non-finite gradients, and
runs the phases of a :class:`~upgd.rules.vocabulary.Method`. One ``step()`` in order:

1. :meth:`RuleOptimizer._gather` (host): parameters that have a gradient become
   *batches* that share a group, a device, a dtype and a step count; noise is drawn.
2. :meth:`RuleOptimizer._advance` (device): gradients are checked, step counts advance,
   each phase runs over all batches, and reductions connect the phases.

Unless ``nonfinite="raise"``, nothing reads a value back, so no step waits for the device.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any, NamedTuple, TypeAlias, TypedDict
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from upgd import curvature
from upgd.optim import checks
from upgd.optim.batch import Batch, Member, compute_dtype, tiny, wide_dtype
from upgd.optim.checks import CLOCK, MASTER, parameter_name
from upgd.optim.collective import CollectiveOptimizer
from upgd.optim.configured import Nonfinite
from upgd.optim.features import OUTSIDE
from upgd.optim.fused import FusedStep, refuse
from upgd.optim.noise import GeneratorNoise, NoiseSource, PhiloxNoise, generator_seed
from upgd.optim.roles import bounds
from upgd.optim.rounding import Rounding, rounding_bits
from upgd.optim.shards import like, local, local_gradient
from upgd.optim.uncompiled import uncompiled
from upgd.rules.vocabulary import Method, Phase, as_numbers

Params: TypeAlias = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
_SIGNS = 0x51695  # separates the random signs of Hutchinson's estimate from the perturbations


_IN_BACKWARD: WeakValueDictionary[int, RuleOptimizer] = WeakValueDictionary()
"""The last optimizer with each seed that made a step inside a backward pass."""


class Common(TypedDict, total=False):
    """Arguments that every optimizer takes; :class:`RuleOptimizer` explains them."""

    seed: int | None
    noise: NoiseSource | None
    maximize: bool
    foreach: bool | None
    fused: bool
    capturable: bool
    nonfinite: Nonfinite | None
    rounding: Rounding
    trace_dtype: torch.dtype | None
    master_weights: bool
    process_group: Any


class BatchPlan(NamedTuple):
    """The batches of a step, and what must be unchanged for the next step to reuse them."""

    key: Any
    batches: list[Batch]


class RuleOptimizer(CollectiveOptimizer):
    """Base class: runs a :class:`~upgd.rules.vocabulary.Method` as a PyTorch optimizer.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or parameter groups.
        method: The rule to run.
        hyper: Values of the method's hyperparameters; groups may override them.
        options: Further per-group defaults of a subclass.
        seed: Determines the perturbations, together with the step. By default it is
            drawn from PyTorch's global generator, so ``torch.manual_seed`` governs it.
            In distributed training all processes take that of the first.
        noise: Where perturbations come from (default: :class:`GeneratorNoise`; with ``fused``
            and where processes hold parts of parameters :class:`PhiloxNoise`, the only one there).
        maximize: Ascend instead of descend. The gradient is negated before anything
            else, the utility included.
        foreach: ``True`` for the multi-tensor path, ``False`` for the plain rule on
            one tensor at a time, ``None`` for the faster one.
        fused: Update all parameters in one compiled kernel per pass: numba on CPU, Triton on
            CUDA. Not for feature-wise methods, and all parameters must be on one device.
        capturable: Allow ``step()`` inside a CUDA graph; each replay draws new noise.
        nonfinite: What happens to a step that reads a NaN, an infinity or a magnitude from
            which it may not stay finite (:meth:`Method.limit`), as a weight or a derivative.
            ``"raise"`` raises :class:`FloatingPointError` before anything changes, and reads
            one flag from the device; ``"skip"`` leaves weights, traces and counters as they
            are, without stopping the device, and counts (:attr:`skipped_steps`). By
            default ``"raise"`` on CPU and ``"skip"`` on accelerators.
        rounding: How 16-bit weights are stored: to the ``"nearest"`` number, or ``"stochastic"``,
            up or down at random and right on average, so that small steps are not lost
            (:mod:`upgd.optim.rounding`). No effect on wider weights.
        trace_dtype: ``torch.bfloat16`` keeps the traces of all but float64 weights in 16 bits,
            always rounded stochastically; by default they are float32.
        master_weights: Keep a float32 copy of 16-bit weights, which is updated; the weights are it,
            rounded to the nearest. What is written to a weight is taken over at the next step.
        process_group: The processes that train this model together (:mod:`upgd.optim.ranks`). By
            default those of ``torch.distributed``'s default group, if there is one; False for a
            process that trains a model of its own.
    """

    curvature: curvature.Curvature = "hesscale"
    fused = False
    rounding: Rounding = "nearest"
    trace_dtype: torch.dtype | None = None
    master_weights = False
    _task = OUTSIDE  # the last backward pass inside of which there was a step

    def __init__(
        self,
        params: Params,
        method: Method,
        hyper: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        *,
        seed: int | None = None,
        noise: NoiseSource | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool = False,
        capturable: bool = False,
        nonfinite: Nonfinite | None = None,
        rounding: Rounding = "nearest",
        trace_dtype: torch.dtype | None = None,
        master_weights: bool = False,
        process_group: Any = None,
        **unknown: Any,
    ) -> None:
        owner = type(self).__name__
        given = {"noise": noise, "nonfinite": nonfinite, "fused": fused}
        given["process_group"] = process_group
        checks.check_arguments(owner, self._arguments(), given, unknown)
        checks.check_precision(owner, rounding, trace_dtype, master_weights)
        self.rounding, self.trace_dtype, self.master_weights = rounding, trace_dtype, master_weights
        self.method = method
        default = PhiloxNoise() if fused else GeneratorNoise()
        self.noise: NoiseSource = noise if noise is not None else default
        self.nonfinite = nonfinite
        self.fused = fused
        self.process_group = process_group
        self._default_noise = noise is None
        if fused:
            refuse(self, foreach)
        defaults = {
            **hyper,
            **checks.plain(hyper, method.hyperparameters),
            **(options or {}),
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "seed": checks.checked_seed(owner, seed),
            "noise_step": 0,
        }
        super().__init__(params, defaults)

    # ------------------------------------------------------------ configuration
    def _phases(self, group: dict[str, Any]) -> tuple[Phase, ...]:
        """The method's phases under `group`'s options; all groups share the reductions."""
        return self.method.phases

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``GradScaler`` passes ``grad_scale`` and ``found_inf`` to the step."""
        return self.fused or any(group["capturable"] for group in self.param_groups)

    # --------------------------------------------------------------------- step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one update; with `closure`, evaluate it first and return its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling():  # torch.compile cannot trace a lock
            self._update()
        else:
            with self._lock:
                self._update()
        return loss

    def _update(self) -> None:
        if self.fused:
            self._step_fused()
        elif batches := self._gather(torch.compiler.is_compiling()):
            with torch.no_grad():
                self._advance(batches)
            for batch in batches:
                if batch.narrow:
                    batch.end()
        if getattr(self, "grad_scale", None) is not None:
            self._unscale()

    @torch.no_grad()
    def _unscale(self) -> None:
        """Unscale the gradients in place, as ``scaler.unscale_()`` and PyTorch's fused steps do."""
        alike: dict[torch.device, list[Tensor]] = defaultdict(list)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    alike[p.grad.device].append(local(p.grad))
        for device, gradients in alike.items():
            torch._foreach_div_(gradients, self.grad_scale.reshape(()).to(device))  # type: ignore[attr-defined]

    @uncompiled
    @torch.no_grad()
    def _step_fused(self) -> None:
        with self._lock:
            self._prepare()
            step: FusedStep | None = self.__dict__.get("_fused_step")
            if step is None:
                step = self._fused_step = FusedStep(self)
            step()

    def backward(
        self, loss: Tensor, *, scaler: Any = None, retain_graph: bool = False, samples: int = 1
    ) -> None:
        """Do what ``loss.backward()`` does, and compute whatever else this optimizer reads.

        First-order methods need nothing else. With ``order=2`` it stores the curvature for the next
        step on the parameters (or on the layers of `features`).

        Args:
            loss: A one-element tensor.
            scaler: A ``GradScaler``, instead of scaling the loss yourself.
            retain_graph: As in ``loss.backward``.
            samples: How many random vectors ``curvature="hutchinson"`` averages over; they
                are a function of the optimizer's seed and step.

        Example:
            >>> import torch, upgd
            >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())
            >>> opt = upgd.UPGD(model.parameters(), order=2)
            >>> opt.backward(model(torch.ones(2, 3)).square().mean())
            >>> opt.step()
        """
        if "curvature" not in self.method.needs:
            scaled = loss if scaler is None else scaler.scale(loss)
            scaled.backward(retain_graph=retain_graph)
            return
        group = self.param_groups[0]
        curvature.backward(
            loss,
            **self._curvature_of(),
            method=self.curvature,
            scaler=scaler,
            retain_graph=retain_graph,
            samples=samples,
            seed=generator_seed(group["seed"], group["noise_step"], offset=_SIGNS),
        )

    def _curvature_of(self) -> dict[str, Any]:
        """The parameters whose curvature a step reads."""
        return {"params": [p for group in self.param_groups for p in group["params"]]}

    @uncompiled
    @torch.no_grad()
    def _gather(self, compiling: bool) -> list[Batch]:
        """Collect this step's parameters and draw its noise: the only part that is not compiled.

        Where the other part is (`compiling`), scalars become tensors: it would be compiled again
        for each new number, as those of a scheduler.
        """
        self._prepare()
        members = self._members_with_gradient()
        mode = self._nonfinite_mode(members)
        if mode == "raise":
            self._raise_nonfinite(members)
        self._share_derivatives(members)
        if not members:
            self._take_part(members, checked=mode == "raise")
            return []
        batches = self._planned(members, gated=mode == "skip")
        for batch in batches:
            batch.begin()
            batch.scalars = self._scalars(batch)
            batch.load_decays([batch.scalars[decay] for decay in self.method.decays.values()])
            if compiling:
                batch.put_scalars()
            self._load_derivatives(batch)
        if self._rounds:
            self._draw_rounding(batches)
        self._draw_noise(batches)
        for batch in batches:
            batch.compile()
        return batches

    def _advance(self, batches: list[Batch]) -> None:
        """The computation; no value is read back to the host."""
        flags = self._finite(batches) if batches[0].gated else {}
        for batch in {id(b.step): b for b in batches}.values():
            batch.attempts.add_(1)
            batch.step.add_(flags.get(batch.device, 1))
        for batch in batches:
            names = [f"c_{trace}" for trace in self.method.decays]
            if any(batch.reads(name) for name in names):
                batch.scalars.update(zip(names, batch.corrections(), strict=True))
            if self.method.period is not None and self.method.reads("due"):
                batch.scalars["due"] = batch.due(batch.scalars[self.method.period])
        for index in range(len(batches[0].phases)):
            for batch in batches:
                batch.run(index, flags.get(batch.device))
            self._reduce(batches, index)

    # ------------------------------------------------------------------- gather
    def _prepare(self) -> None:
        """What every step begins with, on all paths."""
        self._meet()
        task = torch._C._current_graph_task_id()
        if task != OUTSIDE:
            self._check_in_backward(task)

    def _check_in_backward(self, task: int) -> None:
        """Raise where a step inside the backward pass number `task` would be wrong.

        So it is with one optimizer per parameter, each stepped by a hook once its gradient exists.
        """
        owner = type(self).__name__
        if any(phase.reduce == "max" for phase in self.method.phases):
            raise RuntimeError(
                f"{owner}: a step inside a backward pass cannot know the largest utility of all "
                "weights, since other gradients do not exist yet; make the optimizer with "
                "scaling='local', or call step() after backward()"
            )
        if not any(self.method.is_perturbed(group) for group in self.param_groups):
            return
        seed = self.param_groups[0]["seed"]
        other = _IN_BACKWARD.get(seed)
        if other is not None and other is not self and other._task == task:
            raise RuntimeError(
                f"{owner}: two optimizers with seed={seed} step inside one backward pass and would "
                "give their parameters the same noise; leave out seed=, or give each its own"
            )
        _IN_BACKWARD[seed], self._task = self, task

    def _members_with_gradient(self) -> list[Member]:
        """The parameters that this step updates, with their memory checked."""
        owner = type(self).__name__
        found = []
        offset, parts = 0, iter(self._ranks.parts)
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                part = next(parts)
                if p.grad is not None and p.numel() > 0:
                    checks.check_gradient(owner, group, i, g)
                    if "step" in self.state.get(p, ()):
                        shapes = self._state_shapes(p)
                        checks.check_state(owner, group, i, g, self.state[p], shapes)
                    found.append(Member(g, i, offset, p, part))
                offset += math.prod(part.shape)
        return found

    def _nonfinite_mode(self, members: list[Member]) -> Nonfinite:
        """``"raise"`` to check before anything changes, ``"skip"`` to obey a flag on the device."""
        if getattr(self, "found_inf", None) is not None:
            return "skip"
        if self.nonfinite is not None:
            return self.nonfinite
        capturable = any(group["capturable"] for group in self.param_groups)
        kinds = {m.param.device.type for m in members} or {self._ranks.device.type}
        return "raise" if kinds == {"cpu"} and not capturable else "skip"

    def _refuse_capture(self) -> None:
        """Raise if a CUDA graph is being captured: new state would be set up at every replay."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__}: run a step on the same parameters before capturing; "
                "state that is set up during capture would be set up again at every replay"
            )

    def _raise_nonfinite(self, members: list[Member]) -> None:
        """Raise and name the parameter if a step may not stay finite."""
        read = self._read(members)
        alike: dict[Any, list[Tensor]] = defaultdict(list)
        for _, _, t, limit in read:
            alike[t.device, t.dtype, limit].append(t)
        # A norm is one cheap pass, and bounds all elements.
        norms = [
            (torch.stack(torch._foreach_norm(ts)).to(compute_dtype(dtype)), limit)
            for (_, dtype, limit), ts in alike.items()
        ]
        within = all(bool((norm <= limit).all()) for norm, limit in norms)
        if self._agree(within):
            return
        for whose, what, t, limit in read:
            largest = float(torch.linalg.vector_norm(t, torch.inf)) if t.numel() else 0.0
            if not largest <= limit:
                finite = math.isfinite(largest)
                wrong = f"reaches {largest:.3g}, over the limit {limit:.3g}"
                name = whose if isinstance(whose, str) else self._name(whose)
                raise FloatingPointError(
                    f"{type(self).__name__}: the {what} of {name} "
                    f"{wrong if finite else 'is not finite'}; nothing was updated. "
                    + (
                        "Load earlier weights; a mask belongs in a buffer"
                        if what == "weight"
                        else "nonfinite='skip' leaves such steps out instead"
                    )
                )
        if self._ranks.size > 1 and within:
            raise FloatingPointError(
                f"{type(self).__name__}: another process has a weight or derivative that is not "
                "finite or over the limit, and says which; nothing was updated"
            )

    def _read(self, members: list[Member]) -> list[tuple[Member | str, str, Tensor, float]]:
        """The weights and derivatives of a step: whose, what, the tensor, and its limit."""
        curved = "curvature" in self.method.needs
        found: list[tuple[Member | str, str, Tensor, float]] = []
        for m in members:
            p, limit = m.param, self.method.limit(compute_dtype(m.param.dtype))
            h = getattr(p, "curvature", None) if curved else None
            for what, t in (("weight", m.local), ("gradient", local_gradient(p)), ("curvature", h)):
                if isinstance(t, Tensor):
                    found.append((m, what, t, limit))
        return found

    def _planned(self, members: list[Member], gated: bool) -> list[Batch]:
        """The batches for these parameters; reuses those of the last step if nothing changed."""
        plan: BatchPlan | None = self.__dict__.get("_plan")
        key = self._structure(members, gated)
        if plan is not None and plan.key == key:
            return plan.batches
        self._refuse_capture()
        self._ensure_state([m.param for m in members])
        self._describe_noise()
        batches = self._batches(members, gated)
        self._plan = BatchPlan(self._structure(members, gated), batches)
        return batches

    def _structure(self, members: list[Member], gated: bool) -> Any:
        """Everything that a plan depends on; equal keys mean equal plans."""
        params = []
        kept = (*CLOCK, *self.method.states, MASTER)
        for group, place, offset, p, part in members:
            where = (group, place, offset, id(p), p.shape, p.dtype, p.device, part)
            state = self.state[p]
            tensors = [local(t) for t in map(state.get, kept) if t is not None]
            held = [(id(t), t.data_ptr(), t.dtype) for t in tensors]
            params.append((where, id(state), held))
        options = tuple((id(g), g["foreach"], g.get("protect")) for g in self.param_groups)
        return params, options, gated

    def _batches(self, members: list[Member], gated: bool) -> list[Batch]:
        sets: dict[Any, list[Member]] = defaultdict(list)
        known = self._bounds()
        for m in members:
            clock = id(self.state[m.param]["step"])
            sets[m.group, m.param.dtype, clock, known[m.group][m.place]].append(m)
        found = [self._batch(some, gated) for some in sets.values()]
        for batch, (*_, bound) in zip(found, sets, strict=True):
            batch.bound = bound
        return found

    def _bounds(self) -> list[list[float]]:
        """For each group, the bound of each parameter's layer, or 0 where no rule reads it."""
        if not self.method.reads("bound"):
            return [[0.0] * len(group["params"]) for group in self.param_groups]
        return [bounds([tuple(p.shape) for p in group["params"]]) for group in self.param_groups]

    def _batch(self, members: list[Member], gated: bool) -> Batch:
        group = self.param_groups[members[0].group]
        by_row = any(p.reduce == "row_norm" and p.over == "weights" for p in self._phases(group))
        if by_row:  # neighbouring rows of one length are reduced together
            members = sorted(members, key=lambda m: m.local.numel() // max(1, _rows(m.local)))
        params = [m.param for m in members]
        targets = {"w": [self._by_rows(m.param, m.local) for m in members]}
        for name in self._weight_states():
            targets[name] = [local(self.state[p][name]) for p in params]
        mastered = all(MASTER in self.state[p] for p in params)
        if mastered:
            targets["w"] = [self._by_rows(p, local(self.state[p][MASTER])) for p in params]
        batch = self._new_batch(group, members, params[0], self._phases(group), targets, gated)
        batch.copies = [self._by_rows(m.param, m.local) for m in members] if mastered else []
        batch.row_counts = [_rows(p) for p in targets["w"]]
        batch.row_names = frozenset({"eta"} if by_row else ())
        for name in self._weight_states():
            for p, tensor in zip(params, batch.targets[name], strict=True):
                if local(self.state[p][name]) is not tensor:  # it has moved
                    self.state[p][name] = like(p, tensor)
        return batch

    def _by_rows(self, p: Tensor, t: Tensor) -> Tensor:
        """A view of `t`, which is shaped like `p`, whose rows lead into one unit each."""
        return t

    def _new_batch(
        self,
        group: dict[str, Any],
        members: list[Member],
        clock_of: Tensor,
        phases: tuple[Phase | None, ...],
        targets: dict[str, list[Tensor]],
        gated: bool,
    ) -> Batch:
        clock = self.state[clock_of]
        return Batch(
            group,
            members,
            clock["step"],
            clock["attempts"],
            compute_dtype(clock_of.dtype),
            self.method.limit(compute_dtype(clock_of.dtype)),
            phases,
            targets,
            row_counts=[],
            row_names=frozenset(),
            gated=gated,
            foreach=group["foreach"] is None or bool(group["foreach"]),
        )

    # ------------------------------------------------------------- this step's values
    def _scalars(self, batch: Batch) -> dict[str, Any]:
        scalars = as_numbers({name: batch.group[name] for name in self.method.hyper})
        if self.method.reads("bound"):
            scalars["bound"] = batch.bound
        lr = scalars["lr"]
        if isinstance(lr, Tensor):
            scalars["lr"] = lr.reshape(()).to(batch.device, batch.dtype, non_blocking=True)
        return scalars

    def _load_derivatives(self, batch: Batch) -> None:
        given = {"g": (self._gradients(batch), self._factor(batch, scaled=True))}
        if batch.reads("h"):
            h = [self._curvature(m) for m in batch.members]
            for m in batch.members:  # valid for one step
                m.param.__dict__.pop("curvature", None)
            given["h"] = (h, self._factor(batch, scaled=False))
        batch.load_derivatives(given)

    def _gradients(self, batch: Batch) -> list[Tensor]:
        return [local_gradient(m.param) for m in batch.members]

    def _factor(self, batch: Batch, *, scaled: bool) -> float | Tensor:
        """The factor from derivatives of a maximised or scaled loss to those of the objective."""
        sign = -1.0 if batch.group["maximize"] else 1.0
        scale = getattr(self, "grad_scale", None) if scaled else None
        return sign if scale is None else sign / scale.to(batch.device, batch.dtype).reshape(())

    def _curvature(self, m: Member) -> Tensor:
        """The Hessian diagonal stored on the parameter."""
        h = getattr(m.param, "curvature", None)
        if h is None and self._moves_nothing(self.param_groups[m.group]):
            return torch.zeros_like(m.param)
        if h is None:
            raise ValueError(
                f"{type(self).__name__}: order=2 needs curvature and {self._name(m)} has none for "
                "this step; call opt.backward(loss) instead of loss.backward(), or put a Hessian "
                "diagonal on each parameter as `p.curvature` before every step"
            )
        reason = curvature.stale(m.param)
        if reason is not None:
            raise ValueError(
                f"{type(self).__name__}: the curvature of {self._name(m)} {reason}; call "
                "opt.backward(loss) before every step"
            )
        if not isinstance(h, Tensor) or h.shape != m.param.shape:
            found = (
                f"shape {tuple(h.shape)}" if isinstance(h, Tensor) else f"type {type(h).__name__}"
            )
            raise ValueError(
                f"{type(self).__name__}: the curvature of {self._name(m)} has {found}, not the "
                "parameter's shape"
            )
        return h

    @staticmethod
    def _moves_nothing(group: dict[str, Any]) -> bool:
        """Whether the step size is 0: distributed checkpoints set up state by such a step."""
        return float(group["lr"]) == 0.0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients and stored curvature."""
        super().zero_grad(set_to_none)
        if "curvature" in self.method.needs:
            for group in self.param_groups:
                for p in group["params"]:
                    p.__dict__.pop("curvature", None)

    def _draw_rounding(self, batches: list[Batch]) -> None:
        """Draw the random bits by which this step rounds, one call per device."""
        asking: dict[torch.device, list[Batch]] = defaultdict(list)
        for batch in batches:
            if batch.members and self._rounded(batch.narrow):
                asking[batch.device].append(batch)
        for device, some in asking.items():
            wanted = {slot for batch in some for slot in self._rounded(batch.narrow).values()}
            offsets = [m.offset for batch in some for m in batch.members]
            found = self._draw_bits(offsets, wanted, device)
            first = 0
            for batch in some:
                end = first + sum(t.numel() for t in batch.targets["w"])
                for name, slot in self._rounded(batch.narrow).items():
                    batch.load_bits(name, found[slot][first:end])
                first = end

    def _draw_bits(
        self, offsets: list[int], slots: Iterable[int], device: torch.device
    ) -> dict[int, Tensor]:
        seed, step = self.param_groups[0]["seed"], self._noise_step(device)
        return rounding_bits(self._bits, offsets, slots, seed=seed, step=step, device=device)

    def _draw_noise(self, batches: list[Batch]) -> None:
        """Draw this step's perturbations, one call per device, and pass them to the batches."""
        asking: dict[torch.device, list[Batch]] = defaultdict(list)
        for batch in batches:
            if batch.reads("noise"):
                if not self.method.is_perturbed(batch.group):
                    batch.absent.add("noise")
                    batch.lists.pop("noise", None)
                else:
                    asking[batch.device].append(batch)
        for device, some in asking.items():
            members = [m for batch in some for m in batch.members]
            doubles = any(m.param.dtype == torch.float64 for m in members)
            flat = self.noise.draw(
                [m.local.numel() for m in members],
                [m.offset for m in members],
                seed=self.param_groups[0]["seed"],
                step=self._noise_step(device),
                device=device,
                dtype=torch.float64 if doubles else torch.float32,
            )
            first = 0
            for batch in some:
                size = sum(m.local.numel() for m in batch.members)
                batch.load_flat("noise", flat[first : first + size] if len(some) > 1 else flat)
                first += size
        for group in self.param_groups:
            group["noise_step"] += 1

    # ------------------------------------------------------------------ advance
    def _finite(self, batches: list[Batch]) -> dict[torch.device, Tensor]:
        """A flag on every device: whether the step stays finite on all devices."""
        home = batches[0].device
        devices = {batch.device for batch in batches}
        largest: dict[float, list[Tensor]] = defaultdict(list)
        for batch in batches:
            largest[batch.limit] += [x.to(home) for x in batch.largest_read()]
        ok = reduce(  # false for NaN
            torch.logical_and, [reduce(torch.maximum, xs) <= at for at, xs in largest.items()]
        )
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None:
            ok = ok & (found_inf.to(home).reshape(()) == 0)
        ok = self._combine_finite(ok)
        return {device: ok.to(device) for device in devices} if len(devices) > 1 else {home: ok}

    def _reduce(self, batches: list[Batch], index: int) -> None:
        """Store ``eta`` for the next phase in every batch that ran this one."""
        ran = [b for b in batches if b.phases[index] is not None]
        phase = ran[0].phases[index] if ran else None
        if phase is None or phase.reduce is None:
            return
        trace = phase.writes[0]
        if phase.reduce == "row_norm":
            norms = [batch.row_norms(trace) for batch in ran]
            if self._ranks.sharded:
                rows = [n.split(batch.row_counts) for n, batch in zip(norms, ran, strict=True)]
                parts = [m.part for batch in ran for m in batch.members]
                self._combine_rows(list(zip(parts, itertools.chain(*rows), strict=True)))
            for batch, found in zip(ran, norms, strict=True):
                batch.load_rows("eta", found)
        else:
            for batch, eta in zip(ran, self._eta(ran, trace), strict=True):
                batch.scalars["eta"] = eta

    def _eta(self, batches: list[Batch], trace: str) -> list[Tensor]:
        """The guarded maximum over all batches, in units of each batch's uncorrected trace."""
        largest = [batch.largest(trace) for batch in batches]
        if self._correction_cancels(batches, trace):
            eta = largest[0] if len(largest) == 1 else torch.stack(largest).amax()
            return [_guarded(eta, batch.dtype) for batch in batches]
        corrections = [self._correction(batch, trace) for batch in batches]
        wide = wide_dtype(batches[0].device)
        hats = [
            (u / c).to(batches[0].device, wide) for u, c in zip(largest, corrections, strict=True)
        ]
        eta = self._combine(torch.stack(hats).amax())
        return [
            _guarded((eta.to(batch.device) * c).to(batch.dtype), batch.dtype)
            for batch, c in zip(batches, corrections, strict=True)
        ]

    def _correction(self, batch: Batch, trace: str) -> Tensor:
        if trace not in self.method.decays:
            return torch.ones((), dtype=batch.dtype, device=batch.device)
        return batch.corrections()[list(self.method.decays).index(trace)]

    def _correction_cancels(self, batches: list[Batch], trace: str) -> bool:
        """Whether all traces have one age, decay and dtype, so that Û/η = U/max U."""
        if self._ranks.sharded:
            return False  # other shards may hold traces of another age
        decays = list(self.method.decays)
        decay = decays.index(trace) if trace in decays else None
        first = batches[0]
        return all(
            b.step is first.step
            and b.dtype == first.dtype
            and (decay is None or b.decay_values[decay] == first.decay_values[decay])
            for b in batches
        )

    def _name(self, m: Member) -> str:
        return parameter_name(self.param_groups[m.group], m.place, m.group)


def _guarded(eta: Tensor, dtype: torch.dtype) -> Tensor:
    """max(|η|, tiny); ignores NaN, which would reach other weights through η."""
    return eta.abs().clamp_min(tiny(dtype)).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _rows(p: Tensor) -> int:
    """The number of rows: one per output unit; a vector is a single row."""
    return p.shape[0] if p.dim() > 1 else 1
