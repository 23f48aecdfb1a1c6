"""A subscriber to KV events as others write it: by vLLM's published structures, and nothing of this project."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

from tests.waiting import DEADLINE

END = -1


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class NamedFields(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """The base of the same events in newer versions of vLLM."""


class _StoredMap(NamedFields, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class _RemovedMap(NamedFields, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class _ClearedMap(NamedFields, tag="AllBlocksCleared"):
    pass


class MapEventBatch(EventBatch):
    events: list[_StoredMap | _RemovedMap | _ClearedMap]


def decode(payload: bytes) -> KVEventBatch:
    """Return what a payload says."""
    return msgspec.msgpack.decode(payload, type=KVEventBatch)


class Index:
    """What a router knows of an engine's prefix cache from its events: each block, and the one before it."""

    def __init__(self) -> None:
        self.parents: dict[bytes | int, bytes | int | None] = {}
        self.tokens: dict[bytes | int, list[int]] = {}

    def apply(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                size, parent = event.block_size, event.parent_block_hash
                assert len(event.token_ids) == size * len(event.block_hashes)
                for number, name in enumerate(event.block_hashes):
                    assert name not in self.parents  # stored twice without having been removed
                    self.parents[name], parent = parent, name
                    self.tokens[name] = event.token_ids[number * size : (number + 1) * size]
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del self.parents[name], self.tokens[name]
            else:
                self.parents.clear()
                self.tokens.clear()

    def num_cached(self, token_ids: list[int], block_size: int) -> int:
        """Return how many leading tokens of a prompt the engine has, as a router looks it up: by tokens."""
        known = {(self.parents[name], tuple(tokens)): name for name, tokens in self.tokens.items()}
        parent: bytes | int | None = None
        for start in range(0, len(token_ids), block_size):
            found = known.get((parent, tuple(token_ids[start : start + block_size])))
            if found is None:
                return start
            parent = found
        return len(token_ids)


class Subscriber:
    """A SUB socket for batches, and a DEALER socket that asks for earlier ones."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, replay: str | None, topic: str, hwm: int) -> None:
        self._sub, self._dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._sub.set_hwm(hwm)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._sub.connect(endpoint)
        if replay is not None:
            self._dealer.connect(replay)
        self.decoder: Any = msgspec.msgpack.Decoder(KVEventBatch)

    def receive(self) -> tuple[str, int, Any]:
        """Return the next batch, with its topic and its number."""
        assert self._sub.poll(DEADLINE * 1000), "no batch comes"
        topic, number, payload = self._sub.recv_multipart()
        assert len(number) == 8
        return topic.decode(), int.from_bytes(number, "big"), self.decoder.decode(payload)

    def has_more(self) -> bool:
        """Return whether another batch has come already."""
        return bool(self._sub.poll(0))

    def replay(self, start: int) -> list[tuple[int, Any]]:
        """Return the kept batches from a number on, with their numbers."""
        self.ask(b"", start.to_bytes(8, "big"))
        found: list[tuple[int, Any]] = []
        while True:
            assert self._dealer.poll(DEADLINE * 1000), "no answer comes"
            empty, number, payload = self._dealer.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == END:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), self.decoder.decode(payload)))

    def ask(self, *frames: bytes) -> None:
        """Send a request for earlier batches, right or wrong."""
        self._dealer.send_multipart(frames)

    def close(self) -> None:
        self._sub.close(linger=0)
        self._dealer.close(linger=0)


@contextmanager
def subscribed(endpoint: str, replay: str | None = None, topic: str = "", hwm: int = 1000) -> Iterator[Subscriber]:
    """A subscriber in a context of its own, as another process has it."""
    context: zmq.Context[Any] = zmq.Context()
    subscriber = Subscriber(context, endpoint, replay, topic, hwm)
    try:
        yield subscriber
    finally:
        subscriber.close()
        context.term()
