"""Tool calls in each format: what texts say, whole and in pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from vllm_blend.entrypoints.openai.tool_calls import (
    TOOL_PARSERS,
    MessageDelta,
    ParsedMessage,
    ToolParser,
    detect_tool_parser,
)
from vllm_blend.entrypoints.openai.tool_calls.deltas import join_deltas

KNOWN = ["get_weather", "add"]
# Templates that write an assistant's calls as each family's models do.
TEMPLATES = {
    "hermes": """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}""",
    "llama3_json": """{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content }}{% for call in m.tool_calls or [] %}{{ "; " if not loop.first }}{% if builtin %}<|python_tag|>{% endif %}
{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{% endfor %}<|eot_id|>
{% endfor %}""",
    "mistral": """{% for m in messages %}{% if m.role == "user" %}[INST] {{ m.content }}[/INST]{% else %}{{ m.content }}
{% if m.tool_calls and named %}{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]
{{ call.function.arguments | tojson }}{% endfor %}
{% elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}{{ ", " if not loop.first }}
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}, "id": "abcdefghi"}
{% endfor %}]{% endif %}</s>{% endif %}{% endfor %}""",
}
ENDS = {"hermes": "<|im_end|>", "llama3_json": "<|eot_id|>", "mistral": "</s>"}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(st.sampled_from(KNOWN), st.dictionaries(st.text(max_size=5), JSON, max_size=3)), max_size=3)
MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<tool", "; ", "add"]
OBJECTS = [
    '{"name": "add", ',
    '{"name": "add"}',
    '"arguments": ',
    '"parameters": ',
    '"id": "x"',
    "{}",
    "}",
    "[",
    "]",
    ",",
]
VALUES = [
    '{"a": 1}',
    '{"a": "\\u00e9\\n"',
    '"{\\"a\\": 1}"',
    "null",
    "-1.5e3",
    "tru",
    '"',
    "\\",
    "\n",
    " ",
    "text",
    "é",
]
FRAGMENTS = st.sampled_from([*MARKS, *OBJECTS, *VALUES])


def render(template: str, messages: list[Any], **variables: Any) -> str:
    texts = render_jinja_template(conversations=[messages], chat_template=template, **variables)[0]
    return texts[0]


def read_in_pieces(parser: ToolParser, pieces: list[str]) -> list[MessageDelta]:
    return [*(parser.feed(piece) for piece in pieces), parser.finish()]


def cut(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:stop] for start, stop in pairwise(bounds)]


def said(message: ParsedMessage) -> tuple[str | None, list[tuple[str, str]]]:
    return message.content, [(call.name, call.arguments) for call in message.calls]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", "Just text.\n", "Just text.\n", []),
        ("hermes", "", "", []),
        ("hermes", "<tool_call>\n", "<tool_call>\n", []),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', None, [("add", "{}")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": null}</tool_call>', None, [("add", "{}")]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', None, [("add", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', None, [("add", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', None, [("add", '{"a": 1}')]),
        (
            "hermes",
            'See:\n<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>\nDone.\n',
            "See:\nDone.\n",
            [("add", '{"a": "</tool_call>"}')],
        ),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}} \n', None, [("add", '{"a": 1}')]),
        (
            "llama3_json",
            '{"name": "add", "parameters": {}};{"name": "add", "parameters": {}}',
            None,
            [("add", "{}")] * 2,
        ),
        ("llama3_json", 'A: <|python_tag|>{"name": "g", "parameters": {}}', "A:", [("g", "{}")]),
        ("llama3_json", '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
        ("llama3_json", '{"name": "add", "age": 3}', '{"name": "add", "age": 3}', []),
        ("llama3_json", '<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")', []),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {}}]', None, [("add", "{}")]),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', None, [("add", '{"a": 1}')]),
        (
            "mistral",
            'Hm. [TOOL_CALLS]add{"a": 1}[TOOL_CALLS]get.it[ARGS]{}',
            "Hm.",
            [("add", '{"a": 1}'), ("get.it", "{}")],
        ),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {}}, 5]', ", 5]", [("add", "{}")]),
    ],
)
def test_texts(name: str, text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    assert said(TOOL_PARSERS[name](KNOWN).parse(text)) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "Hm.\n<tool_call>\nadd(1, 2)\n</tool_call>\n"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {a: 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": nope}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "no JSON"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add",}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a'),
        ("llama3_json", '{"name": "add", "parameters": 5}'),
        ("llama3_json", '{"name": "add"}'),
        ("mistral", "[TOOL_CALLS] nothing to call"),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": }]'),
        ("mistral", f"[TOOL_CALLS]{'a' * 300}[ARGS]{{}}"),
    ],
)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert said(join_deltas(read_in_pieces(TOOL_PARSERS[name](KNOWN), pieces))) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "content", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, b}}</tool_call> Ok.', " Ok.", '{"a": 1, b}}'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "unfin', None, '{"a": "unfin'),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1 "b"}}', None, '{"a": 1 "b"}}'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": [1,]}', None, '{"a": [1,]}'),
    ],
)
def test_an_announced_call_stays_one(name: str, text: str, content: str | None, arguments: str) -> None:
    assert said(TOOL_PARSERS[name](KNOWN).parse(text)) == (content, [("add", arguments)])


@pytest.mark.parametrize("name", TOOL_PARSERS.names())
@given(fragments=st.lists(FRAGMENTS, max_size=14), cuts=st.lists(st.integers(0, 999), max_size=8))
def test_pieces_say_what_the_whole_says(name: str, fragments: list[str], cuts: list[int]) -> None:
    text = "".join(fragments)
    whole = said(TOOL_PARSERS[name](KNOWN).parse(text))
    assert said(join_deltas(read_in_pieces(TOOL_PARSERS[name](KNOWN), cut(text, cuts)))) == whole
    assert said(join_deltas(read_in_pieces(TOOL_PARSERS[name](KNOWN), list(text)))) == whole
    if not whole[1]:
        assert whole[0] == text


@pytest.mark.parametrize("name", TOOL_PARSERS.names())
@given(calls=CALLS, option=st.booleans(), text=st.sampled_from(["", "Let me see."]), cuts=st.lists(st.integers(0, 999)))
def test_calls_of_templates_are_read(
    name: str, calls: list[tuple[str, dict[str, Any]]], option: bool, text: str, cuts: list[int]
) -> None:
    if name == "llama3_json" and not option:
        text = ""  # there is no content before calls without the tag
    functions = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": text, "tool_calls": functions}]
    prompt, rendered = (
        render(TEMPLATES[name], each, builtin=option, named=option) for each in (messages[:1], messages)
    )
    answer = rendered.removeprefix(prompt)
    if name != "mistral":
        answer = answer.partition("assistant\n" if name == "hermes" else "<|end_header_id|>\n\n")[2]
    answer = answer.rpartition(ENDS[name])[0]
    message = join_deltas(read_in_pieces(TOOL_PARSERS[name](KNOWN), cut(answer, cuts)))
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == calls
    assert (message.content or "").strip() == text


@pytest.mark.parametrize("name", TOOL_PARSERS.names())
def test_arguments_stream_while_they_are_written(name: str) -> None:
    begin = {
        "hermes": '<tool_call>{"name": "add", "arguments": {"a": "',
        "llama3_json": '{"name": "add", "parameters": {"a": "',
        "mistral": '[TOOL_CALLS]add[ARGS]{"a": "',
    }[name]
    parser = TOOL_PARSERS[name](KNOWN)
    [first] = parser.feed(begin).to_dict()["tool_calls"]
    assert first == {
        "index": 0,
        "id": first["id"],
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": "'},
    }
    for word in ("one", " two", " three"):
        assert parser.feed(word).to_dict() == {"tool_calls": [{"index": 0, "function": {"arguments": word}}]}


def test_ids_are_new_and_fit_the_templates() -> None:
    text = "[TOOL_CALLS]add[ARGS]{}" * 50
    ids = [call.id for call in TOOL_PARSERS["mistral"]().parse(text).calls]
    assert len(set(ids)) == 50
    assert all(len(each) == 9 and each.isalnum() for each in ids)


def test_formats_are_known_by_their_templates() -> None:
    assert {name: detect_tool_parser(text) for name, text in TEMPLATES.items()} == {name: name for name in TEMPLATES}
    assert detect_tool_parser("{{ messages }}") is None
    assert detect_tool_parser("<tool_call><function={{ name }}>") is None
    assert detect_tool_parser(None) is None
