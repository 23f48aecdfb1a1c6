"""Linear layers without initialisation cost, and packed ones: several checkpoint matrices multiplied as one."""

from __future__ import annotations

import torch
from torch import nn

from vllm_blend import ops


class Linear(nn.Module):
    """x [..., in_features] -> [..., out_features]; its memory is not initialised until the loader fills it."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)


class PackedLinear(Linear):
    """Matrices that share their input, stacked by output rows in the order of `parts`: name in the checkpoint ->
    rows."""

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = parts
        self.sizes = list(parts.values())

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Where each tensor of the checkpoint goes: "q_proj.weight" and so on -> a view of the packed memory."""
        views = {}
        for kind, packed in (("weight", self.weight), ("bias", self.bias)):
            if packed is not None:
                for name, view in zip(self.parts, packed.detach().split(self.sizes), strict=True):
                    views[f"{name}.{kind}"] = view
        return views


class QKVLinear(PackedLinear):
    """Query, key and value projections in one product. Output: q, k, v side by side, split by `sizes`."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool = False) -> None:
        kv = num_kv_heads * head_dim
        super().__init__(hidden_size, {"q_proj": num_heads * head_dim, "k_proj": kv, "v_proj": kv}, bias)


class GateUpLinear(PackedLinear):
    """Gate and up projections of a gated MLP in one product; the gate comes first, as `ops.silu_and_mul` takes it."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__(hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}, bias)
