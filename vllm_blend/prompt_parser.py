"""Parsing of prompts: text is tokenized, token ids are checked, and pieces are joined (see prompt_pieces.py)."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from vllm_blend.blend.order import relevance_order
from vllm_blend.chunk_options import ChunkOptions, check_numbers, parse_continues, parse_order
from vllm_blend.inputs import ParsedPrompt, PromptType
from vllm_blend.prompt_keys import kind_of, parse_salt
from vllm_blend.prompt_pieces import TrustedText, encode_alone, encode_start, join_pieces

# Texts of more characters for each token of the context are looked at before they are encoded as a whole.
_USUAL_CHARACTERS = 8
_SLICE_CHARACTERS = 65536
_CUT_TOKENS = 16  # the most that a slice may have more than the same characters have in the whole text


def parse_prompt(
    prompt: PromptType | ParsedPrompt,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    max_model_len: int | None = None,
    trusts: bool = False,
) -> ParsedPrompt:
    """Tokenize and check a prompt; one that is parsed already is only checked.

    With `max_model_len`, text of far more tokens is refused without reading it to the end. `trusts` has control tokens
    in chunks read as such (the option `trusted_chunks`). Raises ValueError or
    TypeError naming the field and the fix; nothing has been scheduled by then.
    """
    if isinstance(prompt, ParsedPrompt):
        _plain(prompt.token_ids, prompt.text, vocab_size)
        return prompt
    try:
        return _parse(prompt, tokenizer, vocab_size, max_model_len, trusts)
    except (ValueError, TypeError):
        raise
    except Exception as error:  # a user's own class of strings, lists, dicts or tokenizers raises errors of any kind
        kind, given = type(error).__name__, type(prompt).__name__
        raise ValueError(f"the prompt cannot be read: its {given} or the tokenizer raised {kind}") from error


def _parse(
    prompt: PromptType,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    max_model_len: int | None,
    trusts: bool,
) -> ParsedPrompt:
    """Tokenize and check a prompt, as `parse_prompt`; the methods of its own classes raise errors of any kind."""
    if (
        max_model_len is not None
        and tokenizer is not None
        and is_far_too_long(_texts_of(prompt), tokenizer, max_model_len)
    ):
        raise ValueError(
            f"the prompt is more than twice as long as max_model_len={max_model_len} tokens, which must hold it and at "
            "least one more: shorten the prompt, or raise max_model_len where the model allows it"
        )
    if isinstance(prompt, str):
        return _plain(_encode(prompt, tokenizer, "prompt"), prompt, vocab_size)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        return _plain(prompt, None, vocab_size)
    if not isinstance(prompt, dict):
        raise TypeError(
            f"a prompt is a str, a list of token ids or a dict, not {type(prompt).__name__}: see vllm_blend.inputs"
        )
    given: dict[str, Any] = prompt  # type: ignore[assignment]
    kind = kind_of(given)
    if kind == "chunked":
        return _chunked(given, tokenizer, vocab_size, trusts)
    salt = parse_salt(given.get("cache_salt"))
    text = given.get("prompt")
    if not isinstance(text, str | None) or (kind == "text" and text is None):
        raise TypeError(f"prompt must be a str, not {type(text).__name__}")
    if kind == "token":
        return _plain(given["prompt_token_ids"], text, vocab_size, salt, "prompt_token_ids")
    assert text is not None
    return _plain(_encode(text, tokenizer, "prompt"), text, vocab_size, salt)


def is_far_too_long(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, max_model_len: int) -> bool:
    """Return whether texts have more than twice `max_model_len` tokens together, as soon as that is certain: other
    requests wait while a text is encoded. Texts of an ordinary length are not looked at.

    Tokens are counted, as no number of characters is too much for every tokenizer: one may make a token of any number
    of spaces, or of a word that it does not know.
    """
    texts = list(texts)
    if sum(map(len, texts)) <= max(_USUAL_CHARACTERS * max_model_len, _SLICE_CHARACTERS):
        return False
    count = 0
    for text in texts:
        is_cut = len(text) > _SLICE_CHARACTERS
        for start in range(0, len(text), _SLICE_CHARACTERS):
            piece = tokenizer.encode(text[start : start + _SLICE_CHARACTERS], add_special_tokens=False)
            count += max(0, len(piece) - _CUT_TOKENS) if is_cut else len(piece)
            if count > 2 * max_model_len:
                return True
    return False


def _texts_of(prompt: Any) -> list[str]:
    """Return the texts that a prompt is made of, whether or not it is a valid one."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, dict):
        return []
    if "prompt_token_ids" in prompt:
        return []
    lists = [given for name in ("chunks", "encode_after") if isinstance(given := prompt.get(name), (list, tuple))]
    given = [
        *(prompt.get(name) for name in ("prompt", "prefix", "suffix")),
        *(piece for each in lists for piece in each),
    ]
    return [text for text in given if isinstance(text, str)]


