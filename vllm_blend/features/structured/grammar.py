"""From the form that a request asks for to a grammar as llguidance takes it."""

from __future__ import annotations

import json
from typing import Any

from vllm_blend.checks import require
from vllm_blend.features.structured.config import StructuredOutputsConfig
from vllm_blend.features.structured.library import llguidance
from vllm_blend.structured_outputs import StructuredOutputsParams, parse_json

# Keywords of JSON schemas whose values are schemas, dicts of schemas, and lists of schemas.
_ONE = ("additionalItems", "items", "not", "if", "then", "else", "contains")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OBJECT = {"type": "object"}
MAX_TAGS = 1024  # structures, and triggers, of a structural tag
# Between the parts of JSON. Its length is bounded because small models begin to write spaces and never end.
WHITESPACE = r"[ \t\n\r]{1,32}"


def grammar_text(params: StructuredOutputsParams, config: StructuredOutputsConfig) -> str:
    """Return the grammar of a form: JSON text or Lark, or what stands in the field `grammar`, which may be GBNF. Raises
    ValueError naming the field where it is no form at all, and without the library."""
    matcher = llguidance().LLMatcher
    if params.regex is not None:
        return str(matcher.grammar_from_regex(params.regex))
    if params.choice is not None:
        return _choice(params.choice)
    if params.grammar is not None:
        return params.grammar  # converting GBNF may take long, so it is done where that does no harm
    if params.structural_tag is not None:
        return _structural_tag(parse_json("structural_tag", params.structural_tag))
    schema = parse_json("json", params.json) if params.json is not None else _OBJECT
    return str(matcher.grammar_from_json_schema(_schema_text(schema, params, config), overrides=_json(params, config)))


def _schema_text(schema: Any, params: StructuredOutputsParams, config: StructuredOutputsConfig) -> str:
    require(isinstance(schema, (dict, bool)), "structured_outputs.json must be a JSON schema: an object, true or false")
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if params.disable_additional_properties or config.disable_additional_properties:
        _close(schema)
    return json.dumps(schema)


def _close(schema: Any) -> None:
    """Have objects of a schema no properties but those that it names, unless it says of others what they are."""
    if not isinstance(schema, dict):
        return
    if "properties" in schema or "patternProperties" in schema:
        schema.setdefault("additionalProperties", False)
    for name in _ONE:
        _close(schema.get(name))
    for name in _BY_NAME:
        each = schema.get(name)
        for inner in each.values() if isinstance(each, dict) else ():
            _close(inner)
    for name in _LISTED:
        each = schema.get(name)
        for inner in each if isinstance(each, list) else ():
            _close(inner)


def _json(params: StructuredOutputsParams, config: StructuredOutputsConfig) -> dict[str, Any]:
    if params.whitespace_pattern is not None:
        return {"whitespace_pattern": params.whitespace_pattern}
    if params.disable_any_whitespace or config.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": WHITESPACE}


def _choice(choice: list[str]) -> str:
    for index, text in enumerate(choice):
        require(
            not any("\ud800" <= character <= "\udfff" for character in text),
            f"structured_outputs.choice[{index}] has half of a character (a lone surrogate): remove it",
        )
    # As one lexeme: the library compiles that in a tenth of the time of alternatives in a rule, and takes more of them.
    texts = " | ".join(json.dumps(text) for text in choice if text)
    rules = [rule for rule, is_there in (("CHOICE", bool(texts)), ('""', "" in choice)) if is_there]
    return "start: " + " | ".join(rules) + (f"\nCHOICE: {texts}" if texts else "")


def _structural_tag(given: Any) -> str:
    """Return the grammar of text with tags. Raises ValueError naming the part that is wrong."""
    name = "structured_outputs.structural_tag"
    shape = '{"structures": [{"begin": ..., "schema": {...}, "end": ...}], "triggers": [...]}'
    structures, triggers = (given.get(key) if isinstance(given, dict) else None for key in ("structures", "triggers"))
    if not (isinstance(structures, list) and structures and isinstance(triggers, list)):
        raise ValueError(f"{name} lacks structures or triggers: give {shape}")
    require(all(isinstance(one, str) and one for one in triggers), f"{name}: triggers must be strings, and not empty")
    for part, items in (("structures", structures), ("triggers", triggers)):
        require(len(items) <= MAX_TAGS, f"{name} has {len(items)} {part}: give at most {MAX_TAGS}")
    library, tags = llguidance(), []
    for index, one in enumerate(structures):
        at = f"{name}: structures[{index}]"
        require(
            isinstance(one, dict)
            and isinstance(one.get("begin"), str)
            and isinstance(one.get("schema"), dict)
            and isinstance(one.get("end"), str),
            f"{at} must have begin (text), schema (a JSON schema) and end (text)",
        )
        fitting = [trigger for trigger in triggers if one["begin"].startswith(trigger)]
        require(bool(fitting), f"{at} begins with {one['begin']!r}, which no trigger starts: add a trigger")
        tags.append(library.StructTag(trigger=fitting[0], begin=one["begin"], grammar=one["schema"], end=one["end"]))
    # `assume_special` would take every trigger <...> for a special token, which it may not be.
    return str(library.StructTag.to_grammar(tags, assume_special=False))
