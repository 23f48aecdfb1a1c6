"""Every family on two ranks: whole engines that blend, by every rule."""

from __future__ import annotations

from typing import Any

import pytest

from tests.blend.prompts import plain, tiny_prompt
from tests.blend.test_exactness import RULES
from tests.distributed.ranks import threaded_llm
from tests.engine.compare import (
    assert_greedy_tokens,
    assert_logprobs_match,
    assert_same_logprobs,
    blend_of,
    chosen_by,
)
from tests.engine.engines import BLOCK_SIZE, assert_empty, engine, greedy, hf_model, run, threads, tiny_model
from tests.models.tiny import ARCHITECTURES, FAMILIES
from vllm_blend.blend.selectors import SELECTORS

pytestmark = pytest.mark.cpu_only
PARAMS = greedy(4, logprobs=3, ignore_eos=True)
OPTIONS: dict[str, Any] = {"enable_blending": True, "block_size": BLOCK_SIZE}


@pytest.mark.parametrize("family", [*ARCHITECTURES, *FAMILIES])
def test_two_ranks_answer_as_transformers_and_as_one_rank(family: str) -> None:
    """They match transformers in full and where a blend computes everything, and one rank where it reuses most."""
    model = tiny_model(family)
    whole = [tiny_prompt(blend_selector=rule, blend_recompute_ratio=1.0) for rule in [*RULES, "full"]]
    parts = [tiny_prompt(blend_selector=rule, blend_recompute_ratio=0.3) for rule in RULES]
    parts += [tiny_prompt(blend_selector=rule) for rule in SELECTORS if rule not in (*RULES, "full")]
    with engine(model, **OPTIONS) as one:
        expected = run(one, parts, PARAMS)
    with threads(1), threaded_llm(model, 2, **OPTIONS) as two:
        for number, output in enumerate(run(two, [plain(whole[0]), *whole], PARAMS)):
            assert_greedy_tokens(output, hf_model(model))
            assert_logprobs_match(output, hf_model(model))
            assert (output.blend is None) == (number == 0)
            assert output.blend is None or output.blend.num_reused_tokens == 0
        outputs = run(two, parts, PARAMS)
        assert_empty(two)
    for mine, theirs in zip(outputs, expected, strict=True):
        assert mine.blend is not None and mine.blend.num_reused_tokens > 0
        assert chosen_by(mine) == chosen_by(theirs)
        assert_same_logprobs(mine, theirs)
        assert blend_of(mine) == blend_of(theirs)
