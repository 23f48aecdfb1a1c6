"""`vllm.logprobs`."""

from __future__ import annotations

from vllm_blend.outputs import FlatLogprobs, Logprob

__all__ = ["FlatLogprobs", "Logprob"]
