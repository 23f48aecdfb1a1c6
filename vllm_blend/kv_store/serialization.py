"""One chunk's KV as bytes, for the disk and for remote stores: a header that vouches for itself and for every layer,
and the layers where layout.py puts them.

Nothing here is trusted when it is read: the header has a checksum (xxh3, 64 bits) of itself, and one of each layer.
Stores that others may write to can have chunks signed (signing.py).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import get_args

import numpy as np
import torch
import xxhash

from vllm_blend.kv_store.chunk_kv import STORED_DTYPES, ChunkKV, ExpectedChunk, find_mismatch, is_finite
from vllm_blend.kv_store.host_memory import PAGE, aligned_empty
from vllm_blend.kv_store.layout import ChunkFault, ChunkLayout, StoredFormat
from vllm_blend.kv_store.signing import SIGNATURE_BYTES, ChunkSigner

MAGIC = b"VBLENDKV"
VERSION, SIGNED_VERSION = 1, 2

_DTYPES = tuple(STORED_DTYPES.values())
_FORMATS = get_args(StoredFormat)
_HEAD = struct.Struct("<8sHBBI16s16sIIII")  # magic, version, format, dtype, zero, key, model, shape
_CHECKSUM = struct.Struct("<Q")

_layout = lru_cache(256)(ChunkLayout)  # chunks of one length are alike, and what follows is derived once


@dataclass(frozen=True)
class ChunkHeader:
    """The metadata that a store keeps beside a chunk's layers. It is signed if there is a signer."""

    key: str  # ChunkId.key
    model: str  # ModelFingerprint.digest
    layout: ChunkLayout
    checksums: tuple[int, ...]  # of each layer
    signer: ChunkSigner | None = field(default=None, repr=False, compare=False)

    def encode(self) -> bytes:
        layout = self.layout
        head = _HEAD.pack(
            MAGIC,
            VERSION if self.signer is None else SIGNED_VERSION,
            _FORMATS.index(layout.format),
            _DTYPES.index(layout.dtype),
            0,
            bytes.fromhex(self.key),
            bytes.fromhex(self.model),
            layout.num_layers,
            *layout.layer_shape,
        )
        body = head + np.array(self.checksums, "<u8").tobytes()
        signature = b"" if self.signer is None else self.signer.signature(body)
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)) + signature

    @classmethod
    def decode(
        cls, data: bytes, key: str, model: str, exact: bool = False, signer: ChunkSigner | None = None
    ) -> ChunkHeader:
        """Return the header of chunk `key` of `model`. Raises ChunkFault when it is damaged or another's, with `exact`
        when the chunk was rounded, and with a signer when it has not signed the chunk."""
        if len(data) < _HEAD.size + _CHECKSUM.size:
            raise ChunkFault("truncated", f"its header has {len(data)} bytes")
        magic, version, stored, dtype, reserved, found_key, found_model, layers, tokens, kv_heads, head_dim = (
            _HEAD.unpack_from(data)
        )
        if magic != MAGIC:
            raise ChunkFault("foreign", "it is not a stored chunk")
        body = _checked_body(data, version, signer)
        if found_model.hex() != model:
            raise ChunkFault("foreign", "it was computed by another model")
        if found_key.hex() != key:
            raise ChunkFault("foreign", "it is another chunk")
        if reserved:  # written by a version that could store a part of a chunk's KVs
            raise ChunkFault("foreign", "it does not hold the KVs of all its tokens")
        fits = len(body) == _HEAD.size + layers * _CHECKSUM.size and tokens * kv_heads * head_dim > 0
        if stored >= len(_FORMATS) or dtype >= len(_DTYPES) or not fits:
            raise ChunkFault("damaged", "its header contradicts itself")
        checksums = np.frombuffer(body, "<u8", offset=_HEAD.size)
        layout = _layout(layers, tokens, kv_heads, head_dim, _DTYPES[dtype], _FORMATS[stored])
        if exact and layout.format != "auto":
            raise ChunkFault("rounded", f"it is stored as {layout.format}, and this store's format is 'auto'")
        return cls(key, model, layout, tuple(checksums.tolist()), signer)

    def check(self, expected: ExpectedChunk | None, token_ids: Sequence[int] | None = None) -> None:
        """Raise ChunkFault unless the chunk is the expected one, where that is known. `token_ids` are those that the
        store keeps beside the chunk, None if it keeps none."""
        layout = self.layout
        shape = (layout.num_layers, *layout.layer_shape)
        if expected is not None:
            mismatch = find_mismatch(expected, shape, layout.dtype, token_ids)
            if mismatch is not None:
                raise ChunkFault("foreign", mismatch)

    def check_layers(self, payload: torch.Tensor, layers: Iterable[int]) -> None:
        """Raise ChunkFault when one of these layers of the payload is not what was written."""
        view = payload.numpy().data
        for layer in layers:
            if layer_checksum(self.layout, view, layer, self.signer) != self.checksums[layer]:
                raise ChunkFault("damaged", f"the checksum of layer {layer} differs")


@dataclass(frozen=True)
class SerializedChunk:
    header: ChunkHeader
    payload: torch.Tensor  # [payload_bytes] uint8, page-aligned


def check_numbers(kv: ChunkKV, layers: Iterable[int]) -> None:
    """Raise ChunkFault when one of these layers, as it is used, has a number that is not finite."""
    for layer in layers:
        if not (is_finite(kv.k[layer]) and is_finite(kv.v[layer])):
            raise ChunkFault("damaged", f"layer {layer} has numbers that are not finite")


