# mypy: ignore-errors
"""numba's decorators with a cache that cannot fail: what is lost or damaged is compiled again.

numba's own ``cache=True`` raises where no folder can be written, and on files that were damaged;
machine code with wrong bytes in it would even be run.
"""

from __future__ import annotations

import hashlib
import os
import pickle
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
    with suppress(RuntimeError, OSError):  # there is no folder: compiled for this process alone
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
    """Files that begin with a checksum of numba's version and of what follows."""

    def _load_index(self):
        try:
            stamp, overloads = self._read(self._index_path)
        except OSError:
            return {}
        return overloads if stamp == self._source_stamp else {}

    def _save_index(self, overloads):
        self._write(self._index_path, (self._source_stamp, overloads))

    def _load_data(self, name):
        return self._read(self._data_path(name))  # its caller takes an OSError for "not there"

    def _save_data(self, name, data):
        self._write(self._data_path(name), data)

    def _read(self, path):
        content = Path(path).read_bytes()
        if content[:32] != self._digest(content[32:]):
            raise OSError(f"{path} is damaged")
        return pickle.loads(content[32:])

    def _write(self, path, data):
        content = self._dump(data)
        with self._open_for_write(path) as file:
            file.write(self._digest(content) + content)

    def _digest(self, content):
        return hashlib.sha256(self._version.encode() + content).digest()


class _Cache(FunctionCache):
    _impl_class = _Implementation

    def __init__(self, function):
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = _Files(self.cache_path, self._impl.filename_base, stamp)

    def load_overload(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # whatever it is, compiling helps
            return None

    def save_overload(self, sig, data):
        with suppress(OSError):  # such as a disk that is full
            super().save_overload(sig, data)
