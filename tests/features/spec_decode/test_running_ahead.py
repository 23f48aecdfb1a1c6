"""Engines that speculate and run ahead while drafting pauses; and drafts as rows of a decode graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests import settings as run_settings
from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import (
    DEMO,
    demo_prompt,
    engine,
    feature,
    greedy,
    run,
    sampled,
    tiny_model,
    tokens_of,
)
from tests.features.offload.placements import move_at_once, taking_turns
from tests.features.spec_decode.engines import ORACLE, PROMPTS, counts, oracle_of, speculating
from vllm_blend import LLM
from vllm_blend.attention.context import ForwardContext, forward_context
from vllm_blend.features.offload.extension import ChunkOffload
from vllm_blend.worker.batch import Drawn, Span, build_batch, single_rows

MODEL = tiny_model("llama")


def launches(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> dict[bool, int]:
    """Return how many steps were queued ahead of the tokens before them, and how many were not."""
    counted = {True: 0, False: 0}
    loop, launch = llm.llm_engine.loop, llm.llm_engine.loop.launch

    def counting(ahead: bool) -> Any:
        step = launch(ahead)
        counted[ahead] += step is not None
        return step

    monkeypatch.setattr(loop, "launch", counting)
    return counted


@pytest.mark.parametrize("error_every", [0, 1, 3])
@pytest.mark.parametrize("params", [greedy, sampled])
@pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 1.3, "frequency_penalty": 0.2}])
def test_answers_stay_and_steps_run_ahead_while_drafts_pause(
    params: Any, penalties: dict[str, float], error_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = params(50, ignore_eos=True, **penalties, **({} if params is greedy else {"seed": 5}))
    with engine(MODEL) as llm:
        plain = run(llm, PROMPTS, asked)
    with speculating(MODEL, ORACLE, async_scheduling=True) as llm:
        oracle = oracle_of(llm)
        assert oracle is not None
        for output in plain:
            oracle.answers[tuple(output.prompt_token_ids)] = list(output.outputs[0].token_ids)
        oracle.error_every["n"] = error_every
        counted = launches(llm, monkeypatch)
        outputs = [run(llm, prompt, asked)[0] for prompt in PROMPTS] + run(llm, PROMPTS, asked)
    if run_settings.current().exact:
        assert tokens_of(outputs) == tokens_of([*plain, *plain])
        assert (counted[True] > counted[False]) == (error_every == 1), "most steps wait for no draft, or all do"


def test_nothing_to_draft_lets_steps_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """An oracle that knows no answer."""
    asked = greedy(60, ignore_eos=True)
    with engine(MODEL) as llm:
        plain = run(llm, PROMPTS[0], asked)
    with speculating(MODEL, ORACLE, async_scheduling=True) as llm:
        counted = launches(llm, monkeypatch)
        before = counts(llm)
        outputs = run(llm, PROMPTS[0], asked)
        assert counts(llm) == before
    assert counted[True] > 4 * counted[False]
    if run_settings.current().exact:
        assert tokens_of(outputs) == tokens_of(plain)


class EagerGraphs:
    """Runs decode steps as the graphs do, one row a sequence, without any."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.num_drafts = runner, 0

    def run(self, spans: Sequence[Span], drawn: Drawn) -> torch.Tensor:
        runner = self.runner
        starts = [0]
        for span in spans:
            starts.append(starts[-1] + span.stop - span.start)
        rows = [row for span in spans for row in single_rows(span)]
        self.num_drafts += len(rows) - len(spans)
        batch = build_batch(rows, runner.cache.block_size, runner.cache.key.device, drawn)
        made = [extension.graph_hook() for extension in runner.block_pass.extensions]
        hooks = [hook for hook in made if hook is not None]
        with forward_context(ForwardContext(batch.metadata, runner.cache.layers, runner.parts.backend, hooks)):
            hidden: torch.Tensor = runner.model(batch.input_ids)
        for hook in hooks:
            hook.replayed(starts)
        return hidden


def verify_as_rows(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
    """Every draft as a sequence of its own over the same blocks gives the answers of several rows of one."""
    prompts, asked = [demo_prompt(i, 6) for i in range(3)], greedy(24, logprobs=3, ignore_eos=True)
    with speculating(DEMO, "suffix", **arguments) as llm:
        expected = run(llm, prompts, asked)
    with speculating(DEMO, "suffix", **arguments) as llm:
        runner = llm.llm_engine.model_executor.driver_worker.model_runner
        graphs = EagerGraphs(runner)
        monkeypatch.setattr(runner.block_pass, "decode_graphs", graphs)
        outputs = run(llm, prompts, asked)
    assert graphs.num_drafts > 20
    for ours, theirs in zip(outputs, expected, strict=True):
        assert_same_logprobs(ours, theirs)


def test_drafts_are_verified_as_rows_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    verify_as_rows(monkeypatch, enable_blending=True, block_size=16)


def test_drafts_are_verified_as_rows_of_a_graph_while_chunks_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request sees in mode "resident" depends on when its chunks move, so they move in the same steps both
    times: at once, and for reasons that no rounding touches."""
    arguments: dict[str, Any] = {"enable_blending": True, "block_size": 16, "offload_mode": "resident"}
    with taking_turns() as predictor:
        arguments |= {"offload_predictor": predictor.name, "async_scheduling": False}
        with speculating(DEMO, "suffix", **arguments) as llm:
            move_at_once(llm, monkeypatch)
            scheduler = feature(llm.llm_engine, ChunkOffload).scheduler
        before = scheduler.num_promotions
        verify_as_rows(monkeypatch, **arguments)
        assert scheduler.num_promotions > before
        if run_settings.current().exact:  # the predictor was shown the queries of the same rows
            half = len(predictor.expected) // 2
            for ours, theirs in zip(predictor.expected[half:], predictor.expected[:half], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
