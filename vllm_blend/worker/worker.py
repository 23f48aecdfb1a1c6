"""One device's worth of an engine: loads the model, sizes the cache, owns the runner."""

from __future__ import annotations

import os

import torch
from transformers import PretrainedConfig

from vllm_blend.attention.registry import make_backend
from vllm_blend.blend.metadata import default_fuse_metadata
from vllm_blend.config import EngineConfig, require
from vllm_blend.kv_store.transfer import StagingRing
from vllm_blend.models.loader import load_model
from vllm_blend.worker.cuda_graphs import DecodeGraphs
from vllm_blend.worker.kv_cache import KVCache, bytes_per_block
from vllm_blend.worker.model_runner import ModelRunner

CPU_CACHE_GIB = 4  # the most a CPU engine takes for KV unless VLLM_CPU_KVCACHE_SPACE (GiB) says otherwise


class Worker:
    """Builds everything that lives on the device."""

    def __init__(
        self,
        config: EngineConfig,
        hf_config: PretrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        self.config, self.dtype, self.device, self.max_model_len = config, dtype, device, max_model_len
        self.hf_config = hf_config
        model = load_model(
            hf_config,
            config.model.model,
            dtype,
            device,
            config.model.load_format,
            max_position=max_model_len,
            revision=config.model.revision,
            quantization=config.model.quantization,
        )
        first = model.model.layers[0].self_attn.attn  # type: ignore[union-attr,index]
        self.num_layers, self.num_kv_heads, self.head_dim = len(model.model.layers), first.num_kv_heads, first.head_dim  # type: ignore[union-attr,arg-type]
        wants_graphs = device.type == "cuda" and not config.model.enforce_eager
        backend = make_backend(
            config.attention_backend, device, dtype, self.head_dim, first.num_heads, self.num_kv_heads, wants_graphs
        )
        staging = None
        if config.blend.resolve_chunk_device(device) != device:
            staging = StagingRing(self.num_kv_heads, self.head_dim, dtype, device)
        cache = KVCache.allocate(
            self.num_layers,
            self._num_blocks(),
            config.cache.block_size,
            self.num_kv_heads,
            self.head_dim,
            dtype,
            device,
        )
        model.model.cache_fuse_metadata.update(default_fuse_metadata(dtype))  # type: ignore[union-attr,operator]
        graphs = None
        if wants_graphs and backend.capturable_decode:
            with torch.inference_mode():
                graphs = DecodeGraphs(model, cache, backend, config.scheduler.max_num_seqs, max_model_len)
        self.model_runner = ModelRunner(model, cache, backend, config.model.seed, graphs, staging)

    def _reserved_bytes(self) -> int:
        """Device memory that is not for pages: the activations of the largest step, and stored chunks."""
        scheduler, blend = self.config.scheduler, self.config.blend
        tokens = max(scheduler.max_num_batched_tokens or 8192, self.max_model_len if blend.enable_blending else 0)
        config = self.hf_config
        widest = 2 * config.intermediate_size + 6 * config.hidden_size
        activations = 2 * tokens * widest * self.dtype.itemsize + 8 * scheduler.max_num_seqs * config.vocab_size
        chunks_here = blend.enable_blending and blend.resolve_chunk_device(self.device) == self.device
        return activations + (int(blend.chunk_cache_gib * 2**30) if chunks_here else 0)

    def _num_blocks(self) -> int:
        """Blocks of the cache, the padding block included. Raises ValueError when not even one request fits."""
        cache, scheduler = self.config.cache, self.config.scheduler
        block_bytes = bytes_per_block(self.num_layers, cache.block_size, self.num_kv_heads, self.head_dim, self.dtype)
        one_request = -(-self.max_model_len // cache.block_size) + 1
        if cache.num_gpu_blocks_override is not None:
            count = cache.num_gpu_blocks_override
            how = "raise num_gpu_blocks_override"
        elif self.device.type == "cpu":
            gib = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or CPU_CACHE_GIB)
            count = min(int(gib * 2**30) // block_bytes, (one_request - 1) * scheduler.max_num_seqs + 1)
            how = "raise the environment variable VLLM_CPU_KVCACHE_SPACE (GiB)"
        else:
            free, total = torch.cuda.mem_get_info(self.device)
            usable = int(total * cache.gpu_memory_utilization) - (total - free) - self._reserved_bytes()
            count = max(0, usable) // block_bytes
            how = "raise gpu_memory_utilization"
        require(
            count >= one_request,
            f"the KV cache has room for {max(0, count - 1) * cache.block_size} tokens, but one request may have "
            f"max_model_len={self.max_model_len}: {how}, or lower max_model_len",
        )
        return count
