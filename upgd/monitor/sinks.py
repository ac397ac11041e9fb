"""Where measurements go: ``monitor.on_measure(CSV("run.csv"))``.

A sink is anything that can be called with a step and a flat dict of numbers. What these need is
imported when they are made.
"""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upgd.extras import install

if TYPE_CHECKING:
    from upgd.monitor.monitor import Monitor


class CSV:
    """Writes a row ``step,name,value`` for every number; a file that is there is continued.

    Args:
        path: The file.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> sink = CSV(f"{folder.name}/run.csv")
        >>> sink(100, {"dormant": 0.25})
        >>> print(open(f"{folder.name}/run.csv").read().strip())
        step,name,value
        100,dormant,0.25
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.exists() or self.path.stat().st_size == 0:
            self._write([("step", "name", "value")])

    def __call__(self, step: int, scalars: dict[str, float]) -> None:
        """Append one measurement."""
        self._write([(step, name, repr(value)) for name, value in scalars.items()])

    def _write(self, rows: list[tuple[Any, ...]]) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


class TensorBoard:
    """Writes scalars, and histograms of utilities if it knows the monitor, as TensorBoard events.

    Args:
        writer: A ``SummaryWriter``, or the folder for a new one, which is closed with the monitor.
        monitor: Whose histograms are written, too.
        prefix: Before every name.

    Example:
        >>> import tempfile, torch, upgd
        >>> from upgd.monitor.sinks import TensorBoard
        >>> monitor = upgd.Monitor(torch.nn.Linear(2, 1), every=1)
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = monitor.on_measure(TensorBoard(folder.name, monitor))
        >>> monitor.step()
        >>> monitor.close()
    """

    def __init__(
        self, writer: Any, monitor: Monitor | None = None, prefix: str = "monitor/"
    ) -> None:
        self._own = isinstance(writer, str | os.PathLike)
        if self._own:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                wrong = f"TensorBoard: it is not installed: {install('tensorboard')}"
                raise ImportError(wrong) from None
            writer = SummaryWriter(log_dir=os.fspath(writer))
        self.writer, self.prefix, self._monitor = writer, prefix, monitor

    def __call__(self, step: int, scalars: dict[str, float]) -> None:
        """Write one measurement."""
        for name, value in _finite(scalars).items():
            self.writer.add_scalar(self.prefix + name, value, step)
        for at, found in self._monitor.histograms[-1:] if self._monitor is not None else ():
            for name, counts in found.items() if at == step else ():
                self._histogram(self.prefix + name, counts, step)

    def _histogram(self, name: str, counts: Any, step: int) -> None:
        width = 1 / len(counts)
        edges = [width * (n + 1) for n in range(len(counts))]
        middles = [edge - width / 2 for edge in edges]
        self.writer.add_histogram_raw(
            name,
            min=0.0,
            max=1.0,
            num=float(counts.sum()),
            sum=float(counts @ middles),
            sum_squares=float(counts @ [x * x for x in middles]),
            bucket_limits=edges,
            bucket_counts=counts.tolist(),
            global_step=step,
        )

    def close(self) -> None:
        """Close a writer that was made here; write out another's events."""
        if self._own:
            self.writer.close()
        else:
            self.writer.flush()


class WandB:
    """Logs to Weights & Biases.

    Args:
        run: What ``wandb.init`` returned; the current run by default. Numbers are logged with the
            monitor's step as ``monitor/step``, so that they mix with calls of ``run.log``.

    Example:
        >>> class Run:
        ...     def define_metric(self, name, step_metric=None): ...
        ...     def log(self, values): print(values)
        >>> WandB(Run())(100, {"dormant": 0.25})
        {'monitor/step': 100, 'monitor/dormant': 0.25}
    """

    def __init__(self, run: Any = None) -> None:
        if run is None:
            import wandb

            run = wandb.run
            if run is None:
                raise RuntimeError("WandB: no run is active; call wandb.init(), or pass run=")
        self.run = run
        run.define_metric("monitor/*", step_metric="monitor/step")

    def __call__(self, step: int, scalars: dict[str, float]) -> None:
        """Log one measurement."""
        named = {f"monitor/{name}": value for name, value in _finite(scalars).items()}
        self.run.log({"monitor/step": step, **named})


class MLflow:
    """Logs to MLflow.

    Args:
        run: A run, or its id; the active run by default, which MLflow starts if there is none.
        client: An ``MlflowClient``; by default a new one.

    Example:
        >>> class Client:
        ...     def log_metric(self, run, name, value, step): print(run, name, value, step)
        >>> MLflow("a-run", Client())(100, {"dormant": 0.25})
        a-run monitor/dormant 0.25 100
    """

    def __init__(self, run: Any = None, client: Any = None) -> None:
        if client is None:
            import mlflow

            client = mlflow.MlflowClient()
            run = run or mlflow.active_run() or mlflow.start_run()
        elif run is None:
            raise ValueError("MLflow: a client needs run=, a run or its id")
        self.run_id = run if isinstance(run, str) else run.info.run_id
        self._client = client

    def __call__(self, step: int, scalars: dict[str, float]) -> None:
        """Log one measurement."""
        for name, value in _finite(scalars).items():
            self._client.log_metric(self.run_id, f"monitor/{name}", value, step=step)


def _finite(scalars: dict[str, float]) -> dict[str, float]:
    """Without values that their charts do not take."""
    return {name: value for name, value in scalars.items() if math.isfinite(value)}