def serialize(
    key: str,
    model: str,
    kv: ChunkKV,
    layout: ChunkLayout,
    memory: torch.Tensor | None = None,
    signer: ChunkSigner | None = None,
) -> SerializedChunk:
    """Return a chunk as bytes, signed if there is a signer; `kv` may be on any device. Raises NotQuantizable.

    `memory` ([payload_bytes] uint8, page-aligned) is where it goes; by default new memory, which costs more to get than
    to fill where chunks are large.
    """
    kv.wait()
    payload = aligned_empty(layout.payload_bytes) if memory is None else memory
    _clear_gaps(layout, payload)
    if layout.format == "auto":
        whole = layout.kv_in(payload)
        whole.k.copy_(kv.k)
        whole.v.copy_(kv.v)
    else:
        for layer in range(layout.num_layers):
            layout.write_layer(kv, layer, payload)
    view = payload.numpy().data
    checksums = tuple(layer_checksum(layout, view, layer, signer) for layer in range(layout.num_layers))
    return SerializedChunk(ChunkHeader(key, model, layout, checksums, signer), payload)


def to_bytes(chunk: SerializedChunk) -> bytes:
    """Return a chunk as one value: the length of its header in 8 bytes, the header, the layers."""
    header = chunk.header.encode()
    return b"".join((_CHECKSUM.pack(len(header)), header, chunk.payload.numpy().data))


def from_bytes(
    data: bytes,
    key: str,
    model: str,
    exact: bool = False,
    expected: ExpectedChunk | None = None,
    signer: ChunkSigner | None = None,
) -> ChunkKV:
    """Return the chunk of `to_bytes`, in memory of its own. Raises ChunkFault, with `exact` also where it was rounded,
    with `expected` where it is another one, and with a signer where that has not signed it."""
    if len(data) < _CHECKSUM.size:
        raise ChunkFault("truncated", f"it has {len(data)} bytes")
    start = _CHECKSUM.size + _CHECKSUM.unpack_from(data)[0]
    header = ChunkHeader.decode(data[_CHECKSUM.size : start], key, model, exact, signer)
    header.check(expected)
    layout = header.layout
    if len(data) - start != layout.payload_bytes:
        raise ChunkFault("truncated", f"it has {len(data) - start} bytes of KV instead of {layout.payload_bytes}")
    payload = aligned_empty(layout.payload_bytes)
    payload.numpy()[:] = np.frombuffer(data, np.uint8, offset=start)
    kv = layout.kv_in(payload if layout.format == "auto" else aligned_empty(layout.kv_bytes))
    header.check_layers(payload, range(layout.num_layers))
    if layout.format != "auto":
        for layer in range(layout.num_layers):
            layout.read_layer(payload, layer, kv)
    check_numbers(kv, range(layout.num_layers))
    return kv


def max_bytes_of(expected: ExpectedChunk) -> int:
    """Return a number of bytes that `to_bytes` of the expected chunk never reaches, in any format."""
    layers = expected.shape[0]
    numbers = 2 * prod(expected.shape) * (4 + 4)  # K, V and their scales, all of four bytes at most
    return numbers + layers * (PAGE + 2 * _CHECKSUM.size) + 2 * PAGE


def layer_checksum(layout: ChunkLayout, payload: memoryview, layer: int, signer: ChunkSigner | None = None) -> int:
    start, stop = layout.layer_span(layer)
    data = payload[start:stop]
    return xxhash.xxh3_64_intdigest(data) if signer is None else signer.layer_checksum(data)


def _checked_body(data: bytes, version: int, signer: ChunkSigner | None) -> bytes:
    """Return a header without its checksum and its signature, both of which have been checked."""
    size = len(data) - _CHECKSUM.size - (SIGNATURE_BYTES if version == SIGNED_VERSION else 0)
    if size < _HEAD.size:
        raise ChunkFault("truncated", f"its header has {len(data)} bytes")
    body, (checksum,) = data[:size], _CHECKSUM.unpack_from(data, size)
    if xxhash.xxh3_64_intdigest(body) != checksum:
        raise ChunkFault("damaged", "the checksum of its header differs")
    if version not in (VERSION, SIGNED_VERSION):
        raise ChunkFault("foreign", f"it has format version {version}, this package reads {VERSION}")
    if signer is None and version == SIGNED_VERSION:
        raise ChunkFault("foreign", "it is signed, and this process has no secret to check that with")
    if signer is not None and version == VERSION:
        raise ChunkFault("unsigned", "it is not signed, and this process takes signed chunks alone")
    if signer is not None and not signer.is_valid(body, data[size + _CHECKSUM.size :]):
        raise ChunkFault("forged", "it is not signed with the secret of this process")
    return body


def _clear_gaps(layout: ChunkLayout, payload: torch.Tensor) -> None:
    """Zero what no layer fills: no byte of other memory leaves this process."""
    stop = layout.num_layers * layout.stride
    payload[stop:].zero_()
    if layout.stride > layout.layer_bytes:
        payload[:stop].view(layout.num_layers, layout.stride)[:, layout.layer_bytes :].zero_()


def check_key(key: str) -> None:
    """Raise ValueError unless `key` is one of `ChunkId`."""
    if not is_key(key):
        raise ValueError(f"chunk key {key!r} must be 32 hex digits, as ChunkId.key has")


def is_key(key: str) -> bool:
    return len(key) == 32 and not set(key) - set("0123456789abcdef")
