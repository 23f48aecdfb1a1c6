"""Configuration: one dataclass per concern, each checked once, in `__post_init__`, with errors that say the fix."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from vllm_blend.checks import check_field_types, is_number, require
from vllm_blend.kv_compress.chunks import ChunkCompression
from vllm_blend.kv_compress.config import KVCompressConfig
from vllm_blend.kv_compress.metrics import METRICS, make_metric
from vllm_blend.spec_decode.config import SpeculativeConfig
from vllm_blend.urls import redact_repr

logger = logging.getLogger(__name__)

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")  # there while the kernel's part of the driver is loaded
LoadFormat = Literal["auto", "dummy"]
ChunkDevice = Literal["auto", "cpu", "cuda"]
ChunkFormat = Literal["auto", "fp8", "int8"]
OffloadMode = Literal["resident", "exact"]
SchedulingPolicy = Literal["fcfs", "priority"]
QUANTIZATIONS = ("fp8",)
# Settings of a generation config that are sampling settings, and their names in SamplingParams.
GENERATION_SETTINGS = {name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")} | {
    "max_new_tokens": "max_tokens"
}

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


def resolve_device(device: str | torch.device) -> torch.device:
    """'auto' is the first CUDA device where there is one, the CPU otherwise."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu" and NVIDIA_DRIVER.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
            _warn_of_unusable_gpu()
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:  # a name that torch does not know, or no name
        raise ValueError(f"device={device!r} is unknown: use 'auto', 'cpu' or 'cuda'") from error
    require(resolved.type in ("cpu", "cuda"), f"device={device!r} is not supported: use 'auto', 'cpu' or 'cuda'")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={device!r} was asked for, but torch sees no CUDA device ({_why_no_cuda()}): use device='cpu', or "
            "install CUDA"
        )
    if resolved.type == "cuda" and resolved.index is not None:
        count = torch.cuda.device_count()
        require(resolved.index < count, f"device={device!r}: torch sees {count} CUDA devices, counted from 0")
    return resolved


@cache
def _warn_of_unusable_gpu() -> None:
    """Once: this machine has a driver, so its user may expect the GPU to be used."""
    logger.warning("the engine runs on the CPU, as torch cannot use a GPU here: %s", _why_no_cuda())


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    try:
        torch.cuda.init()
    except RuntimeError as error:  # the driver is missing, broken, or too old for this torch
        return str(error).strip()
    return "there is none"


