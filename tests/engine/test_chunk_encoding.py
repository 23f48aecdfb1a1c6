"""Chunks encoded ahead of any question are those that prompts look for, and KV from elsewhere has to fit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import settings, tolerances
from tests.engine.engines import PATIENCE, memory_store, new_llm
from vllm_blend import LLM, SamplingParams
from vllm_blend.engine import driver
from vllm_blend.engine.driver import Inbox
from vllm_blend.kv_store.chunk_kv import ChunkKV

PREFIX, CHUNKS = "Answer the question.\n\n", ["Yiamdond is a city.\n\n", "It stands on the river Waindkais.\n\n"]
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return new_llm(enable_blending=True)


@pytest.fixture(autouse=True)
def fresh(llm: LLM) -> None:
    llm.llm_engine.chunk_store.clear()


def prompt(chunks: list[str]) -> Any:
    return {"prefix": PREFIX, "chunks": chunks, "suffix": "Question: Where?\nAnswer:"}


def test_what_is_encoded_ahead_is_what_prompts_look_for(llm: LLM) -> None:
    engine = llm.llm_engine
    prefix, ids = engine.identify_chunks(PREFIX, CHUNKS)
    kvs = llm.encode_chunks(PREFIX, CHUNKS)
    assert [kv.num_tokens for kv in kvs] == [len(chunk.token_ids) for chunk in ids]
    assert prefix is not None and prefix.token_ids[0] == llm.get_tokenizer().bos_token_id
    assert {prefix.key, *(chunk.key for chunk in ids)} == set(memory_store(llm)._chunks)
    encoded = engine.composer.num_encoded
    [output] = llm.generate(prompt(CHUNKS[::-1]), GREEDY, use_tqdm=False)
    assert output.blend is not None and engine.composer.num_encoded == encoded


def test_it_is_what_a_prompt_would_have_stored(llm: LLM) -> None:
    ahead = llm.encode_chunks(PREFIX, CHUNKS)
    llm.llm_engine.chunk_store.clear()
    llm.generate(prompt(CHUNKS), GREEDY, use_tqdm=False)
    _, ids = llm.llm_engine.identify_chunks(PREFIX, CHUNKS)
    for chunk, kv in zip(ids, ahead, strict=True):
        stored = llm.llm_engine.chunk_store.get(chunk.key)
        assert stored is not None
        tolerances.check_kv(stored.k, kv.k)
        tolerances.check_kv(stored.v, kv.v)


def test_a_prefix_is_a_chunk_with_nothing_before_it(llm: LLM) -> None:
    prefix, _ = llm.llm_engine.identify_chunks(PREFIX, CHUNKS)
    assert prefix is not None
    nothing, [alone] = llm.llm_engine.identify_chunks([], [prefix.token_ids])
    assert nothing is None and alone == prefix
    assert llm.encode_chunks([], [prefix.token_ids])[0].num_tokens == len(prefix.token_ids)
    assert llm.llm_engine.identify_chunks(PREFIX, []) == (prefix, []) and llm.encode_chunks(PREFIX, []) == []


def test_equal_chunks_are_encoded_once(llm: LLM) -> None:
    before = llm.llm_engine.composer.num_encoded
    first, second, third = llm.encode_chunks(PREFIX, [CHUNKS[0], CHUNKS[1], CHUNKS[0]])
    assert torch.equal(first.k, third.k) and torch.equal(first.v, third.v)
    assert first.k.shape != second.k.shape or not torch.equal(first.k, second.k)
    assert llm.llm_engine.composer.num_encoded - before == 3  # the prefix and two chunks


def test_chunks_are_given_back_even_where_the_store_has_no_room_for_them(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.llm_engine.chunk_store.memory, "budget_bytes", 1)
    assert len(llm.encode_chunks(PREFIX, CHUNKS)) == 2 and len(llm.llm_engine.chunk_store) == 0


def test_loaded_kv_is_used(llm: LLM) -> None:
    engine = llm.llm_engine
    _, ids = engine.identify_chunks(PREFIX, CHUNKS)
    kvs = llm.encode_chunks(PREFIX, CHUNKS)
    engine.chunk_store.clear()
    for chunk, kv in zip(ids, kvs, strict=True):
        llm.load_chunk(chunk, kv)
    encoded = engine.composer.num_encoded
    llm.generate(prompt(CHUNKS), GREEDY, use_tqdm=False)
    assert engine.composer.num_encoded == encoded + 1  # the prefix only


@pytest.mark.parametrize(
    "change",
    [
        lambda k: k[:, 1:],
        lambda k: k[1:],
        lambda k: k.to(torch.float64),
        lambda k: k[..., :-1],
    ],
)
def test_kv_that_does_not_fit_is_refused(llm: LLM, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    _, [chunk] = llm.llm_engine.identify_chunks(PREFIX, CHUNKS[:1])
    [kv] = llm.encode_chunks(PREFIX, CHUNKS[:1])
    llm.llm_engine.chunk_store.clear()
    with pytest.raises(ValueError, match=f"chunk {chunk.key} is .* but this model's is {settings.current().dtype}"):
        llm.load_chunk(chunk, ChunkKV(change(kv.k), change(kv.v)))
    assert len(llm.llm_engine.chunk_store) == 0


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
@pytest.mark.parametrize("part", ["k", "v"])
def test_kv_that_would_fail_its_prompts_is_refused(llm: LLM, part: str, number: float) -> None:
    _, [chunk] = llm.llm_engine.identify_chunks(PREFIX, CHUNKS[:1])
    [kv] = llm.encode_chunks(PREFIX, CHUNKS[:1])
    getattr(kv, part)[-1, -1, -1, -1] = number
    with pytest.raises(ValueError, match=f"chunk {chunk.key} has numbers that are NaN or infinite"):
        llm.load_chunk(chunk, kv)


def test_mistakes_are_named(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"chunks\[1\] has \d+ tokens with its prefix, more than max_model_len=1024"):
        llm.encode_chunks(PREFIX, [CHUNKS[0], "city " * 1100])
    with pytest.raises(ValueError, match=r"chunks\[0\] is empty"):
        llm.encode_chunks(PREFIX, [""])
    with pytest.raises(TypeError, match="chunks must be a list"):
        llm.encode_chunks(PREFIX, "one text")
    assert not llm.llm_engine.has_unfinished_requests()


def test_running_requests_are_not_swallowed(llm: LLM) -> None:
    """They go on meanwhile, and their outputs are there for the next step."""
    [expected] = llm.generate("Where?", GREEDY, use_tqdm=False)
    engine = llm.llm_engine
    engine.add_request("r", "Where?", GREEDY)
    assert len(llm.encode_chunks(PREFIX, CHUNKS)) == 2
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].finished and outputs[-1].outputs == expected.outputs


def test_it_ends_with_the_step_of_another_thread_that_encodes_the_last_chunk(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread goes on driving until the call has returned: only a ring can end its wait before."""
    monkeypatch.setattr(driver, "MISSED_WAKEUP_SECONDS", 10 * PATIENCE)
    engine, ended, found = llm.llm_engine, threading.Event(), []
    engine.add_request("r", "Where?", SamplingParams(temperature=0, max_tokens=900, ignore_eos=True))

    def encode() -> None:
        found.extend(llm.encode_chunks(PREFIX, CHUNKS))
        ended.set()

    thread = threading.Thread(target=encode, daemon=True)

    def drive_until_encoded() -> bool:
        if engine.lock.held or not engine.scheduler.running:  # this thread does not drive yet
            return False
        if thread.ident is None:
            thread.start()
            while thread.is_alive() and len(engine.driver._waiting) < 2:
                time.sleep(0)
        return len(engine.chunk_store) == 3 and (ended.wait(PATIENCE) or pytest.fail("the call hangs"))

    engine.driver.wait(Inbox(), drive_until_encoded)
    assert len(found) == 2 and engine.has_request("r")
    engine.abort_request("r")


def test_an_interruption_leaves_the_engine_idle_and_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm.llm_engine
    free = engine.blocks.num_free_blocks
    step = engine.step

    def interrupted() -> Any:
        step()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.encode_chunks(PREFIX, CHUNKS)
    monkeypatch.undo()
    assert not engine.has_unfinished_requests() and engine.blocks.num_free_blocks == free
    assert len(llm.encode_chunks(PREFIX, CHUNKS)) == 2
