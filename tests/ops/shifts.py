"""Random steps whose reused tokens are shifted, and what float64 makes of them, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from vllm_blend import ops
from vllm_blend.ops.mean_shift import MeanShiftPlan, mean_shift_reference, plan_mean_shift_reference
from vllm_blend.ops.paged_kv import PagedKV

LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Shape:
    """The shape of a step's segments: tokens of each, per request, with as many tokens between and behind them."""

    lengths: tuple[tuple[int, ...], ...]
    gap: int
    share: float  # of the tokens, computed again; the last segment of a request is left out or computed whole
    kv_heads: int
    head_dim: int
    half: int
    seed: int


@dataclass(frozen=True)
class Problem:
    """A step of several requests: its rows, their K and V, and the segments that they reuse."""

    segments: list[ops.ShiftedSegment]
    positions: torch.Tensor  # [N] int64
    query_start_loc: list[int]
    block_tables: torch.Tensor
    k: torch.Tensor  # [N, kv_heads, head_dim], parts of a packed projection
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    num_blocks: int

    def run(self, kv: PagedKV) -> MeanShiftPlan:
        """Shift a layer of a cache."""
        sources = ops.ShiftSources(self.segments, kv)
        plan = ops.plan_mean_shift(sources, self.positions, self.query_start_loc, self.block_tables, kv)
        ops.mean_shift(plan, LAYER, self.k, self.v, self.cos, self.sin, kv)
        return plan

    def run_reference(self, kv: PagedKV) -> MeanShiftPlan:
        """Do the same in plain torch."""
        sources = ops.ShiftSources(self.segments, kv)
        plan = plan_mean_shift_reference(sources, self.positions, self.query_start_loc, self.block_tables, kv)
        mean_shift_reference(plan, LAYER, self.k, self.v, self.cos, self.sin, kv)
        return plan

    def expected(self, block_size: int) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
        """Return K and V, float64, of every token that moves, by its block and its place there."""
        found = {}
        for each in self.segments:
            first, last = self.query_start_loc[each.request : each.request + 2]
            at = self.positions[first:last].tolist()
            inside = [i for i, p in enumerate(at) if each.start <= p < each.start + each.num_tokens]
            if not inside:
                continue
            offsets = [at[i] - each.start for i in inside]
            rows = [first + i for i in inside]
            stored = [t[LAYER].to(self.k.device).double() for t in (each.k, each.v)]
            new = [t[rows].double() for t in (self.k, self.v)]
            shifts = [each.strength * (n - o[offsets]).mean(0) for n, o in zip(new, stored, strict=True)]
            for token in sorted(set(range(each.num_tokens)) - set(offsets)):
                position = each.start + token
                k, v = (o[token] + shift for o, shift in zip(stored, shifts, strict=True))
                half = self.cos.shape[1]
                c, s = self.cos[position].double(), self.sin[position].double()
                a, b = k[:, :half], k[:, half : 2 * half]
                k = torch.cat([a * c - b * s, b * c + a * s, k[:, 2 * half :]], -1)
                block = int(self.block_tables[each.request, position // block_size])
                found[block, position % block_size] = (k, v)
        return found


def make_problem(shape: Shape, block_size: int, dtype: torch.dtype, device: str, stored_on: str = "") -> Problem:
    """Return random segments on `stored_on` (default: `device`), and random rows. The first request is not blended."""
    generator = torch.Generator().manual_seed(shape.seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    segments, positions, starts, tables = [], [[0, 1, 2]], [0, 3], [[0]]
    blocks = 1
    for request, lengths in enumerate(shape.lengths, 1):
        at, rows = shape.gap, list(range(shape.gap))
        for i, tokens in enumerate(lengths):
            share = shape.share if i < len(lengths) - 1 else float((shape.seed + request) % 2)
            rows += [at + j for j in range(tokens) if float(torch.rand((), generator=generator)) < share]
            # A chunk of the store, of which the context may have less; odd tokens are in front of it in its memory.
            stored = random(2, LAYERS, tokens + 3, shape.kv_heads, shape.head_dim).to(stored_on or device)
            k, v = stored[:, :, 1 : 1 + tokens]
            segments.append(ops.ShiftedSegment(request, at, k, v, 1.0 if request % 2 else 0.5))
            at += tokens + shape.gap
            rows += range(at - shape.gap, at)
        rows += range(at, at + 2)  # the question
        positions.append(rows)
        starts.append(starts[-1] + len(rows))
        used = -(-(at + 2) // block_size)
        tables.append(list(range(blocks, blocks + used)))
        blocks += used
    order = [0, *(torch.randperm(blocks - 1, generator=generator) + 1).tolist()]
    width = max(map(len, tables))
    named = [[order[block] for block in table] + [0] * (width - len(table)) for table in tables]
    packed = random(starts[-1], 3 * shape.kv_heads, shape.head_dim).to(device)
    angles = torch.rand(max(p for rows in positions for p in rows) + 1, shape.half, generator=generator) * 7
    return Problem(
        segments,
        torch.tensor([p for rows in positions for p in rows], device=device),
        starts,
        torch.tensor(named, dtype=torch.int32, device=device),
        packed[:, shape.kv_heads : 2 * shape.kv_heads],
        packed[:, 2 * shape.kv_heads :],
        angles.cos().to(device),
        angles.sin().to(device),
        blocks,
    )


def assert_shifted(
    problem: Problem, caches: tuple[torch.Tensor, torch.Tensor], before: tuple[torch.Tensor, torch.Tensor], limit: float
) -> None:
    """Compare the caches, which held `before`, with float64: the tokens that move are right, all else is untouched."""
    expected = problem.expected(caches[0].shape[1])
    for which, (cache, old) in enumerate(zip(caches, before, strict=True)):
        other = torch.ones(cache.shape[:2], dtype=torch.bool)
        for place in expected:
            other[place] = False
        other = other.to(cache.device)
        assert torch.equal(cache[other].view(torch.uint8), old[other].view(torch.uint8))
        if expected:
            places = tuple(torch.tensor(axis, device=cache.device) for axis in zip(*expected, strict=True))
            wanted = torch.stack([each[which] for each in expected.values()])
            error = (cache[places].double() - wanted).norm() / wanted.norm()
            assert error <= limit, f"relative error {error:.2e} is above {limit:.0e}"


def shapes(head_dims: list[int]) -> st.SearchStrategy[Shape]:
    lengths = st.lists(st.sampled_from([1, 2, 7, 15, 16, 17, 40, 67]), min_size=1, max_size=4).map(tuple)
    return st.sampled_from(head_dims).flatmap(
        lambda head_dim: st.builds(
            Shape,
            lengths=st.lists(lengths, min_size=1, max_size=3).map(tuple),
            gap=st.integers(0, 3),
            share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
            kv_heads=st.integers(1, 5),
            head_dim=st.just(head_dim),
            half=st.sampled_from([head_dim // 2, head_dim // 4 // 8 * 8, 0]),
            seed=st.integers(0, 2**16),
        )
    )
