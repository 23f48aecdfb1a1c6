"""The import name of LMCache's vLLM integration: its blending API on vllm-blend's engine.

An installation puts the folder of this package on Python's path. Its version is that of vllm-blend.
"""

from vllm_blend import __version__
from vllm_blend.lmcache.llm import close_lmcache_engine

from . import blend_adapter, vllm

__all__ = ["__version__", "blend_adapter", "close_lmcache_engine", "vllm"]
