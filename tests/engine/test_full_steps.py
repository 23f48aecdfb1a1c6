"""`LLM.generate` has the device begin with prompts that fill a step while it still adds others."""

from __future__ import annotations

from typing import Any

import pytest

from tests import settings
from tests.engine.compare import blend_of
from tests.engine.engines import BLOCK_SIZE, TINY_VOCABULARY, assert_empty, engine, greedy, run, tiny_model, tokens_of
from vllm_blend import LLM

IDS = [(17 * i * i + 5 * i + 3) % TINY_VOCABULARY for i in range(60)]
MODEL = tiny_model("llama")
ROOM: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": BLOCK_SIZE}
ANSWER = greedy(6, ignore_eos=True)


def prompts() -> list[Any]:
    plain = [{"prompt_token_ids": IDS[i : i + 9]} for i in range(4)]
    blend: dict[str, Any] = {"prefix": IDS[:4], "chunks": [IDS[10:20], IDS[20:26]], "suffix": IDS[40:43]}
    blends = [blend, blend | {"chunks": [IDS[20:26], IDS[10:20]], "blend_selector": "value_deviation"}]
    return [*blends, *plain, *blends]


def events(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that fills with "add" for each prompt, "queue" for each step and "read" for each one read."""
    seen: list[str] = []
    inner = llm.llm_engine

    def watch(owner: Any, name: str, event: str) -> None:
        work = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.append(event)
            return work(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(inner, "add_request", "add")
    watch(inner.model_executor, "execute_model", "queue")
    watch(inner.model_executor, "settle", "read")
    return seen


@pytest.mark.parametrize("ahead", [False, True])
def test_the_answers_and_the_steps_are_the_same(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(MODEL, enable_blending=True, async_scheduling=False, **ROOM) as llm:
        run(llm, prompts(), ANSWER)  # stores the chunks
        expected = run(llm, prompts(), ANSWER)
    with engine(MODEL, enable_blending=True, async_scheduling=ahead, **ROOM) as llm:
        run(llm, prompts(), ANSWER)
        seen = events(llm, monkeypatch)
        outputs = run(llm, prompts(), ANSWER)
        assert_empty(llm)
    if settings.current().exact:
        assert tokens_of(outputs) == tokens_of(expected)
    assert [blend_of(output) for output in outputs] == [blend_of(output) for output in expected]
    last_add = len(seen) - 1 - seen[::-1].index("add")
    if not ahead:
        assert "queue" not in seen[:last_add]
        return
    # The first full step is queued and not waited for; each later one is queued before the one before it is read.
    first_read = seen.index("read")
    assert seen[:first_read].count("queue") == 2 and seen[: seen.index("queue") + 2][-1] == "add"
    assert first_read < last_add


def test_prompts_that_fill_no_step_wait_for_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(MODEL, async_scheduling=True, max_num_batched_tokens=64, max_num_seqs=8) as llm:
        seen = events(llm, monkeypatch)
        run(llm, [{"prompt_token_ids": IDS[i : i + 5]} for i in range(6)], ANSWER)
    assert seen[:7] == ["add"] * 6 + ["queue"]


def test_tokens_that_are_in_pages_fill_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those of a cached prefix, nor those of a retained context: with steps of a few tokens each, the device
    would take longer than it would for all prompts at once."""
    plain: list[Any] = [{"prompt_token_ids": [*IDS[: 3 * BLOCK_SIZE], token]} for token in range(20)]
    blends: list[Any] = [{"prefix": IDS[:4], "chunks": [IDS[10:20]], "suffix": [token]} for token in range(20)]
    room = {"max_num_batched_tokens": 3 * BLOCK_SIZE, "max_num_seqs": 16, "block_size": BLOCK_SIZE}
    with engine(MODEL, enable_blending=True, async_scheduling=True, **room) as llm:
        for asked in (plain, blends):
            run(llm, asked[:1], ANSWER)
            with monkeypatch.context() as patch:
                seen = events(llm, patch)
                run(llm, asked, ANSWER)
            assert seen[:17] == ["add"] * 16 + ["queue"]  # as many as may run


def test_as_many_prompts_as_may_run_are_a_full_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(MODEL, async_scheduling=True, max_num_batched_tokens=64, max_num_seqs=3) as llm:
        seen = events(llm, monkeypatch)
        run(llm, [{"prompt_token_ids": IDS[i : i + 5]} for i in range(6)], ANSWER)
    assert seen[:8] == ["add"] * 3 + ["queue"] + ["add"] * 3 + ["queue"]


def test_prompts_with_priorities_all_wait_for_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the most urgent one."""
    asked: list[Any] = [{"prompt_token_ids": IDS[i : i + 9]} for i in range(6)]
    with engine(MODEL, async_scheduling=True, scheduling_policy="priority", **ROOM) as llm:
        seen = events(llm, monkeypatch)
        llm.generate(asked, ANSWER, use_tqdm=False, priority=[5, 4, 3, 2, 1, 0])
    assert seen[:7] == ["add"] * 6 + ["queue"]


def test_a_bad_prompt_behind_a_step_fails_alone() -> None:
    good: Any = {"prompt_token_ids": IDS[:9]}
    bad: Any = {"prompt_token_ids": [TINY_VOCABULARY]}
    with engine(MODEL, async_scheduling=True, **ROOM) as llm:
        outputs = llm.generate([good, good, bad, good], ANSWER, use_tqdm=False)
    assert [output.error is None for output in outputs] == [True, True, False, True]
    assert outputs[0].outputs[0].token_ids == outputs[3].outputs[0].token_ids


@pytest.mark.parametrize("failing", ["execute_model", "settle"])
def test_a_step_that_fails_while_prompts_are_added_ends_the_call_and_nothing_else(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [{"prompt_token_ids": IDS[i : i + 9]} for i in range(8)]
    with engine(MODEL, async_scheduling=True, **ROOM) as llm:
        expected = run(llm, asked, ANSWER)
        executor = llm.llm_engine.model_executor

        def fail(_: Any) -> Any:
            raise RuntimeError("the device fails")

        monkeypatch.setattr(executor, failing, fail)
        with pytest.raises(RuntimeError, match="the device fails"):
            run(llm, asked, ANSWER)
        monkeypatch.undo()
        assert_empty(llm)
        again = run(llm, asked, ANSWER)
    if settings.current().exact:
        assert tokens_of(again) == tokens_of(expected)
