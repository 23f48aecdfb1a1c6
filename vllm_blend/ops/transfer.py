"""Copying stored KV from the host to a GPU, a layer at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_blend.ops import cuda


class HostPieces:
    """K and V on the host, each piece [layers, tokens, kv_heads, head_dim] with the rows of a layer contiguous.

    Keeps the tensors, and their addresses for the compiled copy.
    """

    def __init__(self, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for pair in pieces:
            if any(t.device.type != "cpu" or not t[0].is_contiguous() for t in pair):
                raise ValueError("pieces must lie on the host, the rows of each layer contiguous")
            if pair[0].stride() != pair[1].stride() or pair[0].shape != pair[1].shape:
                raise ValueError("K and V of a piece must have equal shapes and strides")
        self.pieces = list(pieces)
        self.table = cuda.piece_table(self.pieces)
        self.pinned = all(t.is_pinned() for pair in pieces for t in pair)


def copy_pieces(pieces: HostPieces, layer: int, destination: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Queue, on `stream`, copies of a layer of all pieces one after another: K to destination[0], V to destination[1],
    each [at least their tokens, kv_heads, head_dim]. Asynchronous where the pieces are pinned; they must stay until the
    stream is through."""
    if cuda.is_available():
        to = (destination[0], destination[1], stream.cuda_stream)
        return cuda.copy_pieces(pieces.table, layer, pieces.pinned, *to)
    with torch.cuda.stream(stream):
        copy_pieces_reference(pieces, layer, destination)


def copy_pieces_reference(pieces: HostPieces, layer: int, destination: torch.Tensor) -> None:
    row = 0
    for pair in pieces.pieces:
        count = pair[0].shape[1]
        for half, source in enumerate(pair):
            destination[half, row : row + count].copy_(source[layer], non_blocking=True)
        row += count
