"""Files and pipes as numbered lines of bytes."""

from __future__ import annotations

import os
import queue
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, BinaryIO, NamedTuple, Protocol

LONGEST = 1 << 20
"""Bytes of a line; longer ones are not kept in memory."""
BLOCK = 1 << 16
_SHOWN = 200  # bytes of an overlong line that are kept
_PRINTED = 4096  # bytes at the beginning, and before a position, that identify a file


class Line(NamedTuple):
    """One line of a source."""

    number: int  # from 1 on
    raw: bytes  # without its end
    end: int  # bytes of the source up to the next line
    fault: str = ""  # why it cannot be read
    is_terminated: bool = True  # False for a last line without a newline


class Source(Protocol):
    """Bytes that come from somewhere."""

    name: str

    def read(self, wait: float) -> bytes | None:
        """Some bytes; none at all at the end, None if none came within `wait` seconds."""

    def close(self) -> None:
        """Release what it holds."""


class FileSource:
    """A regular file, which can be continued at a position.

    Args:
        given: Its path as the user gave it; empty for an open file without a name.
        file: Open for reading bytes, at its beginning; a path is opened when it is needed.
    """

    def __init__(self, given: str = "", file: BinaryIO | None = None) -> None:
        self._opened = file
        self.name, self.given = given or "standard input", given
        self.path = os.path.abspath(given) if given else ""
        found = os.stat(given) if file is None else os.fstat(file.fileno())
        self.device, self.inode = found.st_dev, found.st_ino

    @property
    def _file(self) -> BinaryIO:
        if self._opened is None:
            self._opened = open(self.given, "rb")  # noqa: SIM115
        return self._opened

    def read(self, wait: float) -> bytes:
        """The next bytes."""
        return self._file.read(BLOCK)

    def seek(self, offset: int) -> None:
        """Go on at a position."""
        self._file.seek(offset)

    def close(self) -> None:
        """Close the file; a named one is opened again, at its beginning, when it is needed."""
        if self._opened is not None and self.given:
            self._opened.close()
            self._opened = None

    # ---------------------------------------------------------------------- identity
    def fingerprint(self, offset: int) -> str:
        """A hash of the beginning and of what precedes a position; empty if it is beyond the end.

        The file may grow behind the position.
        """
        file, here = self._file, self._file.tell()
        try:
            file.seek(0)
            head = file.read(min(_PRINTED, offset))
            file.seek(max(0, offset - _PRINTED))
            tail = file.read(min(_PRINTED, offset))
        finally:
            file.seek(here)
        if len(tail) < min(_PRINTED, offset):
            return ""
        return blake2b(head + tail, digest_size=16).hexdigest()

    def ends_line(self, offset: int) -> bool:
        """Whether a line begins at a position."""
        here = self._file.tell()
        self._file.seek(offset - 1 if offset else 0)
        found = offset == 0 or self._file.read(1) == b"\n"
        self._file.seek(here)
        return found

    def position(self, offset: int, line: int) -> dict[str, Any]:
        """What JSON can keep of a position in this file."""
        return {
            "given": self.given, "path": self.path, "device": self.device, "inode": self.inode,
            "offset": offset, "line": line, "fingerprint": self.fingerprint(offset),
        }  # fmt: skip

    def is_named(self, saved: Mapping[str, Any]) -> bool:
        """Whether a saved position is of a file with this path."""
        return bool(self.given) and (
            saved["path"] == self.path or (saved["given"] == self.given and not _exists(saved))
        )

    def is_same(self, saved: Mapping[str, Any]) -> bool:
        """Whether a saved position is of this very file, whatever it is called now."""
        return bool(saved["device"] == self.device and saved["inode"] == self.inode)

    def agrees(self, saved: Mapping[str, Any]) -> bool:
        """Whether the file has, up to a saved position, what it had then."""
        return bool(saved["fingerprint"] == self.fingerprint(saved["offset"]) != "")


def _exists(saved: Mapping[str, Any]) -> bool:
    return os.path.exists(saved["path"])


