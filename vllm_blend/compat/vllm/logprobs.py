"""`vllm.logprobs`."""

from __future__ import annotations

from vllm_blend.outputs import Logprob

__all__ = ["Logprob"]
