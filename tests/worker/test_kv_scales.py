"""The units that are measured for an FP8 cache."""

from __future__ import annotations

import torch

from vllm_blend.attention.kv_scales import KVScales, scaled
from vllm_blend.worker.kv_scales import nearest_scales


def test_scales_are_the_powers_of_16_that_bring_a_head_into_range() -> None:
    largest = torch.tensor([8.0, 2.1, 31.0, 33.0, 1.9, 3000.0, 1e-4, 0.0, torch.inf, torch.nan])
    expected = torch.tensor([1.0, 1, 1, 16, 1 / 16, 256, 2.0**-16, 1, 1, 1])
    assert torch.equal(nearest_scales(largest), expected)
    known = largest[largest.isfinite() & (largest > 0)]
    assert ((known / nearest_scales(known) >= 2) & (known / nearest_scales(known) <= 32)).all()


def test_units_change_nothing_of_attention() -> None:
    """Scores of all query heads of a KV head, and values, in whatever shape they come: to the last bit."""
    random = torch.Generator().manual_seed(0)
    scales = KVScales(torch.tensor([16.0, 1 / 256]), torch.tensor([1 / 16, 1.0]))
    q, k, v = (torch.randn(5, heads, 8, generator=random) for heads in (6, 2, 2))
    scaled_q, scaled_k, scaled_v = scales.to_units(q, k, v, group=3)
    for head in range(6):
        assert torch.equal(scaled_q[:, head] @ scaled_k[:, head // 3].T, q[:, head] @ k[:, head // 3].T)
        assert torch.equal(scales.from_units(scaled_v.repeat_interleave(3, 1), 3)[:, head], v[:, head // 3])
    by_head = q.reshape(10, 3, 8)  # as a pass over pages of single heads has it
    assert torch.equal(scaled(by_head, scales.k, 3).view(5, 6, 8), scaled_q)
    assert not scales.is_one and KVScales(torch.ones(2), torch.ones(2)).is_one
