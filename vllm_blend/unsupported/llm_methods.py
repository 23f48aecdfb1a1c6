"""The methods of vLLM's `LLM` (0.11 to 0.22) that this engine does not have."""

from __future__ import annotations

from vllm_blend.unsupported import NO_POOLING, NO_PROFILER

_NO_SLEEP = "the engine cannot sleep: shutdown() frees its memory"
_NO_QUEUE = "call generate() or chat() from a thread of its own, or LLMEngine.add_request and step"
_NO_TRANSFER = "weights are loaded once, when the engine starts: make another LLM"

UNSUPPORTED_LLM_METHODS: dict[str, str] = {
    "encode": NO_POOLING,
    "embed": NO_POOLING,
    "classify": NO_POOLING,
    "reward": NO_POOLING,
    "score": NO_POOLING,
    "sleep": _NO_SLEEP,
    "wake_up": _NO_SLEEP,
    "start_profile": NO_PROFILER,
    "stop_profile": NO_PROFILER,
    "enqueue": _NO_QUEUE,
    "enqueue_chat": _NO_QUEUE,
    "wait_for_completion": _NO_QUEUE,
    "preprocess_chat": "use get_tokenizer().apply_chat_template, or chat(), which renders and generates",
    "reset_mm_cache": "the supported models take text only",
    "get_world_size": "the number of ranks is tensor_parallel_size, which you gave",
    "init_weight_transfer_engine": _NO_TRANSFER,
    "update_weights": _NO_TRANSFER,
}
"""vLLM's name -> why a call is refused, or what to do instead."""
