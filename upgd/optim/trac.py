"""TRAC: any optimizer's steps, scaled about the first weights by a tuner without parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

DISCOUNTS = (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)
"""Those of the authors: one tuner each, whose scales are added up."""
FIRST = 1e-8
"""The first scale, and the sum from which each tuner starts."""
_FURTHEST = 12.0  # erfi is 1e62 there: the weights would have left every range
_WIDTH = 0.2  # of the sum for erfi, whose error is exp(-(pi / (2 * width))²)
_ODD = torch.arange(1, 2 * round((_FURTHEST + 7) / _WIDTH / 2), 2, dtype=torch.float64)


def erfi(x: Tensor) -> Tensor:
    """The imaginary error function 2/√π·∫₀ˣ exp(t²)dt of float64 numbers between -12 and 12.

    It is Rybicki's sum for Dawson's integral times 2/√π·exp(x²), which leaves positive terms only:
    4/π·Σ exp(-(nh)²)·sinh(2nhx)/n over odd n.

    Example:
        >>> import torch
        >>> round(float(erfi(torch.tensor([1.0], dtype=torch.float64))), 12)
        1.650425758798
    """
    nodes = _ODD * _WIDTH
    terms = torch.exp(-nodes.square()) * torch.sinh(2 * nodes * x.unsqueeze(-1)) / _ODD
    return 4 / math.pi * terms.sum(-1)


class TRAC(Optimizer):
    r"""Scales the way that a base optimizer has gone from the first weights, without tuning.

    .. math::
        h_t = \langle g_t, \theta_t \rangle, \quad
        v^j \leftarrow \beta_j^2 v^j + h_t^2, \quad
        \sigma^j \leftarrow \beta_j \sigma^j - h_t, \quad
        s^j = \frac{\epsilon_0}{\mathrm{erfi}(1/\sqrt 2)}\,
            \mathrm{erfi}\Big(\frac{\sigma^j}{\sqrt{2 v^j} + \epsilon}\Big)

    .. math::
        \theta_{t+1} = \theta_t + \Delta_t, \qquad
        w_{t+1} = w_0 + \max\big(\textstyle\sum_j s^j, 0\big)\, \theta_{t+1}

    with :math:`\Delta` the base optimizer's step and
    :math:`\theta_t = (w_t - w_0) / (\sum_j s^j + \epsilon)`. Where the gradient points back to the
    first weights, the scale shrinks, and the weights return. Muppidi, Zhang and Yang, *Fast TRAC: A
    Parameter-Free Optimizer for Lifelong Reinforcement Learning* (NeurIPS 2024).

    The scale is one number for the whole network, so this is no rule and runs in no stack. A step
    reads one number back from the device.

    Args:
        base: An optimizer. Its groups are shared: schedulers may be given this optimizer or that.
        discounts: Of the tuners, β.
        eps: Keeps divisors from being zero.

    Example:
        >>> import torch, upgd
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = upgd.TRAC(torch.optim.Adam(model.parameters(), lr=1e-3))
        >>> model(torch.ones(4, 3)).square().mean().backward()
        >>> opt.step()
    """

    def __init__(
        self, base: Optimizer, discounts: Sequence[float] = DISCOUNTS, eps: float = 1e-8
    ) -> None:
        if not isinstance(base, Optimizer):
            raise TypeError(f"TRAC: base must be an optimizer, got {base!r}")
        if not discounts or not all(0 <= beta < 1 for beta in discounts):
            raise ValueError(f"TRAC: discounts must be numbers in [0, 1), got {discounts!r}")
        if not (math.isfinite(eps) and eps > 0):
            raise ValueError(f"TRAC: eps must be a positive number, got {eps!r}")
        self.base = base
        self.discounts, self.eps = tuple(discounts), eps
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups
        zeros = torch.zeros(len(self.discounts), dtype=torch.float64)
        self.state["tuner"] = {"scales": zeros, "squares": zeros, "sums": zeros + FIRST}  # type: ignore[index]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer."""
        if any(group is param_group for group in self.base.param_groups):
            super().add_param_group(param_group)
        else:
            self.base.add_param_group(param_group)

    @property
    def scale(self) -> float:
        """The sum of the tuners' scales: how far the base optimizer's way is followed."""
        return float(self._tuner["scales"].sum())

    @property
    def _tuner(self) -> dict[str, Tensor]:
        tuner: dict[str, Tensor] = self.state["tuner"]  # type: ignore[index]
        return tuner

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one update; with `closure`, evaluate it first and return its loss.

        Raises:
            FloatingPointError: A gradient, or the way so far, is not finite. Nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = (group["params"] for group in self.param_groups)
        params = [p for some in groups for p in some if p.grad is not None]
        if params:
            self._update(params)
        return loss

    def _update(self, params: list[Tensor]) -> None:
        with torch.no_grad():
            for p in params:
                if "start" not in self.state[p]:
                    self.state[p]["start"] = p.detach().clone()
            before = [p.detach().clone() for p in params]
            length = self.scale + self.eps
            product = self._product(params) / length
            if not math.isfinite(product):
                raise FloatingPointError("TRAC: a gradient or a weight is not finite")
        self.base.step()
        with torch.no_grad():
            scale = max(self._tune(product), 0.0)
            for p, old in zip(params, before, strict=True):
                start = self.state[p]["start"]
                p.copy_(start + ((old - start) / length + (p - old)) * scale)

    def _product(self, params: Iterable[Tensor]) -> float:
        """⟨g, w - w₀⟩ over all parameters."""
        parts = []
        for p in params:
            assert p.grad is not None
            part = (p.grad * (p - self.state[p]["start"])).double().sum()
            parts.append(part.cpu() if p.device.type == "mps" else part)
        return float(torch.stack([part.to(parts[0].device) for part in parts]).sum())

    def _tune(self, product: float) -> float:
        """Advance the tuners, and return the sum of their scales."""
        betas = torch.tensor(self.discounts, dtype=torch.float64)
        squares = betas.square() * self._tuner["squares"] + product**2
        sums = betas * self._tuner["sums"] - product
        way = (sums / (squares.mul(2).sqrt() + self.eps)).clamp(-_FURTHEST, _FURTHEST)
        one = torch.full((1,), math.sqrt(0.5), dtype=torch.float64)
        scales = FIRST / erfi(one) * erfi(way)
        self.state["tuner"] = {"scales": scales, "squares": squares, "sums": sums}  # type: ignore[index]
        return self.scale

    # ------------------------------------------------------------------------------ saving
    def state_dict(self) -> dict[str, Any]:
        """Its own state, and that of the base optimizer under ``"base"``."""
        return {**super().state_dict(), "base": self.base.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.base.load_state_dict(state_dict["base"])
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "base"})
        self.state["tuner"] = dict(self._tuner)  # type: ignore[index]
        self.param_groups = self.base.param_groups

    def __getstate__(self) -> dict[str, Any]:
        own = {"base": self.base, "discounts": self.discounts, "eps": self.eps}
        return {**super().__getstate__(), **own}
