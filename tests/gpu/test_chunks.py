"""Registered chunks and cascade attention on a GPU: exactly the memory they take, and the answers of plain
attention."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from tests.chunks.llms import random_ids
from tests.tolerances import TOLERANCES
from vllm_blend import ChunkedLLM, RequestOutput, SamplingParams
from vllm_blend.attention.metadata import AttentionMetadata, LayerStep
from vllm_blend.features.cascade.backend import CascadeBackend, CascadeStep, Level, cascade_step
from vllm_blend.features.cascade.passes import CascadePasses
from vllm_blend.features.cascade.planner import build_cascade_data_for_composition
from vllm_blend.ops.paged_kv import PagedKV

pytestmark = pytest.mark.gpu

MODEL = "inputs/demo-model"
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 4096, "max_num_seqs": 32, "blend_chunk_cache_gib": 0.5}
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=5, ignore_eos=True)
SIZE, HEADS, KV_HEADS, DIM = 16, 32, 8, 128


def decode_step(batch: int, shared: int, own: int) -> tuple[LayerStep, np.ndarray]:
    """One row of each request; the first `shared` blocks are those of all, but for the last request."""
    generator = torch.Generator("cuda").manual_seed(batch)
    blocks = shared + batch * own + shared + own
    shape = (blocks + 1, SIZE, KV_HEADS, DIM)
    k, v = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    order = torch.randperm(blocks, generator=generator, device="cuda").cpu().numpy().astype(np.int32) + 1
    tables = np.zeros((batch, shared + own), np.int32)
    tables[:, :shared] = order[:shared]
    tables[:, shared:] = order[shared : shared + batch * own].reshape(batch, own)
    tables[-1] = order[shared + batch * own :]
    lengths = [(shared + own) * SIZE - (index * 7) % (own * SIZE - 1) for index in range(batch)]
    positions = torch.tensor(lengths, device="cuda") - 1
    metadata = AttentionMetadata(
        positions, positions, torch.from_numpy(tables).cuda(), list(range(batch + 1)), lengths, at_end=(True,) * batch
    )
    q = torch.randn(batch, HEADS, DIM, generator=generator, device="cuda", dtype=torch.bfloat16)
    return LayerStep(q, PagedKV(k, v), metadata, DIM**-0.5), tables


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    wanted = expected.float()
    assert torch.isfinite(actual).all()
    assert ((actual.float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()).item() < 6e-3


@pytest.mark.parametrize(("batch", "shared", "own"), [(3, 4, 2), (17, 40, 3), (64, 512, 4), (130, 33, 1)])
def test_parts_equal_the_whole(batch: int, shared: int, own: int) -> None:
    from vllm_blend.attention.cuda import CUDABackend

    layer, tables = decode_step(batch, shared, own)
    backend = CUDABackend()
    data = build_cascade_data_for_composition(tables, [shared] * batch, 1)
    assert data is not None and data.requests == list(range(batch - 1))
    step = cascade_step(data, layer.metadata, SIZE)
    cascade = CascadeBackend(backend, [backend.another()], step)
    expected = CUDABackend().attend(layer)
    for _ in range(2):  # planned, then by the plan
        assert_close(cascade.attend(layer), expected)


@pytest.mark.parametrize("batch", [4, 48, 64])
def test_a_captured_cascade_follows_its_groups(batch: int) -> None:
    """Two groups whose sizes change between replays: rows of the shared part follow offsets that only the device
    knows."""
    from vllm_blend.attention.cuda import CUDABackend

    layer, tables = decode_step(batch, 24, 2)
    layer = layer._replace(scale=0.1)
    metadata = layer.metadata
    width = tables.shape[1]
    starts = torch.tensor([0, batch, batch, batch], dtype=torch.int32, device="cuda")
    own_positions, shared_positions = torch.zeros_like(metadata.positions), torch.zeros_like(metadata.positions)
    own_tables = torch.zeros(batch, width, dtype=torch.int32, device="cuda")
    shared_tables = torch.zeros(3, width, dtype=torch.int32, device="cuda")
    each, longest = list(range(batch + 1)), width * SIZE
    own = AttentionMetadata(own_positions, own_positions, own_tables, each, [longest] * batch)
    level = AttentionMetadata(
        shared_positions, own_positions, shared_tables, [0, 0, 0, batch], [longest] * 3, device_query_start_loc=starts
    )
    backend = CUDABackend()
    step = CascadeStep(metadata, slice(0, batch), own, (Level(None, level),))
    cascade = CascadeBackend(backend, [backend.another()], step)
    cascade.attend(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cascade.attend(layer)
    expected = CUDABackend().attend(layer)
    for groups in ([(batch - 1, 24), (1, 1)], [(batch - 2, 20), (1, 5), (1, 3)]):
        blocks = np.repeat([shared for _, shared in groups], [members for members, _ in groups])
        first = np.cumsum([0, *(members for members, _ in groups)])
        own_rows, shared_rows = np.zeros((batch, width), np.int32), np.zeros((3, width), np.int32)
        for row, (table, skip) in enumerate(zip(tables, blocks, strict=True)):
            own_rows[row, : width - skip] = table[skip:]
        for index, (_, shared) in enumerate(groups):
            shared_rows[index, :shared] = tables[first[index], :shared]
        own_tables.copy_(torch.from_numpy(own_rows))
        shared_tables.copy_(torch.from_numpy(shared_rows))
        starts.copy_(torch.tensor([*first, *[batch] * (4 - len(first))], dtype=torch.int32))
        own_positions.copy_(metadata.positions - torch.from_numpy(blocks).cuda() * SIZE)
        shared_positions.copy_(torch.from_numpy(blocks).cuda() * SIZE - 1)
        graph.replay()
        assert_close(out, expected)


def answers(chunked: ChunkedLLM) -> list[RequestOutput]:
    system = chunked.register_chunk(random_ids(150, 1), "system_prompt").id
    chunks = [chunked.register_chunk(random_ids(n, n)).id for n in (130, 100)]
    options: dict[str, Any] = {"selector": "first_tokens"}
    made = [chunked.compose(system, chunks, query=random_ids(3 + seed, seed), **options) for seed in range(14)]
    made += [chunked.compose(system, chunks[::-1], query=random_ids(4, seed), **options) for seed in range(6)]
    made.append(chunked.compose(None, [], query=random_ids(40, 9), **options))
    return chunked.batch_generate_from_chunks(made, PARAMS)


def test_an_engine_answers_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = SMALL | {"dtype": "bfloat16", "attention_backend": "cuda"}
    plain = answers(ChunkedLLM(MODEL, **arguments))
    chunked = ChunkedLLM(MODEL, cascade_attention=True, **arguments)
    graphs = chunked.llm_engine.model_executor.driver_worker.extension(CascadePasses).graphs
    assert graphs is not None
    graphs.planner.min_saved_blocks = 1  # the model is too small to gain by it
    replayed = []
    run = graphs.run

    def counted(spans: Any, drawn: Any) -> Any:
        logits = run(spans, drawn)
        replayed.append(logits is not None)
        return logits

    monkeypatch.setattr(graphs, "run", counted)
    cascaded = answers(chunked)
    assert sum(replayed) >= 8
    limit = TOLERANCES["bfloat16"].logprobs.largest
    for left, right in zip(plain, cascaded, strict=True):
        assert left.error is None and right.error is None
        one, other = left.outputs[0].logprobs, right.outputs[0].logprobs
        assert one is not None and other is not None
        for a, b, token_a, token_b in zip(
            one, other, left.outputs[0].token_ids, right.outputs[0].token_ids, strict=True
        ):
            assert all(abs(a[token].logprob - b[token].logprob) <= limit for token in a.keys() & b.keys())
            if token_a != token_b:  # rounding decided between two: what follows has another context
                break


def test_deleting_a_chunk_frees_exactly_its_bytes() -> None:
    chunked = ChunkedLLM(MODEL, **SMALL)
    engine = chunked.llm_engine

    def cycle(seed: int) -> tuple[int, int]:
        """Bytes that deleting frees, and that are left after it."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        chunk = chunked.register_chunk(random_ids(512, seed))
        chunked.generate_from_chunks(None, [chunk.id], query=[5, 6, 7], sampling_params=PARAMS)
        engine.drop_finished()
        gc.collect()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        deletion = chunked.delete_chunk(chunk.id)
        assert deletion.num_bytes == 512 * engine.composer.bytes_per_token
        gc.collect()
        return held - torch.cuda.memory_allocated(), torch.cuda.memory_allocated() - before

    cycle(1)  # what is allocated once and kept
    cycle(2)
    for seed in range(3, 8):
        freed, left = cycle(seed)
        assert left == 0 and freed == 512 * engine.composer.bytes_per_token
    assert engine.blocks.num_free_blocks == engine.blocks.num_usable_blocks and not engine.blocks.retained


def test_the_second_question_is_early() -> None:
    """Its answer does not depend on where the first one's pages were."""
    chunked = ChunkedLLM(MODEL, **SMALL)
    chunks = [chunked.register_chunk(random_ids(n, n)).id for n in (150, 333)]
    options: dict[str, Any] = {"query": random_ids(9, 9), "sampling_params": PARAMS, "selector": "first_tokens"}
    alone = chunked.generate_from_chunks(None, chunks, retain=False, **options)
    chunked.generate_from_chunks(None, chunks, **(options | {"query": random_ids(20, 3)}))
    second = chunked.generate_from_chunks(None, chunks, **options)
    assert second.blend is not None and second.blend.retained and second.blend.num_recomputed_tokens == 9
    one, other = alone.outputs[0].logprobs, second.outputs[0].logprobs
    assert one is not None and other is not None
    limit = TOLERANCES["bfloat16"].logprobs.largest
    assert all(
        abs(one[0][token].logprob - other[0][token].logprob) <= limit for token in one[0].keys() & other[0].keys()
    )
