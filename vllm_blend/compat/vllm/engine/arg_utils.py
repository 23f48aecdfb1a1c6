"""`vllm.engine.arg_utils`."""

from vllm_blend.engine_args import EngineArgs

__all__ = ["EngineArgs"]
