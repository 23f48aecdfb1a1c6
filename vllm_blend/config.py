"""The configuration of an engine: groups of options, each checked when it is made, with errors that say the fix.

The groups here are those of the core; a feature's is in its folder (`features/*/config.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from transformers import PretrainedConfig

from vllm_blend.checks import (
    at_least,
    check_layer_numbers,
    check_ratio,
    check_shares,
    not_empty,
    not_negative,
    positive,
    require,
    share_of,
)
from vllm_blend.kv_store.options import ChunkStoreConfig
from vllm_blend.options import OptionGroup, option
from vllm_blend.urls import redact_repr

LoadFormat = Literal["auto", "dummy"]
ChunkDevice = Literal["auto", "cpu", "cuda"]
SchedulingPolicy = Literal["fcfs", "priority"]
ExecutorBackend = Literal["uni", "mp", "ray"]
KVCacheDtype = Literal["auto", "fp8", "fp8_e4m3", "bfloat16", "float16", "float32"]
QUANTIZATIONS = ("fp8",)
BLOCK_SIZES = (8, 16, 32, 64, 128)
# Settings of a generation config that are sampling settings, and their names in SamplingParams.
GENERATION_SETTINGS = {name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")} | {
    "max_new_tokens": "max_tokens"
}
Feature = TypeVar("Feature", bound="FeatureConfig")


def _check_quantization(name: str, value: str) -> None:
    known = ", ".join(repr(name) for name in QUANTIZATIONS)
    stored = "config.json says how a checkpoint's weights are stored"
    require(value in QUANTIZATIONS, f"{name}={value!r} is unknown: use {known}, or leave it out; {stored}")


def _check_generation_settings(name: str, value: dict[str, Any]) -> None:
    known = ", ".join(GENERATION_SETTINGS)
    require(value.keys() <= GENERATION_SETTINGS.keys(), f"{name}={value!r}: give a dict of {known}")


def _check_block_size(name: str, value: int) -> None:
    require(value in BLOCK_SIZES, f"{name}={value}: use one of {', '.join(map(str, BLOCK_SIZES))} tokens")


@dataclass(frozen=True)
class ModelConfig(OptionGroup):
    """The model, its precision and its device.

    `generation_config` says where the sampling settings of requests without `sampling_params` come from: "auto" is the
    model's generation_config.json, "vllm" leaves its sampling settings out, anything else is a folder or a Hugging Face
    id that has such a file. `override_generation_config` replaces some of them.

    `hf_overrides` change the model's config: a dict is merged into it, dict by dict; a function is given it and returns
    the config to use.
    """

    title: ClassVar[str] = "Model"

    model: str = option(
        help="model directory, GGUF file, Hugging Face id, or id:Q4_K_M for a GGUF file of a repository",
        check=not_empty("give a model directory or a Hugging Face model id"),
    )
    tokenizer: str | None = option(None, "tokenizer directory, GGUF file or id, if it is not the model's")
    max_logprobs: int = option(
        -1,
        "how many log-probabilities per token a request may ask for at most; -1 for no limit",
        check=at_least(-1),
    )
    trusted_chunks: bool = option(
        False,
        "read control tokens such as <|im_start|> in passages, documents, users' texts and results of tools as what "
        "they are to the model; by default they are text there, so that no document can begin a turn",
    )
    skip_tokenizer_init: bool = option(False, "load no tokenizer: prompts are token ids, and outputs have no text")
    dtype: str | torch.dtype = option("auto", "auto (bf16 or float32 on CPUs: docs/cpu.md), float32, bfloat16, float16")
    device: str | torch.device = option("auto", "auto, cpu or cuda")
    max_model_len: int | None = option(
        None,
        "tokens of the longest request with its answer; by default the context length in the model's config",
        check=positive,
    )
    load_format: LoadFormat = option("auto", "auto, or dummy for random weights")
    revision: str | None = option(None, "branch, tag or commit of a model on the Hugging Face Hub")
    trust_remote_code: bool = option(False, "run the code of the model's repository for its config and tokenizer")
    seed: int = option(0, "seed of requests that bring none", none_means_default=True)
    enforce_eager: bool = option(False, "decode without CUDA graphs")
    quantization: str | None = option(
        None,
        "fp8 computes the linear layers with e4m3 weights and activations; by default the weights stay as they are",
        check=_check_quantization,
    )
    dequantize_weights: bool = option(
        False,
        "dequantize 4-bit checkpoints and GGUF files at load: large batches are faster, at 2 to 4 times the memory",
    )
    generation_config: str = option(
        "auto",
        "default sampling settings: auto (the model's generation_config.json), vllm, or a folder",
        check=not_empty("use 'auto', 'vllm', or a folder that has such a file"),
    )
    override_generation_config: dict[str, Any] | None = option(
        None,
        'default sampling settings that replace those of generation_config, as JSON: {"temperature": 0.6}',
        check=_check_generation_settings,
    )
    hf_overrides: dict[str, Any] | Callable[[PretrainedConfig], PretrainedConfig] | None = option(
        None, "values that replace those of the model's config.json, as JSON"
    )


@dataclass(frozen=True)
class CacheConfig(OptionGroup):
    """The paged KV cache."""

    title: ClassVar[str] = "KV cache"

    block_size: int = option(16, "tokens in a block of the KV cache", check=_check_block_size, none_means_default=True)
    kv_cache_dtype: KVCacheDtype = option(
        "auto",
        "dtype of the KV cache and of chunks: auto (the model's), or fp8 (e4m3); see docs/kv_cache.md",
        none_means_default=True,
    )
    gpu_memory_utilization: float = option(
        0.9, "share of the GPU's memory that the engine may use", check=share_of("the memory")
    )
    enable_prefix_caching: bool = option(
        True, "reuse the KV of the beginning that a prompt shares with an earlier one", none_means_default=True
    )
    num_gpu_blocks_override: int | None = option(
        None, "how many blocks the KV cache has; by default as many as fit into the memory", check=at_least(2)
    )


@dataclass(frozen=True)
class SchedulerConfig(OptionGroup):
    """Limits on the work of a step, and the order in which requests get it."""

    title: ClassVar[str] = "Scheduling"

    max_num_seqs: int = option(
        256, "how many requests may run at the same time", check=positive, none_means_default=True
    )
    max_num_batched_tokens: int | None = option(
        None,
        "how many tokens a step may compute; by default 2048 on a CPU and 8192 on a GPU. With fewer, running requests "
        "get their tokens more often while long prompts and blends are computed",
    )
    async_scheduling: bool | None = option(
        None,
        "launch a step before the tokens of the last one have been read; by default on a GPU, except while "
        "speculative decoding drafts tokens",
    )
    max_cudagraph_capture_size: int | None = option(
        None,
        "replay steps with prompts or blends of up to this many tokens as CUDA graphs; by default up to 384 on one "
        "GPU, and none with several. With 0, only decode steps are replayed",
        check=at_least(0),
    )
    policy: SchedulingPolicy = option(
        "fcfs",
        "fcfs (first come, first served) or priority (requests with a lower number come first)",
        name="scheduling_policy",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        tokens = self.max_num_batched_tokens
        require(
            tokens is None or tokens >= self.max_num_seqs,
            f"max_num_batched_tokens={tokens} is below max_num_seqs={self.max_num_seqs}: a step could not hold one "
            "token of every running request; raise the first or lower the second",
        )

    def step_tokens(self, device: torch.device) -> int:
        """Return `max_num_batched_tokens`, or its default for a device."""
        return self.max_num_batched_tokens or max(2048 if device.type == "cpu" else 8192, self.max_num_seqs)

    def runs_ahead(self, device: torch.device) -> bool:
        """Return `async_scheduling`, or its default for a device: on a CPU there is nothing to wait for meanwhile."""
        return device.type != "cpu" if self.async_scheduling is None else self.async_scheduling


@dataclass(frozen=True)
class BlendConfig(OptionGroup):
    """Reuse of chunk KV: which tokens of a reused context are computed again (CacheBlend, Yao et al., EuroSys 2025).

    `recompute_ratio` is the share of the tokens before the suffix that is recomputed, None for the selector's default
    (0.15). `check_layers` are the layers at which deviation selectors look; with several, `recompute_ratios` gives the
    share kept after each (the paper's gradual filtering, section 4.3). Contexts shorter than `min_tokens` are prefilled
    in full.

    `chunk_device` is where stored chunk KV lives. "auto" is the engine's device: what is on the GPU already costs no
    time to bring there. "cpu" leaves the GPU's memory to the KV cache and pins `chunk_cache_gib` of the host's; chunk
    KV then arrives layer by layer while the layers before are computed. When the memory is full, the chunks that are
    worth least leave first (`kv_store/memory.py`).
    """

    title: ClassVar[str] = "Blending"
    prefix: ClassVar[str] = "blend_"

    enable_blending: bool = option(False, "reuse the KV of chunks at any position", name="enable_blending")
    selector: str = option(
        "question_attention", "rule that chooses the tokens to recompute; docs/selection.md compares them"
    )
    recompute_ratio: float | None = option(
        None,
        "share of the tokens before the question that is recomputed; by default 0.15",
        check=check_ratio,
    )
    check_layers: list[int] = option(
        [1],
        "layers at which the rules that compare KV, such as value_deviation, choose tokens",
        check=check_layer_numbers,
        none_means_default=True,
    )
    recompute_ratios: list[float] | None = option(
        None, "share of the tokens that is recomputed after each of the check layers, instead of one share for all"
    )
    min_tokens: int = option(0, "contexts shorter than this are prefilled in full", check=not_negative)
    chunk_cache_gib: float = option(4.0, "memory for stored chunk KV, in GiB", check=positive)
    chunk_device: ChunkDevice = option("auto", "where stored chunk KV is kept; auto is the engine's device")
    encoding_context: str | None = option(
        None,
        "what a chunk is encoded after: filler, page, prefix, bos or given; docs/chunks.md explains them. By default "
        "filler, or page in an engine without a tokenizer",
    )
    controller: bool = option(
        False,
        "recompute as much as costs no time while chunks are loading, and compute chunks that would take longer to "
        "load (CacheBlend, section 5.1)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recompute_ratios is not None:
            check_shares("blend_recompute_ratios", self.recompute_ratios, self.check_layers)
            require(
                self.recompute_ratio is None,
                "blend_recompute_ratio and blend_recompute_ratios are both given: keep one of them",
            )

    def resolve_chunk_device(self, device: torch.device) -> torch.device:
        """Return where an engine on `device` keeps chunk KV."""
        if self.chunk_device in ("auto", device.type):
            return device
        require(
            device.type == "cuda",
            f"blend_chunk_device={self.chunk_device!r}, but the engine runs on the {device.type}: leave it at 'auto', "
            "or give device='cuda'",
        )
        return torch.device("cpu")


@dataclass(frozen=True)
class FeatureConfig(OptionGroup):
    """Base of a feature's options: a dataclass in the feature's folder, which `features/__init__.py` lists.

    Made without arguments, it is off. It names what makes the feature's parts, as "module:function", which
    `engine/extension.py` and `worker/passes.py` call: settings import no code that runs.
    """

    name: ClassVar[str]  # what errors call the feature: the option that turns it on
    extension: ClassVar[str | None] = None  # of (these settings, EngineParts) -> Extension
    worker_extension: ClassVar[str | None] = None  # of (these settings, WorkerSpec) -> WorkerExtension, if it is on
    divides_blends: ClassVar[bool] = True  # whether it works with blends that several steps share
    works_across_ranks: ClassVar[bool] = False  # whether it works with tensor_parallel_size > 1

    @property
    def is_on(self) -> bool:
        raise NotImplementedError


@dataclass(frozen=True)
class EngineConfig(OptionGroup):
    """Everything that an engine is built from."""

    title: ClassVar[str] = "Engine"

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    blend: BlendConfig = BlendConfig()
    chunk_store: ChunkStoreConfig = field(default_factory=ChunkStoreConfig)
    features: tuple[FeatureConfig, ...] = ()  # a feature that is left out is off
    attention_backend: str = option(
        "auto",
        "auto (the first that works: ours, FlashInfer, plain torch), cpu, cuda, flashinfer, xformers or torch_native",
        none_means_default=True,
    )
    tensor_parallel_size: int = option(
        1, "how many ranks share the model; each is a process, and on GPUs has a device of its own", check=at_least(1)
    )
    disable_custom_all_reduce: bool = option(
        False,
        "leave all sums over ranks to NCCL; otherwise a kernel of ours adds up small tensors where the GPUs reach one "
        "another's memory",
    )
    distributed_executor_backend: ExecutorBackend | None = option(
        None,
        "what starts the processes of several ranks: mp on this machine (the default), ray on the nodes of a Ray "
        "cluster; uni is one process",
    )
    ray_placement_timeout: float = option(
        60.0, "seconds that a Ray cluster has to find the resources of the ranks", check=positive
    )
    disable_log_stats: bool = option(True, "log no throughput and cache statistics while the engine runs")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, given in (
            ("chunk_store_path", self.chunk_store.path),
            ("chunk_store_url", self.chunk_store.url),
            ("blend_controller", self.blend.controller or None),
        ):
            require(
                given is None or self.blend.enable_blending,
                f"{name}={redact_repr(given)}, but the engine does not blend: give enable_blending=True too, or leave "
                "it out",
            )

        rows = self.scheduler.max_cudagraph_capture_size
        require(
            not rows or not self.model.enforce_eager,
            f"max_cudagraph_capture_size={rows}, but enforce_eager=True runs without CUDA graphs: leave one out",
        )

    def feature(self, kind: type[Feature]) -> Feature:
        """Return the options of a feature: those given, or its defaults, with which it is off."""
        return next((config for config in self.features if isinstance(config, kind)), kind())


class EngineConfigSource(Protocol):
    """Anything that makes an engine's config. `EngineArgs` does; it imports the features, as the engine must not."""

    def create_engine_config(self) -> EngineConfig: ...
