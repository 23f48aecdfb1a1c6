"""vLLM's import name: `from vllm import LLM, SamplingParams` imports vllm-blend's.

An installation puts the folder of this package on Python's path. The version is that of the vLLM whose API this is.
"""

from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.engine_args import EngineArgs
from vllm_blend.entrypoints.llm import LLM
from vllm_blend.inputs import PromptType, TextPrompt, TokensPrompt
from vllm_blend.outputs import CompletionOutput, RequestOutput
from vllm_blend.sampling_params import SamplingParams

from .version import __version__, __version_tuple__

__all__ = [
    "LLM",
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
