"""A request inside the engine: its tokens, its pages, and how much of it is computed."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from vllm_blend.chunks.retention import RetentionKey
from vllm_blend.core.pages import MISSING, PageTable
from vllm_blend.kv_store.owners import ANYONE, Owner
from vllm_blend.outputs import Logprob, RequestMetrics
from vllm_blend.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_blend.blend.plan import BlendPlan
    from vllm_blend.detokenizer import Detokenizer
    from vllm_blend.layers.sampling_state import SamplingState

S = TypeVar("S")


class StateKey(Generic[S]):
    """The place on requests for the state of one feature. The feature declares the key, once, in its own folder, as in
    `COMPRESSION: StateKey[CompressionState] = StateKey("kv_compress")`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"StateKey({self.name!r})"

    def get(self, request: Request) -> S | None:
        """Return the state of a request, None if it has none."""
        state: S | None = request.states.get(self)
        return state

    def require(self, request: Request) -> S:
        """Return the state of a request that has one. Raises KeyError for any other."""
        state: S = request.states[self]
        return state

    def set(self, request: Request, state: S) -> None:
        """Give a request this state."""
        request.states[self] = state


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    PREEMPTED = "preempted"  # waits again, after it has run
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence to compute. `n > 1` makes several of these; encoding a chunk makes one that does not sample."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams | None  # None: compute the prompt's KV only
    metrics: RequestMetrics
    index: int = 0  # which of the n completions this is
    max_num_tokens: int | None = None  # prompt and output together end here at the latest
    priority: int = 0  # requests of a lower number are scheduled before this one
    salt: bytes = field(default=b"", repr=False)  # keys.salt_digest of the prompt's cache_salt: what it shares pages by
    owner: Owner = ANYONE  # the tenant, whose requests take turns with those of others by its weight
    call: str = ""  # the call that it is part of: the calls of a tenant take turns, too
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    pages: PageTable | None = None  # while it has any
    block_table: list[int] = field(default_factory=list)  # the `blocks` of its pages: steps read them often
    num_computed_tokens: int = 0  # tokens whose KV is in the cache
    num_in_flight: int = 0  # tokens drawn on the device that the host has not read yet: the last ones
    num_cached_tokens: int = 0  # how many of those were found when the request first ran
    found_in: dict[str, int] | None = None  # the same by where they were found; None: all in the prefix cache
    block_digests: list[bytes] = field(default_factory=list)  # chained, one per full block known so far
    sampling: SamplingState | None = None
    detokenizer: Detokenizer | None = None
    drafts: list[int] = field(default_factory=list)  # guesses of what follows the last known token, for the next step
    min_computed_tokens: int = 1  # so many of its last tokens are computed, even if the prefix cache has their KV
    states: dict[StateKey[Any], Any] = field(default_factory=dict, repr=False)  # of features
    # blending
    blend: BlendPlan | None = None
    num_blended_rows: int = 0  # of a blend that several steps share: those that earlier ones have computed
    blend_positions: torch.Tensor | None = None  # the positions of all its rows, [n] int64 on the host, ascending
    blocked: bool = False  # waits for chunks that are being encoded: the scheduler passes over it
    retention: RetentionKey | None = None  # under which its context's pages are looked for, and retained
    # the hook `collect`, and the encoding of chunks: keep K before RoPE and V of every token from this position on
    collect_from: int | None = None
    # First position -> [2, layers, tokens, kv_heads, head_dim]. A step that runs again replaces its own.
    collected: dict[int, torch.Tensor] = field(default_factory=dict)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # one per output token, if asked for
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def tenant(self) -> str:
        return self.owner.name

    @property
    def weight(self) -> float:
        return self.owner.weight

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Return the number of prompt and output tokens whose ids the host knows."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Return the number of known tokens and those in flight."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_in_flight

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def token_slice(self, start: int, stop: int) -> list[int]:
        """Return the token ids at positions start .. stop - 1, with prompt and output as one sequence."""
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
        """Return the token ids at positions 0 .. stop - 1, int64. Do not write to it."""
        n = len(self.prompt_token_ids)
        if stop <= n:
            return self._prompt_array[:stop]
        return np.concatenate([self._prompt_array, np.asarray(self.output_token_ids[: stop - n], np.int64)])

    def collected_kv(self) -> torch.Tensor:
        """Return K before RoPE and V from `collect_from` to the end of the prompt: [2, layers, tokens, kv_heads,
        head_dim]. Raises RuntimeError if pieces are missing or overlap: KV of the wrong length must not be stored.
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
        """Return whether the cache holds what plain prefill would put there: only then are pages shared by content."""
        if self.blend is not None or self.retention is not None:
            return False
        return self.pages is None or self.pages.is_exact

    @property
    def num_missing_blocks(self) -> int:
        """Return how many entries of the block table stand for blocks that are off the device."""
        return 0 if self.pages is None else self.pages.num_missing

    def present_blocks(self) -> list[int]:
        """Return the block table without the blocks that are off the device: the others, in order of position."""
        if not self.num_missing_blocks:
            return self.block_table
        return [block for block in self.block_table if block != MISSING]

    def hold(self, pages: PageTable) -> None:
        """Keep KV in these pages from now on."""
        self.pages, self.block_table = pages, pages.blocks

    def release_pages(self) -> None:
        """Return all pages: nothing of the request is in the cache any more."""
        if self.pages is not None:
            self.pages.release()
        self.pages, self.block_table = None, []
        self.num_computed_tokens = 0
        self.num_blended_rows, self.blend_positions = 0, None
        self.collected.clear()

    @property
    def awaits_blend(self) -> bool:
        """Return whether it is still to be computed as a blend, or the rest of its rows."""
        return self.blend is not None and self.num_computed_tokens == 0

    @property
    def max_cached_tokens(self) -> int:
        """Return how many leading tokens may come from the prefix cache. The last is always computed, for its logits,
        and so is every token whose KV or log-probability was asked for."""
        if not self.exact or (self.params is not None and self.params.prompt_logprobs is not None):
            return 0
        most = max(0, self.num_tokens - self.min_computed_tokens)
        return most if self.collect_from is None else min(self.collect_from, most)

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.status = RequestStatus.FINISHED
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.metrics.finished_time = time.time()
