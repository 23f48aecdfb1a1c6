"""Attention in parts: every part with its log-sum-exp, and parts that merge to attention over all keys."""

from __future__ import annotations

import pytest
import torch

from vllm_blend import ops

SCALE = 0.3


def _pages(num_blocks: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, 4, 2, 8)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def _states(q, pages, positions, tables, starts, lens):
    return ops.attention_states(q, *pages, torch.tensor(positions), torch.tensor(tables), starts, lens, SCALE)


def test_the_output_is_that_of_paged_attention_and_the_lse_that_of_its_scores():
    pages = _pages(8, 0)
    q = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1))
    tables = torch.tensor([[3, 1, 5], [2, 7, 0]], dtype=torch.int32)
    starts, lens, positions = [0, 2, 3], [10, 6], torch.tensor([7, 9, 5])
    out, lse = ops.attention_states(q, *pages, positions, tables, starts, lens, SCALE)
    expected = ops.paged_attention(q, *pages, positions, tables, torch.tensor(starts), torch.tensor(lens), SCALE)
    torch.testing.assert_close(out, expected)
    keys = pages[0][tables[1].long()].flatten(0, 1)[:6].repeat_interleave(3, 1)
    torch.testing.assert_close(lse[2], (torch.einsum("hd,nhd->hn", q[2], keys) * SCALE).logsumexp(-1))


@pytest.mark.parametrize("first", [1, 2, 3])
def test_parts_merge_to_the_whole(first):
    pages = _pages(6, 2)
    q = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(3))
    table = [4, 2, 5, 1]
    whole, lse = _states(q, pages, [14], [table], [0, 1], [15])
    front = _states(q, pages, [4 * first - 1], [table[:first]], [0, 1], [4 * first])
    back = _states(q, pages, [14 - 4 * first], [table[first:]], [0, 1], [15 - 4 * first])
    merged, merged_lse = ops.merge_states(*front, *back)
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(merged_lse, lse)


def test_a_part_without_keys_adds_nothing():
    pages = _pages(4, 4)
    q = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(5))
    some = _states(q, pages, [3, 3], [[1], [2]], [0, 1, 2], [4, 4])
    none = _states(q, pages, [0, 0], [[1], [2]], [0, 1, 2], [0, 0])
    assert (none[1] == float("-inf")).all() and (none[0] == 0).all()
    torch.testing.assert_close(ops.merge_states(*some, *none)[0], some[0])
    assert not ops.merge_states(*none, *none)[0].isnan().any()


def test_parts_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="do not fit together"):
        ops.merge_states(torch.zeros(2, 4, 8), torch.zeros(2, 4), torch.zeros(1, 4, 8), torch.zeros(1, 4))
