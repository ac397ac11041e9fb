"""A digest of what users define: code and data, the same in every process.

The source of a user's rule, optimizer, network or stream is part of a run's identity: where it
changes, results of before are another run's.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

DIGITS = 16
_OWN = __name__.partition(".")[0]
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))


def digest(*objects: Any) -> str:
    """16 hexadecimal digits that change with the code or the data of `objects`.

    - Functions and classes count by their source text (by their bytecode where there is none, as
      in an interactive session), together with what they refer to by a global name, a closure or
      a default argument: functions, classes and constants, and theirs in turn.
    - Of installed packages a class or function counts by its name and own source text, a module
      by its name; of this package by its name, as the version of the rules stands for the rest.
    - Arrays and tensors count by their type, shape and bytes; other objects by their class and
      attributes.

    Example:
        >>> def rule(w, g, lr):
        ...     return w - lr * g
        >>> digest(rule) == digest(rule), len(digest(rule))
        (True, 16)
        >>> digest([1, 2.0]) == digest([1, 2])
        False
    """
    found = hashlib.sha256()
    for piece in _Walk().pieces(objects):
        found.update(len(piece).to_bytes(8, "little"))
        found.update(piece)
    return found.hexdigest()[:DIGITS]


class _Walk:
    """One walk over objects and what they refer to; each is described once."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # an id is an object's own only while it lives

    def pieces(self, value: Any) -> Iterator[bytes]:
        """Describe `value` in bytes."""
        if isinstance(value, _PLAIN):
            yield f"{type(value).__name__} {value!r}".encode()
            return
        if id(value) in self._seen:
            yield f"again {self._seen[id(value)]}".encode()
            return
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        yield from self._first(value)

    def _first(self, value: Any) -> Iterator[bytes]:
        if isinstance(value, FunctionType):
            yield from self._function(value)
        elif isinstance(value, type):
            yield from self._class(value)
        elif isinstance(value, ModuleType):
            yield from self._module(value)
        elif isinstance(value, CodeType):
            yield from self._code(value)
        elif isinstance(value, Mapping):
            yield b"mapping"
            for key in sorted(value, key=lambda key: (type(key).__name__, str(key))):
                yield from self.pieces(key)
                yield from self.pieces(value[key])
        elif isinstance(value, set | frozenset):
            yield b"set"
            yield from sorted(digest(item).encode() for item in value)
        elif isinstance(value, list | tuple):
            yield f"{type(value).__name__} {len(value)}".encode()
            for item in value:
                yield from self.pieces(item)
        elif hasattr(value, "dtype") and hasattr(value, "shape"):
            yield from _array(value)
        else:
            yield from self._object(value)

    def _object(self, value: Any) -> Iterator[bytes]:
        """Something with attributes, or with nothing that can be told but its type."""
        if isinstance(value, functools.partial):
            yield b"partial"
            yield from self.pieces([value.func, value.args, value.keywords])
        elif isinstance(value, staticmethod | classmethod | MethodType):
            yield _name(type(value)).encode()
            yield from self.pieces(value.__func__)
            if isinstance(value, MethodType):
                yield from self.pieces(value.__self__)
        elif isinstance(value, property):
            yield from self.pieces([value.fget, value.fset, value.fdel])
        elif isinstance(value, BuiltinFunctionType) or not hasattr(value, "__dict__"):
            yield _name(value if hasattr(value, "__qualname__") else type(value)).encode()
        elif is_dataclass(value):
            yield from self.pieces(type(value))
            yield from self.pieces({f.name: getattr(value, f.name) for f in fields(value)})
        else:
            yield from self.pieces(type(value))
            if not _is_installed(type(value).__module__):
                yield from self.pieces(vars(value))

    def _function(self, function: FunctionType) -> Iterator[bytes]:
        if _is_ours(function):
            yield _name(function).encode()
            return
        text, installed = _text(function), _is_installed(function.__module__)
        if installed:
            yield _name(function).encode()
        yield b"function"
        yield from self._code(function.__code__) if text is None else (text.encode(),)
        yield from self.pieces([function.__defaults__, function.__kwdefaults__])
        if installed and function.__closure__ is None:
            return
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            yield name.encode()
            try:
                yield from self.pieces(cell.cell_contents)
            except ValueError:  # not bound yet
                yield b"empty"
        if not installed:
            yield from self._globals(function.__code__, function.__globals__)

    def _globals(self, code: CodeType, known: Mapping[str, Any]) -> Iterator[bytes]:
        """What a function refers to by a global name, its inner functions' names included."""
        for name in sorted(_names(code) & known.keys()):
            yield name.encode()
            yield from self.pieces(known[name])

    def _class(self, cls: type) -> Iterator[bytes]:
        if _is_ours(cls) or cls.__module__ == "builtins":
            yield _name(cls).encode()
            return
        text = _text(cls)
        if _is_installed(cls.__module__):
            yield _name(cls).encode()
            yield b"" if text is None else text.encode()
            return
        yield b"class"
        yield (cls.__qualname__ if text is None else text).encode()
        for base in cls.__bases__:
            yield from self.pieces(base)
        for name, value in sorted(vars(cls).items()):
            inner = getattr(value, "__wrapped__", value)  # PyTorch wraps step()
            inner = getattr(inner, "__func__", inner)
            inner = inner.fget if isinstance(inner, property) else inner
            if isinstance(inner, FunctionType):
                yield name.encode()
                if text is None:
                    yield from self.pieces(inner)
                else:  # its text is the class's
                    yield from self.pieces([inner.__defaults__, inner.__kwdefaults__])
                    yield from self._globals(inner.__code__, inner.__globals__)
            elif not name.startswith("__") and isinstance(value, (*_PLAIN, list, tuple, dict)):
                yield name.encode()
                yield from self.pieces(value)

    def _module(self, module: ModuleType) -> Iterator[bytes]:
        """A module of the user's counts as a whole, an installed one by its name."""
        yield module.__name__.encode()
        file = getattr(module, "__file__", None)
        if file is not None and not _is_installed(module.__name__) and not _is_ours(module):
            yield Path(file).read_bytes()

    def _code(self, code: CodeType) -> Iterator[bytes]:
        yield code.co_name.encode()
        yield code.co_code
        yield from self.pieces([code.co_names, code.co_varnames, code.co_freevars])
        for constant in code.co_consts:
            yield from self.pieces(constant)


