"""What classifiers and regressors of streams have in common."""

from __future__ import annotations

import numbers
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from upgd.stream.columns import Columns, Rows, StreamWarning, Widths, is_table
from upgd.stream.committee import Committee, below
from upgd.stream.drift import ACTIONS, Watch
from upgd.stream.explain import Explanation, explain
from upgd.stream.export import TorchNetwork, to_torch
from upgd.stream.files import load_learner, save_learner
from upgd.stream.members import chosen, make_core
from upgd.stream.monitoring import StreamMonitor
from upgd.stream.recent import Recent
from upgd.stream.replay import Buffer
from upgd.stream.scaling import STATISTICS, Scaler
from upgd.stream.values import LARGEST, LARGEST_RAW, LARGEST_WEIGHT, WHICH_WEIGHTS, usable

AnyLearner = TypeVar("AnyLearner", bound="StreamLearner")
Samples = tuple[Rows, NDArray[Any], NDArray[np.float32] | None, Widths | None]
Decode = Callable[[NDArray[np.float64]], NDArray[np.float64]]
GOOD_EVERY = 1000
"""Samples between copies to which a network returns when it diverges."""
RECENT = 1000
"""Samples over which recent errors are averaged."""
KEPT = 256
"""The newest samples, which :meth:`StreamLearner.explain` and the monitor look at."""


