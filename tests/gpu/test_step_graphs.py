"""Steps with prompts and blends as graphs answer as the same steps launched kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import tolerances
from tests.gpu.answers import differences
from tests.gpu.test_question_graphs import MODEL, ROOM, prompt
from vllm_blend import LLM, SamplingParams
from vllm_blend.outputs import CompletionOutput
from vllm_blend.worker.step_graphs import StepGraphs

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True)


@pytest.fixture(scope="module", params=["question_attention", "first_tokens"])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, LLM]]:
    """An engine that replays steps with prompts, and one that launches them."""
    common = ROOM | {"enable_blending": True, "blend_selector": request.param, "dtype": "bfloat16", "device": "cuda"}
    yield LLM(MODEL, max_cudagraph_capture_size=512, **common), LLM(MODEL, max_cudagraph_capture_size=0, **common)
    torch.cuda.empty_cache()


def work() -> list[Any]:
    ids = [[(7 * i + 11 * j) % 900 + 20 for i in range(n)] for j, n in enumerate((1, 15, 16, 33, 130, 511, 600))]
    return [*({"prompt_token_ids": one} for one in ids), prompt(5), prompt(31, 70), prompt(100)]


def answers_of(llm: LLM) -> list[CompletionOutput]:
    alone = [llm.generate([each], PARAMS, use_tqdm=False)[0] for _ in range(2) for each in work()]
    together = [output for _ in range(2) for output in llm.generate(work(), PARAMS, use_tqdm=False)]
    return [output.outputs[0] for output in alone + together]


def test_same_tokens_and_log_probabilities(engines: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one and four at a time, twice: the second time prompts are follow-ups, and all chunks are stored."""
    replayed: list[int] = []
    replay = StepGraphs.run

    def counting(self: StepGraphs, batch: Any) -> torch.Tensor | None:
        hidden = replay(self, batch)
        if hidden is not None:
            replayed.append(batch.metadata.num_tokens)
        return hidden

    monkeypatch.setattr(StepGraphs, "run", counting)
    answers = [answers_of(llm) for llm in engines]
    assert {1, 15, 16, 33, 130, 511} <= set(replayed) and any(100 < rows < 400 for rows in replayed)
    assert 600 not in replayed
    same = 0
    for ours, theirs in zip(*answers, strict=True):
        # The rows of a graph change the shapes of the products, and with them the rounding of bf16.
        found = differences(ours, theirs)
        assert max(map(abs, found[0])) < 0.25
        tolerances.check("logprobs", [each for position in found for each in position], "bfloat16")
        if ours.token_ids != theirs.token_ids:  # each one's token is among the likeliest of the other
            assert ours.logprobs is not None and theirs.logprobs is not None
            at = len(found) - 1
            assert ours.token_ids[at] in theirs.logprobs[at] and theirs.token_ids[at] in ours.logprobs[at]
        same += ours.token_ids == theirs.token_ids
    assert same >= 0.75 * len(answers[0])  # where two tokens are alike, answers may part
