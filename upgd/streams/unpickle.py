"""CIFAR-10's python batches are pickles: this reads them and runs nothing that they name.

A pickle may name any function and have it called. Here the four names that a NumPy array's
pickle needs stand for inert objects of our own; every other name is refused. Arrays are made
from the recorded shape, type and bytes afterwards, so NumPy's own unpickling is not used either.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TYPES = {"u1": np.uint8, "i1": np.int8, "i4": np.int32, "i8": np.int64}


class _Record:
    """What a pickle says about a dtype or an array: arguments, then a state."""

    __slots__ = ("arguments", "state")

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.state: Any = ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Name:
    """Stands for a name in a pickle. Cannot be changed by it, and does what we say if called."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., object] | None = None) -> None:
        self._call = call

    def __call__(self, *arguments: object) -> object:
        if self._call is None:
            raise pickle.UnpicklingError("a class is called")
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a name is given a state")


def _encode(text: object, encoding: object = "latin1") -> bytes:
    """``_codecs.encode``, by which Python 3 writes bytes into old protocols."""
    encoding = encoding.decode() if isinstance(encoding, bytes) else encoding
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("an encoding other than latin1")
    return text.encode("latin1")


class _Reader(pickle._Unpickler):
    """Python's own unpickler in Python: a few bytes can make the one in C reserve gigabytes."""

    dispatch = {  # noqa: RUF012
        code: action
        for code, action in pickle._Unpickler.dispatch.items()
        if code != pickle.BYTEARRAY8[0]  # reserves what it is told to
    }

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in (
            "numpy.core.multiarray",
            "numpy._core.multiarray",
        ):
            return _Name(_Record)
        if (module, name) == ("numpy", "ndarray"):
            return _Name()
        if (module, name) == ("numpy", "dtype"):
            return _Name(_Record)
        if (module, name) == ("_codecs", "encode"):
            return _Name(_encode)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused")


def read_batch(content: bytes) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """`data` and `labels` of one pickled batch; raises an exception if it is anything else.

    Example:
        >>> batch = {b"data": np.zeros((2, 3), np.uint8), b"labels": [4, 5]}
        >>> data, labels = read_batch(pickle.dumps(batch, protocol=2))
        >>> data.shape, labels
        ((2, 3), array([4, 5]))
        >>> read_batch(pickle.dumps(print))
        Traceback (most recent call last):
        _pickle.UnpicklingError: it asks for builtins.print, which is refused
    """
    batch = _Reader(io.BytesIO(content), encoding="bytes").load()
    if not isinstance(batch, dict):
        raise ValueError("it holds no dictionary")
    named = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in batch.items()}
    data, labels = named.get("data"), named.get("labels")
    if not isinstance(data, _Record):
        raise ValueError("it has no array 'data'")
    if isinstance(labels, _Record):
        numbers = _array(labels)
    elif isinstance(labels, list) and all(type(label) is int for label in labels):
        numbers = np.array(labels, dtype=np.int64)
    else:
        raise ValueError("it has no list 'labels'")
    if numbers.ndim != 1:
        raise ValueError("its labels are not a list")
    return _array(data), numbers.astype(np.int64)


def _array(record: _Record) -> NDArray[Any]:
    """The array of a state (version, shape, dtype, in Fortran's order, bytes)."""
    _, shape, kind, fortran, raw = record.state
    if isinstance(raw, str):
        raw = raw.encode("latin1")
    if not isinstance(kind, _Record) or not isinstance(raw, bytes):
        raise ValueError("an array of an unknown kind")
    code = kind.arguments[0]
    code = code.decode("latin1") if isinstance(code, bytes) else code
    byteorder = kind.state[1] if len(kind.state) > 1 else "<"
    if code not in _TYPES or byteorder in (">", b">"):
        raise ValueError(f"an array of type {code!r}")
    dtype = np.dtype(_TYPES[code]).newbyteorder("<")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"an array of shape {shape!r}")
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes for an array of shape {shape}")
    flat: NDArray[Any] = np.frombuffer(raw, dtype=dtype)
    return np.asarray(flat.reshape(shape, order="F" if fortran else "C"))