def _array(value: Any) -> Iterator[bytes]:
    import numpy as np

    if hasattr(value, "detach"):  # a tensor; NumPy lacks some of its types
        import torch

        yield f"array {value.dtype} {tuple(value.shape)}".encode()
        flat = value.detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return
    array = np.ascontiguousarray(value)
    yield f"array {array.dtype.str} {array.shape}".encode()
    yield repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()


def _names(code: CodeType) -> set[str]:
    """Names in a function's code and in that of functions and classes within."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _text(thing: Any) -> str | None:
    """The source text of a function or class, if there is one."""
    if isinstance(thing, type):
        own = [inspect.unwrap(f) for f in vars(thing).values() if isinstance(f, FunctionType)]
        codes = [f.__code__ for f in own if isinstance(f, FunctionType)]
        file = getattr(sys.modules.get(thing.__module__), "__file__", None)
        if any(code.co_filename != file for code in codes):  # a notebook's: not in that file
            return None
    try:
        return textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError, IndexError, SyntaxError):
        return None


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None)}.{thing.__qualname__}"


def _is_ours(thing: Any) -> bool:
    module = getattr(thing, "__module__", None) or getattr(thing, "__name__", "")
    return str(module).partition(".")[0] == _OWN


@functools.cache
def _is_installed(module: str) -> bool:
    """Whether a module is Python's own or of an installed package, rather than the user's."""
    top = module.partition(".")[0]
    if top == "__main__":  # of a notebook, whatever started its kernel
        return False
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None:
        return False
    path, names = Path(file).resolve(), ("stdlib", "platstdlib", "purelib", "platlib")
    if any(path.is_relative_to(Path(sysconfig.get_path(name)).resolve()) for name in names):
        return True
    return "site-packages" in path.parts or "dist-packages" in path.parts
