"""The parser of the commands, and options as its flags: `--max-model-len` for `max_model_len`, as vLLM writes them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from vllm_blend.options import Option, OptionGroup

BAD_INPUT = 2  # argparse's exit status, too
_UNITS = {unit: 1000 ** (power + 1) for power, unit in enumerate("kmgt")}
_UNITS |= {unit: 1024 ** (power + 1) for power, unit in enumerate("KMGT")}
_METAVARS = {int: "N", float: "X"}  # what the help shows for a value of a type; TEXT for any other


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line: the flag, what was given, and what is expected. Its exit status for them
    is 2."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register("type", int, _whole_number)
        self.register("type", float, _number)

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message.removeprefix('argument ')}; see {self.prog} --help\n")


def add_flags(
    parser: argparse.ArgumentParser,
    groups: Iterable[type[OptionGroup]],
    positional: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    short_names: Mapping[str, str] | None = None,
) -> None:
    """Add a flag for every option, under the heading of its group: `--x` and `--no-x` for booleans, several values for
    lists. The option `positional` may be given without its flag, too, and is not required. `defaults` are those of the
    program where they differ from the options' own; the help shows them, and the program has to apply them.
    `short_names` are further flags, by the options' names.

    A flag that is not given leaves the namespace without that name, so that the option's default holds.
    """
    groups, defaults, short_names = list(groups), defaults or {}, short_names or {}
    if positional is not None:
        [shown] = [option.help for group in groups for option in group.options() if option.name == positional]
        parser.add_argument(positional, nargs="?", default=argparse.SUPPRESS, metavar=positional.upper(), help=shown)
    for group in groups:
        section = parser.add_argument_group(group.title)
        for option in group.options():
            text = _describe(option, defaults.get(option.name, option.default))
            section.add_argument(
                *([short_names[option.name]] if option.name in short_names else []),
                "--" + option.name.replace("_", "-"),
                dest=option.name,
                required=option.is_required and option.name != positional,
                default=argparse.SUPPRESS,
                help=text.replace("%", "%%"),
                **_parsing(option),
            )


def given(namespace: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return the values of those flags that were given; what else a parser knows is left out."""
    return {name: getattr(namespace, name) for name in names if hasattr(namespace, name)}


def _describe(option: Option, default: Any) -> str:
    """Return the help of an option with its default. None and "" are not shown: they say that nothing was given."""
    return option.help if option.is_required or default in (None, "") else f"{option.help} (default: {default})"


def _parsing(option: Option) -> dict[str, Any]:
    """Return the arguments of `add_argument` for an option's type: bool, int, float, str, Literal, list of those, dict
    (JSON), any of them or None, or str or another class."""
    hint = option.type
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        hint = str if str in kinds else kinds[0]
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is list:
        kind = get_args(hint)[0]
        return {"type": kind, "nargs": "+", "metavar": _METAVARS.get(kind, "TEXT")}
    if get_origin(hint) is dict:
        return {"type": _json_object, "metavar": "JSON"}
    return {"type": hint, "metavar": _METAVARS.get(hint, "TEXT")}


def _whole_number(text: str) -> int:
    """Return a whole number, which may be written as vLLM has it: 64k is 64,000, and 64K is 65,536."""
    number, unit = text[:-1], text[-1:]
    try:
        if unit and unit in _UNITS:
            value = Decimal(number) * _UNITS[unit]
            if value != int(value):
                raise ValueError("it is not a whole number")
            return int(value)
        return int(text)
    except (ValueError, ArithmeticError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error}): quote it for the shell") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object: write {{...}}")
    return value
