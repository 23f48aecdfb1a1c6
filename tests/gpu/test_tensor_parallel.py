"""A model on two GPUs, each a rank, answers as on one."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.gpu.test_engine import MODEL, prompts
from vllm_blend import LLM, RequestOutput, SamplingParams
from vllm_blend.engine.errors import EngineDeadError

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

PARAMS = SamplingParams(temperature=0, max_tokens=16, logprobs=4)
FLOAT32: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 4096, "max_num_seqs": 16}
RULES = ["question_attention", "value_deviation", "random"]


@pytest.mark.parametrize(("rule", "own_sums"), [*((rule, False) for rule in (None, *RULES)), (RULES[0], True)])
def test_two_gpus_answer_as_one(rule: str | None, own_sums: bool) -> None:
    """In float32, where rounding changes no token."""
    options = FLOAT32 | ({} if rule is None else {"enable_blending": True, "blend_selector": rule})
    shared: dict[str, Any] = {"tensor_parallel_size": 2, "disable_custom_all_reduce": not own_sums}
    with LLM(MODEL, **options) as one, LLM(MODEL, **options, **shared) as two:
        expected = one.generate(prompts(4), PARAMS, use_tqdm=False)
        for mine, theirs in zip(two.generate(prompts(4), PARAMS, use_tqdm=False), expected, strict=True):
            assert [each.token_ids for each in mine.outputs] == [each.token_ids for each in theirs.outputs]
            for ours, others in zip(_logprobs(mine), _logprobs(theirs), strict=True):
                assert abs(ours - others) < 1e-3


@pytest.mark.parametrize(("blending", "own_sums"), [(False, False), (True, False), (True, True)])
def test_an_engine_with_graphs_ends_and_another_answers_alike(blending: bool, own_sums: bool) -> None:
    """NCCL does not let go of exchanges that CUDA graphs hold: an engine that is shut down has to drop them first."""
    options = FLOAT32 | {"dtype": "bfloat16", "enable_blending": blending, "tensor_parallel_size": 2}
    options["disable_custom_all_reduce"] = not own_sums
    answers = []
    for _ in range(2):
        with LLM(MODEL, **options) as llm:
            assert llm.llm_engine.model_executor.driver_worker.model_runner.block_pass.decode_graphs is not None
            outputs = llm.generate(prompts(4), PARAMS, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


# without CUDA graphs and with them
@pytest.mark.parametrize(("dtype", "own_sums"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_an_engine_ends_when_a_rank_has_ended(dtype: str, own_sums: bool) -> None:
    """In the middle of decoding, with exchanges queued that the other rank will never take part in."""
    sums = {"disable_custom_all_reduce": not own_sums}
    with LLM(MODEL, **FLOAT32 | sums | {"dtype": dtype, "tensor_parallel_size": 2}) as llm:
        engine = llm.llm_engine
        for index, prompt in enumerate(prompts(4)):
            engine.add_request(str(index), prompt, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
        for _ in range(20):
            engine.step()
        [pid] = engine.model_executor.pids  # type: ignore[attr-defined]  # of the executor of several processes
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="rank 1"):
            for _ in range(500):
                engine.step()


def _logprobs(output: RequestOutput) -> list[float]:
    """The log-probabilities of an answer's own tokens."""
    [completion] = output.outputs
    assert completion.logprobs is not None
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [entry[token].logprob for token, entry in pairs]
