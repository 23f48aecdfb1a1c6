"""`vllm.entrypoints.chat_utils`."""

from ..renderers.hf import resolve_chat_template as resolve_hf_chat_template

__all__ = ["resolve_hf_chat_template"]
