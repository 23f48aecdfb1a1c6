"""A prompt that runs while the layers of its chunks are read from the disk, and what becomes of it when one is lost."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import settings
from tests.blend.prompts import assert_counts_add_up, tiny_prompt
from tests.clock import Clock
from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import PATIENCE, TINY_VOCABULARY, assert_empty, engine, greedy, run, threads, tokens_of
from tests.engine.test_persistent_store import (
    PARAMS,
    PIECES,
    SECONDS,
    TINY,
    cold,
    end_loads,
    expected,
    metrics,
    persistent,
    store_of,
)
from vllm_blend import LLM, RequestOutput
from vllm_blend.kv_store import pending, prefetch
from vllm_blend.kv_store.layout import ChunkFault
from vllm_blend.kv_store.segment import Extent
from vllm_blend.kv_store.serialization import ChunkHeader
from vllm_blend.kv_store.tiers import DISK, ChunkLoad
from vllm_blend.worker.chunk_placement import _ReadHook


@pytest.fixture(autouse=True)
def one_page_a_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The chunks of these tests are far smaller than what the disk reads at once."""
    monkeypatch.setattr(pending, "READ_BYTES", 1)
    with threads(1):
        yield


class Gates:
    """Reads behind the first layer of a chunk that wait until the forward pass is about to compute what lies there."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_held = self.num_read = 0
        self.reached = threading.Event()  # the forward pass waits for a layer behind the first
        self.error: Exception | None = None  # of reads from then on
        files = store_of(llm).below[0].storage.space.files  # type: ignore[attr-defined]
        read, arrivals = files.read, _ReadHook._arrivals

        def held(extent: Extent, start: int, into: torch.Tensor) -> None:
            if start:
                self.num_held += 1
                assert self.reached.wait(SECONDS)
                self.num_read += 1
                if self.error is not None:
                    raise self.error
            read(extent, start, into)

        def reaching(hook: _ReadHook, layer: int) -> Any:
            if layer > 0:
                self.reached.set()
            return arrivals(hook, layer)

        monkeypatch.setattr(files, "read", held)
        monkeypatch.setattr(_ReadHook, "_arrivals", reaching)


def stored(path: Path, prompt: Any, **arguments: Any) -> LLM:
    """An engine whose disk has the prompt's chunks, and whose memory has none."""
    llm = persistent(path, **arguments)
    run(llm, prompt, PARAMS)
    cold(llm)
    return llm


@pytest.mark.parametrize(
    "selector", ["question_attention", "question_attention(mean_shift=0)", "value_deviation", "none", "full"]
)
@pytest.mark.parametrize("how", ["auto", "int8"])
def test_a_prompt_runs_while_its_layers_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selector: str, how: str
) -> None:
    """No layer after the first is read before the forward pass has come to it."""
    prompt = tiny_prompt(blend_selector=selector)
    llm = stored(tmp_path, prompt, chunk_store_format=how)
    [whole] = run(llm, prompt, PARAMS)
    cold(llm)
    assert metrics(llm)["chunk_store_disk_hits"] == PIECES
    started = metrics(llm)["prompts_started_early"]
    gates = Gates(llm, monkeypatch)
    [output] = run(llm, prompt, PARAMS)
    assert gates.reached.is_set() and gates.num_held >= 1
    assert_same_logprobs(output, whole)
    if how == "auto":
        assert_same_logprobs(output, expected(prompt))
    assert_counts_add_up(output)
    end_loads(llm)
    found = metrics(llm)
    assert found["prompts_started_early"] == started + 1 and found["prompts_started_again"] == 0
    assert found["chunks_encoded"] == PIECES and found["chunk_store_disk_hits"] == 2 * PIECES
    assert_empty(llm)


def test_chunks_that_arrive_for_an_aborted_prompt_delay_no_other_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt: Any = tiny_prompt(blend_selector="none")
    llm = stored(tmp_path, prompt)
    Gates(llm, monkeypatch)
    engine = llm.llm_engine
    engine.add_request("aborted", prompt, PARAMS)
    while not engine.step():
        pass
    assert metrics(llm)["prompts_started_early"] == 1
    engine.abort_request("aborted")
    assert engine.composer._loading and not engine.composer.is_loading  # it arrives, and no prompt waits for it
    assert engine.get_num_unfinished_requests() == 0
    [kv] = llm.encode_chunks("", [[5, 6, 7]])
    assert kv.num_tokens == 3
    assert_empty(llm)


