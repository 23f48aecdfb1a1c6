"""Engines that speculate, and a drafter that can be told what to guess."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tests.engine.engines import BLOCK_SIZE, TINY_VOCABULARY, assert_empty, feature, new_llm, threads
from tests.kept import kept
from vllm_blend import LLM
from vllm_blend.features.spec_decode.drafters import DRAFTERS, Drafter, History, register_drafter
from vllm_blend.features.spec_decode.extension import SpeculativeDecoding

ORACLE = "oracle_of_the_tests"
IDS = [(11 * i * i + 3 * i + 5) % TINY_VOCABULARY for i in range(60)]
PROMPTS: list[dict[str, Any]] = [{"prompt_token_ids": IDS[a:b]} for a, b in ((0, 5), (7, 27), (30, 33), (20, 45))]


@register_drafter
@dataclass(frozen=True)
class Oracle(Drafter):
    """Knows the outputs of prompts, and errs in every `error_every`-th position of the sequence (0: never)."""

    name: ClassVar[str] = ORACLE
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    error_every: dict[str, int] = field(default_factory=lambda: {"n": 4})

    def propose(self, history: History, count: int) -> list[int]:
        answer = self.answers.get(tuple(history.prompt_token_ids), [])
        start = len(history.output_token_ids)
        drafts, n = answer[start : start + count], self.error_every["n"]
        position = len(history.prompt_token_ids) + start
        return [
            (draft + 1) % TINY_VOCABULARY if n and (position + i) % n == 0 else draft for i, draft in enumerate(drafts)
        ]


def real_drafters() -> list[str]:
    return sorted(set(DRAFTERS) - {ORACLE})


@contextmanager
def speculating(model: str, method: str, most: int = 5, **arguments: Any) -> Iterator[LLM]:
    """An engine as good as new, which must come back empty. Its drafts do not depend on what it did before."""
    arguments = {"block_size": BLOCK_SIZE, **arguments}
    config = {"method": method, "num_speculative_tokens": most}
    key = ("speculating", model, method, most, *sorted(arguments.items()))
    llm = kept(key, lambda: new_llm(model, speculative_config=config, **arguments))
    inner = llm.llm_engine
    llm.reset_prefix_cache()
    inner.chunk_store.clear()
    inner.scheduler.num_preemptions = 0
    speculation = feature(inner, SpeculativeDecoding)
    speculation.speculator.__post_init__()
    oracle = oracle_of(llm)
    if oracle is not None:
        oracle.answers.clear()
        oracle.error_every["n"] = 4
    with threads(1):
        yield llm
    assert_empty(llm)


def oracle_of(llm: LLM) -> Oracle | None:
    drafter = feature(llm.llm_engine, SpeculativeDecoding).speculator.drafter
    return drafter if isinstance(drafter, Oracle) else None


def counts(llm: LLM) -> tuple[int, int, int]:
    """Drafts, draft tokens and accepted tokens so far, as the metrics report them."""
    named = {metric.name: int(metric.value) for metric in llm.llm_engine.get_metrics()}
    drafts, drafted = named["vllm:spec_decode_num_drafts"], named["vllm:spec_decode_num_draft_tokens"]
    return drafts, drafted, named["vllm:spec_decode_num_accepted_tokens"]
