"""From scheduled requests to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_blend.attention.metadata import AttentionMetadata
from vllm_blend.request import Request


@dataclass(frozen=True)
class Span:
    """Which positions of a request a forward pass computes: start .. stop - 1, or the ascending `positions`."""

    request: Request
    start: int
    stop: int
    positions: np.ndarray | None = None  # [n] int64


@dataclass(frozen=True)
class Batch:
    input_ids: torch.Tensor  # [tokens] int64
    metadata: AttentionMetadata


def build_batch(spans: Sequence[Span], block_size: int, device: torch.device) -> Batch:
    """Rows of all spans, in order. Every position below a span's `stop` must be filled, or be in the span."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start_loc = [0]
    seq_lens = []
    width = max(len(span.request.block_table) for span in spans)
    tables = np.zeros((len(spans), width), np.int32)
    for index, span in enumerate(spans):
        request, table = span.request, span.request.block_table
        tables[index, : len(table)] = table
        if span.positions is not None:
            chosen = span.positions
            input_ids.extend(np.asarray(request.token_slice(0, span.stop), np.int64)[chosen].tolist())
            positions.extend(chosen.tolist())
            slots.extend(
                (tables[index, chosen // block_size].astype(np.int64) * block_size + chosen % block_size).tolist()
            )
        elif span.stop - span.start == 1:  # decode: plain integers beat numpy
            input_ids.append(request.token_slice(span.start, span.stop)[0])
            positions.append(span.start)
            slots.append(table[span.start // block_size] * block_size + span.start % block_size)
        else:
            run = np.arange(span.start, span.stop)
            input_ids.extend(request.token_slice(span.start, span.stop))
            positions.extend(run.tolist())
            slots.extend((tables[index, run // block_size].astype(np.int64) * block_size + run % block_size).tolist())
        query_start_loc.append(len(positions))
        seq_lens.append(span.stop)
    packed = torch.tensor([input_ids, positions, slots]).to(device, non_blocking=True)  # one transfer
    metadata = AttentionMetadata(
        positions=packed[1],
        slot_mapping=packed[2],
        block_tables=torch.from_numpy(tables).to(device, non_blocking=True),
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
    )
    return Batch(packed[0], metadata)
