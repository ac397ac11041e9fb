"""Diagnostics of an agent's networks after an iteration."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from upgd.monitor.measures import norms, saturated_share
from upgd.rl.network import Network
from upgd.threads import one_thread

SATURATED = 0.99
DEAD = 0.01
SAMPLES = 256


def explained_variance(values: NDArray[Any], returns: NDArray[Any]) -> float:
    """The fraction of the returns' variance that the values explain; NaN without variance."""
    wide = returns.astype(np.float64)
    variance = float(wide.var())
    return float(1 - (wide - values).var() / variance) if variance > 0 else float("nan")


@torch.no_grad()
@one_thread()
def diagnose(
    network: Network,
    weights: NDArray[Any],
    gradients: NDArray[Any],
    utility: NDArray[Any] | None,
    observations: NDArray[Any],
) -> dict[str, float]:
    """Norms and hidden units of policy and value network, by name.

    ``…_weight_l1``, ``_l2`` are norms of the parameters; ``…_gradient_l0``, ``_l1``, ``_l2`` of the
    last minibatch's gradient, after clipping; ``…_utility_l1``, ``_l2`` of the bias-corrected
    utilities, where there are any. ``…_saturated`` is the share of hidden activations beyond ±0.99,
    ``…_dead_units`` the share of hidden units whose output has a standard deviation below 0.01 over
    the observations: they carry no information. Weights, gradients and utility are [size], the
    observations are normalised, [T, observations]; :data:`SAMPLES` of them are used.
    """
    found: dict[str, float] = {}
    flat = torch.from_numpy(weights)
    stride = max(1, len(observations) // SAMPLES)
    hidden = _hidden(network, weights, observations[::stride])
    for (part, where), units in zip(network.parts.items(), hidden, strict=True):
        size = norms([flat[where]])
        slope = norms([torch.from_numpy(gradients[where])])
        found |= {f"{part}_weight_l1": size.l1, f"{part}_weight_l2": size.l2}
        found |= {f"{part}_gradient_{name}": value for name, value in slope._asdict().items()}
        if utility is not None:
            worth = norms([torch.from_numpy(utility[where])])
            found |= {f"{part}_utility_l1": worth.l1, f"{part}_utility_l2": worth.l2}
        found[f"{part}_saturated"] = float(saturated_share(torch.from_numpy(units), SATURATED))
        found[f"{part}_dead_units"] = float((units.std(0) < DEAD).mean())
    return found


def _hidden(
    network: Network, weights: NDArray[Any], observations: NDArray[Any]
) -> list[NDArray[Any]]:
    """The outputs of all hidden units of each network, [samples, units]."""
    from upgd.rl import kernels as k

    rows = len(observations)
    layers, _, _, size = network.workspace(rows)
    work = np.zeros(size, weights.dtype)
    inputs = work[: rows * layers[0, k.IN_PITCH]].reshape(rows, -1)
    inputs[:, : network.observations] = observations
    k.pack(layers, weights, work)
    k.forward(layers, work, rows)
    outputs = []
    for t in layers:
        units = work[t[k.AFTER] : t[k.AFTER] + rows * t[k.OUT_PITCH]].reshape(rows, -1)
        outputs.append(units[:, : t[k.OUTPUTS]])
    last = len(network.hidden)
    return [np.concatenate(outputs[:last], 1), np.concatenate(outputs[last + 1 : -1], 1)]
