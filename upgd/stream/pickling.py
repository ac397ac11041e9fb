"""Objects whose arrays change in place."""

from __future__ import annotations

from typing import Any

import numpy as np


class OwnsArrays:
    """Copies its arrays when it is unpickled: joblib may map them read-only from a file."""

    def __setstate__(self, saved: dict[str, Any]) -> None:
        for name, value in saved.items():
            self.__dict__[name] = np.array(value) if isinstance(value, np.ndarray) else value