def _plain(ids: Any, text: str | None, vocab_size: int, salt: bytes = b"", name: str = "prompt") -> ParsedPrompt:
    checked = _check_ids(ids, name, vocab_size)
    if not checked:
        raise ValueError("the decoder prompt cannot be empty: give at least one token")
    return ParsedPrompt(checked, text, salt=salt)


def _chunked(
    prompt: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, trusts: bool
) -> ParsedPrompt:
    prefix, suffix = prompt.get("prefix", ""), prompt.get("suffix", "")
    context = _check_context(prefix, prompt["chunks"], tokenizer, vocab_size)
    suffix = _check_piece(suffix, tokenizer, "suffix", vocab_size)
    if not suffix:
        raise ValueError("suffix is empty: it holds the question, whose last token the answer follows; put it there")
    count = len(context) - 1
    scores, order = parse_order(prompt.get("order", "given"), prompt.get("relevance"), count)
    others = ChunkOptions(
        scores,
        check_numbers(prompt.get("chunk_ranking", ()), "chunk_ranking", count),
        check_numbers(prompt.get("in_place_chunks", ()), "in_place_chunks", count),
        parse_continues(prompt.get("continues"), count),
        _parse_before(prompt.get("encode_after"), count, tokenizer, vocab_size, trusts),
    )
    salt = parse_salt(prompt.get("cache_salt"))

    def joined(numbers: Sequence[int]) -> ParsedPrompt:
        pieces = [context[0], *(context[1 + number] for number in numbers), suffix]
        parsed = _join(pieces, others.reordered(numbers), tokenizer, trusts, ends=True)
        if parsed.chunk_bounds and parsed.chunk_bounds[-1][1] == len(parsed.token_ids):
            raise ValueError(f"suffix={suffix!r} has no token of its own, which the answer could follow: add some text")
        return replace(
            parsed,
            blend_selector=prompt.get("blend_selector"),
            blend_recompute_ratio=prompt.get("blend_recompute_ratio"),
            salt=salt,
            is_composed=True,
        )

    parsed = joined(range(count))
    if order == "free" and any(isinstance(piece, str) for piece in (*context, suffix)):
        by_relevance = relevance_order(count, others.relevance, others.continues)
        return replace(parsed, order=order, ordered=joined(by_relevance))
    return replace(parsed, order=order)


def _join(
    pieces: Sequence[str | list[int]],
    others: ChunkOptions,
    tokenizer: PreTrainedTokenizerBase | None,
    trusts: bool,
    ends: bool,
) -> ParsedPrompt:
    """Return the prompt of a prefix, chunks, and with `ends` a suffix. Chunks without a token of their own are none."""
    count = len(pieces) - 1 - ends
    chunks = pieces[1 : 1 + count]
    literal = [False, *(not (trusts or isinstance(chunk, TrustedText)) for chunk in chunks), *[False] * ends]
    joined = join_pieces(tokenizer, pieces, literal, ends=ends)
    bounds = joined.bounds[1 : 1 + count]
    kept = [number for number, (start, stop) in enumerate(bounds) if start < stop]
    prefix_stop = joined.bounds[0][1]
    first = bounds[kept[0]][0] if kept else prefix_stop
    return ParsedPrompt(
        joined.token_ids,
        "".join(map(str, pieces)) if all(isinstance(piece, str) for piece in pieces) else None,
        tuple(bounds[number] for number in kept),
        prefix_length=None if first == prefix_stop else prefix_stop,
        num_merged_parts=count - len(kept),
        **vars(others if len(kept) == count else others.reordered(kept)),
    )


