"""Learners for people who have a stream: scikit-learn's and river's methods, one sample at a time.

Needs scikit-learn; numba makes them fast: in a clone ``pip install ".[stream]"``.
"""

from upgd.extras import install

try:
    import sklearn  # noqa: F401
except ImportError as _error:
    raise ImportError(
        f"upgd.stream needs scikit-learn: {install('stream')}", name="sklearn"
    ) from _error

from upgd.stream.columns import StreamWarning
from upgd.stream.estimators import Classifier, Regressor

__all__ = ["Classifier", "Regressor", "StreamWarning"]
