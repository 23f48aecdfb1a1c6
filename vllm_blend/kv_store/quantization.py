"""One layer of chunk KV in eight bits: int8, K per channel and V per token, or fp8 (e4m3).

The keys of a channel are alike over tokens while channels differ much, and the values of a token are alike over
channels: so K shares a scale along tokens and V along channels (KIVI, Liu et al., ICML 2024, section 3; KVQuant,
Hooper et al., NeurIPS 2024, section 3.1, which also finds K easier before RoPE, as it is stored here). An e4m3 number
has an exponent of its own, so fp8 needs one scale for all of K and one for all of V, for their range.

A scale is one byte: by how many sixteenths of an octave it is below the largest of the layer, which is kept in
float32. It is never too small, and on average 2% too large. In float16 the scales of a passage of 41 tokens of 2 x 64
channels would be 1.6% of what bfloat16 KV takes, which is most of what int8 may be above a half.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from vllm_blend.ops.e4m3 import E4M3, e4m3_to_float

STEPS = 16  # of an octave
SMALLEST = torch.finfo(torch.float32).tiny
BLOCK = 1 << 18  # numbers that are converted at once

_own = threading.local()


class NotQuantizable(ValueError):
    """KV that the encoding has no numbers for."""


@dataclass(frozen=True)
class Quantization:
    """How K and V [tokens, kv_heads, head_dim] of a layer become numbers of `dtype` and scales."""

    dtype: torch.dtype
    largest: float
    shared: tuple[tuple[int, ...], tuple[int, ...]]  # dimensions along which K, and V, share a scale

    def scale_counts(self, layer_shape: Sequence[int]) -> list[int]:
        """Return how many scales K and V of a layer have."""
        return [prod(_scale_shape(layer_shape, dims)) for dims in self.shared]


QUANTIZATIONS = {
    "int8": Quantization(torch.int8, 127.0, ((0,), (1, 2))),
    "fp8": Quantization(E4M3, 448.0, ((0, 1, 2), (0, 1, 2))),
}


@dataclass(frozen=True)
class QuantizedTensor:
    """K or V of a layer, as views of the memory it is stored in."""

    how: Quantization
    dims: tuple[int, ...]  # that share a scale
    top: torch.Tensor  # [] float32: the largest magnitude
    steps: torch.Tensor  # [scales] uint8: by how much that of each group is below
    values: torch.Tensor  # [tokens, kv_heads, head_dim] of how.dtype

    def write(self, x: torch.Tensor) -> None:
        """Store x [tokens, kv_heads, head_dim]. Raises NotQuantizable where it is not finite."""
        largest = torch.maximum(x.amax(self.dims), x.amin(self.dims).neg_()).float()
        self.top.copy_(largest.max())
        if not bool(self.top.isfinite()):
            raise NotQuantizable("KV that is not finite")
        below = (torch.log2(self.top / largest) * STEPS).floor_()
        self.steps.copy_(below.nan_to_num_(nan=255).clamp_(0, 255).flatten())  # nan: all are zero
        scales = self._scales()
        for rows, scaled in self._blocks():
            scaled.copy_(x[rows])
            scaled.div_(scales if len(scales) == 1 else scales[rows]).clamp_(-self.how.largest, self.how.largest)
            self.values[rows].copy_(scaled.round_() if self.how.dtype is torch.int8 else scaled)

    @property
    def is_valid(self) -> bool:
        """Return whether the largest magnitude can be one: finite and not negative, as `write` stores it."""
        return bool(self.top.isfinite()) and float(self.top) >= 0

    def read(self, out: torch.Tensor) -> None:
        """Write what was stored, rounded, to `out` [tokens, kv_heads, head_dim]."""
        scales = self._scales()
        for rows, values in self._blocks():
            stored = self.values[rows]
            values.copy_(e4m3_to_float(stored) if self.how.dtype is E4M3 else stored)
            out[rows].copy_(values.mul_(scales if len(scales) == 1 else scales[rows]))

    def _blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield tokens, a few at a time, and a buffer for these [tokens, kv_heads, head_dim] float32, which the thread
        keeps: new memory for each layer would take longer to get than all the rest."""
        tokens, *row = self.values.shape
        step = max(1, BLOCK // prod(row))
        buffer: torch.Tensor | None = getattr(_own, "buffer", None)
        if buffer is None or len(buffer) < step * prod(row):
            buffer = _own.buffer = torch.empty(max(BLOCK, step * prod(row)))
        for start in range(0, tokens, step):
            stop = min(tokens, start + step)
            yield slice(start, stop), buffer[: (stop - start) * prod(row)].view(stop - start, *row)

    def _scales(self) -> torch.Tensor:
        scales = torch.exp2(self.steps.float() / -STEPS) * (self.top / self.how.largest)
        return scales.clamp_min_(SMALLEST).view(_scale_shape(self.values.shape, self.dims))


def _scale_shape(shape: Sequence[int], dims: tuple[int, ...]) -> list[int]:
    return [1 if dim in dims else size for dim, size in enumerate(shape)]
