"""How options are checked."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def is_number(value: Any) -> bool:
    """Whether a value is a real number, of Python or NumPy. True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Whether a value is an integer, of Python or NumPy. True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)
