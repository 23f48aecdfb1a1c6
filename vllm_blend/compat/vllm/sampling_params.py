"""`vllm.sampling_params`."""

from __future__ import annotations

from vllm_blend.sampling_params import SamplingParams

__all__ = ["SamplingParams"]
