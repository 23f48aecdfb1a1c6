"""Low-rank adapters (LoRA, Hu et al., arXiv:2106.09685) by the `peft` library, merged into the weights on saving."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
MODULES = (*ATTENTION_MODULES, "gate_proj", "up_proj", "down_proj", "gate_up_proj")
MAX_RANK = 1024
ADAPTER = "default"  # peft's name of the first adapter


def check_lora(rank: int, alpha: int) -> None:
    """Raise ValueError for a rank or alpha that cannot be, or if `peft` is missing. A rank of 0 is no adapter."""
    if rank < 0:
        raise ValueError(f"--lora-rank is {rank}: use 0 for no adapter, or a rank such as 16")
    if rank > MAX_RANK:
        raise ValueError(f"--lora-rank is {rank}: use at most {MAX_RANK}, or leave it out to train all weights")
    if alpha <= 0:
        raise ValueError(f"--lora-alpha is {alpha}: it must be above 0, such as twice the rank")
    if rank and importlib.util.find_spec("peft") is None:
        raise ValueError(f"--lora-rank {rank} needs the peft library: pip install vllm-blend[finetune]")


class Adapter:
    """An adapter on all linear layers of a model's decoder, put into it in place. In mixtures of experts it is on
    those of attention. Only it is trained.

    `alpha` / `rank` times the product of its two matrices is added to a weight. The adapter is float32, whatever the
    model's dtype.
    """

    def __init__(self, model: Any, rank: int, alpha: int) -> None:
        from peft import LoraConfig, get_peft_model

        is_mixture = getattr(model.config, "num_experts_per_tok", None) is not None
        modules = list(ATTENTION_MODULES if is_mixture else MODULES)
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, task_type="CAUSAL_LM")
        self.model, self._wrapped = model, get_peft_model(model, config)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Have the model compute as it does without the adapter."""
        with self._wrapped.disable_adapter():
            yield

    @torch.no_grad()
    def merged_weights(self) -> dict[str, torch.Tensor]:
        """Return the model's weights with the adapter added, under the names that they have without one, in float32 on
        the CPU where the adapter adds something."""
        weights: dict[str, torch.Tensor] = {}
        for name, tensor in self.model.state_dict().items():
            if ".lora_" in name:
                continue
            if name.endswith(".base_layer.weight"):
                layer = self.model.get_submodule(name.removesuffix(".base_layer.weight"))
                tensor = tensor.float().cpu() + layer.get_delta_weight(ADAPTER).float().cpu()
            weights[name.replace(".base_layer.", ".")] = tensor
        return weights