def resolve_dtype(dtype: str | torch.dtype, checkpoint_dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype of weights and KV cache.

    'auto' is the checkpoint's dtype on a GPU (bfloat16 for float32 checkpoints: half the memory serves as well) and
    float32 on a CPU, where half precision is fast on few machines and emulated on the others.
    """
    if isinstance(dtype, torch.dtype):
        require(dtype in _DTYPES.values(), f"dtype={dtype} is not supported: use one of {sorted(_DTYPES)}")
        return dtype
    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if checkpoint_dtype in (None, torch.float32) else checkpoint_dtype
    require(dtype in _DTYPES, f"dtype={dtype!r} is unknown: use 'auto' or one of {sorted(_DTYPES)}")
    return _DTYPES[dtype]


@dataclass
class ModelConfig:
    """Which model, in which precision, on which device.

    `generation_config` says where the sampling settings of requests without `sampling_params` come from: "auto" is the
    model's generation_config.json, "vllm" leaves its sampling settings out, anything else is a folder or a Hugging Face
    id that has such a file. `override_generation_config` replaces some of them.

    `hf_overrides` change the model's config: a dict is merged into it, dict by dict, a function is given it and returns
    what holds.
    """

    model: str
    tokenizer: str | None = None
    max_logprobs: int = -1  # the most that a request may ask for per token; -1: as many as the vocabulary has
    skip_tokenizer_init: bool = False  # prompts are token ids then, and outputs have no text
    dtype: str | torch.dtype = "auto"
    device: str | torch.device = "auto"
    max_model_len: int | None = None
    load_format: LoadFormat = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    seed: int = 0
    enforce_eager: bool = False
    quantization: str | None = None  # of QUANTIZATIONS; "fp8": e4m3 weights and activations in the linear layers
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None
    hf_overrides: dict[str, Any] | Callable[[PretrainedConfig], PretrainedConfig] | None = None

    def __post_init__(self) -> None:
        check_field_types(self, "ModelConfig.")
        require(self.max_logprobs >= -1, f"max_logprobs={self.max_logprobs} must be at least -1, which is no limit")
        require(bool(self.model), "model is empty: give a model directory or a Hugging Face model id")
        require(
            self.max_model_len is None or self.max_model_len > 0, f"max_model_len={self.max_model_len} must be positive"
        )
        known = ", ".join(repr(name) for name in QUANTIZATIONS)
        require(
            self.quantization in (None, *QUANTIZATIONS),
            f"quantization={self.quantization!r} is unknown: use {known}, or None for the weights as they are",
        )
        require(
            self.generation_config != "",
            "generation_config is empty: use 'auto', 'vllm', or a folder that has such a file",
        )
        override = self.override_generation_config
        require(
            override is None or override.keys() <= GENERATION_SETTINGS.keys(),
            f"override_generation_config={override!r}: give a dict of {', '.join(GENERATION_SETTINGS)}",
        )


@dataclass
class CacheConfig:
    """The paged KV cache."""

    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    num_gpu_blocks_override: int | None = None  # number of blocks to allocate, instead of measuring the memory

    def __post_init__(self) -> None:
        check_field_types(self, "CacheConfig.")
        require(
            self.block_size in (8, 16, 32, 64, 128),
            f"block_size={self.block_size}: use one of 8, 16, 32, 64, 128 tokens",
        )
        share = self.gpu_memory_utilization
        require(
            0 < share <= 1,
            f"gpu_memory_utilization={share} is a share of the memory: use a number in (0, 1]",
        )
        blocks = self.num_gpu_blocks_override
        require(
            blocks is None or blocks >= 2,
            f"num_gpu_blocks_override={blocks}: use a whole number of at least 2 blocks",
        )


@dataclass
class SchedulerConfig:
    """How much work goes into a step."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None  # default: 2048 on a CPU, 8192 on a GPU
    # queue a step before the last one is read; default: on a GPU, unless the engine speculates
    async_scheduling: bool | None = None
    policy: SchedulingPolicy = "fcfs"  # first come, first served, or by the priority that requests are given

    def __post_init__(self) -> None:
        check_field_types(self, "SchedulerConfig.")
        require(self.max_num_seqs > 0, f"max_num_seqs={self.max_num_seqs} must be positive")
        tokens = self.max_num_batched_tokens
        require(
            tokens is None or tokens >= self.max_num_seqs,
            f"max_num_batched_tokens={tokens} is below max_num_seqs={self.max_num_seqs}: a step could not hold one "
            "token of every running request; raise the first or lower the second",
        )

    def step_tokens(self, device: torch.device) -> int:
        """`max_num_batched_tokens`, or its default for a device."""
        return self.max_num_batched_tokens or max(2048 if device.type == "cpu" else 8192, self.max_num_seqs)

    def runs_ahead(self, device: torch.device) -> bool:
        """`async_scheduling`, or what is best for a device: on a CPU there is nothing to wait for meanwhile."""
        return device.type != "cpu" if self.async_scheduling is None else self.async_scheduling


@dataclass
class BlendConfig:
    """Reuse of chunk KV: which tokens of a reused context are computed again (CacheBlend, Yao et al., EuroSys 2025).

    `recompute_ratio` is the share of the tokens before the suffix that is recomputed, None for the selector's default
    (0.15). `check_layers` are the layers at which deviation selectors look; with several, `recompute_ratios` gives the
    share kept after each (the paper's gradual filtering, section 4.3). Contexts shorter than `min_tokens` are prefilled
    in full.

    `chunk_device` is where stored chunk KV lives. "auto" is the engine's device: what is on the GPU already costs no
    time to bring there. "cpu" leaves the GPU's memory to the KV cache and pins `chunk_cache_gib` of the host's; chunk
    KV then arrives layer by layer while the layers before are computed.

    With `chunk_kept_share` below 1, chunks are stored with that share of their KVs, chosen for each head by
    `chunk_metric`, one of `kv_compress/metrics` that looks at no query.
    """

    enable_blending: bool = False
    selector: str = "question_attention"
    recompute_ratio: float | None = None
    check_layers: list[int] = field(default_factory=lambda: [1])
    recompute_ratios: list[float] | None = None
    min_tokens: int = 0
    chunk_cache_gib: float = 4.0  # memory for stored chunk KV: what is worth least leaves first, see kv_store/worth.py
    chunk_device: ChunkDevice = "auto"
    # what stands before a chunk when it is encoded, of blend/encoding_contexts, and the ordinals of filler there
    encoding_context: str = "page"
    ordinals: list[int] | None = None
    controller: bool = False  # raise the ratio while that hides behind loading, compute what loads slower (section 5.1)
    chunk_kept_share: float | None = None  # None: chunks are stored whole
    chunk_metric: str = "keydiff"

    def __post_init__(self) -> None:
        check_field_types(self, "BlendConfig.")
        check_ratio("blend_recompute_ratio", self.recompute_ratio)
        check_layer_numbers("blend_check_layers", self.check_layers)
        if self.recompute_ratios is not None:
            check_shares("blend_recompute_ratios", self.recompute_ratios, self.check_layers)
            require(
                self.recompute_ratio is None,
                "blend_recompute_ratio and blend_recompute_ratios are both given: keep one of them",
            )
        require(self.min_tokens >= 0, f"blend_min_tokens={self.min_tokens} must not be negative")
        require(self.chunk_cache_gib > 0, f"blend_chunk_cache_gib={self.chunk_cache_gib} must be positive")
        self.chunk_compression()

    def chunk_compression(self) -> ChunkCompression | None:
        """How chunks are compressed before they are stored; None where they are not. Raises ValueError naming the
        setting and the fix."""
        queryless = sorted(name for name, metric in METRICS.items() if not metric.watches)
        require(
            self.chunk_metric in queryless,
            f"blend_chunk_metric={self.chunk_metric!r}: no question is known when a chunk is stored, so use a metric "
            f"that looks at none: {', '.join(queryless)}",
        )
        share = self.chunk_kept_share
        if share is None:
            return None
        require(
            0 < share <= 1,
            f"blend_chunk_kept_share={share!r} is the share of a chunk's KVs that is stored: use a number in (0, 1]",
        )
        return ChunkCompression(make_metric(self.chunk_metric), float(share))

    def resolve_chunk_device(self, device: torch.device) -> torch.device:
        """Where chunk KV of an engine on `device` lives."""
        if self.chunk_device in ("auto", device.type):
            return device
        require(
            device.type == "cuda",
            f"blend_chunk_device={self.chunk_device!r}, but the engine runs on the {device.type}: leave it at 'auto', "
            "or give device='cuda'",
        )
        return torch.device("cpu")


def check_ratio(name: str, value: Any) -> None:
    """A recompute ratio is None or a number in 0..1."""
    if value is None:
        return
    require(is_number(value) and 0.0 <= value <= 1.0, f"{name}={value!r} is a share of tokens: use a number in 0..1")


def check_layer_numbers(name: str, layers: Sequence[int]) -> None:
    """Check layers ascend from 1 on."""
    require(len(layers) > 0, f"{name} is empty: name at least one layer, for example [1]")
    require(
        all(isinstance(i, int) and i >= 1 for i in layers) and list(layers) == sorted(set(layers)),
        f"{name}={list(layers)} must be ascending layer numbers from 1 on (K and V of layer 0 depend on the token "
        "alone, so there is nothing to compare there)",
    )


def check_shares(name: str, shares: Sequence[float], check_layers: Sequence[int]) -> None:
    """The shares of tokens kept after each check layer: one per layer, each in 0..1, none above the one before."""
    for index, share in enumerate(shares):
        require(share is not None, f"{name}[{index}] is None: use a number in 0..1")
        check_ratio(f"{name}[{index}]", share)
    require(
        len(shares) == len(check_layers),
        f"{name} has {len(shares)} entries for {len(check_layers)} check layers: give one ratio per layer",
    )
    require(
        list(shares) == sorted(shares, reverse=True),
        f"{name}={list(shares)} rise: what one check layer drops cannot come back at the next; let them fall",
    )


@dataclass
class ChunkStoreConfig:
    """Where chunk KV goes besides memory: a disk that keeps it for other processes, a server that other machines
    share."""

    path: str | None = None  # a folder of a local file system
    gib: float = 32.0  # of the disk
    format: ChunkFormat = "auto"  # on disk and server; auto: the model's dtype, bit for bit
    url: str | None = field(
        default=None, repr=False
    )  # it may hold a password; redis://, valkey:// or anything that fsspec knows
    admit_on_second_use: bool = False  # the disk stores a chunk when it is computed for the second time

    def __post_init__(self) -> None:
        check_field_types(self, "ChunkStoreConfig.")
        require(self.path != "", "chunk_store_path is empty: name a folder, or leave it out")
        require(self.url != "", "chunk_store_url is empty: give a URL, or leave it out")
        require(self.gib > 0, f"chunk_store_gib={self.gib} must be positive")
        require(
            self.format == "auto" or self.is_used,
            f"chunk_store_format={self.format!r} is that of a disk or a server: give chunk_store_path or "
            "chunk_store_url too",
        )
        require(
            not self.admit_on_second_use or self.path is not None,
            "chunk_store_admit_on_second_use is a rule of the disk: give chunk_store_path too",
        )

    @property
    def is_used(self) -> bool:
        return self.path is not None or self.url is not None


@dataclass
class OffloadConfig:
    """Chunks of running requests on the host while they decode, promoted to the device when they are needed.

    In `mode` "resident" a request attends to what is on the device: promotions change what it sees. In "exact" the rest
    is attended where it is, on the host, so placement never changes an answer beyond rounding; steps in which a chunk
    is missing then run without CUDA graphs. A request keeps `resident_chunks` of its chunks on the device, or by
    default the share `device_fraction` of them. All moves of a step copy at most `bytes_per_step`.
    """

    mode: OffloadMode | None = None
    resident_chunks: int | None = None
    device_fraction: float = 0.2
    predictor: str = "query_digest"
    bytes_per_step: int = 64 << 20
    host_gib: float = 4.0  # host memory for the chunks of running requests

    def __post_init__(self) -> None:
        check_field_types(self, "OffloadConfig.")
        count = self.resident_chunks
        require(count is None or count >= 0, f"offload_resident_chunks={count} must not be negative")
        require(
            0 <= self.device_fraction <= 1,
            f"offload_device_fraction={self.device_fraction} is a share of a request's chunks: use a value in [0, 1]",
        )
        require(self.bytes_per_step > 0, f"offload_bytes_per_step={self.bytes_per_step} must be positive")
        require(self.host_gib > 0, f"offload_host_gib={self.host_gib} must be positive")


@dataclass
class EngineConfig:
    """Everything an engine is built from."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    blend: BlendConfig = field(default_factory=BlendConfig)
    chunk_store: ChunkStoreConfig = field(default_factory=ChunkStoreConfig)
    speculative: SpeculativeConfig | None = None
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    kv_compress: KVCompressConfig = field(default_factory=KVCompressConfig)
    attention_backend: str = "auto"
    cascade_attention: bool = False  # attend pages that several requests of a step share once for all of them
    tensor_parallel_size: int = 1
    disable_log_stats: bool = True

    def __post_init__(self) -> None:
        check_field_types(self, "EngineConfig.")
        require(
            self.tensor_parallel_size == 1,
            f"tensor_parallel_size={self.tensor_parallel_size}: only 1 is supported by the single-process executor",
        )
        require(
            not self.cascade_attention or self.offload.mode is None,
            f"cascade_attention and offload_mode={self.offload.mode!r} exclude each other, as pages that move are no "
            "longer shared: leave one of them out",
        )
        for name, used in (
            ("speculative_config", self.speculative is not None),
            ("offload_mode", self.offload.mode is not None),
            ("cascade_attention", self.cascade_attention),
        ):
            require(
                not (self.kv_compress.enable_kvc and used),
                f"enable_kvc and {name} exclude each other, as pages of single heads can neither be verified against "
                "drafts, nor moved by chunk, nor shared: leave one of them out",
            )
        for name, given in (
            ("blend_chunk_kept_share", self.blend.chunk_kept_share),
            ("chunk_store_path", self.chunk_store.path),
            ("chunk_store_url", self.chunk_store.url),
            ("blend_controller", self.blend.controller or None),
        ):
            require(
                given is None or self.blend.enable_blending,
                f"{name}={redact_repr(given)}, but the engine does not blend: give enable_blending=True too, or leave "
                "it out",
            )

        if self.blend.chunk_kept_share is not None:
            self._check_compressed_chunks()

    def _check_compressed_chunks(self) -> None:
        share = f"blend_chunk_kept_share={self.blend.chunk_kept_share}"
        require(
            self.kv_compress.enable_kvc,
            f"{share}: prompts over such chunks are computed in pages of single heads, so give enable_kvc=True too",
        )
        require(
            not self.blend.controller,
            f"{share} and blend_controller exclude each other, as the controller weighs whole chunks: leave one out",
        )
        self.kv_compress.check_compressed_chunks(self.kv_compress.settings)

    def runs_ahead(self, device: torch.device) -> bool:
        """Whether a step is queued before the last one is read, where nobody drafts."""
        return self.scheduler.runs_ahead(device)
