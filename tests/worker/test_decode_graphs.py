"""Decode steps that are replayed answer as those that are launched, and the graphs keep no logits.

Nothing is captured on a CPU: see `test_step_graphs` for what stands in for a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import settings
from tests.blend.test_serving import mixture
from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import TINY_VOCABULARY, engine, greedy, run, sampled, tiny_model, tokens_of
from tests.worker.test_step_graphs import block_pass_of, run_again
from vllm_blend import LLM, SamplingParams
from vllm_blend.features.cascade.graphs import CascadeGraphs
from vllm_blend.features.cascade.planner import CascadePlanner
from vllm_blend.worker.batch import Drawn, Span
from vllm_blend.worker.cuda_graphs import DecodeGraphs, buckets

TINY = tiny_model("llama")
MODEL: dict[str, Any] = {"enable_blending": True, "attention_backend": "torch_native"}
SIZE = 48  # requests of the largest graph

pytestmark = pytest.mark.cpu_only


def asked(count: int) -> list[SamplingParams]:
    """Settings that read logits in every way: the draw itself, changed copies, functions of the user's, and
    log-probabilities, which are read on the host after the next step has been queued."""
    ways = [
        greedy(9, ignore_eos=True, logprobs=3),
        sampled(12, seed=1, ignore_eos=True, top_p=0.9, logprobs=2),
        greedy(7, ignore_eos=True, repetition_penalty=1.3, logprobs=2),
        sampled(9, seed=2, ignore_eos=True, min_p=0.05, presence_penalty=0.5, logprobs=TINY_VOCABULARY),
        greedy(8, ignore_eos=True, logits_processors=[without_the_best], logprobs=2),
        greedy(9, ignore_eos=True, logit_bias={5: 3.0}, allowed_token_ids=list(range(5, 200)), logprobs=1),
    ]
    return [ways[index % len(ways)] for index in range(count)]


def without_the_best(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[logits.argmax()] = -torch.inf
    return logits


def replay_decoding(llm: LLM, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> list[int]:
    """Have an engine replay its decode steps. Return a list that takes the number of rows of each."""
    block_pass = block_pass_of(llm)
    with torch.inference_mode():
        graphs = DecodeGraphs(block_pass.parts, SIZE, llm.llm_engine.max_model_len, capture=run_again, **arguments)
    replayed: list[int] = []
    replay = graphs.run

    def counting(spans: list[Span], drawn: Drawn) -> torch.Tensor | None:
        hidden = replay(spans, drawn)
        assert hidden is not None
        replayed.append(len(hidden))
        return hidden

    monkeypatch.setattr(graphs, "run", counting)
    monkeypatch.setattr(block_pass, "decode_graphs", graphs)
    return replayed


@pytest.mark.parametrize("ahead", [False, True])
def test_replayed_steps_give_the_same_answers(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, so that buffers hold what was there, and in batches that shrink from one graph to the next."""
    prompts: list[Any] = [*mixture(), *({"prompt_token_ids": [*range(5 + i, 25 + 2 * i)]} for i in range(8))]
    params = asked(len(prompts))
    with engine(TINY, max_num_seqs=len(prompts), async_scheduling=ahead, **MODEL) as llm:
        expected = [run(llm, prompts, params), run(llm, prompts[::-1], params)]
        llm.llm_engine.chunk_store.clear()
        llm.reset_prefix_cache()
        replayed = replay_decoding(llm, monkeypatch)
        outputs = [run(llm, prompts, params), run(llm, prompts[::-1], params)]
        monkeypatch.undo()
    for ours, theirs in zip(outputs, expected, strict=True):
        assert tokens_of(ours) == tokens_of(theirs) or not settings.current().exact
        for one, other in zip(ours, theirs, strict=True):
            assert_same_logprobs(one, other)
    assert len({next(size for size in buckets(SIZE)[::-1] if size >= rows) for rows in replayed}) > 3


@pytest.mark.parametrize("kind", ["decode", "cascade"])
def test_graphs_keep_no_logits(kind: str) -> None:
    """What a graph returns is kept as long as the graph, in each of many: rows of the model's width do not grow with
    its vocabulary."""
    kept: list[torch.Tensor] = []

    def capture(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        replay, result = run_again(work)
        kept.append(result)
        return replay, result

    with engine(TINY, **MODEL) as llm, torch.inference_mode():
        parts = block_pass_of(llm).parts
        hidden_size = parts.model.config.hidden_size
        assert hidden_size < TINY_VOCABULARY
        if kind == "decode":
            DecodeGraphs(parts, SIZE, llm.llm_engine.max_model_len, capture=capture)
        else:
            planner = CascadePlanner(parts.cache.block_size, 1, max_levels=1)
            CascadeGraphs(parts, planner, SIZE, llm.llm_engine.max_model_len, capture)
    assert len(kept) > 3 and max(len(result) for result in kept) == SIZE
    assert {result.shape[1] for result in kept} == {hidden_size}
