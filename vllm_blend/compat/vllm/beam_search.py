"""`vllm.beam_search`."""

from vllm_blend.entrypoints.beam_search import BeamSearchOutput, BeamSearchSequence

__all__ = ["BeamSearchOutput", "BeamSearchSequence"]
