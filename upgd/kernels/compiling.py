# mypy: ignore-errors
"""numba's decorators with a robust cache: missing or damaged files are compiled again.

numba's own ``cache=True`` raises if no folder is writable or a file is damaged, and may even run
damaged machine code.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import numba
from numba.core import sigutils
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    IndexDataCacheFile,
    _CacheLocator,
    _SourceFileBackedLocatorMixin,
)
from numba.core.ccallback import CFunc

from upgd.caches import cache_folder

SEAL = ".sha256"
"""Suffix of a checksum file."""


def njit(**options):
    """``numba.njit(cache=True, **options)``."""

    def decorate(function):
        compiled = numba.njit(**options)(function)
        _keep(compiled, function)
        return compiled

    return decorate


def cfunc(signature, **options):
    """``numba.cfunc(signature, cache=True, **options)``."""

    def decorate(function):
        compiled = CFunc(function, sigutils.normalize_signature(signature), {}, options)
        _keep(compiled, function)
        compiled.compile()
        return compiled

    return decorate


def _keep(compiled, function):
    with suppress(RuntimeError, OSError):  # no folder: compiled for this process only
        compiled._cache = _Cache(function)


class _OurFolder(_SourceFileBackedLocatorMixin, _CacheLocator):
    """The last folder to try; numba's others are beside the source and in the user's cache."""

    def __init__(self, py_func, py_file):
        self._py_file = py_file
        self._lineno = py_func.__code__.co_firstlineno
        folder = cache_folder("numba")
        if folder is None:
            raise NotADirectoryError("no folder for a cache")
        self._cache_path = os.path.join(folder, self.get_suitable_cache_subpath(py_file))

    def get_cache_path(self):
        return self._cache_path


class _Implementation(CompileResultCacheImpl):
    _locator_classes = (*CompileResultCacheImpl._locator_classes, _OurFolder)


class _Files(IndexDataCacheFile):
    """numba's files, each with a checksum file beside it."""

    def _load_index(self):
        return super()._load_index() if self._is_whole(self._index_path) else {}

    def _save_index(self, overloads):
        super()._save_index(overloads)
        self._seal(self._index_path)

    def _load_data(self, name):
        if not self._is_whole(self._data_path(name)):
            raise OSError(f"{name} is damaged")  # the caller treats it as missing
        return super()._load_data(name)

    def _save_data(self, name, data):
        super()._save_data(name, data)
        self._seal(self._data_path(name))

    def _seal(self, path):
        with self._open_for_write(path + SEAL) as file:
            file.write(_digest(path))

    def _is_whole(self, path):
        try:
            return Path(path + SEAL).read_bytes() == _digest(path)
        except OSError:
            return False


def _digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest().encode()


class _Cache(FunctionCache):
    _impl_class = _Implementation

    def __init__(self, function):
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = _Files(self.cache_path, self._impl.filename_base, stamp)

    def load_overload(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # compile again whatever the reason
            return None

    def save_overload(self, sig, data):
        with suppress(OSError):  # such as a full disk
            super().save_overload(sig, data)
