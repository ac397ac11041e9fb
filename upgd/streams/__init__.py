"""Non-stationary problems and the data behind them.

:data:`PROBLEMS` holds the paper's, and two that need no download; ``get(name).make(seed)`` gives
a :class:`Stream`. A stream is endless and a pure function of its seed and of the step::

    >>> from upgd.streams import get
    >>> stream = get("input-permuted-digits").make(seed=0)
    >>> x, y = stream.at(123_456)
    >>> x.shape, y.shape, stream.task(123_456)
    ((1, 64), (1,), 49)

Any dataset combines with any schedule (:class:`TaskStream`, :class:`Recurring`,
:class:`Drift`), and :func:`from_iterable` takes data of your own.
"""

from upgd.streams.custom import make_problem
from upgd.streams.datasets import (
    DataNotFoundError,
    Dataset,
    Facts,
    check,
    load,
    search_path,
    user_cache,
    write_npz,
)
from upgd.streams.files import DATASETS
from upgd.streams.images import read_image_folder, read_sprites
from upgd.streams.iterables import IterableStream, StreamEndedError, StreamError, from_iterable
from upgd.streams.keyed import Purpose
from upgd.streams.problems import PROBLEMS, Problem, get, register
from upgd.streams.readers import DataError, read_cifar_binary, read_idx, read_npz
from upgd.streams.schedules import Boundaries, Drift, Every, Recurring, Schedule, Span
from upgd.streams.stream import Block, Sample, Stream, TaskStream, ToyStream

# fmt: off
__all__ = [
    "DATASETS", "PROBLEMS", "Block", "Boundaries", "DataError", "DataNotFoundError", "Dataset",
    "Drift", "Every", "Facts", "IterableStream", "Problem", "Purpose", "Recurring", "Sample",
    "Schedule", "Span", "Stream", "StreamEndedError", "StreamError", "TaskStream", "ToyStream",
    "check", "from_iterable", "get", "load", "make_problem", "read_cifar_binary", "read_idx",
    "read_image_folder", "read_npz", "read_sprites", "register", "search_path", "user_cache",
    "write_npz",
]
# fmt: on
