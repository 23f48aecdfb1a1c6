"""Chooses the replica for a request from the passages it holds, and from how busy the replicas are. It needs no Ray.

Every pair of a chunk and a replica has a score that depends on nothing else (weighted rendezvous hashing; Thaler and
Ravishankar, 1998). A replica's score for a request is the largest over the request's chunks, so a request goes where
one of its chunks is at home, and two requests agree the more often the more tokens their chunks share. A replica that
comes or goes changes no other replica's score: only requests that go to it, or went to it, move.

A replica is passed over if the request would lift its load above (1 + epsilon) times the mean (consistent hashing with
bounded loads; Mirrokni, Thorup and Zadimoghaddam, 2018).

`choose_replica` says what is chosen; `ScoreTable` chooses the same and remembers scores, which many requests need.

Passages of one topic have different homes, so by their scores alone requests for a topic are spread over several
replicas. `Homes` therefore remembers where each chunk was sent last, and prefers the replica that should have most of a
request's tokens in its memory; scores decide about what is not remembered. Routers that have seen different requests
agree on the latter.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import numpy as np

DEFAULT_EPSILON = 0.25
TABLE_BYTES = 64 << 20  # of the scores that a table remembers


def choose_replica(chunk_tokens: Mapping[str, int], loads: Mapping[str, int], epsilon: float = DEFAULT_EPSILON) -> str:
    """Return the name of the replica that takes a request.

    `chunk_tokens` has the tokens of each of its chunks by id, `loads` the requests that each replica runs or queues. A
    request without chunks goes to the least loaded replica. Raises ValueError if there is no replica, or for a number
    that is out of range.
    """
    bound = load_bound(loads, epsilon)
    if not chunk_tokens:
        return min(loads, key=lambda replica: (loads[replica], replica))
    _check_tokens(chunk_tokens)
    free = (replica for replica, load in loads.items() if load < bound)
    return max(free, key=lambda replica: (_score(chunk_tokens, replica), replica))


class ScoreTable:
    """The scores of a fixed set of replicas for the chunks that were asked for lately.

    A thousand replicas take a thousand hashes for a chunk that is new, and one pass over an array for one that is
    remembered.
    """

    def __init__(self, replicas: Sequence[str]) -> None:
        """Raises ValueError if there is no replica."""
        if not replicas:
            raise ValueError("there is no replica to choose from: start one, or wait until one is ready")
        self.replicas = tuple(sorted(replicas))
        self._max_chunks = max(64, TABLE_BYTES // (8 * len(replicas)))
        self._logs: OrderedDict[str, np.ndarray] = OrderedDict()  # by chunk, of the numbers of `_uniform`

    def choose(
        self, chunk_tokens: Mapping[str, int], loads: np.ndarray, epsilon: float = DEFAULT_EPSILON
    ) -> tuple[int, ...]:
        """Return the numbers of the replicas in the order in which they should be asked to take a request: first that
        of `choose_replica`, then the others below the load's bound by their scores, then all others by their loads.

        `loads` are in the order of `replicas`. Raises the errors of `choose_replica`.
        """
        order = np.argsort(loads, kind="stable")
        bound = load_bound_of(int(loads.sum()), len(loads), epsilon)
        if chunk_tokens:
            scores = self.scores(chunk_tokens)
            scores[loads >= bound] = -1.0
            by_score = np.argsort(scores, kind="stable")[::-1]  # of equal ones, the last name first
            free = by_score[: int((scores >= 0).sum())]
            order = np.concatenate([free, order[loads[order] >= bound]])
        return tuple(map(int, order))

    def first(self, chunk_tokens: Mapping[str, int], loads: np.ndarray, epsilon: float = DEFAULT_EPSILON) -> int:
        """Return the first of `choose`, without putting the others in order."""
        if not chunk_tokens:
            return int(np.argmin(loads))
        scores = self.scores(chunk_tokens)
        scores[loads >= load_bound_of(int(loads.sum()), len(loads), epsilon)] = -1.0
        return len(scores) - 1 - int(np.argmax(scores[::-1]))

    def scores(self, chunk_tokens: Mapping[str, int]) -> np.ndarray:
        """Return the score of each replica for a request with chunks, in an array of its own."""
        _check_tokens(chunk_tokens)
        logs = np.stack([self._logs_of(chunk) for chunk in chunk_tokens])
        scores: np.ndarray = (np.array([*chunk_tokens.values()], dtype=np.float64)[:, None] / -logs).max(0)
        return scores

    def _logs_of(self, chunk: str) -> np.ndarray:
        logs = self._logs.get(chunk)
        if logs is None:
            logs = np.array([math.log(_uniform(chunk, replica)) for replica in self.replicas])
            self._logs[chunk] = logs
            if len(self._logs) > self._max_chunks:
                self._logs.popitem(last=False)
        else:
            self._logs.move_to_end(chunk)
        return logs


class Homes:
    """Where chunks were sent last, for the `max_chunks` that were named lately, above a `ScoreTable`.

    The replicas may change: what was sent to one that is gone is sent elsewhere, and one that comes gets its share, the
    chunks whose best score is its own.
    """

    def __init__(self, max_chunks: int = 1 << 18) -> None:
        self._max_chunks = max_chunks
        self._table: ScoreTable | None = None
        self._homes: OrderedDict[str, tuple[str, int]] = OrderedDict()  # the replica, and `_changes` at that time
        self._changes = 0  # of the replicas
        self._came: dict[str, int] = {}  # by replica, the change with which it came

    def table(self, replicas: Collection[str]) -> ScoreTable:
        """Return the scores of these replicas. Raises ValueError if there is none."""
        if self._table is None or set(self._table.replicas) != set(replicas):
            self._table = ScoreTable([*replicas])
            self._changes += 1
            self._came = {name: self._came.get(name, self._changes) for name in self._table.replicas}
            self._numbers = {name: number for number, name in enumerate(self._table.replicas)}
        return self._table

    def choose(
        self,
        chunk_tokens: Mapping[str, int],
        loads: Mapping[str, int],
        epsilon: float = DEFAULT_EPSILON,
    ) -> list[str]:
        """Return the replicas in the order in which they should be asked to take a request, as `ScoreTable.choose`
        does: but first those below the bound that should have most of its tokens. Raises the errors of
        `choose_replica`."""
        table = self.table(loads)
        array = np.array([loads[name] for name in table.replicas], dtype=np.int64)
        order = np.array(table.choose(chunk_tokens, array, epsilon))
        held = self.held(chunk_tokens)
        held[array >= load_bound_of(int(array.sum()), len(array), epsilon)] = -1.0
        if chunk_tokens:
            order = order[np.argsort(-held[order], kind="stable")]
        return [table.replicas[number] for number in order]

    def first(self, chunk_tokens: Mapping[str, int], loads: np.ndarray, epsilon: float = DEFAULT_EPSILON) -> int:
        """Return the number of the first of `choose`; `loads` are in the order of the table's replicas."""
        assert self._table is not None
        if not chunk_tokens:
            return self._table.first(chunk_tokens, loads, epsilon)
        held, scores = self.held(chunk_tokens), self._table.scores(chunk_tokens)
        free = loads < load_bound_of(int(loads.sum()), len(loads), epsilon)
        best = np.flatnonzero(free & (held == held[free].max()))
        return int(best[len(best) - 1 - np.argmax(scores[best][::-1])])

    def held(self, chunk_tokens: Mapping[str, int]) -> np.ndarray:
        """Return for each replica of the table how many tokens of a request were sent there last."""
        held = np.zeros(len(self._numbers))
        for chunk, tokens in chunk_tokens.items():
            home, change = self._homes.get(chunk, ("", 0))
            if home in self._numbers and (change == self._changes or not self._belongs_to_newer(chunk, change)):
                held[self._numbers[home]] += tokens
        return held

    def _belongs_to_newer(self, chunk: str, change: int) -> bool:
        """Return whether a chunk's best score is that of a replica that has come after a change."""
        assert self._table is not None
        best = self._table.replicas[int(self._table.scores({chunk: 1}).argmax())]
        return self._came[best] > change

    def note(self, chunk_tokens: Mapping[str, int], replica: str) -> None:
        """Remember that a replica takes a request."""
        for chunk in chunk_tokens:
            self._homes[chunk] = (replica, self._changes)
            self._homes.move_to_end(chunk)
        while len(self._homes) > self._max_chunks:
            self._homes.popitem(last=False)


