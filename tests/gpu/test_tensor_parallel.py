"""A model on two GPUs, each a rank, answers as on one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.test_engine import MODEL, prompts
from vllm_blend import LLM, RequestOutput, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

PARAMS = SamplingParams(temperature=0, max_tokens=16, logprobs=4)
FLOAT32: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 4096, "max_num_seqs": 16}
RULES = ["question_attention", "value_deviation", "random"]


@pytest.mark.parametrize("rule", [None, *RULES])
def test_two_gpus_answer_as_one(rule: str | None) -> None:
    """In float32, where rounding changes no token."""
    options = FLOAT32 | ({} if rule is None else {"enable_blending": True, "blend_selector": rule})
    with LLM(MODEL, **options) as one, LLM(MODEL, tensor_parallel_size=2, **options) as two:
        expected = one.generate(prompts(4), PARAMS, use_tqdm=False)
        for mine, theirs in zip(two.generate(prompts(4), PARAMS, use_tqdm=False), expected, strict=True):
            assert [each.token_ids for each in mine.outputs] == [each.token_ids for each in theirs.outputs]
            for ours, others in zip(_logprobs(mine), _logprobs(theirs), strict=True):
                assert abs(ours - others) < 1e-3


def _logprobs(output: RequestOutput) -> list[float]:
    """The log-probabilities of an answer's own tokens."""
    [completion] = output.outputs
    assert completion.logprobs is not None
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [entry[token].logprob for token, entry in pairs]
