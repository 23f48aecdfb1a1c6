"""Chooses the replica for a request from the passages it holds, and from how busy the replicas are. It needs no Ray.

Every pair of a chunk and a replica has a score that depends on nothing else (weighted rendezvous hashing; Thaler and
Ravishankar, 1998). A replica's score for a request is the largest over the request's chunks, so a request goes where
one of its chunks is at home, and two requests agree the more often the more tokens their chunks share. A replica that
comes or goes changes no other replica's score: only requests that go to it, or went to it, move.

A replica is passed over if the request would lift its load above (1 + epsilon) times the mean (consistent hashing with
bounded loads; Mirrokni, Thorup and Zadimoghaddam, 2018).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

DEFAULT_EPSILON = 0.25


def choose_replica(chunk_tokens: Mapping[str, int], loads: Mapping[str, int], epsilon: float = DEFAULT_EPSILON) -> str:
    """Return the name of the replica that takes a request.

    `chunk_tokens` has the tokens of each of its chunks by id, `loads` the requests that each replica runs or queues. A
    request without chunks goes to the least loaded replica. Raises ValueError if there is no replica, or for a number
    that is out of range.
    """
    bound = load_bound(loads, epsilon)
    if not chunk_tokens:
        return min(loads, key=lambda replica: (loads[replica], replica))
    for chunk, tokens in chunk_tokens.items():
        if tokens < 1:
            raise ValueError(f"chunk {chunk!r} has {tokens} tokens: it must have at least 1")
    free = (replica for replica, load in loads.items() if load < bound)
    return max(free, key=lambda replica: (_score(chunk_tokens, replica), replica))


def load_bound(loads: Mapping[str, int], epsilon: float = DEFAULT_EPSILON) -> int:
    """Return the largest load, in requests, that a replica may have once the next request is placed. At least one
    replica is below it. Raises ValueError if there is no replica, or for an epsilon below 0."""
    if not loads:
        raise ValueError("there is no replica to choose from: start one, or wait until one is ready")
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"epsilon={epsilon} must be a finite number of at least 0")
    return math.ceil((1 + epsilon) * (sum(loads.values()) + 1) / len(loads))


def _score(chunk_tokens: Mapping[str, int], replica: str) -> float:
    return max(-tokens / math.log(_uniform(chunk, replica)) for chunk, tokens in chunk_tokens.items())


def _uniform(chunk: str, replica: str) -> float:
    """Return a number between 0 and 1, both excluded, that follows from the two names."""
    key = hashlib.blake2b(replica.encode(), digest_size=32).digest()
    digest = hashlib.blake2b(chunk.encode(), digest_size=8, key=key).digest()
    return ((int.from_bytes(digest) >> 12) + 0.5) / 2**52
