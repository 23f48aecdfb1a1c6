"""KV events in the engine: changes of the prefix cache are gathered, and published once a step.

Only published blocks are announced: full blocks of exact prefill, found again by the hash of all tokens up to their
end. A blended block is none of these, nor is a chunk's KV: what is in them depends on how a prompt was composed. Blocks
of prompts with a `cache_salt` are not announced either, as an event names the tokens of a block.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_blend.checks import require
from vllm_blend.engine.extension import EngineParts, Extension, Step
from vllm_blend.engine.metrics import Counter, Metric
from vllm_blend.features.kv_events.config import KVEventsConfig
from vllm_blend.features.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from vllm_blend.request import Request

if TYPE_CHECKING:
    from vllm_blend.features.kv_events.publisher import ZmqPublisher


def block_hash(digest: bytes) -> int:
    """Return what events call a block: the last 64 bits of its digest, as vLLM makes it of its own hashes."""
    return int.from_bytes(digest[-8:], "big")


class KVEvents(Extension):
    """Listens to the prefix cache (`block_manager.PrefixListener`) and publishes what it hears."""

    def __init__(self, publisher: ZmqPublisher, block_size: int) -> None:
        self.publisher, self.block_size = publisher, block_size
        self._events: list[Event] = []
        # An engine may be dropped without being shut down, and the publisher has a thread and a port.
        self._close = weakref.finalize(self, publisher.close)

    def stored(self, digest: bytes, parent: bytes | None, token_ids: Sequence[int], is_salted: bool) -> None:
        """Note a block that can be found now. Blocks that follow each other become one event."""
        if is_salted:
            return
        behind = None if parent is None else block_hash(parent)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == behind:
            last.block_hashes.append(block_hash(digest))
            last.token_ids.extend(token_ids)
        else:
            self._events.append(BlockStored([block_hash(digest)], behind, list(token_ids), self.block_size))

    def removed(self, digest: bytes, is_salted: bool) -> None:
        """Note a block that has left the cache."""
        if is_salted:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(block_hash(digest))
        else:
            self._events.append(BlockRemoved([block_hash(digest)]))

    def cleared(self) -> None:
        """Publish at once that the cache is empty: it is emptied between steps, and there may be no next one."""
        self._events.append(AllBlocksCleared())
        self._publish()

    def before_schedule(self, running: Sequence[Request], ahead: bool) -> None:
        """Publish what reading the last step has changed."""
        self._publish()

    def launched(self, step: Step) -> None:
        """Publish what a step has changed."""
        self._publish()

    def idle(self) -> None:
        """Publish what the last step has changed."""
        self._publish()

    def close(self) -> None:
        """Send what is left, and close the sockets."""
        self._publish()
        self._close()

    def gauges(self) -> list[Metric]:
        """Return how many batches there were, and how many subscribers were not sent."""
        return [
            Counter("vllm_blend:kv_event_batches", self.publisher.num_published),
            Counter("vllm_blend:kv_event_batches_dropped", self.publisher.num_dropped),
        ]

    def _publish(self) -> None:
        if self._events:
            self.publisher.publish(EventBatch(time.time(), self._events))
            self._events = []


def make_kv_events(config: KVEventsConfig, parts: EngineParts) -> Extension:
    """Return the feature, which listens from now on, or one that does nothing if it is off.

    Raises ValueError if there is no prefix cache, a package is missing, or an endpoint cannot be used.
    """
    if not config.is_on:
        return Extension()
    require(
        parts.config.cache.enable_prefix_caching,
        "kv_events_config announces blocks of the prefix cache, but enable_prefix_caching=False: leave one of the two "
        "out",
    )
    try:
        from vllm_blend.features.kv_events.publisher import ZmqPublisher
    except ImportError as error:
        raise ValueError(
            f"kv_events_config needs pyzmq and msgspec, but {error.name} cannot be imported: run "
            "pip install 'vllm-blend[kv-events]'"
        ) from error
    blocks = parts.scheduler.blocks
    blocks.listener = events = KVEvents(ZmqPublisher(config), blocks.block_size)
    return events
