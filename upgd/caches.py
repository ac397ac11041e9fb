"""Folders for caches: the user's own, or where that cannot be written a temporary one.

Caches hold code that is run, so a folder counts only where nobody else can write.
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
    """The user's home; the root for a user who has none, as in containers."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.sep)


def cache_folder(name: str) -> Path | None:
    """A folder of this name in which files can be kept, or None where there is none.

    The first that works of ``$UPGD_CACHE``, ``$XDG_CACHE_HOME/upgd`` or ``~/.cache/upgd``, and
    ``upgd-UID`` among the temporary files.

    Args:
        name: Of the cache, such as ``"kernels"``.
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
    """Whether files can be written to a folder that exists: by writing one."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def use_cache(variable: str, name: str, *usual: Path) -> None:
    """Point another library to a folder of ours where its usual ones cannot be written.

    Args:
        variable: Of the environment, which tells the library; if it is set it stays.
        name: Of our folder.
        usual: Folders that the library would write to.
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
    """See to it that Triton can keep what it compiles; otherwise it raises."""
    base = os.environ.get("TRITON_HOME")
    usual = (Path(base) if base else home()) / ".triton" / "cache"
    use_cache("TRITON_CACHE_DIR", "triton", usual)


def use_matplotlib_cache() -> None:
    """See to it that matplotlib can keep its list of fonts; otherwise it warns at length."""
    if "matplotlib" in sys.modules:  # too late
        return
    if sys.platform.startswith(("linux", "freebsd")):
        bases = {"XDG_CONFIG_HOME": ".config", "XDG_CACHE_HOME": ".cache"}
        usual = [Path(os.environ.get(v) or home() / p) / "matplotlib" for v, p in bases.items()]
    else:
        usual = [home() / ".matplotlib"]
    use_cache("MPLCONFIGDIR", "matplotlib", *usual)


def _bases() -> Iterator[tuple[Path, bool]]:
    """Folders to try, and whether they must be private to be used."""
    chosen, base = os.environ.get("UPGD_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if chosen:
        yield Path(chosen), False
    yield (Path(base) if base else home() / ".cache") / "upgd", False
    try:
        user = os.geteuid() if hasattr(os, "geteuid") else "user"
        yield Path(tempfile.gettempdir()) / f"upgd-{user}", True
    except OSError:  # there is no place for temporary files either
        pass


def _make_private(folder: Path) -> bool:
    """Make a folder among everybody's files; whether it is there, and nobody else can enter."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if os.name == "nt":  # temporary files are the user's own there
        return True
    mine, around = folder.lstat(), folder.parent.stat()
    # Without the sticky bit anybody who can write there could put another folder in its place.
    kept = around.st_mode & stat.S_ISVTX or not around.st_mode & 0o022
    private = stat.S_ISDIR(mine.st_mode) and not mine.st_mode & 0o077
    return bool(kept and private and mine.st_uid == os.geteuid())


def _is_ours(folder: Path) -> bool:
    """Whether a folder is the user's, and no stranger can write to it."""
    if os.name == "nt":
        return True
    found = folder.stat()
    strangers = 0o002 if found.st_gid == os.getegid() else 0o022
    return found.st_uid == os.geteuid() and not found.st_mode & strangers
