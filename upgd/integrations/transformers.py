"""Hugging Face transformers: a callback that monitors what a ``Trainer`` trains."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from upgd.integrations.attached import Attached
from upgd.monitor import Monitor


class MonitorCallback(TrainerCallback):
    """Measures a model and logs the numbers as ``monitor/...``, with ``trainer.log``.

    So they are in ``trainer.state.log_history``, and with whatever ``report_to`` names. Callbacks
    are not told their trainer: make the trainer first, then ``trainer.add_callback(...)``.

    Args:
        trainer: The trainer.
        every: Steps of the optimizer from one measurement to the next.
        prefix: Put before every name.
        layers: Log the numbers of each layer, too. The trainer prints whatever it logs, so by
            default only those of all layers together are logged; ``monitor`` has all of them.
        options: Further arguments of :class:`upgd.Monitor`.

    Example:
        >>> import torch, transformers
        >>> arguments = transformers.TrainingArguments("folder", report_to=[])
        >>> trainer = transformers.Trainer(torch.nn.Linear(2, 1), arguments)
        >>> trainer.add_callback(MonitorCallback(trainer, every=50))
    """

    def __init__(
        self,
        trainer: Trainer,
        every: int = 100,
        prefix: str = "monitor/",
        layers: bool = False,
        **options: Any,
    ) -> None:
        self._trainer, self._prefix, self._layers = trainer, prefix, layers
        self._attached = Attached(every, prefix, **options)

    @property
    def monitor(self) -> Monitor:
        """The monitor: its ``history``, its ``page(path)``; there is one once training begins."""
        return self._attached.monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the monitor."""
        self._attached.begin(kwargs["model"], kwargs["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log a new measurement."""
        found = self._attached.news()
        if not self._layers:
            found = {n: x for n, x in found.items() if "/" not in n.removeprefix(self._prefix)}
        if found:
            self._trainer.log(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the hooks off."""
        self._attached.end()
