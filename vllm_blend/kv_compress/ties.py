"""Scores that differ by rounding only, so that the batch a request was computed in does not order them.

Equal tokens have keys of the same norm, for example, but matrix products round by the shape of a batch, so their scores
differ in the last bits, and not alike in any two batches. Scores that lie so close together are a tie, which the
position breaks. A tie is a run of sorted scores whose neighbours are close. That is an equivalence, and rounding moves
no score across an edge unless two different scores happen to differ by just the tolerance; a grid of rounded scores
would cut through every tie that lies on one of its lines.
"""

from __future__ import annotations

import torch

# Relative: above the rounding of sums in float32, some 2**-21, and below the mean distance of 32,000 different scores.
# Keys in half precision are coarser than that: rounding of a batch may still decide between equal tokens there.
TOLERANCE = 2.0**-18


def tie_starts(scores: torch.Tensor, magnitude: float) -> torch.Tensor:
    """Return the index of the first score of each score's tie, int64 like `scores` [..., n], which are sorted.

    `magnitude` is the least size that rounding is relative to: 0 where scores are as exact as their own size, 1 where
    they are differences of numbers around 1. NaN and infinite scores tie with their equals.
    """
    before, after = scores[..., :-1], scores[..., 1:]
    scale = torch.maximum(before.abs(), after.abs()).clamp_(min=magnitude)
    close = (after - before).abs() <= scale * TOLERANCE
    same = (before == after) | (before.isnan() & after.isnan()) | (close & before.isfinite() & after.isfinite())
    starts = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape).clone()
    starts[..., 1:].masked_fill_(same, 0)
    return starts.cummax(-1).values if starts.shape[-1] else starts