class PipeSource:
    """A pipe, a terminal or a device, read by a thread, so that waiting has an end.

    Args:
        name: For messages.
        read: A function of a number of bytes that waits until there are some.
    """

    def __init__(self, name: str, read: Callable[[int], bytes]) -> None:
        self.name = name
        self._read = read
        self._blocks: queue.Queue[bytes | OSError] = queue.Queue(maxsize=4)
        self._has_begun = self._has_ended = False

    def _work(self) -> None:
        while True:
            try:
                block: bytes | OSError = self._read(BLOCK)
            except (OSError, ValueError) as error:  # ValueError: closed
                block = error if isinstance(error, OSError) else b""
            self._blocks.put(block)
            if not block or isinstance(block, OSError):
                return

    def read(self, wait: float) -> bytes | None:
        """Some bytes; none at all at the end, None if none came within `wait` seconds."""
        if self._has_ended:
            return b""
        if not self._has_begun:
            self._has_begun = True
            threading.Thread(target=self._work, daemon=True).start()
        try:
            block = self._blocks.get(wait > 0, wait if wait > 0 else None)
        except queue.Empty:
            return None
        if isinstance(block, OSError):
            raise block
        self._has_ended = not block
        return block

    def close(self) -> None:
        """Nothing: the thread ends with its pipe, or with the process."""


def open_source(given: str) -> FileSource | PipeSource:
    """A source for a path, or for standard input (``-``).

    Raises:
        OSError: The file cannot be read.
        ValueError: Standard input is closed.
    """
    if given == "-":
        return _standard_input()
    if stat.S_ISREG(os.stat(given).st_mode):
        return FileSource(given)
    if os.path.isdir(given):
        raise IsADirectoryError(21, "it is a folder; name the files in it", given)
    return PipeSource(given, _Lazily(given))


class _Lazily:
    """Opens a named pipe when it is read: that may wait, and must not block signals."""

    def __init__(self, path: str) -> None:
        self._path, self._descriptor = path, -1

    def __call__(self, count: int) -> bytes:
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, os.O_RDONLY)
        return os.read(self._descriptor, count)


def _standard_input() -> FileSource | PipeSource:
    if sys.stdin is None:
        raise ValueError("standard input is closed; name a file, or pipe lines into the command")
    try:
        descriptor = sys.stdin.fileno()
    except (OSError, ValueError):  # not a file of the system
        return PipeSource("standard input", sys.stdin.buffer.read)
    is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    if is_file and os.lseek(descriptor, 0, os.SEEK_CUR) == 0:  # stream.csv, not a part of it
        return FileSource(file=os.fdopen(os.dup(descriptor), "rb"))
    return PipeSource("standard input", lambda count: os.read(descriptor, count))


class Lines:
    """The lines of a source, as they come.

    Lines end with a newline; a carriage return before it is dropped. The last line needs none.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.ready: deque[Line] = deque()
        self.has_ended = False
        self._start(0, 1)

    def _start(self, offset: int, number: int) -> None:
        self._offset, self._number = offset, number
        self._rest, self._dropped = b"", 0
        self.ready.clear()

    def jump(self, offset: int, number: int) -> None:
        """Go on at a position of a file, which has this line number.

        Where the position is within a line, as the file has grown since, the rest of that line
        comes as one with a fault.
        """
        source = self.source
        assert isinstance(source, FileSource)
        within = not source.ends_line(offset)
        source.seek(offset)
        self.has_ended = False
        self._start(offset, number)
        if within:
            self._number -= 1
            while not self.ready and not self.has_ended:
                self.fill(0)
            if self.ready:
                first = self.ready.popleft()
                if first.raw:
                    fault = "the rest of a line that was read before it was complete"
                    self.ready.appendleft(first._replace(fault=fault))

    def fill(self, wait: float) -> bool:
        """Read once; False if nothing came within `wait` seconds."""
        data = self.source.read(wait)
        if data is None:
            return False
        if not data:
            self.has_ended = True
            if self._rest or self._dropped:
                self._add(self._rest, False)
                self._rest = b""
            return True
        pieces = data.split(b"\n")
        if self._dropped:  # within an overlong line
            self._dropped += len(pieces[0])
            pieces[0] = b""
        pieces[0] = self._rest + pieces[0]
        self._rest = pieces.pop()
        for piece in pieces:
            self._add(piece, True)
        if len(self._rest) > LONGEST:
            self._dropped = len(self._rest) - _SHOWN
            self._rest = self._rest[:_SHOWN]
        return True

    def _add(self, raw: bytes, is_terminated: bool) -> None:
        length, fault = len(raw) + self._dropped, ""
        self._offset += length + is_terminated
        if length > LONGEST:
            raw, fault = raw[:_SHOWN], f"the line has {length} bytes; at most {LONGEST} are read"
        elif raw.endswith(b"\r"):
            raw = raw[:-1]
        self.ready.append(Line(self._number, raw, self._offset, fault, is_terminated))
        self._number += 1
        self._dropped = 0
