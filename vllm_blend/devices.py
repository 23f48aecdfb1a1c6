"""On which device and in which precision a model runs."""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path

import torch

from vllm_blend.checks import require
from vllm_blend.ops.e4m3 import E4M3

logger = logging.getLogger(__name__)

FP8_CACHE_DTYPES = ("fp8", "fp8_e4m3")  # names of one: vLLM has both
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")  # exists while the kernel's part of the driver is loaded
_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


def resolve_device(device: str | torch.device) -> torch.device:
    """Return a device by name; 'auto' is the first CUDA device if there is one, the CPU otherwise.

    Raises ValueError for a device that cannot be used, with the reason.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu" and NVIDIA_DRIVER.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
            _warn_of_unusable_gpu()
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:  # a name that torch does not know, or no name
        raise ValueError(f"device={device!r} is unknown: use 'auto', 'cpu' or 'cuda'") from error
    require(resolved.type in ("cpu", "cuda"), f"device={device!r} is not supported: use 'auto', 'cpu' or 'cuda'")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={device!r} was asked for, but torch sees no CUDA device ({_why_no_cuda()}): use device='cpu', or "
            "install CUDA"
        )
    if resolved.type == "cuda" and resolved.index is not None:
        count = torch.cuda.device_count()
        require(resolved.index < count, f"device={device!r}: torch sees {count} CUDA devices, counted from 0")
    return resolved


@cache
def _warn_of_unusable_gpu() -> None:
    """Warn once: this machine has a driver, so its user may expect the GPU to be used."""
    logger.warning("the engine runs on the CPU, as torch cannot use a GPU here: %s", _why_no_cuda())


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    try:
        torch.cuda.init()
    except RuntimeError as error:  # the driver is missing, broken, or too old for this torch
        return str(error).strip()
    return "there is none"


def resolve_dtype(dtype: str | torch.dtype, checkpoint_dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the dtype of the weights.

    'auto' is the checkpoint's dtype on a GPU (bfloat16 for float32 checkpoints: half the memory serves as well). On a
    CPU with products of bfloat16 it is bfloat16 for checkpoints of 16 bits: no instruction set that is common computes
    in float16, whose numbers bfloat16 rounds but never overflows. Everywhere else it is float32.
    """
    if isinstance(dtype, torch.dtype):
        require(dtype in _DTYPES.values(), f"dtype={dtype} is not supported: use one of {sorted(_DTYPES)}")
        return dtype
    if dtype == "auto":
        if device.type == "cpu":
            half = checkpoint_dtype in (torch.bfloat16, torch.float16) and multiplies_bfloat16()
            return torch.bfloat16 if half else torch.float32
        return torch.bfloat16 if checkpoint_dtype in (None, torch.float32) else checkpoint_dtype
    require(dtype in _DTYPES, f"dtype={dtype!r} is unknown: use 'auto' or one of {sorted(_DTYPES)}")
    return _DTYPES[dtype]


def multiplies_bfloat16() -> bool:
    """Return whether this CPU has products of bfloat16 (AVX512-BF16; all with AMX-BF16 have it) that torch uses."""
    has_products: bool = torch.cpu._is_avx512_bf16_supported()
    return has_products and torch.backends.mkldnn.is_available()


def resolve_cache_dtype(asked: str, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the KV cache of a model that runs in `model_dtype`. Raises ValueError for one that it cannot
    have."""
    if asked in FP8_CACHE_DTYPES:
        return E4M3
    own = str(model_dtype).removeprefix("torch.")
    require(
        asked in ("auto", own),
        f"kv_cache_dtype={asked!r}, but the model runs in {own}: give dtype={asked!r} too, or leave kv_cache_dtype at "
        "'auto', or give 'fp8'",
    )
    return model_dtype
