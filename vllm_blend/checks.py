"""Checks of options and arguments. A check that an option declares takes the option's name and a value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vllm_blend.urls import redact_repr

_TYPE_HINTS: dict[type, dict[str, Any]] = {}
_PLURALS = {int: "whole numbers", float: "finite numbers", str: "strings"}  # of types of entries and keys


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def closest(name: object, known: Iterable[str], similarity: float = 0.6) -> str | None:
    """Return the known name that `name` may have been meant to be, None if it resembles none. Equal names have the
    similarity 1."""
    close = difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=similarity)
    return close[0] if close else None


def check_keys(option: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise ValueError, with the key that was probably meant, if an option that is a dict has an unknown key."""
    for name in given:
        if name not in known:
            meant = closest(name, known)
            hint = f"; did you mean {meant!r}?" if meant else ""
            raise ValueError(f"{option} has no option {name!r}: use {', '.join(known)}{hint}")


def a_type(value: Any) -> str:
    """Return the name of a value's type with its article, for messages: "an int", "a dict"."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def is_number(value: Any) -> bool:
    """Return whether a value is a real number, of Python or NumPy. True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer, of Python or NumPy. True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def type_hints(kind: type) -> dict[str, Any]:
    """Return the types of a class's attributes by name: evaluated once, since every engine asks for them."""
    if kind not in _TYPE_HINTS:
        _TYPE_HINTS[kind] = get_type_hints(kind)
    return _TYPE_HINTS[kind]


def check_field_types(options: Any, label: str = "") -> None:
    """Raise ValueError for the first field of the dataclass `options` whose value is not of its declared type.

    `label` stands before the field's name in the message. NumPy's numbers count as numbers, and an integer as a float;
    True and False count as neither, and infinite numbers and NaN are no option's value.
    """
    hints = type_hints(type(options))
    for field in fields(options):
        name, hint, value = field.name, hints[field.name], getattr(options, field.name)
        if not fits(value, hint):
            choices = [c for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal for c in get_args(kind)]
            if isinstance(value, str) and choices:
                meant = closest(value, map(str, choices))
                hint_at = f" (did you mean {meant!r}?)" if meant is not None else ""
                raise ValueError(f"{label}{name}={redact_repr(value)} is unknown: use {describe(hint)}{hint_at}")
            raise ValueError(f"{label}{name}={redact_repr(value)} must be {describe(hint)}, not {type(value).__name__}")


def fits(value: Any, hint: Any) -> bool:
    """Return whether `value` is of the type `hint`: a plain class, a union, a Literal, list[...], tuple[X, ...] or
    dict[...]."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, option) for option in arguments)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin is list:
        return isinstance(value, (list, tuple)) and all(fits(item, arguments[0]) for item in value)
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(item, arguments[0]) for item in value)
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
        *first, last = map(describe, arguments)
        return f"{', '.join(first)} or {last}"
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is list:
        return f"a list of {_PLURALS[arguments[0]]}"
    if origin is dict:
        return f"a dict with {_PLURALS[arguments[0]]} as keys"
    if origin is Callable:
        return "a function"
    names = {bool: "True or False", int: "a whole number", float: "a finite number", str: "a string", NoneType: "None"}
    module = "" if "." in hint.__module__ else f"{hint.__module__}."  # as users write it: torch.dtype, KVEventsConfig
    return names.get(hint) or f"a {module}{hint.__qualname__}"


def positive(name: str, value: Any) -> None:
    """Check that a number is above 0."""
    require(value > 0, f"{name}={value} must be positive")


def not_negative(name: str, value: Any) -> None:
    """Check that a number is at least 0."""
    require(value >= 0, f"{name}={value} must not be negative")


def at_least(least: int) -> Callable[[str, Any], None]:
    """Return a check that a whole number is at least `least`."""

    def check(name: str, value: Any) -> None:
        require(value >= least, f"{name}={value} must be a whole number of at least {least}")

    return check


def share_of(whole: str) -> Callable[[str, Any], None]:
    """Return a check that a number is in (0, 1]. `whole` says in the error what it is a share of."""

    def check(name: str, value: Any) -> None:
        require(0 < value <= 1, f"{name}={value} is a share of {whole}: use a number in (0, 1]")

    return check


def not_empty(fix: str) -> Callable[[str, Any], None]:
    """Return a check that text is not empty, with an error that says what to do instead."""

    def check(name: str, value: Any) -> None:
        require(value != "", f"{name} is empty: {fix}")

    return check


def check_ratio(name: str, value: Any) -> None:
    """Check that a recompute ratio is None or a number in 0..1."""
    if value is None:
        return
    is_share = is_number(value) and 0.0 <= value <= 1.0
    require(is_share, f"{name}={value!r} is a share of tokens: use a number from 0 to 1 (0.15 for 15%)")


def check_layer_numbers(name: str, layers: Sequence[int]) -> None:
    """Check that check layers ascend from 1 on."""
    require(len(layers) > 0, f"{name} is empty: name at least one layer, for example [1]")
    require(
        all(isinstance(i, int) and i >= 1 for i in layers) and list(layers) == sorted(set(layers)),
        f"{name}={list(layers)} must be ascending layer numbers from 1 on (K and V of layer 0 depend on the token "
        "alone, so there is nothing to compare there)",
    )


def check_shares(name: str, shares: Sequence[float], check_layers: Sequence[int]) -> None:
    """Check the shares of tokens kept after each check layer: one per layer, in 0..1, none above the one before."""
    for index, share in enumerate(shares):
        require(share is not None, f"{name}[{index}] is None: use a number in 0..1")
        check_ratio(f"{name}[{index}]", share)
    require(
        len(shares) == len(check_layers),
        f"{name} has {len(shares)} entries for {len(check_layers)} check layers: give one ratio per layer",
    )
    require(
        list(shares) == sorted(shares, reverse=True),
        f"{name}={list(shares)} rise: what one check layer drops cannot come back at the next; let them fall",
    )
