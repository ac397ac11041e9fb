"""Single values of a stream: what counts as a number, a name, a class or a missing value."""

from __future__ import annotations

import math
import numbers
import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import numpy as np

Name = str | int
Label = str | int | float | bool

LARGEST = 1e100
"""Magnitudes above are refused: their squares, and sums of these, must be finite."""
LARGEST_RAW = 1e18
"""The same of inputs that are not scaled, for float32."""
LARGEST_WEIGHT = 1e3
"""Weights above are refused: a sample's weight multiplies its step."""
WHICH_WEIGHTS = (
    f"weights are between 0 and {LARGEST_WEIGHT:g}. Divide them by their mean if they are larger"
)
_MOST_BITS = 1024  # of integers as names and classes: JSON writes them in decimal


def as_number(value: Any) -> float:
    """A number as a float; NaN where it is missing (None, NaN, pandas' NA and NaT).

    Raises:
        TypeError: It is no number; the message continues "the target ...".
        ValueError: It is infinite, or larger than :data:`LARGEST`.
    """
    value = _scalar(value)
    if is_missing(value):
        return math.nan
    if not isinstance(value, numbers.Real | np.bool_ | Decimal) or isinstance(
        value, np.timedelta64
    ):
        raise TypeError(f"is of type {type(value).__name__}, not a number")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    except Exception as error:  # whatever a class's own conversion raises
        raise TypeError(f"is of type {type(value).__name__} and has no value as a float") from error
    if abs(found) > LARGEST:
        size = "infinite" if math.isinf(found) else f"{found:.3g}"
        raise ValueError(f"is {size}; magnitudes up to {LARGEST:g} can be learned")
    return found


def is_missing(value: Any) -> bool:
    """Whether it is None or one of pandas' marks for missing values."""
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def as_name(name: Any) -> Name:
    """A feature's name: a string, or an integer, whatever number has its value.

    Raises:
        TypeError: It is something else.
        ValueError: It is an integer with hundreds of digits.
    """
    if isinstance(name, str):
        return str.__str__(name)
    if isinstance(name, numbers.Integral | np.bool_) and not isinstance(name, np.timedelta64):
        return _integer(int(name), "the name of a feature")
    if isinstance(name, float) and name.is_integer():
        return _integer(int(name), "the name of a feature")
    raise TypeError(f"feature names are strings or integers, got {short(name)}")


def as_label(value: Any) -> Label:
    """A class: a string, a boolean, an integer, or a float that is whole.

    Raises:
        TypeError: It is something else.
        ValueError: It is missing, not whole, or an integer with hundreds of digits.
    """
    value = _scalar(value)
    if isinstance(value, np.generic):
        if isinstance(value, np.timedelta64 | np.datetime64):
            raise TypeError(
                f"classes are strings or integers, got one of type {type(value).__name__}"
            )
        value = value.item()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _integer(int(value), "the class of a sample")
    if is_missing(value) or (isinstance(value, float) and math.isnan(value)):
        raise ValueError(f"the class of a sample is missing: {value}")
    if isinstance(value, float):
        if value.is_integer():
            return float(value)
        raise ValueError(
            f"Unknown label type: the class of a sample is {value}; classes are strings or whole "
            "numbers. Use a Regressor to predict numbers"
        )
    raise TypeError(f"classes are strings or integers, got one of type {type(value).__name__}")


def as_weight(value: Any) -> float:
    """By what a sample's loss is multiplied.

    Raises:
        TypeError: It is no number.
        ValueError: It is missing, negative, or larger than :data:`LARGEST_WEIGHT`.
    """
    try:
        found = as_number(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"the weight of a sample {error}") from None
    if not 0 <= found <= LARGEST_WEIGHT:
        raise ValueError(f"the weight of a sample is {found:g}; {WHICH_WEIGHTS}")
    return found


@contextmanager
def usable(what: str) -> Iterator[None]:
    """Whatever a conversion raises becomes a TypeError or a ValueError that says what it is of."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if re.search(rf"\b{what}\b", str(error)):
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{what} cannot be used: {error}") from error
    except Exception as error:
        message = f"{what} cannot be used: {type(error).__name__}, {error}"
        raise TypeError(message) from error


def short(value: Any) -> str:
    """A value for a message, however long it is."""
    return reprlib.repr(value)


def _scalar(value: Any) -> Any:
    """The value of an array or tensor without dimensions."""
    if isinstance(value, np.generic) or getattr(value, "ndim", None) != 0:
        return value
    try:
        return value.item()
    except Exception:  # no array after all
        return value


def _integer(value: int, what: str) -> int:
    if value.bit_length() > _MOST_BITS:
        raise ValueError(f"{what} is an integer of {value.bit_length()} bits; use a string")
    return value
