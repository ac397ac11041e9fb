"""The plasticity monitor of a stream learner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from upgd.monitor import Monitor
from upgd.monitor.recorder import Recorder
from upgd.optim.features import has_features

if TYPE_CHECKING:
    from upgd.stream.export import TorchNetwork
    from upgd.stream.learner import StreamLearner
    from upgd.stream.members import Member

_NETWORKS = "networks"


class StreamMonitor(Monitor):
    """A :class:`upgd.Monitor` of a learner's networks; steps are samples.

    Every `every` samples the networks are copied into modules (:meth:`StreamLearner.to_torch`), and
    the copies take the step on that sample which the learner takes itself. All numbers of
    :class:`upgd.Monitor` are measured around it: ``plasticity`` and ``loss`` are the mixture's,
    hidden outputs those for the newest 32 rows. Layers have the names of the networks before them.
    Learning is not changed by a bit. Between measurements it costs one comparison more; a
    measurement takes as long as some hundred samples do.

    Measurements are not saved with a learner: give them to a sink,
    ``learner.monitor.on_measure(upgd.monitor.sinks.CSV("run.csv"))``.

    Args:
        every: Samples from one measurement to the next.
    """

    def __init__(self, every: int) -> None:
        super().__init__(nn.Module(), every=every)
        self._shut()
        self._is_closed = False

    def step(self) -> None:
        """Refused: the learner counts its samples."""
        raise TypeError("a learner's monitor counts samples itself; do not call step()")

    def close(self) -> None:
        """Measure no more; what was measured stays."""
        super().close()
        self._is_closed = True

    def _restart(self) -> None:
        """Forget all measurements."""
        self._history.clear()
        self._histograms.clear()
        self.steps = self.measured = 0

    # ------------------------------------------------------------------------ learning
    def learn(
        self,
        learner: StreamLearner,
        rows: NDArray[np.float32],
        targets: NDArray[Any],
        importance: NDArray[np.float32] | None,
    ) -> NDArray[np.float64]:
        """Have a learner learn scaled rows, and measure at every row at which that is due."""
        seen, batch = learner.n_samples_seen_, learner.batch_size
        if seen < self.steps:  # it has begun again
            self._restart()
        due = (seen // self.every + 1) * self.every - seen - 1
        if due >= len(rows) or self._is_closed or _NETWORKS in self._off:
            return learner._learn_scaled(rows, targets, importance)
        answers, begin = [], 0

        def learn(end: int) -> None:
            nonlocal begin
            weights = None if importance is None else importance[begin:end]
            answers.append(learner._learn_scaled(rows[begin:end], targets[begin:end], weights))
            begin = end

        for place in range(due, len(rows), self.every):
            start = place - place % batch  # where a step begins
            if start >= begin:
                if start > begin:
                    learn(start)
                before, _ = learner._recent.newest(self._rows_kept, rows.shape[1])
                before = np.concatenate([before, rows[:start]])[-self._rows_kept + 1 :]
                step = slice(start, start + batch)
                weights = None if importance is None else torch.from_numpy(importance[step])
                sample = (torch.from_numpy(rows[step]), _as_tensor(targets[step]), weights)
                self._look(learner, seen + place + 1, torch.from_numpy(before), sample)
                learn(min(start + batch, len(rows)))
        if begin < len(rows):
            learn(len(rows))
        return np.concatenate(answers)

    @property
    def _rows_kept(self) -> int:
        samples: int = self._recording[1]
        return samples

    def _look(
        self,
        learner: StreamLearner,
        number: int,
        before: Tensor,
        sample: tuple[Tensor, Tensor, Tensor | None],
    ) -> None:
        """Measure sample `number`; learning goes on whatever happens here."""
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                self._take_step(learner, number, before, *sample)
        except FloatingPointError:  # an optimizer refuses this step: a network diverges
            pass
        except Exception as error:
            self._fail(_NETWORKS, error)
        finally:
            self._recorder.close()
            self._recorder.forget()
            self.optimizers, self._closure = [], None

    def _take_step(
        self,
        learner: StreamLearner,
        number: int,
        before: Tensor,
        x: Tensor,
        y: Tensor,
        weights: Tensor | None,
    ) -> None:
        assert learner.committee_ is not None
        networks, outputs = learner.to_torch(), learner.committee_.shape[1]
        mixture = learner.committee_.mixture
        self.model, heads = _together(learner._members, networks)
        self.optimizers = [network.optimizer for network in networks]
        self._recorder = Recorder(self.model, heads, *self._recording[1:], self._features_failed)
        self._recorder.open()

        def answers() -> list[Tensor]:
            found = (network.module(x) for network in networks)
            return [z.reshape(len(x), -1)[:, :outputs] for z in found]

        def losses(z: Tensor) -> Tensor:
            if learner._squared:
                return mse_loss(z, y, reduction="none").mean(1)
            return cross_entropy(z, y, reduction="none")

        def mixed() -> Tensor:
            found = torch.from_numpy(mixture.mix(torch.stack(answers()).numpy()))
            if learner._squared:
                return (found - y).square().mean(1)
            return -found[torch.arange(len(y)), y]

        for network in networks:
            if len(before):
                network.module(before)
            network.optimizer.zero_grad()
        for network, z in zip(networks, answers(), strict=True):
            loss = losses(z)
            network.optimizer.backward((loss if weights is None else loss * weights).mean())
        self.steps, self._measure_at, self._closure = number - 1, number, mixed
        self._prepare()
        for network in networks:
            network.optimizer.step()
        self.steps = number
        self._measure()
        self._recorder.settle()


def _as_tensor(targets: NDArray[Any]) -> Tensor:
    kind = np.float32 if targets.dtype.kind == "f" else np.int64
    return torch.from_numpy(np.array(targets, kind))


def _together(
    members: Sequence[Member], networks: Sequence[TorchNetwork]
) -> tuple[nn.Module, list[str] | None]:
    """One module of all networks, and the names of their output layers."""
    if len(networks) == 1:
        return networks[0].module, None
    whole, heads = nn.ModuleDict(), []
    for number, (member, (module, _)) in enumerate(zip(members, networks, strict=True)):
        hidden = member.hidden if isinstance(member.hidden, tuple) else ()
        name = "-".join([member.optimizer.replace(".", "-"), *map(str, hidden)])
        name = f"{name}-{number}" if name in whole else name
        whole[name] = module
        layers = [layer for layer, each in module.named_modules() if has_features(each)]
        heads.append(f"{name}.{layers[-1]}")
    return whole, heads
