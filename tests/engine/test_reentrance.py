"""Functions of the user's that a call of the engine runs, and that use the engine in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tqdm import tqdm

from tests.engine.engines import BLOCK_SIZE, engine, greedy, new_llm, run, tiny_model, tokens_of
from tests.engine.threads import at_once
from vllm_blend import LLM
from vllm_blend.engine.driver import Inbox

TINY = tiny_model("llama")
PROMPTS: list[Any] = [{"prompt_token_ids": [5, 6, 7, start]} for start in range(8, 12)]


def on_third_token(function: Callable[[], Any]) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    """Return a logits processor that calls `function` once in mid-run and changes nothing."""

    def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) == 2:
            function()
        return logits

    return process


USES: dict[str, Callable[[LLM], Any]] = {
    "step": lambda llm: llm.llm_engine.step(),
    "abort": lambda llm: llm.llm_engine.abort_request(list(llm.llm_engine.requests.by_id)),
    "generate": lambda llm: run(llm, PROMPTS, greedy(2)),
    "add_request": lambda llm: llm.llm_engine.add_request("late", PROMPTS[0], greedy(2)),
    "encode_chunks": lambda llm: llm.encode_chunks([5], [[6, 7]]),
    "set_tokenizer": lambda llm: llm.set_tokenizer(llm.get_tokenizer()),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
    "shutdown": lambda llm: llm.shutdown(),
}


@pytest.mark.parametrize("use", USES)
def test_a_step_is_not_changed_from_within(use: str) -> None:
    refused: list[str] = []

    def misuse() -> None:
        llm.get_metrics()  # looking is no change
        assert llm.llm_engine.has_unfinished_requests()
        with pytest.raises(RuntimeError, match="cannot change the engine or run requests") as error:
            USES[use](llm)
        refused.append(str(error.value))

    with engine(TINY) as llm:
        params = [greedy(6, ignore_eos=True) for _ in PROMPTS]
        expected = run(llm, PROMPTS, params)
        params[2].logits_processors = [on_third_token(misuse)]
        outputs = run(llm, PROMPTS, params)
        assert [output.error for output in outputs] == [None] * len(PROMPTS)
        assert tokens_of(outputs) == tokens_of(expected)
    assert len(refused) == 1


def test_what_is_closed_within_a_step_ends_after_it() -> None:
    with engine(TINY, block_size=BLOCK_SIZE) as llm:
        inner, inbox, expected = llm.llm_engine, Inbox(), run(llm, PROMPTS, greedy(6, ignore_eos=True))
        inner.driver.expect("closed", inbox)
        prompt = [5] * (BLOCK_SIZE - 2)  # whose first block is full, and made findable, with this very step
        inner.add_request("closed", {"prompt_token_ids": prompt}, greedy(9, ignore_eos=True))
        close = on_third_token(lambda: inner.driver.close(inbox))
        outputs = run(llm, PROMPTS, greedy(6, ignore_eos=True, logits_processors=[close]))
        assert tokens_of(outputs) == tokens_of(expected)
        assert not inner.has_request("closed")


def test_what_ends_a_thread_fails_its_own_request_only() -> None:
    def end_thread() -> None:
        raise SystemExit(3)

    with engine(TINY) as llm:
        expected = run(llm, PROMPTS[0], greedy(6, ignore_eos=True))
        bad = greedy(6, ignore_eos=True, logits_processors=[on_third_token(end_thread)])
        [outputs] = at_once(lambda: run(llm, [PROMPTS[0]] * 2, [bad, greedy(6, ignore_eos=True)]))
        assert outputs[0].error == "logits_processors[0] raised SystemExit: 3"
        assert tokens_of(outputs[1:]) == tokens_of(expected)
        with pytest.raises(SystemExit):  # in the main thread it may be the handler of a signal that raises it
            run(llm, PROMPTS[0], bad)


@pytest.mark.parametrize("others", [0, 2])
def test_a_progress_bar_may_use_the_engine(others: int) -> None:
    nested = []

    def update(bar: Any, n: float | None = 1) -> Any:
        nested.extend(run(llm, PROMPTS[1], greedy(3, ignore_eos=True)))
        return tqdm.update(bar, n)

    bar_class = type("Bar", (tqdm,), {"update": update})

    with engine(TINY) as llm:
        params = [greedy(count, ignore_eos=True) for count in (3, 9, 3, 6)]
        expected = tokens_of(run(llm, PROMPTS, params))
        jobs = [lambda: llm.generate(PROMPTS, params, use_tqdm=bar_class)] + [
            lambda: run(llm, PROMPTS, params)
        ] * others
        for outputs in at_once(*jobs):
            assert tokens_of(outputs) == expected
        assert tokens_of(nested) == [expected[1][:3]] * len(PROMPTS)


def test_shutdown_may_be_called_by_several_threads() -> None:
    llm = new_llm(TINY)
    assert at_once(*[llm.shutdown] * 6) == [None] * 6


def test_prompt_token_ids_of_an_output_belong_to_its_reader() -> None:
    with engine(TINY) as llm:
        llm.llm_engine.add_request("read", PROMPTS[0], greedy(3, ignore_eos=True))
        while llm.llm_engine.has_unfinished_requests():
            [output] = llm.llm_engine.step()
            assert output.prompt_token_ids == PROMPTS[0]["prompt_token_ids"]
            output.prompt_token_ids.clear()
