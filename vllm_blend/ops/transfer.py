"""Copying stored KV from the host to a GPU, a layer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_blend.ops import cuda, cuda_library
from vllm_blend.ops import pointers as to
from vllm_blend.ops.c_functions import Pieces


@dataclass(frozen=True)
class HostKV:
    """K and V on the host, each [layers, tokens, kv_heads, head_dim], with what a copy needs to know of them."""

    k: torch.Tensor
    v: torch.Tensor
    addresses: tuple[int, int]  # of K and of V
    layer_bytes: int  # from a layer to the next, in K and in V
    token_bytes: int
    pinned: bool

    @classmethod
    def from_tensors(cls, k: torch.Tensor, v: torch.Tensor) -> HostKV | None:
        """Return what a copy needs to know; None if the tensors are elsewhere, or not laid out alike with each layer
        in one piece."""
        if any(t.device.type != "cpu" or t.numel() == 0 or not t[0].is_contiguous() for t in (k, v)):
            return None
        if k.shape != v.shape or k.stride() != v.stride() or k.dtype != v.dtype:
            return None
        addresses, itemsize = (k.data_ptr(), v.data_ptr()), k.itemsize
        pinned = k.is_pinned() and v.is_pinned()
        return cls(k, v, addresses, k.stride(0) * itemsize, k.shape[2] * k.shape[3] * itemsize, pinned)


class HostPieces:
    """Tokens start .. stop - 1 of several `HostKV`, to be copied one after another."""

    def __init__(self, pieces: Sequence[tuple[HostKV, int, int]]) -> None:
        self.pieces = list(pieces)
        self.pinned = all(kv.pinned for kv, _, _ in self.pieces)
        self.num_rows = sum(stop - start for _, start, stop in self.pieces)
        first = self.pieces[0][0].k
        self.num_layers, self.heads, self.dtype = len(first), first.shape[2:], first.dtype
        for kv, start, stop in self.pieces:
            alike = (len(kv.k), kv.k.shape[2:], kv.k.dtype) == (self.num_layers, self.heads, self.dtype)
            if not (alike and 0 <= start < stop <= kv.k.shape[1]):
                raise ValueError(
                    f"tokens {start} to {stop} of KV {list(kv.k.shape)} {kv.k.dtype} cannot be copied along with "
                    f"[{self.num_layers} layers, tokens, {', '.join(map(str, self.heads))}] {self.dtype}"
                )
        self.table = np.array(  # as vb_copy_pieces takes it
            [
                (*(at + start * kv.token_bytes for at in kv.addresses), kv.layer_bytes, (stop - start) * kv.token_bytes)
                for kv, start, stop in self.pieces
            ],
            np.int64,
        )


def copy_pieces(pieces: HostPieces, layer: int, k: torch.Tensor, v: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Queue, on `stream`, copies of a layer of all pieces to k and v [at least their tokens, kv_heads, head_dim].

    Asynchronous where the pieces are pinned; they must stay until the stream is through. Raises ValueError, before
    anything is copied, where they do not fit.
    """
    if not 0 <= layer < pieces.num_layers:
        raise ValueError(f"layer {layer} of KV of {pieces.num_layers} layers cannot be copied")
    rows, heads = pieces.num_rows, pieces.heads
    for buffer in (k, v):
        fits = buffer.dim() == 3 and len(buffer) >= rows and tuple(buffer.shape[1:]) == tuple(heads)
        if not (fits and buffer.dtype == pieces.dtype and buffer.is_contiguous()):
            raise ValueError(
                f"{rows} rows of {list(heads)} {pieces.dtype} do not fit a buffer of {list(buffer.shape)} "
                f"{buffer.dtype}, which must be contiguous"
            )
    if not cuda_library.is_available():
        with torch.cuda.stream(stream):
            return copy_pieces_reference(pieces, layer, k, v)
    table, buffers = pieces.table, (to.Key(k), to.Value(v), stream.cuda_stream)
    code = cuda.functions().copy_pieces(Pieces(table.ctypes.data), len(table), layer, pieces.pinned, *buffers)
    cuda_library.check("copy_pieces", code)


def copy_pieces_reference(pieces: HostPieces, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
    row = 0
    for kv, start, stop in pieces.pieces:
        rows = slice(row, row + stop - start)
        k[rows].copy_(kv.k[layer, start:stop], non_blocking=True)
        v[rows].copy_(kv.v[layer, start:stop], non_blocking=True)
        row = rows.stop
