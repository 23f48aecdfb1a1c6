from __future__ import annotations

from typing import Any

import pytest

from vllm_blend.inputs import ParsedPrompt
from vllm_blend.prompt_parser import parse_prompt

TEXT: dict[str, Any] = {"prompt": "a b"}
TOKENS: dict[str, Any] = {"prompt_token_ids": [5, 6]}
CHUNKS: dict[str, Any] = {"prefix": [1], "chunks": [[2]], "suffix": [3]}
KINDS = {"text": TEXT, "token": TOKENS, "chunked": CHUNKS}


class _Words:
    """A tokenizer of two words."""

    bos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [{"a": 1, "b": 2}[word] for word in text.split()]


def parse(prompt: dict[str, Any]) -> ParsedPrompt:
    return parse_prompt(prompt, _Words(), 100)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"cache_sallt": "x"}, ValueError, r"unknown key\(s\) \['cache_sallt'\] in a {kind} prompt.*mean 'cache_salt'"),
        ({"temperature": 0}, ValueError, r"unknown key\(s\) \['temperature'\].*the known ones are \[.*'cache_salt'"),
        ({3: None}, ValueError, r"unknown key\(s\) \[3\]"),
        ({"multi_modal_data": {"image": 1}}, ValueError, "'multi_modal_data', which is not supported.*text only"),
        ({"prompt_embeds": [0.5]}, ValueError, "'prompt_embeds', which is not supported"),
        ({"cache_salt": ""}, ValueError, "cache_salt is empty"),
        ({"cache_salt": 5}, TypeError, "cache_salt must be a non-empty string, not int"),
    ],
)
def test_a_key_that_would_be_ignored_is_an_error(
    kind: str, extra: dict[Any, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message.format(kind=kind)):
        parse({**KINDS[kind], **extra})


def test_an_error_says_where_a_key_belongs() -> None:
    with pytest.raises(ValueError, match="'blend_selector' is for prompts with 'prefix', 'chunks' and 'suffix'"):
        parse({**TEXT, "blend_selector": "none"})
    with pytest.raises(ValueError, match="'suffix' is for prompts with"):
        parse({**TOKENS, "suffix": [1]})
    with pytest.raises(ValueError, match="give either 'prompt_token_ids' or 'chunks'"):
        parse({**CHUNKS, **TOKENS})
    with pytest.raises(TypeError, match="prompt must be a str, not dict"):
        parse({"prompt": CHUNKS})


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_vllm_that_are_none(kind: str) -> None:
    nothing = dict.fromkeys(["multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "cache_salt"])
    assert parse({**KINDS[kind], **nothing}) == parse(KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_salt_is_kept_as_a_digest(kind: str) -> None:
    salted, other = (parse({**KINDS[kind], "cache_salt": salt}) for salt in ("secret", "secret\0"))
    assert salted.salt and salted.salt != other.salt and not parse(KINDS[kind]).salt
    assert salted == parse({**KINDS[kind], "cache_salt": "secret"})
    assert "secret" not in repr(vars(salted)) and repr(salted.salt) not in repr(salted)
