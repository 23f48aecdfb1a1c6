"""Prompts with answers become rows, and rows are drawn in epochs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_blend.finetune.rows import ANSWER_WEIGHT, CONTEXT_WEIGHT, RowPool, RowPools, Rows, make_row, pad_rows

BOS = 1


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_pieces_stand_one_after_another_with_their_weights_and_chunks() -> None:
    row = make_row("ab", ["cd", "e"], [("q", "xy"), ("r", "z")], encode, BOS, 100)
    assert row is not None
    assert row.ids == [BOS, *encode("abcdeqxyrz")]
    assert row.chunks == [0, 0, 0, 1, 1, 2, -1, -1, -1, -1, -1]
    half = ANSWER_WEIGHT // 2
    assert row.weights == [CONTEXT_WEIGHT] * 7 + [half, half, CONTEXT_WEIGHT, ANSWER_WEIGHT]


@pytest.mark.parametrize(
    "length, expected", [(10, "abcdq1r2"), (8, "abcdq1r2"), (7, "abcdq1"), (6, "abcdq1"), (5, None)]
)
def test_questions_that_do_not_fit_are_left_out(length: int, expected: str | None) -> None:
    row = make_row("ab", ["cd"], [("q", "1"), ("r", "2")], encode, None, length)
    assert (None if row is None else row.ids) == (None if expected is None else encode(expected))


def test_a_bos_that_is_there_is_not_doubled() -> None:
    row = make_row(chr(BOS) + "a", ["b"], [("q", "x")], encode, BOS, 100)
    assert row is not None and row.ids == [BOS, *encode("abqx")]


def test_padding_weighs_nothing() -> None:
    row = make_row("ab", ["cd"], [("q", "1")], encode, BOS, 100)
    assert row is not None
    rows = pad_rows([row], 12, padding=9)
    assert rows.ids[0, 7:].tolist() == [9] * 5 and not rows.weights[0, 7:].any() and (rows.chunks[0, 7:] == -1).all()


def numbered(first: int, count: int) -> Rows:
    rows = [make_row("", [], [(chr(n), "a")], encode, None, 8) for n in range(first, first + count)]
    return pad_rows([row for row in rows if row is not None], 8, 0)


def test_every_row_is_drawn_once_a_pass_and_later_rows_join_the_next() -> None:
    pool = RowPool(8, 8, torch.device("cpu"), seed=3)
    pool.add(numbered(10, 4))
    first = np.concatenate([pool.draw(2).ids[:, 0].numpy() for _ in range(2)])
    assert sorted(first) == [10, 11, 12, 13] and pool.epoch == 1
    pool.add(numbered(14, 6))  # there is room for four of them
    assert len(pool) == 8
    second = np.concatenate([pool.draw(4).ids[:, 0].numpy() for _ in range(2)])
    assert sorted(second) == list(range(10, 18)) and pool.epoch == 2


def test_a_batch_may_be_larger_than_the_pool() -> None:
    pool = RowPool(2, 8, torch.device("cpu"), seed=0)
    pool.add(numbered(10, 2))
    batch = pool.draw(5)
    assert batch.ids.shape == (5, 8) and set(batch.ids[:, 0].tolist()) == {10, 11}
    assert batch.answers.sum() == 5 and batch.weights[0, :3].tolist() == pytest.approx([0.5, 20.0, 0.0])


def test_batches_of_longer_rows_have_as_many_tokens_and_their_share() -> None:
    long, short = (RowPool(8, length, torch.device("cpu"), 0) for length in (16, 8))
    pools = RowPools([long, short], [1.0, 0.0], batch_size=4, seed=0)
    pools.add(numbered(10, 8))
    assert not pools.have(1) and pools.received == 8  # there are no long rows yet
    rows = numbered(20, 8)
    pools.add(Rows(*(np.pad(array, ((0, 0), (0, 8))) for array in (rows.ids, rows.weights, rows.chunks))))
    assert pools.have(2) and pools.received == 16
    assert {tuple(pools.draw().ids.shape) for _ in range(5)} == {(2, 16)}
    assert pools.draw(shortest=True).ids.shape == (4, 8)