def parse_context(
    prefix: str | Sequence[int],
    chunks: Sequence[str | Sequence[int]],
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    continues: Sequence[int | None] | None = None,
    encode_after: Sequence[str | Sequence[int]] | None = None,
    cache_salt: str | None = None,
    trusts: bool = False,
) -> ParsedPrompt:
    """Parse prefix and chunks of a prompt that has no suffix (yet): what is stored before any question is known. The
    last chunk has the tokens that it has before a text that begins a token of its own."""
    pieces = _check_context(prefix, chunks, tokenizer, vocab_size)
    count = len(pieces) - 1
    checked = parse_continues(continues, count)
    before = _parse_before(encode_after, count, tokenizer, vocab_size, trusts)
    options = ChunkOptions(continues=checked, encode_after=before)
    parsed = _join(pieces, options, tokenizer, trusts, ends=False)
    if parsed.num_merged_parts:
        raise ValueError(
            f"{parsed.num_merged_parts} of {count} chunks have no token of their own, as the tokenizer joins them with "
            "the text beside them: give longer chunks, or end each with a line break"
        )
    return replace(parsed, text=None, salt=parse_salt(cache_salt))


def _check_context(
    prefix: Any, chunks: Any, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> list[str | list[int]]:
    """Return prefix and chunks, checked: texts, or token ids."""
    if isinstance(chunks, str) or not isinstance(chunks, Sequence):
        raise TypeError("chunks must be a list with one str or one list of token ids per chunk")
    pieces = [_check_piece(prefix, tokenizer, "prefix", vocab_size)]
    for index, chunk in enumerate(chunks):
        piece = _check_piece(chunk, tokenizer, f"chunks[{index}]", vocab_size)
        if not piece:
            raise ValueError(f"chunks[{index}] is empty: leave it out or give it some text")
        pieces.append(piece)
    return pieces


def _parse_before(
    given: Any, num_chunks: int, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, trusts: bool
) -> tuple[tuple[int, ...], ...]:
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != num_chunks:
        raise ValueError(f"encode_after must be a list with text or token ids for each of the {num_chunks} chunks")
    names = [f"encode_after[{index}]" for index in range(num_chunks)]
    each = zip(given, names, strict=True)
    return tuple(tuple(parse_piece(piece, tokenizer, name, vocab_size, not trusts)) for piece, name in each)


def parse_piece(
    piece: str | Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None,
    name: str,
    vocab_size: int,
    literal: bool = False,
) -> list[int]:
    """Return the token ids of a piece of a prompt, text or ids, as it stands in the middle of one. In a `literal` text
    control tokens are text."""
    checked = _check_piece(piece, tokenizer, name, vocab_size)
    if isinstance(checked, str):
        assert tokenizer is not None
        return encode_alone(tokenizer, checked, literal)
    return checked


def _check_piece(piece: Any, tokenizer: PreTrainedTokenizerBase | None, name: str, vocab_size: int) -> str | list[int]:
    if isinstance(piece, str):
        if tokenizer is None and piece:
            raise ValueError(f"{name} is text, but the engine has no tokenizer: give token ids, or a tokenizer")
        return piece if tokenizer is not None else []
    if isinstance(piece, Mapping) or not hasattr(piece, "__iter__"):
        kind = type(piece).__name__
        raise TypeError(f"{name} is of the type {kind}: give a text (str) or token ids (list of int)")
    return _check_ids(piece, name, vocab_size)


def bos_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return what a tokenizer puts before a text: BOS, or nothing."""
    return encode_start(tokenizer, "")


def _encode(text: str, tokenizer: PreTrainedTokenizerBase | None, name: str) -> list[int]:
    if tokenizer is None:
        raise ValueError(f"{name} is text, but the engine has no tokenizer: give token ids, or a tokenizer")
    return encode_start(tokenizer, text)


def _check_ids(ids: Any, name: str, vocab_size: int) -> list[int]:
    if isinstance(ids, (str, bytes)) or not hasattr(ids, "__iter__"):
        raise TypeError(f"{name} must be a list of token ids, not {type(ids).__name__}")
    given: list[Any] = list(ids)
    if set(map(type, given)) == {int} and min(given) >= 0 and max(given) < vocab_size:
        return given  # what nearly every caller gives, in a twentieth of the time
    checked = []
    for position, entry in enumerate(given):
        try:
            token = operator.index(entry)
        except TypeError:
            raise TypeError(f"{name}[{position}] is {entry!r}: give a token id, an integer") from None
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name}[{position}] is {token}, out of vocabulary: the model has {vocab_size} tokens")
        checked.append(token)
    return checked
