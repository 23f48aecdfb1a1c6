"""CUDA graphs are captured here, and here is the rule for what they may read.

A graph holds addresses, not tensors. Whatever it reads must live as long as the graph does, and so must be one of:

1. an input that the record of the graph owns and that is filled before every replay;
2. a weight, buffer or cache that the object which holds the graphs refers to;
3. memory that was allocated during the capture: it lies in the graph's own pool;
4. a constant of `ops.constants`, which are never freed.

Nothing else may be remembered from one step to the next by code that a graph captures: neither a tensor that an
`lru_cache` may drop, nor one that is replaced when it grows. `tests/gpu/test_graph_memory.py` reads the addresses out
of every kind of graph and compares them with these owners.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

Capture: TypeAlias = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]

_captured: WeakKeyDictionary[torch.cuda.CUDAGraph, Any] = WeakKeyDictionary()  # every graph, and its pool


class CUDAGraphs:
    """Captures functions into graphs that share their memory, as no two of them run at the same time.

    `pool` is the memory of other graphs that never run while one of these does; None makes the first graph's own one
    the memory of all.
    """

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        self.device, self.pool = device, pool

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Return what replays `work`, and the tensor that every replay fills."""
        # Outside the graph first: lazy initialisation must not be captured. It runs on the current stream, as cuBLAS
        # keeps a workspace for every stream it has seen, 32 MiB on an H200.
        work()
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream(self.device)
        # Other threads may call CUDA meanwhile: stores that read and write chunks, or those of another engine.
        with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
            result = work()
        self.pool = self.pool or graph.pool()
        _captured[graph] = self.pool
        return graph.replay, result


def drop_graphs(pool: Any) -> None:
    """Destroy the graphs whose memory is `pool`; replaying one of them is a RuntimeError from then on. Others may hold
    them still."""
    for graph, own in list(_captured.items()):
        if own == pool:
            graph.reset()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which graphs of a device are captured; torch's own default belongs to the first device that
    captured anything."""
    return torch.cuda.Stream(device)
