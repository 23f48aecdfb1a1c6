"""Steps cut for libraries: computed entry by entry as a library does, they are the contract."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.test_contract import Step, dense, make_step, steps
from vllm_blend.attention.metadata import AttentionMetadata
from vllm_blend.attention.runs import Queries, mask_pieces, page_indices, row_index, split_step, tile_masks


def attend_entry(step: Step, q: torch.Tensor, pages: torch.Tensor, num_keys: int, mask: torch.Tensor) -> torch.Tensor:
    """Dense attention of q [rows, heads, head_dim] over the first num_keys slots of `pages`, under `mask`."""
    k, v = (c[pages].flatten(0, 1)[:num_keys].double() for c in (step.cache.key, step.cache.value))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * step.scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


def bottom_right(rows: int, keys: int, window: int | None) -> torch.Tensor:
    """The causal mask of libraries: the last row sees the last key. Windows count backwards from there."""
    row, key = torch.arange(keys - rows, keys)[:, None], torch.arange(keys)[None]
    return (key <= row) if window is None else (key <= row) & (key > row - window)


def compute(step: Step, long_run: int, tile_rows: int) -> torch.Tensor:
    """The step by entries; every row is written once."""
    block_size, metadata = step.cache.block_size, step.metadata
    cut = split_step(metadata, block_size, step.window, long_run, tile_rows)
    out = torch.full(step.q.shape, torch.nan, dtype=torch.float64)
    for part in (cut.single, cut.causal, cut.tiles):
        if not len(part):
            continue
        offsets, pages = page_indices(part, metadata.block_tables, block_size)
        masks = mask_pieces(part, tile_masks(part, metadata.positions, step.window))
        for i in range(len(part)):
            rows = torch.from_numpy(part.rows[part.offsets[i] : part.offsets[i + 1]])
            keys = int(part.num_keys[i])
            mask = bottom_right(len(rows), keys, step.window)
            if part is cut.tiles:
                mask = masks[i]
            else:
                assert torch.equal(masks[i], mask)  # the general rule says the same
            assert torch.isnan(out[rows]).all()
            out[rows] = attend_entry(step, step.q[rows], pages[offsets[i] : offsets[i + 1]].long(), keys, mask)
    return out


@settings(max_examples=100, deadline=None)
@given(step=steps(), long_run=st.integers(1, 20), tile_rows=st.integers(1, 20))
def test_entries_make_up_the_contract(step: Step, long_run: int, tile_rows: int) -> None:
    out = compute(step, long_run, tile_rows)
    for request in range(step.metadata.num_requests):
        _, expected = dense(step, request)
        torch.testing.assert_close(out[step.metadata.rows(request)], expected, rtol=1e-9, atol=1e-9)


def test_what_goes_where() -> None:
    positions = [list(range(10)), [7], [0, 2, *range(10, 30), 40, 41, 60], [3, 5], []]
    step = make_step([10, 9, 61, 6, 4], positions, 1, 1, 16, 8, None, seed=0)
    cut = split_step(step.metadata, 8, None, 8, 3)
    assert cut.single.request.tolist() == [1] and cut.single.num_keys.tolist() == [8]
    assert cut.causal.request.tolist() == [0, 2] and cut.causal.lengths.tolist() == [10, 20]
    assert cut.causal.num_keys.tolist() == [10, 30]
    assert cut.tiles.request.tolist() == [2, 2, 3] and cut.tiles.lengths.tolist() == [3, 2, 2]
    assert cut.tiles.num_keys.tolist() == [41, 61, 6]  # the run between them is no part of the first tile


def test_keys_outside_a_window_are_skipped_by_the_block() -> None:
    step = make_step([100], [[60, 70, 99]], 1, 1, 16, 8, 10, seed=0)
    cut = split_step(step.metadata, 8, 10, 8, 2)
    assert cut.tiles.first_key.tolist() == [48, 88] and cut.tiles.num_keys.tolist() == [23, 12]


def test_adjacent_rows_are_a_slice() -> None:
    cpu = torch.device("cpu")
    assert row_index(np.array([3, 4, 5]), cpu) == slice(3, 6)
    index = row_index(np.array([3, 5]), cpu)
    assert isinstance(index, torch.Tensor) and index.tolist() == [3, 5]


def test_an_empty_step_has_no_entries() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    metadata = AttentionMetadata(empty, empty, torch.zeros(1, 1, dtype=torch.int32), [0, 0], [5])
    cut = split_step(metadata, 16, None, 8, 8)
    assert not len(cut.single) and not len(cut.causal) and not len(cut.tiles)


def test_last_rows_need_no_reading_from_the_device() -> None:
    """The positions would give wrong rows if they were read."""
    wrong = torch.zeros(4, dtype=torch.int64)
    tables = torch.zeros(2, 1, dtype=torch.int32)
    metadata = AttentionMetadata(wrong, wrong, tables, [0, 3, 4], [8, 5], at_end=(True, True))
    assert metadata.host_positions == [5, 6, 7, 4]
    assert AttentionMetadata(wrong, wrong, tables, [0, 3, 4], [8, 5], at_end=(True, False)).host_positions == [0] * 4
    assert metadata.narrow(torch.tensor([0, 3]), [0, 1, 2]).at_end is None


def test_entries_know_their_rows() -> None:
    queries = Queries(*(np.array(a) for a in ([1, 2, 5], [2, 1], [0, 1], [0, 0], [3, 6])))
    assert queries.offsets.tolist() == [0, 2, 3] and len(queries) == 2
