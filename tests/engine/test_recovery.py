"""What a failure in the middle of the work leaves behind: nothing that changes a later answer."""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.compare import assert_same_logprobs, blend_of
from tests.engine.engines import DEMO, demo_prompt, greedy, new_llm
from vllm_blend import LLM, RequestOutput

GREEDY = greedy(6, logprobs=0, ignore_eos=True)


class Interrupted(BaseException):
    """An interruption like a Ctrl-C."""


def make(**options: Any) -> LLM:
    return new_llm(max_num_seqs=8, **{"enable_blending": True, **options})


def prompts(count: int = 2, **options: Any) -> list[Any]:
    return [demo_prompt(index, **options) for index in range(count)]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]


def assert_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, before in zip(outputs, expected, strict=True):
        assert_same_logprobs(output, before)


def assert_idle(llm: LLM) -> None:
    engine = llm.llm_engine
    assert not engine.has_unfinished_requests() and engine.get_num_unfinished_requests() == 0
    assert engine.blocks.num_free_blocks == engine.blocks.num_usable_blocks


@pytest.fixture(scope="module")
def undisturbed() -> list[RequestOutput]:
    """The answers of an engine that nothing has happened to."""
    return make().generate(prompts(), GREEDY, use_tqdm=False)


@pytest.mark.parametrize("failing_step", range(4))
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_step_changes_no_later_answer(
    failing_step: int, when: str, monkeypatch: pytest.MonkeyPatch, undisturbed: list[RequestOutput]
) -> None:
    llm = make()
    execute, calls = llm.llm_engine.model_executor.execute_model, iter(range(1000))

    def failing(scheduled: Any) -> Any:
        fails = next(calls) == failing_step
        if fails and when == "before":
            raise Interrupted
        result = execute(scheduled)
        if fails:
            raise Interrupted
        return result

    monkeypatch.setattr(llm.llm_engine.model_executor, "execute_model", failing)
    with pytest.raises(Interrupted):
        llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert_idle(llm)
    assert_same(llm.generate(prompts(), GREEDY, use_tqdm=False), undisturbed)
    assert_idle(llm)


def test_a_failed_step_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are collected once and blends stay blends, whichever step has to run twice."""
    [expected] = make().generate(prompts(1), GREEDY, use_tqdm=False)
    llm = make()
    engine = llm.llm_engine
    execute = engine.model_executor.execute_model
    failures = 0

    def every_step_fails_once(scheduled: Any) -> Any:
        nonlocal failures
        result = execute(scheduled)
        failures += 1
        if failures % 2:
            raise Interrupted
        return result

    monkeypatch.setattr(engine.model_executor, "execute_model", every_step_fails_once)
    engine.add_request("again", prompts(1)[0], GREEDY, final_only=True)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        try:
            outputs += engine.step()
        except Interrupted:
            continue
    [output] = outputs
    assert blend_of(output) == blend_of(expected)
    assert_same([output], [expected])


def test_tokens_are_counted_that_came_before_an_error_in_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer may raise anything: the tokens that were entered before are not drawn again."""
    llm = make()
    engine = llm.llm_engine
    for name in ("a", "b"):
        engine.add_request(name, {"prompt_token_ids": [5, 6, 7]}, GREEDY)
    _, second = (group.requests[0] for group in dict.fromkeys(engine.requests.groups.values()))
    assert second.detokenizer is not None
    append, calls = second.detokenizer.append, iter(range(1000))

    def failing(token_id: int, ends: bool = False) -> str | None:
        if next(calls) == 2:
            raise Interrupted
        return append(token_id, ends)

    monkeypatch.setattr(second.detokenizer, "append", failing)
    outputs: dict[str, int] = {}
    failures = 0
    while engine.has_unfinished_requests():
        try:
            outputs |= {output.request_id: len(output.outputs[0].token_ids) for output in engine.step()}
        except Interrupted:
            failures += 1
    assert failures == 1
    counted = {metric.name: metric.value for metric in engine.get_metrics()}["vllm:generation_tokens"]
    assert counted == sum(outputs.values()) == 12


def test_aborting_the_last_request_that_needs_a_chunk_stops_its_encoding() -> None:
    llm = make(max_num_batched_tokens=16)
    engine = llm.llm_engine
    for name in ("a", "b"):
        engine.add_request(name, prompts(1)[0], GREEDY)
    engine.step()
    engine.abort_request("a")
    assert engine.has_unfinished_requests()
    engine.abort_request("b")
    assert_idle(llm)
    assert len(llm.encode_chunks("Passages:\n", ["One."])) == 1


@pytest.mark.parametrize("bad", [{"prompt_token_ids": [float("inf")]}, {"prompt_token_ids": [None]}, 7, None])
def test_what_cannot_be_queued_leaves_nothing_queued(bad: Any) -> None:
    llm = make()
    good, refused = llm.generate([prompts(1)[0], bad], GREEDY, use_tqdm=False)
    assert good.error is None and refused.error
    with pytest.raises(TypeError, match=r"sampling_params\[1\]"):
        llm.generate(prompts(2), [GREEDY, None], use_tqdm=False)  # type: ignore[list-item]
    assert_idle(llm)


def test_users_copies_of_chunk_kv_are_their_own() -> None:
    expected = make().generate(prompts(1), GREEDY, use_tqdm=False)
    llm = make()
    prompt = prompts(1)[0]
    with torch.inference_mode():
        for chunk in llm.encode_chunks(prompt["prefix"], prompt["chunks"]):
            chunk.v.zero_()
    assert_same(llm.generate([prompt], GREEDY, use_tqdm=False), expected)


def test_retrained_weights_make_other_chunks(tmp_path: Path) -> None:
    """A single matrix in the middle of the file is enough."""
    shutil.copytree(DEMO, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.layers.5.mlp.up_proj.weight"] *= 1.5
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    other = new_llm(str(tmp_path / "model"), enable_blending=True, max_num_seqs=8).llm_engine
    ours = make().llm_engine
    assert ours.identify_chunks("Passages:\n", ["One."]) != other.identify_chunks("Passages:\n", ["One."])


def test_engines_in_threads_do_not_meet() -> None:
    engines = [make(enable_blending=False, enable_prefix_caching=False) for _ in range(2)]
    ids: list[Any] = [{"prompt_token_ids": list(range(10 + i, 60 + i))} for i in range(2)]
    expected = [tokens(llm.generate([p], GREEDY, use_tqdm=False)) for llm, p in zip(engines, ids, strict=True)]
    found: list[list[Any]] = [[], []]

    def work(index: int) -> None:
        for _ in range(15):
            found[index].append(tokens(engines[index].generate([ids[index]], GREEDY, use_tqdm=False)))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == [[expected[0]] * 15, [expected[1]] * 15]


def test_blend_settings_need_an_engine_that_blends() -> None:
    llm = make(enable_blending=False)
    with pytest.raises(ValueError, match="enable_blending=True"):
        llm.generate(prompts(1, blend_selector="full"), GREEDY, use_tqdm=False)
    tokens(llm.generate(prompts(1), GREEDY, use_tqdm=False))
