"""The field `blend`: what it sets, and errors that name the field."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chunks.test_chat import CHATML_LIKE
from tests.entrypoints.openai.passages.prompts import PASSAGES, chat, completion
from vllm_blend.entrypoints.openai.passages import BlendOptions, PassageFinder, parse_blend

CHUNKED: dict[str, Any] = {"prefix": "Read.", "chunks": PASSAGES[:2], "suffix": "Who?"}
USER = {"role": "user", "content": "Who?"}


def test_fields_from_either_place() -> None:
    fields = {"mode": "blend", "ratio": 0.2, "selector": "auto", "relevance": [1, 2]}
    options = BlendOptions("blend", 0.2, "auto", [1, 2])
    assert parse_blend(fields) == parse_blend(None, {"blend": fields, "other": 1}) == options
    assert parse_blend({"mode": "blend"}, {f"blend_{name}": value for name, value in fields.items()}) == options
    assert parse_blend(None) == parse_blend({}) == parse_blend(None, {}) == BlendOptions()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("blend", "blend is a str: give an object"),
        ({"mode": "on"}, "blend.mode='on' is unknown: use 'off', 'reuse' or 'blend'"),
        ({"mod": "on"}, "blend.mod is unknown: did you mean 'mode'"),
        ({"ratio": "a"}, "blend.ratio is 'a': give a number"),
        ({"ratio": True}, "blend.ratio is True: give a number"),
        ({"ratio": float("nan")}, "blend.ratio"),
        ({"ratio": 1.5}, "blend.ratio"),
        ({"selector": 7}, "blend.selector is 7"),
        ({"selector": "best"}, "blend.selector: .*best"),
        ({"order": "any"}, "blend.order='any' is unknown"),
        ({"mode": "reuse", "ratio": 0.1}, "blend.ratio is for the mode 'blend', but blend.mode='reuse'"),
        ({"relevance": [1]}, "blend.relevance has 1 scores for 2 chunks"),
        ({"relevance": [1, "a"]}, r"blend.relevance\[1\] is 'a'"),
        ({"relevance": 7}, "blend.relevance must be a list"),
        ({"relevance": [1, 2]}, "relevance is given, but only the order of the chunks goes by it: set order to 'free'"),
        ({"continues": [None]}, "blend.continues has 1 entries for 2 chunks"),
        ({"continues": [None, 1]}, r"blend.continues\[1\] is 1: name a chunk that stands before chunk 1"),
        ({"continues": [None, "a"]}, r"blend.continues\[1\] is 'a'"),
        ({"continues": [None, False]}, r"blend.continues\[1\] is False: give the number of a chunk"),
        ({"continues": 7}, "blend.continues must be a list"),
        ({"continues": {"1": 0}}, "blend.continues must be a list .*, not dict"),
    ],
)
def test_errors_name_the_field(fields: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        given = parse_blend(fields)
        completion(PassageFinder(), CHUNKED, relevance=given.relevance, continues=given.continues)
    if isinstance(fields, dict) and not fields.keys() & {"relevance", "continues"}:
        with pytest.raises((ValueError, TypeError), match=message.replace("blend.", "vllm_xargs.blend.")):
            parse_blend(None, {"blend": fields})


def test_a_field_that_is_given_twice() -> None:
    with pytest.raises(ValueError, match=r"vllm_xargs\.blend\.ratio=0\.2, but blend\.ratio=0\.1: give one of them"):
        parse_blend({"ratio": 0.1}, {"blend_ratio": 0.2})


def test_what_the_modes_set() -> None:
    finder = PassageFinder()
    assert completion(finder, CHUNKED, mode="off").chunk_bounds == ()
    reuse = completion(finder, CHUNKED, mode="reuse")
    assert (reuse.blend_selector, len(reuse.chunk_bounds)) == ("none", 2)
    given: dict[str, Any] = {
        "selector": "auto",
        "relevance": [0.5, None],
        "continues": [None, 0],
        "order": "free",
    }
    blend = completion(finder, CHUNKED, ratio=0.3, **given)
    assert (blend.blend_selector, blend.blend_recompute_ratio, blend.order) == ("auto", 0.3, "free")
    assert blend.continues == (None, 0)
    with pytest.raises(ValueError, match=r"blend\.continues and prompt\.continues are both given"):
        completion(finder, CHUNKED | {"continues": [None, 0]}, continues=[None, 0])
    assert blend.relevance == ((0.5, -float("inf")),)
    assert completion(finder, CHUNKED, mode="off").token_ids == blend.token_ids


def test_what_a_server_without_blending_refuses() -> None:
    assert completion(PassageFinder(), "Who?", blends=False, mode="off").token_ids
    for fields in ({"mode": "reuse"}, {"mode": "blend"}, {"ratio": 0.1}, {"selector": "auto"}):
        with pytest.raises(ValueError, match=f"blend.{next(iter(fields))}=.* this server does not blend"):
            chat(PassageFinder(), [USER], CHATML_LIKE, blends=False, **fields)


def test_what_a_prompt_without_named_passages_cannot_have() -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"relevance": [1]}, "blend.relevance is given, but the request names no", "blend.relevance is for the chunks"),
        ({"continues": [None]}, "blend.continues is given, but the request", "blend.continues is given, but the"),
        ({"order": "free"}, "blend.order='free' is for", "blend.order is for the chunks of /v1/completions"),
    ]
    for fields, in_completions, in_chats in cases:
        with pytest.raises(ValueError, match=in_completions):
            completion(PassageFinder(), "Who?", **fields)
        with pytest.raises(ValueError, match=in_chats):
            chat(PassageFinder(), [USER], CHATML_LIKE, **fields)
