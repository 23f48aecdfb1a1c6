"""What the engine needs of a model."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

import torch
from torch import nn

from vllm_blend.layers.attention import Attention


class Decoder(Protocol):
    """The stack of layers below the head. It carries the public blending switches, which the engine reads."""

    layers: nn.ModuleList  # each has `self_attn.attn`, an `Attention`; `self_attn.hack_kv` is set by the engine
    cache_fuse_metadata: dict[str, Any]
    old_kvs: list[list[torch.Tensor]]


class CausalLM(Protocol):
    """An nn.Module that runs token ids through a decoder and turns hidden states into logits.

    It is called within a `forward_context`, which carries positions, caches and hooks.
    """

    config: Any  # of Hugging Face; `vocab_size` is read

    @property
    def model(self) -> Decoder:
        """Return the decoder stack."""

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [T', hidden_size] for token ids [T] int64."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocab_size] of hidden states [n, hidden_size]."""

    def get_submodule(self, target: str) -> nn.Module:
        """Return the module at a dotted path, as every nn.Module does."""


ATTRIBUTES = ("config", "model", "compute_logits")


def as_causal_lm(module: nn.Module) -> CausalLM:
    """Return `module` as what it must be. Raises TypeError when it lacks an attribute of `CausalLM`."""
    if not _is_causal_lm(module):
        missing = [name for name in ATTRIBUTES if not hasattr(module, name)]
        raise TypeError(f"a model needs {', '.join(ATTRIBUTES)}, but {type(module).__name__} has no {missing[0]}")
    return module


def _is_causal_lm(module: nn.Module) -> TypeGuard[CausalLM]:
    return all(hasattr(module, name) for name in ATTRIBUTES)


def attention_layers(model: CausalLM) -> list[Attention]:
    """Return the `Attention` of every layer, in order. Raises TypeError when a layer has another kind."""
    found = [layer.get_submodule("self_attn.attn") for layer in model.model.layers]
    attentions = [module for module in found if isinstance(module, Attention)]
    if len(attentions) < len(found):
        raise TypeError(
            f"the layers of {type(model).__name__} attend by {sorted({type(module).__name__ for module in found})}: "
            "every self_attn.attn must be a vllm_blend.layers.attention.Attention"
        )
    return attentions
