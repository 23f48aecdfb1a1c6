"""What an engine learns from a model directory before it loads weights: lengths, token ids, tokenizer, identity."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from vllm_blend.checks import require
from vllm_blend.config import ModelConfig
from vllm_blend.kv_store.keys import ModelFingerprint, weights_digest
from vllm_blend.worker.worker import Worker

logger = logging.getLogger(__name__)


def checkpoint_dtype(hf_config: PretrainedConfig) -> torch.dtype | None:
    """The dtype that config.json names, None where it names none."""
    named = getattr(hf_config, "dtype", None)  # transformers 4 reads "torch_dtype" into the same attribute
    return named if isinstance(named, torch.dtype) else None


def resolve_max_model_len(config: ModelConfig, hf_config: PretrainedConfig) -> int:
    """The longest request, prompt and output: as asked for, or what the model was made for."""
    known = getattr(hf_config, "max_position_embeddings", None)
    if config.max_model_len is not None:
        require(
            known is None or config.max_model_len <= known,
            f"max_model_len={config.max_model_len} is above the {known} positions that the model was made for "
            "(max_position_embeddings): lower it",
        )
        return config.max_model_len
    require(known is not None, "the model's config has no max_position_embeddings: give max_model_len")
    assert known is not None
    return int(known)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer named in the config, or the model's own, or None where the config asks for none.

    Raises ValueError saying where it was looked for.
    """
    if config.skip_tokenizer_init:
        return None
    name = config.tokenizer or config.model
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code, revision=config.revision)
    except Exception as error:  # transformers raises many types here, from OSError to KeyError
        raise ValueError(f"no tokenizer could be loaded from {name!r}: {error}") from error


def fingerprint(config: ModelConfig, worker: Worker, tokenizer: PreTrainedTokenizerBase | None) -> ModelFingerprint:
    """What chunk KV of this engine depends on."""
    directory = Path(config.model)
    if config.load_format == "dummy":
        weights = f"dummy-{worker.num_layers}x{worker.num_kv_heads}x{worker.head_dim}"
    else:
        weights = weights_digest(directory) if directory.is_dir() else f"{config.model}@{config.revision or 'main'}"
    if config.quantization is not None:
        weights += f"/{config.quantization}"
    rotary = worker.model_runner.model.model.layers[0].self_attn.attn.rotary  # type: ignore[union-attr,index]
    return ModelFingerprint(
        # A local directory is known by its content: moving it changes nothing.
        model="" if directory.is_dir() else config.model,
        revision=config.revision or "",
        weights=weights,
        dtype=str(worker.dtype).removeprefix("torch."),
        rope=rotary.fingerprint(),
        tokenizer=_tokenizer_digest(tokenizer),
        num_layers=worker.num_layers,
        num_kv_heads=worker.num_kv_heads,
        head_dim=worker.head_dim,
    )


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase | None) -> str:
    if tokenizer is None:
        return "none"
    if tokenizer.is_fast:
        return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:32]
    return hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:32]
