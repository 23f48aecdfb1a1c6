"""Placing stored KV: at once, and layer by layer under the forward passes of every selector.

What arrives is played by the host here, a few rows at a time; tests/gpu/test_pinned.py has the real copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.blend.prompts import plain, tiny_prompt
from tests.engine.compare import assert_same_logprobs, blend_of
from tests.engine.engines import TINY_VOCABULARY, greedy, run, tiny_model
from tests.engine.tiny_tokenizers import byte_level
from tests.models.tiny import edit_config, save, tiny_hf_model
from vllm_blend import LLM, RequestOutput
from vllm_blend.blend.plan import Segment
from vllm_blend.blend.selectors import SELECTORS
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.transfer import Arrival, InFlight, _groups
from vllm_blend.ops.transfer import copy_pieces_reference
from vllm_blend.worker import chunk_placement
from vllm_blend.worker.chunk_placement import ChunkPlacement

TINY = tiny_model("llama")
PARAMS = greedy(6, logprobs=2, ignore_eos=True)


class Ring:
    slot_tokens = 7  # several transfers a layer

    def accepts(self, chunk: ChunkKV) -> bool:
        return True


class Load:
    """A load whose layers come when they are asked for; before that, the request's pages hold nothing."""

    made: ClassVar[list[Load]] = []

    def __init__(self, ring: Any, chunks: Sequence[ChunkKV], num_layers: int) -> None:
        self.groups, self.num_layers, self.layers = _groups(chunks, ring.slot_tokens), num_layers, 0
        self.chunks, self.abandoned = chunks, False
        Load.made.append(self)

    def layer(self, layer: int) -> Iterator[Arrival]:
        assert layer == self.layers
        self.layers += 1
        for group in self.groups:
            count = group.stop - group.start
            k, v = (torch.empty(count, *chunks.shape[2:]) for chunks in (self.chunks[0].k, self.chunks[0].v))
            copy_pieces_reference(group.pieces, layer, k, v)
            yield Arrival(slice(group.start, group.stop), k[None], v[None])

    def abandon(self) -> None:
        self.abandoned = True

    def query(self) -> bool:
        return self.abandoned or self.layers == self.num_layers


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(TINY, device="cpu", dtype="float32", enable_blending=True, max_num_seqs=8)


