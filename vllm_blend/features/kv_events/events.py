"""The events themselves, and how they look on the wire: vLLM's, field by field and in vLLM's order.

A batch is the array `[time, events, data parallel rank]`. An event is an array that begins with its name, or a map that
has the name as `type`. Every field is always there: some subscribers count the fields of an array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

DEVICE = "GPU"  # vLLM's name for the memory in which the engine computes, on a CPU too
DATA_PARALLEL_RANK = 0  # an engine is one rank: several replicas publish at several endpoints


@dataclass
class BlockStored:
    """Blocks that can be found from now on, each behind the one before it."""

    block_hashes: list[int]
    parent_block_hash: int | None  # of the block before the first one
    token_ids: list[int]  # of all blocks
    block_size: int
    lora_id: None = None
    medium: str = DEVICE
    lora_name: None = None


@dataclass
class BlockRemoved:
    """Blocks that can no longer be found."""

    block_hashes: list[int]
    medium: str = DEVICE


@dataclass
class AllBlocksCleared:
    """No block can be found any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True)
class EventBatch:
    """What happened between two steps."""

    time: float
    events: Sequence[Event] = field(repr=False)


def as_array(event: Event) -> list[Any]:
    """Return an event as vLLM wrote it until it turned to maps."""
    return [type(event).__name__, *vars(event).values()]


def as_map(event: Event) -> dict[str, Any]:
    """Return an event as newer versions of vLLM write it."""
    return {"type": type(event).__name__, **vars(event)}


ENCODINGS: dict[str, Callable[[Event], Any]] = {"array": as_array, "map": as_map}


def wire_form(batch: EventBatch, encoding: str) -> list[Any]:
    """Return a batch in a form that msgpack knows."""
    encode = ENCODINGS[encoding]
    return [batch.time, [encode(event) for event in batch.events], DATA_PARALLEL_RANK]
