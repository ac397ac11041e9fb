"""Cache folders: the user's own, or a temporary one where that is not writable.

Caches hold code that is executed, so a folder that others can write to is not used.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def home() -> Path:
    """The user's home folder; the root folder for a user without one, as in containers."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.sep)


def cache_folder(name: str) -> Path | None:
    """A writable folder for the cache `name`, or None if there is none.

    Tries ``$UPGD_CACHE``, ``$XDG_CACHE_HOME/upgd`` or ``~/.cache/upgd``, then ``upgd-UID`` in the
    folder for temporary files.
    """
    for base, private in _bases():
        folder = base / name
        try:
            if private and not _make_private(base):
                continue
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if _is_ours(folder) and is_writable(folder):
                return folder
        except OSError:
            continue
    return None


def is_writable(folder: Path) -> bool:
    """Whether files can be written to an existing folder; tries it."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def use_cache(variable: str, name: str, *usual: Path) -> None:
    """Point another library to our cache folder `name` if its `usual` ones are not writable.

    `variable` is the library's environment variable; it is kept if it is set.
    """
    if os.environ.get(variable):
        return
    try:
        for folder in usual:
            folder.mkdir(parents=True, exist_ok=True)
        if all(map(is_writable, usual)):
            return
    except OSError:
        pass
    ours = cache_folder(name)
    if ours is not None:
        os.environ[variable] = str(ours)


def use_triton_cache() -> None:
    """Give Triton a writable cache; without one it raises."""
    base = os.environ.get("TRITON_HOME")
    usual = (Path(base) if base else home()) / ".triton" / "cache"
    use_cache("TRITON_CACHE_DIR", "triton", usual)


def use_matplotlib_cache() -> None:
    """Give matplotlib a writable cache; without one it warns at length."""
    if "matplotlib" in sys.modules:  # already configured
        return
    if sys.platform.startswith(("linux", "freebsd")):
        bases = {"XDG_CONFIG_HOME": ".config", "XDG_CACHE_HOME": ".cache"}
        usual = [Path(os.environ.get(v) or home() / p) / "matplotlib" for v, p in bases.items()]
    else:
        usual = [home() / ".matplotlib"]
    use_cache("MPLCONFIGDIR", "matplotlib", *usual)


def _bases() -> Iterator[tuple[Path, bool]]:
    """Folders to try, and whether each must be private."""
    chosen, base = os.environ.get("UPGD_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if chosen:
        yield Path(chosen), False
    yield (Path(base) if base else home() / ".cache") / "upgd", False
    try:
        user = os.geteuid() if hasattr(os, "geteuid") else "user"
        yield Path(tempfile.gettempdir()) / f"upgd-{user}", True
    except OSError:  # there is no folder for temporary files
        pass


def _make_private(folder: Path) -> bool:
    """Create a folder in a shared one; whether it is private to this user."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if os.name == "nt":  # the temporary folder is the user's own
        return True
    mine, around = folder.lstat(), folder.parent.stat()
    # Without the sticky bit other users could replace the folder.
    kept = around.st_mode & stat.S_ISVTX or not around.st_mode & 0o022
    private = stat.S_ISDIR(mine.st_mode) and not mine.st_mode & 0o077
    return bool(kept and private and mine.st_uid == os.geteuid())


def _is_ours(folder: Path) -> bool:
    """Whether a folder belongs to this user and others cannot write to it."""
    if os.name == "nt":
        return True
    found = folder.stat()
    strangers = 0o002 if found.st_gid == os.getegid() else 0o022
    return found.st_uid == os.geteuid() and not found.st_mode & strangers
