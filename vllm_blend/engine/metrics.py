"""Counters of an engine, under vLLM's metric names where vLLM has them."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from vllm_blend.engine.reuse_counts import ReuseCounts

logger = logging.getLogger(__name__)

# Keys of `RequestOutput.num_found_tokens`: see there.
FOUND_IN = ("prefix_cache", "retained", "device", "host", "disk", "remote", "joined", "old_kvs")


@dataclass(frozen=True)
class Metric:
    name: str
    value: float


@dataclass(frozen=True)
class Counter(Metric):
    """Only grows."""


@dataclass(frozen=True)
class Gauge(Metric):
    """The value now."""


@dataclass
class EngineMetrics:
    """Totals since the engine started.

    Each of a request's completions (`n`) counts its prompt, and what it finds of it, as it is scheduled by itself.
    """

    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
    blended_prompts: int = 0
    blend_reused_tokens: int = 0  # found stored and used as they were
    blend_encoded_tokens: int = 0  # encoded for the prompt that came with them, then used as they were
    blend_recomputed_tokens: int = 0
    chat_parts_merged: int = 0
    chat_parts_unfound: int = 0
    spec_drafts: int = 0
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    found_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FOUND_IN, 0))
    finished: dict[str, int] = field(default_factory=dict)  # finish reason -> requests

    def count_blend(self, counts: ReuseCounts) -> None:
        """Count what a prompt was blended from."""
        self.blended_prompts += 1
        self.blend_reused_tokens += counts.num_found
        self.blend_encoded_tokens += counts.encoded
        self.blend_recomputed_tokens += counts.recomputed
        for where, num_tokens in counts.found.items():
            self.count_found(where, num_tokens)

    def count_found(self, where: str, num_tokens: int) -> None:
        """Count prompt tokens whose KV was found, as `RequestOutput.num_found_tokens` does for the
        first completion of a request."""
        self.found_tokens[where] += num_tokens

    def counters(self) -> list[Metric]:
        named = {
            "vllm_blend:num_steps": self.num_steps,
            "vllm:prompt_tokens": self.prompt_tokens,
            "vllm:generation_tokens": self.generation_tokens,
            "vllm:prefix_cache_queries": self.prefix_cache_queries,
            "vllm:prefix_cache_hits": self.prefix_cache_hits,
            "vllm_blend:blended_prompts": self.blended_prompts,
            "vllm_blend:blend_reused_tokens": self.blend_reused_tokens,
            "vllm_blend:blend_encoded_tokens": self.blend_encoded_tokens,
            "vllm_blend:blend_recomputed_tokens": self.blend_recomputed_tokens,
            "vllm_blend:chat_parts_merged": self.chat_parts_merged,
            "vllm_blend:chat_parts_unfound": self.chat_parts_unfound,
            "vllm:spec_decode_num_drafts": self.spec_drafts,
            "vllm:spec_decode_num_draft_tokens": self.spec_draft_tokens,
            "vllm:spec_decode_num_accepted_tokens": self.spec_accepted_tokens,
        }
        named |= {f"vllm_blend:found_tokens_{where}": count for where, count in self.found_tokens.items()}
        named |= {f"vllm:request_success_{reason}": count for reason, count in self.finished.items()}
        return [Counter(name, value) for name, value in named.items()]


class StatLogger:
    """Logs throughput every `interval` seconds while the engine steps, as `disable_log_stats=False` asks for."""

    def __init__(self, metrics: EngineMetrics, interval: float = 10.0) -> None:
        self.metrics, self.interval = metrics, interval
        self._mark()

    def step(self, num_running: int, num_waiting: int, cache_usage: float) -> None:
        """Call after each step. Rates are means since the last line."""
        elapsed = time.monotonic() - self._time
        if elapsed < self.interval:
            return
        logger.info(
            "prompt throughput %.1f tokens/s, generation throughput %.1f tokens/s, running %d, waiting %d, "
            "KV cache usage %.1f%%, tokens reused by blending so far %d",
            (self.metrics.prompt_tokens - self._prompt_tokens) / elapsed,
            (self.metrics.generation_tokens - self._generation_tokens) / elapsed,
            num_running,
            num_waiting,
            100 * cache_usage,
            self.metrics.blend_reused_tokens,
        )
        self._mark()

    def _mark(self) -> None:
        self._time = time.monotonic()
        self._prompt_tokens, self._generation_tokens = self.metrics.prompt_tokens, self.metrics.generation_tokens
