"""Steps with prompts or blends replayed as CUDA graphs.

A follow-up of a few dozen tokens, or a small blend, takes a GPU less time than launching its kernels one by one takes
the host. A graph of such a step ends at the hidden states: which rows have logits differs from step to step, and
their product is one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vllm_blend.attention.context import ForwardContext, forward_context
from vllm_blend.attention.metadata import AttentionMetadata
from vllm_blend.ops.graph_capture import Capture
from vllm_blend.ops.host_copy import fill
from vllm_blend.worker.batch import Batch
from vllm_blend.worker.device_parts import DeviceParts

SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # numbers of rows that are captured
DEFAULT_ROWS = 384  # a 7B model on an H100 launches larger steps as fast as it replays them
MAX_REQUESTS = 64  # in a graph: a step of more is mostly decoding, which the kernel for single queries does better


@dataclass(frozen=True)
class _StepGraph:
    replay: Callable[[], None]
    rows: torch.Tensor  # [3, size] int64: ids, positions, slots
    starts: torch.Tensor  # [requests + 1] int32
    block_tables: torch.Tensor  # [requests, max_blocks] int32
    hidden: torch.Tensor  # [size, hidden_size]


class StepGraphs:
    """Graphs of the decoder for steps of up to `max_rows` rows of any requests, with no hook in its layers.

    Rows that fill a graph up belong to one request more, on the padding block, and requests behind that one have no
    rows. What the host says of lengths is what may be there at most: the backend has to follow the device.
    """

    def __init__(
        self, parts: DeviceParts, max_rows: int, max_num_seqs: int, max_model_len: int, capture: Capture
    ) -> None:
        """`capture` makes graphs whose memory others may share, if none of these runs before this one's result has been
        used. Raises ValueError if the backend cannot be captured."""
        if not parts.backend.capturable_prefill:
            raise ValueError(
                f"max_cudagraph_capture_size={max_rows}: the attention backend {parts.backend.name!r} cannot be "
                "captured in steps with prompts; use attention_backend='cuda', or leave the option out"
            )
        self.parts, self.max_model_len = parts, max_model_len
        self.max_requests = min(max_num_seqs, MAX_REQUESTS)
        largest = min(max_rows, max_model_len)  # rows that fill a graph up need positions too
        sizes = sorted({min(size, largest) for size in SIZES}, reverse=True)  # buffers of the largest serve the others
        self._graphs = {size: self._capture(size, capture) for size in sizes}
        self._sizes = sorted(sizes)
        block_size = parts.cache.block_size
        positions = torch.arange(sizes[0], device=parts.device)
        self._padding = torch.stack([torch.zeros_like(positions), positions, positions % block_size])

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Return the hidden states [rows, hidden_size] of a step, None if no graph is of its size. They are valid until
        the next run."""
        metadata = batch.metadata
        count, requests = metadata.num_tokens, metadata.num_requests
        size = next((size for size in self._sizes if size >= count), None)
        if size is None or requests > self.max_requests or metadata.rope_positions is not None:
            return None
        graph = self._graphs[size]
        for target, values in zip(
            graph.rows[:, :count], (batch.input_ids, metadata.positions, metadata.slot_mapping), strict=True
        ):
            target.copy_(values)
        graph.rows[:, count:] = self._padding[:, : size - count]
        starts = np.full(len(graph.starts), size, np.int32)
        starts[: requests + 1] = metadata.query_start_loc
        fill(graph.starts, starts)
        graph.block_tables[:requests, : metadata.block_tables.shape[1]] = metadata.block_tables
        graph.block_tables[requests] = 0
        graph.replay()
        return graph.hidden[:count]

    def _capture(self, size: int, capture: Capture) -> _StepGraph:
        parts, device, requests = self.parts, self.parts.device, self.max_requests + 1
        max_blocks = -(-self.max_model_len // parts.cache.block_size)
        rows = torch.zeros(3, size, dtype=torch.int64, device=device)
        rows[1] = torch.arange(size)
        starts = torch.full((requests + 1,), size, dtype=torch.int32, device=device)
        starts[0] = 0
        tables = torch.zeros(requests, max_blocks, dtype=torch.int32, device=device)

        def step() -> torch.Tensor:
            # Made here: what a backend plans for a step that it knows already would not be captured.
            metadata = AttentionMetadata(
                positions=rows[1],
                slot_mapping=rows[2],
                block_tables=tables,
                query_start_loc=[0] + [size] * requests,
                seq_lens=[self.max_model_len] * requests,
                device_query_start_loc=starts,
            )
            with forward_context(ForwardContext(metadata, parts.cache.layers, parts.backend)):
                hidden: torch.Tensor = parts.model(rows[0])
            return hidden

        replay, hidden = capture(step)
        return _StepGraph(replay, rows, starts, tables, hidden)
