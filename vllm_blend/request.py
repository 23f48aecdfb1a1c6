"""A request inside the engine: its tokens, its pages, and how far it has come."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_blend.core.block_manager import ChunkSpan
from vllm_blend.outputs import Logprob, RequestMetrics
from vllm_blend.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_blend.blend.plan import BlendPlan
    from vllm_blend.engine.detokenizer import Detokenizer
    from vllm_blend.kv_compress.state import CompressionState
    from vllm_blend.layers.sampler import SamplingState
    from vllm_blend.offload.residency import Residency
    from vllm_blend.spec_decode.speculation import Speculation


@dataclass(frozen=True)
class CompositionKey:
    """What a blended context is found by when its pages are retained: key covers tokens, chunks, how it is blended, and
    the model. `num_tokens`: the context's, so the suffix starts there."""

    key: bytes
    num_tokens: int
    spans: tuple[ChunkSpan, ...] = ()


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    PREEMPTED = "preempted"  # waits again, after it has run
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence to compute. `n > 1` makes several of these; encoding a chunk makes one without sampling."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams | None  # None: compute the prompt's KV only
    metrics: RequestMetrics
    index: int = 0  # which of the n completions this is
    max_num_tokens: int | None = None  # prompt and output together end here at the latest
    priority: int = 0  # requests of a lower number are scheduled before this one
    salt: bytes = field(default=b"", repr=False)  # keys.salt_digest of the prompt's cache_salt: what it shares pages by
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0  # tokens whose KV is in the cache
    num_in_flight: int = 0  # tokens drawn on the device that the host has not read yet: the last ones
    num_cached_tokens: int = 0  # of those, how many were found when the request first ran
    found_in: dict[str, int] | None = None  # the same by where they were found; None where that is the prefix cache
    block_digests: list[bytes] = field(default_factory=list)  # chained, one per full block known so far
    sampling: SamplingState | None = None
    detokenizer: Detokenizer | None = None
    # speculative decoding
    speculation: Speculation | None = None
    drafts: list[int] = field(default_factory=list)  # guesses of what follows the last known token, for the next step
    draft_source: int | None = None  # the chunk of the prompt that these are copied from
    # blending
    blend: BlendPlan | None = None
    blocked: bool = False  # waits for chunks that are being encoded: the scheduler passes over it
    composition: CompositionKey | None = None  # under which its context's pages are looked for, and retained
    # chunks on the device or the host while decoding
    chunk_bounds: tuple[tuple[int, int], ...] = ()  # positions of the prompt's chunks, where they may move
    chunk_ranking: tuple[int, ...] = ()  # chunks, most relevant first, as the prompt says
    residency: Residency | None = None  # from the end of the prefill on
    compression: CompressionState | None = None  # where its KV may be evicted
    # the hook `collect`, and the encoding of chunks: keep K before RoPE and V of every token from this position on
    collect_from: int | None = None
    # First position -> [2, layers, tokens, kv_heads, head_dim]. A step that runs again replaces its own.
    collected: dict[int, torch.Tensor] = field(default_factory=dict)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # one per output token, where asked for
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens whose ids the host knows."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens and those in flight."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_in_flight

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def token_slice(self, start: int, stop: int) -> list[int]:
        """Token ids at positions start..stop-1, prompt and output taken as one sequence."""
        n = len(self.prompt_token_ids)
        if start >= n:
            return self.output_token_ids[start - n : stop - n]
        if stop <= n:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - n]

    @cached_property
    def _prompt_array(self) -> np.ndarray:
        return np.asarray(self.prompt_token_ids, np.int64)

    def token_array(self, stop: int) -> np.ndarray:
        """Token ids at positions 0 .. stop - 1, int64. Not to be written to."""
        n = len(self.prompt_token_ids)
        if stop <= n:
            return self._prompt_array[:stop]
        return np.concatenate([self._prompt_array, np.asarray(self.output_token_ids[: stop - n], np.int64)])

    def collected_kv(self) -> torch.Tensor:
        """K before RoPE and V from `collect_from` to the end of the prompt: [2, layers, tokens, kv_heads, head_dim].

        Raises RuntimeError when pieces are missing or overlap: KV of the wrong length must not be stored.
        """
        assert self.collect_from is not None
        pieces = [self.collected[start] for start in sorted(self.collected)]
        kv = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)
        expected = self.num_prompt_tokens - self.collect_from
        if kv.shape[2] != expected:
            raise RuntimeError(f"request {self.request_id}: KV of {kv.shape[2]} tokens collected, not of {expected}")
        return kv

    @property
    def exact(self) -> bool:
        """Whether the cache holds what plain prefill would have put there: only then may pages be shared by content."""
        if self.blend is not None or self.composition is not None or self.in_head_pages:
            return False
        return self.residency is None or not self.residency.approximate

    @property
    def awaits_blend(self) -> bool:
        """Whether all of it is still to be computed, as a blend: what its pages hold is nothing yet."""
        return self.blend is not None and self.num_computed_tokens == 0

    @property
    def in_head_pages(self) -> bool:
        """Whether each KV head has pages of its own, and the block table is empty."""
        return self.compression is not None and self.compression.index is not None

    @property
    def max_cached_tokens(self) -> int:
        """How many leading tokens may come from the prefix cache. The last token is always computed, for its logits; so
        is everything whose KV or log-probability somebody wants to see."""
        if not self.exact or (self.params is not None and self.params.prompt_logprobs is not None):
            return 0
        # The queries that an eviction metric looks at are computed.
        watched = 0 if self.compression is None else self.compression.window
        most = max(0, self.num_tokens - max(1, watched))
        return most if self.collect_from is None else min(self.collect_from, most)

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.status = RequestStatus.FINISHED
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.metrics.finished_time = time.time()
