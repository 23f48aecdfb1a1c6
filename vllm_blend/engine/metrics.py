"""Counters of an engine, under vLLM's metric names where vLLM has them."""

from __future__ import annotations

import logging
import time
from collections import Counter as Multiset
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from vllm_blend.worker.runner_output import BlendResult

logger = logging.getLogger(__name__)

# Keys of `RequestOutput.num_found_tokens`: see there.
FOUND_IN = ("prefix_cache", "retained", "device", "host", "disk", "remote", "joined", "old_kvs")
VLLM_COUNTERS = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")  # vLLM has them


@dataclass(frozen=True)
class Metric:
    name: str
    value: float


@dataclass(frozen=True)
class Counter(Metric):
    """A total, which only grows."""


@dataclass(frozen=True)
class Gauge(Metric):
    """A value as it is now."""


@dataclass(frozen=True)
class ReuseCounts:
    """Tokens of a prompt. `exact`, `reused`, `encoded` and `recomputed` make up the prompt; `found` has the first two
    by where they were found. `kinds` is `BlendStats.token_kinds`."""

    exact: int
    reused: int
    encoded: int
    recomputed: int
    found: Mapping[str, int]
    kinds: str

    @property
    def num_found(self) -> int:
        return self.exact + self.reused


def count_reuse(result: BlendResult) -> ReuseCounts:
    """Count what a blend has kept of stored KV, and what it has computed."""
    plan = result.plan
    kept = np.ones(plan.suffix_start, bool)
    kept[result.computed_on_host.wait().numpy()] = False
    kinds = np.full(plan.num_prompt_tokens, ord("c"), np.uint8)
    found = Multiset[str]()
    exact = encoded = 0
    for segment in plan.segments:
        span = slice(segment.start, min(segment.stop, plan.suffix_start))
        count = int(kept[span].sum())
        kinds[span][kept[span]] = ord("n" if segment.found_in is None else "e" if segment.exact else "r")
        if segment.found_in is None:
            encoded += count
            continue
        found[segment.found_in] += count
        exact += count if segment.exact else 0
    recomputed = len(result.computed) + plan.num_prompt_tokens - plan.suffix_start
    return ReuseCounts(exact, found.total() - exact, encoded, recomputed, +found, kinds.tobytes().decode())


@dataclass
class EngineMetrics:
    """Totals since the engine started. Each number is a counter by its own name.

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
    found_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FOUND_IN, 0))
    finished: dict[str, int] = field(default_factory=dict)  # finish reason -> requests
    peak_prefill_speed: float = 0.0  # tokens per second of the fastest step that only prefilled; 0 before the first

    def count_prefill(self, num_tokens: int, seconds: float) -> None:
        """Note how long a step took that only prefilled."""
        self.peak_prefill_speed = max(self.peak_prefill_speed, num_tokens / max(seconds, 1e-9))

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
        totals = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        named = {f"{'vllm' if name in VLLM_COUNTERS else 'vllm_blend'}:{name}": n for name, n in totals.items()}
        named |= {f"vllm_blend:found_tokens_{where}": count for where, count in self.found_tokens.items()}
        named |= {f"vllm:request_success_{reason}": count for reason, count in self.finished.items()}
        return [Counter(name, value) for name, value in named.items()]


class StatLogger:
    """Logs throughput every `interval` seconds while the engine steps, as `disable_log_stats=False` asks for."""

    def __init__(self, metrics: EngineMetrics, interval: float = 10.0) -> None:
        self.metrics, self.interval = metrics, interval
        self._mark()

    def step(self, num_running: int, num_waiting: int, cache_usage: float) -> None:
        """Log a line after a step, if it is time for one. Rates are means since the last line."""
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
