"""What changes a selector's choice: one file per lever, one registry of all. `spec.py` names them."""

from __future__ import annotations

from vllm_blend.blend.selectors.levers.base import Lever
from vllm_blend.blend.selectors.levers.chunk_heads import ChunkHeads
from vllm_blend.blend.selectors.levers.chunk_minimum import ChunkMinimum
from vllm_blend.blend.selectors.levers.coverage import Coverage
from vllm_blend.blend.selectors.levers.mean_shift import MeanShift
from vllm_blend.blend.selectors.levers.smoothing import Smoothing
from vllm_blend.blend.selectors.levers.temperature import Temperature

LEVERS: dict[str, type[Lever]] = {
    lever.name: lever for lever in (ChunkHeads, ChunkMinimum, Smoothing, Coverage, MeanShift, Temperature)
}

__all__ = ["LEVERS", "Lever"]
