"""What is reused in a prompt, and what a blend of it has to compute."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from vllm_blend.blend.selectors import LooksAt, Selector
from vllm_blend.config import check_layer_numbers, check_shares
from vllm_blend.kv_store.chunk_kv import ChunkKV

# Rows of a tile of a GPU's matrix products. With one row over 640, a blend of 4096 tokens took an H200 1.2 ms longer.
ROW_TILE = 128


@dataclass(frozen=True)
class Segment:
    """Positions start .. stop - 1 of a prompt, covered by stored KV.

    `exact` says that the KV is what full prefill would compute there: the segment was encoded after just what precedes
    it. `found_in` says where the KV was found, a key of `RequestOutput.num_found_tokens`; None where it was computed
    for this prompt.
    """

    start: int
    kv: ChunkKV
    exact: bool = False
    found_in: str | None = None

    @property
    def stop(self) -> int:
        return self.start + self.kv.num_tokens


@dataclass(frozen=True)
class BlendPlan:
    """A prompt whose context (everything before the suffix) is covered by segments, and the rule that repairs it.

    Positions fall into four kinds: exact (left alone), candidates (reused; the selector picks from them), holes
    (nothing stored) and the suffix with whatever was generated since. Holes and suffix are always computed.
    """

    segments: tuple[Segment, ...]
    prompt_token_ids: tuple[int, ...]
    suffix_start: int
    selector: Selector
    ratio: float
    check_layers: tuple[int, ...] = (1,)
    shares: tuple[float, ...] = (0.15,)  # of the context, kept after each check layer

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @cached_property
    def _kinds(self) -> np.ndarray:
        """[suffix_start] int8: 0 hole, 1 candidate, 2 exact."""
        kinds = np.zeros(self.suffix_start, np.int8)
        for segment in self.segments:
            kinds[segment.start : min(segment.stop, self.suffix_start)] = 2 if segment.exact else 1
        return kinds

    @cached_property
    def compressed(self) -> bool:
        """Whether heads have kept different KVs of some segment: such a prompt is computed in head pages."""
        return any(segment.kv.positions is not None for segment in self.segments)

    def most_kvs(self, num_tokens: int) -> int:
        """KVs that a head has at most, when the first `num_tokens` tokens, which are more than the context, are in the
        cache: those of tokens that are computed again are in every head."""
        kept = num_tokens - sum(segment.kv.num_tokens - segment.kv.num_kvs for segment in self.segments)
        return min(num_tokens, kept + self.final_budget)

    def head_positions(self, num_tokens: int) -> torch.Tensor:
        """The positions of which heads have a KV before anything of a chunk is computed again: [layers, kv_heads, n]
        int64 on the host, ascending."""
        layers, _, kv_heads, _ = self.segments[0].kv.k.shape
        pieces, start = [], 0
        for segment in sorted(self.segments, key=lambda segment: segment.start):
            pieces.append(torch.arange(start, segment.start).expand(layers, kv_heads, -1))
            kept = segment.kv.positions
            within = torch.arange(segment.kv.num_tokens) if kept is None else kept.transpose(1, 2).long()
            pieces.append((segment.start + within).expand(layers, kv_heads, -1))
            start = segment.stop
        return torch.cat([*pieces, torch.arange(start, num_tokens).expand(layers, kv_heads, -1)], -1)

    @cached_property
    def candidates(self) -> torch.Tensor:
        """[n] int64 positions the selector picks from."""
        return torch.from_numpy(np.flatnonzero(self._kinds == 1))

    @cached_property
    def holes(self) -> torch.Tensor:
        """[n] int64 positions before the suffix without any stored KV."""
        return torch.from_numpy(np.flatnonzero(self._kinds == 0))

    @cached_property
    def num_exact(self) -> int:
        return int((self._kinds == 2).sum())

    @cached_property
    def chunk_offsets(self) -> torch.Tensor:
        """[suffix_start] int64: how far into its segment each position is."""
        offsets = np.zeros(self.suffix_start, np.int64)
        for segment in self.segments:
            stop = min(segment.stop, self.suffix_start)
            offsets[segment.start : stop] = np.arange(stop - segment.start)
        return torch.from_numpy(offsets)

    @cached_property
    def content_seed(self) -> int:
        context = array("q", self.prompt_token_ids[: self.suffix_start])
        digest = hashlib.blake2b(context.tobytes(), digest_size=7).digest()
        return int.from_bytes(digest, "little")

    def budget(self, share: float) -> int:
        """How many candidates a share of the context buys; up to 1% less where the step's rows then fill tiles."""
        count = min(len(self.candidates), math.floor(share * self.suffix_start + 1e-9))  # 0.29 * 100 is 28.99...
        excess = (count + len(self.holes) + self.num_prompt_tokens - self.suffix_start) % ROW_TILE
        return count - excess if excess <= count // 100 and count < len(self.candidates) else count

    @cached_property
    def final_budget(self) -> int:
        return self.budget(self.shares[-1])

    @cached_property
    def looks_at(self) -> LooksAt:
        """What the selector has to see here: nothing when it has no choice."""
        free = 0 < self.final_budget < len(self.candidates)
        return self.selector.looks_at if free else LooksAt.POSITIONS

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens of the largest step this plan needs, generated ones left out."""
        suffix = self.num_prompt_tokens - self.suffix_start
        chosen = len(self.candidates) if self.looks_at.checks else self.final_budget
        return chosen + len(self.holes) + suffix


def make_plan(
    segments: Sequence[Segment],
    prompt_token_ids: Sequence[int],
    suffix_start: int,
    selector: Selector,
    ratio: float | None,
    check_layers: Sequence[int],
    recompute_ratios: Sequence[float] | None,
    num_layers: int,
) -> BlendPlan:
    """Check the settings against the model and fill in the selector's defaults."""
    n = len(prompt_token_ids)
    if not 0 <= suffix_start < n:
        raise ValueError(
            f"the suffix must hold at least the last of the prompt's {n} tokens, but starts at {suffix_start}"
        )
    check_layer_numbers("check_layers", check_layers)
    if selector.looks_at.checks and max(check_layers) >= num_layers:
        raise ValueError(f"blend_check_layers={list(check_layers)}: the model has layers 0..{num_layers - 1}")
    if selector.fixed_ratio is not None:
        if ratio is not None and ratio != selector.fixed_ratio:
            raise ValueError(
                f"the selector {selector.name!r} always recomputes a share of {selector.fixed_ratio}, but "
                f"blend_recompute_ratio={ratio} was given: leave one of the two out"
            )
        ratio = selector.fixed_ratio
    if recompute_ratios is not None:
        if not selector.looks_at.checks:
            raise ValueError(
                f"recompute ratios {list(recompute_ratios)} are given per check layer, but the selector "
                f"{selector.name!r} looks at none: give a single ratio, or choose a selector that compares layers"
            )
        shares = list(recompute_ratios)
    else:
        shares = selector.shares(selector.default_ratio if ratio is None else ratio, check_layers)
    check_shares("recompute_ratios", shares, check_layers)
    ratio = shares[-1]
    return BlendPlan(
        tuple(segments), tuple(prompt_token_ids), suffix_start, selector, ratio, tuple(check_layers), tuple(shares)
    )
