from __future__ import annotations

import pytest
import torch

from tests.ops_gpu.reference import TOLERANCE, Problem, assert_close, attention, make_problem
from vllm_blend.ops import cuda

pytestmark = pytest.mark.gpu


def check(p: Problem, num_splits: int = 0, window: int | None = None) -> None:
    batch, q_heads, head_dim = p.q.shape
    workspace = cuda.decode_workspace(batch, q_heads, p.key.shape[2], head_dim, p.q.device, num_splits)
    expected, expected_lse = attention(p, window)
    for _ in range(2):
        out = torch.full_like(p.q, float("nan"))
        lse = torch.full(p.q.shape[:2], float("nan"), device=p.q.device)
        cuda.decode_attention(
            p.q, p.key, p.value, p.positions, p.block_tables, p.scale, workspace, 4096, window, num_splits, out, lse
        )
        assert_close(out, expected, TOLERANCE[p.q.dtype])
        assert_close(lse, expected_lse, 1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    check(make_problem([1, 15, 16, 17, 333, 1000], [1] * 6, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_groups(group: int) -> None:
    check(make_problem([400, 90], [1, 1], q_heads=2 * group, seed=group))


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("num_splits", [1, 2, 7, 32])
def test_splits(num_splits: int, block_size: int) -> None:
    check(make_problem([3000, 64, 65, 1, 511], [1] * 5, block_size=block_size, seed=num_splits), num_splits)


@pytest.mark.parametrize("window", [1, 16, 100, 5000])
def test_sliding_window(window: int) -> None:
    check(make_problem([3000, 64, 1], [1] * 3, seed=window), window=window)


def test_workspace_serves_other_batches() -> None:
    """One workspace for batches and splits of any size, as CUDA graphs of several buckets share it."""
    workspace = cuda.decode_workspace(8, 8, 2, 128, torch.device("cuda"))
    for batch, num_splits in [(8, 0), (2, 9), (8, 3), (1, 0), (5, 1)]:
        p = make_problem([700 + 13 * i for i in range(batch)], [1] * batch, seed=batch)
        out = torch.full_like(p.q, float("nan"))
        cuda.decode_attention(
            p.q, p.key, p.value, p.positions, p.block_tables, p.scale, workspace, 800, None, num_splits, out
        )
        assert_close(out, attention(p)[0], TOLERANCE[p.q.dtype])
