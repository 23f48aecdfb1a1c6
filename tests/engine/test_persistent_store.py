"""Chunk KV that outlives its process, and arrives while others compute; answers are those of an engine without it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import settings
from tests.blend.prompts import assert_counts_add_up, tiny_prompt
from tests.engine.compare import assert_same_logprobs, blend_of
from tests.engine.engines import (
    DEMO,
    PATIENCE,
    ROOT,
    TINY_VOCABULARY,
    assert_empty,
    close_store,
    demo_prompt,
    engine,
    greedy,
    new_llm,
    run,
    threads,
    tiny_model,
    tokens_of,
)
from vllm_blend import LLM, RequestOutput
from vllm_blend.config import EngineConfig
from vllm_blend.engine import chunk_stores, step_loop
from vllm_blend.engine_args import EngineArgs
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.export_folder import export_folder
from vllm_blend.kv_store.import_folder import NO_MODEL, import_folder
from vllm_blend.kv_store.store_config import DiskStoreConfig
from vllm_blend.kv_store.tiered import TieredChunkStore
from vllm_blend.kv_store.tiers import MEMORY, ChunkLoad

TINY = tiny_model("llama")
PARAMS = greedy(8, logprobs=2, ignore_eos=True)
SECONDS = PATIENCE  # that nothing here takes
PIECES = 4  # of `tiny_prompt`: its prefix and three chunks, one of which stands there twice


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


def persistent(path: Path, **arguments: Any) -> LLM:
    return new_llm(TINY, **({"enable_blending": True, "chunk_store_path": str(path)} | arguments))


def store_of(llm: LLM) -> TieredChunkStore:
    store = llm.llm_engine.chunk_store
    assert store.below
    return store


def metrics(llm: LLM) -> dict[str, float]:
    return {metric.name.removeprefix("vllm_blend:"): metric.value for metric in llm.get_metrics()}


def end_loads(llm: LLM) -> None:
    """Wait for the threads that load chunks. A prompt that runs while its chunks arrive may end before these threads
    do: what they bring comes into memory, and is counted, afterwards."""
    composer, deadline = llm.llm_engine.composer, time.monotonic() + PATIENCE
    loader = composer.loader
    assert loader is not None
    while (composer._loading or loader._late or loader._unwanted) and time.monotonic() < deadline:
        assert not composer.poll()
        time.sleep(0.001)
    assert not (composer._loading or loader._late or loader._unwanted)


def cold(llm: LLM) -> None:
    """Leave everything that was stored on the disk, and nothing in memory."""
    end_loads(llm)
    assert store_of(llm).flush(SECONDS)
    llm.llm_engine.chunk_store.clear()


def expected(prompt: Any, params: Any = PARAMS) -> RequestOutput:
    with engine(TINY, enable_blending=True) as llm:
        return run(llm, prompt, params)[0]


class Held:
    """Reads of a tier that wait until they are let through, of whole chunks."""

    def __init__(self, llm: LLM) -> None:
        self.opened, self.entered = threading.Event(), threading.Event()
        tier = store_of(llm).below[0]
        read, tier.read_many = tier.storage.get, None

        def held(key: str, allocate: Any = None, expected: Any = None) -> ChunkKV | None:
            self.entered.set()
            assert self.opened.wait(SECONDS)
            return read(key, allocate, expected)

        tier.storage.get = held  # type: ignore[method-assign]


PROGRAM = """
import json, sys
from vllm_blend import LLM, SamplingParams

def main():
    arguments, prompts = json.load(sys.stdin)
    llm = LLM(**arguments)
    llm.llm_engine.composer.loader.timeout = 120.0  # however slow the machine, a chunk that is there is loaded
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    print(json.dumps([[o.outputs[0].token_ids for o in outputs], [vars(o.blend) for o in outputs], metrics]))

