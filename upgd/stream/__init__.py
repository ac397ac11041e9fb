"""Learners for people who have a stream: scikit-learn's and river's methods, one sample at a time.

Needs scikit-learn; numba makes them fast: ``pip install 'upgd[stream]'``.
"""

try:
    import sklearn  # noqa: F401
except ImportError as _error:
    raise ImportError(
        "upgd.stream needs scikit-learn: pip install 'upgd[stream]'", name="sklearn"
    ) from _error

from upgd.stream.columns import StreamWarning
from upgd.stream.estimators import Classifier, Regressor

__all__ = ["Classifier", "Regressor", "StreamWarning"]
