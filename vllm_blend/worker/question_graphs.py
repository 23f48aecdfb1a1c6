"""The question's pass of a blend replayed as a CUDA graph.

A few dozen rows through most layers: reading the weights takes a GPU less time than launching the kernels one by one
takes the host. The host is then ahead of the device when it launches the blend's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from vllm_blend.attention.context import ForwardContext, forward_context
from vllm_blend.attention.metadata import AttentionMetadata
from vllm_blend.blend.selectors import BEST, Look, LooksAt, make_selector
from vllm_blend.ops.graph_capture import Capture
from vllm_blend.request import Request
from vllm_blend.worker.device_parts import DeviceParts
from vllm_blend.worker.hooks import QuestionMassHook

ROWS = (128, 64, 32)  # numbers of rows captured, largest first: their buffers serve the smaller ones too


@dataclass(frozen=True)
class _QuestionGraph:
    replay: Callable[[], None]
    # One piece of memory, filled by one copy: [4, bucket] int64, ids, positions, slots, whether the row does not count;
    # then [3 + max_blocks] int32, the offsets of the requests and the block table.
    inputs: torch.Tensor
    mass: torch.Tensor  # [max_model_len] float32


def looks_to_capture(rule: str, num_layers: int) -> list[Look]:
    """Return how the question looks by an engine's own `rule`, and by the one that prompts ask for most often."""
    selectors = [make_selector(name) for name in (rule, BEST)]
    return list(dict.fromkeys(each.look(num_layers) for each in selectors if each.looks_at is LooksAt.QUESTION))


class QuestionGraphs:
    """Graphs of one request's pass over the layers up to the `stop` of each look. Rows that fill a bucket up belong to
    a second request, on the padding block."""

    def __init__(self, parts: DeviceParts, max_model_len: int, looks: Iterable[Look], capture: Capture) -> None:
        """`capture` makes graphs whose memory others may share, if none of these runs while one of the others does, nor
        before its result has been used."""
        if not parts.backend.capturable_mass:
            raise ValueError(
                f"the attention backend {parts.backend.name!r} cannot be captured measuring attention mass"
            )
        self.parts, self.max_model_len = parts, max_model_len
        # Rows that fill a bucket up need positions too.
        buckets = [bucket for bucket in ROWS if bucket <= max_model_len]
        self._graphs = {look: {bucket: self._capture(look, bucket, capture) for bucket in buckets} for look in looks}

    def run(self, request: Request, look: Look, positions: np.ndarray, num_suffix: int) -> torch.Tensor | None:
        """Return the mean attention mass [max_model_len] float32 that a request's last `num_suffix` rows pay to its
        positions.

        positions: [n] int64, ascending, of the rows that are computed. If they are too many for a graph, or there is
        none of this look, None is returned. The result is valid until the next run.
        """
        n, size = len(positions), self.parts.cache.block_size
        graphs = self._graphs.get(look, {})
        bucket = min((bucket for bucket in graphs if bucket >= n), default=None)
        if bucket is None:
            return None
        graph = graphs[bucket]
        table = np.asarray(request.block_table, np.int64)
        pinned = graph.inputs.is_cuda
        inputs = torch.zeros(32 * bucket + 4 * (3 + len(table)), dtype=torch.uint8, pin_memory=pinned)
        rows = inputs[: 32 * bucket].numpy().view(np.int64).reshape(4, bucket)
        pages = inputs[32 * bucket :].numpy().view(np.int32)
        rows[0, :n] = request.token_array(int(positions[-1]) + 1)[positions]
        rows[1, :n], rows[1, n:] = positions, np.arange(bucket - n)
        rows[2, :n], rows[2, n:] = table[positions // size] * size + positions % size, np.arange(bucket - n) % size
        rows[3, : n - num_suffix] = rows[3, n:] = 1
        pages[:3], pages[3:] = (0, n, bucket), table
        graph.inputs[: len(inputs)].copy_(inputs, non_blocking=True)
        graph.replay()
        return graph.mass

    def _capture(self, look: Look, bucket: int, capture: Capture) -> _QuestionGraph:
        parts, device = self.parts, self.parts.device
        max_blocks = -(-self.max_model_len // parts.cache.block_size)
        inputs = torch.zeros(32 * bucket + 4 * (3 + 2 * max_blocks), dtype=torch.uint8, device=device)
        rows = inputs[: 32 * bucket].view(torch.int64).view(4, bucket)
        rows[1] = torch.arange(bucket)
        offsets_and_tables = inputs[32 * bucket :].view(torch.int32)
        offsets_and_tables[1:3] = bucket

        def measure() -> torch.Tensor:
            # Made here: what a backend plans for a step that it knows already would not be captured.
            metadata = AttentionMetadata(
                positions=rows[1],
                slot_mapping=rows[2],
                block_tables=offsets_and_tables[3:].view(2, max_blocks),
                query_start_loc=[0, bucket, bucket],
                seq_lens=[self.max_model_len, bucket],
                device_query_start_loc=offsets_and_tables[:3],
            )
            hook = QuestionMassHook(parts.backend, [bucket, 0], [look] * 2, rows[3] != 0)
            caches = parts.cache.layers[: look.stop]
            with forward_context(ForwardContext(metadata, caches, parts.backend, (hook,), [0, 0])):
                parts.model(rows[0])
            return hook.masses()[0]

        replay, mass = capture(measure)
        return _QuestionGraph(replay, inputs, mass)
