"""Parse a selector from text, as options and prompts give it: the name of a rule, perhaps with settings.

question_attention
question_attention(layer_share=0.5, first_layer=0.25, mean_shift=0)
"""

from __future__ import annotations

import math
import re
from dataclasses import fields, is_dataclass
from typing import Any

from vllm_blend.blend.selectors.base import Selector
from vllm_blend.registry import Registry

MAX_CHARACTERS = 1024  # of a selector's text; a rule with all of its settings takes far less
_RULE = re.compile(r"\s*([\w.-]+)\s*(?:\(([^()]*)\))?\s*")


def parse_selector(text: str, selectors: Registry[type[Selector]]) -> Selector:
    """Return the selector that `text` describes. Raises ValueError that names the wrong part and the known ones."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"blend_selector={text[:40] + '...'!r} has {len(text)} characters: give a rule with its settings in at "
            f"most {MAX_CHARACTERS} characters"
        )
    found = _RULE.fullmatch(text)
    name: str = text.strip() if found is None else found[1]
    settings: str | None = None if found is None else found[2]
    rule = selectors.get(selectors.aliases.get(name, name))
    if rule is None and "+" in text:
        raise ValueError(
            f"blend_selector={text!r} adds to a rule, which is not possible any more: the mean shift is a setting, in "
            "parentheses, as in question_attention(mean_shift=0.5), and the other levers are gone"
        )
    if rule is None:
        raise ValueError(f"blend_selector={text!r} is unknown: {selectors.advice(name)}")
    if settings is None or not settings.strip():
        return rule()
    try:
        return rule(**_arguments(settings, rule))
    except (TypeError, ValueError) as error:
        raise ValueError(f"blend_selector={text!r}: {error}") from error


def _arguments(text: str, rule: type[Selector]) -> dict[str, Any]:
    """Parse `name=value, ...` into numbers and words."""
    defaults: dict[str, Any] = {field.name: field.default for field in fields(rule)} if is_dataclass(rule) else {}
    arguments: dict[str, Any] = {}
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or name not in defaults or name in arguments:
            raise ValueError(
                f"{pair.strip()!r} is not a setting of {rule.name!r}: write name=value, each name once, out of "
                f"{[*defaults]}"
            )
        arguments[name] = _value(name, value, defaults[name])
    return arguments


def _value(name: str, text: str, default: Any) -> int | float | str:
    """Parse a value of the same type as the setting's default. Raises ValueError for another type; the range is checked
    by the class."""
    value: int | float | str = text
    for kind in (int, float):
        try:
            value = kind(text)
            break
        except ValueError:
            continue
    number = isinstance(value, (int, float)) and math.isfinite(value) and abs(value) < 2**63
    if isinstance(default, int) and not isinstance(default, bool) and not (number and isinstance(value, int)):
        raise ValueError(f"{name}={text} must be a whole number, such as {default}")
    if isinstance(default, float) and not number:
        raise ValueError(f"{name}={text} must be a number, such as {default}")
    return value
