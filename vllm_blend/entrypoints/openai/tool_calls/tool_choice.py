"""The fields `tools` and `tool_choice` of a request: checked, and as a grammar for answers that must be calls.

    tools = parse_tools(body.get("tools"))
    choice = parse_tool_choice(body.get("tool_choice"), tools, body.get("parallel_tool_calls"))
    if choice.json_schema is not None:
        sampling_params.structured_outputs = StructuredOutputsParams(json=choice.json_schema)

The template gets `choice.template_tools`. Both functions raise ValueError that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllm_blend.checks import a_type, closest

Mode = Literal["none", "auto", "required", "named"]
_MODES = ("none", "auto", "required")


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `definition` is the tool as the request has it."""

    name: str
    parameters: Mapping[str, Any]
    definition: Mapping[str, Any]


@dataclass(frozen=True)
class ToolChoice:
    """How a request lets the model call `tools`. `name` is the function that the mode "named" demands."""

    mode: Mode
    tools: tuple[Tool, ...] = ()
    name: str | None = None
    is_parallel: bool = True  # whether an answer may have several calls

    @property
    def names(self) -> list[str]:
        return [tool.name for tool in self.tools]

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the chat template is rendered with: none for the choice "none", as in vLLM's default,
        so that the model does not try to call them."""
        return None if self.mode == "none" or not self.tools else [dict(tool.definition) for tool in self.tools]

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """Return what the answer must match; None if it is free."""
        if self.mode == "named":
            return dict(next(tool.parameters for tool in self.tools if tool.name == self.name))
        return _calls_schema(self) if self.mode == "required" else None


def parse_tools(tools: Any) -> tuple[Tool, ...]:
    """Check the tools of a request."""
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise ValueError(f"tools is {_kind(tools)}: give a list of {{'type': 'function', 'function': {{...}}}}")
    parsed: dict[str, Tool] = {}
    for index, given in enumerate(tools):
        tool = _parse_tool(given, f"tools[{index}]")
        if tool.name in parsed:
            raise ValueError(f"tools[{index}].function.name={tool.name!r} is the name of an earlier tool: rename one")
        parsed[tool.name] = tool
    return tuple(parsed.values())


def parse_tool_choice(choice: Any, tools: tuple[Tool, ...], parallel_tool_calls: Any = None) -> ToolChoice:
    """Check the choice of a request with these tools; the default is "auto" with tools and "none" without."""
    if not isinstance(parallel_tool_calls, bool | None):
        raise ValueError(f"parallel_tool_calls is {_kind(parallel_tool_calls)}: give true or false")
    is_parallel = parallel_tool_calls is not False
    if choice is None:
        return ToolChoice("auto" if tools else "none", tools, None, is_parallel)
    if isinstance(choice, dict):
        return ToolChoice("named", tools, _named_function(choice, tools), is_parallel)
    if not isinstance(choice, str) or choice not in _MODES:
        raise ValueError(
            f"tool_choice={choice!r} is unknown: use one of {list(_MODES)}, or "
            "{'type': 'function', 'function': {'name': '...'}}"
        )
    if choice == "required" and not tools:
        raise ValueError("tool_choice='required' needs tools, and the request has none: give tools")
    mode: Mode = "required" if choice == "required" else "auto" if choice == "auto" and tools else "none"
    return ToolChoice(mode, tools, None, is_parallel)


def _parse_tool(given: Any, field: str) -> Tool:
    if not isinstance(given, dict):
        raise ValueError(f"{field} is {_kind(given)}: give {{'type': 'function', 'function': {{...}}}}")
    if given.get("type") != "function":
        raise ValueError(f"{field}.type={given.get('type')!r} is not supported: this server calls functions alone")
    function = given.get("function")
    if not isinstance(function, dict):
        raise ValueError(f"{field}.function is {_kind(function)}: give an object with a name and parameters")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ValueError(f"{field}.function.name={name!r} is not a name: give a string of printable characters")
    if not isinstance(function.get("description"), str | None):
        raise ValueError(f"{field}.function.description is {_kind(function['description'])}: give a string")
    if not isinstance(function.get("strict"), bool | None):
        raise ValueError(f"{field}.function.strict is {_kind(function['strict'])}: give true or false")
    if not isinstance(parameters, dict | None):
        raise ValueError(f"{field}.function.parameters is {_kind(parameters)}: give a JSON schema of an object")
    kind = (parameters or {}).get("type", "object")
    if kind != "object":
        raise ValueError(f"{field}.function.parameters.type={kind!r} is not supported: arguments are an 'object'")
    if parameters is None:  # OpenAI: a function without parameters
        return Tool(name, {"type": "object", "properties": {}, "additionalProperties": False}, given)
    return Tool(name, {"type": "object", "properties": {}, **parameters}, given)


def _named_function(choice: dict[str, Any], tools: tuple[Tool, ...]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise ValueError(
            f"tool_choice={choice!r} does not name a function: give "
            "{'type': 'function', 'function': {'name': '...'}}"
        )
    names = [tool.name for tool in tools]
    if name not in names:
        meant = closest(name, names)
        raise ValueError(
            f"tool_choice.function.name={name!r} is not one of tools, which are {names}"
            + (f"; did you mean {meant!r}?" if meant else ": give the tool, or choose another one")
        )
    return name


def _calls_schema(choice: ToolChoice) -> dict[str, Any]:
    """Return the schema of a list of calls. The tools' schemas are definitions of it, with their references moved."""
    calls, definitions = [], {}
    for index, tool in enumerate(choice.tools):
        place = f"tool{index}"
        definitions[place] = _move_references(tool.parameters, f"#/$defs/{place}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, "parameters": {"$ref": f"#/$defs/{place}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    return schema if choice.is_parallel else {**schema, "maxItems": 1}


def _move_references(schema: Any, root: str) -> Any:
    """Return a schema whose references to its own parts stay right where it is a part at `root`."""
    if isinstance(schema, list):
        return [_move_references(each, root) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _move_references(value, root) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "missing" if value is None else names.get(type(value), f"{a_type(value)}")
