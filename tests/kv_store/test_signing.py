"""Chunks of a shared store count only if they are signed with this process's secret."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from tests.kv_store.stored_chunks import MODEL, chunk, key, same
from tests.waiting import DEADLINE
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.layout import ChunkFault, ChunkLayout
from vllm_blend.kv_store.remote import RemoteChunkStore
from vllm_blend.kv_store.serialization import ChunkHeader, from_bytes, serialize, to_bytes
from vllm_blend.kv_store.signing import ChunkSigner
from vllm_blend.kv_store.store_config import DiskStoreConfig, RemoteStoreConfig

OURS, THEIRS = ChunkSigner(b"o" * 32), ChunkSigner(b"t" * 32)


def stored(kv: Any, signer: ChunkSigner | None, name: str = key(1)) -> bytes:
    return to_bytes(serialize(name, MODEL, kv, ChunkLayout.from_kv(kv, "auto"), signer=signer))


def open_store(kind: str, path: Path, signer: ChunkSigner | None) -> Any:
    if kind == "disk":
        return DiskChunkStore(DiskStoreConfig(path, 1 << 22, MODEL, timeout=DEADLINE, signer=signer))
    return RemoteChunkStore(RemoteStoreConfig(f"file://{path}", MODEL, timeout=DEADLINE, signer=signer))


@pytest.mark.parametrize("kind", ["disk", "remote"])
@pytest.mark.parametrize(
    ("writer", "reader", "fault"),
    [(None, OURS, "unsigned"), (THEIRS, OURS, "forged"), (OURS, None, "foreign")],
    ids=["unsigned", "another secret", "no secret"],
)
def test_what_another_has_written_is_a_miss_with_a_warning(
    kind: str,
    writer: ChunkSigner | None,
    reader: ChunkSigner | None,
    fault: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kv = chunk(key(1))
    open_store(kind, tmp_path, writer).put(key(1), kv)
    assert same(open_store(kind, tmp_path, writer).get(key(1)), kv)
    store = open_store(kind, tmp_path, reader)
    with caplog.at_level(logging.WARNING):
        assert store.get(key(1)) is None and store.stats.misses[fault] == 1
    assert "sign" in caplog.text and key(1) in caplog.text
    store.put(key(1), kv)
    assert same(store.get(key(1)), kv)


def test_no_part_of_a_signed_chunk_can_be_exchanged() -> None:
    """Someone without the secret who repairs the checksums that anyone can compute is found out all the same. So is
    who passes off a signed chunk as another one, or takes a layer from another."""
    kv, other = chunk(key(1), 24), chunk(key(2), 24)
    data, layout = stored(kv, OURS), ChunkLayout.from_kv(kv, "auto")
    assert same(from_bytes(data, key(1), MODEL, signer=OURS), kv)
    start = len(data) - layout.payload_bytes
    first, stop = (start + edge for edge in layout.layer_span(2))
    foreign_layer = data[:first] + stored(other, OURS)[first:stop] + data[stop:]
    header = data[8:start]
    body = bytearray(header[:-40])
    body[-8:] = (1).to_bytes(8, "little")  # the last layer's checksum
    repaired = bytes(body) + xxhash.xxh3_64_intdigest(bytes(body)).to_bytes(8, "little") + header[-32:]
    for forged, name, kind in (
        (foreign_layer, key(1), "damaged"),
        (data[:8] + repaired + data[start:], key(1), "forged"),
        (data, key(2), "foreign"),
        (stored(kv, THEIRS), key(1), "forged"),
        (data[:8] + header[:-1] + bytes([header[-1] ^ 1]) + data[start:], key(1), "forged"),
    ):
        with pytest.raises(ChunkFault) as fault:
            from_bytes(forged, name, MODEL, signer=OURS)
        assert fault.value.kind == kind
    layer = memoryview(data)[first:stop]
    assert OURS.layer_checksum(layer) != THEIRS.layer_checksum(layer)  # it cannot be computed without the secret
    for cut in range(0, len(header), 7):
        with pytest.raises(ChunkFault):
            ChunkHeader.decode(header[:cut], key(1), MODEL, signer=OURS)


def test_secrets(tmp_path: Path) -> None:
    """They come from a file, have a fair length and are never shown."""
    path = tmp_path / "key"
    path.write_bytes(b"s" * 32 + b"\n")
    signer = ChunkSigner.from_file(path)
    assert signer == ChunkSigner(b"s" * 32) and "ss" not in repr(signer)
    kv = chunk(key(3))
    assert torch.equal(from_bytes(stored(kv, signer), key(1), MODEL, signer=signer).k, kv.k)
    path.write_bytes(b"s" * 31 + b"\n")
    with pytest.raises(ValueError, match="has 31 bytes: give at least 32"):
        ChunkSigner.from_file(path)
