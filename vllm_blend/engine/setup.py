"""Reads what an engine needs from a model directory before it loads weights: lengths, token ids, tokenizer, identity.
Makes `llm_engine.model_config`, too, which tells callers of vLLM about the model."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from vllm_blend.checks import require
from vllm_blend.config import EngineConfig, ModelConfig
from vllm_blend.devices import resolve_dtype
from vllm_blend.distributed.ranks import ONE_RANK
from vllm_blend.executor.backends import choose_backend
from vllm_blend.executor.base import Executor
from vllm_blend.executor.multiproc import MultiProcExecutor
from vllm_blend.executor.uniproc import UniProcExecutor
from vllm_blend.executor.worker_process import WorkerSettings
from vllm_blend.kv_store.keys import ModelFingerprint, weights_digest
from vllm_blend.layers.linear import Linear
from vllm_blend.layers.rope_frequencies import context_lengths
from vllm_blend.models.causal_lm import attention_layers
from vllm_blend.models.gguf.header import parts_of
from vllm_blend.models.gguf.names import gguf_path
from vllm_blend.models.gguf.tokenizer import load_gguf_tokenizer
from vllm_blend.models.loader import load_hf_config
from vllm_blend.models.sharing import check_ranks_fit
from vllm_blend.worker.worker import Worker

logger = logging.getLogger(__name__)
# Fields of a model's config that its KV does not depend on, or that its fingerprint has already.
_NOT_IN_KV = {"max_position_embeddings", "rope_parameters", "dtype", "bos_token_id", "eos_token_id", "pad_token_id"}


@dataclass(frozen=True, kw_only=True)
class LoadedModelConfig(ModelConfig):
    """The model of an engine under the names of vLLM's `ModelConfig`, with every default resolved."""

    hf_config: Any  # a PretrainedConfig, or what hf_overrides made of it

    @property
    def hf_text_config(self) -> PretrainedConfig:
        """Return the part of the Hugging Face config that describes the text model."""
        text_config: PretrainedConfig = self.hf_config.get_text_config()
        return text_config

    def get_vocab_size(self) -> int:
        return int(self.hf_text_config.vocab_size)


def checkpoint_dtype(hf_config: PretrainedConfig) -> torch.dtype | None:
    """Return the dtype that config.json names, None if it names none."""
    named = getattr(hf_config, "dtype", None)  # transformers 4 reads "torch_dtype" into the same attribute
    return named if isinstance(named, torch.dtype) else None


def resolve_model_dtype(config: ModelConfig, hf_config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of the weights, and say so if "auto" changes that of a float16 checkpoint. A GGUF file's
    quantized matrices have none."""
    stored = checkpoint_dtype(hf_config)
    dtype = resolve_dtype(config.dtype, stored, device)
    if config.dtype == "auto" and stored == torch.float16 != dtype and gguf_path(config.model, config.revision) is None:
        logger.warning(
            "%s is a float16 checkpoint and runs in %s on this CPU, which computes slowly in float16; dtype='float16' "
            "keeps its numbers%s",
            config.model,
            str(dtype).removeprefix("torch."),
            ", and so does dtype='float32', in twice the memory" if dtype == torch.bfloat16 else "",
        )
    return dtype


def resolve_max_model_len(config: ModelConfig, hf_config: PretrainedConfig) -> int:
    """Return the longest request, prompt and output: as asked for, or what `context_lengths` has as the default."""
    known = context_lengths(hf_config)
    if known is None:
        require(
            config.max_model_len is not None,
            "the model's config has no max_position_embeddings: give max_model_len",
        )
        assert config.max_model_len is not None
        return config.max_model_len
    default, longest = known
    if config.max_model_len is None:
        return default
    require(
        config.max_model_len <= longest,
        f"max_model_len={config.max_model_len} is above the {longest} positions that the model's config supports "
        "(max_position_embeddings, and RoPE scaling if there is any): lower it, or extend the context in hf_overrides, "
        'for example by {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, '
        f'"original_max_position_embeddings": {hf_config.max_position_embeddings}}}}}',
    )
    return config.max_model_len


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer named in the config, or the model's own, or None if the config asks for none. It may be that
    in a GGUF file.

    Raises ValueError saying where it was looked for, or what is wrong with the file.
    """
    if config.skip_tokenizer_init:
        return None
    name = config.tokenizer or config.model
    gguf = gguf_path(name, config.revision)
    if gguf is not None:
        return load_gguf_tokenizer(gguf)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code, revision=config.revision)
    except Exception as error:  # transformers raises many types here, from OSError to KeyError
        raise ValueError(f"no tokenizer could be loaded from {name!r}: {error}") from error


