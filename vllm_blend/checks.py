"""How options are checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vllm_blend.urls import redact_repr


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


def check_field_types(options: Any, label: str = "") -> None:
    """Raise ValueError for the first field of the dataclass `options` whose value is not of its declared type.

    `label` stands before the field's name in the message. NumPy's numbers count as numbers, and an integer as a float;
    True and False count as neither, and infinite numbers and NaN are no option's value.
    """
    for name, hint in get_type_hints(type(options)).items():
        value = getattr(options, name)
        if not fits(value, hint):
            if isinstance(value, str) and any(get_origin(option) is Literal for option in (hint, *get_args(hint))):
                raise ValueError(f"{label}{name}={redact_repr(value)} is unknown: use {describe(hint)}")
            raise ValueError(f"{label}{name}={redact_repr(value)} must be {describe(hint)}, not {type(value).__name__}")


def fits(value: Any, hint: Any) -> bool:
    """Return whether `value` is of the type `hint`, a plain class, a union, a Literal, list[...] or dict[...]."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, option) for option in arguments)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin is list:
        return isinstance(value, (list, tuple)) and all(fits(item, arguments[0]) for item in value)
    if origin is dict:
        of_key, of_value = arguments
        return isinstance(value, Mapping) and all(fits(k, of_key) and fits(v, of_value) for k, v in value.items())
    if origin is Callable:
        return callable(value)
    if hint is float:
        return is_number(value) and math.isfinite(value)
    if hint is int:
        return is_whole(value)
    return hint is Any or isinstance(value, hint)


def describe(hint: Any) -> str:
    """Return what to write for an option of the type `hint`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(describe, arguments))
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is list:
        return f"a list of which each entry is {describe(arguments[0])}"
    if origin is dict:
        return f"a dict of which each key is {describe(arguments[0])}"
    if origin is Callable:
        return "a function"
    names = {bool: "True or False", int: "a whole number", float: "a finite number", str: "a string", NoneType: "None"}
    return names.get(hint) or f"a {hint.__module__}.{hint.__qualname__}"
