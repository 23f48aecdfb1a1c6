"""Training rows: prompts with answers as padded arrays, and the growing pools that a training run draws from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

CONTEXT_WEIGHT = 5  # of every token outside answers, in tenths: the model stays a language model
ANSWER_WEIGHT = 200  # of a whole answer, in tenths: a long one weighs no more than a short one
LEAST_ANSWER_TOKEN_WEIGHT = 10
LENGTH_MULTIPLE = 8  # rows are padded to it, as attention kernels with a mask need it

PREFIX, SUFFIX = 0, -1  # in `chunks`: tokens before the chunks, and those after them (with padding)

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Rows:
    """Rows of equal length: token ids [rows, length], training weights in tenths (0 on padding), and the number of each
    token's chunk, from 1 (`PREFIX` before them, `SUFFIX` after them)."""

    ids: np.ndarray  # int32
    weights: np.ndarray  # uint8
    chunks: np.ndarray  # int16

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Row:
    """One prompt with its answers, without padding."""

    ids: list[int]
    weights: list[int]
    chunks: list[int]

    def __len__(self) -> int:
        return len(self.ids)


def make_row(
    prefix: str, chunks: Sequence[str], turns: Iterable[tuple[str, str]], encode: Encode, bos: int | None, length: int
) -> Row | None:
    """Return a prompt's pieces, tokenized one by one, with as many of its (question, answer)
    turns as fit `length` tokens, one after another; None if not even the first turn fits."""
    ids = encode(prefix)
    if bos is not None and ids[:1] != [bos]:
        ids = [bos, *ids]
    numbers = [PREFIX] * len(ids)
    for number, chunk in enumerate(chunks, 1):
        piece = encode(chunk)
        ids = ids + piece
        numbers += [number] * len(piece)
    weights, answered = [CONTEXT_WEIGHT] * len(ids), False
    for question, answer in turns:
        asked, given = encode(question), encode(answer)
        if not given or len(ids) + len(asked) + len(given) > length:
            break
        weights += [CONTEXT_WEIGHT] * len(asked) + [answer_weight(len(given))] * len(given)
        ids, answered = [*ids, *asked, *given], True
    return Row(ids, weights, numbers + [SUFFIX] * (len(ids) - len(numbers))) if answered else None


