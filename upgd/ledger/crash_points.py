"""The places where a crash matters, by name.

Every durable write calls :func:`point` before and after each of its steps. It does nothing;
tests replace it by something that raises or ends the process, and see what is left on disk.
"""

from __future__ import annotations


def point(name: str) -> None:
    """Pass the place called `name`, such as ``"finish: before commit"``."""
