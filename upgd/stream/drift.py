"""Detectors of changes in a stream, from river."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

DETECTORS = {"adwin": "ADWIN", "page-hinkley": "PageHinkley", "kswin": "KSWIN"}
LONGEST, KEPT = 1 << 16, 1 << 13
ACTIONS = ("utilities", "scaler")


class Watch:
    """A detector that is fed with the error of every sample and can be saved.

    river's detectors cannot be saved, but they are functions of what they were fed with. So the
    values are kept, and a detector begins again where a change was found; after 65 536 values
    without one it begins again with the last 8 192 of them.

    Args:
        detector: A name of :data:`DETECTORS`, or a detector of river, which is copied.

    Raises:
        ImportError: river is not installed.
        ValueError: There is no such detector.
    """

    def __init__(self, detector: Any) -> None:
        if isinstance(detector, str):
            if detector not in DETECTORS:
                raise ValueError(
                    f"drift {detector!r} is unknown; it is one of {', '.join(DETECTORS)}, or a "
                    "detector of river"
                )
            try:
                drift = import_module("river.drift")
            except ImportError as error:
                raise ImportError("detecting drift needs river: pip install river") from error
            seeded = {"seed": 0} if detector == "kswin" else {}  # it draws samples
            detector = getattr(drift, DETECTORS[detector])(**seeded)
        elif not all(hasattr(detector, name) for name in ("update", "clone", "drift_detected")):
            raise ValueError(f"drift cannot be {detector!r}; give a name or a detector of river")
        self._first = detector.clone()
        self._values: list[float] = []
        self._begin()

    def _begin(self) -> None:
        self._detector = self._first.clone()
        for value in self._values:
            self._detector.update(value)

    def update(self, value: float) -> bool:
        """Feed a value; whether a change is found."""
        value = float(np.float32(value))  # as it is saved
        self._values.append(value)
        self._detector.update(value)
        found = bool(self._detector.drift_detected)
        if found:
            self._values = []
            self._begin()
        elif len(self._values) >= LONGEST:
            self._values = self._values[-KEPT:]
            self._begin()
        return found

    def state(self) -> NDArray[np.float32]:
        """What it was fed with since it began."""
        return np.array(self._values, np.float32)

    def restore(self, saved: NDArray[np.float32]) -> None:
        """Continue from :meth:`state`."""
        self._values = [float(value) for value in saved]
        self._begin()
