"""A plasticity monitor for any training loop and any optimizer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from upgd.monitor import weights
from upgd.monitor.alarms import warnings_of
from upgd.monitor.page import Follower, fragment, render, write
from upgd.monitor.reading import Array, Reading
from upgd.monitor.recorder import Activation, Recorder
from upgd.monitor.replay import Inputs, is_compiled, undisturbed, unwrapped
from upgd.optim.uncompiled import uncompiled
from upgd.text import error_line

Callback = Callable[[int, dict[str, float]], Any]
Closure = Callable[[], Tensor]
T = TypeVar("T")


class MonitorWarning(UserWarning):
    """Something could not be measured; training goes on."""


class Monitor:
    """Measures how able to learn a network still is, at every so many steps.

    It attaches itself: hooks on the optimizer count its steps, and hooks on the model's layers are
    put on for the forward passes before a measurement and taken off after it. Between measurements
    a step costs one comparison of integers. A measurement stays on the device and is copied to
    the host without waiting; it is read when :meth:`scalars` or :attr:`history` is asked for, or at
    the next measurement. Training is not changed by a bit.

    Numbers, by name; ``/LAYER`` is added for a layer's own, without it they are of all layers:

    - ``dormant``: share of hidden units whose ReDo score ``E|h_i| / mean_k E|h_k|`` is at most
      `tau`; ``dead``: share whose output is zero for every row.
    - ``effective_rank/LAYER``, ``stable_rank/LAYER`` of the hidden outputs, rows by units.
    - ``weight_norm``, ``gradient_norm``, ``weight_magnitude`` (the mean of all weights' absolute
      values), ``update_ratio`` (norm of the step's change divided by that of the weights).
    - ``protected`` (share of weights with a scaled utility of 0.55 or more), ``eta`` and histograms
      of scaled utilities, where the optimizer has utilities; ``skipped_steps`` of our optimizers.
    - ``plasticity`` and ``loss``, where a closure is given.

    Args:
        model: Any module; of ``torch.compile``'s and data-parallel wrappers, the module inside.
        opt: An optimizer, several (the first one's steps are counted), or None: call :meth:`step`.
        every: Steps from one measurement to the next.
        tau: The largest score of a dormant unit.
        samples: Rows (samples, positions of a channel, tokens) of hidden outputs in a measurement,
            from the newest forward passes in training mode with gradients enabled. A stream of
            single samples takes them from as many passes; larger batches from one.
        output: Name or names of the layers that are not hidden; the last layer by default.
        activation: Applied to the outputs of layers that no activation module follows, where no
            layer of the model is followed by one; None for none.
        closure: Gives the loss of the current sample, or a loss per sample; evaluated without
            gradients before and after the steps that are measured. See :meth:`observe`.

    Example:
        >>> import torch, upgd
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> opt = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> monitor = upgd.Monitor(model, opt, every=10)
        >>> for _ in range(20):
        ...     opt.zero_grad()
        ...     model(torch.randn(16, 4)).square().mean().backward()
        ...     opt.step()
        >>> monitor.measured
        2
        >>> 0 <= monitor.scalars()["dormant/0"] <= 1
        True
    """

    def __init__(
        self,
        model: nn.Module,
        opt: Optimizer | Iterable[Optimizer] | None = None,
        every: int = 100,
        *,
        tau: float = 0.025,
        samples: int = 32,
        output: str | Iterable[str] | None = None,
        activation: Activation | None = torch.relu,
        closure: Closure | None = None,
    ) -> None:
        for name, value in (("every", every), ("samples", samples)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"Monitor: {name} must be an integer of at least 1, got {value!r}")
        self.model = unwrapped(model)
        self.optimizers = weights.optimizers_in(opt)
        if closure is not None and not self.optimizers:
            raise ValueError(
                "Monitor: closure= needs an optimizer, whose steps say when to evaluate it; "
                "without one, call observe(closure) before every step"
            )
        self.every, self.tau = every, tau
        self.steps = 0
        self.measured = 0
        self._closure = closure
        self._observed: tuple[Closure, Tensor] | None = None
        self._inputs = Inputs(model) if is_compiled(model) else None
        chosen = [output] if isinstance(output, str) else output and list(output)
        self._recording = (chosen or None, samples, activation)
        self._recorder = Recorder(self.model, *self._recording, self._features_failed)
        self._history: list[tuple[int, dict[str, float]]] = []
        self._histograms: list[tuple[int, dict[str, Array]]] = []
        self._pending: Reading | None = None
        self._callbacks: list[Callback] = []
        self._off: set[str] = set()
        self._reads_at_once = False
        self._before: weights.Before | None = None
        self._handles: list[Any] = []
        if self.optimizers:
            first = self.optimizers[0]
            self._handles.append(first.register_step_pre_hook(self._before_step))
            self._handles.append(first.register_step_post_hook(self._after_step))
        self._open()  # for one step, to see how many rows a pass has
        self._window = 1
        self._measure_at = every
        self._next = 1

    # ---------------------------------------------------------------------- counting
    def step(self) -> None:
        """Count a step; where there is an optimizer, its steps are counted already.

        Example:
            >>> import torch, upgd
            >>> monitor = upgd.Monitor(torch.nn.Linear(2, 1), every=1)
            >>> monitor.step()
            >>> sorted(monitor.scalars())[:2]
            ['weight_magnitude', 'weight_magnitude/Linear']
        """
        self.steps += 1
        if self.steps == self._next:
            self._at_event()

    def _before_step(self, opt: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # a compiled step leaves its graph for this
            self._prepare_apart()
        elif self.steps + 1 == self._measure_at:
            self._prepare()

    def _after_step(self, opt: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            self._step_apart()
        else:
            self.step()

    @uncompiled
    def _prepare_apart(self) -> None:
        self._prepare()

    @uncompiled
    def _step_apart(self) -> None:
        self.step()

    def _prepare(self) -> None:
        if self.steps + 1 != self._measure_at:
            return
        found = weights.trained(self.model)
        self._before = self._try("updates", lambda: weights.before_step(found))
        if self._closure is not None:
            self.observe(self._closure)

    def _at_event(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._next = self.steps + 1  # nothing may be read while a graph is captured
            return
        if self.steps >= self._measure_at:
            self._measure()
            self._measure_at = self.steps + self.every
        if self._recorder.watches(self.model):
            self._recorder.settle()
        else:  # layers were added or replaced
            self._shut()
            self._recorder = Recorder(self.model, *self._recording, self._features_failed)
        self._window = min(self.every, self._recorder.passes or self._window)
        opens = self._measure_at - self._window
        if self.steps >= opens:
            self._open()
            self._next = self._measure_at
        else:
            self._shut()
            self._next = opens

    def _open(self) -> None:
        """Record forward passes from now on."""
        self._recorder.forget()
        (self._inputs or self._recorder).open()

    def _shut(self) -> None:
        (self._inputs or self._recorder).close()
        self._recorder.forget()

    # --------------------------------------------------------------------- measuring
    def observe(self, closure: Closure) -> None:
        """Say, before a step, how to evaluate the loss of its sample; only measured steps do.

        ``plasticity`` is ``clip(1 - L(after)/L(before), 0, 1)``. The closure is called twice,
        without gradients and in the model's current mode. PyTorch's random states and the model's
        buffers (running statistics) are as before afterwards, and both calls draw the same random
        numbers. Other side effects of the closure are its own.

        Args:
            closure: Returns a loss, or a loss per sample.

        Example:
            >>> import torch, upgd
            >>> model = torch.nn.Linear(2, 1)
            >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> monitor = upgd.Monitor(model, opt, every=1)
            >>> x = torch.ones(1, 2)
            >>> model(x).square().sum().backward()
            >>> monitor.observe(lambda: model(x).square().sum())
            >>> opt.step()
            >>> 0 < monitor.scalars()["plasticity"] < 1
            True
        """
        if self.steps + 1 == self._measure_at:
            before = self._try("plasticity", lambda: self._evaluate(closure))
            self._observed = None if before is None else (closure, before)

    def _evaluate(self, closure: Closure) -> Tensor:
        with undisturbed(self.model):
            return torch.as_tensor(closure()).detach().reshape(-1).clone()

    @torch.no_grad()
    def _measure(self) -> None:
        self._resolve()
        reading = Reading(self.steps, self.tau)
        params = weights.trained(self.model)
        optimizers = self.optimizers
        self._try("weights", lambda: weights.take_weights(reading, params))
        self._try("gradients", lambda: weights.take_gradients(reading, params))
        self._try("updates", lambda: weights.take_updates(reading, self._before))
        self._try("features", lambda: self._take_features(reading))
        self._try("utilities", lambda: weights.take_utilities(reading, params, optimizers))
        self._try("skipped steps", lambda: weights.take_skipped(reading, optimizers))
        self._try("plasticity", lambda: self._take_plasticity(reading))
        self._before = self._observed = None
        self._try("measurements", reading.send)
        self._pending = reading if reading.is_sent else None
        self.measured += reading.is_sent
        if reading.on_host or self._reads_at_once:
            self._resolve()

    def _take_features(self, reading: Reading) -> None:
        if self._inputs is not None:
            self._inputs.replay(self._recorder)
        if self._recorder.layers and not self._recorder.measured:
            raise RuntimeError(
                "no forward pass in training mode with gradients called a layer's hooks; if the "
                "model is compiled, give Monitor the compiled one"
            )
        for layer in self._recorder.measured:
            found = self._recorder.measure(layer)
            if found is not None:
                reading.add(layer.label, found[0], "magnitudes")
                reading.add(layer.label, found[1], "products")

    def _take_plasticity(self, reading: Reading) -> None:
        if self._observed is not None:
            closure, before = self._observed
            reading.add("plasticity", torch.stack([before, self._evaluate(closure)]), "losses")

    def _try(self, what: str, call: Callable[[], T]) -> T | None:
        """What a call returns; training goes on without a measurement that fails."""
        if what not in self._off:
            try:
                return call()
            except Exception as error:
                self._fail(what, error)
        return None

    def _features_failed(self, error: Exception) -> None:
        self._fail("features", error)

    def _fail(self, what: str, error: Exception) -> None:
        if what not in self._off:
            self._off.add(what)
            told = f"Monitor: {what} are no longer measured, since that failed: {error_line(error)}"
            warnings.warn(told, MonitorWarning, stacklevel=3)

    # ----------------------------------------------------------------------- reading
    def _resolve(self) -> None:
        """Read the measurement that is on its way."""
        reading, self._pending = self._pending, None
        if reading is None:
            return
        scalars = reading.scalars()
        self._history.append((reading.step, scalars))
        self._histograms.append((reading.step, reading.histograms))
        for callback in list(self._callbacks):
            try:
                callback(reading.step, dict(scalars))
            except Exception as error:
                self._callbacks.remove(callback)
                told = f"Monitor: {callback!r} failed and is not called again: {error_line(error)}"
                warnings.warn(told, MonitorWarning, stacklevel=3)

    def scalars(self) -> dict[str, float]:
        """The newest measurement; empty before the first. Waits for the device if need be."""
        self._resolve()
        return dict(self._history[-1][1]) if self._history else {}

    @property
    def history(self) -> list[tuple[int, dict[str, float]]]:
        """All measurements so far: the step and :meth:`scalars` of each."""
        self._resolve()
        return self._history

    @property
    def histograms(self) -> list[tuple[int, dict[str, Array]]]:
        """Scaled utilities at each measurement: ``"utility"``, ``"utility/LAYER"`` to counts."""
        self._resolve()
        return self._histograms

    def on_measure(self, callback: Callback) -> Callback:
        """Call ``callback(step, scalars)`` once for every measurement, when it is on the host.

        On CPU that is at once, on other devices at the next measurement, when :meth:`scalars` is
        called or when the monitor is closed. A callback that raises is dropped with a warning.

        Returns:
            The callback.

        Example:
            >>> import torch, upgd
            >>> monitor = upgd.Monitor(torch.nn.Linear(2, 1), every=1)
            >>> _ = monitor.on_measure(lambda step, scalars: print(step, len(scalars)))
            >>> monitor.step()
            1 4
        """
        self._callbacks.append(callback)
        return callback

    # ----------------------------------------------------------------------- looking
    def warnings(self) -> list[str]:
        """What the measurements mean, in sentences; :data:`upgd.monitor.alarms.RULES` lists why.

        Example:
            >>> import torch, upgd
            >>> from torch import nn
            >>> model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
            >>> _ = nn.init.constant_(model[0].bias, -100)  # no unit is ever active
            >>> monitor = upgd.Monitor(model, every=1)
            >>> _ = model(torch.randn(8, 2))
            >>> monitor.step()
            >>> monitor.warnings()[0]
            "All of layer '0' (4 of 4 units) is dormant; all of them put out zero for every sample."
        """
        return warnings_of(self.history, self.units)

    @property
    def units(self) -> dict[str, int]:
        """The number of units of each hidden layer, once it was seen."""
        layers = self._recorder.layers
        return {layer.label: layer.units for layer in layers if layer.units}

    def page(self, path: str | os.PathLike[str], title: str = "Plasticity monitor") -> Path:
        """Write all measurements as one HTML page that needs no network; return its path.

        Raises:
            FileExistsError: There is a file that upgd did not write.

        Example:
            >>> import tempfile, torch, upgd
            >>> monitor = upgd.Monitor(torch.nn.Linear(2, 1), every=1)
            >>> monitor.step()
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     monitor.page(f"{folder}/run.html").name
            'run.html'
        """
        notes = [f"Every {self.every} steps; hidden units with a score of at most {self.tau:g}."]
        notes += repr(self._recorder).splitlines()
        args = (self.warnings(), self.history, self.histograms, self.units, notes)
        return write(Path(path), render(title, *args))

    def show(self) -> None:
        """Show figures in a notebook; they follow the training, at most once a second.

        Every measurement is then read at once, so the device is waited for at each of them.
        """
        follower = Follower(self)
        self._reads_at_once = True
        self.on_measure(follower)

    def _repr_html_(self) -> str:
        return fragment(self.warnings(), self.history, self.histograms)

    def __repr__(self) -> str:
        lines = [f"Monitor(every={self.every}, {self.steps} steps, {self.measured} measured)"]
        return "\n  ".join([*lines, *repr(self._recorder).splitlines()])

    # ----------------------------------------------------------------------- the end
    def close(self) -> None:
        """Take all hooks off; what was measured stays. Sinks that can be closed are."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._shut()
        self._next = self._measure_at = -1
        self._resolve()
        for callback in self._callbacks:
            end = getattr(callback, "close", None)
            if callable(end):
                end()
        self._callbacks.clear()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
