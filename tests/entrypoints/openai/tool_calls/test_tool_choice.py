"""The fields `tools` and `tool_choice`: what they allow, and the grammars of what they demand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from vllm_blend.entrypoints.openai.output_parser import check_output_parsers
from vllm_blend.entrypoints.openai.tool_calls.tool_choice import ToolChoice, parse_tool_choice, parse_tools

TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "$defs": {
        "node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
    },
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **({"parameters": parameters} if parameters else {})}}


TOOLS = [tool("weather", CITY), tool("grow", TREE), tool("now")]


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


def accepts(schema: dict[str, Any] | None, value: Any) -> bool:
    """Return whether a grammar library lets a model write `value` under the schema."""
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.is_error(), matcher.get_error()
    text = json.dumps(value).encode()
    return matcher.try_consume_tokens(list(text)) == len(text) and bool(matcher.is_accepting())


def choose(choice: Any, tools: Any = TOOLS, parallel: Any = None) -> ToolChoice:
    return parse_tool_choice(choice, parse_tools(tools), parallel)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("f", r"tools is a string: give a list"),
        ([5], r"tools\[0\] is a number"),
        ([{"type": "web_search"}], r"tools\[0\].type='web_search' is not supported"),
        ([{"type": "function", "name": "f"}], r"tools\[0\].function is missing"),
        ([tool("")], r"tools\[0\].function.name='' is not a name"),
        ([tool("f"), tool("f")], r"tools\[1\].function.name='f' is the name of an earlier tool"),
        (
            [function(name="f", parameters=[])],
            r"tools\[0\].function.parameters is a list",
        ),
        ([tool("f", {"type": "array"})], r"tools\[0\].function.parameters.type='array'"),
        ([function(name="f", strict="yes")], r"tools\[0\].function.strict is a string"),
        ([function(name="f", description=5)], r"description is a number"),
    ],
)
def test_bad_tools_are_refused(tools: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_tools(tools)


@pytest.mark.parametrize(
    ("choice", "tools", "parallel", "message"),
    [
        ("any", TOOLS, None, r"tool_choice='any' is unknown: use one of \['none', 'auto', 'required'\]"),
        (5, TOOLS, None, "tool_choice=5 is unknown"),
        ("required", None, None, "tool_choice='required' needs tools"),
        ({"type": "function"}, TOOLS, None, "tool_choice=.* does not name a function"),
        (function(name="wether"), TOOLS, None, "did you mean 'weather'"),
        (
            function(name="f"),
            None,
            None,
            r"tool_choice.function.name='f' is not one of tools",
        ),
        ("auto", TOOLS, "no", "parallel_tool_calls is a string"),
    ],
)
def test_bad_choices_are_refused(choice: Any, tools: Any, parallel: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(choice, tools, parallel)


def test_defaults() -> None:
    assert choose(None).mode == "auto"
    assert choose(None, None).mode == choose("auto", None).mode == choose("auto", []).mode == "none"
    assert choose("none").template_tools is None
    assert choose("required").template_tools == TOOLS
    assert choose("auto").json_schema is choose("none").json_schema is None


CALLS = [
    {"name": "weather", "parameters": {"city": "Bern"}},
    {"name": "grow", "parameters": {"root": {"next": {"next": None}}}},
    {"name": "now", "parameters": {}},
]


def test_the_schema_of_required_calls_takes_calls_of_the_tools() -> None:
    schema = choose("required").json_schema
    assert accepts(schema, CALLS)
    for wrong in (
        [],
        {"name": "now", "parameters": {}},
        [{"name": "then", "parameters": {}}],
        [{"name": "weather", "parameters": {}}],
        [{"name": "grow", "parameters": {"root": {"next": {"next": 5}}}}],
        [{"name": "now"}],
    ):
        assert not accepts(schema, wrong)
    single = choose("required", parallel=False).json_schema
    assert accepts(single, CALLS[:1])
    assert not accepts(single, CALLS)


def test_the_schema_of_a_named_call_is_that_of_its_arguments() -> None:
    assert choose(function(name="grow")).json_schema == TREE
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert choose(function(name="now")).json_schema == nothing


def read(choice: ToolChoice, text: str, reasoning: str | None = "qwen3") -> tuple[dict[str, Any], str | None]:
    """Return the message of an answer, read a character at a time, and its finish reason."""
    parsers = check_output_parsers(choice, "hermes", reasoning)
    whole = parsers.make("<think>\n").parse(text)
    parser = parsers.make("<think>\n")
    deltas = [delta.to_dict() for delta in (*map(parser.feed, text), parser.finish()) if delta]
    arguments: dict[int, str] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", []):
            arguments[call["index"]] = arguments.get(call["index"], "") + call["function"]["arguments"]
    assert [call.arguments for call in whole.calls] == list(arguments.values())
    assert "".join(delta.get("content", "") for delta in deltas) == (whole.content or "")
    assert "".join(delta.get("reasoning", "") for delta in deltas) == (whole.reasoning or "")
    return whole.to_dict(), parser.finish_reason("stop")


def test_answers_to_required_and_named_choices_are_calls() -> None:
    message, reason = read(choose("required"), json.dumps(CALLS))
    functions = [call["function"] for call in message["tool_calls"]]
    assert [{"name": f["name"], "parameters": json.loads(f["arguments"])} for f in functions] == CALLS
    assert (message["content"], reason) == (None, "tool_calls")
    message, reason = read(choose(function(name="weather")), '{"city": "Bern"}')
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Bern"}'}
    ]
    assert (message["content"], reason) == (None, "stop")


def test_a_required_call_that_is_cut_off_is_no_content() -> None:
    """What there is of its arguments stays. Before it has a name, there is no call, and the length is the reason."""
    text, choice = json.dumps(CALLS), choose("required")
    for end in range(len(text)):
        message, _ = read(choice, text[:end])
        assert not message["content"], text[:end]
        made = message.get("tool_calls", [])
        begun = [call["name"] for call in CALLS][: len(made)]
        assert [call["function"]["name"] for call in made] == begun
    parser = check_output_parsers(choice, None, None).make(None)
    assert parser.parse(text[: len('[{"name": "wea')]).to_dict() == {"content": ""}
    assert parser.finish_reason("length") == "length"


def test_reasoning_and_calls_are_read_together() -> None:
    text = 'Which?\n</think>\n\nNow.\n<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "grow"}</tool_call>'
    message, reason = read(choose("auto"), text)
    assert (message["reasoning"], message["content"], reason) == ("Which?", "Now.", "tool_calls")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now", "grow"]
    message, _ = read(choose("auto", parallel=False), text)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]
    message, reason = read(choose("none"), text, reasoning=None)
    assert (message["content"], reason) == (text, "stop")


def test_parsers_that_are_missing_or_unknown_are_named() -> None:
    with pytest.raises(ValueError, match=r"tool_choice='auto' needs a tool parser, .*--tool-call-parser"):
        check_output_parsers(choose("auto"), None, None)
    with pytest.raises(ValueError, match=r"tool_call_parser='hermis' is unknown: .*did you mean 'hermes'"):
        check_output_parsers(choose("none"), "hermis", None)
    with pytest.raises(ValueError, match=r"reasoning_parser='qwen' is unknown: .*did you mean 'qwen3'"):
        check_output_parsers(choose("none"), None, "qwen")
    assert check_output_parsers(choose("auto"), "hermes", None).needs_special_tokens
    assert not check_output_parsers(choose("required"), "hermes", None).needs_special_tokens
