"""Count what goes through a model: token-layers, and rows of logits. Nothing is changed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from vllm_blend.layers.experts import Experts
from vllm_blend.layers.linear import Linear
from vllm_blend.models.causal_lm import CausalLM

PARTS = ("self_attn.qkv_proj", "self_attn.attn", "self_attn.o_proj", "mlp")  # of a layer


class Probe:
    """Hooks on the modules of a model of this package that runs without CUDA graphs.

    A token-layer is one token through the weights of one layer. A row that a step drops inside a layer (a check layer,
    the last layer of a prefill) has gone through the projections of Q, K and V there, and counts for their share of the
    layer's weights. Attention itself has no weights and is left out.
    """

    def __init__(self, model: CausalLM) -> None:
        self.token_layers = 0.0
        self.num_drawn = 0  # rows of logits, so far
        self.num_layers = len(model.model.layers)
        self._handles = [model.get_submodule("lm_head").register_forward_hook(self._drawn)]
        for index, layer in enumerate(model.model.layers):
            try:
                projection, attention, _, _ = [layer.get_submodule(name) for name in PARTS]
            except AttributeError as error:
                raise ValueError(
                    f"layer {index} of {type(model).__name__} is not built of self_attn.qkv_proj, self_attn.attn, "
                    "self_attn.o_proj and mlp: the tokens that it computes cannot be counted"
                ) from error
            share = _num_weights(projection) / _num_weights(layer)
            self._handles.append(projection.register_forward_hook(partial(self._projected, share)))
            self._handles.append(attention.register_forward_hook(partial(self._attended, 1 - share)))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _projected(self, share: float, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.token_layers += share * output.shape[0]

    def _attended(self, share: float, module: nn.Module, args: Any, output: tuple[torch.Tensor, Any]) -> None:
        self.token_layers += share * output[0].shape[0]

    def _drawn(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.num_drawn += output.shape[0]


def _num_weights(module: nn.Module) -> int:
    """Count the weights of the matrices: norms and biases cost nothing beside them."""
    layers = [each for each in module.modules() if isinstance(each, Linear | Experts)]
    own = {id(parameter) for layer in layers for parameter in layer.parameters()}
    others = (parameter for parameter in module.parameters() if id(parameter) not in own)
    return sum(layer.num_weights for layer in layers) + sum(each.numel() for each in others if each.dim() > 1)