def load_bound(loads: Mapping[str, int], epsilon: float = DEFAULT_EPSILON) -> int:
    """Return the largest load, in requests, that a replica may have once the next request is placed. At least one
    replica is below it. Raises ValueError if there is no replica, or for an epsilon below 0."""
    if not loads:
        raise ValueError("there is no replica to choose from: start one, or wait until one is ready")
    return load_bound_of(sum(loads.values()), len(loads), epsilon)


def load_bound_of(total: int, num_replicas: int, epsilon: float) -> int:
    """Return the bound of `load_bound` for replicas that run or queue `total` requests together."""
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"epsilon={epsilon} must be a finite number of at least 0")
    return math.ceil((1 + epsilon) * (total + 1) / num_replicas)


def _check_tokens(chunk_tokens: Mapping[str, int]) -> None:
    for chunk, tokens in chunk_tokens.items():
        if tokens < 1:
            raise ValueError(f"chunk {chunk!r} has {tokens} tokens: it must have at least 1")


def _score(chunk_tokens: Mapping[str, int], replica: str) -> float:
    return max(-tokens / math.log(_uniform(chunk, replica)) for chunk, tokens in chunk_tokens.items())


def _uniform(chunk: str, replica: str) -> float:
    """Return a number between 0 and 1, both excluded, that follows from the two names."""
    digest = hashlib.blake2b(chunk.encode(), digest_size=8, key=_key(replica)).digest()
    return ((int.from_bytes(digest) >> 12) + 0.5) / 2**52


@lru_cache(maxsize=16384)
def _key(replica: str) -> bytes:
    return hashlib.blake2b(replica.encode(), digest_size=32).digest()