class StreamLearner(BaseEstimator):
    """A learner of rows and targets, one sample at a time; see its subclasses."""

    _squared = False
    _monitor: StreamMonitor | None = None

    def __init__(
        self,
        network: Any = "medium",
        *,
        optimizer: str | None = None,
        hyper: Mapping[str, Any] | None = None,
        activation: str = "relu",
        normalize: bool = True,
        horizon: float = 300,
        missing: str = "mean",
        max_features: int = 10_000,
        replay: int = 0,
        replay_samples: int = 1,
        drift: Any = None,
        on_drift: Sequence[str] = ACTIONS,
        batch_size: int = 1,
        epochs: int = 20,
        warm_start: bool = False,
        snapshot: str | os.PathLike[str] | None = None,
        snapshot_every: int = 10_000,
        monitor_every: int = 5000,
        random_state: Any = 0,
    ) -> None:
        self.network = network
        self.optimizer = optimizer
        self.hyper = hyper
        self.activation = activation
        self.normalize = normalize
        self.horizon = horizon
        self.missing = missing
        self.max_features = max_features
        self.replay = replay
        self.replay_samples = replay_samples
        self.drift = drift
        self.on_drift = on_drift
        self.batch_size = batch_size
        self.epochs = epochs
        self.warm_start = warm_start
        self.snapshot = snapshot
        self.snapshot_every = snapshot_every
        self.monitor_every = monitor_every
        self.random_state = random_state

    # ------------------------------------------------------------------------ beginning
    def _begin(self) -> None:
        """Check the parameters and begin with nothing learned."""
        self._check()
        absent = np.nan if self.missing == "mean" else 0.0
        largest = LARGEST if self.normalize else LARGEST_RAW
        asked = (self.network, self.optimizer, self.hyper)
        self._began_with = self.get_params()
        self._members = chosen(*asked, self._squared, self.activation)
        self._seed = _seed(self.random_state)
        self._columns = Columns(self.max_features, absent=absent, largest=largest)
        self._scaler = Scaler(0, self.horizon if self.normalize else np.inf)
        self._watch = None if self.drift is None else Watch(self.drift)
        self._buffer: Buffer | None = None
        self._recent = Recent(KEPT)
        self.committee_: Committee | None = None
        self.n_samples_seen_ = 0
        self._saved_at = 0
        self._extra: dict[str, Any] = {}
        self.restarts_ = 0
        self.drifts_: list[int] = []
        self._errors = 0.0, 0.0  # their sum, and the mean of recent ones

    def _check(self) -> None:
        at_least = {"max_features": 1, "batch_size": 1, "epochs": 1, "snapshot_every": 1}
        at_least |= {"replay": 0, "replay_samples": 1, "horizon": 2, "monitor_every": 1}
        for name, least in at_least.items():
            value = getattr(self, name)
            kind: Any = numbers.Real if name == "horizon" else numbers.Integral
            if isinstance(value, bool) or not isinstance(value, kind) or not least <= value:
                raise ValueError(f"{name} must be at least {least}, got {value!r}")
        if self.missing not in ("mean", "zero"):
            raise ValueError(f"missing must be 'mean' or 'zero', got {self.missing!r}")
        if unknown := set(self.on_drift) - set(ACTIONS):
            raise ValueError(f"on_drift is some of {ACTIONS}, got {sorted(unknown)}")
        if self.batch_size > 1 and (self.drift is not None or self.replay):
            raise ValueError("drift and replay look at single samples: they need batch_size=1")
        if self.snapshot is not None and not Path(self.snapshot).absolute().parent.is_dir():
            raise ValueError(f"there is no folder for the snapshot {os.fspath(self.snapshot)}")

    @property
    def _is_begun(self) -> bool:
        return hasattr(self, "committee_")

    def _begin_once(self) -> None:
        """Begin, or begin again with other parameters if nothing was learned yet."""
        if not self._is_begun or (self.committee_ is None and self._is_changed):
            self._begin()

    @property
    def _is_changed(self) -> bool:
        return bool(self.get_params() != self._began_with)

    def __sklearn_is_fitted__(self) -> bool:
        return self._is_begun and self.committee_ is not None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.non_deterministic = False
        return tags

    @property
    def n_features_in_(self) -> int:
        """Columns; a feature of strings has one for each of them."""
        if not self.__sklearn_is_fitted__():
            raise AttributeError("there are no features before something was learned")
        return len(self._columns)

    @property
    def extra(self) -> dict[str, Any]:
        """What was saved beside the learner as it is; empty once it has learned more."""
        if not self._is_begun:
            raise AttributeError("nothing was saved beside this learner")
        return self._extra if self._saved_at == self.n_samples_seen_ else {}

    def _shape(self, inputs: int, outputs: int) -> Committee:
        """The networks, with so many inputs and outputs."""
        if self.committee_ is None:
            some = (self._seed, self._squared, self.batch_size)
            cores = [make_core(each, inputs, outputs, *some) for each in self._members]
            self.committee_ = Committee(cores, self._squared, self._good_every)
            self._first_shape = inputs, outputs
            self._scaler.grow(inputs)
            if self.replay:
                numbers = outputs if self._squared else 0
                self._buffer = Buffer(self.replay, self._seed, numbers)
        elif (inputs, outputs) != self.committee_.shape:
            before = self.committee_.shape[0]
            steps = [each.step(inputs) / each.step(before) for each in self._members]
            self.committee_.grow(inputs, outputs, steps)
            self._scaler.grow(inputs)
        return self.committee_

    # -------------------------------------------------------------------------- inputs
    def _rows(self, X: Any, learn: bool) -> tuple[Rows, Widths | None]:
        """Inputs as rows of float64; with `learn`, features may be new.

        Returns:
            Rows, and how many columns there were after each; None for as many as there are.
        """
        with usable("X"):
            return self._read(X, learn)

    def _read(self, X: Any, learn: bool) -> tuple[Rows, Widths | None]:
        if is_table(X):
            rows, widths = self._columns.table(X, learn)
            if not len(rows):
                raise ValueError("the table has 0 rows; at least one is needed")
            return rows, widths
        if isinstance(X, Mapping) and not hasattr(X, "tocsr"):  # a sparse array may be a dict
            raise TypeError("X is a dict; give a list of dicts, or use learn_one and predict_one")
        if hasattr(X, "detach"):
            X = X.detach().cpu().numpy()
        largest, columns = self._columns.largest, len(self._columns)
        usual = type(X) is np.ndarray and X.dtype.char in "efd" and X.ndim == 2 and len(X)
        if usual and 0 < X.shape[1] == columns:
            rows = np.ascontiguousarray(X, np.float64)
            if not (np.abs(rows) > largest).any():
                return self._columns.by_number(rows), None
        how = {"dtype": np.float64, "ensure_all_finite": "allow-nan"}
        if columns:
            rows = validate_data(self, X, reset=False, **how)
        else:
            rows = check_array(X, estimator=self, input_name="X", **how)
        if (np.abs(rows) > largest).any():
            column = int((np.abs(rows) > largest).any(0).argmax())
            raise ValueError(
                f"column {column} of X has magnitudes above {largest:g}; use NaN for what is "
                "missing"
            )
        if learn and not columns:
            self._columns.fix(rows.shape[1])
        return self._columns.by_number(np.ascontiguousarray(rows)), None

    def _samples(self, X: Any, y: Any, sample_weight: Any) -> Samples:
        """Rows, targets, weights and widths; where they are refused, nothing changes."""
        raise NotImplementedError

    def _first_samples(self, X: Any, y: Any, sample_weight: Any) -> Samples:
        """The same for a learner that begins anew, unless `warm_start` says otherwise."""
        before = dict(self.__dict__)
        columns = len(self._columns) if self._is_begun else 0
        try:
            if not self.warm_start or not self._is_begun:
                self._begin()
            samples = self._samples(X, y, sample_weight)
            if samples[2] is not None and not samples[2].any():
                raise ValueError("all values of sample_weight are zero: there is nothing to fit")
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            if self._is_begun:
                self._columns.cut(columns)
            raise
        return samples

    def _new_rows(self, X: Any, count: int) -> tuple[Rows, Widths | None]:
        """Rows that will be learned, one per target; where they are refused, nothing changes."""
        before = len(self._columns)
        try:
            rows, widths = self._rows(X, True)
            if len(rows) != count:
                raise ValueError(f"there are {len(rows)} rows and {count} targets")
            if self.committee_ is not None:
                self.committee_.check_inputs(len(self._columns))
        except BaseException:
            self._columns.cut(before)
            raise
        return rows, widths

    def _new_row(self, x: Mapping[Any, Any]) -> Rows:
        """The same for one dict."""
        before = len(self._columns)
        row = self._columns.row(x, True)
        if self.committee_ is not None and len(row) != before:
            try:
                self.committee_.check_inputs(len(row))
            except ValueError:
                self._columns.cut(before)
                raise
        return row[None]

    def _scaled(self, rows: Rows, learn: bool) -> NDArray[np.float32]:
        if self.missing == "zero":
            rows = np.nan_to_num(rows, nan=0.0)
        if not self.normalize:
            return np.nan_to_num(rows, nan=0.0).astype(np.float32)
        return self._scaler.learn(rows) if learn else self._scaler.peek(rows)

    def _answers(self, rows: Rows) -> NDArray[np.float64]:
        """The networks' answers to rows whose targets are not known."""
        assert self.committee_ is not None
        return self.committee_.answer(self._scaled(rows, False))

    # ------------------------------------------------------------------------ learning
    def _steps(
        self, rows: Rows, targets: NDArray[Any], weights: NDArray[np.float32] | None, outputs: int
    ) -> NDArray[np.float64]:
        """Learn from rows whose targets the networks can express; answers before each."""
        self._shape(rows.shape[1], outputs)
        if self._watch is None and self._buffer is None:
            answers = self._step(rows, targets, weights)
            self._count(answers, targets)
            return answers
        found = []
        for t in range(len(rows)):
            some = slice(t, t + 1)
            weight = None if weights is None else weights[some]
            found.append(self._step(rows[some], targets[some], weight))
            error = self._count(found[-1], targets[some])
            self._learn_again(rows[t], targets[t])
            if self._watch is not None and self._watch.update(error):
                self._react()
        return np.concatenate(found)

    def _step(
        self, rows: Rows, targets: NDArray[Any], weights: NDArray[np.float32] | None
    ) -> NDArray[np.float64]:
        encoded, decode = self._encode(targets)
        scaled = self._scaled(rows, True)
        if self._monitor is None:
            answers = self._learn_scaled(scaled, encoded, weights)
        else:
            answers = self._monitor.learn(self, scaled, encoded, weights)
        self._recent.add(scaled, encoded)
        return decode(answers)

    def _learn_scaled(
        self,
        rows: NDArray[np.float32],
        targets: NDArray[Any],
        weights: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float64]:
        assert self.committee_ is not None
        before = self.committee_.restarts
        answers = self.committee_.learn(rows, targets, weights)
        if self.committee_.restarts > before:
            now = self.restarts_ + self.committee_.restarts - before
            if self.restarts_ == 0 or len(str(now)) > len(str(self.restarts_)):  # 1, 10, 100, ...
                warnings.warn(
                    f"a network diverged after {self.n_samples_seen_} samples or some later (times "
                    f"until now: {now}); it went back by up to {self._good_every} samples and goes "
                    "on with half the step size, which is doubled again later. If this is "
                    "repeated, choose a smaller one",
                    StreamWarning,
                    stacklevel=2,
                )
            self.restarts_ = now
        return answers

    def _learn_again(self, row: Rows, target: Any) -> None:
        """Learn from the buffer, then put the newest sample into it."""
        if self._buffer is None:
            return
        if len(self._buffer):
            rows, targets = self._buffer.draw(self.replay_samples)
            if rows.shape[1] < len(row):
                more = np.full((len(rows), len(row) - rows.shape[1]), np.nan)
                rows = np.concatenate([rows, more], 1)
            if self.missing == "zero":
                rows = np.nan_to_num(rows, nan=0.0)
            scaled = self._scaler.apply(rows) if self.normalize else self._scaled(rows, False)
            self._learn_scaled(scaled, self._encode_again(targets))
        self._buffer.add(row, target)

    def _count(self, answers: NDArray[np.float64], targets: NDArray[Any]) -> float:
        """Count samples and their errors; the last one's is returned."""
        seen, (total, recent), error = self.n_samples_seen_, self._errors, 0.0
        for error in self._sample_errors(answers, targets).tolist():
            seen += 1
            total += error
            recent += (error - recent) / min(seen, RECENT)
        self.n_samples_seen_, self._errors = seen, (total, recent)
        return error

    def _encode(self, targets: NDArray[Any]) -> tuple[NDArray[Any], Decode]:
        """Targets for the networks, and what makes predictions of their answers."""
        return targets, _as_they_are

    def _encode_again(self, targets: NDArray[Any]) -> NDArray[Any]:
        """Targets of samples that were learned before."""
        return targets

    def _sample_errors(
        self, answers: NDArray[np.float64], targets: NDArray[Any]
    ) -> NDArray[np.float64]:
        raise NotImplementedError

    def _react(self) -> None:
        """Forget what a change of the stream has made worthless."""
        assert self.committee_ is not None
        self.drifts_.append(self.n_samples_seen_)
        if "utilities" in self.on_drift:
            for core in self.committee_.cores:
                core.forget_utilities()
        if "scaler" in self.on_drift:
            self._scaler.forget()

    def _learn(
        self,
        rows: Rows,
        targets: Any,
        weights: NDArray[np.float32] | None,
        widths: Widths | None = None,
    ) -> NDArray[Any]:
        """Learn from rows, some at a time; the predictions before each.

        With `widths`, a row is learned with so many columns, as if the rows after it were unknown.
        """
        found: list[NDArray[Any]] = []
        begin, width = 0, rows.shape[1]
        while begin < len(rows):
            end = min(len(rows), begin + self._good_every)
            if widths is not None:
                width = int(widths[begin])
                end = begin + int(np.searchsorted(widths[begin:end], width, "right"))
            some, weight = slice(begin, end), None if weights is None else weights[begin:end]
            part = np.ascontiguousarray(rows[some, :width])
            found.append(self._learn_some(part, targets[some], weight))
            begin = end
            if self.n_samples_seen_ - self._saved_at >= self.snapshot_every:
                self._save_snapshot()
        return np.concatenate(found)

    def _save_snapshot(self) -> None:
        """Write the file of snapshots; where that fails, learning goes on."""
        if self.snapshot is None:
            return
        try:
            self.save(self.snapshot)
        except OSError as error:
            warnings.warn(f"no snapshot was saved: {error}", StreamWarning, stacklevel=2)
            self._saved_at = self.n_samples_seen_  # tried again after as many samples

    @property
    def _good_every(self) -> int:
        """Samples between copies: whole batches."""
        return -(-GOOD_EVERY // self.batch_size) * self.batch_size

    def _learn_some(
        self, rows: Rows, targets: Any, weights: NDArray[np.float32] | None
    ) -> NDArray[Any]:
        raise NotImplementedError

    def _epochs(self, rows: Rows, targets: Any, weights: NDArray[np.float32] | None) -> None:
        """Learn from all rows several times, in a new order each time."""
        random = np.random.default_rng(self._seed)
        for _ in range(self.epochs):
            order = random.permutation(len(rows))
            self._learn(rows[order], targets[order], None if weights is None else weights[order])

    # -------------------------------------------------------------------------- looking
    def explain(self, top: int = 10) -> Explanation:
        """Which inputs and hidden units carry utility now; printed, it is a table.

        Args:
            top: How many are shown; the result has all.

        Example:
            >>> from upgd.stream import Regressor
            >>> learner = Regressor(network=(8,))
            >>> for i in range(400):
            ...     learner.learn_one({"useful": i % 7, "noise": i * i % 11}, i % 7)
            >>> list(learner.explain().growth)
            ['useful', 'noise']
        """
        check_is_fitted(self)
        return explain(self, top)

    @property
    def monitor(self) -> StreamMonitor:
        """The plasticity monitor, which measures the networks every `monitor_every` samples.

        It begins when it is first asked for; a learner that has none measures nothing.

        Example:
            >>> from upgd.stream import Classifier
            >>> learner = Classifier(network=(8,), monitor_every=50)
            >>> _ = learner.monitor.on_measure(lambda sample, numbers: print(sample))
            >>> for i in range(100):
            ...     learner.learn_one({"x": i % 5}, i % 5 > 2)
            50
            100
            >>> 0 <= learner.monitor.scalars()["dormant"] <= 1
            True
        """
        if self._monitor is None:
            self._monitor = StreamMonitor(self.monitor_every)
        return self._monitor

    def to_torch(self) -> list[TorchNetwork]:
        """Copies of the networks as PyTorch modules, each with an optimizer that goes on with it.

        ``for module, optimizer in learner.to_torch()``: the optimizer is of the package's class and
        has the network's traces, step counts and noise. Given the rows of :meth:`scaled_rows` one
        by one and the same losses (cross entropy, ``output_classes_`` being the outputs' order; the
        mean squared error of scaled targets), it takes the learner's steps, up to rounding.
        """
        check_is_fitted(self)
        assert self.committee_ is not None
        return [to_torch(core) for core in self.committee_.cores]

    def scaled_rows(self, X: Any) -> NDArray[np.float32]:
        """What the networks see of rows, [T, columns]: each as if it came next."""
        check_is_fitted(self)
        return self._scaled(self._rows(X, False)[0], False)

    # ---------------------------------------------------------------------------- files
    def _state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Everything that learning on depends on: arrays, and what fits into JSON."""
        check_is_fitted(self)
        assert self.committee_ is not None
        mine, facts = self.committee_.state()
        arrays = {f"network/{name}": array for name, array in mine.items()}
        arrays |= {f"scaler/{name}": getattr(self._scaler, name) for name in STATISTICS}
        if self._buffer is not None:
            arrays |= {"replay/rows": self._buffer.rows, "replay/targets": self._buffer.targets}
            facts["replay"] = [self._buffer.added, self._buffer.drawn]
        if self._watch is not None:
            arrays["drift"] = self._watch.state()
        facts |= {"columns": self._columns.state(), "samples": self.n_samples_seen_}
        facts["first_shape"] = list(self._first_shape)
        facts |= {"restarts": self.restarts_, "drifts": list(self.drifts_)}
        facts["scaler"] = {"includes": self._scaler.includes, "clip": self._scaler.clip}
        facts["errors"] = list(self._errors)
        return arrays, facts

    def _restore(self, arrays: Mapping[str, NDArray[Any]], facts: dict[str, Any]) -> None:
        """Continue from :meth:`_state`, in a learner that has begun."""
        self._columns.restore(facts["columns"])
        self._members = self._members[: len(facts["members"])]  # an older mixture had fewer
        self._shape(*facts["first_shape"])
        committee = self._shape(*facts["shape"])
        committee.restore(below("network/", arrays), facts)
        for name in STATISTICS:
            setattr(self._scaler, name, np.array(arrays[f"scaler/{name}"]))
        for name, value in facts.get("scaler", {}).items():
            setattr(self._scaler, name, value)
        self._errors = facts["errors"][0], facts["errors"][1]
        if self._buffer is not None and "replay" in facts:
            self._buffer.rows = np.array(arrays["replay/rows"])
            self._buffer.targets = np.array(arrays["replay/targets"])
            self._buffer.added, self._buffer.drawn = facts["replay"]
        if self._watch is not None and "drift" in arrays:
            self._watch.restore(arrays["drift"])
        self.n_samples_seen_ = facts["samples"]
        self.restarts_, self.drifts_ = facts["restarts"], list(facts["drifts"])

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Write everything learned so far into one file, atomically and without pickle.

        A learner that was loaded goes on as this one would have, bit for bit.

        Args:
            path: The file; an old one is replaced when the new one is whole and on disk.
            extra: What JSON can hold, saved in the same moment: a position in the stream, say. It
                is the attribute ``extra`` of the loaded learner, until that learns more.

        Raises:
            ValueError: A parameter or `extra` cannot be saved.
            OSError: The file cannot be written.
        """
        save_learner(self, path, extra)

    @classmethod
    def load(cls: type[AnyLearner], path: str | os.PathLike[str], **parameters: Any) -> AnyLearner:
        """The learner that :meth:`save` wrote.

        Args:
            path: The file.
            parameters: In place of those that were saved; a `network` that is a module must be
                given, since files hold no code.

        Raises:
            ValueError: The file is damaged, or is no learner of this class.
            OSError: It cannot be read.
        """
        return load_learner(cls, path, parameters)


def weights_of(sample_weight: Any, count: int) -> NDArray[np.float32] | None:
    """Weights of so many samples, from one for each or one for all of them."""
    if sample_weight is None:
        return None
    how = {"dtype": np.float64, "input_name": "sample_weight"}
    with usable("sample_weight"):
        if hasattr(sample_weight, "detach"):
            sample_weight = sample_weight.detach().cpu().numpy()
        if isinstance(sample_weight, numbers.Real):
            sample_weight = np.full(count, sample_weight, np.float64)
        found = check_array(sample_weight, ensure_2d=False, **how)
    if found.shape != (count,):
        raise ValueError(f"sample_weight has shape {found.shape}, expected {(count,)}")
    if len(found) and not 0 <= found.min() <= found.max() <= LARGEST_WEIGHT:
        raise ValueError(
            f"sample_weight has values from {found.min():g} to {found.max():g}; {WHICH_WEIGHTS}"
        )
    return np.ascontiguousarray(found, np.float32)


def _as_they_are(answers: NDArray[np.float64]) -> NDArray[np.float64]:
    return answers


def _seed(random_state: Any) -> int:
    if isinstance(random_state, int | np.integer) and not isinstance(random_state, bool):
        if 0 <= random_state < 1 << 63:
            return int(random_state)
        raise ValueError(f"random_state must not be negative, got {random_state}")
    return int(check_random_state(random_state).randint(0, 2**31 - 1))
