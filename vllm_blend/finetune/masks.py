"""Draw which tokens of each training row are reused.

A row is one of four kinds. In full, every token sees all before it. Isolated: a chunk's tokens see the prefix and
their own chunk, as in a chunk that was encoded on its own and is reused (Block-Attention, Ma et al., ICLR 2025); what
follows the chunks sees everything. Partly recomputed: the same, but a drawn share of the chunks' tokens is computed
once more, seeing all before them, as in a blend. These are spans of 1 to 16 tokens, or every chunk's first tokens.
Mixed: each chunk is isolated, or computed whole where it stands, at random (block dropout, arXiv:2605.15913).

A recomputed token exists twice in a blend: its chunk's reused tokens were encoded with its first version, and all later
tokens that are computed see its second. So it stands twice in the trained sequence, the second time behind the row, at
the same position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_blend.finetune.rows import LENGTH_MULTIPLE, PREFIX, RowBatch

FULL, ISOLATED, PARTLY, MIXED = 0, 1, 2, 3
KINDS = ("full", "isolated", "partly", "mixed")
SPANS = (1, 2, 4, 8, 16)  # tokens; a row has one length
HEADS_SHARE = 0.25  # share of partly recomputed rows that take each chunk's first tokens, not spans


@dataclass(frozen=True)
class MaskShares:
    """How often rows are computed in full, from isolated chunks, or with each chunk isolated or whole at random
    (`mixed`). The others are partly recomputed, up to a share `max_recomputed` of their tokens. All are in [0, 1].

    A reused chunk was encoded after the first `sinks` tokens of the prefix; None for all of it.
    """

    full: float = 0.3
    isolated: float = 0.35
    mixed: float = 0.0
    max_recomputed: float = 0.25
    sinks: int | None = None

    def __post_init__(self) -> None:
        for name in ("full", "isolated", "mixed", "max_recomputed"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}: use a share in [0, 1]")
        if self.full + self.isolated + self.mixed > 1 + 1e-9:
            raise ValueError(
                f"--full {self.full}, --isolated {self.isolated} and --mixed {self.mixed} are more than 1 together"
            )

    def recompute_slots(self, length: int) -> int:
        """Return the slots for recomputed tokens behind a row of `length` tokens, of which chunks are about half or
        fewer."""
        slots = math.ceil(self.max_recomputed * length / 2)
        return min(length, -(-slots // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)


@dataclass(frozen=True)
class Reuse:
    """What of a batch is reused. `kinds` holds indices into `KINDS`, int64 [batch]. The others are [batch, slots]: the
    row's tokens, and slots behind them for those that are recomputed.

    `source` is the token of each slot, which is its position, int64. `fresh` are slots that see everything before them.
    `current` are the slots that those see, one for each token. `shift` is how far a slot stands behind the position at
    which it was encoded, right after the `sinks` first tokens of the prefix (None: after all); 0 if it is fresh.
    """

    kinds: torch.Tensor
    source: torch.Tensor
    fresh: torch.Tensor
    current: torch.Tensor
    shift: torch.Tensor
    sinks: int | None = None

    def part(self, rows: slice) -> Reuse:
        """Return what is reused in some of the rows."""
        return Reuse(
            self.kinds[rows], self.source[rows], self.fresh[rows], self.current[rows], self.shift[rows], self.sinks
        )


def draw_reuse(batch: RowBatch, shares: MaskShares, generator: torch.Generator) -> Reuse:
    """Draw the kind of every row, and which tokens are recomputed. The generator is on the batch's device."""
    chunks, device = batch.chunks, batch.chunks.device
    rows, length = chunks.shape

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device, generator=generator)

    drawn, isolated_below = uniform(rows), shares.full + shares.isolated
    others = torch.where(drawn < isolated_below + shares.mixed, MIXED, PARTLY)
    kinds = torch.where(drawn < shares.full, FULL, torch.where(drawn < isolated_below, ISOLATED, others))
    position = torch.arange(length, device=device)
    ratio = (uniform(rows) * shares.max_recomputed)[:, None]
    spans = torch.tensor(SPANS, device=device)[torch.randint(len(SPANS), (rows, 1), device=device, generator=generator)]
    in_spans = uniform(rows, length).gather(1, position // spans) < ratio
    mean_chunk = (chunks > PREFIX).sum(1, keepdim=True) / chunks.amax(1, keepdim=True).clamp(min=1)  # tokens
    in_heads = (position - chunk_starts(chunks)) < (ratio * mean_chunk).round()
    recomputed = torch.where(uniform(rows, 1) < HEADS_SHARE, in_heads, in_spans)
    # If there are too many for the slots, a random part of them stays as it was.
    priority = recomputed * (1 - uniform(rows, length))
    whole = uniform(rows, length).gather(1, chunks.clamp(min=PREFIX).long()) < uniform(rows, 1)  # one draw for a chunk
    return make_reuse(chunks, kinds, priority, shares.recompute_slots(length), whole, shares.sinks)


def make_reuse(
    chunks: torch.Tensor,
    kinds: torch.Tensor,
    priority: torch.Tensor,
    slots: int,
    whole: torch.Tensor | None = None,
    sinks: int | None = None,
) -> Reuse:
    """Return the reuse for given kinds of rows. In a `PARTLY` reused row, the chunks' tokens with the `slots` highest
    priorities above 0 are recomputed; `priority` is float [batch, length]. In a `MIXED` row, the chunks of tokens that
    are `whole` (bool [batch, length], the same for all tokens of a chunk) are computed where they stand."""
    rows, length = chunks.shape
    row = torch.arange(length, device=chunks.device).expand(rows, length)
    reused = (kinds != FULL)[:, None] & (chunks > PREFIX)
    if whole is not None:
        reused = reused & ~((kinds == MIXED)[:, None] & whole)
    seen_prefix = (chunks == PREFIX).sum(1, keepdim=True)
    if sinks is not None:
        seen_prefix = seen_prefix.clamp(max=sinks)
    best, again = (priority * (reused & (kinds == PARTLY)[:, None])).topk(slots, 1)
    taken = best > 0
    behind = torch.ones_like(taken)
    shift = torch.where(reused, chunk_starts(chunks) - seen_prefix, 0)
    return Reuse(
        kinds=kinds,
        source=torch.cat([row, again], 1),
        fresh=torch.cat([~reused, behind], 1),
        current=torch.cat([torch.ones_like(reused).scatter(1, again, ~taken), taken], 1),
        shift=torch.cat([shift, torch.zeros_like(again)], 1),
        sinks=sinks,
    )


def chunk_starts(chunks: torch.Tensor) -> torch.Tensor:
    """Return the position of the first token of each token's chunk, int64, of the shape of `chunks`."""
    position = torch.arange(chunks.shape[1], device=chunks.device)
    begins = torch.ones_like(chunks, dtype=torch.bool)
    begins[:, 1:] = chunks[:, 1:] != chunks[:, :-1]
    return torch.where(begins, position, 0).cummax(1).values


def sees(chunks: torch.Tensor, reuse: Reuse) -> Callable[..., torch.Tensor]:
    """Return the function that says whether row b's slot q sees its slot k: of (b, head, q, k), which may be tensors
    that broadcast, and the head does not matter. It is a `mask_mod` of FlexAttention. `chunks` is [batch, length]."""
    number, source, fresh, current = chunks.gather(1, reuse.source), reuse.source, reuse.fresh, reuse.current
    length, sinks = chunks.shape[1], chunks.shape[1] if reuse.sinks is None else reuse.sinks

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        asking, asked = number[b, q], number[b, k]
        sink = (asked == PREFIX) & (source[b, k] < sinks)
        own = (asked == asking) & (asked != PREFIX)
        before = source[b, k] <= source[b, q]
        return before & torch.where(fresh[b, q], current[b, k], (k < length) & (sink | own))

    return mask_mod


def visible(chunks: torch.Tensor, reuse: Reuse) -> torch.Tensor:
    """Return which slots see which: bool [batch, slots (looking), slots (looked at)]. `chunks` is [batch, length]."""
    rows, slots = (torch.arange(size, device=chunks.device) for size in reuse.source.shape)
    return sees(chunks, reuse)(rows[:, None, None], rows[:1], slots[:, None], slots)


def additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask that attention adds to its scores: [batch, 1, length, length], 0 or the dtype's lowest number."""
    bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return bias.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]
