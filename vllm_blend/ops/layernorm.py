"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_blend.ops import cpu, cuda
from vllm_blend.ops import pointers as to
from vllm_blend.ops.bindings import DTYPE_CODES, kernels_for, raise_status
from vllm_blend.ops.cuda_library import DTYPES, check, expect, stream_of


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x [..., n] normalised over its last dimension in float32, times weight [n]."""
    return fused_add_rms_norm(x, None, weight, eps)[0]


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual); the sum may take the place of `residual`. Without a residual, the
    sum is x."""
    if cuda.accepts(x, x.shape[-1]):
        return _on_gpu(x.contiguous(), residual, weight, eps)
    fits = weight.dtype == x.dtype and weight.shape == x.shape[-1:] and weight.is_contiguous()
    kernels = kernels_for(x) if fits else None
    if kernels is None or (residual is not None and (residual.dtype != x.dtype or residual.shape != x.shape)):
        return fused_add_rms_norm_reference(x, residual, weight, eps)
    n = x.shape[-1]
    if x.dim() == 2 and x.stride(1) == 1:
        stride = x.stride(0)
    else:
        x, stride = x.contiguous(), n
    out, total = torch.empty_like(x, memory_format=cpu.CONTIGUOUS), x
    total_pointer = residual_pointer = None
    if residual is not None:
        residual = residual.contiguous()
        total = torch.empty_like(x, memory_format=cpu.CONTIGUOUS)
        total_pointer, residual_pointer = to.Sum(total), to.Residual(residual)
    status = kernels.rms_norm(
        to.Out(out), total_pointer, to.Input(x), residual_pointer, to.Weight(weight), x.numel() // n if n else 0,
        n, stride, eps, DTYPE_CODES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "rms_norm")
    return out, total


def _on_gpu(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, n = x.dtype, x.shape[-1]
    if not (
        weight.dtype == dtype
        and weight.is_contiguous()
        and weight.is_cuda
        and (residual is None or (residual.dtype == dtype and residual.is_contiguous() and residual.is_cuda))
    ):
        expect(to.Weight, weight, "weight", dtype)
        if residual is not None:
            expect(to.Residual, residual, "residual", dtype)
    out = torch.empty_like(x)
    code = cuda.functions().rms_norm(
        to.Input(x), None if residual is None else to.Residual(residual), to.Weight(weight), to.Out(out),
        x.numel() // n, n, eps, DTYPES[dtype], stream_of(x),
    )  # fmt: skip
    if code:
        check("rms_norm", code)
    return out, x if residual is None else residual


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    # Cast before the product with the weight, as Hugging Face's Llama does: parity in bf16 depends on it.
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight


def fused_add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual = x if residual is None else x + residual
    return rms_norm_reference(residual, weight, eps), residual