main()
"""


def in_a_process(path: Path, prompts: list[Any]) -> Any:
    own = {"model": DEMO, "enable_blending": True, "blend_encoding_context": "page"}  # as `new_llm` has it
    arguments = settings.current().engine_arguments() | own
    given = json.dumps([arguments | {"chunk_store_path": str(path)}, prompts])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=given, capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_new_process_answers_from_the_disk(tmp_path: Path) -> None:
    """The first one exits at once: what it still had to write is written. The second is the test's."""
    prompts = [demo_prompt(index) for index in range(3)]
    first = in_a_process(tmp_path, prompts)
    llm = new_llm(DEMO, enable_blending=True, chunk_store_path=str(tmp_path))
    outputs = run(llm, prompts, greedy(8))
    found = {metric.name: metric.value for metric in llm.get_metrics()}
    close_store(llm)
    second: list[Any] = [tokens_of(outputs), [vars(output.blend) for output in outputs], found]
    assert first[0] == second[0]
    for before, after in zip(first[1], second[1], strict=True):
        assert before["num_recomputed_tokens"] == after["num_recomputed_tokens"]
        assert before["num_encoded_tokens"] > 0 == after["num_encoded_tokens"]
    assert first[2]["vllm_blend:chunks_encoded"] > 10
    assert first[2]["vllm_blend:chunk_store_disk_hits"] == 0
    assert second[2]["vllm_blend:chunks_encoded"] == 0
    assert second[2]["vllm_blend:chunk_store_disk_hits"] == first[2]["vllm_blend:chunks_encoded"]
    assert second[2]["vllm_blend:chunk_store_disk_misses"] == 0
    assert second[2]["vllm_blend:chunk_store_disk_bytes_written"] == 0


@pytest.mark.parametrize("stored", ["auto", "int8", "fp8"])
def test_another_engine_reuses_what_one_has_stored(tmp_path: Path, stored: str) -> None:
    writing = persistent(tmp_path, chunk_store_format=stored)
    outputs = run(writing, tiny_prompt(), PARAMS)
    cold(writing)
    reading = persistent(tmp_path, chunk_store_format=stored)
    [output] = run(reading, tiny_prompt(), PARAMS)
    end_loads(reading)
    found = metrics(reading)
    assert found["chunks_encoded"] == 0 and found["chunk_store_disk_hits"] == PIECES
    assert found["chunk_store_disk_chunks"] == PIECES and found["chunk_store_disk_bytes"] > 0
    assert blend_of(output) == blend_of(outputs[0])
    assert output.num_found_tokens == {"disk": output.num_cached_tokens} and not outputs[0].num_found_tokens
    assert_counts_add_up(output)
    if stored == "auto":
        assert_same_logprobs(output, expected(tiny_prompt()))
    [again] = run(reading, tiny_prompt(), PARAMS)
    assert metrics(reading)["chunk_store_disk_hits"] == PIECES, "what was loaded is in memory"
    assert_same_logprobs(again, output)
    for llm in (writing, reading):
        assert_empty(llm)
        store_of(llm).close()


@pytest.mark.cpu_only
def test_chunks_of_another_dtype_are_misses(tmp_path: Path) -> None:
    """dtype="auto" may differ between two machines that share a store."""
    writing = persistent(tmp_path, dtype="float32")
    run(writing, tiny_prompt(), PARAMS)
    cold(writing)
    reading = persistent(tmp_path, dtype="bfloat16")
    run(reading, tiny_prompt(), PARAMS)
    cold(reading)
    found = metrics(reading)
    assert found["chunk_store_disk_hits"] == 0 and found["chunks_encoded"] == PIECES
    assert found["chunk_store_disk_chunks"] == 2 * PIECES


def test_what_an_engine_stored_goes_out_as_folders_and_in_again(tmp_path: Path) -> None:
    """Chunks that came from a server go out too: engines tell the store the content of what they store."""
    first = new_llm(TINY, enable_blending=True, chunk_store_url=(tmp_path / "server").as_uri())
    [output] = run(first, tiny_prompt(), PARAMS)
    cold(first)
    second = persistent(tmp_path / "a", chunk_store_url=(tmp_path / "server").as_uri())
    run(second, tiny_prompt(), PARAMS)
    cold(second)
    third = persistent(tmp_path / "b")
    run(third, tiny_prompt(), PARAMS)
    cold(third)
    for name in ("a", "b"):
        assert export_folder(tmp_path / name, tmp_path / f"{name}-pt") == {"written": PIECES}
        settings = DiskStoreConfig(tmp_path / f"{name}-again", 1 << 20, NO_MODEL)
        assert import_folder(tmp_path / f"{name}-pt", settings) == {"stored": PIECES}
        llm = persistent(tmp_path / f"{name}-again")
        assert_same_logprobs(run(llm, tiny_prompt(), PARAMS)[0], output)
        assert metrics(llm)["chunks_encoded"] == 0


