"""`vllm.sampling_params`."""

from vllm_blend.entrypoints.beam_search import BeamSearchParams
from vllm_blend.sampling_params import RequestOutputKind, SamplingParams
from vllm_blend.structured_outputs import GuidedDecodingParams, StructuredOutputsParams

__all__ = ["BeamSearchParams", "GuidedDecodingParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
