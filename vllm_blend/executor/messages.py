"""What rank 0 tells the others of a step. Each sees the same requests and blocks, and keeps its own heads' KV.

A request is told of once, by a number; later steps say what has changed. KV that is to be stored is kept by every rank
under a number of its own.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from vllm_blend.blend.selectors import Look, LooksAt
from vllm_blend.core.step import BlendPart

Tail: TypeAlias = tuple[int, list[int]]  # of a list: how many entries stay as they are, and what follows them


class SelectorTraits(NamedTuple):
    """What the other ranks need to know of a selector, which is called on rank 0 only."""

    looks_at: LooksAt
    look: Look | None
    mean_shift: float


class PlanMessage(NamedTuple):
    """A blend plan. Segments are start, number of the KV, and whether it is exact."""

    segments: list[tuple[int, int, bool]]
    suffix_start: int
    selector: SelectorTraits
    ratio: float
    check_layers: tuple[int, ...]
    shares: tuple[float, ...]


class NewRequest(NamedTuple):
    """The part of a request that never changes."""

    prompt_token_ids: np.ndarray  # int64
    draws: bool  # whether tokens follow; not where a chunk is encoded
    prompt_logprobs: int | None
    collect_from: int | None


class RequestUpdate(NamedTuple):
    """A request as a step finds it."""

    number: int
    new: NewRequest | None  # if it is told of for the first time
    output: Tail
    num_in_flight: int
    blocks: Tail
    collects_anew: bool  # whether nothing of what is collected is there, any more or yet
    plan: tuple[PlanMessage | None] | None  # the plan, if it has changed


class ItemMessage(NamedTuple):
    """A `ScheduledRequest`."""

    request: RequestUpdate
    start: int
    num_tokens: int
    is_blend: bool
    drafts: tuple[int, ...]
    part: BlendPart | None


# To keep what a request (second number) has collected as KV (first number); to drop KV; to forget a request.
Errand: TypeAlias = tuple[Literal["keep"], int, int] | tuple[Literal["drop", "forget"], int]


class StepMessage(NamedTuple):
    """A step, and the errands to be run before it."""

    errands: list[Errand]
    items: list[ItemMessage]
    copies: list[tuple[int, int]]


class PrefillMessage(NamedTuple):
    """A chunk to be computed at once and kept under a number, and the errands to be run before that."""

    errands: list[Errand]
    request: RequestUpdate
    max_tokens: int
    kept_as: int