def test_another_models_store_is_a_store_without_these_chunks(tmp_path: Path) -> None:
    first = persistent(tmp_path)
    run(first, tiny_prompt(), PARAMS)
    cold(first)
    other = new_llm(tiny_model("qwen3"), enable_blending=True, chunk_store_path=str(tmp_path))
    run(other, tiny_prompt(), PARAMS)
    assert metrics(other)["chunks_encoded"] == PIECES and metrics(other)["chunk_store_disk_hits"] == 0
    store_of(other).flush(SECONDS)
    assert metrics(other)["chunk_store_disk_chunks"] == 2 * PIECES


@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_rounded_chunks_of_others_are_no_chunks_for_an_engine_that_does_not_round(tmp_path: Path, tier: str) -> None:
    """Format "auto" is bit for bit, whatever else uses the folder; one that rounds takes what is better."""
    place = {"chunk_store_path": str(tmp_path)} if tier == "disk" else {"chunk_store_url": tmp_path.as_uri()}
    for stored, encoded, faults in (("int8", PIECES, 0), ("auto", PIECES, PIECES), ("auto", 0, 0), ("int8", 0, 0)):
        llm = new_llm(TINY, enable_blending=True, chunk_store_format=stored, **place)
        [output] = run(llm, tiny_prompt(), PARAMS)
        cold(llm)
        assert metrics(llm)["chunks_encoded"] == encoded
        assert metrics(llm)[f"chunk_store_{tier}_faults"] == faults
        assert_same_logprobs(output, expected(tiny_prompt()))
        store_of(llm).close()


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_recomputing_everything_recomputes_what_was_rounded(tmp_path: Path, stored: str) -> None:
    """The prefix too, which stands where it was encoded and is exact otherwise."""
    everything: dict[str, Any] = {"chunk_store_format": stored, "blend_recompute_ratio": 1.0}
    writing = persistent(tmp_path, **everything)
    run(writing, tiny_prompt(), PARAMS)
    cold(writing)
    reading = persistent(tmp_path, **everything)
    [output] = run(reading, tiny_prompt(), PARAMS)
    end_loads(reading)
    assert metrics(reading)["chunk_store_disk_hits"] == PIECES
    assert output.blend is not None and output.blend.num_exact_tokens == 0
    with engine(TINY) as llm:
        [full] = run(llm, tiny_prompt(), PARAMS)
    assert_same_logprobs(output, full)


def test_others_go_on_while_chunks_are_loaded(tmp_path: Path) -> None:
    llm = persistent(tmp_path)
    inner = llm.llm_engine
    run(llm, tiny_prompt(), PARAMS)
    cold(llm)
    held = Held(llm)
    inner.add_request("blended", tiny_prompt(), PARAMS)  # type: ignore[arg-type]
    inner.add_request("plain", {"prompt_token_ids": [5, 6, 7]}, PARAMS)
    done: dict[str, RequestOutput] = {}
    while "plain" not in done:
        done |= {output.request_id: output for output in inner.step() if output.finished}
    assert list(done) == ["plain"] and inner.has_unfinished_requests()
    start, steps = time.monotonic(), 0
    while time.monotonic() < start + 0.3:
        assert inner.step() == []
        steps += 1
    assert steps < 30, "it spins while there is nothing to do"
    held.opened.set()
    while "blended" not in done:
        done |= {output.request_id: output for output in inner.step() if output.finished}
    assert_same_logprobs(done["blended"], expected(tiny_prompt()))
    assert metrics(llm)["chunks_encoded"] == PIECES
    taken = done["blended"].metrics
    assert taken is not None and taken.first_token_time is not None and taken.first_scheduled_time is not None
    assert taken.first_token_time - taken.first_scheduled_time > 0.3, "time to first token leaves the loading out"
    assert_empty(llm)


def test_late_chunks_are_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = persistent(tmp_path)
    run(llm, tiny_prompt(), PARAMS)
    cold(llm)
    held = Held(llm)
    loader = llm.llm_engine.composer.loader
    assert loader is not None
    loader.timeout = 0.1
    with caplog.at_level(logging.WARNING):
        [output] = run(llm, tiny_prompt(), PARAMS)
    assert_same_logprobs(output, expected(tiny_prompt()))
    assert metrics(llm)["chunks_encoded"] == 2 * PIECES and metrics(llm)["chunk_loads_late"] == PIECES
    assert len([record for record in caplog.records if "did not arrive" in record.message]) == 1
    assert_empty(llm)
    held.opened.set()
    assert_same_logprobs(run(llm, tiny_prompt(), PARAMS)[0], output)
    assert_empty(llm)


