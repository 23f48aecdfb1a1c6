"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_blend.ops import cpu, cuda
from vllm_blend.ops.bindings import CPUKernels, kernels_for


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., n] normalised over its last dimension in float32, times weight [n]."""
    if cuda.takes(x, x.shape[-1]):
        return cuda.rms_norm(x.contiguous(), weight, eps)
    kernels = _kernels(x, weight)
    if kernels is not None:
        return cpu.rms_norm(kernels, x, None, weight, eps)[0]
    return rms_norm_reference(x, weight, eps)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual); the sum may take the place of `residual`."""
    if cuda.takes(x, x.shape[-1]):
        return cuda.rms_norm(x.contiguous(), weight, eps, residual), residual
    kernels = _kernels(x, weight)
    if kernels is not None and residual.dtype == x.dtype and residual.shape == x.shape:
        normed, total = cpu.rms_norm(kernels, x, residual, weight, eps)
        assert total is not None
        return normed, total
    return fused_add_rms_norm_reference(x, residual, weight, eps)


def _kernels(x: torch.Tensor, weight: torch.Tensor) -> CPUKernels | None:
    fits = weight.dtype == x.dtype and weight.shape == x.shape[-1:] and weight.is_contiguous()
    return kernels_for(x) if fits else None


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    # Cast before the product with the weight, as Hugging Face's Llama does: parity in bf16 depends on it.
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight


def fused_add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual = x + residual
    return rms_norm_reference(residual, weight, eps), residual
