"""One device's worth of an engine: loads the model, sizes the cache, owns the runner."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TypeVar

import torch
from transformers import PretrainedConfig

from vllm_blend.attention.metadata import AttentionBackend
from vllm_blend.attention.registry import make_backend
from vllm_blend.blend.metadata import FuseMetadata, default_fuse_metadata
from vllm_blend.checks import require
from vllm_blend.config import EngineConfig
from vllm_blend.devices import resolve_cache_dtype
from vllm_blend.distributed.ranks import ONE_RANK, Ranks
from vllm_blend.kv_store.transfer import StagingRing
from vllm_blend.models.causal_lm import CausalLM, attention_layers
from vllm_blend.models.loader import load_model
from vllm_blend.openmp import limit_spinning
from vllm_blend.ops.e4m3 import E4M3
from vllm_blend.ops.graph_capture import CUDAGraphs, drop_graphs
from vllm_blend.worker.block_pass import BlockPass, Graphs
from vllm_blend.worker.cuda_graphs import DecodeGraphs
from vllm_blend.worker.device_parts import DeviceParts
from vllm_blend.worker.kv_cache import CacheShape, KVCache
from vllm_blend.worker.kv_scales import measure_kv_scales
from vllm_blend.worker.memory import GIB, GRAPHS_REMEDY, Pool, Share, Usage, measure_tensors, must_fit
from vllm_blend.worker.model_runner import ModelRunner
from vllm_blend.worker.passes import GraphHook, WorkerExtension, WorkerSpec, make_worker_extensions
from vllm_blend.worker.profile_run import NUM_BLOCKS, StepLimits, measure_activations
from vllm_blend.worker.question_graphs import QuestionGraphs, looks_to_capture
from vllm_blend.worker.shared_heads import SharedHeads
from vllm_blend.worker.step_graphs import DEFAULT_ROWS, StepGraphs

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=WorkerExtension)

CPU_CACHE_GIB = 4  # the most a CPU engine takes for KV unless VLLM_CPU_KVCACHE_SPACE (GiB) says otherwise
LARGE_USE = GIB  # bytes in use on the device before anything is loaded; a CUDA context alone takes half of that


class Worker:
    """Builds everything that lives on the device: of several ranks, everything of one.

    Raises `OutOfDeviceMemory` when something does not fit there, and ValueError when what is left for the KV cache
    cannot hold one request of the greatest length.
    """

    def __init__(
        self,
        config: EngineConfig,
        hf_config: PretrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.rank, self.num_ranks, self._ranks = ranks.rank, ranks.size, ranks
        self.config, self.dtype, self.device, self.max_model_len = config, dtype, device, max_model_len
        cache_dtype = resolve_cache_dtype(config.cache.kv_cache_dtype, dtype)
        self.hf_config = hf_config
        if device.type == "cuda":
            _warn_of_others(Usage.settled(device), config.cache.gpu_memory_utilization)
            if not config.disable_custom_all_reduce:
                ranks.share_memory(device)
        else:
            limit_spinning()
        smaller = "quantization='fp8'" if ranks.size == 1 else f"a tensor_parallel_size above {ranks.size}"
        with must_fit("the model's weights", f"use a smaller model, or {smaller}", device):
            model = load_model(
                hf_config,
                config.model.model,
                dtype,
                device,
                config.model.load_format,
                max_position=max_model_len,
                revision=config.model.revision,
                quantization=config.model.quantization,
                keeps_int4=not config.model.dequantize_weights,
                ranks=ranks,
            )
        attentions = attention_layers(model)
        self.shape = CacheShape(len(attentions), attentions[0].num_kv_heads, attentions[0].head_dim, cache_dtype)
        self._has_sinks = any(attention.sinks is not None for attention in attentions)
        self._heads = SharedHeads(ranks, attentions[0].kv_copies)
        self.num_layers, self.num_heads = len(attentions), attentions[0].num_heads
        self.wants_graphs = device.type == "cuda" and not config.model.enforce_eager
        self.extensions = make_worker_extensions(
            WorkerSpec(config, device, self.shape, max_model_len, self.wants_graphs)
        )
        backend = self._make_backend()
        if cache_dtype is E4M3:
            self._measure_scales(model)
        staging = None
        if config.blend.resolve_chunk_device(device) != device:
            staging = StagingRing(self.shape.kv_heads, self.shape.head_dim, cache_dtype, device)
        model.model.cache_fuse_metadata = FuseMetadata(default_fuse_metadata(cache_dtype))
        self.memory: Share | None = None  # how a GPU's memory was shared out, where that was measured
        self.pool = Pool(self._num_blocks(model), config.cache.block_size, self._block_bytes, max_model_len)
        with must_fit("the KV cache", "lower gpu_memory_utilization or num_gpu_blocks_override", device):
            parts = DeviceParts(model, self._allocate(self.pool.num_blocks), backend, self._heads)
        with must_fit("the CUDA graphs", GRAPHS_REMEDY, device):
            graphs = self._capture(parts)
        self._graph_pool = None if graphs.decode is None else graphs.decode.pool
        for extension in self.extensions:
            extension.build(parts, self._graph_pool)
        block_pass = BlockPass(parts, graphs, staging, self.extensions)
        others = [one for extension in self.extensions for one in extension.passes()]
        self.model_runner = ModelRunner(block_pass, config.model.seed, others)
        of_rank = "" if ranks.size == 1 else f"rank {ranks.rank} of {ranks.size}: "
        logger.info("%s%s", of_rank, self.pool if self.memory is None else f"{self.memory}; {self.pool}")

    def drop_graphs(self) -> None:
        """Destroy the CUDA graphs, after which no step can be run. A rank does so before it leaves the others, as NCCL
        does not let go of an exchange that a graph holds."""
        if self._graph_pool is not None:
            drop_graphs(self._graph_pool)

    def extension(self, kind: type[E]) -> E:
        """Return a feature's part of this worker. Raises KeyError if there is none."""
        for extension in self.extensions:
            if isinstance(extension, kind):
                return extension
        raise KeyError(f"the worker has no {kind.__name__}")

    def _make_backend(self) -> AttentionBackend:
        heads = (self.shape.head_dim, self.num_heads, self.shape.kv_heads)
        name, size = self.config.attention_backend, self.config.cache.block_size
        pages = (self._has_sinks, self.shape.dtype is E4M3)
        backend = make_backend(name, self.device, self.dtype, *heads, self.wants_graphs, *pages)
        if size >= backend.smallest_block:
            return backend
        unfit = f"block_size={size}, but {backend.name!r} takes pages of {backend.smallest_block} tokens and more"
        require(name == "auto", f"attention_backend={name!r}: {unfit}; raise block_size, or use 'auto'")
        logger.warning("attention runs in plain torch: %s", unfit)
        return make_backend("torch_native", self.device, self.dtype, *heads, False, *pages)

    def _measure_scales(self, model: CausalLM) -> None:
        shape, vocab_size = replace(self.shape, dtype=self.dtype), int(self.hf_config.get_text_config().vocab_size)
        size = self.config.cache.block_size
        measure_kv_scales(model, self._make_backend(), shape, self.device, vocab_size, self.max_model_len, size)

    @property
    def _block_bytes(self) -> int:
        own = self.config.cache.block_size * self.shape.bytes_per_token
        return own + sum(extension.bytes_per_block() for extension in self.extensions)

    def _allocate(self, num_blocks: int) -> KVCache:
        return KVCache.allocate(self.shape, num_blocks, self.config.cache.block_size, self.device)

    @torch.inference_mode()
    def _capture(self, parts: DeviceParts) -> Graphs:
        """Return the passes that are replayed as CUDA graphs. They share their memory."""
        config, backend = self.config, parts.backend
        max_num_seqs, max_rows = config.scheduler.max_num_seqs, config.scheduler.max_cudagraph_capture_size
        if not (self.wants_graphs and backend.capturable_decode):
            if max_rows:
                logger.warning(
                    "max_cudagraph_capture_size=%d does nothing: this engine runs without CUDA graphs", max_rows
                )
            return Graphs()
        decode = DecodeGraphs(parts, max_num_seqs, self.max_model_len, self._graph_hooks)
        question, step, capture = None, None, CUDAGraphs(parts.device, decode.pool)
        alone = self.num_ranks == 1  # else the mass of all ranks' heads is added up, which is not captured
        if alone and config.blend.enable_blending and backend.capturable_mass:
            looks = looks_to_capture(config.blend.selector, self.num_layers)
            question = QuestionGraphs(parts, self.max_model_len, looks, capture)
        if max_rows is None:
            max_rows = DEFAULT_ROWS if alone and backend.capturable_prefill else 0
        if max_rows:
            step = StepGraphs(parts, max_rows, max_num_seqs, self.max_model_len, capture)
        return Graphs(decode, question, step)

    def _graph_hooks(self) -> list[GraphHook]:
        hooks = (extension.graph_hook() for extension in self.extensions)
        return [hook for hook in hooks if hook is not None]

    def _num_blocks(self, model: CausalLM) -> int:
        """Return the number of blocks of the cache, the padding block included. Raises ValueError if not even one
        request fits."""
        cache, scheduler = self.config.cache, self.config.scheduler
        one_request = -(-self.max_model_len // cache.block_size) + 1
        spent = ""
        if cache.num_gpu_blocks_override is not None:
            count = cache.num_gpu_blocks_override
            how = "raise num_gpu_blocks_override, or lower max_model_len"
        elif self.device.type == "cpu":
            gib = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or CPU_CACHE_GIB)
            count = min(int(gib * GIB) // self._block_bytes, (one_request - 1) * scheduler.max_num_seqs + 1)
            how = "raise the environment variable VLLM_CPU_KVCACHE_SPACE (GiB), or lower max_model_len"
        else:
            self.memory = self._share_out(model)
            count = self.memory.num_blocks(self._block_bytes)
            how = "raise gpu_memory_utilization, or lower max_model_len, max_num_batched_tokens, max_num_seqs"
            how += " or blend_chunk_cache_gib" if self.memory.chunk_store else ""
            spent = f" ({self.memory})"
        count = self._ranks.minimum(count, self.device)  # the scheduler gives all ranks the same blocks
        require(
            count >= one_request,
            f"the KV cache has room for {max(0, count - 1) * cache.block_size} tokens, but one request may have "
            f"max_model_len={self.max_model_len}{spent}: {how}",
        )
        return count

    def _share_out(self, model: CausalLM) -> Share:
        """Return how the GPU's memory is shared out, from what the engine is measured to need beside the KV cache."""
        blend = self.config.blend
        activations, graphs = self._measure(model)
        activations = max([activations, *(extension.bytes_between_steps() for extension in self.extensions)])
        now = Usage.settled(self.device)
        chunks_here = blend.enable_blending and blend.resolve_chunk_device(self.device) == self.device
        return Share(
            total=now.total,
            utilization=self.config.cache.gpu_memory_utilization,
            other=now.other,
            weights=now.reserved,
            activations=activations + sum(extension.table_bytes() for extension in self.extensions),
            graphs=graphs,
            chunk_store=int(blend.chunk_cache_gib * GIB) if chunks_here else 0,
        )

    def _measure(self, model: CausalLM) -> tuple[int, int]:
        """Return the bytes of the largest steps and of the graphs: both are run, on a cache of a few pages and with
        backends of their own."""
        config, device = self.config, self.device
        rows = config.scheduler.max_num_seqs
        rows = max([rows, *(extension.max_rows(rows) for extension in self.extensions)])
        limits = StepLimits(config.scheduler.step_tokens(device), rows, self.max_model_len, config.blend)
        pages = self._allocate(NUM_BLOCKS)
        remedy = "lower max_num_batched_tokens or max_num_seqs"
        remedy += " or max_model_len" if config.blend.enable_blending else ""
        with must_fit("the activations of the largest step", remedy, device):
            parts = DeviceParts(model, pages, self._make_backend(), self._heads)
            activations = measure_activations(parts, limits)
        with must_fit("the CUDA graphs", "lower max_num_seqs, or give enforce_eager=True", device):
            # The graphs' memory holds what their backend has planned, so both must be dropped to be counted.
            make = lambda: self._capture(DeviceParts(model, pages, self._make_backend(), self._heads))  # noqa: E731
            graphs = measure_tensors(make, device)
        return activations, graphs


def _warn_of_others(start: Usage, utilization: float) -> None:
    if start.used > LARGE_USE:
        logger.warning(
            "before anything is loaded, %.2f of the GPU's %.2f GiB are in use: %.2f GiB by other tensors of this "
            "process, %.2f GiB by other processes and CUDA itself; gpu_memory_utilization=%g counts them in",
            *(number / GIB for number in (start.used, start.total, start.reserved, start.other)),
            utilization,
        )