@pytest.mark.parametrize("steps", [0, 2])
def test_aborting_while_chunks_are_loaded_leaves_nothing(tmp_path: Path, steps: int) -> None:
    llm = persistent(tmp_path)
    inner = llm.llm_engine
    run(llm, tiny_prompt(), PARAMS)
    cold(llm)
    held = Held(llm)
    inner.add_request("a", tiny_prompt(), PARAMS)  # type: ignore[arg-type]
    inner.add_request("b", tiny_prompt(), PARAMS)  # type: ignore[arg-type]
    assert held.entered.wait(SECONDS)
    for _ in range(steps):
        assert inner.step() == []
    inner.abort_request("a")
    assert inner.composer.is_loading, "another request waits for them"
    inner.abort_request("b")
    composer = inner.composer
    assert_empty(llm)
    assert not composer._waiting and not composer._loading and not composer._encoding
    held.opened.set()
    assert_same_logprobs(run(llm, tiny_prompt(), PARAMS)[0], expected(tiny_prompt()))
    assert_empty(llm)


def test_an_interrupted_encoding_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = persistent(tmp_path)
    inner = llm.llm_engine
    prefix, chunks = tiny_prompt()["prefix"], tiny_prompt()["chunks"]
    before = llm.encode_chunks(prefix, chunks)
    cold(llm)
    held = Held(llm)

    def interrupted() -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(inner, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.encode_chunks(prefix, chunks)
    assert_empty(llm)
    held.opened.set()
    encoded = inner.composer.num_encoded
    after = llm.encode_chunks(prefix, chunks)
    assert inner.composer.num_encoded == encoded
    assert all(a.k.equal(b.k) and a.v.equal(b.v) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("fault", ["flipped", "truncated", "gone"])
def test_damaged_chunks_are_computed_again(tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    llm = persistent(tmp_path)
    run(llm, tiny_prompt(), PARAMS)
    cold(llm)
    [segment] = tmp_path.rglob("*.segment")
    if fault == "flipped":
        data = bytearray(segment.read_bytes())
        for position in range(0, len(data), 512):
            data[position] ^= 0x40
        segment.write_bytes(data)
    elif fault == "truncated":
        os.truncate(segment, 4096)
    else:
        segment.unlink()
    reading = persistent(tmp_path)
    with caplog.at_level(logging.WARNING):
        [output] = run(reading, tiny_prompt(), PARAMS)
    assert_same_logprobs(output, expected(tiny_prompt()))
    found = metrics(reading)
    assert found["chunks_encoded"] + found["chunk_store_disk_hits"] == PIECES
    assert found["chunk_store_disk_faults"] == found["chunks_encoded"] >= PIECES - 1
    assert "it will be computed again" in caplog.text
    assert store_of(reading).flush(SECONDS)
    third = persistent(tmp_path)
    assert_same_logprobs(run(third, tiny_prompt(), PARAMS)[0], output)
    assert metrics(third)["chunks_encoded"] == 0, "what was computed again was stored again"


def test_a_store_that_raises_costs_time_only(tmp_path: Path) -> None:
    llm = persistent(tmp_path)

    def broken(key: str, allocate: Any = None, expected: Any = None) -> ChunkKV | None:
        raise RuntimeError("no such luck")

    tier = store_of(llm).below[0]
    tier.storage.get, tier.read_many = broken, None  # type: ignore[method-assign]
    assert_same_logprobs(run(llm, tiny_prompt(), PARAMS)[0], expected(tiny_prompt()))
    assert_empty(llm)


def prompts(count: int) -> list[dict[str, Any]]:
    ids = [(11 * i * i + 5 * i + 2) % TINY_VOCABULARY for i in range(400)]
    return [
        {"prefix": ids[:4], "chunks": [ids[9 * (i + j) : 9 * (i + j) + 9] for j in range(3)], "suffix": [i, 7]}
        for i in range(count)
    ]


def test_many_prompts_over_a_small_memory(tmp_path: Path) -> None:
    """Far more prompts come than memory holds: only some have chunks there at a time, and all are answered."""
    with engine(TINY, enable_blending=True) as plain:
        wanted = run(plain, prompts(30), PARAMS)
    probe = persistent(tmp_path)
    run(probe, prompts(30), PARAMS)
    cold(probe)
    size = probe.llm_engine.composer.bytes_per_token
    tokens = 70  # of two prompts
    small = persistent(tmp_path, blend_chunk_cache_gib=tokens * size / 2**30)
    admission = small.llm_engine.composer._admission
    most = 0
    for index, prompt in enumerate(prompts(30)):
        small.llm_engine.add_request(str(index), prompt, PARAMS)  # type: ignore[arg-type]
        most = max(most, len(admission._admitted))
    assert most == 2
    done: dict[str, RequestOutput] = {}
    while small.llm_engine.has_unfinished_requests():
        for output in small.llm_engine.step():
            if output.finished:
                done[output.request_id] = output
        assert store_of(small).num_bytes <= tokens * size
    for index, output in enumerate(wanted):
        assert_same_logprobs(done[str(index)], output)
    assert metrics(small)["chunks_encoded"] == 0
    assert_empty(small)


def test_prompts_that_wait_for_their_turn_can_be_aborted(tmp_path: Path) -> None:
    llm = persistent(tmp_path, blend_chunk_cache_gib=1e-6)
    for index, prompt in enumerate(prompts(6)):
        llm.llm_engine.add_request(str(index), prompt, PARAMS)  # type: ignore[arg-type]
    llm.llm_engine.abort_request([str(index) for index in (0, 2, 3, 5)])
    done = set()
    while llm.llm_engine.has_unfinished_requests():
        done |= {output.request_id for output in llm.llm_engine.step() if output.finished}
    assert done == {"1", "4"}
    assert_empty(llm)


def test_admission_on_second_use(tmp_path: Path) -> None:
    llm = persistent(tmp_path, chunk_store_admit_on_second_use=True)
    for count in (0, PIECES):
        run(llm, tiny_prompt(), PARAMS)
        cold(llm)
        assert metrics(llm)["chunk_store_disk_chunks"] == count
    run(llm, tiny_prompt(), PARAMS)
    assert metrics(llm)["chunks_encoded"] == 2 * PIECES


def test_a_remote_store_fills_the_disk_of_another_machine(tmp_path: Path) -> None:
    url = (tmp_path / "server").as_uri()
    first = new_llm(TINY, enable_blending=True, chunk_store_url=url)
    run(first, tiny_prompt(), PARAMS)
    cold(first)
    other = persistent(tmp_path / "disk", chunk_store_url=url)
    for hits in (PIECES, 0):
        assert_same_logprobs(run(other, tiny_prompt(), PARAMS)[0], expected(tiny_prompt()))
        end_loads(other)
        found = metrics(other)
        assert found["chunks_encoded"] == 0
        assert found["chunk_store_remote_hits"] == PIECES
        assert found["chunk_store_disk_hits"] == PIECES - hits
        cold(other)


class TestController:
    def test_it_computes_what_loads_slower(self, tmp_path: Path) -> None:
        llm = persistent(tmp_path, blend_controller=True)
        run(llm, tiny_prompt(), PARAMS)
        cold(llm)
        controller = llm.llm_engine.controller
        assert controller is not None and controller.num_recomputed == 0
        tier = store_of(llm).below[0]
        read, tier.read_many = tier.storage.get, None
        all_there = threading.Barrier(PIECES)  # none is there while it is asked whether to load another

        def slow(key: str, allocate: Any = None, expected: Any = None) -> ChunkKV | None:
            all_there.wait(SECONDS)
            time.sleep(0.2)
            return read(key, allocate, expected)

        tier.storage.get = slow  # type: ignore[method-assign]
        controller.prefilled(1000, 0.001)  # the tiny model's steps are too small to tell
        run(llm, tiny_prompt(), PARAMS)  # the first loads show how slow it is
        cold(llm)
        before = llm.llm_engine.composer.num_encoded
        [output] = run(llm, tiny_prompt(), PARAMS)
        assert llm.llm_engine.composer.num_encoded - before == PIECES == metrics(llm)["controller_chunks_recomputed"]
        assert_same_logprobs(output, expected(tiny_prompt()))
        cold(llm)
        hits = metrics(llm)["chunk_store_disk_hits"]
        explicit = tiny_prompt(blend_recompute_ratio=0.15)
        assert_same_logprobs(run(llm, explicit, PARAMS)[0], expected(explicit))
        assert metrics(llm)["chunk_store_disk_hits"] == hits + PIECES, "an explicit ratio leaves it nothing to do"

    def test_it_raises_ratios_that_hide_behind_loading(self, tmp_path: Path) -> None:
        llm = new_llm(TINY, enable_blending=True, blend_controller=True)
        controller = llm.llm_engine.controller
        assert controller is not None
        [output] = run(llm, tiny_prompt(), PARAMS)
        assert output.blend is not None and output.blend.recompute_ratio == 0.15
        for _ in range(300):  # until what was measured is forgotten, however slow the machine
            controller.prefilled(1000, 1.0)
        controller.loaded(ChunkLoad(MEMORY, 1000 * controller.bytes_per_token, 1000), 0.6)
        [output] = run(llm, tiny_prompt(), PARAMS)
        assert output.blend is not None and output.blend.recompute_ratio == pytest.approx(0.6)
        assert_same_logprobs(output, expected(tiny_prompt(blend_recompute_ratio=0.6)))
        for options in ({"blend_recompute_ratio": 0.2}, {"blend_selector": "none"}):
            [output] = run(llm, tiny_prompt(**options), PARAMS)
            assert output.blend is not None
            assert output.blend.recompute_ratio == options.get("blend_recompute_ratio", 0.0)
        assert metrics(llm)["controller_prompts_raised"] == 1

    def test_it_measures_prefill_in_real_steps(self) -> None:
        llm = new_llm(enable_blending=True, blend_controller=True)
        run(llm, demo_prompt(0), PARAMS)
        assert 0 < metrics(llm)["controller_prefill_tokens_per_second"] < 1e7

    def test_it_measures_what_steps_take(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A machine of 500 tokens per second, as a clock has it that stands still but for forward passes. It does not
        run ahead: the next pass is then queued, which this clock takes for its work, before this one is read."""
        llm = new_llm(enable_blending=True, blend_controller=True, async_scheduling=False)
        executor, now = llm.llm_engine.model_executor, 0.0
        execute = executor.execute_model

        def taking_time(scheduled: Any) -> Any:
            nonlocal now
            now += sum(item.num_tokens for item in scheduled.scheduled) / 500
            return execute(scheduled)

        for module in (step_loop, chunk_stores):
            monkeypatch.setattr(module, "time", SimpleNamespace(time=time.time, perf_counter=lambda: now))
        monkeypatch.setattr(executor, "execute_model", taking_time)
        run(llm, {"prompt_token_ids": list(range(10, 60))}, PARAMS)
        assert metrics(llm)["controller_prefill_tokens_per_second"] == pytest.approx(500)


def config(**arguments: Any) -> EngineConfig:
    return EngineArgs(TINY, **arguments).create_engine_config()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk_store_path": "x"}, r"chunk_store_path='x', but the engine does not blend: give enable_blending=True"),
        ({"chunk_store_url": "redis://x"}, "chunk_store_url='redis://x', but the engine does not blend"),
        ({"blend_controller": True}, "blend_controller=True, but the engine does not blend"),
        ({"chunk_store_path": "x", "chunk_store_gib": 0}, "chunk_store_gib=0 must be positive"),
        ({"chunk_store_path": "x", "chunk_store_gib": -1.5}, "chunk_store_gib=-1.5 must be positive"),
        ({"chunk_store_path": "x", "chunk_store_gib": float("inf")}, "chunk_store_gib=inf must be a finite number"),
        (
            {"chunk_store_path": "x", "chunk_store_format": "int4"},
            "chunk_store_format='int4' is unknown: use one of 'auto', 'fp8', 'int8'",
        ),
        ({"chunk_store_format": "int8"}, "chunk_store_format='int8' .* give chunk_store_path or chunk_store_url"),
        ({"chunk_store_admit_on_second_use": True}, "chunk_store_admit_on_second_use .* give chunk_store_path too"),
        ({"chunk_store_path": ""}, "chunk_store_path is empty: name a folder"),
    ],
)
def test_settings_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**arguments)


def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"chunk_store_path='.*file/store' cannot be used .*name a folder"):
        persistent(tmp_path / "file" / "store")
    for url in ("nowhere", "gopher://x/y"):
        with pytest.raises(ValueError, match=r"chunk_store_url: .*give a URL"):
            new_llm(TINY, enable_blending=True, chunk_store_url=url)
