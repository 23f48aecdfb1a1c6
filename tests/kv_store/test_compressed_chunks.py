"""Chunks of which every head has a part of the KVs: what these are of comes back with them, through every tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv_store.stored_chunks import MODEL, key, same
from tests.kv_store.test_import_folder import MODELS
from tests.kv_store.test_import_folder import chunk as named_chunk
from vllm_blend.kv_store.arena import Arena
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.cpu import MemoryChunkStore, PinnedChunkStore
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.disk_config import DiskStoreConfig
from vllm_blend.kv_store.export_folder import export_folder
from vllm_blend.kv_store.format import write_chunk
from vllm_blend.kv_store.keys import ChunkId
from vllm_blend.kv_store.serialization import ChunkFault, ChunkHeader, ChunkLayout, from_bytes, serialize, to_bytes
from vllm_blend.kv_store.transfer import InFlight

KEY = key(7)


def part(
    layers: int = 3,
    kvs: int = 5,
    heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    length: int = 19,
    seed: int = 0,
) -> ChunkKV:
    """`kvs` of `length` tokens in each head, others in each."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, layers, kvs, heads, dim, generator=generator).to(dtype)
    order = torch.rand(layers, heads, length, generator=generator).argsort(-1)[..., :kvs].sort(-1).values
    return ChunkKV(k, v, positions=order.transpose(1, 2).to(torch.int32).contiguous(), length=length)


def same_part(a: ChunkKV | None, b: ChunkKV) -> bool:
    assert b.positions is not None
    return same(a, b) and a is not None and a.positions is not None and positions_equal(a, b)


def positions_equal(a: ChunkKV, b: ChunkKV) -> bool:
    assert a.positions is not None and b.positions is not None
    return a.length == b.length and torch.equal(a.positions, b.positions) and a.is_sound


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 3), st.integers(1, 34)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    how=st.sampled_from(["auto", "int8", "fp8"]),
    more=st.integers(0, 50),
)
def test_bytes(shape: tuple[int, int, int, int], dtype: torch.dtype, how: Any, more: int) -> None:
    kv = part(*shape, dtype=dtype, length=shape[1] + more)
    found = from_bytes(to_bytes(serialize(KEY, MODEL, kv, ChunkLayout.of(kv, how))), KEY, MODEL)
    assert positions_equal(found, kv)
    if how == "auto":
        assert same(found, kv)
    whole = from_bytes(
        to_bytes(serialize(KEY, MODEL, ChunkKV(kv.k, kv.v), ChunkLayout.of(ChunkKV(kv.k, kv.v), how))), KEY, MODEL
    )
    assert whole.positions is None and same(whole, ChunkKV(found.k, found.v)), "K and V are rounded as those of any"


def test_what_a_header_cannot_mean_is_damage() -> None:
    kv = part()
    layout = replace(ChunkLayout.of(kv, "auto"), length=kv.num_kvs - 1)
    with pytest.raises(ChunkFault, match="contradicts itself"):
        ChunkHeader.decode(ChunkHeader(KEY, MODEL, layout, (0, 0, 0)).encode(), KEY, MODEL)


def test_damaged_positions_are_a_miss() -> None:
    kv = part()
    chunk = serialize(KEY, MODEL, kv, ChunkLayout.of(kv, "auto"))
    found = chunk.header.layout.kv_in(chunk.payload)
    assert found.positions is not None
    found.positions[1, 2, 0] += 1
    with pytest.raises(ChunkFault, match="checksum of layer 1"):
        from_bytes(to_bytes(chunk), KEY, MODEL)


@pytest.mark.parametrize("how", ["auto", "int8", "fp8"])
def test_the_disk(tmp_path: Path, how: Any) -> None:
    chunks = {key(i): part(kvs=3 + 200 * i, length=500 + 100 * i, dtype=torch.float32, seed=i) for i in range(3)}
    with DiskChunkStore(DiskStoreConfig(tmp_path, 64 << 20, MODEL, how, timeout=30.0)) as store:
        for name, kv in chunks.items():
            store.put(name, kv)
        for name, kv in chunks.items():
            found = store.get(name)
            assert found is not None and positions_equal(found, kv)
            assert how != "auto" or same(found, kv)


def test_memory() -> None:
    kv = part()
    store = MemoryChunkStore(1 << 20, torch.device("cpu"))
    assert same_part(store.put(KEY, kv), kv) and same_part(store.get(KEY), kv)
    assert store.num_bytes == kv.nbytes == kv.k.nbytes + kv.v.nbytes + 4 * kv.k.shape[:3].numel()
    assert same_part(kv.copy(), kv)


def test_an_arena() -> None:
    kv = part()
    store = PinnedChunkStore(Arena(torch.zeros(1 << 16, dtype=torch.uint8).numpy()), InFlight())
    assert same_part(store.put(KEY, kv), kv) and same_part(store.get(KEY), kv)


def test_the_folder_format_has_no_place_for_it(tmp_path: Path) -> None:
    chunk, kv = named_chunk(MODELS[0], 0)
    with pytest.raises(ValueError, match="blend_chunk_kept_share"):
        write_chunk(tmp_path / "pt", chunk, part(), MODELS[0])
    assert not (tmp_path / "pt").exists()
    compressed = ChunkId.of(MODELS[0], [1, 2], chunk.token_ids, "knorm 0.5")
    with DiskChunkStore(
        DiskStoreConfig(tmp_path / "store", 1 << 20, MODELS[0].digest, fingerprint=MODELS[0], timeout=30.0)
    ) as store:
        store.put(chunk.key, kv.of(chunk))
        store.put(compressed.key, part().of(compressed))
    assert export_folder(tmp_path / "store", tmp_path / "pt") == {"written": 1, "unnamed": 1}


def test_how_a_chunk_was_compressed_is_part_of_its_key() -> None:
    ids = [ChunkId.of(MODELS[0], [1], [2, 3], how) for how in ("", "knorm 0.5", "knorm 0.25", "keydiff 0.5")]
    assert len({chunk.key for chunk in ids}) == 4
    assert len({(chunk.context, chunk.token_ids) for chunk in ids}) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"length": None},
        {"positions": None},
        {"positions": torch.zeros(3, 4, 2, dtype=torch.int32)},
        {"positions": torch.zeros(3, 5, 2)},
    ],
)
def test_tensors_that_do_not_fit_together(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="positions"):
        replace(part(), **changes)


def test_soundness() -> None:
    kv = part()
    assert kv.positions is not None and kv.is_sound
    for layer, number, value in ((0, 0, -1), (2, -1, kv.num_tokens), (1, 3, int(kv.positions[1, 2, 0]))):
        positions = kv.positions.clone()
        positions[layer, number, 0] = value
        assert not replace(kv, positions=positions).is_sound
