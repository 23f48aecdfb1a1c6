"""What a request returns, as `vllm.outputs` has it."""

from vllm_blend.outputs import BlendStats, CompletionOutput, RequestMetrics, RequestOutput

__all__ = ["BlendStats", "CompletionOutput", "RequestMetrics", "RequestOutput"]
