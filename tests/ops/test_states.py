"""Attention in parts: every part with its log-sum-exp, and parts that merge to attention over all keys."""

from __future__ import annotations

import pytest
import torch

from tests.ops.paged import DTYPES, ISAS, assert_near, kernels
from vllm_blend import ops
from vllm_blend.ops.paged_kv import PagedKV
from vllm_blend.ops.states import accepts_states, attention_states_reference

SCALE = 0.3


def _pages(num_blocks: int, seed: int) -> PagedKV:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, 4, 2, 8)
    return PagedKV(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))


def _states(
    q: torch.Tensor,
    pages: PagedKV,
    positions: list[int],
    tables: list[list[int]],
    starts: list[int],
    lens: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.attention_states(q, pages, torch.tensor(positions), torch.tensor(tables), starts, lens, SCALE)


def test_the_output_is_that_of_paged_attention_and_the_lse_that_of_its_scores() -> None:
    pages = _pages(8, 0)
    q = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1))
    tables = torch.tensor([[3, 1, 5], [2, 7, 0]], dtype=torch.int32)
    starts, lens, positions = [0, 2, 3], [10, 6], torch.tensor([7, 9, 5])
    out, lse = ops.attention_states(q, pages, positions, tables, starts, lens, SCALE)
    expected = ops.paged_attention(q, pages, positions, tables, torch.tensor(starts), torch.tensor(lens), SCALE)
    torch.testing.assert_close(out, expected)
    keys = pages.key[tables[1].long()].flatten(0, 1)[:6].repeat_interleave(3, 1)
    torch.testing.assert_close(lse[2], (torch.einsum("hd,nhd->hn", q[2], keys) * SCALE).logsumexp(-1))


@pytest.mark.parametrize("first", [1, 2, 3])
def test_parts_merge_to_the_whole(first: int) -> None:
    pages = _pages(6, 2)
    q = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(3))
    table = [4, 2, 5, 1]
    whole, lse = _states(q, pages, [14], [table], [0, 1], [15])
    front = _states(q, pages, [4 * first - 1], [table[:first]], [0, 1], [4 * first])
    back = _states(q, pages, [14 - 4 * first], [table[first:]], [0, 1], [15 - 4 * first])
    merged, merged_lse = ops.merge_states(*front, *back)
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(merged_lse, lse)


def test_a_part_without_keys_adds_nothing() -> None:
    pages = _pages(4, 4)
    q = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(5))
    some = _states(q, pages, [3, 3], [[1], [2]], [0, 1, 2], [4, 4])
    none = _states(q, pages, [0, 0], [[1], [2]], [0, 1, 2], [0, 0])
    assert (none[1] == float("-inf")).all() and (none[0] == 0).all()
    torch.testing.assert_close(ops.merge_states(*some, *none)[0], some[0])
    assert not ops.merge_states(*none, *none)[0].isnan().any()


def test_parts_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        ops.merge_states(torch.zeros(2, 4, 8), torch.zeros(2, 4), torch.zeros(1, 4, 8), torch.zeros(1, 4))


POOL = (9, 2, 3, 8, 2)  # blocks, K and V, layers, block_size, KV heads


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_kernels_agree_with_the_twin_on_views_of_a_pool(isa: str, dtype: torch.dtype, head_dim: int) -> None:
    """Several rows of a request, keys of a layer in the middle of blocks, unused blocks full of NaN."""
    generator = torch.Generator().manual_seed(head_dim)
    pool = torch.full((*POOL, head_dim), float("nan"), dtype=dtype)
    tables = torch.tensor([[3, 1, 0], [2, 7, 5]], dtype=torch.int64)
    owned = [3, 1, 2, 7, 5]
    pool[owned] = torch.randn((len(owned), *POOL[1:], head_dim), generator=generator).to(dtype)
    pages = PagedKV(pool[:, 0, 1], pool[:, 1, 1])
    q = torch.randn(4, 6, head_dim, generator=generator).to(dtype)
    positions, starts, lens = torch.tensor([16, 5, 16, 22]), [0, 3, 4], [16, 23]
    with kernels(isa):
        assert accepts_states(q, pages)
        out, lse = ops.attention_states(q, pages, positions, tables, starts, lens, SCALE)
    wide = PagedKV(pages.key.double(), pages.value.double())
    expected = attention_states_reference(q.double(), wide, positions, tables, starts, lens, SCALE)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_near(out, expected[0], dtype, slack=4)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-4, atol=1e-4)


def test_as_many_rows_as_requests_need_not_be_one_each() -> None:
    generator = torch.Generator().manual_seed(9)
    pages = PagedKV(*torch.randn(2, 6, 8, 2, 16, generator=generator).unbind(0))
    q = torch.randn(3, 4, 16, generator=generator)
    assert accepts_states(q, pages)
    states = (torch.tensor([3, 9, 12]), torch.tensor([[1, 4], [0, 2], [5, 3]]), [0, 2, 3, 3], [10, 13, 8], SCALE)
    for got, expected in zip(
        ops.attention_states(q, pages, *states), attention_states_reference(q, pages, *states), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_what_the_kernel_cannot_take_goes_to_the_twin() -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1, 4, 16, generator=generator)
    rows = torch.randn(2, 3, 8, 16, 2, generator=generator)  # heads innermost: no token's rows are in one piece
    pages = PagedKV(rows[0].transpose(2, 3), rows[1].transpose(2, 3))
    assert not accepts_states(q, pages)
    states = (torch.tensor([20]), torch.tensor([[2, 0, 1]]), [0, 1], [21], SCALE)
    out, lse = ops.attention_states(q, pages, *states)
    expected = ops.attention_states(q, PagedKV(pages.key.contiguous(), pages.value.contiguous()), *states)
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1])


def test_tables_outside_the_cache_are_errors() -> None:
    pages = PagedKV(torch.zeros(4, 2, 3, 8, 2, 16)[:, 0, 1], torch.zeros(4, 2, 3, 8, 2, 16)[:, 1, 1])
    with pytest.raises(IndexError):
        ops.attention_states(torch.zeros(1, 4, 16), pages, torch.tensor([7]), torch.tensor([[4]]), [0, 1], [8], SCALE)
