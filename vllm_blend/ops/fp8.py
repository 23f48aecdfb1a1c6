"""Products of FP8 matrices whose rows carry a scale each: tokens on the one side, output channels on the other.

As vLLM's online FP8: weights once, at load; activations anew for every token. The scales come out of the sum over the
shared dimension, so the product is exact up to the rounding of its operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from vllm_blend.ops import constants, cuda
from vllm_blend.ops import pointers as to
from vllm_blend.ops.activation import silu_and_mul_reference
from vllm_blend.ops.cuda_library import DTYPES, check, dtype_code, expect, stream_of
from vllm_blend.ops.layernorm import rms_norm_reference

E4M3_MAX = 448.0
SMALLEST = 1e-12  # stands in for the largest magnitude of a row of zeros
FP8_CAPABILITY = (8, 9)  # the first with FP8 matrix products: Ada; then Hopper 9.0, Blackwell 10.0
# Products of at least so many tiles of 128 x 128 are left to cuBLASLt to scale: its row-wise scaling does not split the
# inner dimension, which costs nothing once the tiles fill the device. Measured on an H200, a product and its reader
# together, scaled / unscaled, us, with 32, 647 and 4096 rows: 4096 -> 4096 and norm 16.5 / 11.0, 30.9 / 25.0, 122 /
# 125; 14336 -> 4096 and norm 40.5 / 22.6, 81.8 / 60.5, 344 / 334; 4096 -> 28672 and silu 41.2 / 36.8, 153 / 146, 717 /
# 743.
SCALED_TILES = 1024


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """A matrix in FP8: row i is `values[i] * scales[i]`."""

    values: torch.Tensor  # [rows, n] float8_e4m3fn
    scales: torch.Tensor  # [rows] float32


@dataclass(frozen=True, slots=True)
class UnscaledProduct:
    """A product of two `QuantizedRows` whose scales are left to its reader: entry [i, j] is `values[i, j] *
    row_scales[i] * column_scales[j]`."""

    values: torch.Tensor  # [rows, columns] bfloat16: it has the range for sums of products of e4m3
    row_scales: torch.Tensor  # [rows] float32
    column_scales: torch.Tensor  # [columns] float32

    def scaled(self) -> torch.Tensor:
        """Return the product itself, float32."""
        return self.values * self.row_scales[:, None] * self.column_scales


@cache
def has_fp8_products(device: torch.device) -> bool:
    """Return whether the device multiplies FP8 matrices."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def quantize_rows(x: torch.Tensor) -> QuantizedRows:
    """Return x [rows, n] with every row scaled to the range of e4m3. A row with NaN or infinity comes out with NaN.

    On a GPU, rows may be strided, and n is a multiple of 8 up to 32768.
    """
    if not cuda.accepts(x):
        return quantize_rows_reference(x)
    rows, n = x.shape
    out = _empty_rows(rows, n, x.device)
    code = cuda.functions().quantize_fp8(
        expect(to.Input, x, "x", x.dtype, contiguous=False), x.stride(0), to.Out(out.values), to.Scales(out.scales),
        rows, n, DTYPES[x.dtype], stream_of(x),
    )  # fmt: skip
    check("quantize_fp8", code)
    return out


def rms_norm_quant(x: torch.Tensor, weight: torch.Tensor, eps: float) -> QuantizedRows:
    """Return `quantize_rows(rms_norm(x, weight, eps))` for x [rows, n], on a GPU with n up to 16384."""
    if cuda.accepts(x):
        return _norm_on_gpu(x.contiguous(), None, weight, eps)
    return rms_norm_quant_reference(x, weight, eps)


