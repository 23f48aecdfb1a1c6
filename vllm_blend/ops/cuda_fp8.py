"""Bindings of the FP8 kernels (csrc/cuda/fp8.cu), by the rules of `ops.cuda_library`.

Each returns e4m3 values [rows, n] and float32 scales [rows]: value times scale is the number meant.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p

import torch

from vllm_blend.ops.cuda_library import bound, check, dtype_code, expect, stream_of

Scales = tuple[torch.Tensor, torch.Tensor]  # float32, of the rows and of the columns of a product they are yet to scale
_P, _I, _L, _F = c_void_p, c_int, c_int64, c_float
_SIGNATURES = {
    "vb_quantize_fp8": (_P, _L, _P, _P, _L, _I, _I, _P),
    "vb_rms_norm_quantize_fp8": (_P, _P, _P, _P, _P, _P, _P, _L, _I, _F, _I, _P),
    "vb_silu_and_mul_quantize_fp8": (_P, _P, _P, _P, _P, _L, _I, _I, _P),
}

_functions = bound(_SIGNATURES)


def _outputs(rows: int, n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(rows, n, dtype=torch.float8_e4m3fn, device=device)
    return values, torch.empty(rows, dtype=torch.float32, device=device)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, n], whose rows may be strided; n is a multiple of 8 up to 32768."""
    rows, n = x.shape
    pointer = expect(x, "x", x.dtype, contiguous=False)
    values, scales = _outputs(rows, n, x.device)
    code = _functions().vb_quantize_fp8(
        pointer, x.stride(0), values.data_ptr(), scales.data_ptr(), rows, n, dtype_code(x, "x"), stream_of(x)
    )
    check("quantize_fp8", code)
    return values, scales


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    x_scales: Scales | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cuda.rms_norm` of x [rows, n], quantised; with a residual, it is replaced by x + residual. n up to 16384."""
    rows, n = x.shape
    values, scales = _outputs(rows, n, x.device)
    code = _functions().vb_rms_norm_quantize_fp8(
        expect(x, "x", x.dtype), *_scale_pointers(x_scales, rows, n),
        0 if residual is None else expect(residual, "residual", x.dtype), expect(weight, "weight", x.dtype),
        values.data_ptr(), scales.data_ptr(), rows, n, eps, dtype_code(x, "x"), stream_of(x),
    )  # fmt: skip
    check("rms_norm_quantize_fp8", code)
    return values, scales


def silu_and_mul_quantize(
    gate_up: torch.Tensor, gate_up_scales: Scales | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cuda.silu_and_mul` of gate_up [rows, 2 * n], quantised; n up to 32768."""
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    pointer = expect(gate_up, "gate_up", gate_up.dtype)
    values, scales = _outputs(rows, n, gate_up.device)
    code = _functions().vb_silu_and_mul_quantize_fp8(
        pointer, *_scale_pointers(gate_up_scales, rows, 2 * n), values.data_ptr(), scales.data_ptr(), rows, n,
        dtype_code(gate_up, "gate_up"), stream_of(gate_up),
    )  # fmt: skip
    check("silu_and_mul_quantize_fp8", code)
    return values, scales


def _scale_pointers(scales: Scales | None, rows: int, columns: int) -> tuple[int, int]:
    if scales is None:
        return 0, 0
    if scales[0].shape != (rows,) or scales[1].shape != (columns,):
        raise ValueError(
            f"the scales are {tuple(scales[0].shape)} and {tuple(scales[1].shape)}, not ({rows},) and ({columns},)"
        )
    return expect(scales[0], "row scales", torch.float32), expect(scales[1], "column scales", torch.float32)
