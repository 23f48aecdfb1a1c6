"""The demo model passes; models that are wrong in one way each are told apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.quality.broken import Noisy, OtherRope, StepPositions
from tests.quality.small import MODEL, write_small
from vllm_blend.models.llama import LlamaForCausalLM
from vllm_blend.models.registry import MODEL_REGISTRY
from vllm_blend.pipeline.ask import choose_asking
from vllm_blend.quality import exactness
from vllm_blend.quality.questions import Questions, read_questions
from vllm_blend.quality.session import Session


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Questions:
    path = write_small(tmp_path_factory.mktemp("data"))
    return replace(read_questions(path), asking=choose_asking(None, path))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_model_is_far_within_the_limits(questions: Questions, dtype: str) -> None:
    with Session(MODEL, batch=2, dtype=dtype) as session:
        check = exactness.check_exactness(session, questions)
        assert session.encode(check.chunked) > 0  # nothing is left behind that the measurement would not count
    assert check.passes and len(check.truths) == 3
    assert [each.what.split(",")[0] for each in check.found] == ["full prefill", "everything recomputed"]
    assert all(each.kl < check.limit / 10 and each.same == 1 for each in check.found)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (Noisy, exactness.NOT_DETERMINISTIC),
        (StepPositions, exactness.DEPENDS_ON_STEPS),
        (OtherRope, exactness.WRONG_WHERE_PLACED),
    ],
)
def test_what_is_wrong_is_told_apart(
    questions: Questions, monkeypatch: pytest.MonkeyPatch, broken: type[LlamaForCausalLM], reason: str
) -> None:
    monkeypatch.setitem(MODEL_REGISTRY, "LlamaForCausalLM", broken)
    with Session(MODEL, batch=4) as session:
        check = exactness.check_exactness(session, questions)
    assert not check.passes and not check.found[-1].within(check.limit)
    text = exactness.explain(MODEL, check)
    assert text.startswith(reason)
    assert all(str(difference) in text for difference in check.found)


def test_what_none_of_that_explains_is_said_too(questions: Questions) -> None:
    with Session(MODEL, batch=4) as session:
        check = exactness.check_exactness(session, questions)
    wrong = exactness.Difference("everything recomputed, against full prefill", kl=1.0, same=0.0)
    text = exactness.explain(MODEL, replace(check, found=[check.found[0], wrong, check.found[1]]))
    assert text.startswith(exactness.WRONG_ELSEWHERE) and "32 tokens at a time: KL" in text


def test_nan_is_a_difference() -> None:
    limit = exactness.LIMITS[torch.float32]
    assert not exactness.Difference("", float("nan"), 1.0).within(limit)
    assert exactness.Difference("", 0.0, 0.9).within(limit)
