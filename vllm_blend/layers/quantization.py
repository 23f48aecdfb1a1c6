"""What `quantization="fp8"` needs around the linear layers: where it runs, how weights get in, and the fused norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from vllm_blend import ops
from vllm_blend.ops.fp8 import FP8_CAPABILITY, QuantizedRows, UnscaledProduct, has_fp8_products

ALIGNMENT = 16  # of both dimensions of an FP8 matrix, for the matrix product


def check_quantization(quantization: str | None, dtype: torch.dtype, device: torch.device) -> None:
    """Check that a model can run with `quantization`. Raises ValueError that names the field and the fix."""
    if quantization is None:
        return
    if dtype != torch.bfloat16:
        raise ValueError(
            f"quantization={quantization!r} gives its products in bfloat16, but dtype is "
            f"{str(dtype).removeprefix('torch.')}: use dtype='bfloat16', or leave quantization out"
        )
    if not has_fp8_products(device):
        found = "the CPU"
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            found = f"{torch.cuda.get_device_name(device)}, which has {major}.{minor}"
        raise ValueError(
            f"quantization={quantization!r} needs a GPU with FP8 matrix products (compute capability "
            f"{FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or newer), but the device is {found}: leave quantization out"
        )


def check_sizes(in_features: int, out_features: int) -> None:
    """Check that FP8 products take a matrix of these sizes. Raises ValueError if they do not."""
    if in_features % ALIGNMENT or out_features % ALIGNMENT:
        raise ValueError(
            f"quantization='fp8' needs matrices whose sizes are multiples of {ALIGNMENT}, but the model has one of "
            f"{out_features} x {in_features}: leave quantization out"
        )


@dataclass(frozen=True)
class QuantizedDestination:
    """Rows of an FP8 weight as the loader fills them.

    The full-precision matrix is rounded to the model's dtype first: what is quantised is the model in that dtype.
    """

    rows: QuantizedRows
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.rows.values.shape

    def copy_(self, matrix: torch.Tensor) -> None:
        """Quantise `matrix` [rows, n] into place. Memory that this takes on the device is freed again."""
        self.keep(ops.quantize_rows(matrix.to(self.rows.values.device, self.dtype)))

    def keep(self, quantized: QuantizedRows) -> None:
        """Copy a matrix that is quantised by rows already into place."""
        self.rows.values.copy_(quantized.values)
        self.rows.scales.copy_(quantized.scales)


class QuantizingRMSNorm(nn.Module):
    """`RMSNorm` for FP8 linear layers: it quantises its output in the same pass."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> QuantizedRows:
        """Normalise and quantise x [rows, size]."""
        return ops.rms_norm_quant(x, self.weight, self.eps)

    def add(self, x: torch.Tensor | UnscaledProduct, residual: torch.Tensor) -> tuple[QuantizedRows, torch.Tensor]:
        """Return norm(x + residual), quantised, and x + residual."""
        return ops.fused_add_rms_norm_quant(x, residual, self.weight, self.eps)
