"""The flat arguments that users give, and the configuration they make."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import PretrainedConfig

from vllm_blend.checks import check_field_types
from vllm_blend.config import (
    BlendConfig,
    CacheConfig,
    ChunkDevice,
    ChunkFormat,
    ChunkStoreConfig,
    EngineConfig,
    LoadFormat,
    ModelConfig,
    OffloadConfig,
    OffloadMode,
    SchedulerConfig,
    SchedulingPolicy,
)
from vllm_blend.engine.cli_args import add_flags, given
from vllm_blend.engine.unsupported_args import UNSUPPORTED_ENGINE_ARGS
from vllm_blend.kv_compress.config import Aggregation, AllocationChoice, CompressionSettings, KVCompressConfig
from vllm_blend.spec_decode.config import SpeculativeConfig
from vllm_blend.unsupported import accept_defaults

_HELP = {
    "model": "model directory or Hugging Face id",
    "tokenizer": "tokenizer directory or id, where it is not the model's",
    "max_logprobs": "the most log-probabilities per token that a request may ask for; -1 for no limit",
    "skip_tokenizer_init": "load no tokenizer: prompts are token ids, and outputs have no text",
    "dtype": "auto, float32, bfloat16 or float16",
    "device": "auto, cpu or cuda",
    "generation_config": "default sampling settings: auto (the model's generation_config.json), vllm, or a folder",
    "override_generation_config": 'some of these settings, as JSON: {"temperature": 0.6}',
    "hf_overrides": "what to change in the model's config.json, as JSON",
    "gpu_memory_utilization": "share of the GPU's memory that the engine may use",
    "max_model_len": "tokens of the longest request",
    "max_num_seqs": "requests in a step",
    "max_num_batched_tokens": "tokens in a step",
    "scheduling_policy": "fcfs (first come, first served) or priority (requests of a lower number first)",
    "block_size": "tokens in a page of the KV cache",
    "num_gpu_blocks_override": "pages of the KV cache, instead of measuring the memory",
    "enforce_eager": "decode without CUDA graphs",
    "enable_prefix_caching": "reuse the KV of equal prefixes",
    "attention_backend": "auto (the fastest for each job, measured at start-up), cpu, cuda, flashinfer, xformers or "
    "torch_native",
    "cascade_attention": "attend pages that several requests of a step share once for all of them",
    "enable_blending": "reuse the KV of chunks at any position",
    "blend_selector": "rule that chooses the tokens to recompute, or auto, see docs/selection.md",
    "blend_recompute_ratio": "share of the reused tokens that is recomputed",
    "blend_check_layers": "layers at which deviation rules look",
    "blend_recompute_ratios": "share kept after each check layer",
    "blend_min_tokens": "contexts shorter than this are prefilled in full",
    "blend_chunk_cache_gib": "memory for stored chunk KV",
    "blend_chunk_device": "where stored chunk KV lives",
    "blend_encoding_context": "what stands before a chunk when its KV is computed: page, prefix, bos, ordinal, ...",
    "blend_ordinals": "numbers of filler passages before a chunk that variants of it are stored with",
    "blend_chunk_kept_share": "share of a chunk's KVs that is stored, in (0, 1]; needs --enable-kvc",
    "blend_chunk_metric": "which of them: keydiff, knorm, streaming_llm or random",
    "speculative_config": 'speculative decoding, as JSON: {"method": "ngram", "num_speculative_tokens": 8}',
    "blend_controller": "recompute more where that hides behind loading, and compute what would load slower",
    "chunk_store_path": "folder in which chunk KV outlives the process",
    "chunk_store_gib": "disk space for chunk KV",
    "chunk_store_format": "auto (the model's dtype, bit for bit), fp8 or int8",
    "chunk_store_url": "server that keeps chunk KV: redis://, s3://, ...",
    "chunk_store_admit_on_second_use": "store a chunk on the disk when it is computed for the second time",
    "offload_mode": "resident or exact: chunks leave the device while decoding; unseen there, or attended on the host",
    "offload_resident_chunks": "chunks of a request that stay on the device",
    "offload_device_fraction": "the same as a share of its chunks",
    "offload_predictor": "rule that chooses the chunks to bring back",
    "offload_bytes_per_step": "the most that a step may copy to and from the device",
    "offload_host_gib": "host memory for chunks off the device",
    "enable_kvc": "evict KV by head (KV-Compress) and free its pages",
    "target_compression_rate": "share of a request's KVs that is kept, in (0, 1]",
    "max_cache_tokens": "the same as a number of tokens",
    "protected_window_size": "tokens at the end of a request that are never evicted",
    "num_sinks": "tokens at its beginning that are never evicted",
    "compress_once": "compress a request once, and not again as it grows",
    "kvc_interval": "tokens of a request between two compressions",
    "new_token_limit": "compress earlier when this many tokens have been appended to all requests",
    "max_kv_per_compression": "KVs that are sorted at a time",
    "metric_collection_buffer_size": "a query does not count for this many keys before it",
    "prefill_metric_collection_window_size": "queries at the end of a prompt that are looked at",
    "kvc_metric": "worth of a KV: kv_compress, snapkv, expected_attention, keydiff, knorm, streaming_llm or random",
    "metric_aggregation": "how kv_compress sums up attention: L1-sum, L1-avg, L2-sum or L2-avg",
    "kvc_allocation": "who competes for pages: global (all heads), layer (Ada-KV), head (all keep as many) or auto",
}


# Arguments whose default is None in vLLM, and a value here.
_NONE_IN_VLLM = ("max_num_seqs", "block_size", "enable_prefix_caching", "seed", "attention_backend")


@accept_defaults(UNSUPPORTED_ENGINE_ARGS, "engine argument")
@dataclass
class EngineArgs:
    """vLLM's engine arguments, and the `blend_*`, `chunk_store_*` and KV-Compress ones (see `BlendConfig`,
    `ChunkStoreConfig`, `KVCompressConfig`).

    vLLM's arguments that do not exist here may be None or have vLLM's default; other values are a ValueError with the
    reason (see `UNSUPPORTED_ENGINE_ARGS`). Unknown names are a TypeError, values of another type than the declared one
    a ValueError.
    """

    model: str
    tokenizer: str | None = None
    max_logprobs: int = -1
    skip_tokenizer_init: bool = False
    dtype: str | torch.dtype = "auto"
    device: str | torch.device = "auto"
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    async_scheduling: bool | None = None
    scheduling_policy: SchedulingPolicy = "fcfs"
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    enforce_eager: bool = False
    quantization: str | None = None
    enable_prefix_caching: bool = True
    tensor_parallel_size: int = 1
    seed: int = 0
    load_format: LoadFormat = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None
    hf_overrides: dict[str, Any] | Callable[[PretrainedConfig], PretrainedConfig] | None = None
    disable_log_stats: bool = True
    attention_backend: str = "auto"
    cascade_attention: bool = False
    enable_blending: bool = False
    blend_selector: str = "question_attention"
    blend_recompute_ratio: float | None = None
    blend_check_layers: list[int] | None = None
    blend_recompute_ratios: list[float] | None = None
    blend_min_tokens: int = 0
    blend_chunk_cache_gib: float = 4.0
    blend_chunk_device: ChunkDevice = "auto"
    blend_encoding_context: str = "page"
    blend_ordinals: list[int] | None = None
    blend_chunk_kept_share: float | None = None
    blend_chunk_metric: str = "keydiff"
    speculative_config: dict[str, Any] | None = None
    blend_controller: bool = False
    chunk_store_path: str | None = None
    chunk_store_gib: float = 32.0
    chunk_store_format: ChunkFormat = "auto"
    chunk_store_url: str | None = field(default=None, repr=False)  # it may hold a password
    chunk_store_admit_on_second_use: bool = False
    offload_mode: OffloadMode | None = None
    offload_resident_chunks: int | None = None
    offload_device_fraction: float = 0.2
    offload_predictor: str = "query_digest"
    offload_bytes_per_step: int = 64 << 20
    offload_host_gib: float = 4.0
    enable_kvc: bool = False
    target_compression_rate: float | None = None
    max_cache_tokens: int | None = None
    protected_window_size: int = 32
    num_sinks: int = 4
    compress_once: bool = False
    kvc_interval: int = 128
    new_token_limit: int | None = None
    max_kv_per_compression: int = 1 << 24
    metric_collection_buffer_size: int = 0
    prefill_metric_collection_window_size: int = 32
    kvc_metric: str = "kv_compress"
    metric_aggregation: Aggregation = "L2-sum"
    kvc_allocation: AllocationChoice = "auto"

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if value is None and option.name in _NONE_IN_VLLM:
                setattr(self, option.name, option.default)
            elif isinstance(value, os.PathLike):
                setattr(self, option.name, os.fspath(value))
        check_field_types(self)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for every argument, named as in vLLM: `--attention-backend`, `--no-enable-prefix-caching`."""
        add_flags(parser, cls, _HELP)
        return parser

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> EngineArgs:
        """The arguments of a parsed command line; flags that are not the engine's are ignored."""
        return cls(**given(namespace, cls))

    def create_engine_config(self) -> EngineConfig:
        """Raises ValueError naming the argument and the fix."""
        return EngineConfig(
            model=ModelConfig(
                model=self.model,
                tokenizer=self.tokenizer,
                max_logprobs=self.max_logprobs,
                skip_tokenizer_init=self.skip_tokenizer_init,
                dtype=self.dtype,
                device=self.device,
                max_model_len=self.max_model_len,
                load_format=self.load_format,
                revision=self.revision,
                trust_remote_code=self.trust_remote_code,
                seed=self.seed,
                enforce_eager=self.enforce_eager,
                quantization=self.quantization,
                generation_config=self.generation_config,
                override_generation_config=self.override_generation_config,
                hf_overrides=self.hf_overrides,
            ),
            cache=CacheConfig(
                block_size=self.block_size,
                gpu_memory_utilization=self.gpu_memory_utilization,
                enable_prefix_caching=self.enable_prefix_caching,
                num_gpu_blocks_override=self.num_gpu_blocks_override,
            ),
            scheduler=SchedulerConfig(
                self.max_num_seqs, self.max_num_batched_tokens, self.async_scheduling, self.scheduling_policy
            ),
            blend=BlendConfig(
                enable_blending=self.enable_blending,
                selector=self.blend_selector,
                recompute_ratio=self.blend_recompute_ratio,
                check_layers=[1] if self.blend_check_layers is None else self.blend_check_layers,
                recompute_ratios=self.blend_recompute_ratios,
                min_tokens=self.blend_min_tokens,
                chunk_cache_gib=self.blend_chunk_cache_gib,
                chunk_device=self.blend_chunk_device,
                encoding_context=self.blend_encoding_context,
                ordinals=self.blend_ordinals,
                controller=self.blend_controller,
                chunk_kept_share=self.blend_chunk_kept_share,
                chunk_metric=self.blend_chunk_metric,
            ),
            chunk_store=ChunkStoreConfig(
                path=self.chunk_store_path,
                gib=self.chunk_store_gib,
                format=self.chunk_store_format,
                url=self.chunk_store_url,
                admit_on_second_use=self.chunk_store_admit_on_second_use,
            ),
            speculative=(
                None if self.speculative_config is None else SpeculativeConfig.from_dict(self.speculative_config)
            ),
            offload=OffloadConfig(
                mode=self.offload_mode,
                resident_chunks=self.offload_resident_chunks,
                device_fraction=self.offload_device_fraction,
                predictor=self.offload_predictor,
                bytes_per_step=self.offload_bytes_per_step,
                host_gib=self.offload_host_gib,
            ),
            kv_compress=KVCompressConfig(
                enable_kvc=self.enable_kvc,
                settings=CompressionSettings(
                    target_compression_rate=self.target_compression_rate,
                    max_cache_tokens=self.max_cache_tokens,
                    protected_window_size=self.protected_window_size,
                    num_sinks=self.num_sinks,
                    compress_once=self.compress_once,
                ),
                kvc_interval=self.kvc_interval,
                new_token_limit=self.new_token_limit,
                max_kv_per_compression=self.max_kv_per_compression,
                metric_collection_buffer_size=self.metric_collection_buffer_size,
                prefill_metric_collection_window_size=self.prefill_metric_collection_window_size,
                kvc_metric=self.kvc_metric,
                metric_aggregation=self.metric_aggregation,
                kvc_allocation=self.kvc_allocation,
            ),
            attention_backend=self.attention_backend,
            cascade_attention=self.cascade_attention,
            tensor_parallel_size=self.tensor_parallel_size,
            disable_log_stats=self.disable_log_stats,
        )
