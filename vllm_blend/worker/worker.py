"""One device's worth of an engine: loads the model, sizes the cache, owns the runner."""

from __future__ import annotations

import logging
import os

import torch
from torch import nn
from transformers import PretrainedConfig

from vllm_blend.attention.metadata import AttentionBackend
from vllm_blend.attention.registry import make_backend
from vllm_blend.blend.metadata import FuseMetadata, default_fuse_metadata
from vllm_blend.blend.selectors import Look, make_selector
from vllm_blend.checks import require
from vllm_blend.config import EngineConfig
from vllm_blend.kv_compress.evictions import SORTED_BYTES, SORTED_TOGETHER
from vllm_blend.kv_store.transfer import StagingRing
from vllm_blend.models.loader import load_model
from vllm_blend.offload.attention import tapped_layers
from vllm_blend.worker.cache_engine import CacheEngine
from vllm_blend.worker.cascade import CascadePlanner, min_saved_tokens
from vllm_blend.worker.cascade_graphs import CascadeGraphs
from vllm_blend.worker.compressed_graphs import CompressedGraphs, can_be_captured
from vllm_blend.worker.compressed_step import CompressedStep
from vllm_blend.worker.cuda_graphs import DecodeGraphs
from vllm_blend.worker.kv_cache import KVCache, bytes_per_block
from vllm_blend.worker.memory import GIB, Pool, Share, Usage, measure_tensors, must_fit
from vllm_blend.worker.model_runner import ModelRunner
from vllm_blend.worker.profile_run import NUM_BLOCKS, StepLimits, measure_activations
from vllm_blend.worker.question_graphs import QuestionGraphs

logger = logging.getLogger(__name__)

CPU_CACHE_GIB = 4  # the most a CPU engine takes for KV unless VLLM_CPU_KVCACHE_SPACE (GiB) says otherwise
MUCH = GIB  # bytes in use on the device before anything is loaded; a CUDA context alone takes half of that