@pytest.fixture
def layerwise(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """The same engine with chunks that travel. Pages are poisoned, so that nothing may be read ahead of its arrival."""
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    Load.made = []
    monkeypatch.setattr(chunk_placement, "LayerwiseLoad", Load)
    monkeypatch.setattr(runner.block_pass.placement, "ring", Ring())
    start = runner.block_pass.placement.start

    def poisoned(requests: Any) -> Any:
        for request in requests:
            pages = torch.tensor(request.block_table)
            runner.cache.key[:, pages] = float("nan")
            runner.cache.value[:, pages] = float("nan")
        return start(requests)

    monkeypatch.setattr(runner.block_pass.placement, "start", poisoned)
    yield llm
    runner.block_pass.placement.in_flight = InFlight()


def same(left: RequestOutput, right: RequestOutput) -> bool:
    return (
        left.outputs[0].token_ids == right.outputs[0].token_ids
        and left.outputs[0].logprobs == right.outputs[0].logprobs
    )


@pytest.mark.parametrize("selector", sorted(SELECTORS))
def test_arriving_layers_change_nothing(selector: str, llm: LLM, request: pytest.FixtureRequest) -> None:
    prompt = tiny_prompt(blend_selector=selector)
    llm.llm_engine.chunk_store.clear()
    run(llm, prompt, PARAMS)  # the chunks are stored
    expected = run(llm, prompt, PARAMS)[0]
    layerwise = request.getfixturevalue("layerwise")
    output = run(layerwise, prompt, PARAMS)[0]
    assert output.error is None
    assert blend_of(output) == blend_of(expected)
    assert same(output, expected)
    assert [load.layers for load in Load.made] == [load.num_layers for load in Load.made] != []
    assert all(len(load.groups) > 1 for load in Load.made)


def test_a_batch_of_blends_is_one_load(llm: LLM, request: pytest.FixtureRequest) -> None:
    prompts: list[Any] = [
        tiny_prompt(blend_selector=name) for name in ("question_attention", "value_deviation", "random")
    ]
    prompts += [plain(tiny_prompt()), tiny_prompt(blend_selector="question_attention", blend_recompute_ratio=0.5)]
    run(llm, prompts, PARAMS)
    expected = run(llm, prompts, PARAMS)
    outputs = run(request.getfixturevalue("layerwise"), prompts, PARAMS)
    assert len(Load.made) == 1
    assert all(same(a, b) for a, b in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("travels", [False, True])
def test_each_layer_rotates_by_its_own_tables(travels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that stands where it was encoded is exact, so its reuse is a full prefill in every layer."""
    save(tiny_hf_model("mistral", vocab_size=TINY_VOCABULARY, sliding_window=64), tmp_path)
    byte_level().save_pretrained(tmp_path)
    ropes = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}}
    ropes["sliding_attention"] = {"rope_type": "default", "rope_theta": 100.0}
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    edit_config(tmp_path, layer_types=kinds, rope_parameters=ropes)
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", enable_blending=True, enable_prefix_caching=False)
    whole = tiny_prompt()
    prompt = {"prefix": whole["prefix"], "chunks": whole["chunks"][2:3], "suffix": whole["suffix"]}
    [expected] = run(llm, plain(prompt), PARAMS)
    llm.encode_chunks(prompt["prefix"], prompt["chunks"])
    monkeypatch.setattr(Load, "made", [])
    if travels:
        monkeypatch.setattr(chunk_placement, "LayerwiseLoad", Load)
        monkeypatch.setattr(
            llm.llm_engine.model_executor.driver_worker.model_runner.block_pass.placement, "ring", Ring()
        )
    [output] = run(llm, {**prompt, "blend_selector": "none"}, PARAMS)
    assert output.blend is not None and output.blend.num_exact_tokens == 26 and bool(travels) == bool(Load.made)
    assert_same_logprobs(output, expected)


def test_encoding_loads_the_prefix(layerwise: LLM) -> None:
    """A chunk is encoded after its prefix, whose KV comes from the store too."""
    layerwise.llm_engine.chunk_store.clear()
    output = run(layerwise, tiny_prompt(), PARAMS)[0]
    assert output.error is None
    assert len(Load.made) > 1
    layerwise.llm_engine.chunk_store.clear()


def test_only_copies_in_flight_keep_a_load_alive(layerwise: LLM) -> None:
    """A chunk that the store evicts gives its memory back as soon as no copy and no request needs it."""
    run(layerwise, tiny_prompt(), PARAMS)
    loads = [weakref.ref(load) for load in Load.made]
    Load.made.clear()
    layerwise.llm_engine.model_executor.driver_worker.model_runner.block_pass.placement.in_flight.release()
    assert loads
    assert not any(load() for load in loads)


def test_a_step_that_failed_leaves_no_load_behind(layerwise: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    run(layerwise, tiny_prompt(), PARAMS)
    Load.made.clear()
    runner = layerwise.llm_engine.model_executor.driver_worker.model_runner
    layer = runner.model.model.layers[1]
    forward = layer.forward

    def fails(*args: Any) -> Any:
        raise RuntimeError("no more")

    monkeypatch.setattr(layer, "forward", fails)
    with pytest.raises(RuntimeError, match="no more"):
        run(layerwise, tiny_prompt(), PARAMS)
    [broken] = Load.made
    assert not broken.query()
    monkeypatch.setattr(layer, "forward", forward)
    assert run(layerwise, tiny_prompt(), PARAMS)[0].error is None
    assert broken.abandoned
    assert not any(held is broken for _, held in runner.block_pass.placement.in_flight._held)


def test_rows_of_several_requests(llm: LLM) -> None:
    """Positions and slots of segments, whatever pages the requests have."""
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    size = runner.cache.block_size

    class Pages:
        def __init__(self, *table: int) -> None:
            self.block_table = list(table)

    kv = ChunkKV(torch.zeros(1, 3, 1, 2), torch.zeros(1, 3, 1, 2))
    first, second = Pages(4, 2), Pages(7)
    placement = ChunkPlacement(runner.model, runner.cache)
    segments: list[Any] = [(first, Segment(size - 1, kv)), (second, Segment(2, kv)), (first, Segment(0, kv))]
    positions, slots = placement._rows(segments)
    assert positions.tolist() == [size - 1, size, size + 1, 2, 3, 4, 0, 1, 2]
    low = [4 * size + size - 1, 2 * size, 2 * size + 1]
    assert slots.tolist() == [*low, 7 * size + 2, 7 * size + 3, 7 * size + 4, 4 * size, 4 * size + 1, 4 * size + 2]


def test_groups_fill_slots_and_keep_the_order() -> None:
    def numbered(start: int, count: int) -> ChunkKV:
        rows = torch.arange(start, start + count).view(1, count, 1, 1).float()
        return ChunkKV(rows, -rows)

    groups = _groups([numbered(0, 3), numbered(3, 9), numbered(12, 2)], 5)
    assert [(group.start, group.stop) for group in groups] == [(0, 5), (5, 10), (10, 14)]
    for group in groups:
        k, v = torch.empty(2, group.stop - group.start, 1, 1)
        copy_pieces_reference(group.pieces, 0, k, v)
        assert k.flatten().tolist() == (-v).flatten().tolist() == list(range(group.start, group.stop))
    assert [(g.start, g.stop) for g in _groups([numbered(0, 10)], 5)] == [(0, 5), (5, 10)]
