"""`vllm.sampling_params`."""

from vllm_blend.entrypoints.beam_search import BeamSearchParams
from vllm_blend.sampling_params import SamplingParams
from vllm_blend.unsupported import unsupported_class

_NO_STRUCTURE = "structured outputs come with a later release; generate plain text and check it"

StructuredOutputsParams = unsupported_class("StructuredOutputsParams", _NO_STRUCTURE)
GuidedDecodingParams = unsupported_class("GuidedDecodingParams", _NO_STRUCTURE)

__all__ = ["BeamSearchParams", "GuidedDecodingParams", "SamplingParams", "StructuredOutputsParams"]
