"""Shows what a composition would run, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from vllm_blend.chunks.chat_template import conversation, render
from vllm_blend.chunks.chunk import ChunkType
from vllm_blend.chunks.composition import ChunkComposition, matching_prefix
from vllm_blend.chunks.retention import retention_key
from vllm_blend.core.block_manager import BlockManager, chain_digest
from vllm_blend.inputs import begins_with

if TYPE_CHECKING:
    from vllm_blend.engine.llm_engine import LLMEngine


@dataclass(frozen=True)
class PreviewedPart:
    """Positions start .. stop - 1. `chunk_id` is None between chunks and for a question that is no chunk. `exact`: the
    stored KV is what full prefill gives there. `num_bytes`: of stored KV in memory, 0 where it would be computed
    first."""

    start: int
    stop: int
    chunk_id: str | None
    chunk_type: ChunkType | None
    exact: bool
    num_bytes: int


@dataclass(frozen=True)
class CompositionPreview:
    """`text` is what the ids decode to. `num_computed_tokens` is how many prompt tokens the model computes as things
    are (chunks that have been evicted not counted). `is_retained`: the blended context is in retained pages.
    `template_seam`: with a chat template, the first position where the ids differ from the whole conversation's, None
    where they do not: there the tokenizer would make one token of the end of one piece and the beginning of the next,
    or the template strips whitespace from what it is given."""

    token_ids: list[int]
    text: str | None
    parts: list[PreviewedPart]
    max_model_len: int
    num_computed_tokens: int
    is_retained: bool
    template_seam: int | None = None

    def __repr__(self) -> str:
        retained = ", retained" if self.is_retained else ""
        seam = "" if self.template_seam is None else f", differs from the template at {self.template_seam}"
        return (
            f"CompositionPreview({self.num_tokens} of {self.max_model_len} tokens in {len(self.parts)} parts, "
            f"{self.num_computed_tokens} to compute{retained}{seam})"
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def fits(self) -> bool:
        """Return whether the prompt leaves room for at least one token of an answer."""
        return self.num_tokens < self.max_model_len


def preview(
    engine: LLMEngine, composition: ChunkComposition, use_chat_template: bool, chat_template: str | None
) -> CompositionPreview:
    """Return what a composition would run. Raises ValueError for settings that cannot be."""
    ids = composition.token_ids
    parsed = composition.parse()
    num_computed, is_retained = len(ids) - _cached_prefix(engine.blocks, ids, parsed.salt), False
    if engine.planner.blends(parsed):
        asked = engine.planner.plan(parsed)
        key = retention_key(engine.fingerprint, parsed, asked)
        is_retained = key is not None and key.key in engine.blocks.retained
        if is_retained:
            num_computed = len(ids) - asked.suffix_start
        else:
            reused = sum(p.stop - p.start for p in parsed.pieces if not begins_with(ids, p.start, p.context))
            stored = sum(p.stop - p.start for p in parsed.pieces)
            num_computed = len(ids) - stored + min(reused, int(asked.shares[-1] * asked.suffix_start + 1e-9))
    tokenizer = engine.tokenizer
    parts = []
    for placed in composition.placed():
        chunk = placed.part.stored
        exact = chunk is not None and chunk.has_kv and begins_with(ids, placed.start, chunk.context_token_ids)
        num_bytes = 0 if chunk is None else engine.chunk_store.bytes_of(chunk.id)
        chunk_id, kind = (None, None) if chunk is None else (chunk.id, chunk.chunk_type)
        parts.append(PreviewedPart(placed.start, placed.stop, chunk_id, kind, exact, num_bytes))
    return CompositionPreview(
        token_ids=ids,
        text=None if tokenizer is None else str(tokenizer.decode(ids)),
        parts=parts,
        max_model_len=engine.max_model_len,
        num_computed_tokens=num_computed,
        is_retained=is_retained,
        template_seam=_find_seam(engine, composition, chat_template) if use_chat_template else None,
    )


def _cached_prefix(blocks: BlockManager, ids: Sequence[int], salt: bytes) -> int:
    """Count the leading tokens of a plain prompt that the exact prefix cache has; the last one is always computed."""
    size = blocks.block_size
    full = [ids[start : start + size] for start in range(0, len(ids) - size, size)]
    digests = list(accumulate(full, chain_digest, initial=salt))[1:]
    return size * len(blocks.match_prefix(digests, ids))


def _find_seam(engine: LLMEngine, composition: ChunkComposition, chat_template: str | None) -> int | None:
    """Return where the ids first differ from those of the conversation as one text; None if they do not."""
    tokenizer = engine.get_tokenizer()
    contents: dict[str, list[int]] = {}
    for part in composition.parts:
        message = "system" if part.role == "system" else "user"
        if part.role != "template":
            contents.setdefault(message, []).extend(part.token_ids)
    texts = {
        message: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)) for message, ids in contents.items()
    }
    messages = conversation(texts.get("system"), texts["user"])
    text = render(tokenizer, messages, chat_template, add_generation_prompt=True)
    whole = list(tokenizer.encode(text, add_special_tokens=False))
    ids = composition.token_ids
    return None if whole == ids else matching_prefix(whole, ids)
