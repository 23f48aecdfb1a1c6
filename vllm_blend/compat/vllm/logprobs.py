"""`vllm.logprobs`."""

from vllm_blend.outputs import FlatLogprobs, Logprob

__all__ = ["FlatLogprobs", "Logprob"]
