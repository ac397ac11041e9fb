"""Users' definitions: loaded by file or entry point, and sent to other processes."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import pickle
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from upgd.networks import NETWORKS
from upgd.optim.registry import METHODS
from upgd.streams import PROBLEMS

GROUP = "upgd.lab"  # the group of entry points that :func:`use` finds

Names = dict[tuple[str, str], str]  # the source of each definition, by its kind and name


class ExtensionError(ValueError):
    """Users' definitions cannot be loaded or carried; the message is one line."""


@dataclass
class _Loaded:
    """A file or entry point that was loaded."""

    content: str  # digest of a file's bytes; empty for an entry point
    defines: Names = field(default_factory=dict)  # what it registered


_LOADED: dict[str, _Loaded] = {}  # by resolved path, or by an entry point's name


def use(what: str | os.PathLike[str]) -> None:
    """Load a Python file, or an entry point of the group ``upgd.lab``, for what it registers.

    A file is loaded once, and again when it has changed. Its folder can be imported from.

    Raises:
        ExtensionError: It does not exist, raises an error, or registers nothing.
    """
    path = Path(what)
    if path.suffix == ".py" or path.exists():
        _use_file(path)
    else:
        _use_entry_point(str(what))


def _use_file(path: Path) -> None:
    checksum = hashlib.sha256(_content(path)).hexdigest()
    path = path.resolve()
    known = _LOADED.get(str(path))
    if known is not None:
        here = _users()
        if known.content == checksum and known.defines.items() <= here.items():
            return
        for kind, name in known.defines:  # what the file no longer defines must not stay
            _REGISTRIES[kind].pop(name, None)
    with _loading(str(path), checksum):
        _execute(path)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ExtensionError(f"cannot read {path}: {error.strerror or error}") from error


def load_module(path: Path) -> ModuleType:
    """A Python file as a module, for what it defines rather than registers.

    Raises:
        ExtensionError: It cannot be read, or raises an error.
    """
    _content(path)
    return _execute(path.resolve())


def _use_entry_point(name: str) -> None:
    found = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    if name not in found:
        known = f"; installed: {', '.join(sorted(found))}" if found else ""
        raise ExtensionError(
            f"{name!r} is neither a Python file nor an entry point of the group {GROUP}{known}"
        )
    if name in _LOADED:
        return
    with _loading(name, ""):
        try:
            loaded = found[name].load()
            if callable(loaded):  # a function that registers
                loaded()
        except Exception as error:
            line = (str(error).splitlines() or [""])[0]
            kind = type(error).__name__
            raise ExtensionError(f"entry point {name!r}: {kind}: {line}") from error


@contextlib.contextmanager
def _loading(name: str, content: str) -> Iterator[None]:
    """Record what is registered meanwhile."""
    before = _objects()
    yield
    after = _objects()
    sources = _users()
    defines = {key: sources[key] for key, value in after.items() if before.get(key) is not value}
    if not defines:
        raise ExtensionError(f"{name} registers no method, problem or network")
    _LOADED[name] = _Loaded(content, defines)


def _execute(path: Path) -> ModuleType:
    """Run a file as a module that others can find, so that its source and its pickles work."""
    digits = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    name = f"upgd_lab_{path.stem}_{digits}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ExtensionError(f"{path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ExtensionError(where(path, error)) from error
    return module


def where(path: Path, error: BaseException) -> str:
    """One line: the place in the file, and what went wrong."""
    line: int | None = None
    if isinstance(error, SyntaxError) and error.filename == str(path):
        line, text = error.lineno, error.msg
    else:
        text = (str(error).splitlines() or [""])[0]
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f.lineno for f in reversed(frames) if f.filename == str(path)), None)
    place = f"{path}:{line}" if line else str(path)
    return f"{place}: {type(error).__name__}: {text}"


# ---------------------------------------------------------------------------- registries
_REGISTRIES: dict[str, Any] = {"method": METHODS, "problem": PROBLEMS, "network": NETWORKS}


def _objects() -> dict[tuple[str, str], Any]:
    """All definitions of the user: those with a source."""
    return {
        (kind, name): value
        for kind, registry in _REGISTRIES.items()
        for name, value in registry.items()
        if value.source
    }


def _users() -> Names:
    return {key: value.source for key, value in _objects().items()}


# ------------------------------------------------------------------------ other processes
@dataclass(frozen=True)
class Carried:
    """What another process needs in order to know the same definitions; can be pickled."""

    used: tuple[str, ...] = ()  # files and entry points, in the order in which they were loaded
    sources: tuple[tuple[tuple[str, str], str], ...] = ()  # the source of every definition
    pickled: bytes = b""  # definitions that are in no file

    def load(self) -> None:
        """Register the same here; ExtensionError if a file has changed or cannot be loaded."""
        for what in self.used:
            use(what)
        for kind, value in pickle.loads(self.pickled) if self.pickled else ():
            _REGISTRIES[kind][value.name] = value
        here = _users()
        for key, source in self.sources:
            if here.get(key) != source:
                raise ExtensionError(
                    f"{' '.join(key)} differs from when the work started: "
                    f"{' or '.join(self.used) or 'its code'} has changed; start again"
                )


def carried() -> Carried:
    """The registered definitions, for another process; ExtensionError if one cannot be sent."""
    objects, sources = _objects(), _users()
    filed = {k: s for loaded in _LOADED.values() for k, s in loaded.defines.items()}
    loose = [(key, value) for key, value in objects.items() if filed.get(key) != sources[key]]
    return Carried(tuple(_LOADED), tuple(sources.items()), _pickled(loose) if loose else b"")


def _pickled(loose: list[tuple[tuple[str, str], Any]]) -> bytes:
    names = ", ".join(" ".join(key) for key, _ in loose)
    advice = "put the definitions into a file and name it with use()"
    try:
        import cloudpickle
    except ImportError:
        raise ExtensionError(
            f"{names}: defined in no file, and cloudpickle is not installed; {advice}"
        ) from None
    try:
        found: bytes = cloudpickle.dumps([(key[0], value) for key, value in loose])
    except Exception as error:
        line = (str(error).splitlines() or [""])[0]
        raise ExtensionError(f"{names}: cannot go to other processes ({line}); {advice}") from error
    return found
