"""Results that are functions of the package's code and of files: computed once, then kept.

They are JSON in the user's cache folder, under a name that changes with the code and the files.
Imports nothing that takes long: what is kept appears at once.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from upgd.caches import cache_folder

T = TypeVar("T")


def keep(
    name: str,
    files: Iterable[Path],
    compute: Callable[[], T],
    unpack: Callable[[Any], T],
) -> T:
    """What `compute` returns, or what it returned for the same code and files.

    Args:
        name: The cache's folder.
        files: Whose contents the result depends on, besides the code.
        compute: Makes the result, of what JSON can hold; tuples become lists.
        unpack: Makes it of these again; raises ValueError or TypeError if it cannot.
    """
    folder = cache_folder(name)
    file = None if folder is None else folder / f"{_digest(files)}.json"
    if file is not None:
        with suppress(OSError, ValueError, TypeError):
            return unpack(json.loads(file.read_text(encoding="utf-8")))
    found = compute()
    if file is not None:
        from upgd.ledger.files import write_atomically

        with suppress(OSError):
            write_atomically(file, json.dumps(found).encode())
    return found


def _digest(files: Iterable[Path]) -> str:
    """20 digits that change with the code, and with names and contents of files."""
    hashed = hashlib.sha256(_code())
    for path in files:
        hashed.update(f"\n{path.parent.name}/{path.name}\n".encode())
        hashed.update(hashlib.sha256(path.read_bytes()).digest())
    return hashed.hexdigest()[:20]


@cache
def _code() -> bytes:
    """A digest of the package's code, and of what executes it."""
    root = Path(__file__).parent
    versions = (version("torch"), version("numpy"), platform.machine())
    hashed = hashlib.sha256("\n".join(versions).encode())
    for path in sorted((*root.rglob("*.py"), *root.rglob("*.json"))):
        hashed.update(f"\n{path.relative_to(root).as_posix()}\n".encode())
        hashed.update(hashlib.sha256(path.read_bytes()).digest())
    return hashed.digest()
