"""`vllm.engine.arg_utils`."""

from __future__ import annotations

from vllm_blend.engine.arg_utils import EngineArgs

__all__ = ["EngineArgs"]
