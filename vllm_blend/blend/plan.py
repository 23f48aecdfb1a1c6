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
from vllm_blend.checks import check_layer_numbers, check_shares, is_number
from vllm_blend.kv_store.chunk_kv import ChunkKV

# Rows of a tile of a GPU's matrix products. With one row over 640, a blend of 4096 tokens took an H200 1.2 ms longer.
ROW_TILE = 128


@dataclass(frozen=True)
class Segment:
    """Positions `start` to `stop` - 1 of a prompt, covered by stored KV.

    `exact` says that the KV is what full prefill would compute there: the segment was encoded after exactly what
    precedes it. `found_in` says where the KV was found, a key of `RequestOutput.num_found_tokens`; None if it was
    computed for this prompt.
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
    """A prompt whose context (everything before the suffix) is covered by segments, and the selector that repairs it.

    Its positions are of four kinds: exact (left alone), candidates (reused; the selector picks some of them), holes (no
    KV stored), and the suffix with what has been generated since. Holes and suffix are always computed.
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
        """Return the kind of each position, [suffix_start] int8: 0 hole, 1 candidate, 2 exact."""
        kinds = np.zeros(self.suffix_start, np.int8)
        for segment in self.segments:
            kinds[segment.start : min(segment.stop, self.suffix_start)] = 2 if segment.exact else 1
        return kinds

    @cached_property
    def candidates(self) -> torch.Tensor:
        """Return the positions that the selector picks from, [n] int64."""
        return torch.from_numpy(np.flatnonzero(self._kinds == 1))

    @cached_property
    def holes(self) -> torch.Tensor:
        """Return the positions before the suffix without stored KV, [n] int64."""
        return torch.from_numpy(np.flatnonzero(self._kinds == 0))

    @cached_property
    def chunk_offsets(self) -> torch.Tensor:
        """Return each position's place in its segment, [suffix_start] int64."""
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
        """Return how many candidates a share of the context buys; up to 1% less if the step's rows then fill tiles."""
        count = min(len(self.candidates), math.floor(share * self.suffix_start + 1e-9))  # 0.29 * 100 is 28.99...
        excess = (count + len(self.holes) + self.num_prompt_tokens - self.suffix_start) % ROW_TILE
        return count - excess if excess <= count // 100 and count < len(self.candidates) else count

    @cached_property
    def final_budget(self) -> int:
        return self.budget(self.shares[-1])

    @property
    def has_choice(self) -> bool:
        """Return whether the selector picks some of the candidates, not none or all."""
        return 0 < self.final_budget < len(self.candidates)

    @cached_property
    def looks_at(self) -> LooksAt:
        """Return what the selector has to see for this prompt: nothing if it has no choice."""
        return self.selector.looks_at if self.has_choice else LooksAt.POSITIONS

    @property
    def mean_shift(self) -> float:
        """Return how much of the mean change of a chunk's recomputed tokens its other tokens get."""
        return self.selector.mean_shift if self.has_choice else 0.0

    @property
    def is_divisible(self) -> bool:
        """Return whether the rows of this plan can be computed in several steps. They can if their number is known
        before the first layer, and if what is reused stays as it is: a mean shift needs all rows at once."""
        return self.looks_at is not LooksAt.LAYERS and not self.mean_shift

    @cached_property
    def num_scheduled_tokens(self) -> int:
        """Return the number of tokens that this plan computes, in the largest step if it is one that narrows, without
        generated ones."""
        suffix = self.num_prompt_tokens - self.suffix_start
        chosen = len(self.candidates) if self.looks_at is LooksAt.LAYERS else self.final_budget
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
    """Check the settings against the model, fill in the selector's defaults, and return the plan."""
    n = len(prompt_token_ids)
    if not 0 <= suffix_start < n:
        raise ValueError(
            f"the suffix must hold at least the last of the prompt's {n} tokens, but starts at {suffix_start}"
        )
    check_layer_numbers("check_layers", check_layers)
    checks = selector.looks_at is LooksAt.LAYERS
    if checks and max(check_layers) >= num_layers:
        raise ValueError(f"blend_check_layers={list(check_layers)}: the model has layers 0..{num_layers - 1}")
    if selector.fixed_ratio is not None:
        if ratio is not None and ratio != selector.fixed_ratio:
            raise ValueError(
                f"the selector {selector.name!r} always recomputes a share of {selector.fixed_ratio}, but "
                f"blend_recompute_ratio={ratio} was given: leave one of the two out"
            )
        ratio = selector.fixed_ratio
    if recompute_ratios is not None:
        if not checks:
            raise ValueError(
                f"blend_recompute_ratios={list(recompute_ratios)} has a ratio per check layer, but the selector "
                f"{selector.name!r} checks none: give blend_recompute_ratio, or a selector that checks layers, such as "
                "value_deviation"
            )
        shares = list(recompute_ratios)
    else:
        shares = [selector.default_ratio if ratio is None else ratio] * len(check_layers)
    check_shares("recompute_ratios", shares, check_layers)
    if not is_number(selector.mean_shift) or not 0 <= selector.mean_shift <= 1:  # of a selector of the user's own
        raise ValueError(
            f"the selector {selector.name!r} has mean_shift={selector.mean_shift!r}: make it a number from 0 to 1"
        )
    ratio = shares[-1]
    return BlendPlan(
        tuple(segments), tuple(prompt_token_ids), suffix_start, selector, ratio, tuple(check_layers), tuple(shares)
    )
