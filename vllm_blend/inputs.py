"""Prompts: text, token ids, or a prefix, chunks and a suffix whose KV cache is reused chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypedDict

from vllm_blend.kv_store.keys import ChunkId


class _PromptOptions(TypedDict, total=False):
    """Keys of every kind of prompt.

    What is stored or kept of a prompt with a `cache_salt` (pages, stored chunks, retained contexts, in every tier)
    serves only prompts with the same salt, and such prompts use nothing else. Prompts without a salt share with each
    other. Give every tenant a random string of at least 32 characters: anyone who guesses a salt shares with its owner.
    """

    cache_salt: str


class TextPrompt(_PromptOptions):
    prompt: str


class _TokensPromptOptions(_PromptOptions, total=False):
    prompt: str  # the text, if it is known: outputs show it


class TokensPrompt(_TokensPromptOptions):
    prompt_token_ids: list[int]


class _ChunkedPromptOptions(_PromptOptions, total=False):
    blend_selector: str
    blend_recompute_ratio: float
    relevance: Sequence[float | None] | Sequence[Sequence[float | None]] | None
    order: Literal["given", "free"]
    chunk_ranking: list[int]
    in_place_chunks: list[int]
    continues: list[int | None]
    encode_after: list[str | list[int]]


class ChunkedPrompt(_ChunkedPromptOptions):
    """A prompt in pieces. Each is text or token ids. Texts that follow one another are tokenized as one text, BOS once:
    the ids of a prompt of texts are those of the joined text.

    Nothing is put between the pieces: a space, a blank line or a heading that is to stand there must be written at the
    end of one piece or the beginning of the next. A token that reaches from one piece into the next belongs to neither:
    it is always computed, and a chunk without a token of its own is no chunk, but text. So end chunks with a line
    break: then each has the same tokens, and is found again, whatever follows it. Control tokens in `chunks` and
    `encode_after` are text, unless the engine has `trusted_chunks`. `output.prompt` shows the whole: the joined pieces
    if all are text, otherwise what the ids decode to.

    `blend_selector` and `blend_recompute_ratio` override the engine's settings for this prompt. With the `order` "free"
    the chunks of a blended prompt are put into the order of their `relevance`, which has a score for every chunk, as
    retrievers and rerankers give them (larger is more relevant, on any scale; None for a chunk that has none, which
    comes last), or several lists of them, which are fused by reciprocal rank. Chunks that `continues` links stay
    together in their order; `output.prompt` shows the order. `chunk_ranking` has numbers of chunks, most relevant
    first: if chunks move while decoding, the first ones are on the device at first.
    `in_place_chunks` has numbers of chunks that are not worth storing: if nothing is stored for such a chunk, it is
    computed where it stands, as prefill does it, and leaves nothing in the store. `continues` names, for every chunk,
    the chunk before it in the prompt that it continues on its own page, or None: it may be encoded after that one.
    `encode_after` has, for every chunk, text or token ids outside the prompt that it may be encoded after; "" for none.
    """

    prefix: str | list[int]
    chunks: list[str] | list[list[int]]
    suffix: str | list[int]


PromptType: TypeAlias = "str | list[int] | TextPrompt | TokensPrompt | ChunkedPrompt"


@dataclass(frozen=True)
class StoredPiece:
    """A piece of a prompt whose KV is stored: where it begins, its name in the chunk store, and the tokens that it was
    (or is to be) encoded after."""

    start: int
    id: ChunkId
    context: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.id.token_ids)


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt as token ids. `chunk_bounds` are the (start, stop) positions of its chunks; empty for a plain prompt.

    Everything before the first chunk is the prefix, unless `prefix_length` ends it earlier; everything after the last
    chunk is the suffix. What lies between prefix, chunks and suffix is always computed. Prefix and chunks are stored,
    the chunks encoded after the prefix; where `pieces` are given, they say what is stored instead. With `retain` the
    pages of the blended context are kept for other prompts that have it too. `salt` is what stands for the prompt's
    `cache_salt` (keys.salt_digest), b"" without one.
    """

    token_ids: list[int]
    text: str | None = None
    chunk_bounds: tuple[tuple[int, int], ...] = ()
    blend_selector: str | None = None
    blend_recompute_ratio: float | None = None
    relevance: tuple[tuple[float, ...], ...] = ()  # by signal, a score for every chunk
    order: Literal["given", "free"] = "given"
    chunk_ranking: tuple[int, ...] = ()
    in_place_chunks: tuple[int, ...] = ()
    continues: tuple[int | None, ...] = ()  # for every chunk, or empty
    encode_after: tuple[tuple[int, ...], ...] = ()  # likewise
    pieces: tuple[StoredPiece, ...] = ()
    prefix_length: int | None = None  # where a question stands between the prefix and the first chunk
    retention: tuple[float, ...] = ()  # for every chunk, the seconds for which it is retained in memory; or empty
    num_merged_parts: int = 0  # text parts of a chat that share a token with the text beside them
    num_unfound_parts: int = 0  # those of a chat that is a plain prompt as its template changes them
    retain: bool | None = False  # None: where the choice of what is computed again does not depend on the question
    salt: bytes = field(default=b"", repr=False)
    is_composed: bool = False  # of pieces: outputs show what the ids decode to where there is no text
    ordered: ParsedPrompt | None = None  # the same prompt in the order of relevance, if its texts are to be had

    @property
    def prefix(self) -> list[int]:
        """Return the tokens before what changes from prompt to prompt; all tokens if there are no chunks."""
        if not self.chunk_bounds:
            return self.token_ids
        return self.token_ids[: self.chunk_bounds[0][0] if self.prefix_length is None else self.prefix_length]


def begins_with(token_ids: Sequence[int], count: int, context: Sequence[int]) -> bool:
    """Return whether the first `count` of these tokens are all of `context`: only then is what was encoded after it
    exact after them."""
    return len(context) == count and tuple(token_ids[:count]) == tuple(context)
