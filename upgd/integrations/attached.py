"""What the callbacks of all frameworks share: a monitor that is made when training begins."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from upgd.monitor import Monitor


class Attached:
    """Owns a :class:`upgd.Monitor` and gives out each newest measurement once.

    The monitor goes on over several calls of the framework's training function; it is replaced when
    training begins with another optimizer.

    Args:
        every: Steps of the optimizer from one measurement to the next.
        prefix: Put before every name.
        options: Further arguments of :class:`upgd.Monitor`.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> attached = Attached(every=1, prefix="monitor/")
        >>> attached.begin(model, torch.optim.SGD(model.parameters()))
        >>> attached.news()
        {}
        >>> _ = model(torch.ones(1, 2)).sum().backward()
        >>> attached.monitor.optimizers[0].step()
        >>> "monitor/weight_norm" in attached.news(), attached.news()
        (True, {})
    """

    def __init__(self, every: int = 100, prefix: str = "monitor/", **options: Any) -> None:
        inspect.signature(Monitor).bind(None, every=every, **options)  # what it does not take
        self._options = {"every": every, **options}
        self._prefix = prefix
        self._monitor: Monitor | None = None
        self._seen = 0

    @property
    def monitor(self) -> Monitor:
        """The monitor: its ``history``, its ``page(path)``."""
        if self._monitor is None:
            raise RuntimeError("there is no monitor before training begins")
        return self._monitor

    def begin(
        self, model: nn.Module, opt: Optimizer | Iterable[Optimizer], **defaults: Any
    ) -> None:
        """Training begins: make a monitor, unless there is one of the same optimizers.

        Args:
            model: What is watched.
            opt: One optimizer or several.
            defaults: Arguments of the monitor where none were given.
        """
        new = Monitor(model, opt, **(defaults | self._options))
        old = self._monitor
        if old is not None and old.optimizers == new.optimizers:
            new.close()
            return
        self.end()
        self._monitor, self._seen = new, 0

    def end(self) -> None:
        """Take the monitor's hooks off; what it measured stays."""
        if self._monitor is not None:
            self._monitor.close()

    def news(self) -> dict[str, float]:
        """The newest measurement under prefixed names, if it has not been given out yet."""
        monitor = self.monitor
        if monitor.measured == self._seen:
            return {}
        self._seen = monitor.measured
        return {f"{self._prefix}{name}": value for name, value in monitor.scalars().items()}