def answer_weight(tokens: int) -> int:
    """Return the weight of each token of an answer."""
    return max(LEAST_ANSWER_TOKEN_WEIGHT, min(ANSWER_WEIGHT, ANSWER_WEIGHT // tokens))


def prompt_row(
    prompt: Sequence[int], bounds: Sequence[tuple[int, int]], answer: Sequence[int], weight: int | None = None
) -> Row:
    """Return the row of a tokenized prompt and its answer. `bounds` are the places of its chunks, and `weight` is that
    of each of the answer's tokens, by default that of answers."""
    ids = [*prompt, *answer]
    before = bounds[0][0] if bounds else len(prompt)
    numbers = [PREFIX] * before + [SUFFIX] * (len(ids) - before)
    for number, (start, stop) in enumerate(bounds, 1):
        numbers[start:stop] = [number] * (stop - start)
    each = answer_weight(len(answer)) if weight is None else weight
    return Row(ids, [CONTEXT_WEIGHT] * len(prompt) + [each] * len(answer), numbers)


def pad_rows(rows: Sequence[Row], length: int, padding: int) -> Rows:
    """Return the rows as arrays of `length` tokens."""
    shape = (len(rows), length)
    ids, weights = np.full(shape, padding, np.int32), np.zeros(shape, np.uint8)
    chunks = np.full(shape, SUFFIX, np.int16)
    for i, row in enumerate(rows):
        ids[i, : len(row)], weights[i, : len(row)], chunks[i, : len(row)] = row.ids, row.weights, row.chunks
    return Rows(ids, weights, chunks)


@dataclass(frozen=True)
class RowBatch:
    """Tensors [batch, length] on the training device: ids int64, weights float32 (1 = an ordinary token), chunks int16,
    and which tokens are answers."""

    ids: torch.Tensor
    weights: torch.Tensor
    chunks: torch.Tensor
    answers: torch.Tensor

    def part(self, rows: slice) -> RowBatch:
        """Return some of the rows, without copying them."""
        return RowBatch(self.ids[rows], self.weights[rows], self.chunks[rows], self.answers[rows])


def row_batch(ids: torch.Tensor, weights: torch.Tensor, chunks: torch.Tensor) -> RowBatch:
    """Return a batch of rows whose numbers are those of `Rows`, as tensors."""
    return RowBatch(ids.long(), weights.float() * 0.1, chunks, weights > CONTEXT_WEIGHT)


class RowPool:
    """Rows on the training device, drawn without replacement in epochs; more may arrive while some are in use."""

    def __init__(self, capacity: int, length: int, device: torch.device, seed: int) -> None:
        self.ids = torch.empty(capacity, length, dtype=torch.int32, device=device)
        self.weights = torch.empty(capacity, length, dtype=torch.uint8, device=device)
        self.chunks = torch.empty(capacity, length, dtype=torch.int16, device=device)
        self.count, self.epoch = 0, 0
        self._order, self._used = torch.empty(0, dtype=torch.int64), 0
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.count

    @property
    def capacity(self) -> int:
        """Return the most rows that fit."""
        return len(self.ids)

    @property
    def length(self) -> int:
        """Return the length of every row, in tokens."""
        return self.ids.shape[1]

    def add(self, rows: Rows) -> None:
        """Take as many of the rows as fit the pool's capacity."""
        taken = min(len(rows), self.capacity - self.count)
        here = slice(self.count, self.count + taken)
        for own, given in ((self.ids, rows.ids), (self.weights, rows.weights), (self.chunks, rows.chunks)):
            own[here] = torch.from_numpy(given[:taken]).to(own.device)
        self.count += taken

    def draw(self, size: int) -> RowBatch:
        """Return the next `size` rows of a random order. When fewer are left, a new order over all rows begins."""
        if self._used + size > len(self._order):
            orders = [torch.randperm(self.count, generator=self._generator) for _ in range(-(-size // self.count))]
            self._order, self._used, self.epoch = torch.cat(orders), 0, self.epoch + 1
        chosen = self._order[self._used : self._used + size].to(self.ids.device)
        self._used += size
        return row_batch(self.ids[chosen], self.weights[chosen], self.chunks[chosen])


class RowPools:
    """Pools of rows of several lengths. A batch has rows of one length, drawn by the pools' shares: `batch_size` of the
    shortest, and of longer ones as many as have no more tokens."""

    def __init__(self, pools: Sequence[RowPool], shares: Sequence[float], batch_size: int, seed: int) -> None:
        self.pools = sorted(pools, key=lambda pool: pool.length)
        by_length = {pool.length: share for pool, share in zip(pools, shares, strict=True)}
        self._shares = torch.tensor([by_length[pool.length] for pool in self.pools])
        self._batch_size = batch_size
        self._generator = torch.Generator().manual_seed(seed)
        self.received = 0  # rows, with those that a full pool did not take

    def __len__(self) -> int:
        return sum(len(pool) for pool in self.pools)

    def rows_in_batch(self, pool: RowPool) -> int:
        """Return how many rows of this pool a batch has."""
        return max(1, self._batch_size * self.pools[0].length // pool.length)

    def add(self, rows: Rows) -> None:
        """Put rows of one length into their pool."""
        next(pool for pool in self.pools if pool.length == rows.ids.shape[1]).add(rows)
        self.received += len(rows)

    def have(self, batches: int) -> bool:
        """Say whether every pool can give this many batches of different rows, or is full."""
        return all(len(pool) >= min(pool.capacity, batches * self.rows_in_batch(pool)) for pool in self.pools)

    def draw(self, shortest: bool = False) -> RowBatch:
        """Return the next batch; if `shortest`, of the shortest rows. Pools that have no row are passed over."""
        filled = [i for i, pool in enumerate(self.pools) if len(pool)]
        shares = self._shares[filled]
        chosen = 0 if shortest or len(filled) == 1 else int(torch.multinomial(shares, 1, generator=self._generator))
        pool = self.pools[filled[chosen]]
        return pool.draw(self.rows_in_batch(pool))
