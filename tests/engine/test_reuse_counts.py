"""What a blend's counts say of each of its pieces."""

from __future__ import annotations

import torch

from vllm_blend.blend.plan import Segment, make_plan
from vllm_blend.blend.selectors import make_selector
from vllm_blend.engine.metrics import count_reuse
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.worker.runner_output import BlendResult


def test_pieces_are_counted_by_where_they_were_found_and_how_they_were_used() -> None:
    def stored(tokens: int) -> ChunkKV:
        return ChunkKV(torch.zeros(3, tokens, 1, 1), torch.zeros(3, tokens, 1, 1))

    segments = [
        Segment(0, stored(4), True, "device"),
        Segment(4, stored(6), False, "disk"),
        Segment(10, stored(5), False, None),  # encoded for this prompt
        Segment(17, stored(3), False, "device"),
    ]  # 15 and 16 are a hole
    plan = make_plan(segments, list(range(22)), 20, make_selector("value_deviation"), 0.5, [1], None, 3)
    computed = torch.tensor([4, 5, 11, 15, 16, 17])
    counts = count_reuse(BlendResult(plan, computed, computed, computed))
    assert (counts.exact, counts.reused, counts.encoded, counts.recomputed) == (4, 4 + 2, 4, 6 + 2)
    assert counts.kinds == "eeee" + "ccrrrr" + "ncnnn" + "cc" + "crr" + "cc"
    assert counts.found == {"device": 4 + 2, "disk": 4} and counts.num_found == 10
