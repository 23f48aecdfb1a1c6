"""Chunks with valid checksums that are not KV of the model and the tokens asked for: misses in every tier."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv_store.stored_chunks import same
from vllm_blend.kv_store.chunk_kv import ChunkKV, ExpectedChunk, find_kv_mismatch, is_finite
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.export_folder import export_folder
from vllm_blend.kv_store.format import ChunkMiss, load_chunk, write_chunk
from vllm_blend.kv_store.import_folder import import_folder
from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint
from vllm_blend.kv_store.layout import ChunkFault, ChunkLayout, StoredFormat
from vllm_blend.kv_store.memory import MemoryChunkStore
from vllm_blend.kv_store.owners import Owner
from vllm_blend.kv_store.remote import RemoteChunkStore
from vllm_blend.kv_store.serialization import ChunkHeader, from_bytes, serialize, to_bytes
from vllm_blend.kv_store.store_config import DiskStoreConfig, RemoteStoreConfig
from vllm_blend.kv_store.tiered import Tier, TieredChunkStore

MODEL = ModelFingerprint("", "", "w", "float32", "rope", "tok", num_layers=3, num_kv_heads=2, head_dim=4)
CHUNK = ChunkId.from_tokens(MODEL, [0, 7], [5, 6, 7, 8, 9, 10])
OTHER_TOKENS = ChunkId(CHUNK.key, CHUNK.context, (5, 6, 7, 8, 9, 11))
EXPECTED = ExpectedChunk(MODEL, CHUNK)
WARNING = "not used, it will be computed again"


def kv_of(
    layers: int = 3, tokens: int = 6, heads: int = 2, dim: int = 4, dtype: torch.dtype = torch.float32
) -> ChunkKV:
    k, v = torch.randn(2, layers, tokens, heads, dim, generator=torch.manual_seed(1)).to(dtype)
    return ChunkKV(k, v)


FORGED: dict[str, ChunkKV] = {
    "fewer layers": kv_of(layers=2),
    "more layers": kv_of(layers=4),
    "fewer tokens": kv_of(tokens=5),
    "more tokens": kv_of(tokens=7),
    "fewer heads": kv_of(heads=1),
    "another head size": kv_of(dim=8),
    "the same bytes in other heads": kv_of(heads=4, dim=2),
    "the same bytes in other layers": kv_of(layers=6, tokens=3),
    "another dtype": kv_of(dtype=torch.bfloat16),
    "the same bytes in another dtype": kv_of(dim=8, dtype=torch.float16),
}


def disk(folder: Path, **options: Any) -> DiskChunkStore:
    return DiskChunkStore(DiskStoreConfig(folder, 1 << 24, MODEL.digest, fingerprint=MODEL, **options))


def disk_tier(folder: Path, format: StoredFormat, at_once: bool) -> Tier:
    store = disk(folder, format=format)
    return Tier("disk", store, 1 << 20, None if at_once else store.read_many)


def server_tier(folder: Path, format: StoredFormat) -> Tier:
    store = RemoteChunkStore(RemoteStoreConfig(f"file://{folder}", MODEL.digest, format))
    return Tier("remote", store, 1 << 20)


TIERS: dict[str, Callable[[Path, StoredFormat], Tier]] = {
    "disk": lambda folder, format: disk_tier(folder, format, at_once=True),
    "disk, layer by layer": lambda folder, format: disk_tier(folder, format, at_once=False),
    "server": server_tier,
}


@pytest.mark.parametrize("format", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("which", TIERS)
def test_what_is_forged_is_a_miss_of_its_tier_and_leaves_it(
    which: str, format: StoredFormat, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = TIERS[which](tmp_path, format)
    store = TieredChunkStore(MemoryChunkStore(1 << 20), [tier])
    taken: list[int] = []
    allocate = store._allocate

    def noted(owner: Owner, size: int) -> torch.Tensor | None:
        taken.append(size)
        return allocate(owner, size)

    monkeypatch.setattr(store, "_allocate", noted)
    for name, kv in FORGED.items():
        taken.clear()
        before = tier.storage.stats.misses["foreign"]
        tier.storage.put_many([(CHUNK.key, kv)])
        assert CHUNK.key in tier.storage
        assert store.get(CHUNK.key, EXPECTED) is None, name
        assert tier.storage.stats.misses["foreign"] == before + 1, name
        assert CHUNK.key not in tier.storage and CHUNK.key not in store, name
        assert not taken, "memory was taken for a chunk that its header tells apart"
    # A server's chunks are warned of once for each key, those of a disk each time.
    assert caplog.text.count(WARNING) == (1 if which == "server" else len(FORGED))
    tier.storage.put_many([(CHUNK.key, kv_of())])
    found = store.get(CHUNK.key, EXPECTED)
    assert found is not None and find_kv_mismatch(EXPECTED, found) is None and found.content == CHUNK
    assert format != "auto" or same(found, kv_of())
    store.close()


@settings(max_examples=150, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 8), st.integers(1, 3), st.sampled_from([2, 4, 8])),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    format=st.sampled_from(["auto", "int8", "fp8"]),
)
def test_only_kv_of_the_expected_layout_ever_comes_out(
    shape: tuple[int, int, int, int], dtype: torch.dtype, format: StoredFormat
) -> None:
    k = torch.ones(shape, dtype=dtype)
    kv = ChunkKV(k, k)
    data = to_bytes(serialize(CHUNK.key, MODEL.digest, kv, ChunkLayout.from_kv(kv, format)))
    wanted = (shape, dtype) == ((3, 6, 2, 4), torch.float32)
    try:
        found = from_bytes(data, CHUNK.key, MODEL.digest, expected=EXPECTED)
    except ChunkFault as fault:
        assert fault.kind == "foreign" and not wanted
    else:
        assert wanted and tuple(found.k.shape) == shape


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("largest", [float("nan"), float("inf"), float("-inf"), -1.0])
def test_scales_that_no_kv_has_are_damage(format: StoredFormat, largest: float) -> None:
    layout = ChunkLayout.from_kv(kv_of(), format)
    forged = serialize(CHUNK.key, MODEL.digest, kv_of(), layout)
    start, stop = layout.layer_span(1)
    forged.payload[start : start + 8].view(torch.float32)[1] = largest  # that of V
    checksums = list(forged.header.checksums)
    checksums[1] = xxhash.xxh3_64_intdigest(forged.payload[start:stop].numpy().data)
    data = to_bytes(replace(forged, header=replace(forged.header, checksums=tuple(checksums))))
    with pytest.raises(ChunkFault, match="the largest number of layer 1 is") as raised:
        from_bytes(data, CHUNK.key, MODEL.digest)
    assert raised.value.kind == "damaged"


@pytest.mark.parametrize(
    "statement",
    [
        None,
        "UPDATE names SET tokens = ?",
        "UPDATE names SET tokens = x'00'",
        "UPDATE names SET tokens = 'text'",
        "UPDATE names SET tokens = 1e308 * 10",
    ],
)
def test_token_ids_that_the_disk_keeps_must_be_those_asked_for(
    tmp_path: Path, statement: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with disk(tmp_path) as store:
        store.put(CHUNK.key, kv_of().with_content(CHUNK if statement else OTHER_TOKENS))
        assert store.space.index.find_many([CHUNK.key])[CHUNK.key].token_ids is not None
        if statement:
            tokens = np.asarray(OTHER_TOKENS.token_ids, "<i8").tobytes()
            with sqlite3.connect(tmp_path / "v1" / "index.sqlite3") as index:
                index.execute(statement, (tokens,) if "?" in statement else ())
            index.close()
        assert store.get(CHUNK.key, expected=EXPECTED) is None
        assert store.stats.misses == {"foreign": 1} and caplog.text.count(WARNING) == 1
        store.put(CHUNK.key, kv_of().with_content(CHUNK))
        assert same(store.get(CHUNK.key, expected=EXPECTED), kv_of())
        store.remove(CHUNK.key)
        store.put(CHUNK.key, kv_of())  # of which no ids are stored: its layout is all there is to compare
        assert store.get(CHUNK.key, expected=EXPECTED) is not None


def test_a_chunk_of_an_older_version_that_has_a_part_of_its_kvs_is_foreign() -> None:
    header = serialize(CHUNK.key, MODEL.digest, kv_of(), ChunkLayout.from_kv(kv_of(), "auto")).header.encode()
    body = bytearray(header[:-8])
    body[12:16] = (6).to_bytes(4, "little")  # the number of tokens of which some heads had fewer KVs
    with pytest.raises(ChunkFault, match="does not hold the KVs of all its tokens") as raised:
        ChunkHeader.decode(bytes(body) + xxhash.xxh3_64_digest(bytes(body))[::-1], CHUNK.key, MODEL.digest)
    assert raised.value.kind == "foreign"


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.bfloat16, 0), (torch.float16, 0), (torch.float32, 0), (torch.float32, 0xFFFF)]
)
def test_numbers_that_are_not_finite_are_found(dtype: torch.dtype, bits: int) -> None:
    """They are those that torch.isfinite finds, of all numbers of 16 bits and those of 32 bits that begin so."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    numbers = (every << 16 | bits).view(dtype) if dtype == torch.float32 else every.to(torch.int16).view(dtype)
    assert [is_finite(number) for number in numbers.split(1)] == numbers.isfinite().tolist()
    assert is_finite(numbers[numbers.isfinite()].view(2, -1).T) and not is_finite(numbers.view(2, -1).T)


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
@pytest.mark.parametrize("which", TIERS)
@pytest.mark.parametrize("part", ["k", "v"])
def test_kv_that_would_fail_its_prompts_is_dropped(
    which: str, part: str, number: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused from a store and from a folder, and must not replace a good chunk either."""
    tier = TIERS[which](tmp_path / "tier", "auto")
    store = TieredChunkStore(MemoryChunkStore(1 << 20), [tier])
    bad = kv_of()
    getattr(bad, part)[2, 5, 1, 3] = number
    tier.storage.put_many([(CHUNK.key, bad)])
    assert store.get(CHUNK.key, EXPECTED) is None and CHUNK.key not in tier.storage
    assert tier.storage.stats.misses["damaged"] == 1 and caplog.text.count(WARNING) == 1
    write_chunk(tmp_path / "pt", CHUNK, bad, MODEL)
    with pytest.raises(ChunkMiss, match="numbers that are not finite"):
        load_chunk(tmp_path / "pt", CHUNK, MODEL)
    if which == "disk":
        tier.storage.put_many([(CHUNK.key, kv_of().with_content(CHUNK))])
        counts = import_folder(tmp_path / "pt", DiskStoreConfig(tmp_path / "tier", 1 << 24, MODEL.digest))
        assert counts == {"stored": 0, "damaged": 1} and same(store.get(CHUNK.key, EXPECTED), kv_of())
    store.close()


def test_kv_in_memory_is_compared_with_its_tokens_too() -> None:
    assert find_kv_mismatch(EXPECTED, kv_of().with_content(CHUNK)) is None
    assert "other tokens" in str(find_kv_mismatch(EXPECTED, kv_of().with_content(OTHER_TOKENS)))
    mixed = ChunkKV(kv_of().k, kv_of().v.half())
    assert "its K is torch.float32 and its V torch.float16" in str(find_kv_mismatch(EXPECTED, mixed))


@pytest.mark.parametrize("name", FORGED)
def test_folders_and_exports_of_what_is_forged_are_refused(name: str, tmp_path: Path) -> None:
    kv = FORGED[name]
    write_chunk(tmp_path / "pt", CHUNK, kv, MODEL)
    with pytest.raises(ChunkMiss):
        load_chunk(tmp_path / "pt", CHUNK, MODEL)
    with disk(tmp_path / "store") as store:
        store.put(CHUNK.key, kv.with_content(CHUNK))
    assert export_folder(tmp_path / "store", tmp_path / "out") == {"foreign": 1}
    assert not (tmp_path / "out").exists()
