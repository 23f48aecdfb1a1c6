"""`vllm.engine.arg_utils`."""

from __future__ import annotations

from typing import Any

from vllm_blend.engine_args import EngineArgs
from vllm_blend.unsupported import Unsupported

__all__ = ["AsyncEngineArgs", "EngineArgs"]

_NO_LOG = "the engine logs no requests: log them where you call generate()"
_LOG_REQUESTS = {
    "enable_log_requests": Unsupported(False, _NO_LOG),
    "disable_log_requests": Unsupported(True, _NO_LOG),
}


class AsyncEngineArgs(EngineArgs):
    """`EngineArgs` for `AsyncLLMEngine`, with vLLM's two arguments about the logging of requests: it stays off."""

    def __init__(self, model: str, tokenizer: str | None = None, **options: Any) -> None:
        for name, unsupported in _LOG_REQUESTS.items():
            unsupported.check(name, options.pop(name, None))
        super().__init__(model, tokenizer, **options)
