"""Decode steps of requests whose KV is in head pages: a forward pass of their own beside the step's other rows.

Each KV head of a request is a request for attention, with a table and a length of its own in every layer. In the same
pass prompts that are being computed would need tables of the other kind; a pass for each keeps both as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_blend.core.scheduler import ScheduledRequest
from vllm_blend.kv_compress.tables import DecodeTables, HeadTables
from vllm_blend.ops.host_copy import to_device
from vllm_blend.worker.batch import Drawn, Span, token_row
from vllm_blend.worker.compressed_graphs import CompressedGraphs
from vllm_blend.worker.compressed_step import CompressedStep


class CompressedDecode:
    """Runs the model over the newest token of requests in head pages, by a graph where one fits."""

    def __init__(self, step: CompressedStep, tables: HeadTables, graphs: CompressedGraphs | None = None) -> None:
        self.step, self.tables, self.graphs = step, tables, graphs
        self.model, self.cache, self.backend = step.model, step.cache, step.backend

    def run(self, items: Sequence[ScheduledRequest], drawn: Drawn) -> torch.Tensor:
        """Hidden states [requests, hidden_size] of a step that computes one token of each request; valid until the next
        run."""
        indices, rows = _rows(items, drawn)
        if self.graphs is not None:
            hidden = self.graphs.run(self.tables, indices, rows, drawn)
            if hidden is not None:
                return hidden
        device = self.cache.head_keys.device
        ids, sources, positions = to_device(torch.from_numpy(rows), device)
        if (rows[1] >= 0).any():
            ids = drawn.feed(ids, sources)
        batch = self.tables.decode_batch(indices)
        return self.step(ids, positions, batch, self._lengths(indices, batch))

    def _lengths(self, indices: np.ndarray, batch: DecodeTables) -> list[list[int]] | None:
        """What the host knows of the rows' lengths, by layer; None where it need not know."""
        if self.step.decoder.capturable_decode:
            return None
        lengths = self.tables.lengths[indices]
        return [lengths[:, layer].reshape(-1).tolist() for layer in range(len(batch.positions))]


def _rows(items: Sequence[ScheduledRequest], drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
    """The indices of the requests, and [3, requests] int64: ids, sources (see `Drawn.feed`) and positions."""
    indices, rows = [], []
    for item in items:
        state = item.request.compression
        assert state is not None and state.index is not None and item.num_tokens == 1
        indices.append(state.index)
        rows.append((*token_row(Span(item.request, item.start, item.stop), drawn), item.start))
    return np.array(indices, np.int64), np.ascontiguousarray(np.array(rows, np.int64).T)
