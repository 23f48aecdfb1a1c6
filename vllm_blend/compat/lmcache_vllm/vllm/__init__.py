"""`lmcache_vllm.vllm`: the names of `vllm`, with an `LLM` that LMCACHE_CONFIG_FILE configures."""

from vllm_blend import __version__
from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.engine_args import EngineArgs
from vllm_blend.inputs import PromptType, TextPrompt, TokensPrompt
from vllm_blend.lmcache.llm import LLM
from vllm_blend.outputs import CompletionOutput, RequestOutput
from vllm_blend.sampling_params import SamplingParams

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
]
