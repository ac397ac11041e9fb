"""Lightning: a callback that monitors a module and writes to the trainer's loggers."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from upgd.integrations.attached import Attached
from upgd.monitor import Monitor


class MonitorCallback(Callback):
    """Measures a module and logs the numbers as ``monitor/...``.

    Every measurement goes to all loggers of the trainer at its ``global_step``, whatever
    ``log_every_n_steps`` is, and into ``trainer.callback_metrics``, where other callbacks find it
    (``EarlyStopping("monitor/dormant", ...)``). Automatic and manual optimization work alike; of
    several optimizers, steps of the first one count.

    Args:
        every: Steps of the optimizer from one measurement to the next.
        prefix: Put before every name.
        options: Further arguments of :class:`upgd.Monitor`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", callbacks=[MonitorCallback(every=50)])
    """

    def __init__(self, every: int = 100, prefix: str = "monitor/", **options: Any) -> None:
        self._attached = Attached(every, prefix, **options)

    @property
    def monitor(self) -> Monitor:
        """The monitor: its ``history``, its ``page(path)``; there is one once training begins."""
        return self._attached.monitor

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._attached.begin(pl_module, trainer.optimizers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if found := self._attached.news():
            for logger in trainer.loggers:
                logger.log_metrics(found, step=trainer.global_step)
            pl_module.log_dict(found, logger=False, on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._attached.end()