FAULTS = {
    "damaged": ChunkFault("damaged", "the checksum of layer 1 differs"),
    "vanished": ChunkFault("vanished", "the segment is gone"),
    "truncated": ChunkFault("truncated", "the segment ends"),
    "error": OSError(5, "Input/output error"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("n", [1, 2])
def test_a_layer_that_is_lost_in_mid_forward_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str, n: int
) -> None:
    params = PARAMS if n == 1 else greedy(8, ignore_eos=True, n=n, temperature=1e-4, seed=1)
    llm = stored(tmp_path, tiny_prompt())
    gates = Gates(llm, monkeypatch)
    gates.error = FAULTS[fault]
    with caplog.at_level(logging.WARNING):
        [output] = run(llm, tiny_prompt(), params)
    assert gates.num_held >= 1
    if n == 1:
        assert_same_logprobs(output, expected(tiny_prompt()))
    elif settings.current().exact:
        assert tokens_of([output]) == tokens_of([expected(tiny_prompt(), params)])
    assert_counts_add_up(output)
    found = metrics(llm)
    assert found["prompts_started_early"] == 1 and found["prompts_started_again"] == 1
    lost = found["chunks_encoded"] - PIECES
    assert lost == found["chunk_store_disk_faults"] >= 1
    assert found["chunk_store_disk_hits"] == PIECES - lost
    assert "a step is done again" in caplog.text
    assert_empty(llm)
    composer = llm.llm_engine.composer
    assert not composer._waiting and not composer._loading and not composer._encoding


def test_what_a_prompt_encoded_before_a_loss_counts_as_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk is encoded for the prompt while another arrives; when that is lost, it is encoded for the prompt too.
    Only what was in memory from the beginning was found."""
    whole = tiny_prompt(prefix=[], blend_selector="none")
    third, first, second, _ = whole["chunks"]
    llm = stored(tmp_path, {**whole, "chunks": [second]})
    llm.encode_chunks([], [third])
    gates = Gates(llm, monkeypatch)
    gates.error = FAULTS["damaged"]
    [output] = run(llm, {**whole, "chunks": [first, second, third]}, PARAMS)
    assert metrics(llm)["prompts_started_again"] == 1 and metrics(llm)["chunks_encoded"] == 4
    assert_counts_add_up(output)
    assert output.num_cached_tokens == len(third)


def test_flipped_bytes_in_any_layer(tmp_path: Path) -> None:
    """Real damage: one byte of one layer of one chunk, layer by layer, each in a store of its own."""
    wanted = expected(tiny_prompt())
    for layer in range(3):
        llm = stored(tmp_path / str(layer), tiny_prompt())
        disk: Any = store_of(llm).below[0].storage
        entry = max(disk.space.index.live(), key=lambda e: e.extent.num_bytes)
        [segment] = (tmp_path / str(layer)).rglob("*.segment")
        layout = ChunkHeader.decode(entry.header, entry.key, disk.config.model).layout
        position = entry.extent.offset + layout.layer_span(layer)[1] - 1
        data = bytearray(segment.read_bytes())
        data[position] ^= 1
        segment.write_bytes(data)
        [output] = run(llm, tiny_prompt(), PARAMS)
        assert_same_logprobs(output, wanted)
        found = metrics(llm)
        assert found["chunks_encoded"] == PIECES + 1 and found["chunk_store_disk_faults"] == 1
        assert_empty(llm)
        store_of(llm).close()


def test_a_layer_that_does_not_come_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that hangs in the middle of a forward pass holds it up until the deadline of loading, once."""
    llm = stored(tmp_path, tiny_prompt())
    gates = Gates(llm, monkeypatch)
    clock = Clock(monkeypatch, pending, prefetch)
    # The time is up when the forward pass comes to what hangs.
    monkeypatch.setattr(gates.reached, "set", lambda: clock.advance(PATIENCE))
    [output] = run(llm, tiny_prompt(), PARAMS)
    assert gates.num_held >= 1 and gates.num_read == 0, "a thread waited for the disk"
    assert_same_logprobs(output, expected(tiny_prompt()))
    found = metrics(llm)
    assert found["prompts_started_early"] == 1 == found["prompts_started_again"]
    assert found["chunks_encoded"] > PIECES and found["chunk_loads_late"] >= 1
    assert_empty(llm)
    threading.Event.set(gates.reached)
    [again] = run(llm, tiny_prompt(), PARAMS)
    assert_same_logprobs(again, output)


def test_others_in_the_step_are_not_harmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain prompt that comes just before the step is computed with it, and again without."""
    llm = stored(tmp_path, tiny_prompt())
    gates = Gates(llm, monkeypatch)
    gates.error = FAULTS["damaged"]
    inner = llm.llm_engine
    plain = {"prompt_token_ids": [5, 6, 7]}
    start_early = inner.composer.start_early
    inner.add_request("plain", plain, PARAMS)  # type: ignore[arg-type]
    [waiting] = inner.scheduler.waiting
    waiting.blocked = True  # until just before that step

    def with_another() -> bool:
        started = start_early()
        if started:
            waiting.blocked = False
        return started

    monkeypatch.setattr(inner.composer, "start_early", with_another)
    inner.add_request("blended", tiny_prompt(), PARAMS)  # type: ignore[arg-type]
    done: dict[str, RequestOutput] = {}
    while inner.has_unfinished_requests():
        done |= {output.request_id: output for output in inner.step() if output.finished}
    assert metrics(llm)["prompts_started_again"] == 1
    assert_same_logprobs(done["blended"], expected(tiny_prompt()))
    with engine(TINY, enable_blending=True) as other:
        assert_same_logprobs(done["plain"], run(other, plain, PARAMS)[0])
    assert_empty(llm)


def test_the_ratio_rises_with_what_is_left_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = stored(tmp_path, tiny_prompt(), blend_controller=True)
    controller = llm.llm_engine.controller
    assert controller is not None
    for _ in range(300):  # until what was measured is forgotten
        controller.prefilled(1000, 1.0)
        controller.loaded(ChunkLoad(DISK, 1000 * controller.bytes_per_token, 1000), 0.9)
    monkeypatch.setattr(controller, "loaded", lambda what, seconds: None)  # nor does this machine's speed matter
    gates = Gates(llm, monkeypatch)
    [output] = run(llm, tiny_prompt(), PARAMS)
    assert gates.num_held >= 1 and output.blend is not None
    assert 0.15 < output.blend.recompute_ratio < 0.9
    assert_same_logprobs(output, expected(tiny_prompt(blend_recompute_ratio=output.blend.recompute_ratio)))


def test_a_prompt_waits_while_others_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass that waits for a disk would hold them up."""
    llm = stored(tmp_path, tiny_prompt())
    gates = Gates(llm, monkeypatch)
    inner = llm.llm_engine
    inner.add_request("plain", {"prompt_token_ids": [5, 6, 7]}, greedy(30, ignore_eos=True))
    inner.add_request("blended", tiny_prompt(), PARAMS)  # type: ignore[arg-type]
    while "plain" in inner.requests.by_id:
        inner.step()
        assert metrics(llm)["prompts_started_early"] == 0 or "plain" not in inner.requests.by_id
    while inner.has_unfinished_requests():
        inner.step()
    assert metrics(llm)["prompts_started_early"] == 1 and gates.reached.is_set()
    assert_empty(llm)


def long_prompts(count: int) -> list[dict[str, Any]]:
    """Each shares two of its three chunks with the next; a chunk takes several reads."""
    ids = [(11 * i * i + 5 * i + 2) % TINY_VOCABULARY for i in range(20 * count + 60)]
    pieces = [ids[20 * i : 20 * i + 20 + i % 7] for i in range(count + 3)]
    return [{"prefix": ids[:4], "chunks": pieces[i : i + 3], "suffix": [i, 7]} for i in range(count)]


class Unreliable:
    """Reads that fail, hang and take their time. While `go_on` is cleared, those behind the first layer of a chunk
    wait for the forward pass to come there, or for something to go wrong: however slow the machine, prompts start
    early."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.go_on = threading.Event()
        self._choose, self._lock, self._clock = (
            random.Random(seed),
            threading.Lock(),
            Clock(monkeypatch, pending, prefetch),
        )
        files = store_of(llm).below[0].storage.space.files  # type: ignore[attr-defined]
        self._read, self._arrivals = files.read, _ReadHook._arrivals
        monkeypatch.setattr(files, "read", self.read)
        monkeypatch.setattr(_ReadHook, "_arrivals", lambda hook, layer: self.reaching(hook, layer))

    def read(self, extent: Extent, start: int, into: torch.Tensor) -> None:
        if start:
            self.go_on.wait(5.0)
        with self._lock:
            what = self._choose.random()
        if what < 0.02:  # until all that is being loaded is late, and a moment longer
            self._clock.advance(PATIENCE)
        if what < 0.02 or what > 0.95:
            self.go_on.set()
        time.sleep(0.15 if what < 0.02 else 0.01 if what < 0.3 else 0.0)
        if what > 0.95:
            raise self._choose.choice([ChunkFault("damaged", "by the test"), OSError(5, "Input/output error")])
        self._read(extent, start, into)

    def reaching(self, hook: _ReadHook, layer: int) -> Any:
        if layer > 0:
            self.go_on.set()
        return self._arrivals(hook, layer)


@pytest.mark.parametrize("seed", range(6))
def test_faults_at_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Prompts one by one and at once over a small memory, while reads fail, hang and take their time."""
    asked = long_prompts(24)
    with engine(TINY, enable_blending=True) as plain:
        wanted = run(plain, asked, PARAMS)
    first = persistent(tmp_path)
    run(first, asked, PARAMS)
    cold(first)
    size = 140 * first.llm_engine.composer.bytes_per_token  # of two prompts
    llm = persistent(tmp_path, blend_chunk_cache_gib=size / 2**30)
    disk = Unreliable(llm, monkeypatch, seed)
    outputs = []
    for prompt in asked[:12]:
        disk.go_on.clear()
        outputs += run(llm, [prompt], PARAMS)
    disk.go_on.set()
    outputs += run(llm, asked[12:], PARAMS)
    for output, other in zip(outputs, wanted, strict=True):
        assert_same_logprobs(output, other)
    found = metrics(llm)
    assert found["chunk_store_disk_faults"] > 0 and found["chunk_store_disk_hits"] > 10
    assert found["prompts_started_early"] > 3 and found["chunks_encoded"] > 0
    assert store_of(llm).num_bytes <= store_of(llm).budget_bytes
    assert_empty(llm)
    for each in (llm, first):
        store_of(each).close()
