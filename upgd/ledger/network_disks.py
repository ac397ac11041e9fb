"""Whether a folder is on a disk that other machines share.

SQLite's write-ahead log keeps its index in shared memory. Processes of two machines do not
share memory, so on a network disk they would corrupt the ledger.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

NETWORK = frozenset(
    [
        *("nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "9p", "afpfs", "afs", "ncpfs"),
        *("webdav", "davfs", "ceph", "lustre", "beegfs", "gpfs", "glusterfs", "drvfs", "vboxsf"),
        *("fuse.sshfs", "fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.gcsfuse"),
        *("fuse.juicefs", "fuse.ceph", "osxfuse.sshfs", "macfuse"),
    ]
)


def network_filesystem(path: str | os.PathLike[str]) -> str | None:
    """The type of the network disk that holds `path` (which may not exist yet), if it is on one.

    Exact on Linux; by the list of mounts on macOS; by drive type on Windows. Where the system
    does not say, the disk counts as local.
    """
    real = os.path.realpath(path)
    if sys.platform == "win32":
        return _windows(real)
    try:
        if sys.platform == "linux":
            mounts = parse_mounts(Path("/proc/mounts").read_text(errors="surrogateescape"))
        else:
            mounts = _mount_command()
    except (OSError, subprocess.SubprocessError):
        return None
    kind = filesystem_of(real, mounts)
    return kind if kind in NETWORK else None


def filesystem_of(path: str, mounts: Iterable[tuple[str, str]]) -> str | None:
    """The type of the mount that holds `path`: the deepest one, of those the last.

    >>> filesystem_of("/home/ann/study", [("/", "ext4"), ("/home", "nfs4")])
    'nfs4'
    >>> filesystem_of("/homework", [("/", "ext4"), ("/home", "nfs4")])
    'ext4'
    """
    places = [PurePosixPath(path), *PurePosixPath(path).parents]
    kinds = {PurePosixPath(where): kind for where, kind in mounts}  # the last of several
    return next((kinds[place] for place in places if place in kinds), None)


def parse_mounts(text: str) -> list[tuple[str, str]]:
    r"""Mount points and types from ``/proc/mounts``, where a space is written ``\040``.

    >>> parse_mounts("server:/x /my\\040disk nfs4 rw 0 0")
    [('/my disk', 'nfs4')]
    """
    rows = [line.split() for line in text.splitlines()]
    octal = re.compile(r"\\([0-7]{3})")
    return [(octal.sub(lambda m: chr(int(m[1], 8)), r[1]), r[2]) for r in rows if len(r) >= 3]


def _mount_command() -> list[tuple[str, str]]:
    # "//ann@server/share on /Volumes/share (smbfs, nodev, nosuid)"
    done = subprocess.run(["mount"], capture_output=True, text=True, timeout=5, check=True)
    return re.findall(r"^.+? on (/.*?) \((\w[\w.]*)", done.stdout, re.MULTILINE)


def _windows(path: str) -> str | None:
    if path.startswith("\\\\") and not path.startswith("\\\\?\\"):
        return "smb"
    if sys.platform == "win32":
        import ctypes

        remote = 4  # DRIVE_REMOTE
        if ctypes.windll.kernel32.GetDriveTypeW(os.path.splitdrive(path)[0] + "\\") == remote:
            return "smb"
    return None