def make_executor(config: EngineConfig, settings: WorkerSettings) -> Executor:
    """Return what runs the model: a worker here, and in further processes if `tensor_parallel_size` asks for them.

    Raises the errors of `Worker` and of `choose_backend`, and ValueError if the model's sizes do not fit the number of
    ranks, or if there are too few GPUs.
    """
    size, device, backend = config.tensor_parallel_size, settings.device, choose_backend(config)
    if backend == "uni":
        return UniProcExecutor(settings.build(ONE_RANK))
    check_ranks_fit(settings.hf_config, size)
    require(
        device.type != "cuda" or config.blend.resolve_chunk_device(device) == device,
        f"blend_chunk_device={config.blend.chunk_device!r} needs tensor_parallel_size=1, but it is {size}: leave "
        "one of the two out",
    )
    if backend == "ray":
        from vllm_blend.executor.ray import RayExecutor  # Ray may not be installed

        return RayExecutor(settings, size)
    if device.type == "cuda":
        here = torch.cuda.device_count() - (device.index or 0)
        require(
            here >= size,
            f"tensor_parallel_size={size} needs as many GPUs, but torch sees {here} from {device} on: lower it, or "
            "give distributed_executor_backend='ray' for those of other machines",
        )
    return MultiProcExecutor(settings, size)


def fingerprint(config: ModelConfig, worker: Worker, tokenizer: PreTrainedTokenizerBase | None) -> ModelFingerprint:
    """Return what chunk KV of this engine depends on."""
    local = gguf_path(config.model, config.revision) or Path(config.model)
    if config.load_format == "dummy":
        weights = f"dummy-{worker.num_layers}x{worker.shape.kv_heads}x{worker.shape.head_dim}"
    else:
        weights = weights_digest(*parts_of(local)) if local.exists() else f"{config.model}@{config.revision or 'main'}"
    if config.quantization is not None:
        weights += f"/{config.quantization}"
    modules = worker.model_runner.model.get_submodule("").modules()
    kept = [module.int4 for module in modules if isinstance(module, Linear) and module.int4 is not None]
    weights += "".join(f"/{rounding}" for rounding in sorted({matrix.rounding for matrix in kept}) if rounding)
    # Chunks of one scale must never meet pages of another. With several ranks these are the scales of rank 0 alone,
    # which is enough: their chunks end with the engine, as `check_ranks` refuses stores that would outlive it.
    if worker.shape.dtype != worker.dtype:
        weights += f"/{str(worker.dtype).removeprefix('torch.')}, scales {_scales_digest(worker)}"
    if worker.num_ranks > 1:  # its KV has this rank's heads only
        weights += f"/rank {worker.rank} of {worker.num_ranks}"
    if config.hf_overrides:
        weights += _describe_overrides(config, worker.hf_config)
    model = worker.model_runner.model
    ropes = list(dict.fromkeys(attention.rotary.fingerprint() for attention in attention_layers(model)))
    scales = dict.fromkeys(getattr(layer.self_attn, "query_scale", None) for layer in model.model.layers)
    ropes += [str(scale) for scale in scales if scale is not None]  # it is one of rope_parameters, and shapes later KV
    return ModelFingerprint(
        # A local directory or file is known by its content: moving it changes nothing.
        model="" if local.exists() else config.model,
        revision=config.revision or "",
        weights=weights,
        dtype=str(worker.shape.dtype).removeprefix("torch."),
        rope=" ".join(ropes),
        tokenizer=_tokenizer_digest(tokenizer),
        num_layers=worker.num_layers,
        num_kv_heads=worker.shape.kv_heads,
        head_dim=worker.shape.head_dim,
    )


def _scales_digest(worker: Worker) -> str:
    scales = [attention.kv_scales for attention in attention_layers(worker.model_runner.model)]
    listed = [None if each is None else (each.k.tolist(), each.v.tolist()) for each in scales]
    return hashlib.sha256(repr(listed).encode()).hexdigest()[:32]


def _describe_overrides(config: ModelConfig, hf_config: PretrainedConfig) -> str:
    """Return a text for what hf_overrides change in the KV, empty for nothing; RoPE is told apart elsewhere."""
    plain = load_hf_config(config.model, config.revision, config.trust_remote_code).to_dict()
    fields = hf_config.to_dict()
    changed = {name: fields[name] for name in sorted(fields.keys() - _NOT_IN_KV) if fields[name] != plain.get(name)}
    return f"/{hashlib.sha256(repr(changed).encode()).hexdigest()[:32]}" if changed else ""


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase | None) -> str:
    if tokenizer is None:
        return "none"
    if tokenizer.is_fast:
        return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:32]
    return hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:32]
