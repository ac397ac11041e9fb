"""Learning from files and pipes: reads rows, predicts, learns, and saves where it was."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from upgd.ledger import crash_points as crash
from upgd.pipe.feeding import MOST, Feed
from upgd.pipe.lines import FileSource, PipeSource, open_source
from upgd.pipe.outputs import Output, csv_lines
from upgd.pipe.reading import Reader
from upgd.pipe.rows import BadLineError, Layout, Row, did_you_mean
from upgd.pipe.state import KINDS, StateFile, saved_positions
from upgd.pipe.task import Counts, Progress, Task, guess_kind
from upgd.stream.estimators import Classifier, Regressor
from upgd.stream.known import Guess
from upgd.text import count, printable

WAIT = 0.2
"""Seconds between looks at the clock while nothing comes."""
GUESSED_FROM, GUESS_SECONDS = 100, 1.0
"""Targets by which classification and regression are told apart, and how long they are awaited."""
SHOWN = 10
"""Bad lines that are shown."""
MOST_REASONS, OTHER = 1000, "other"
"""Reasons of bad lines, which may quote values, that are counted one by one; the rest are other."""
MANY_CLASSES = 1000
_LONGEST_SHOWN, _LONGEST_REASON = 60, 200
_TO_END = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


class Pipe:
    """A learner that is fed by files and pipes.

    Args:
        task: What is to be done.
        note: Told about guesses, bad lines and warnings, one line at a time.
        show: Told how far it is, after every batch and while waiting.
    """

    def __init__(
        self,
        task: Task,
        note: Callable[[str], None] = lambda text: None,
        show: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self.task, self._note, self._show = task, note, show
        task.check()
        self.counts = Counts()
        self.reasons: Counter[str] = Counter()
        self.signal: int | None = None
        self.kind, self._target, ignore = task.kind, task.target, task.ignore
        self._state = None if task.state is None else StateFile(task.state)
        saved = self._saved = {} if self._state is None else self._state.saved
        self._feed: Feed | None = None
        self._outputs: dict[str, Output] = {}
        self._is_resumed = self._state is not None and self._state.learner is not None
        if self._state is not None and self._state.learner is not None:
            self._state.check(task.target, task.kind, task.ignore, task.parameters)
            self.kind = self._state.kind
            self._target = task.target or saved.get("target", "")
            ignore = saved.get("ignore", []) if task.ignore is None else task.ignore
            self._feed = Feed(self._state.learner)
        else:
            Classifier(**task.parameters)._begin()  # refuses what is wrong before anything is read
        if not self._target:
            raise ValueError("name the column to learn with --target COLUMN")
        self._layout = Layout(
            self._target, tuple(ignore or ()), task.format, task.delimiter, tuple(task.columns)
        )
        self._check_bad_file()
        self._files: list[dict[str, Any]] = [dict(each) for each in saved.get("files", [])]
        self._piped = int(saved.get("piped", 0))  # records of pipes
        self._to_skip = self._piped if task.skip_seen else 0
        self._source: FileSource | PipeSource | None = None  # which is read
        self._at = 0  # its place in self._files
        self._waiting: list[Row] = []  # before the kind is known
        self._waiting_since: float | None = None
        self._began = self._saved_at = time.monotonic()
        self._learned_at_save = 0
        self._is_changed = False
        self._has_begun = False  # whether any source had a line
        self._has_many_classes = False

    # ------------------------------------------------------------------------- the run
    def run(self) -> dict[str, Any]:
        """Read everything there is, or until a signal comes; what was done, for a summary.

        Raises:
            ValueError: Something cannot be read or was refused; what was learned is saved.
            OSError: A file cannot be read or written.
        """
        with self._signals(), self._warnings():
            sources = [open_source(path) for path in self.task.files]
            places = saved_positions(sources, self._files)
            if self._is_resumed:
                self._open_outputs()
                self._tell_resumed(sources, places)
            try:
                for source, place in zip(sources, places, strict=True):
                    self._read(source, place)
                    source.close()
                    self._source = None
                    if self.signal is not None:
                        break
            except BrokenPipeError:
                self._save()
                raise
            self._save()
            for output in self._outputs.values():
                output.close()
        if not self._has_begun and self.signal is None:
            names = ", ".join(source.name for source in sources)
            are = "is empty: it has" if len(sources) == 1 else "are empty: they have"
            raise ValueError(f"{names} {are} no line at all")
        good = self.counts.learned + self.counts.predicted
        if self.counts.bad and not good and not self._is_resumed and self.signal is None:
            reason = next(each for each, _ in self.reasons.most_common(2) if each != OTHER)
            raise ValueError(
                f"nothing was learned: all of {count(self.counts.bad, 'line')} are bad "
                f"(mostly: {reason})"
            )
        return self.summary()

    def _read(self, source: FileSource | PipeSource, place: int | None) -> None:
        reader = Reader(source, self._layout)
        if place is not None:
            self._at = place
            reader.jump(self._files[place]["offset"], self._files[place]["line"])
        elif isinstance(source, FileSource):
            self._at = len(self._files)
            self._files.append({})
        self._source = source
        read, is_left = self.counts.read, False
        while self.signal is None:
            try:
                rows = reader.take(self._room(), WAIT)
            except (OSError, ValueError):
                self._save()
                raise
            for text in reader.notes:
                self._note(text)
            reader.notes.clear()
            if self.task.bad_file is not None and reader.has_begun and "bad" not in self._outputs:
                self._open("bad", self.task.bad_file, reader.header, False)
            if rows and self._is_unfinished(rows[-1]):
                rows, is_left = rows[:-1], True
            self._take(rows)
            if not rows and reader.has_ended:
                break
            self._look(not rows)
        self._take([], True)
        self._note_position()
        self._has_begun |= reader.has_begun
        if not reader.has_begun and self.signal is None:
            if len(self.task.files) > 1:
                self._note(f"{source.name} is empty: it has no line at all")
            return
        if self.counts.read == read and not is_left and self.signal is None:
            what = "nothing new" if place is not None else "no row"
            self._note(f"{source.name}: {what}")

    @property
    def _where(self) -> str:
        return "" if self._source is None else self._source.name

    def _room(self) -> int:
        """Rows until the learner is saved, or as many as are learned in one call."""
        if self._state is None:
            return MOST
        since = self.counts.learned - self._learned_at_save
        return max(1, min(MOST, self.task.save_every - since))

    def _look(self, is_waiting: bool) -> None:
        """Save the learner if it is time, and show progress."""
        if self._waiting:
            self._take([])
        now = time.monotonic()
        since = self.counts.learned - self._learned_at_save
        due = since >= self.task.save_every or (since and not self._learned_at_save)
        if due or now - self._saved_at >= self.task.save_seconds:
            self._save()
        errors = {} if self._feed is None else self._feed.errors()
        self._show(Progress(self.counts, now - self._began, errors, is_waiting))

    # ------------------------------------------------------------------------ the rows
    def _take(self, rows: list[Row], is_last: bool = False) -> None:
        """Learn rows, once the kind of the target is known."""
        if self._to_skip and isinstance(self._source, PipeSource):
            skipped, rows = rows[: self._to_skip], rows[self._to_skip :]
            self._to_skip -= len(skipped)
        if self._feed is None:
            rows = self._waiting = self._waiting + rows
            if not rows or not self._is_kind_known(is_last):
                return
            self._begin()
            self._waiting = []
        for begin in range(0, len(rows), MOST):
            self._learn(rows[begin : begin + MOST])

    def _is_kind_known(self, is_last: bool) -> bool:
        """Whether the first rows tell, or the user; if so, `kind` is set."""
        if self.kind:
            return True
        targets = [row.target for row in self._waiting if row.target is not None]
        if not targets:
            if len(self._waiting) >= MOST or is_last:
                self._refuse_kind()
            return False
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        enough = len(targets) >= GUESSED_FROM or len(self._waiting) >= MOST
        if not (enough or is_last or now - self._waiting_since >= GUESS_SECONDS):
            return False
        self.kind, why = guess_kind(targets)
        other = "--regress" if self.kind == "classify" else "--classify"
        self._note(f"guessed --{self.kind}, as {why}; give {other} if that is wrong")
        return True

    def _refuse_kind(self) -> None:
        """None of the first rows has a target: all are bad, or nothing tells the kind."""
        if any(not row.fault for row in self._waiting) and self.task.predict is not None:
            raise ValueError(
                f"none of the first {len(self._waiting)} records has a target {self._target!r}; "
                "give --classify or --regress"
            )
        rows, self._waiting = self._waiting, []
        self._learn(rows)

    def _begin(self) -> None:
        self._feed = Feed(KINDS[self.kind](**self.task.parameters))
        self._open_outputs()

    def _learn(self, rows: list[Row]) -> None:
        """Predict and learn some rows; those that are bad are counted, or end the run."""
        good: list[Row] = []
        for number, row in enumerate(rows):
            try:
                good.append(self._checked(row))
            except BadLineError as error:
                if self.task.refuse:
                    self._feed_rows(good, rows[:number])
                    self._save()
                    raise ValueError(
                        f"{self._where}, line {row.line}: {error}; everything before is "
                        f"learned{'' if self._state is None else ' and saved'}"
                    ) from None
                self._count_bad(row, str(error))
        self._feed_rows(good, rows)

    def _feed_rows(self, rows: list[Row], read: Sequence[Row]) -> None:
        """Learn the good ones of the rows that were read, and note the position behind all.

        The position moves before predictions are written: if their reader has gone, what is saved
        then must not be learned again.
        """
        if not rows:
            self._move(read)
            return
        assert self._feed is not None
        crash.point("learn: before rows")
        guesses = self._feed.learn(rows)
        learned = sum(row.target is not None for row in rows)
        self.counts.read += len(rows)
        self.counts.learned += learned
        self.counts.predicted += len(rows) - learned
        self._is_changed = True
        self._move(read)
        if "predictions" in self._outputs:
            self._outputs["predictions"].write(self._predictions(rows, guesses))
        crash.point("learn: after rows")
        self._warn_of_classes(self._feed.learner)

    def _warn_of_classes(self, learner: Classifier | Regressor) -> None:
        if self._has_many_classes or not isinstance(learner, Classifier):
            return
        self._has_many_classes = len(learner._labels) > MANY_CLASSES
        if self._has_many_classes:
            self._note(
                f"there are more than {MANY_CLASSES} classes, which makes learning slow; give "
                "--regress if the target is a number"
            )

    def _checked(self, row: Row) -> Row:
        """A row with its class or number; raises BadLineError."""
        if row.fault:
            raise BadLineError(row.fault)
        if row.target is None and self.task.predict is None:
            raise BadLineError(self._no_target(row))
        return row if self._feed is None else self._feed.checked(row)

    def _no_target(self, row: Row) -> str:
        hint = did_you_mean(self._target, row.names) if self.counts.bad < SHOWN else ""
        return f"the target {self._target!r} is missing" + (f"; {hint.strip()}" if hint else "")

    def _is_unfinished(self, row: Row) -> bool:
        """Whether a file ends within a row that is left for the next run: it may grow."""
        if row.is_terminated or self.task.complete or self._state is None:
            return False
        if not isinstance(self._source, FileSource):
            return False
        self._note(
            f"{self._where}: line {row.line} has no newline at its end, so it may still be "
            "written, and is left for the next run; --complete reads it"
        )
        return True

    def _count_bad(self, row: Row, reason: str) -> None:
        self.counts.read += 1
        self.counts.bad += 1
        reason = _shortened(reason, _LONGEST_REASON)
        is_counted = reason in self.reasons or len(self.reasons) < MOST_REASONS
        self.reasons[reason if is_counted else OTHER] += 1
        if self.counts.bad <= SHOWN:
            some = row.raw[: _LONGEST_SHOWN + 1].decode(errors="backslashreplace")
            text = printable(_shortened(some, _LONGEST_SHOWN))
            self._note(f"skipped {self._where}, line {row.line}: {reason}: {text}")
            if self.counts.bad == SHOWN:
                self._note("more bad lines are counted, but not shown")
        if "bad" in self._outputs:
            self._outputs["bad"].write(row.raw + b"\n")

    def _move(self, rows: Sequence[Row]) -> None:
        """Note the position behind rows that have been dealt with."""
        if not rows:
            return
        self._is_changed = True
        if isinstance(self._source, FileSource):
            place = self._files[self._at]
            self._files[self._at] = {**place, "offset": rows[-1].end, "line": rows[-1].next_line}
        else:
            self._piped += len(rows)

    # ------------------------------------------------------------------------- outputs
    def _open_outputs(self) -> None:
        """Open the file of predictions, whose columns depend on the kind."""
        if self.task.predict is None:
            return
        names = ["line", "prediction", "probability", "truth"]
        if self.kind == "regress":
            names.remove("probability")
        if len(self.task.files) > 1:
            names.insert(0, "file")
        header = ",".join(names).encode()
        self._open("predictions", self.task.predict, header, True)

    def _check_bad_file(self) -> None:
        path = self.task.bad_file
        if path and not self._is_resumed and os.path.isfile(path) and os.path.getsize(path):
            raise ValueError(f"{path} is there already; move it away, or name another file")

    def _open(self, name: str, path: str, header: bytes, replaces: bool) -> None:
        saved = self._saved.get("outputs", {}).get(name)
        made = self._outputs[name] = Output(path, header, saved, self._is_resumed, replaces)
        if made.is_unknown and self._is_resumed:  # so that a resumed run can cut off what follows
            self._is_changed = True
            self._save()

    def _predictions(self, rows: Sequence[Row], guesses: Sequence[Guess]) -> bytes:
        where = [self._where] if len(self.task.files) > 1 else []
        found = []
        for row, guess in zip(rows, guesses, strict=True):
            chance = None if guess.probability is None else f"{guess.probability:.6g}"
            chances = [chance] if self.kind == "classify" else []
            found.append([*where, row.line, guess.value, *chances, row.target])
        return csv_lines(found)

    # -------------------------------------------------------------------------- saving
    def _save(self) -> None:
        """Write the learner and the position, if there is a file for them and something to save."""
        self._saved_at = time.monotonic()
        if self._state is None or self._feed is None or not self._is_changed:
            return
        if self._feed.learner.committee_ is None:  # nothing was learned
            return
        self._state.save(self._feed.learner, self._facts())
        self._learned_at_save = self.counts.learned
        self._is_changed = False

    def _facts(self) -> dict[str, Any]:
        """What is saved beside the learner."""
        self._note_position()
        outputs = dict(self._saved.get("outputs", {}))
        for name, output in self._outputs.items():
            if (position := output.position()) is not None:
                outputs[name] = position
        return {
            "target": self._target,
            "ignore": list(self._layout.ignore),
            "files": [each for each in self._files if each],
            "piped": self._piped,
            "outputs": outputs,
            "counts": self.counts.plus(self._saved.get("counts", {})),
        }

    def _note_position(self) -> None:
        """Complete the position in the file that is being read."""
        if isinstance(self._source, FileSource) and self._files[self._at]:
            place = self._files[self._at]
            self._files[self._at] = self._source.position(place["offset"], place["line"])

    # ------------------------------------------------------------------------- telling
    def _tell_resumed(
        self, sources: Sequence[FileSource | PipeSource], places: Sequence[int | None]
    ) -> None:
        assert self._feed is not None
        learned = count(self._feed.learner.n_samples_seen_, "sample")
        self._note(f"resumed {self.task.state}: {learned} learned")
        for source, place in zip(sources, places, strict=True):
            if place is not None:
                self._note(f"{source.name}: goes on at line {self._files[place]['line']}")
            elif isinstance(source, PipeSource) and self._piped and not self._to_skip:
                self._note(
                    f"{source.name}: goes on with whatever comes; if it starts again from its "
                    f"beginning, --skip-seen skips the {count(self._piped, 'record')} read before"
                )

    def summary(self) -> dict[str, Any]:
        """What was done, as JSON can hold it."""
        seconds = time.monotonic() - self._began
        learner = {} if self._feed is None else {**self._feed.errors(), **self._feed.facts()}
        return {
            "kind": self.kind or None,
            "target": self._target,
            **vars(self.counts),
            "bad_reasons": dict(self.reasons.most_common(SHOWN)),
            "seconds": seconds,
            "samples_per_second": self.counts.learned / seconds if seconds > 0 else None,
            "all_runs": self.counts.plus(self._saved.get("counts", {})),
            "signal": None if self.signal is None else signal.Signals(self.signal).name,
            "state": self.task.state,
            **learner,
        }

    # ---------------------------------------------------------------- signals, warnings
    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Let signals end the run after the rows at hand; a second one ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def end(number: int, frame: Any) -> None:
            self.signal = number
            restore()

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        ignored = (signal.SIG_IGN, None)  # as under nohup; None: handled by other code than Python
        chosen = [number for number in _TO_END if signal.getsignal(number) not in ignored]
        before = {number: signal.signal(number, end) for number in chosen}
        try:
            yield
        finally:
            restore()

    @contextmanager
    def _warnings(self) -> Iterator[None]:
        """Warnings of the learner as notes."""
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *rest, **more: self._note(str(message))
            yield


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "..."
