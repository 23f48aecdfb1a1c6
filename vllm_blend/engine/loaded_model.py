"""`llm_engine.model_config`: what callers of vLLM ask about the model that an engine has loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from vllm_blend.config import ModelConfig


@dataclass(frozen=True)
class LoadedModelConfig:
    """The model of an engine under the names of vLLM's `ModelConfig`, with every default resolved."""

    model: str
    tokenizer: str
    skip_tokenizer_init: bool
    trust_remote_code: bool
    dtype: torch.dtype
    seed: int
    revision: str | None
    quantization: str | None
    enforce_eager: bool
    max_model_len: int
    generation_config: str
    hf_config: PretrainedConfig

    @property
    def hf_text_config(self) -> PretrainedConfig:
        """Return the part of the Hugging Face config that describes the text model."""
        return self.hf_config.get_text_config()

    def get_vocab_size(self) -> int:
        return int(self.hf_text_config.vocab_size)


def loaded_model_config(
    config: ModelConfig, hf_config: Any, dtype: torch.dtype, max_model_len: int
) -> LoadedModelConfig:
    """Return the description of a model that was loaded as `config` says."""
    return LoadedModelConfig(
        model=config.model,
        tokenizer=config.tokenizer or config.model,
        skip_tokenizer_init=config.skip_tokenizer_init,
        trust_remote_code=config.trust_remote_code,
        dtype=dtype,
        seed=config.seed,
        revision=config.revision,
        quantization=config.quantization,
        enforce_eager=config.enforce_eager,
        max_model_len=max_model_len,
        generation_config=config.generation_config,
        hf_config=hf_config,
    )
