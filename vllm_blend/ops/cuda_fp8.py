"""Bindings of the FP8 kernels (csrc/cuda/fp8.cu); the rules of `ops.cuda` hold here too.

Each returns e4m3 values [rows, n] and float32 scales [rows]: value times scale is the number meant.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch

from vllm_blend.ops.cuda import _check, _dtype, _expect, _library, _stream

Scales = tuple[torch.Tensor, torch.Tensor]  # float32, of the rows and of the columns of a product they are yet to scale
_P, _I, _L, _F = c_void_p, c_int, c_int64, c_float
_SIGNATURES = {
    "vb_quantize_fp8": (_P, _L, _P, _P, _L, _I, _I, _P),
    "vb_rms_norm_quantize_fp8": (_P, _P, _P, _P, _P, _P, _P, _L, _I, _F, _I, _P),
    "vb_silu_and_mul_quantize_fp8": (_P, _P, _P, _P, _P, _L, _I, _I, _P),
}


@cache
def _functions() -> ctypes.CDLL:
    library = _library()
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    return library


def _outputs(rows: int, n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(rows, n, dtype=torch.float8_e4m3fn, device=device)
    return values, torch.empty(rows, dtype=torch.float32, device=device)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, n], whose rows may be strided; n is a multiple of 8 up to 32768."""
    rows, n = x.shape
    pointer = _expect(x, "x", x.dtype, contiguous=False)
    values, scales = _outputs(rows, n, x.device)
    code = _functions().vb_quantize_fp8(
        pointer, x.stride(0), values.data_ptr(), scales.data_ptr(), rows, n, _dtype(x, "x"), _stream(x)
    )
    _check("quantize_fp8", code)
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
        _expect(x, "x", x.dtype), *_scale_pointers(x_scales, rows, n),
        0 if residual is None else _expect(residual, "residual", x.dtype), _expect(weight, "weight", x.dtype),
        values.data_ptr(), scales.data_ptr(), rows, n, eps, _dtype(x, "x"), _stream(x),
    )  # fmt: skip
    _check("rms_norm_quantize_fp8", code)
    return values, scales


def silu_and_mul_quantize(
    gate_up: torch.Tensor, gate_up_scales: Scales | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cuda.silu_and_mul` of gate_up [rows, 2 * n], quantised; n up to 32768."""
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    pointer = _expect(gate_up, "gate_up", gate_up.dtype)
    values, scales = _outputs(rows, n, gate_up.device)
    code = _functions().vb_silu_and_mul_quantize_fp8(
        pointer, *_scale_pointers(gate_up_scales, rows, 2 * n), values.data_ptr(), scales.data_ptr(), rows, n,
        _dtype(gate_up, "gate_up"), _stream(gate_up),
    )  # fmt: skip
    _check("silu_and_mul_quantize_fp8", code)
    return values, scales


def _scale_pointers(scales: Scales | None, rows: int, columns: int) -> tuple[int, int]:
    if scales is None:
        return 0, 0
    if scales[0].shape != (rows,) or scales[1].shape != (columns,):
        raise ValueError(
            f"the scales are {tuple(scales[0].shape)} and {tuple(scales[1].shape)}, not ({rows},) and ({columns},)"
        )
    return _expect(scales[0], "row scales", torch.float32), _expect(scales[1], "column scales", torch.float32)
