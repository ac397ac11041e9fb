"""UPGD: utility-based perturbed gradient descent, weight by weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from typing_extensions import Self, Unpack

from upgd.curvature import Curvature
from upgd.optim import convention, growing
from upgd.optim.base import Common, Params, RuleOptimizer, _rows
from upgd.optim.batch import compute_dtype, row_norms, tiny, wide_dtype
from upgd.optim.shards import Part, like, local
from upgd.rules.ops import sigmoid
from upgd.rules.vocabulary import HYPERPARAMETERS, Method, Phase, Reduce

Scaling: TypeAlias = Literal["global", "local"]
Rule: TypeAlias = Callable[..., Any]


# ------------------------------------------------------------------------- the rule
def trace_first_order(w: Any, g: Any, utility: Any, beta_utility: Any) -> Any:
    """U ← β·U + (1-β)·(-g·w)"""
    return beta_utility * utility + (1 - beta_utility) * (-g * w)


def trace_second_order(w: Any, g: Any, h: Any, utility: Any, beta_utility: Any) -> Any:
    """U ← β·U + (1-β)·(½·h·w² - g·w)"""
    return beta_utility * utility + (1 - beta_utility) * (0.5 * h * w - g) * w


# 1 - φ(x) is written φ(-x), which keeps its precision where a weight is almost protected. A weight
# without utility has φ(0) = ½, so twice that is the whole step.
def update_protecting(
    w: Any, g: Any, utility: Any, noise: Any, eta: Any, lr: Any, weight_decay: Any, sigma: Any
) -> Any:
    """w ← (1-αλ)·w - 2α·(g + ξ)·(1-Ū)"""
    return (1 - lr * weight_decay) * w - 2 * lr * ((g + sigma * noise) * sigmoid(utility / -eta))


def update_non_protecting(
    w: Any, g: Any, utility: Any, noise: Any, eta: Any, lr: Any, weight_decay: Any, sigma: Any
) -> Any:
    """w ← (1-αλ)·w - α·(g + 2ξ·(1-Ū))"""
    return (1 - lr * weight_decay) * w - lr * (g + 2 * sigma * noise * sigmoid(utility / -eta))


# fmt: off
def traces_first_order(
    w: Any, g: Any, utility: Any, velocity: Any, beta_utility: Any, momentum: Any
) -> Any:
    """The first-order utility trace, and V ← μ·V + g"""
    return trace_first_order(w, g, utility, beta_utility), momentum * velocity + g


def traces_second_order(
    w: Any, g: Any, h: Any, utility: Any, velocity: Any, beta_utility: Any, momentum: Any
) -> Any:
    """The second-order utility trace, and V ← μ·V + g"""
    return trace_second_order(w, g, h, utility, beta_utility), momentum * velocity + g


def move_protecting(
    w: Any, velocity: Any, utility: Any, noise: Any, eta: Any,
    lr: Any, weight_decay: Any, sigma: Any,
) -> Any:
    """w ← (1-αλ)·w - 2α·(V + ξ)·(1-Ū)"""
    return update_protecting(w, velocity, utility, noise, eta, lr, weight_decay, sigma)


def move_non_protecting(
    w: Any, velocity: Any, utility: Any, noise: Any, eta: Any,
    lr: Any, weight_decay: Any, sigma: Any,
) -> Any:
    """w ← (1-αλ)·w - α·(V + 2ξ·(1-Ū))"""
    return update_non_protecting(w, velocity, utility, noise, eta, lr, weight_decay, sigma)
# fmt: on


@cache
def upgd_method(
    scaling: Scaling = "global", order: int = 1, protect: bool = True, momentum: bool = False
) -> Method:
    """The method for one of the weight-wise variants; `momentum` keeps one state more."""
    traces: dict[tuple[int, bool], Rule] = {
        (1, False): trace_first_order,
        (2, False): trace_second_order,
        (1, True): traces_first_order,
        (2, True): traces_second_order,
    }
    updates: dict[tuple[bool, bool], Rule] = {
        (True, False): update_protecting,
        (False, False): update_non_protecting,
        (True, True): move_protecting,
        (False, True): move_non_protecting,
    }
    states = ("utility", "velocity") if momentum else ("utility",)
    reduce: Reduce = "max" if scaling == "global" else "row_norm"
    return Method(
        hyper=("lr", "weight_decay", "sigma", "beta_utility", *(["momentum"] if momentum else [])),
        states=states,
        decays={"utility": "beta_utility"},
        phases=(
            Phase(traces[order, momentum], writes=states, reduce=reduce),
            Phase(updates[protect, momentum], writes=("w",)),
        ),
        power=order + 1,
    )


# -------------------------------------------------------------------- the optimizers
class UtilityOptimizer(RuleOptimizer):
    """Base class of optimizers that gate by a utility per weight."""

    @staticmethod
    def build(scaling: Scaling, order: int, protect: bool) -> Method:
        """The method for these options."""
        raise NotImplementedError

    def __init__(
        self,
        params: Params,
        hyper: dict[str, Any],
        scaling: Scaling,
        order: int,
        protect: bool,
        curvature: Curvature,
        **common: Unpack[Common],
    ) -> None:
        owner = type(self).__name__
        if scaling not in ("global", "local"):
            raise ValueError(f"{owner}: scaling must be 'global' or 'local', got {scaling!r}")
        if order not in (1, 2):
            raise ValueError(f"{owner}: order must be 1 or 2, got {order!r}")
        if curvature not in get_args(Curvature):
            known = ", ".join(map(repr, get_args(Curvature)))
            raise ValueError(f"{owner}: curvature must be one of {known}, got {curvature!r}")
        self.scaling: Scaling = scaling
        self.curvature = curvature
        self.order = order
        method = self.build(scaling, order, bool(protect))
        options = {"protect": protect, convention.CONVENTION: convention.CURRENT}
        super().__init__(params, method, hyper, options, **common)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if not isinstance(group["protect"], bool):
            raise TypeError(
                f"{type(self).__name__}: protect must be True or False, got {group['protect']!r}"
            )
        convention.check(type(self).__name__, group)

    def _converted(self, group: Mapping[str, Any]) -> dict[str, Any]:
        features = "gates" in self.method.needs
        return convention.converted(group, self.defaults["protect"], features)

    def _checked_state_dict(self, given: Any) -> dict[str, Any]:
        checked = super()._checked_state_dict(given)
        convention.warn(type(self).__name__, given["param_groups"], checked["param_groups"])
        return checked

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        groups = self.param_groups  # of an optimizer that was pickled as a whole
        found = [self._converted(group) for group in groups]
        convention.warn(type(self).__name__, groups, found)
        for group, new in zip(groups, found, strict=True):
            group.update(new)
        self.defaults.update(self._converted(self.defaults))

    def _phases(self, group: dict[str, Any]) -> tuple[Phase, ...]:
        return self.build(self.scaling, self.order, group["protect"]).phases

    def _traced(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """The utility trace of what is held here of a parameter, and its bias correction."""
        groups = [g for g in self.param_groups if any(q is p for q in g["params"])]
        if not groups or "utility" not in self.state.get(p, {}):
            raise KeyError(
                f"{type(self).__name__}: no utility for this tensor of shape {tuple(p.shape)}; "
                "it is not a parameter of this optimizer, or has not been updated yet"
            )
        state, beta = self.state[p], groups[0]["beta_utility"]
        utility = local(state["utility"])
        utility = utility.to(compute_dtype(utility.dtype))
        steps = state["step"].clamp_min(1)  # before the first that was not skipped, U = 0
        correction = 1 - torch.pow(beta, steps.to(wide_dtype(p.device)))
        return utility, correction.to(utility.dtype)

    def _corrected(self, p: Tensor) -> Tensor:
        utility, correction = self._traced(p)
        return utility / correction

    @torch.no_grad()
    def utility(self, p: Tensor) -> Tensor:
        """The bias-corrected utility trace Û of a parameter, shaped like it."""
        return like(p, self._corrected(p))

    @torch.no_grad()
    def scaled_utility(self, p: Tensor) -> Tensor:
        """The scaled utility Ū of a parameter, shaped like it.

        ½ is no utility, 0 a weight that does only harm. With global scaling the largest is
        φ(1) = 0.73: such a weight takes 0.54 of a step, and no weight stands still.

        η is taken over all parameters that have a trace, whether or not the last step
        updated them. Where processes hold parts of the model, call it in all of them.

        Example:
            >>> import torch, upgd
            >>> model = torch.nn.Linear(3, 2)
            >>> opt = upgd.UPGD(model.parameters())
            >>> model(torch.ones(1, 3)).sum().backward()
            >>> opt.step()
            >>> opt.scaled_utility(model.weight).shape
            torch.Size([2, 3])
        """
        return self._scaled(p, self.utility(p), self._eta_of_all())

    def _eta_of_all(self) -> Tensor | None:
        """η over all parameters that have a trace; None if it is local."""
        if self.scaling == "local":
            return None
        traces = [self._corrected(q) for q in self.state if "utility" in self.state[q]]
        largest = [u.amax() for u in traces if u.numel()] or [torch.tensor(-torch.inf)]
        device = self._ranks.device
        wide = [x.to(device, wide_dtype(device)) for x in largest]
        return self._combine(torch.stack(wide).amax()).abs()

    def _scaled(self, p: Tensor, whole: Tensor, eta: Tensor | None) -> Tensor:
        utility = local(whole)
        if eta is None:
            rows = utility.reshape(_rows(utility), utility.numel() // max(1, _rows(utility)))
            norms = row_norms([rows])
            self._combine_rows([(self._part(p), norms)])
            return like(whole, torch.sigmoid(rows / norms.unsqueeze(1)).reshape(utility.shape))
        return like(whole, torch.sigmoid(utility / eta.to(utility).clamp_min(tiny(utility.dtype))))

    def _part(self, p: Tensor) -> Part:
        params = [q for group in self.param_groups for q in group["params"]]
        return next(part for q, part in zip(params, self._ranks.parts, strict=True) if q is p)

    @torch.no_grad()
    def utilities(self) -> dict[str, Tensor]:
        """The bias-corrected utilities Û of all parameters that have been updated, by name.

        Where the optimizer got no names, they are group and place: ``"0.3"``. With a utility per
        feature there is a vector for every parameter that leads into features.

        Example:
            >>> import torch, upgd
            >>> model = torch.nn.Linear(3, 2)
            >>> opt = upgd.UPGD(model.named_parameters())
            >>> model(torch.ones(1, 3)).sum().backward()
            >>> opt.step()
            >>> {name: tuple(utility.shape) for name, utility in opt.utilities().items()}
            {'weight': (2, 3), 'bias': (2,)}
        """
        return {name: self.utility(p) for name, p in self._named()}

    @torch.no_grad()
    def scaled_utilities(self) -> dict[str, Tensor]:
        """The scaled utilities Ū of :meth:`scaled_utility`, by the names of :meth:`utilities`."""
        found = [(name, p, self.utility(p)) for name, p in self._named()]
        eta = self._eta_of_all()
        return {name: self._scaled(p, utility, eta) for name, p, utility in found}

    def _named(self) -> list[tuple[str, Tensor]]:
        """The parameters that have a utility, with their names or places."""
        found = []
        for place, group in enumerate(self.param_groups):
            numbers = [f"{place}.{i}" for i in range(len(group["params"]))]
            pairs = zip(group.get("param_names", numbers), group["params"], strict=True)
            found += [(n, p) for n, p in pairs if "utility" in self.state.get(self._keeper(p), ())]
        return found


class UPGD(UtilityOptimizer):
    r"""Utility-based perturbed gradient descent, for a utility per weight.

    .. math::
        w \leftarrow (1 - \alpha\lambda)\, w - 2\alpha\, (g + \xi)\,(1 - \bar U),
        \qquad \xi \sim \mathcal N(0, \sigma^2)

    with the scaled utility :math:`\bar U = \phi(\hat U / \eta)`, where :math:`\hat U` is
    the bias-corrected trace of :math:`-g w` (``order=2``: :math:`\tfrac12 h w^2 - g w`),
    :math:`\phi` the sigmoid, and :math:`\eta` the absolute value of the largest
    :math:`\hat U` of all weights in all groups (``scaling="local"``: the norm of
    :math:`\hat U` over the weights into the same output unit, dimension 0 of a
    weight). With ``weight_decay`` > 0 this is the paper's UPGD-W. With
    ``protect=False`` (N-UPGD) only the noise is gated:
    :math:`w \leftarrow (1 - \alpha\lambda) w - \alpha (g + 2\xi (1 - \bar U))`.

    A weight without utility has :math:`\bar U = \tfrac12` and takes the whole step, SGD's at
    the same step size. The most useful weight has :math:`\bar U = \phi(1) = 0.73` and takes
    0.54 of it, a harmful one (:math:`\hat U < 0`) up to twice as much (1.46 times with
    ``scaling="local"``). The paper writes
    :math:`\alpha` where :math:`2\alpha` stands here: its (α, λ) is
    ``(lr, weight_decay) = (α/2, 2λ)``, and for N-UPGD its σ is ``sigma = σ/2``.

    A group may have its own hyperparameters, ``protect`` included: ``sigma=0`` spares
    it the noise, ``protect=False`` the gating of its gradient, as one may want for
    normalisation layers and embeddings. Its weights still count for :math:`\eta`.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or parameter groups.
        lr: Step size α, as SGD's; a number or a one-element tensor.
        weight_decay: Decoupled weight decay λ.
        beta_utility: Decay β_u of the utility trace; 0 is the utility of this step alone.
        sigma: Standard deviation σ of the perturbation; 0 draws none.
        momentum: Decay μ of the velocity, which takes the gradient's place in the update as in
            :class:`torch.optim.SGD`; 0 keeps none. A scheduler that cycles ``momentum``, such as
            ``OneCycleLR``, may set it in groups later.
        scaling: ``"global"`` or ``"local"``.
        order: 1, or 2, which needs curvature: call ``opt.backward(loss)`` instead of
            ``loss.backward()``.
        protect: Gate the gradient too, not only the noise.
        curvature: Where ``order=2`` takes it from: ``"hesscale"``, ``"ggn"`` (never
            negative) or ``"hutchinson"`` (unbiased, noisy, any model); see
            :func:`upgd.curvature.backward`.
        common: ``seed``, ``noise``, ``maximize``, ``foreach``, ``fused``, ``capturable``,
            ``nonfinite``, ``rounding``, ``trace_dtype`` and ``master_weights`` of
            :class:`~upgd.optim.base.RuleOptimizer`.

    Example:
        >>> import torch, upgd
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = upgd.UPGD(model.parameters(), lr=0.01, weight_decay=0.001)
        >>> loss = model(torch.ones(4, 3)).square().mean()
        >>> loss.backward()
        >>> opt.step()
    """

    build = staticmethod(upgd_method)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        weight_decay: float = 0.0,
        beta_utility: float = 0.99,
        sigma: float = 0.001,
        momentum: float = 0.0,
        scaling: Scaling = "global",
        order: int = 1,
        protect: bool = True,
        curvature: Curvature = "hesscale",
        **common: Unpack[Common],
    ) -> None:
        hyper = {"lr": lr, "weight_decay": weight_decay, "sigma": sigma}
        hyper |= {"beta_utility": beta_utility, "momentum": momentum}
        if momentum != 0:
            self.build = _WITH_VELOCITY
        super().__init__(params, hyper, scaling, order, protect, curvature, **common)

    @classmethod
    def from_optimizer(cls, sgd: torch.optim.SGD, **arguments: Any) -> Self:
        """Go on where :class:`torch.optim.SGD` stopped: its groups, its buffers as velocity.

        Args:
            sgd: Without dampening and Nesterov's momentum. A ``weight_decay`` is the same here if
                there is no momentum, else it is refused.
            arguments: Of the constructor; those that groups have, such as ``lr``, replace theirs.

        Example:
            >>> import torch, upgd
            >>> model = torch.nn.Linear(3, 1)
            >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            >>> opt = upgd.UPGD.from_optimizer(sgd, sigma=0.01)
            >>> opt.param_groups[0]["lr"], opt.param_groups[0]["momentum"]
            (0.1, 0.9)
        """
        opt = cls(growing.groups_of_sgd(cls.__name__, sgd, arguments), **arguments)
        if any(group["momentum"] != 0 for group in opt.param_groups):
            opt._keep_velocity()
            growing.take_states(opt, sgd, {"velocity": "momentum_buffer"}, counted=False)
        return opt

    # A group may get momentum later, as from OneCycleLR. From then on there is a velocity, which
    # begins at zero as torch.optim.SGD's does.
    @property
    def _has_velocity(self) -> bool:
        return "velocity" in self.method.states

    def _keep_velocity(self) -> None:
        self.build = _WITH_VELOCITY
        self.method = self.build(self.scaling, self.order, bool(self.defaults["protect"]))

    def _check_group(self, group: dict[str, Any]) -> None:
        if not self._has_velocity:
            HYPERPARAMETERS["momentum"].check(type(self).__name__, group.get("momentum", 0.0))
        super()._check_group(group)

    def _prepare(self) -> None:
        super()._prepare()
        if not self._has_velocity and any(g.get("momentum", 0) != 0 for g in self.param_groups):
            self._keep_velocity()
            self._forget_plans()
            for state in self.state.values():
                if "utility" in state:
                    state["velocity"] = torch.zeros_like(state["utility"])

    def _checked_state_dict(self, given: Any) -> dict[str, Any]:
        states = given.get("state") if isinstance(given, Mapping) else None
        if not isinstance(states, Mapping):
            return super()._checked_state_dict(given)
        before = self.build, self.method
        if any(isinstance(state, Mapping) and "velocity" in state for state in states.values()):
            self._keep_velocity()
        if self._has_velocity:
            given = {**given, "state": {k: _with_velocity(state) for k, state in states.items()}}
        try:
            return super()._checked_state_dict(given)
        except Exception:
            self.build, self.method = before
            raise


_WITH_VELOCITY = partial(upgd_method, momentum=True)


def _with_velocity(state: Any) -> Any:
    """A saved state; its velocity is zero if there was no momentum yet."""
    utility = state.get("utility") if isinstance(state, Mapping) else None
    if not isinstance(utility, Tensor) or "velocity" in state:
        return state
    return {**state, "velocity": torch.zeros_like(utility)}
