"""Levers change a selector's choice: one file per lever, and one registry of all, which `spec.py` parses.

To add one, copy `chunk_heads.py` and add the class to the tuple below.
"""

from __future__ import annotations

from vllm_blend.blend.selectors.levers.base import Lever
from vllm_blend.blend.selectors.levers.chunk_heads import ChunkHeads
from vllm_blend.blend.selectors.levers.chunk_minimum import ChunkMinimum
from vllm_blend.blend.selectors.levers.coverage import Coverage
from vllm_blend.blend.selectors.levers.mean_shift import MeanShift
from vllm_blend.blend.selectors.levers.smoothing import Smoothing
from vllm_blend.registry import Registry

LEVERS: Registry[type[Lever]] = Registry(
    "lever", "blend_selector", (ChunkHeads, ChunkMinimum, Smoothing, Coverage, MeanShift)
)

__all__ = ["LEVERS", "Lever"]
