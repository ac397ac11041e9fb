"""Kernels written for numba, executed by Python: decorators do nothing, vectors are NumPy arrays.

A changed kernel needs no compilation, which would take many seconds. Only float64 is provided for.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import upgd.kernels
from upgd.kernels import cpu_math, subnormals, vectors

LANES = vectors.LANES
Change = Callable[[str], str]


# ------------------------------------------------------------------------------ numba
def _decorator(*given: Any, **options: Any) -> Any:
    """``@njit``, ``@njit(…)`` and ``@cfunc(…)``."""

    def mark(function: Any) -> Any:
        function.py_func = function.address = function
        function.signatures = ["compiled"]
        return function

    return mark(given[0]) if len(given) == 1 and callable(given[0]) else mark


def _intrinsic(function: Any) -> Any:
    """The only one outside of the module of vectors."""
    assert function.__name__ == "_as"
    return lambda like, value: like.dtype.type(value)


def _overload(function: Any) -> Any:
    def mark(choose: Any) -> None:
        function.__globals__[function.__name__] = lambda *given: choose(*given)(*given)

    return mark


def _array(place: int, count: int, dtype: Any) -> Any:
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(place), dtype)


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    return module


_TYPES = SimpleNamespace(
    float32=np.dtype("float32"),
    float64=np.dtype("float64"),
    int64=np.dtype("int64"),
    uint32=np.dtype("uint32"),
    uint64=np.dtype("uint64"),
    intp=int,
    CPointer=lambda kind: kind,
    void=lambda *kinds: kinds,
)
_NUMBA = _module(
    "numba",
    __spec__=ModuleSpec("numba", None),
    njit=_decorator,
    types=_TYPES,
    carray=_array,
)
_COMPILING = _module("upgd.kernels.compiling", njit=_decorator, cfunc=_decorator)
_EXTENDING = _module("numba.extending", intrinsic=_intrinsic, overload=_overload)


# ---------------------------------------------------------------------------- vectors
def _product(words: Any, multiplier: Any) -> tuple[Any, Any]:
    wide = words.astype(np.uint64) * np.uint64(multiplier)
    return (wide >> np.uint64(32)).astype(np.uint32), wide.astype(np.uint32)


def _store(where: Any, index: int, vector: Any) -> None:
    where[index : index + LANES] = vector


def _call(function: Any, *arguments: Any) -> None:
    function(*arguments)


_VECTORS = _module(
    "upgd.kernels.vectors",
    __file__=vectors.__file__,
    LANES=LANES,
    Vector=np.ndarray,
    absolute=np.abs,
    address=lambda array, index: array[index:],
    bits=lambda x: x.view(np.uint32),
    call=_call,
    choose=np.where,
    converted=lambda words, like: words.astype(np.asarray(like).dtype),
    converted_signed=lambda words, like: words.view(np.int32).astype(np.asarray(like).dtype),
    equal=np.equal,
    fused=lambda a, b, c: a * b + c,
    exp=np.exp,
    full=lambda value: np.full(LANES, value),
    log=np.log,
    sign=np.sign,
    lanes=lambda: np.arange(LANES, dtype=np.uint32),
    largest=np.max,
    less=np.less,
    load=lambda where, index: where[index : index + LANES].copy(),
    maximum=np.maximum,
    minimum=np.minimum,
    number=lambda words: words.view(np.float32),
    product=_product,
    shifted=lambda words, count: (words.view(np.int32) >> np.int32(count)).view(np.uint32),
    smallest=np.min,
    spread=lambda value: np.full(LANES, value),
    sqrt=np.sqrt,
    store=_store,
    total=np.sum,
    widened=lambda x: x.astype(np.float64),
    zeros=lambda where: np.zeros(LANES, where.dtype),
)


_SUBNORMALS = _module(
    "upgd.kernels.subnormals",
    __file__=subnormals.__file__,
    flush_subnormals=lambda: 0,
    give_back=lambda before: None,
)


# ------------------------------------------------------------------ helpers of flat kernels
def _take_ticket(counter: Any) -> int:
    counter[0] += 1
    return int(counter[0]) - 1


_MATH = {
    "OPTIONS": cpu_math.OPTIONS,
    "pointer": int,
    "take_ticket": _take_ticket,
    "near_sigmoid32": None,
    "sigmoid64": cpu_math.sigmoid64.py_func,
}


# ---------------------------------------------------------------------------- executing
PARTS = {
    "cpu_dense": ("cpu_functions", "cpu_rows", "cpu_dense"),
    "cpu_flat": ("cpu_functions", "cpu_flat"),
    "cpu_layered": (
        *("cpu_functions", "cpu_recycle", "cpu_phases", "cpu_rows", "cpu_dense", "cpu_layered"),
    ),
}
"""The modules that make up some kernels, in the order in which they need each other."""
_BORDER = "\n# ----- the next module\n"


def execute(
    patch: pytest.MonkeyPatch, name: str, change: Change, scratch: Path, **replaced: Any
) -> ModuleType:
    """Put modules of kernels, with their source changed, in the place of the compiled ones.

    Args:
        patch: Puts everything back.
        name: ``"cpu_dense"``, ``"cpu_flat"`` or ``"cpu_layered"``.
        change: Of the source.
        scratch: A folder for generated modules.
        replaced: Other names of the last module.
    """
    files = [Path(upgd.kernels.__path__[0], f"{part}.py") for part in PARTS[name]]
    text = change(_BORDER.join(file.read_text() for file in files))
    version = hashlib.sha256(f"{text}{sorted(replaced)}{scratch}".encode()).hexdigest()
    math = _module("upgd.kernels.cpu_math", VERSION=version, **_MATH)
    patch.setenv("UPGD_CACHE", str(scratch))
    patch.setitem(sys.modules, "numba", _NUMBA)
    patch.setitem(sys.modules, "numba.extending", _EXTENDING)
    patch.setitem(sys.modules, "upgd.kernels.compiling", _COMPILING)
    helpers = {"vectors": _VECTORS, "subnormals": _SUBNORMALS, "cpu_math": math}
    for helper, module in helpers.items():
        patch.setitem(sys.modules, f"upgd.kernels.{helper}", module)
        patch.setattr(upgd.kernels, helper, module, raising=False)
    for part, file, own in zip(PARTS[name], files, text.split(_BORDER), strict=True):
        module = _module(f"upgd.kernels.{part}", __file__=str(file))
        patch.setitem(sys.modules, module.__name__, module)
        patch.setattr(upgd.kernels, part, module, raising=False)
        exec(compile(own, f"<changed {part}>", "exec"), vars(module))
        vars(module).update(VERSION=version)  # no generated module is taken for another
    vars(module).update(**replaced)
    return module