class Worker:
    """Builds everything that lives on the device.

    Raises `OutOfDeviceMemory` when something does not fit there, and ValueError when what is left for the KV cache
    cannot hold one request of the greatest length.
    """

    rank = 0  # the only one

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
        if device.type == "cuda":
            _warn_of_others(Usage.settled(device), config.cache.gpu_memory_utilization)
        with must_fit("the model's weights", "use a smaller model, or quantization='fp8'", device):
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
        self.num_heads: int = first.num_heads
        self.wants_graphs = device.type == "cuda" and not config.model.enforce_eager
        backend = self._make_backend()
        staging = None
        if config.blend.resolve_chunk_device(device) != device:
            staging = StagingRing(self.num_kv_heads, self.head_dim, dtype, device)
        model.model.cache_fuse_metadata = FuseMetadata(default_fuse_metadata(dtype))  # type: ignore[union-attr]
        self.memory: Share | None = None  # how a GPU's memory was shared out, where that was measured
        self.pool = Pool(self._num_blocks(model), config.cache.block_size, self._block_bytes, max_model_len)
        with must_fit("the KV cache", "lower gpu_memory_utilization or num_gpu_blocks_override", device):
            cache = self._allocate(self.pool.num_blocks)
        remedy = "lower gpu_memory_utilization or max_num_seqs, or give enforce_eager=True"
        with must_fit("the CUDA graphs", remedy, device):
            graphs, question_graphs = self._capture(model, cache, backend)
        self.model_runner = ModelRunner(model, cache, backend, config.model.seed, graphs, staging, question_graphs)
        if config.cascade_attention:
            with must_fit("the CUDA graphs of cascade attention", remedy, device):
                self._add_cascade(self.model_runner, graphs)
        self.model_runner.tapped_layers = tapped_layers(config.offload, self.num_layers)
        logger.info("%s", self.pool if self.memory is None else f"{self.memory}; {self.pool}")

    def _make_backend(self) -> AttentionBackend:
        heads = (self.head_dim, self.num_heads, self.num_kv_heads)
        name, size = self.config.attention_backend, self.config.cache.block_size
        backend = make_backend(name, self.device, self.dtype, *heads, self.wants_graphs)
        if size >= backend.smallest_block:
            return backend
        unfit = f"block_size={size}, but {backend.name!r} takes pages of {backend.smallest_block} tokens and more"
        require(name == "auto", f"attention_backend={name!r}: {unfit}; raise block_size, or use 'auto'")
        logger.warning("attention runs in plain torch: %s", unfit)
        return make_backend("torch_native", self.device, self.dtype, *heads)

    @property
    def _block_bytes(self) -> int:
        size = self.config.cache.block_size
        own = bytes_per_block(self.num_layers, size, self.num_kv_heads, self.head_dim, self.dtype)
        if not self.config.kv_compress.enable_kvc:
            return own
        return own + CacheEngine.bytes_per_block(self.num_layers, size, self.num_kv_heads)

    @property
    def _head_table_bytes(self) -> int:
        """Tables of requests in head pages, at most: the engine's, those that they replace when they grow, a step's,
        and what graphs read."""
        config = self.config
        if not config.kv_compress.enable_kvc:
            return 0
        width = -(-self.max_model_len // config.cache.block_size)
        one = self.num_layers * config.scheduler.max_num_seqs * self.num_kv_heads * width * torch.int32.itemsize
        return (4 if self.wants_graphs else 3) * one

    @property
    def _eviction_bytes(self) -> int:
        """What choosing KVs to evict takes between two steps, at most."""
        if not self.config.kv_compress.enable_kvc:
            return 0
        most = max(SORTED_TOGETHER, self.num_layers * self.num_kv_heads * self.max_model_len)
        return most * (SORTED_BYTES + torch.float32.itemsize + torch.int64.itemsize)

    def _allocate(self, num_blocks: int) -> KVCache:
        size = self.config.cache.block_size
        return KVCache.allocate(
            self.num_layers, num_blocks, size, self.num_kv_heads, self.head_dim, self.dtype, self.device
        )

    @torch.inference_mode()
    def _capture(
        self, model: nn.Module, cache: KVCache, backend: AttentionBackend
    ) -> tuple[DecodeGraphs | None, QuestionGraphs | None]:
        """The steps that are replayed as CUDA graphs, where the engine uses those."""
        config = self.config
        if not (self.wants_graphs and backend.capturable_decode):
            return None, None
        tapped = tapped_layers(config.offload, self.num_layers)
        decode = DecodeGraphs(model, cache, backend, config.scheduler.max_num_seqs, self.max_model_len, tapped)
        if not (config.blend.enable_blending and backend.capturable_mass):
            return decode, None
        look = make_selector(config.blend.selector, config.blend.chunk_kept_share is not None).look(self.num_layers)
        if not look.is_plain or look.tokens is not None:
            look = Look(look.stop)
        return decode, QuestionGraphs(model, cache, backend, self.max_model_len, look, decode.pool)

    @torch.inference_mode()
    def capture_compressed(self, step: CompressedStep) -> CompressedGraphs | None:
        """Graphs of the steps of requests in head pages, where the engine uses those."""
        if not (self.wants_graphs and can_be_captured(step)):
            return None
        graphs = self.model_runner.decode_graphs
        remedy = "lower gpu_memory_utilization, max_num_seqs or max_model_len, or give enforce_eager=True"
        with must_fit("the CUDA graphs of requests in head pages", remedy, self.device):
            sizes = (self.config.scheduler.max_num_seqs, self.max_model_len)
            return CompressedGraphs(step, *sizes, pool=None if graphs is None else graphs.pool)

    @torch.inference_mode()
    def _add_cascade(self, runner: ModelRunner, graphs: DecodeGraphs | None) -> None:
        """Have the runner attend shared pages once. Raises ValueError where the backend cannot."""
        cache, backend, limits = runner.cache, runner.backend, self.config.scheduler
        require(
            self.device.type == "cpu" or backend.capturable_cascade,
            f"cascade_attention needs our kernels for decoding, but attention is computed by {backend.name}: leave "
            "cascade_attention out, or give attention_backend='cuda'",
        )
        least = min_saved_tokens(on_gpu=self.device.type == "cuda")
        runner.cascade = CascadePlanner(cache.block_size, least)
        if graphs is not None:
            sizes = (limits.max_num_seqs, self.max_model_len)
            planner = CascadePlanner(cache.block_size, least, max_levels=1)
            runner.cascade_graphs = CascadeGraphs(runner.model, cache, backend, planner, *sizes, pool=graphs.pool)

    def _num_blocks(self, model: nn.Module) -> int:
        """Blocks of the cache, the padding block included. Raises ValueError when not even one request fits."""
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
        require(
            count >= one_request,
            f"the KV cache has room for {max(0, count - 1) * cache.block_size} tokens, but one request may have "
            f"max_model_len={self.max_model_len}{spent}: {how}",
        )
        return count

    def _share_out(self, model: nn.Module) -> Share:
        """How the GPU's memory is shared out, from what the engine is measured to need beside the KV cache."""
        blend = self.config.blend
        activations, graphs = self._measure(model)
        now = Usage.settled(self.device)
        chunks_here = blend.enable_blending and blend.resolve_chunk_device(self.device) == self.device
        return Share(
            total=now.total,
            utilization=self.config.cache.gpu_memory_utilization,
            other=now.other,
            weights=now.reserved,
            activations=max(activations, self._eviction_bytes) + self._head_table_bytes,
            graphs=graphs,
            chunk_store=int(blend.chunk_cache_gib * GIB) if chunks_here else 0,
        )

    def _measure(self, model: nn.Module) -> tuple[int, int]:
        """Bytes of the largest steps and of the graphs: both are run, on a cache of a few pages and with backends of
        their own."""
        config, device = self.config, self.device
        rows = config.scheduler.max_num_seqs
        if config.speculative is not None:
            rows = config.speculative.most_rows(rows)
        limits = StepLimits(config.scheduler.step_tokens(device), rows, self.max_model_len, config.blend)
        pages = self._allocate(NUM_BLOCKS)
        remedy = "lower max_num_batched_tokens or max_num_seqs"
        remedy += " or max_model_len" if config.blend.enable_blending else ""
        with must_fit("the activations of the largest step", remedy, device):
            activations = measure_activations(model, pages, self._make_backend(), limits)
        with must_fit("the CUDA graphs", "lower max_num_seqs, or give enforce_eager=True", device):
            graphs = measure_tensors(lambda: self._capture(model, pages, self._make_backend()), device)
        return activations, graphs


def _warn_of_others(start: Usage, utilization: float) -> None:
    if start.used > MUCH:
        logger.warning(
            "before anything is loaded, %.2f of the GPU's %.2f GiB are in use: %.2f GiB by other tensors of this "
            "process, %.2f GiB by other processes and CUDA itself; gpu_memory_utilization=%g counts them in",
            *(number / GIB for number in (start.used, start.total, start.reserved, start.other)),
            utilization,
        )
