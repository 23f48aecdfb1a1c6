"""`lmcache_vllm.blend_adapter`."""

from vllm_blend.lmcache.precompute import OfflineKVPreCompute
from vllm_blend.lmcache.prompts import append_separator, combine_input_prompt_chunks

__all__ = ["OfflineKVPreCompute", "append_separator", "combine_input_prompt_chunks"]
