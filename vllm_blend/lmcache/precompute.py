"""Encode chunks before any question is asked."""

from __future__ import annotations

import logging

from vllm_blend.checks import a_type
from vllm_blend.entrypoints.llm import LLM
from vllm_blend.lmcache.config import load_config
from vllm_blend.lmcache.llm import LLM as LMCacheLLM
from vllm_blend.lmcache.prompts import BlendPrompt, split_prompt
from vllm_blend.prompt_pieces import encode_alone

logger = logging.getLogger(__name__)


class OfflineKVPreCompute:
    """Stores the KV of texts that will be pieces of prompts for `llm`."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        if not llm.llm_engine.config.blend.enable_blending:
            logger.warning("enable_blending is off: nothing is precomputed, as nothing would be reused")

    def precompute_kv(self, text_chunk: str, force_special_tokens: bool = False, cache_salt: str | None = None) -> None:
        """Encode a text after BOS and store it, unless it is stored already. Does nothing if the engine does not blend.

        A plain string that holds the separator is stored as a whole, as `combine_input_prompt_chunks` leaves it, and in
        the pieces that a plain prompt is split into. `force_special_tokens` is LMCache's way to ask for that BOS and
        changes nothing here. KV that is stored with a `cache_salt` serves prompts with the same salt. Raises TypeError
        if the text is not a string, and ValueError if it is empty or too long for the model.
        """
        if not isinstance(text_chunk, str):
            raise TypeError(f"text_chunk is {a_type(text_chunk)}: give a string")
        pieces = split_prompt(text_chunk, load_config().separator)
        if not pieces:
            raise ValueError("text_chunk is empty: there is nothing to compute")
        if not isinstance(text_chunk, BlendPrompt) and pieces != (text_chunk,):
            pieces = (text_chunk, *pieces)
        if self.llm.llm_engine.config.blend.enable_blending:
            for piece in pieces:
                for content in self._contents(piece):
                    self.llm.encode_chunks("", [content], cache_salt=cache_salt)
                    self._warn_of_unstored(content)
            if isinstance(self.llm, LMCacheLLM):
                self.llm.expect(pieces, cache_salt)

    def _contents(self, piece: str) -> list[str | list[int]]:
        """Return a piece as it may stand in prompts: at the beginning, and in the middle, where it may have other
        tokens."""
        engine = self.llm.llm_engine
        inside = encode_alone(self.llm.get_tokenizer(), piece, literal=not engine.config.model.trusted_chunks)
        first = engine.identify_chunks("", [piece])[1][0]
        return [piece] if list(first.token_ids) == inside else [piece, inside]

    def _warn_of_unstored(self, content: str | list[int]) -> None:
        engine = self.llm.llm_engine
        store = engine.chunk_store
        for chunk in engine.identify_chunks("", [content])[1]:
            num_bytes = len(chunk.token_ids) * engine.composer.bytes_per_token
            if num_bytes > store.budget_bytes:
                logger.warning(
                    "a text of %d tokens is not kept: its KV takes %d bytes, and the chunk store holds %d; raise "
                    "max_local_cpu_size, or split the text",
                    len(chunk.token_ids),
                    num_bytes,
                    store.budget_bytes,
                )
