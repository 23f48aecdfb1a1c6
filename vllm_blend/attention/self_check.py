"""Whether two backends compute the same attention for a small step, before an engine relies on one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerStep
from vllm_blend.ops.e4m3 import E4M3, narrowed
from vllm_blend.ops.paged_kv import PagedKV

BLOCK_SIZE = 16
LENGTHS = (70, 50, 33)  # keys of each request: one with scattered queries, a whole prompt, and one that decodes
POSITIONS = ((0, 3, 4, 5, 40, 69), tuple(range(50)), (32,))


@dataclass(frozen=True)
class HeadLayout:
    """What a backend must be able to serve: where, in which dtype, and with how many heads of which size."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sinks: bool = False  # whether steps have `LayerStep.sinks`
    fp8_cache: bool = False  # whether pages hold e4m3


@torch.inference_mode()
def agree(backend: AttentionBackend, twin: AttentionBackend, layout: HeadLayout) -> bool:
    """Return whether both compute the same for a small step of all kinds of work, to the rounding of the dtype."""
    step = _step(layout)
    ours, expected = (
        each.attend(step._replace(metadata=replace(step.metadata))).float()  # backends plan by the metadata's identity
        for each in (backend, twin)
    )
    tolerance = 1e-4 if layout.dtype == torch.float32 else 2e-2
    return bool((ours - expected).norm() <= tolerance * expected.norm())


def _step(layout: HeadLayout) -> LayerStep:
    """Return a step over shuffled blocks; block 0 is no request's."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(layout.device, layout.dtype)

    counts = [-(-n // BLOCK_SIZE) for n in LENGTHS]
    tables = torch.zeros(len(LENGTHS), max(counts), dtype=torch.int32)
    order = torch.randperm(sum(counts), generator=random) + 1
    for row, blocks in zip(tables, order.split(counts), strict=True):
        row[: len(blocks)] = blocks
    shape = (sum(counts) + 1, BLOCK_SIZE, layout.num_kv_heads, layout.head_dim)
    positions = torch.tensor([position for request in POSITIONS for position in request], device=layout.device)
    starts = [0, *accumulate(map(len, POSITIONS))]
    metadata = AttentionMetadata(
        positions, torch.zeros_like(positions), tables.to(layout.device), starts, list(LENGTHS)
    )
    q = draw(len(positions), layout.num_heads, layout.head_dim)
    pages = (narrowed(draw(*shape), E4M3 if layout.fp8_cache else layout.dtype) for _ in "kv")
    return LayerStep(q, PagedKV(*pages), metadata, layout.head_dim**-0.5)
