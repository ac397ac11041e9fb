"""Stable-Baselines3: a callback that monitors the policy and writes to the agent's logger."""

from __future__ import annotations

import re
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback
from torch import nn
from torch.optim import Optimizer

from upgd.integrations.attached import Attached
from upgd.monitor import Monitor

_HEADS = re.compile(
    r"action_net|value_net|actor\.mu|actor\.log_std|critic\.qf\d+|(q_net|quantile_net)\.\1"
)
"""Parts of policies whose last linear layer is an output."""


class MonitorCallback(BaseCallback):
    """Measures an agent's networks and records the numbers in its logger, as ``monitor/...``.

    Networks that are trained are watched, target networks are not. Where a policy has several
    optimizers (the critics' and the actor's), steps of the first one count. The newest measurement
    is recorded when the next environment step begins; tables on the terminal have the numbers of
    all layers together, other outputs those of each layer, too.

    Args:
        every: Steps of the optimizer from one measurement to the next.
        prefix: Put before every name.
        options: Further arguments of :class:`upgd.Monitor`; `output` is found by the names that
            Stable-Baselines3 gives to heads.

    Example:
        >>> from stable_baselines3 import PPO
        >>> agent = PPO("MlpPolicy", "CartPole-v1", n_steps=64, device="cpu")
        >>> callback = MonitorCallback(every=5)
        >>> _ = agent.learn(128, callback=callback)
        >>> callback.monitor.measured
        4
    """

    def __init__(self, every: int = 100, prefix: str = "monitor/", **options: Any) -> None:
        super().__init__()
        self._prefix = prefix
        self._attached = Attached(every, prefix, **options)

    @property
    def monitor(self) -> Monitor:
        """The monitor: its ``history``, its ``page(path)``; there is one once learning begins."""
        return self._attached.monitor

    def _on_training_start(self) -> None:
        network = trained(self.model.policy)
        opts = optimizers(self.model.policy)
        self._attached.begin(network, opts, output=outputs(network))

    def _on_step(self) -> bool:
        self._record()
        return True

    def _on_training_end(self) -> None:
        self._record()

    def _record(self) -> None:
        for name, value in self._attached.news().items():
            of_layer = "/" in name.removeprefix(self._prefix)
            self.logger.record(name, value, exclude=("stdout", "log") if of_layer else None)


def trained(policy: nn.Module) -> nn.Module:
    """The networks of a policy without their targets."""
    children = dict(policy.named_children())
    kept = {name: child for name, child in children.items() if not name.endswith("_target")}
    return policy if len(kept) == len(children) else nn.ModuleDict(kept)


def optimizers(policy: nn.Module) -> list[Optimizer]:
    """The optimizers of a policy and its parts; critics', which step most often, come first."""
    found = [getattr(module, "optimizer", None) for module in policy.modules()]
    return [opt for opt in found if isinstance(opt, Optimizer)][::-1]


def outputs(network: nn.Module) -> list[str] | None:
    """Names of the output layers; None if there are none that we know."""
    found = []
    for name, module in network.named_modules():
        if _HEADS.fullmatch(name):
            inside = [n for n, m in module.named_modules(prefix=name) if isinstance(m, nn.Linear)]
            found += inside[-1:]
    return found or None
