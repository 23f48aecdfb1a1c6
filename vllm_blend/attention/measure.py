"""How fast a backend does the three jobs of attention on this device, at a model's head layout.

The shapes are small and stand for the usual ones: a prefill beside a chunk of another, 15% of a prompt at random
positions with the question behind them, and a batch that decodes. A figure is the time of a layer within a step of
several layers that begins with new metadata, so what a backend plans once a step counts about as it does in a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerCache
from vllm_blend.ops.graph_capture import capture

DENSE, SCATTERED, DECODE = "dense prefill", "scattered prefill", "decode"
JOBS = (DENSE, SCATTERED, DECODE)
BLOCK_SIZE = 16
REPEATS = 3
BUDGET_S = 0.06  # a job that takes longer than this is timed once


@dataclass(frozen=True)
class HeadLayout:
    """What decides how fast attention is, besides the shapes of a step."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class _Sizes:
    prompt: int  # tokens of the scattered prompt; the dense job has half as many twice
    suffix: int
    batch: int
    context: int
    layers: int


_GPU = _Sizes(prompt=4096, suffix=32, batch=16, context=1024, layers=16)
_CPU = _Sizes(prompt=256, suffix=16, batch=8, context=128, layers=2)


@dataclass(frozen=True)
class Workload:
    """One step per job over one cache."""

    layout: HeadLayout
    layers: int
    cache: LayerCache
    steps: dict[str, tuple[torch.Tensor, AttentionMetadata]]

    @classmethod
    def make(cls, layout: HeadLayout) -> Workload:
        sizes = _CPU if layout.device.type == "cpu" else _GPU
        half, n = sizes.prompt // 2, sizes.prompt
        random = torch.Generator().manual_seed(0)
        selected = torch.randperm(n - sizes.suffix, generator=random)[: int(0.15 * n)].sort().values
        scattered = torch.cat([selected, torch.arange(n - sizes.suffix, n)])
        blocks = max(3 * half, sizes.batch * sizes.context) // BLOCK_SIZE + 1
        shape = (blocks, BLOCK_SIZE, layout.num_kv_heads, layout.head_dim)
        key, value = (torch.randn(shape, device=layout.device).to(layout.dtype) for _ in range(2))
        order = torch.randperm(blocks - 1, generator=random) + 1
        chunk = torch.arange(half, n)
        steps = {
            DENSE: _step(layout, order, [half, n], [torch.arange(half), chunk], at_end=(True, True)),
            SCATTERED: _step(layout, order, [n], [scattered], at_end=(False,)),
            DECODE: _step(
                layout,
                order,
                [sizes.context] * sizes.batch,
                [torch.tensor([sizes.context - 1])] * sizes.batch,
                at_end=(True,) * sizes.batch,
            ),
        }
        return cls(layout, sizes.layers, LayerCache(key, value), steps)

    def milliseconds(self, backend: AttentionBackend, job: str, captured: bool = False) -> float:
        """Time of a layer. With `captured`, of a replayed CUDA graph: how a decode step runs that can be captured."""
        q, metadata = self.steps[job]
        scale = self.layout.head_dim**-0.5

        def layers(count: int) -> None:
            fresh = replace(metadata)
            for _ in range(count):
                backend.attend(q, self.cache, fresh, scale)

        layers(2)  # compiles, tunes, allocates
        run: Callable[[], None] = lambda: layers(self.layers)  # noqa: E731
        if captured:
            graph, _ = capture(lambda: layers(self.layers), self.layout.device)
            run = graph.replay
            run()
        times: list[float] = []
        while len(times) < REPEATS and sum(times) < BUDGET_S:
            times.append(_seconds(run, self.layout.device))
        return 1000 * min(times) / self.layers

    def agrees(self, backend: AttentionBackend, twin: AttentionBackend) -> bool:
        """Whether both compute the same attention for a small step of all jobs, to the rounding of the dtype."""
        lengths, positions = [70, 50, 33], [[0, 3, 4, 5, 40, 69], list(range(50)), [32]]
        order = torch.arange(1, len(self.cache.key))
        q, metadata = _step(self.layout, order, lengths, [torch.tensor(p) for p in positions], None)
        scale = self.layout.head_dim**-0.5
        ours, expected = (b.attend(q, self.cache, replace(metadata), scale).float() for b in (backend, twin))
        tolerance = 1e-4 if self.layout.dtype == torch.float32 else 2e-2
        return bool((ours - expected).norm() <= tolerance * expected.norm())


def _step(
    layout: HeadLayout,
    order: torch.Tensor,
    lengths: Sequence[int],
    positions: Sequence[torch.Tensor],
    at_end: tuple[bool, ...] | None,
) -> tuple[torch.Tensor, AttentionMetadata]:
    """Queries at these positions of requests of these lengths, whose blocks are taken from `order`."""
    counts = [-(-n // BLOCK_SIZE) for n in lengths]
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, blocks in zip(tables, order[: sum(counts)].split(counts), strict=True):
        row[: len(blocks)] = blocks
    starts = [0]
    for chosen in positions:
        starts.append(starts[-1] + len(chosen))
    flat = torch.cat(list(positions)).to(layout.device)
    q = torch.randn(len(flat), layout.num_heads, layout.head_dim, device=layout.device).to(layout.dtype)
    metadata = AttentionMetadata(flat, torch.zeros_like(flat), tables.to(layout.device), starts, list(lengths), at_end)
    return q, metadata


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
