"""What went through a model: token-layers, and the logits that tokens were drawn from. It watches; nothing changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn


class Probe:
    """Hooks on the modules of a model of ours that runs without CUDA graphs.

    A token-layer is one token through the weights of one layer. A row that a step drops inside a layer (a check layer,
    the last layer of a prefill) has gone through the projections of Q, K and V there, and counts for the share of the
    layer's weights that those are. Attention itself has no weights and is left out.
    """

    def __init__(self, model: nn.Module) -> None:
        self.token_layers = 0.0
        self.num_drawn = 0  # rows of logits so far
        self.logits: list[torch.Tensor] = []  # [rows, vocabulary] each, since it was cleared
        layers: Any = model.model.layers  # type: ignore[union-attr]
        self.num_layers = len(layers)
        self._handles = [model.lm_head.register_forward_hook(self._drawn)]  # type: ignore[union-attr]
        for index, layer in enumerate(layers):
            attention, mlp = layer.self_attn, getattr(layer, "mlp", None)
            if not all(isinstance(part, nn.Module) for part in (*_parts(attention), mlp)):
                raise ValueError(
                    f"layer {index} of {type(model).__name__} is not built of self_attn.qkv_proj, self_attn.attn, "
                    "self_attn.o_proj and mlp: the tokens that it computes cannot be counted"
                )
            whole = _num_weights(layer)
            share = _num_weights(attention.qkv_proj) / whole
            self._handles.append(attention.qkv_proj.register_forward_hook(partial(self._projected, share)))
            self._handles.append(attention.attn.register_forward_hook(partial(self._attended, 1 - share)))

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _projected(self, share: float, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.token_layers += share * output.shape[0]

    def _attended(self, share: float, module: nn.Module, args: Any, output: tuple[torch.Tensor, Any]) -> None:
        self.token_layers += share * output[0].shape[0]

    def _drawn(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.num_drawn += output.shape[0]
        self.logits.append(output)


def _parts(attention: nn.Module) -> list[Any]:
    return [getattr(attention, name, None) for name in ("qkv_proj", "attn", "o_proj")]


def _num_weights(module: nn.Module) -> int:
    """Of the matrices: norms and biases cost nothing beside them."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.dim() > 1)
