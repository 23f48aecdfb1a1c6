"""vLLM's import name: `from vllm import LLM, SamplingParams` imports vllm-blend's.

An installation puts the folder of this package on Python's path. The version is that of the vLLM whose API this is.
"""

from typing import TYPE_CHECKING, Any

from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.engine_args import EngineArgs
from vllm_blend.entrypoints.llm import LLM
from vllm_blend.inputs import PromptType, TextPrompt, TokensPrompt
from vllm_blend.outputs import CompletionOutput, RequestOutput
from vllm_blend.sampling_params import SamplingParams

from .engine.arg_utils import AsyncEngineArgs
from .version import __version__, __version_tuple__

if TYPE_CHECKING:
    from .engine.async_llm_engine import AsyncLLMEngine

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "__version_tuple__",
]


def __getattr__(name: str) -> Any:
    """Import `AsyncLLMEngine` on first use: it needs the packages of the extra `server`."""
    if name == "AsyncLLMEngine":
        from .engine.async_llm_engine import AsyncLLMEngine

        return AsyncLLMEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