def fused_add_rms_norm_quant(
    x: torch.Tensor | UnscaledProduct, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[QuantizedRows, torch.Tensor]:
    """Return (rms_norm_quant(x + residual), x + residual) for x [rows, n]; the sum may take the place of `residual`."""
    if cuda.accepts(residual):
        return _norm_on_gpu(x, residual, weight, eps), residual
    return fused_add_rms_norm_quant_reference(x, residual, weight, eps)


def _norm_on_gpu(
    x: torch.Tensor | UnscaledProduct, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> QuantizedRows:
    """Return the norm of x [rows, n], quantised; with a residual, it is replaced by x + residual."""
    values = _values(x)
    rows, n = values.shape
    out = _empty_rows(rows, n, values.device)
    code = cuda.functions().rms_norm_quantize_fp8(
        expect(to.Input, values, "x", values.dtype), *_scale_pointers(x),
        None if residual is None else expect(to.Residual, residual, "residual", values.dtype),
        expect(to.Weight, weight, "weight", values.dtype), to.Out(out.values), to.Scales(out.scales), rows, n, eps,
        dtype_code(values, "x"), stream_of(values),
    )  # fmt: skip
    check("rms_norm_quantize_fp8", code)
    return out


def silu_and_mul_quant(gate_up: torch.Tensor | UnscaledProduct) -> QuantizedRows:
    """Return `quantize_rows(silu_and_mul(gate_up))` for gate_up [rows, 2 * n], on a GPU with n up to 32768."""
    values = _values(gate_up)
    if not cuda.accepts(values):
        return silu_and_mul_quant_reference(gate_up)
    rows, n = values.shape[0], values.shape[1] // 2
    out = _empty_rows(rows, n, values.device)
    code = cuda.functions().silu_and_mul_quantize_fp8(
        expect(to.GateUp, values, "gate_up", values.dtype), *_scale_pointers(gate_up), to.Out(out.values),
        to.Scales(out.scales), rows, n, DTYPES[values.dtype], stream_of(values),
    )  # fmt: skip
    check("silu_and_mul_quantize_fp8", code)
    return out


def _empty_rows(rows: int, n: int, device: torch.device) -> QuantizedRows:
    values = torch.empty(rows, n, dtype=torch.float8_e4m3fn, device=device)
    return QuantizedRows(values, torch.empty(rows, dtype=torch.float32, device=device))


def _values(x: torch.Tensor | UnscaledProduct) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else x.values


def _scale_pointers(x: torch.Tensor | UnscaledProduct) -> tuple[to.RowScales | None, to.ColumnScales | None]:
    if isinstance(x, torch.Tensor):
        return None, None
    rows, columns = x.values.shape
    if x.row_scales.shape != (rows,) or x.column_scales.shape != (columns,):
        raise ValueError(
            f"the scales are {tuple(x.row_scales.shape)} and {tuple(x.column_scales.shape)}, not ({rows},) and "
            f"({columns},)"
        )
    row_scales = expect(to.RowScales, x.row_scales, "row scales", torch.float32)
    return row_scales, expect(to.ColumnScales, x.column_scales, "column scales", torch.float32)


def quantized_linear(
    x: QuantizedRows, weight: QuantizedRows, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return x [rows, in] times weight [out, in] transposed, plus bias [out] -> [rows, out] of `dtype`.

    `in` and `out` are multiples of 16. Without FP8 products on the device, float32 ones are taken: slow, and no nearer.
    """
    if has_fp8_products(x.values.device):
        product = _product(x, weight, x.scales[:, None], weight.scales[None], dtype)
        return product if bias is None else product.add_(bias)
    return quantized_linear_reference(x, weight, bias, dtype)


def quantized_product(
    x: QuantizedRows, weight: QuantizedRows, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | UnscaledProduct:
    """Return `quantized_linear`, unscaled where that is faster."""
    tiles = -(-x.values.shape[0] // 128) * -(-weight.values.shape[0] // 128)
    if bias is not None or tiles >= SCALED_TILES or not has_fp8_products(x.values.device):
        return quantized_linear(x, weight, bias, dtype)
    one = constants.one(x.values.device)
    return UnscaledProduct(_product(x, weight, one, one, torch.bfloat16), x.scales, weight.scales)


def _product(
    x: QuantizedRows, weight: QuantizedRows, x_scale: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    # Never with a bias: cuBLASLt 13.0 has no kernel for row-wise scales and a bias with up to 17 rows of 14336, or 8 of
    # 8192 (CUBLAS_STATUS_NOT_SUPPORTED).
    return torch._scaled_mm(x.values, weight.values.t(), x_scale, weight_scale, out_dtype=dtype, use_fast_accum=True)


def quantize_rows_reference(x: torch.Tensor) -> QuantizedRows:
    x = x.float()
    # Products with reciprocals, not quotients: torch and the kernel then round alike.
    scales = x.abs().amax(-1).clamp_min(SMALLEST) * (1 / E4M3_MAX)
    values = (x * scales.reciprocal()[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return QuantizedRows(values.to(torch.float8_e4m3fn), scales)


def rms_norm_quant_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> QuantizedRows:
    return quantize_rows_reference(rms_norm_reference(x, weight, eps))


def fused_add_rms_norm_quant_reference(
    x: torch.Tensor | UnscaledProduct, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[QuantizedRows, torch.Tensor]:
    total = ((x.scaled() if isinstance(x, UnscaledProduct) else x) + residual).to(residual.dtype)
    return rms_norm_quant_reference(total, weight, eps), total


def silu_and_mul_quant_reference(gate_up: torch.Tensor | UnscaledProduct) -> QuantizedRows:
    if isinstance(gate_up, UnscaledProduct):
        dtype = gate_up.values.dtype
        gate, up = gate_up.scaled().chunk(2, -1)
        return quantize_rows_reference((torch.nn.functional.silu(gate).to(dtype) * up).to(dtype))
    return quantize_rows_reference(silu_and_mul_reference(gate_up))


def quantized_linear_reference(
    x: QuantizedRows, weight: QuantizedRows, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    product = x.values.float() @ weight.values.float().t() * x.scales[:, None] * weight.scales
    return (product if bias is None else product + bias).to(dtype)
