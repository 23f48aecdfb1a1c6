"""What is reused in a prompt, and what a blend of it has to compute."""

from __future__ import annotations

import hashlib
import math
import operator
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from vllm_blend.blend.relevance.passages import PromptPassages, Span
from vllm_blend.blend.selectors import LooksAt, Selector
from vllm_blend.checks import check_layer_numbers, check_shares
from vllm_blend.kv_store.chunk_kv import ChunkKV

# Rows of a tile of a GPU's matrix products. With one row over 640, a blend of 4096 tokens took an H200 1.2 ms longer.
ROW_TILE = 128


@dataclass(frozen=True)
class Segment:
    """Positions `start` to `stop` - 1 of a prompt, covered by stored KV.

    `exact` says that the KV is what full prefill would compute there: the segment was encoded after exactly what
    precedes it. `found_in` says where the KV was found, a key of `RequestOutput.num_found_tokens`; None if it was
    computed for this prompt. `key_scale` is what its keys are multiplied by on their way to the request's pages: below
    1, everything that comes later looks at it less (`Selector.passed_over_scale`).
    """

    start: int
    kv: ChunkKV
    exact: bool = False
    found_in: str | None = None
    key_scale: float = 1.0

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
    chosen: torch.Tensor | None = None  # [n] int64, ascending: candidates that were chosen before the step
    error: str | None = None  # why nothing could be chosen before the step

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
        return self.budget(self.shares[-1]) if self.chosen is None else len(self.chosen)

    @cached_property
    def looks_at(self) -> LooksAt:
        """Return what the selector has to see for this prompt: nothing if it has no choice, or has chosen already."""
        free = self.chosen is None and 0 < self.final_budget < len(self.candidates)
        return self.selector.looks_at if free else LooksAt.POSITIONS

    def choose_passages(self, passages: PromptPassages, serves_others: bool = False) -> BlendPlan:
        """Return this plan with what its selector, which `chooses_passages`, chooses by them alone. An error of the
        selector costs its own request only, when that is computed.

        All that is reused of passages of which nothing is chosen gets the selector's `passed_over_scale`, unless the
        blended context `serves_others`: prompts whose questions are about other passages.
        """
        budget = self.final_budget
        if not 0 < budget < len(self.candidates):
            return self
        is_candidate = self._kinds == 1
        is_chosen = np.zeros(self.suffix_start, bool)
        try:
            spans = self.selector.choose_spans(
                passages, lambda span: int(np.count_nonzero(is_candidate[slice(*span)])), budget
            )
            if spans is None:
                return self
            for start, stop in self._check_spans(spans):
                is_chosen[start:stop] = True
            scale = 1.0 if serves_others else _check_scale(self.selector.passed_over_scale())
        except Exception as error:  # a user's selector, and what it returns, may raise anything
            return replace(self, error=f"the selector {self.selector.name!r} failed: {error!r}")
        chosen = np.flatnonzero(is_chosen & is_candidate)[:budget]
        segments = self.segments if scale == 1 else self._damp(passages.bounds, chosen, scale)
        plan = replace(self, segments=segments, chosen=torch.from_numpy(chosen))
        for name in ("_kinds", "candidates", "holes"):  # which are the same, and need not be found again
            if name in self.__dict__:
                plan.__dict__[name] = self.__dict__[name]
        return plan

    def _damp(self, passages: Sequence[Span], chosen: np.ndarray, scale: float) -> tuple[Segment, ...]:
        """Return the segments, with `scale` on those that lie in passages of which nothing is chosen."""
        counts = np.diff(np.searchsorted(chosen, np.array(passages).reshape(-1, 2)))[:, 0].tolist()
        starts, stops = [0], [0]  # of stretches that are passed over: a segment may cover several passages
        for (start, stop), count in zip(passages, counts, strict=True):
            if not count and start == stops[-1]:
                stops[-1] = stop
            elif not count:
                starts.append(start)
                stops.append(stop)

        def is_passed_over(segment: Segment) -> bool:
            return segment.stop <= stops[bisect_right(starts, segment.start) - 1]

        return tuple(
            Segment(each.start, each.kv, found_in=each.found_in, key_scale=scale)
            if not each.exact and is_passed_over(each)
            else each
            for each in self.segments
        )

    def _check_spans(self, spans: Iterable[Span] | np.ndarray) -> Iterable[Span]:
        """Yield spans of the context. Raises ValueError for what is none."""
        if not (isinstance(spans, np.ndarray) and spans.dtype.kind in "iu" and spans.ndim == 2 and spans.shape[1] == 2):
            return map(self._check_span, spans)
        starts, stops = spans[:, 0], spans[:, 1]
        is_wrong = (starts < 0) | (starts > stops) | (stops > self.suffix_start)
        for start, stop in spans[is_wrong].tolist():
            self._check_span((start, stop))
        return zip(starts.tolist(), stops.tolist(), strict=True)

    def _check_span(self, span: Span) -> Span:
        try:
            start, stop = map(operator.index, span)
        except (TypeError, ValueError):
            start, stop = -1, -1
        if not 0 <= start <= stop <= self.suffix_start:
            raise ValueError(
                f"choose_spans() returned {span!r}: return (start, stop) with 0 <= start <= stop <= "
                f"{self.suffix_start}, positions before the suffix"
            )
        return start, stop

    @property
    def is_divisible(self) -> bool:
        """Return whether the rows of this plan can be computed in several steps. They can if their number is known
        before the first layer, and if what is reused stays as it is: a mean shift needs all rows at once."""
        counts = type(self.selector).count is Selector.count
        return counts and not self.looks_at.checks and not self.selector.mean_shift()

    @cached_property
    def num_scheduled_tokens(self) -> int:
        """Return the number of tokens that this plan computes, in the largest step if it is one that narrows, without
        generated ones."""
        suffix = self.num_prompt_tokens - self.suffix_start
        chosen = len(self.candidates) if self.looks_at.checks else self.final_budget
        return chosen + len(self.holes) + suffix


def _check_scale(scale: float) -> float:
    """Return what a selector multiplies keys by. It may be a user's own, and return anything."""
    if not 0 < scale <= 1:
        raise ValueError(f"passed_over_scale() returned {scale!r}: return a number above 0, and at most 1")
    return float(scale)


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
                f"blend_recompute_ratios={list(recompute_ratios)} has a ratio per check layer, but the selector "
                f"{selector.name!r} checks none: give blend_recompute_ratio, or a selector that checks layers, such as "
                "value_deviation"
            )
        shares = list(recompute_ratios)
    else:
        shares = selector.shares(selector.default_ratio if ratio is None else ratio, check_layers)
    check_shares("recompute_ratios", shares, check_layers)
    ratio = shares[-1]
    return BlendPlan(
        tuple(segments), tuple(prompt_token_ids), suffix_start, selector, ratio, tuple(check_layers), tuple(shares)
    )
