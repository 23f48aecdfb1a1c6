"""The attention backends by name, and which of them 'auto' takes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_blend.attention.metadata import AttentionBackend
from vllm_blend.attention.torch_native import TorchNativeBackend


def _cpu() -> AttentionBackend:
    from vllm_blend.attention.cpu import CPUBackend

    return CPUBackend()


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"torch_native": TorchNativeBackend, "cpu": _cpu}


def make_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend called `name`; 'auto' is the compiled CPU kernels where they are built, plain torch otherwise.

    Raises ValueError for an unknown name or one that does not fit the device, ImportError when a forced one is not
    built.
    """
    if name == "auto":
        from vllm_blend.ops.bindings import cpu_kernels_available

        name = "cpu" if device.type == "cpu" and cpu_kernels_available() else "torch_native"
    if name not in BACKENDS:
        raise ValueError(f"attention_backend={name!r} is unknown: use 'auto' or one of {sorted(BACKENDS)}")
    if name == "cpu" and device.type != "cpu":
        raise ValueError(
            f"attention_backend='cpu' runs on the CPU, the engine on {device}: use 'auto' or 'torch_native'"
        )
    return BACKENDS[name]()
