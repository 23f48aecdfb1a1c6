"""`vllm.v1.engine.exceptions`."""

from vllm_blend.engine.errors import EngineDeadError

__all__ = ["EngineDeadError"]
