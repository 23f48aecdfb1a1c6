"""A dataclass of plain options as command-line flags: `--max-model-len` for `max_model_len`, as vLLM writes them."""

from __future__ import annotations

import argparse
import json
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def add_flags(parser: argparse.ArgumentParser, cls: type, help_texts: dict[str, str]) -> None:
    """A flag for every field of `cls`: `--x` and `--no-x` for booleans, several values for lists.

    A flag that is not given leaves the namespace without that name, so that the field's default holds.
    """
    hints = get_type_hints(cls)
    for field in fields(cls):
        text = help_texts.get(field.name, "")
        has_default = field.default is not MISSING
        if has_default:
            text = f"{text} (default: {field.default})".strip()
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(
            flag,
            dest=field.name,
            required=not has_default,
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            **_parsing(hints[field.name]),
        )


def given(namespace: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The fields of `cls` that were given as flags; what else a parser knows is left out."""
    return {field.name: getattr(namespace, field.name) for field in fields(cls) if hasattr(namespace, field.name)}


def _parsing(hint: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a type: bool, int, float, str, Literal, list of those, dict (JSON),
    any of them or None, or str or another class."""
    if get_origin(hint) in (Union, UnionType):
        options = [option for option in get_args(hint) if option is not NoneType]
        hint = str if str in options else options[0]
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is list:
        return {"type": get_args(hint)[0], "nargs": "+", "metavar": "N"}
    if get_origin(hint) is dict:
        return {"type": _json_object, "metavar": "JSON"}
    return {"type": hint, "metavar": "X"}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON ({error}): quote it for the shell") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object: write {{...}}")
    return value
