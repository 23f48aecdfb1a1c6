"""What a training row looks like when some of its chunks' KV is reused: drawn row by row.

A row is one of three kinds. In full, every token sees all before it. Isolated: a chunk's tokens see the prefix and
their own chunk, as when a chunk was encoded on its own and is reused (Block-Attention, Ma et al., ICLR 2025); what
follows the chunks sees everything. Partly recomputed: the same, but a drawn share of the chunks' tokens is computed
once more, seeing all before them, as in a blend. These are spans of 1 to 16 tokens, or every chunk's first tokens.

A recomputed token exists twice in a blend: its chunk's reused tokens were encoded with what it was on its own, and all
later tokens that are computed see what it became. So it stands twice in the trained sequence, the second time behind
the row, at the same position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from vllm_blend.finetune.rows import LENGTH_MULTIPLE, PREFIX, Batch

FULL, ISOLATED, PARTLY = 0, 1, 2
KINDS = ("full", "isolated", "partly")
SPANS = (1, 2, 4, 8, 16)  # tokens; a row has one length
HEADS_SHARE = 0.25  # of the partly recomputed rows: the first tokens of each chunk instead of spans


@dataclass(frozen=True)
class MaskShares:
    """How often rows are computed in full or from isolated chunks; the others are partly recomputed, a share of up to
    `max_recomputed` of their tokens. All in [0, 1]."""

    full: float = 0.3
    isolated: float = 0.35
    max_recomputed: float = 0.25

    def __post_init__(self) -> None:
        for name in ("full", "isolated", "max_recomputed"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}: use a share in [0, 1]")
        if self.full + self.isolated > 1:
            raise ValueError(f"--full {self.full} and --isolated {self.isolated} are more than 1 together")

    def room(self, length: int) -> int:
        """Slots for recomputed tokens behind a row of `length` tokens, of which chunks are about half or fewer."""
        slots = math.ceil(self.max_recomputed * length / 2)
        return min(length, -(-slots // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)


@dataclass(frozen=True)
class Reuse:
    """What of a batch is reused. kinds: index into `KINDS`, int64 [batch]. Else [batch, slots]: the row's tokens, and
    room behind them for those that are computed again.

    source: the token of each slot, which is its position, int64. fresh: slots that see everything before them. current:
    slots that those see, one for each token. shift: how far a slot stands behind the position at which it was encoded,
    right after the prefix; 0 where it is fresh.
    """

    kinds: torch.Tensor
    source: torch.Tensor
    fresh: torch.Tensor
    current: torch.Tensor
    shift: torch.Tensor


def draw_reuse(batch: Batch, shares: MaskShares, generator: torch.Generator) -> Reuse:
    """Draw the kind of every row, and which tokens are recomputed. The generator is on the batch's device."""
    chunks, device = batch.chunks, batch.chunks.device
    rows, length = chunks.shape

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device, generator=generator)

    drawn = uniform(rows)
    kinds = torch.where(drawn < shares.full, FULL, torch.where(drawn < shares.full + shares.isolated, ISOLATED, PARTLY))
    position = torch.arange(length, device=device)
    ratio = (uniform(rows) * shares.max_recomputed)[:, None]
    spans = torch.tensor(SPANS, device=device)[torch.randint(len(SPANS), (rows, 1), device=device, generator=generator)]
    in_spans = uniform(rows, length).gather(1, position // spans) < ratio
    mean_chunk = (chunks > PREFIX).sum(1, keepdim=True) / chunks.amax(1, keepdim=True).clamp(min=1)  # tokens
    in_heads = (position - chunk_starts(chunks)) < (ratio * mean_chunk).round()
    recomputed = torch.where(uniform(rows, 1) < HEADS_SHARE, in_heads, in_spans)
    # Where they are too many for the room, some at random stay as they were.
    return reuse_of(chunks, kinds, recomputed * (1 - uniform(rows, length)), shares.room(length))


def reuse_of(chunks: torch.Tensor, kinds: torch.Tensor, priority: torch.Tensor, room: int) -> Reuse:
    """With given kinds of the rows. Where a row is `PARTLY` reused, its chunks' tokens of the `room` highest priorities
    above 0 are recomputed; priority: float [batch, length]."""
    rows, length = chunks.shape
    row = torch.arange(length, device=chunks.device).expand(rows, length)
    reused = (kinds != FULL)[:, None] & (chunks > PREFIX)
    best, again = (priority * (reused & (kinds == PARTLY)[:, None])).topk(room, 1)
    taken = best > 0
    behind = torch.ones_like(taken)
    shift = torch.where(reused, chunk_starts(chunks) - (chunks == PREFIX).sum(1, keepdim=True), 0)
    return Reuse(
        kinds=kinds,
        source=torch.cat([row, again], 1),
        fresh=torch.cat([~reused, behind], 1),
        current=torch.cat([torch.ones_like(reused).scatter(1, again, ~taken), taken], 1),
        shift=torch.cat([shift, torch.zeros_like(again)], 1),
    )


def chunk_starts(chunks: torch.Tensor) -> torch.Tensor:
    """Position of the first token of each token's chunk, int64, of the shape of `chunks`."""
    position = torch.arange(chunks.shape[1], device=chunks.device)
    begins = torch.ones_like(chunks, dtype=torch.bool)
    begins[:, 1:] = chunks[:, 1:] != chunks[:, :-1]
    return torch.where(begins, position, 0).cummax(1).values


def visible(chunks: torch.Tensor, reuse: Reuse) -> torch.Tensor:
    """Which slots see which: bool [batch, slots (looking), slots (looked at)]. chunks: [batch, length]."""
    number = chunks.gather(1, reuse.source)
    before = reuse.source[:, None, :] <= reuse.source[:, :, None]
    encoded = torch.arange(number.shape[1], device=chunks.device) < chunks.shape[1]
    with_it = encoded & ((number[:, None, :] == PREFIX) | (number[:, None, :] == number[:, :, None]))
    return before & torch.where(reuse.fresh[:, :, None], reuse.current[:, None, :], with_it)


def additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As attention adds it to its scores: [batch, 1, length, length], 0 or the dtype's least number."""
    bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return bias.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]
