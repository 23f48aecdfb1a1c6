"""JSON in pieces is valid where Python's parser says so."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from vllm_blend.entrypoints.openai.tool_calls.json_scanner import JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
CHANGES = st.tuples(
    st.integers(0, 99), st.integers(0, 2), st.sampled_from(["", *'{}[]",:\\u0e-+.1 \n\tntrue', "\\u00", "\x01"])
)


def refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


@given(value=VALUES, change=CHANGES, ascii=st.booleans())
@example(value={"a": 1}, change=(0, 0, ""), ascii=True)
def test_what_is_json(value: object, change: tuple[int, int, str], ascii: bool) -> None:
    text = json.dumps([value], ensure_ascii=ascii)
    start, length, replacement = change
    start %= len(text)
    text = "[" + text[:start] + replacement + text[start + length :] + "]"
    scanner, end = JsonScanner(), 0
    for stop in range(1, len(text) + 1):  # a character more each time
        end = scanner.scan(text[:stop], end)
    assert (scanner.done and end == len(text)) == is_json(text)
    whole = JsonScanner()
    assert whole.scan(text, 0) == end
    assert (whole.done, whole.broken, whole.has_member) == (scanner.done, scanner.broken, scanner.has_member)
