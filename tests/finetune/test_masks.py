"""The tokens that each token of a row sees, and those that are drawn to be computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_blend.finetune import masks
from vllm_blend.finetune.masks import (
    FULL,
    ISOLATED,
    MIXED,
    PARTLY,
    MaskShares,
    chunk_starts,
    draw_reuse,
    make_reuse,
    visible,
)
from vllm_blend.finetune.rows import RowBatch

CHUNKS = torch.tensor([[0, 0, 1, 1, 1, 2, 2, -1, -1]], dtype=torch.int16)


def seen(kind: int, recomputed: list[int], slots: int = 0) -> list[list[int]]:
    """Slots that each slot sees."""
    again = torch.zeros(CHUNKS.shape)
    again[0, recomputed] = 1
    allowed = visible(CHUNKS, make_reuse(CHUNKS, torch.tensor([kind]), again, slots))
    return [row.nonzero().flatten().tolist() for row in allowed[0]]


def test_in_full_everything_before_is_seen() -> None:
    assert seen(FULL, [3]) == [list(range(i + 1)) for i in range(9)]


def test_isolated_chunks_see_the_prefix_and_themselves() -> None:
    expected = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 5], [0, 1, 5, 6]]
    assert seen(ISOLATED, [3]) == [*expected, list(range(8)), list(range(9))]


def test_a_recomputed_token_stands_behind_the_row_and_later_computed_tokens_see_it_instead() -> None:
    rows = seen(PARTLY, [5], slots=1)
    assert rows[:7] == seen(ISOLATED, [])[:7]  # its chunk saw what it was
    assert rows[7] == [0, 1, 2, 3, 4, 6, 7, 9]
    assert rows[9] == [0, 1, 2, 3, 4, 9]  # at position 5, it sees everything before


def test_shifts_are_from_behind_the_prefix() -> None:
    again = torch.zeros(CHUNKS.shape)
    again[0, 6] = 1
    reuse = make_reuse(CHUNKS, torch.tensor([PARTLY]), again, 2)
    assert reuse.shift.tolist() == [[0, 0, 0, 0, 0, 3, 3, 0, 0, 0, 0]]
    assert reuse.source[0, :10].tolist() == [*range(9), 6]
    assert reuse.current.tolist() == [[True] * 6 + [False] + [True] * 3 + [False]]
    assert chunk_starts(CHUNKS).tolist() == [[0, 0, 2, 2, 2, 5, 5, 7, 7]]


def batch_of(rows: int) -> RowBatch:
    chunks = torch.tensor([[0] * 10 + [1] * 30 + [2] * 30 + [3] * 20 + [-1] * 30], dtype=torch.int16).repeat(rows, 1)
    return RowBatch(chunks.long(), chunks.float(), chunks, chunks > 0)


def test_kinds_and_recomputed_tokens_are_drawn_in_their_shares() -> None:
    batch, shares = batch_of(400), MaskShares(full=0.5, isolated=0.25, max_recomputed=0.2)
    reuse = draw_reuse(batch, shares, torch.Generator().manual_seed(1))
    counts = reuse.kinds.bincount(minlength=3)
    assert counts.sum() == 400 and (counts - torch.tensor([200, 100, 100])).abs().max() < 40
    length = batch.ids.shape[1]
    again = reuse.current[:, length:].sum(1)
    assert not again[reuse.kinds != PARTLY].any()
    assert again[reuse.kinds == PARTLY].float().mean() > 2 and again.max() <= shares.recompute_slots(length)
    assert ((batch.chunks > 0) | reuse.current[:, :length]).all()  # only chunks' tokens are replaced
    assert torch.equal(reuse.current.sum(1), torch.full((400,), length))  # each token is there once


def test_recomputed_heads_are_each_chunks_first_tokens_in_the_drawn_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "HEADS_SHARE", 1.0)
    rows, shares = 2000, MaskShares(full=0.0, isolated=0.0, max_recomputed=0.25)
    batch = batch_of(rows)
    reuse = draw_reuse(batch, shares, torch.Generator().manual_seed(3))
    replaced = ~reuse.current[:, : batch.ids.shape[1]]
    whole = replaced.sum(1) < shares.recompute_slots(batch.ids.shape[1])  # else some at random stay as they were
    heads = torch.stack([replaced[:, start:stop].sum(1) for start, stop in ((10, 40), (40, 70), (70, 90))], 1)[whole]
    assert (heads == heads[:, :1]).all()
    for start in (10, 40, 70):
        first = torch.arange(20) < heads[:, :1]
        assert torch.equal(replaced[whole, start : start + 20], first)
    # Chunks have 80 / 3 tokens on average, and shares are uniform: 1 / 6.7 of the rows would have each count from 1 on
    # and half as many none, without those that do not fit.
    counts = heads[:, 0].bincount().float()
    assert 0.3 < counts[0] / counts[1:4].mean() < 0.7


def test_in_mixed_rows_each_chunk_is_reused_or_whole_at_random() -> None:
    batch = batch_of(500)
    reuse = draw_reuse(batch, MaskShares(0.0, 0.0, mixed=1.0), torch.Generator().manual_seed(2))
    fresh = reuse.fresh[:, : batch.ids.shape[1]]
    assert (reuse.kinds == MIXED).all() and fresh[batch.chunks < 1].all()
    whole = torch.stack([fresh[:, start:stop].float().mean(1) for start, stop in ((10, 40), (40, 70), (70, 90))], 1)
    assert ((whole == 0) | (whole == 1)).all() and 0.4 < whole.mean() < 0.6
    # The share is drawn for each row, uniformly: each number of whole chunks is as likely as another.
    counts = whole.sum(1).long().bincount(minlength=4)
    assert (counts - 125).abs().max() < 45
    assert (reuse.shift[:, : batch.ids.shape[1]][fresh] == 0).all() and (
        reuse.shift[:, 40:70][~fresh[:, 40:70]] == 30
    ).all()


def test_chunks_that_see_fewer_tokens_were_encoded_right_behind_those() -> None:
    reuse = make_reuse(CHUNKS, torch.tensor([ISOLATED]), torch.zeros(CHUNKS.shape), 0, sinks=1)
    rows = [row.nonzero().flatten().tolist() for row in visible(CHUNKS, reuse)[0]]
    assert rows[:2] == [[0], [0, 1]] and rows[2:7] == [[0, 2], [0, 2, 3], [0, 2, 3, 4], [0, 5], [0, 5, 6]]
    assert rows[7:] == [list(range(8)), list(range(9))] and reuse.shift.tolist() == [[0, 0, 1, 1, 1, 4, 4, 0, 0]]


def test_spans_are_recomputed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "HEADS_SHARE", 0.0)
    monkeypatch.setattr(masks, "SPANS", (5,))
    batch, shares = batch_of(200), MaskShares(full=0.0, isolated=0.0)
    reuse = draw_reuse(batch, shares, torch.Generator().manual_seed(4))
    replaced = ~reuse.current[:, : batch.ids.shape[1]]
    whole = replaced.sum(1) < shares.recompute_slots(batch.ids.shape[1])  # else some at random stay as they were
    spans = replaced[whole][:, 10:90].unflatten(1, (-1, 5))
    assert (spans.all(2) == spans.any(2)).all() and 0.05 < spans.float().mean() < 0.2
    assert MaskShares().recompute_slots(1024) == 128


def test_a_part_of_a_batch_is_reused_as_in_the_whole() -> None:
    batch, generator = batch_of(12), torch.Generator().manual_seed(5)
    reuse = draw_reuse(batch, MaskShares(0.2, 0.2, mixed=0.3, sinks=4), generator)
    part, chunks = reuse.part(slice(2, 9)), batch.chunks[2:9]
    assert len(reuse.kinds.unique()) > 2 and torch.equal(part.kinds, reuse.kinds[2:9])
    assert torch.equal(visible(chunks, part), visible(batch.chunks, reuse)[2:9])


def test_a_prefix_shorter_than_the_sinks_is_seen_as_a_whole() -> None:
    few, all_of_it = (
        make_reuse(CHUNKS, torch.tensor([ISOLATED]), torch.zeros(CHUNKS.shape), 0, None, n) for n in (5, None)
    )
    assert torch.equal(few.shift, all_of_it.shift) and torch.equal(visible(CHUNKS, few), visible(CHUNKS, all_of_it))


@pytest.mark.parametrize("shares, kind", [(MaskShares(1.0, 0.0), FULL), (MaskShares(0.0, 1.0), ISOLATED)])
def test_shares_of_one_leave_no_choice(shares: MaskShares, kind: int) -> None:
    assert (draw_reuse(batch_of(20), shares, torch.Generator().manual_seed(0)).kinds == kind).all()


def test_nothing_is_recomputed_where_nothing_may_be() -> None:
    shares = MaskShares(0.0, 0.0, max_recomputed=0.0)
    reuse = draw_reuse(batch_of(4), shares, torch.Generator().manual_seed(0))
    assert (reuse.kinds == PARTLY).all() and reuse.current.all() and reuse.source.shape[1] == 120


@pytest.mark.parametrize(
    "shares, message",
    [
        ({"full": 1.2}, "--full is 1.2"),
        ({"max_recomputed": -0.1}, "--max-recomputed is -0.1"),
        ({"full": 0.6, "isolated": 0.3, "mixed": 0.2}, "more than 1 together"),
    ],
)
def test_shares_that_are_none_are_refused(shares: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskShares(**shares)
