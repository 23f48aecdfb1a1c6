"""Paged caches of every layout that an engine may have, and poison where nothing was written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from tests.ops_gpu.reference import DEVICE

HEAD_DIMS = [64, 80, 96, 128, 256]
TOKENS = st.sampled_from([0, 1, 2, 7, 8, 9, 33, 130])


def addresses(caches: list[torch.Tensor]) -> torch.Tensor:
    """The addresses of layers' caches on their device, as `cuda.place_chunks` takes them."""
    return torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=caches[0].device)


@dataclass(frozen=True)
class Shape:
    """The shape of a cache. `layout`: K and V apart; pages of both in one pool; heads outside the slots of a page; in a
    larger pool whose other layers are not ours."""

    layout: str
    block_size: int
    kv_heads: int
    group: int  # query heads a KV head
    head_dim: int
    dtype: torch.dtype

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group


shapes = st.builds(
    Shape,
    layout=st.sampled_from(["apart", "one pool", "heads outside", "layers"]),
    block_size=st.sampled_from([16, 32, 128]),
    kv_heads=st.integers(1, 5),
    group=st.integers(1, 8),
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)


def nan(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def make_cache(shape: Shape, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [num_blocks, block_size, kv_heads, head_dim], all NaN."""
    slots = (shape.block_size, shape.kv_heads, shape.head_dim)
    if shape.layout == "one pool":
        pool = nan(num_blocks, 2, *slots, dtype=shape.dtype)
        return pool[:, 0], pool[:, 1]
    if shape.layout == "heads outside":
        pool = nan(2, num_blocks, shape.kv_heads, shape.block_size, shape.head_dim, dtype=shape.dtype)
        return pool[0].transpose(1, 2), pool[1].transpose(1, 2)
    if shape.layout == "layers":
        pool = nan(2, 3, num_blocks, *slots, dtype=shape.dtype)
        return pool[0, 1], pool[1, 1]
    return nan(num_blocks, *slots, dtype=shape.dtype), nan(num_blocks, *slots, dtype=shape.dtype)


def at(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[slots, kv_heads, head_dim] of a cache of any layout."""
    block_size = cache.shape[1]
    return cache[slots // block_size, slots % block_size]


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def random_slots(count: int, num_slots: int, seed: int, skipped: bool) -> torch.Tensor:
    """Distinct slots [count] int64; with `skipped`, every third is -1."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    slots = torch.randperm(num_slots, generator=generator, device=DEVICE)[:count]
    if skipped:
        slots[::3] = -1
    return slots


def assert_only_these_written(cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Every slot outside `slots` is NaN throughout, every one of them nowhere."""
    written = torch.zeros(cache.shape[:2], dtype=torch.bool, device=DEVICE).flatten()
    written[slots] = True
    is_nan = torch.isnan(cache).reshape(written.numel(), -1)
    assert not is_nan[written].any()
    assert is_nan[~written].all()


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Fill with NaN, and free, the memory that the next tensor of this size gets from the allocator. Its address."""
    return nan(*shape, dtype=dtype).data_ptr()
