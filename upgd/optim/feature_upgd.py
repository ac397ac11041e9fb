"""UPGD with one utility per hidden feature instead of one per weight."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from upgd.curvature import Curvature
from upgd.optim.base import Common, Params
from upgd.optim.batch import Batch, Member, compute_dtype, wide_dtype
from upgd.optim.features import FeatureLayer, Features
from upgd.optim.ranks import Ranks, process_group
from upgd.optim.shards import Part
from upgd.optim.upgd import Scaling, UtilityOptimizer, update_non_protecting, update_protecting
from upgd.rules.vocabulary import Method, Phase


# ------------------------------------------------------------------------- the rule
def trace_first_order(f: Any, utility: Any, beta_utility: Any) -> Any:
    """u ← β·u + (1-β)·(-f)"""
    return beta_utility * utility - (1 - beta_utility) * f


def trace_second_order(f: Any, s: Any, utility: Any, beta_utility: Any) -> Any:
    """u ← β·u + (1-β)·(½·s - f)"""
    return beta_utility * utility + (1 - beta_utility) * (0.5 * s - f)


@cache
def feature_upgd_method(
    scaling: Scaling = "global", order: int = 1, protect: bool = True
) -> Method:
    """The method for one of the eight feature-wise variants.

    The second phase is weight-wise UPGD's, with each feature's utility broadcast to the
    weights that lead into it. Parameters that lead into no feature have the utility
    :func:`output_utility` and no noise: with an ``output_gate`` of 1, gradient descent.
    """
    return Method(
        hyper=("lr", "output_gate", "weight_decay", "sigma", "beta_utility"),
        states=("utility",),
        decays={"utility": "beta_utility"},
        added=frozenset({"output_gate"}),
        phases=(
            Phase(
                trace_second_order if order == 2 else trace_first_order,
                writes=("utility",),
                reduce="max" if scaling == "global" else "row_norm",
                over="features",
            ),
            Phase(update_protecting if protect else update_non_protecting, writes=("w",)),
        ),
    )


def output_utility(output_gate: float) -> float:
    """The scaled utility u with the gate 2·φ(-u) = `output_gate`."""
    if output_gate in (0, 2):
        return math.inf if output_gate == 0 else -math.inf
    return math.log(2 / output_gate - 1)


# --------------------------------------------------------------------- the optimizer
class FeatureUPGD(UtilityOptimizer):
    r"""UPGD with a utility per hidden feature.

    .. math::
        w_{j\cdot} \leftarrow (1 - \alpha\lambda)\, w_{j\cdot}
            - 2\alpha\, (g_{j\cdot} + \xi)\,(1 - \bar u_j)

    for every weight and bias into feature :math:`j`, where :math:`\bar u_j` scales the
    trace of :math:`-f_j` (``order=2``: :math:`\tfrac12 s_j - f_j`), the derivatives of the
    loss with respect to a gate on that feature's output. ``scaling="global"`` divides by
    the largest utility of all features of all layers, ``"local"`` by the norm over the
    layer. The output layer takes gradient descent with weight decay and without noise, its steps
    multiplied by ``output_gate``.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or parameter groups.
        features: What measures the gates; see :class:`~upgd.Features` for which outputs
            count as features and which layer is the output. Without it, call :meth:`watch`
            before the first step.
        output_gate: Factor of the output layer's steps, from 0 to 2. The paper's algorithm has 2:
            there the output layer takes the step α, and hidden weights without utility α/2. Without
            effect with ``protect=False``, where steps are not gated.
        lr, weight_decay, beta_utility, sigma, scaling, order, protect, curvature: See
            :class:`~upgd.UPGD`.
        common: ``seed``, ``noise``, ``maximize``, ``foreach``, ``capturable``,
            ``nonfinite``, ``rounding``, ``trace_dtype`` and ``master_weights`` of
            :class:`~upgd.optim.base.RuleOptimizer`.

    Example:
        >>> import torch, upgd
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> opt = upgd.FeatureUPGD(model.parameters(), features=upgd.Features(model))
        >>> model(torch.ones(3, 4)).square().mean().backward()
        >>> opt.step()
        >>> opt.scaled_utility(model[0].weight).shape  # one per feature
        torch.Size([8])
    """

    build = staticmethod(feature_upgd_method)
    _step_supports_amp_scaling = True  # gates see the scaled loss, so the scale must be known

    def __init__(
        self,
        params: Params,
        features: Features | None = None,
        lr: float | Tensor = 0.01,
        weight_decay: float = 0.0,
        beta_utility: float = 0.999,
        sigma: float = 0.01,
        output_gate: float = 1.0,
        scaling: Scaling = "global",
        order: int = 1,
        protect: bool = True,
        curvature: Curvature = "hesscale",
        **common: Unpack[Common],
    ) -> None:
        if features is not None and not isinstance(features, Features):
            raise TypeError(f"FeatureUPGD: features must be upgd.Features(model), got {features!r}")
        self.features = Features.nothing() if features is None else features
        hyper = {"lr": lr, "weight_decay": weight_decay, "sigma": sigma}
        hyper |= {"beta_utility": beta_utility, "output_gate": output_gate}
        super().__init__(params, hyper, scaling, order, protect, curvature, **common)
        if features is not None and process_group(self.process_group) is None:
            self._refuse_other_features(features)

    def _refuse_other_features(self, features: Features) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        if all(features.of(p) is None for p in params):
            raise ValueError(
                "FeatureUPGD: no parameter leads into a feature of `features`; it must watch the "
                "model whose parameters these are, not another one or a copy"
            )

    def _check_utilities(self, features: Features) -> None:
        """Raise if the utilities that there are already are those of other features."""
        for p in [p for group in self.param_groups for p in group["params"]]:
            utility = self.state.get(p, {}).get("utility")
            layer = features.of(p)
            if utility is not None and (layer is None or utility.shape != (layer.size,)):
                keeps = "none" if layer is None else f"{layer.size} features"
                raise ValueError(
                    f"FeatureUPGD: this optimizer has utilities of {len(utility)} features for a "
                    f"parameter of shape {tuple(p.shape)}, where the model has {keeps}; watch the "
                    "layers that were watched when its state was saved"
                )

    def watch(
        self,
        model: nn.Module,
        output: str | Iterable[str] | None = None,
        layers: Iterable[str] | None = None,
    ) -> Features:
        """Watch the features of `model`: for an optimizer that was made from parameters alone.

        Call it before the first forward pass whose gradients a step reads. A state dict may have
        been loaded before. Watching again, as after a model was wrapped, replaces the hooks.

        Args:
            model: The model whose parameters these are.
            output: Name or names of the output layers; by default the last layer.
            layers: Names of the layers whose units are features; by default all others.

        Returns:
            The features; ``print`` shows them.

        Example:
            >>> import torch, upgd
            >>> from torch import nn
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            >>> opt = upgd.FeatureUPGD(model.parameters(), lr=0.1)  # as a framework does
            >>> opt.watch(model)
            Features(
              0: 8 features, gates on the output of ... (known after a forward pass)
              output: 2
            )
        """
        features = Features(model, output, layers)
        try:
            if process_group(self.process_group) is None:
                self._refuse_other_features(features)
            self._check_utilities(features)
        except ValueError:
            features.remove()
            raise
        with self._lock:
            self.features.remove()
            self.features = features
            self._meeting = None
            self._forget_plans()
        return features

    def _prepare(self) -> None:
        if not self.features.layers:
            raise RuntimeError(
                "FeatureUPGD: no model is watched, so there are no gates to measure; call "
                "opt.watch(model) before the first forward pass, or pass features=Features(model)"
            )
        super()._prepare()

    def _curvature_of(self) -> dict[str, Any]:
        return {"params": (), "features": self.features}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients and the derivatives of the gates."""
        super().zero_grad(set_to_none)
        self.features.reset()

    def _unscale(self) -> None:
        super()._unscale()
        for layer in self.features.layers:
            if layer.first is not None:
                layer.first = layer.first / self.grad_scale.to(layer.first.device)  # type: ignore[attr-defined]

    # -------------------------------------------------------------------- state
    def _owner(self, layer: FeatureLayer) -> Tensor:
        """The parameter that keeps the layer's utility: its first in this optimizer."""
        held = {p for group in self.param_groups for p in group["params"]}
        return next(p for p in layer.params if p in held)

    def _weight_states(self) -> tuple[str, ...]:
        return ()

    def _ensure_state(self, params: list[Tensor]) -> None:
        layers = {layer for p in params if (layer := self.features.of(p)) is not None}
        owners = [self._owner(layer) for layer in layers]
        super()._ensure_state(list(dict.fromkeys([*params, *owners])))
        for owner in owners:
            if "utility" not in self.state[owner]:
                self.state[owner]["utility"] = self._fresh(owner, "utility")

    def _fresh(self, p: Tensor, name: str) -> Tensor:
        dtype = compute_dtype(p.dtype)
        return torch.zeros(self._state_shape(p, name) or (), dtype=dtype, device=p.device)

    def _keeper(self, p: Tensor) -> Tensor:
        layer = self.features.of(p)
        return p if layer is None else self._owner(layer)

    def _check_new(self, old: Tensor, new: Tensor) -> None:
        super()._check_new(old, new)
        if self.features.layers:
            self.features.check_new(new)

    def _follow(self, old: Tensor, new: Tensor) -> None:
        if self.features.layers:
            self.features.replace(old, new)

    def _init_state(self, p: Tensor, state: dict[str, Any]) -> None:
        pass

    def _state_shape(self, p: Tensor, name: str) -> torch.Size | None:
        layer = self.features.of(p)
        return None if layer is None else torch.Size([layer.size])

    # ------------------------------------------------------------------- gather
    def _batches(self, members: list[Member], gated: bool) -> list[Batch]:
        batches = super()._batches(members, gated)
        found = [self.features.of(m.param) for m in members]
        places = {p: g for g, group in enumerate(self.param_groups) for p in group["params"]}
        sets: dict[Any, list[FeatureLayer]] = defaultdict(list)
        for layer in dict.fromkeys(layer for layer in found if layer is not None):
            owner = self._owner(layer)
            sets[places[owner], owner.dtype, id(self.state[owner]["step"])].append(layer)
        for (g, _, _), layers in sets.items():
            batches.append(self._feature_batch(self.param_groups[g], layers, gated))
        order = {layer: i for i, layer in enumerate(x for b in batches for x in b.layers)}
        for batch in batches:
            into = [self.features.of(m.param) for m in batch.members]
            batch.feature_index = [-1 if layer is None else order[layer] for layer in into]
        return batches

    def _batch(self, members: list[Member], gated: bool) -> Batch:
        hidden_first = sorted(members, key=lambda m: self.features.of(m.param) is None)
        batch = super()._batch(hidden_first, gated)
        batch.phases = (None, batch.phases[1])
        batch.row_counts = [p.shape[0] if p.dim() > 0 else 1 for p in batch.targets["w"]]
        batch.row_names = frozenset({"utility"})
        return batch

    def _feature_batch(
        self, group: dict[str, Any], layers: list[FeatureLayer], gated: bool
    ) -> Batch:
        owners = [self._owner(layer) for layer in layers]
        targets = {"utility": [self.state[p]["utility"] for p in owners]}
        phases = (self._phases(group)[0], None)
        batch = self._new_batch(group, [], owners[0], phases, targets, gated)
        batch.row_counts = [1] * len(layers)  # a layer's features are scaled together
        for owner, utility in zip(owners, batch.targets["utility"], strict=True):
            self.state[owner]["utility"] = utility
        batch.layers = layers
        return batch

    def _structure(self, members: list[Member], gated: bool) -> Any:
        views = [(m.param.data_ptr(), m.param.stride()) for m in members if self._turned(m.param)]
        return super()._structure(members, gated), self.features.count, views

    def _turned(self, p: Tensor) -> bool:
        layer = self.features.of(p)
        return layer is not None and layer.transposed and p.dim() == 2

    def _by_rows(self, p: Tensor, t: Tensor) -> Tensor:
        return t.t() if self._turned(p) else t

    def _gather(self, compiling: bool) -> list[Batch]:
        batches: list[Batch] = super()._gather(compiling)
        for layer in self.features.layers:
            layer.second = None  # valid for one step
        return batches

    def _load_derivatives(self, batch: Batch) -> None:
        if not batch.layers:
            super()._load_derivatives(batch)
            return
        scaler_ran = getattr(self, "found_inf", None) is not None
        if scaler_ran and getattr(self, "grad_scale", None) is None:
            raise RuntimeError(
                "FeatureUPGD: after scaler.unscale_() the loss scale that the gates saw is not "
                "known; leave the unscaling to scaler.step()"
            )
        first = [self._measured(batch, layer, "first") for layer in batch.layers]
        given = {"f": (first, self._factor(batch, scaled=True))}
        if self.order == 2:
            second = [self._measured(batch, layer, "second") for layer in batch.layers]
            given["s"] = (second, self._factor(batch, scaled=False))
        batch.load_derivatives(given)

    def _gradients(self, batch: Batch) -> list[Tensor]:
        found = super()._gradients(batch)
        return [self._by_rows(m.param, g) for m, g in zip(batch.members, found, strict=True)]

    @property
    def _synchronises(self) -> bool:
        return True  # gates are measured on the samples of each process

    def _refuse_shards(self, ranks: Ranks) -> None:
        super()._refuse_shards(ranks)
        if not ranks.sharded:  # else this process may hold the output layer alone
            self._refuse_other_features(self.features)
        params = [p for group in self.param_groups for p in group["params"]]
        turned = [part for p, part in zip(params, ranks.parts, strict=True) if self._turned(p)]
        if any(part.size[1:] != part.shape[1:] for part in ranks.parts) or not all(
            part.whole for part in turned
        ):
            raise TypeError(
                "FeatureUPGD: the weights into a feature must lie on one process, as rows of a "
                "weight do with fully_shard (FSDP2), DDP and ZeRO; tensor parallelism along other "
                "dimensions cuts them, and any shards of Transformers' Conv1D do"
            )

    def _share_derivatives(self, members: list[Member]) -> None:
        """Average the derivatives of the gates over the processes, as DDP and FSDP do gradients."""
        if self._ranks.size == 1:
            return
        layers = self.features.layers
        device = self._ranks.device
        kinds = ("first", "second")[: self.order]
        held = [(layer, kind, getattr(layer, kind)) for kind in kinds for layer in layers]
        values = [
            torch.zeros(layer.size, dtype=torch.float64, device=device) if v is None else v.double()
            for layer, _, v in held
        ]
        means = self._ranks.mean(torch.cat(values)).split([len(v) for v in values])
        for (layer, kind, own), value in zip(held, means, strict=True):
            if own is not None or any(p.grad is not None for p in layer.own):
                setattr(layer, kind, value.to(layer._dtype))

    def _measured(
        self, batch: Batch, layer: FeatureLayer, which: Literal["first", "second"]
    ) -> Tensor:
        values: Tensor | None = getattr(layer, which)
        reason = layer.stale() if which == "second" else None
        if reason is not None:
            raise ValueError(
                f"FeatureUPGD: the curvature of layer {layer.name!r} {reason}; call "
                "opt.backward(loss) before every step"
            )
        if values is not None:
            return values
        if self._moves_nothing(batch.group):
            return torch.zeros(layer.size, device=batch.device, dtype=batch.dtype)
        if which == "second":
            raise ValueError(
                f"FeatureUPGD: order=2 needs curvature and layer {layer.name!r} has none for this "
                "step; call opt.backward(loss) instead of loss.backward(), or set `layer.second` "
                "before every step"
            )
        raise RuntimeError(
            f"FeatureUPGD: layer {layer.name!r} has gradients but its gates were not measured; run "
            "the forward pass through the model given to Features, with gradients enabled, and "
            "fill .grad by backward(), or leave the layer out with Features(model, layers=...). A "
            "model that has run under torch.compile does not see new hooks: make Features(model) "
            "first"
        )

    def _read(self, members: list[Member]) -> list[tuple[Member | str, str, Tensor, float]]:
        found = super()._read(members)
        for layer in self.features.layers:
            for values in (layer.first, layer.second):
                if values is not None and values.numel() > 0:
                    limit = self.method.limit(compute_dtype(values.dtype))
                    found.append((f"layer {layer.name!r}", "gate derivative", values, limit))
        return found

    def _draw_noise(self, batches: list[Batch]) -> None:
        super()._draw_noise(batches)
        for batch in batches:
            noise = batch.lists.get("noise")
            if noise is not None:
                # The output layer is not perturbed; it stands last.
                hidden = sum(index >= 0 for index in batch.feature_index)
                if isinstance(noise, Tensor):
                    noise[sum(m.local.numel() for m in batch.members[:hidden]) :].zero_()
                else:
                    for output in noise[hidden:]:
                        output.zero_()

    # ------------------------------------------------------------------ advance
    def _reduce(self, batches: list[Batch], index: int) -> None:
        """Hand each feature's utility Û/η to the weights that lead into it."""
        if index > 0:
            return
        measured = [batch for batch in batches if batch.layers]
        if self.scaling == "local":
            etas = []
        elif measured:
            etas = self._eta(measured, "utility")
        else:  # other processes may hold weights into features
            device, etas = batches[0].device, []
            self._combine(torch.full((), -math.inf, dtype=wide_dtype(device), device=device))
        scaled: list[Tensor] = []
        for i, batch in enumerate(measured):
            eta = etas[i] if etas else list(batch.row_norms("utility").unbind())
            scaled += torch._foreach_div(batch.targets["utility"], eta)
        for batch in batches:
            if not batch.layers:
                rows = [
                    _held(scaled[i], m.part).to(batch.dtype)
                    for i, m in zip(batch.feature_index, batch.members, strict=True)
                    if i >= 0
                ]
                output = sum(batch.row_counts) - sum(r.numel() for r in rows)
                if output:
                    u = output_utility(batch.group["output_gate"])
                    same = torch.full((), u, dtype=batch.dtype, device=batch.device)
                    rows.append(same.expand(output))
                batch.load_rows("utility", torch.cat(rows))
                batch.scalars["eta"] = 1.0  # it is in the utility already

    # ------------------------------------------------------------------ looking
    def utility(self, p: Tensor) -> Tensor:
        """The bias-corrected utility of each feature that `p` leads into: a vector."""
        held = any(q is p for group in self.param_groups for q in group["params"])
        return super()._corrected(self._keeper(p) if held else p)


def _held(utilities: Tensor, part: Part) -> Tensor:
    """Of the features that a parameter leads into, those whose weights are held here."""
    return utilities if part.whole else utilities[part.start[0] : part.start[0] + part.size[0]]
