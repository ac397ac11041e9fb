"""Checksums of a ledger's rows, so that damage is noticed and never read as a result.

A run's row has one; a result's row has one, which also covers the checksums of its series. Each
covers the run's key, so that a row in another's place is noticed too. BLAKE2b with 64 bits misses
one damage in 2⁶⁴. It is no protection from people: who can write a ledger can write checksums.
"""

from __future__ import annotations

from hashlib import blake2b

BYTES = 8
Field = str | bytes | int | float | None  # what SQLite keeps in a cell


def checksum(kind: str, *fields: Field) -> str:
    """The checksum of a row's cells, in order, as 16 hexadecimal digits.

    It is that of the cells as Python writes them in ASCII, which distinguishes all rows; bytes in
    the last cell follow as they are.

    >>> checksum("run", "ab", "c") == checksum("run", "a", "bc")
    False
    >>> checksum("run", 1) == checksum("run", 1.0)
    False
    """
    end = fields[-1] if fields else None
    if isinstance(end, bytes):
        head = ascii((kind, fields[:-1], len(end)))
        return blake2b(head.encode() + end, digest_size=BYTES).hexdigest()
    return blake2b(ascii((kind, fields)).encode(), digest_size=BYTES).hexdigest()
