"""Avalanche: a plugin that monitors a strategy's model and publishes metrics."""

from __future__ import annotations

from typing import Any

from avalanche.evaluation.metric_results import MetricValue
from avalanche.training.plugins import SupervisedPlugin

from upgd.integrations.attached import Attached
from upgd.monitor import Monitor


class MonitorPlugin(SupervisedPlugin):
    """Measures a model over all experiences and publishes the numbers as ``monitor/...``.

    They go to the loggers of the strategy's evaluator, at its iteration. A model may grow from one
    experience to the next.

    Args:
        every: Steps of the optimizer from one measurement to the next.
        prefix: Put before every name.
        options: Further arguments of :class:`upgd.Monitor`.

    As a plugin of a strategy::

        strategy = Naive(model=model, optimizer=opt, plugins=[MonitorPlugin(every=50)])
    """

    def __init__(self, every: int = 100, prefix: str = "monitor/", **options: Any) -> None:
        super().__init__()
        self._attached = Attached(every, prefix, **options)

    @property
    def monitor(self) -> Monitor:
        """The monitor: its ``history``, its ``page(path)``; there is one once training begins."""
        return self._attached.monitor

    def before_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Make the monitor; the model has been adapted to the experience."""
        self._attached.begin(strategy.model, strategy.optimizer)

    def after_training_iteration(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Publish a new measurement."""
        for name, value in self._attached.news().items():
            metric = MetricValue(self, name, value, strategy.clock.train_iterations)
            strategy.evaluator.publish_metric_value(metric)
