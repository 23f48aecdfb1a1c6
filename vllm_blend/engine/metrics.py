"""Counters of an engine, under vLLM's metric names where vLLM has them."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    """Totals since the engine started."""

    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
    blended_prompts: int = 0
    blend_reused_tokens: int = 0
    blend_recomputed_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # finish reason -> requests

    def counters(self) -> list[Metric]:
        named = {
            "vllm_blend:num_steps": self.num_steps,
            "vllm:prompt_tokens": self.prompt_tokens,
            "vllm:generation_tokens": self.generation_tokens,
            "vllm:prefix_cache_queries": self.prefix_cache_queries,
            "vllm:prefix_cache_hits": self.prefix_cache_hits,
            "vllm_blend:blended_prompts": self.blended_prompts,
            "vllm_blend:blend_reused_tokens": self.blend_reused_tokens,
            "vllm_blend:blend_recomputed_tokens": self.blend_recomputed_tokens,
        }
        named |= {f"vllm:request_success_{reason}": count for reason, count in self.finished.items()}
        return [Counter(name, value) for name, value in named.items()]
