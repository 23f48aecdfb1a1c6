"""Linear layers without initialisation cost, alone or packed (several checkpoint matrices as one), also in FP8."""

from __future__ import annotations

import torch
from torch import nn

from vllm_blend import ops
from vllm_blend.layers.quantization import QuantizedDestination, check_sizes
from vllm_blend.ops.fp8 import QuantizedRows, UnscaledProduct


class Linear(nn.Module):
    """x [..., in_features] -> [..., out_features]; its memory is not initialised until the loader fills it.

    With quantization="fp8" the weight is e4m3 with one float32 scale per output channel; x is [tokens, in_features] and
    is quantised per token, unless it is quantised already. The output has the dtype that was the default when the layer
    was made.
    """

    weight_scale: torch.Tensor | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, quantization: str | None = None
    ) -> None:
        super().__init__()
        self.dtype = torch.get_default_dtype()
        weight_dtype, scale = self.dtype, None
        if quantization is not None:
            check_sizes(in_features, out_features)
            weight_dtype, scale = torch.float8_e4m3fn, torch.empty(out_features, dtype=torch.float32)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=weight_dtype), requires_grad=False)
        self.register_buffer("weight_scale", scale, persistent=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        if self.weight_scale is None:
            assert isinstance(x, torch.Tensor)
            return ops.linear(x, self.weight, self.bias)
        return ops.quantized_linear(*self._operands(x), self.bias, self.dtype)

    def product(self, x: torch.Tensor | QuantizedRows) -> torch.Tensor | UnscaledProduct:
        """Multiply for a reader that can apply the scales of an FP8 product: some products are faster without them."""
        if self.weight_scale is None:
            product: torch.Tensor = self(x)
            return product
        return ops.quantized_product(*self._operands(x), self.bias, self.dtype)

    def _operands(self, x: torch.Tensor | QuantizedRows) -> tuple[QuantizedRows, QuantizedRows]:
        assert self.weight_scale is not None
        rows = ops.quantize_rows(x) if isinstance(x, torch.Tensor) else x
        return rows, QuantizedRows(self.weight, self.weight_scale)

    def weight_destination(self, rows: slice = slice(None)) -> torch.Tensor | QuantizedDestination:
        """Return what these output rows of a full-precision weight [out_features, in_features] are copied into."""
        weight = self.weight.detach()[rows]
        if self.weight_scale is None:
            return weight
        return QuantizedDestination(QuantizedRows(weight, self.weight_scale[rows]), self.dtype)

    def checkpoint_views(self) -> dict[str, torch.Tensor | QuantizedDestination]:
        """Return where each tensor of the checkpoint goes, by its name beside the layer's own."""
        bias = {} if self.bias is None else {"bias": self.bias.detach()}
        return {"weight": self.weight_destination(), **bias}


class PackedLinear(Linear):
    """Matrices that share their input, stacked by output rows.

    `parts` has them in order: name in the checkpoint -> rows. With `is_fused` the checkpoint has them as one matrix.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        bias: bool = False,
        quantization: str | None = None,
        is_fused: bool = False,
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias, quantization)
        self.parts, self.is_fused = parts, is_fused
        self.sizes = list(parts.values())

    def checkpoint_views(self) -> dict[str, torch.Tensor | QuantizedDestination]:
        """Return parts of the layer's memory by names beside its own ("q_proj.weight" and so on), or all of it."""
        if self.is_fused:
            return super().checkpoint_views()
        views: dict[str, torch.Tensor | QuantizedDestination] = {}
        first = 0
        for name, size in self.parts.items():
            rows = slice(first, first + size)
            views[f"{name}.weight"] = self.weight_destination(rows)
            if self.bias is not None:
                views[f"{name}.bias"] = self.bias.detach()[rows]
            first += size
        return views


class QKVLinear(PackedLinear):
    """Query, key and value projections in one product. Output: q, k, v side by side, split by `sizes`."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        quantization: str | None = None,
        is_fused: bool = False,
    ) -> None:
        kv = num_kv_heads * head_dim
        parts = {"q_proj": num_heads * head_dim, "k_proj": kv, "v_proj": kv}
        super().__init__(hidden_size, parts, bias, quantization, is_fused)


class GateUpLinear(PackedLinear):
    """Gate and up projections of a gated MLP in one product; the gate comes first, as `ops.silu_and_mul` takes it."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        quantization: str | None = None,
        is_fused: bool = False,
    ) -> None:
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        super().__init__(hidden_size, parts, bias, quantization, is_fused)
