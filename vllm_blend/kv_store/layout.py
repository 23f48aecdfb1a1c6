"""Where the bytes of a stored chunk stand.

A layer is one piece: [scales |] K | V, each [tokens, kv_heads, head_dim] (quantization.py). Layers start on 4 KiB
pages, so that each can be read by itself past the page cache, straight to where it is wanted. Where a layer is so
small that rounding it up would cost more than 1/64 of it, layers are packed (16-byte aligned), and reading one reads
the pages that it touches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

import torch

from vllm_blend.kv_store.chunk_kv import STORED_DTYPES, ChunkKV
from vllm_blend.kv_store.host_memory import PAGE, round_up
from vllm_blend.kv_store.quantization import QUANTIZATIONS, QuantizedTensor
from vllm_blend.ops.e4m3 import E4M3

StoredFormat = Literal["auto", "fp8", "int8"]  # auto: the chunk's own dtype, bit for bit
Fault = Literal["damaged", "foreign", "forged", "rounded", "truncated", "unsigned", "vanished"]

PACKED_ALIGNMENT = 16
PACK_BELOW = 64 * PAGE  # bytes of a layer


class ChunkFault(Exception):
    """Bytes that are not the chunk that was asked for. `kind` is for counting, the message for people."""

    def __init__(self, kind: Fault, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class ChunkLayout:
    """The places of a chunk's bytes; everything follows from its shape, its dtype and the format it is stored in."""

    num_layers: int
    num_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # as the chunk was put, and comes back
    format: StoredFormat

    @classmethod
    def from_kv(cls, kv: ChunkKV, stored: StoredFormat) -> ChunkLayout:
        """Return the layout of `kv` stored as `stored`; what has eight bits already is stored as it is. Raises
        ValueError for a dtype that is not stored."""
        if kv.k.dtype not in STORED_DTYPES.values() or kv.v.dtype != kv.k.dtype:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORED_DTYPES.values())
            raise ValueError(f"chunk K {kv.k.dtype} and V {kv.v.dtype} must have one dtype of {names}")
        if kv.k.numel() == 0:
            raise ValueError(f"chunk K {list(kv.k.shape)} must not be empty")
        layers, tokens, kv_heads, head_dim = kv.k.shape
        return cls(layers, tokens, kv_heads, head_dim, kv.k.dtype, "auto" if kv.k.dtype is E4M3 else stored)

    @property
    def layer_shape(self) -> tuple[int, int, int]:
        """Return the shape of a layer's K, and of its V."""
        return (self.num_tokens, self.num_kv_heads, self.head_dim)

    @cached_property
    def parts(self) -> list[tuple[int, torch.dtype]]:
        """Return the number of elements and dtype of each part of a layer, in order. The largest dtypes come first, so
        all parts are aligned."""
        count = prod(self.layer_shape)
        if self.format == "auto":
            return [(count, self.dtype), (count, self.dtype)]
        how = QUANTIZATIONS[self.format]
        steps = [(number, torch.uint8) for number in how.scale_counts(self.layer_shape)]
        return [(1, torch.float32), (1, torch.float32), *steps, (count, how.dtype), (count, how.dtype)]

    @cached_property
    def layer_bytes(self) -> int:
        return sum(count * dtype.itemsize for count, dtype in self.parts)

    @cached_property
    def stride(self) -> int:
        """Return the bytes from a layer's start to the next one's."""
        return round_up(self.layer_bytes, PACKED_ALIGNMENT if self.layer_bytes < PACK_BELOW else PAGE)

    @cached_property
    def payload_bytes(self) -> int:
        """Return the bytes of all layers, in whole pages."""
        return round_up(self.num_layers * self.stride, PAGE)

    @cached_property
    def kv_bytes(self) -> int:
        """Return the bytes of memory for the chunk as it comes back, in whole pages."""
        if self.format == "auto":
            return self.payload_bytes
        return round_up(self.num_layers * self._decoded_stride, PAGE)

    @property
    def _decoded_stride(self) -> int:
        """Return the bytes of a layer as it comes back from a format that rounds."""
        return 2 * prod(self.layer_shape) * self.dtype.itemsize

    def layer_span(self, layer: int) -> tuple[int, int]:
        """Return the bytes of a layer: start and stop in the payload."""
        return layer * self.stride, layer * self.stride + self.layer_bytes

    def kv_in(self, memory: torch.Tensor) -> ChunkKV:
        """Return the chunk as views of `memory` ([at least kv_bytes] uint8, aligned to 16 bytes), of whatever it
        holds."""
        stride = self.stride if self.format == "auto" else self._decoded_stride
        elements = memory[: self.kv_bytes].view(self.dtype)
        size = (self.num_layers, *self.layer_shape)
        strides = (stride // self.dtype.itemsize, self.num_kv_heads * self.head_dim, self.head_dim, 1)
        start, count = elements.storage_offset(), prod(self.layer_shape)
        k, v = (torch.as_strided(elements, size, strides, start + offset) for offset in (0, count))
        return ChunkKV(k, v)

    def write_layer(self, kv: ChunkKV, layer: int, payload: torch.Tensor) -> None:
        """Encode a layer into the payload [payload_bytes] uint8."""
        for target, source in zip(self._stored(payload, layer), (kv.k[layer], kv.v[layer]), strict=True):
            if isinstance(target, QuantizedTensor):
                target.write(source.cpu())
            else:
                target.copy_(source)

    def read_layer(self, payload: torch.Tensor, layer: int, kv: ChunkKV) -> None:
        """Decode a layer of the payload into `kv`. Raises ChunkFault for scales that no KV has."""
        for source, target in zip(self._stored(payload, layer), (kv.k[layer], kv.v[layer]), strict=True):
            if isinstance(source, QuantizedTensor):
                if not source.is_valid:
                    raise ChunkFault("damaged", f"the largest number of layer {layer} is {float(source.top)}")
                source.read(target)
            else:
                target.copy_(source)

    def _stored(self, payload: torch.Tensor, layer: int) -> list[torch.Tensor | QuantizedTensor]:
        """Return K and V of a layer where they are stored."""
        start, pieces = layer * self.stride, []
        for count, dtype in self.parts:
            stop = start + count * dtype.itemsize
            pieces.append(payload[start:stop].view(dtype))
            start = stop
        kv = [piece.view(self.layer_shape) for piece in pieces[-2:]]
        if self.format == "auto":
            return [*kv]
        how = QUANTIZATIONS[self.format]
        return [QuantizedTensor(how, how.shared[i], pieces[i][0], pieces[2 + i], kv[i]) for i in range(2)]
