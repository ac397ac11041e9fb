"""Checksums of a ledger's rows, so that a damaged disk is noticed and never read as a result.

A run's row has one, which covers all that is printed of it; a result's row has one, which also
covers the list of its series and their checksums. Each covers the run's key: a row that is found
in another's place is noticed too. BLAKE2b finds any damage but one in 2⁶⁴; a CRC of 32 bits would
pass one in 2³², and lets differences cancel out. It is no protection from people: who can write a
ledger can write checksums.
"""

from __future__ import annotations

from hashlib import blake2b

BYTES = 8
Field = str | bytes | int | float | None  # what SQLite keeps in a cell


def checksum(kind: str, *fields: Field) -> str:
    """The checksum of a row's cells, in order, as 16 hexadecimal digits.

    It is that of the cells as Python writes them in ASCII: types and ends of texts can be told, so
    that no two rows are written the same way, and floats are exact. Bytes in the last cell follow
    as they are.

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
