"""Linear layers without initialisation cost, alone or packed (several checkpoint matrices as one), also in FP8 or with
the 4-bit weights of a checkpoint.

A layer may be one rank's share of the whole one: of its rows, or of its columns.
"""

from __future__ import annotations

import torch
from torch import nn

from vllm_blend import ops
from vllm_blend.distributed.ranks import Ranks
from vllm_blend.distributed.sharding import Layout, Share, row_layout
from vllm_blend.layers.quantization import QuantizedDestination, check_sizes
from vllm_blend.ops.fp8 import QuantizedRows, UnscaledProduct


class Linear(nn.Module):
    """x [..., in_features] -> [..., out_features]; its memory is not initialised until the loader fills it.

    With quantization="fp8" the weight is e4m3 with one float32 scale per output channel; x is [tokens, in_features] and
    is quantised per token, unless it is quantised already. The output has the dtype that was the default when the layer
    was made. A layer whose matrix stays in 4 bits has it in `int4`, one whose matrix stays in a file's blocks in
    `blocks`, and both have a weight without rows.
    """

    weight_scale: torch.Tensor | None
    int4: ops.Int4Weight | None = None
    blocks: ops.BlockMatrix | None = None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, quantization: str | None = None
    ) -> None:
        super().__init__()
        self.num_weights = in_features * out_features  # also of a matrix that is kept elsewhere than in `weight`
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
            if self.int4 is not None:
                return ops.int4_linear(x, self.int4, self.bias)
            if self.blocks is not None:
                return ops.blocks_linear(x, self.blocks, self.bias)
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

    def keep_int4(self, matrix: ops.Int4Weight) -> None:
        """Multiply by a matrix [out_features, in_features] in 4 bits from now on, instead of `weight`."""
        self.int4 = matrix
        self._drop_weight()

    def keep_blocks(self, matrix: ops.BlockMatrix) -> None:
        """Multiply by a matrix [out_features, in_features] in blocks from now on, instead of `weight`."""
        self.blocks = matrix
        self._drop_weight()

    @property
    def is_kept(self) -> bool:
        """Return whether the matrix stays as the checkpoint has it, quantized."""
        return self.int4 is not None or self.blocks is not None

    def _drop_weight(self) -> None:
        self.weight = nn.Parameter(self.weight.new_empty(0, self.weight.shape[1]), requires_grad=False)

    def weight_destination(self, rows: slice = slice(None)) -> torch.Tensor | QuantizedDestination:
        """Return what these output rows of a full-precision weight [out_features, in_features] are copied into."""
        weight = self.weight.detach()[rows]
        if self.weight_scale is None:
            return weight
        return QuantizedDestination(QuantizedRows(weight, self.weight_scale[rows]), self.dtype)

    def checkpoint_views(self) -> dict[str, torch.Tensor | QuantizedDestination | Layout]:
        """Return where each tensor of the checkpoint goes, by its name beside the layer's own."""
        bias = {} if self.bias is None else {"bias": self.bias.detach()}
        weight = {} if self.is_kept else {"weight": self.weight_destination()}
        return {**weight, **bias} | self.layouts()

    def checkpoint_weights(self) -> dict[str, int]:
        """Return the matrices of the checkpoint that lie in the weight, one above the other, and the rows of each."""
        return {"weight": len(self.weight)}

    def layouts(self) -> dict[str, Layout]:
        """Return the layouts of the parameters, by name, of which this layer has a share."""
        return {}


class RowParallelLinear(Linear):
    """A rank's columns of a linear layer, whose input is shared out alike; the ranks' products are added up. (In the
    literature, where matrices are transposed, these are rows.)"""

    def __init__(self, in_share: Share, out_features: int, bias: bool, ranks: Ranks) -> None:
        super().__init__(in_share.count, out_features, bias)
        self.in_share, self.ranks = in_share, ranks

    def forward(self, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        out = self.ranks.sum(ops.linear(x, self.weight))
        return out if self.bias is None else out + self.bias

    def layouts(self) -> dict[str, Layout]:
        weight = self.weight.detach()
        return {"weight": row_layout([Share.whole(len(weight))], weight, self.in_share)}


def row_parallel(in_share: Share, out_features: int, bias: bool, quantization: str | None, ranks: Ranks) -> Linear:
    """Return a layer whose input is shared out among ranks, or whole on the only one."""
    if in_share.is_whole:
        return Linear(in_share.total, out_features, bias, quantization)
    return RowParallelLinear(in_share, out_features, bias, ranks)


class PackedLinear(Linear):
    """Matrices that share their input, stacked by output rows.

    `parts` has them in order: name in the checkpoint -> the rows that are here. With `is_fused` the checkpoint has them
    as one matrix.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, Share],
        bias: bool = False,
        quantization: str | None = None,
        is_fused: bool = False,
    ) -> None:
        self.sizes = [share.count for share in parts.values()]
        super().__init__(in_features, sum(self.sizes), bias, quantization)
        self.parts, self.is_fused = parts, is_fused

    def checkpoint_views(self) -> dict[str, torch.Tensor | QuantizedDestination | Layout]:
        """Return parts of the layer's memory by names beside its own ("q_proj.weight" and so on), or all of it."""
        if self.is_fused:
            return super().checkpoint_views()
        views: dict[str, torch.Tensor | QuantizedDestination | Layout] = {}
        first, columns = 0, Share.whole(self.weight.shape[1])
        for name, share in self.parts.items():
            rows = slice(first, first + share.count)
            weight, bias = self.weight.detach()[rows], None if self.bias is None else self.bias.detach()[rows]
            whole = share.is_whole
            if not self.is_kept:
                destination = self.weight_destination(rows) if whole else row_layout([share], weight, columns)
                views[f"{name}.weight"] = destination
            if bias is not None:
                views[f"{name}.bias"] = bias if whole else row_layout([share], bias)
            first += share.count
        return views

    def checkpoint_weights(self) -> dict[str, int]:
        if self.is_fused:
            return super().checkpoint_weights()
        return {f"{name}.weight": share.total for name, share in self.parts.items()}

    def layouts(self) -> dict[str, Layout]:
        shares = list(self.parts.values())
        if all(share.is_whole for share in shares):
            return {}
        found = {"weight": row_layout(shares, self.weight.detach(), Share.whole(self.weight.shape[1]))}
        return found if self.bias is None else found | {"bias": row_layout(shares, self.bias.detach())}


class QKVLinear(PackedLinear):
    """Query, key and value projections in one product. Output: q, k, v side by side, split by `sizes`."""

    def __init__(
        self,
        hidden_size: int,
        heads: Share,
        kv_heads: Share,
        head_dim: int,
        bias: bool = False,
        quantization: str | None = None,
        is_fused: bool = False,
    ) -> None:
        kv = kv_heads.times(head_dim)
        parts = {"q_proj": heads.times(head_dim), "k_proj": kv, "v_proj": kv}
        super().__init__(hidden_size, parts, bias, quantization, is_fused)


class GateUpLinear(PackedLinear):
    """Gate and up projections of a gated MLP in one product; the gate comes first, as `ops.silu_and_mul` takes it."""

    def __init__(
        self,
        hidden_size: int,
        intermediate: Share,
        bias: bool = False,
        quantization: str | None = None,
        is_fused: bool = False,
    ) -> None:
        parts = {"gate_proj": intermediate, "up_proj": intermediate}
        super().__init__(hidden_size, parts, bias, quantization, is_fused)
