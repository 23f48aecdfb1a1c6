"""The attention backends by name, and which of them 'auto' takes."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from vllm_blend.attention.metadata import AttentionBackend
from vllm_blend.attention.torch_native import TorchNativeBackend

logger = logging.getLogger(__name__)


def _cpu() -> AttentionBackend:
    from vllm_blend.attention.cpu import CPUBackend

    return CPUBackend()


def _cuda() -> AttentionBackend:
    from vllm_blend.attention.cuda import CUDABackend

    return CUDABackend()


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"torch_native": TorchNativeBackend, "cpu": _cpu, "cuda": _cuda}


def make_backend(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    """The backend called `name`; 'auto' is the compiled kernels of the device where they fit, plain torch otherwise.

    Raises ValueError for an unknown name or one that does not fit device, dtype or head size, and ImportError or
    RuntimeError when a forced one is not built.
    """
    if name == "auto":
        reason = _why_not_compiled(device, dtype, head_dim)
        if reason is not None:
            logger.warning("attention runs in plain torch: %s", reason)
        name = "torch_native" if reason is not None else device.type
    if name not in BACKENDS:
        raise ValueError(f"attention_backend={name!r} is unknown: use 'auto' or one of {sorted(BACKENDS)}")
    if name != "torch_native":
        if name != device.type:
            raise ValueError(f"attention_backend={name!r} does not run on {device.type}: use 'auto' or 'torch_native'")
        if name == "cuda":
            unfit = _why_not_cuda(dtype, head_dim)
            if unfit is not None:
                raise ValueError(f"attention_backend='cuda' cannot serve this model: {unfit}")
    return BACKENDS[name]()


def _why_not_compiled(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if device.type == "cpu":
        from vllm_blend.ops.bindings import cpu_kernels_available

        return None if cpu_kernels_available() else "the compiled CPU kernels are not available"
    from vllm_blend.ops import cuda

    if not cuda.is_available():
        return "the compiled CUDA kernels are not available"  # why not has been logged
    return _why_not_cuda(dtype, head_dim)


def _why_not_cuda(dtype: torch.dtype, head_dim: int) -> str | None:
    from vllm_blend.ops import cuda

    if dtype not in (torch.float16, torch.bfloat16):
        return f"the CUDA kernels take float16 and bfloat16, not {dtype}"
    if head_dim not in cuda.HEAD_DIMS:
        return f"the CUDA kernels know head sizes {cuda.HEAD_DIMS}, not {head_dim}"
    capability = torch.cuda.get_device_capability()
    return None if capability >= (8, 0) else f"the GPU's compute capability {capability} is below 8.0"
