"""The attention backends by name: how each is made, what rules it out, and whether it works on this machine."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_blend.attention.measure import HeadLayout, Workload
from vllm_blend.attention.metadata import AttentionBackend
from vllm_blend.attention.torch_native import TorchNativeBackend


@dataclass(frozen=True)
class Kind:
    """How to make a backend, and what rules it out before it is tried (device, dtype, head size; None: nothing does).

    `make` raises when the backend is not built or not installed. `package` is the optional package that it needs;
    `fix` says what to do when it does not work.
    """

    make: Callable[[HeadLayout], AttentionBackend]
    unfit: Callable[[HeadLayout], str | None]
    fix: str
    package: str | None = None


class Unusable(RuntimeError):
    """A backend that cannot be used here, and why. `missing`: its package is simply not installed."""

    def __init__(self, reason: str, missing: bool = False) -> None:
        super().__init__(reason)
        self.missing = missing


def usable(name: str, layout: HeadLayout, workload: Workload | None = None) -> AttentionBackend:
    """A backend that was made and has computed a small step on this device, as plain torch does. Raises `Unusable`.

    Importing is not enough: a package may import and have no operators for this torch, or compile its kernels only when
    they are needed.
    """
    kind = KINDS[name]
    try:
        if kind.package is not None:
            importlib.import_module(kind.package)
        backend = kind.make(layout)
        agrees = (workload or Workload.make(layout)).agrees(backend, TorchNativeBackend())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a broken package may raise anything, from OSError (a library) to SystemExit
        if isinstance(error, ModuleNotFoundError) and kind.package is not None and error.name == kind.package:
            raise Unusable(f"{kind.package} is not installed", missing=True) from error
        raise Unusable(f"{kind.package or 'it'} does not work here: {describe(error)}") from error
    if not agrees:
        raise Unusable(f"{kind.package or 'it'} computes something else than plain torch here")
    return backend


def describe(error: BaseException) -> str:
    """An exception in one line: libraries say what failed in the first of theirs, and often why in the last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return f"{type(error).__name__}: {text[:400]}"


def _cpu(layout: HeadLayout) -> AttentionBackend:
    from vllm_blend.attention.cpu import CPUBackend

    return CPUBackend()


def _cuda(layout: HeadLayout) -> AttentionBackend:
    from vllm_blend.attention.cuda import CUDABackend

    return CUDABackend()


def _flashinfer(layout: HeadLayout) -> AttentionBackend:
    from vllm_blend.attention.flashinfer import FlashInferBackend

    return FlashInferBackend(layout.device)


def _xformers(layout: HeadLayout) -> AttentionBackend:
    from vllm_blend.attention.xformers import XFormersBackend

    return XFormersBackend()


def _unfit_for_cpu(layout: HeadLayout) -> str | None:
    return None if layout.device.type == "cpu" else f"it does not run on {layout.device.type}"


def _unfit_for_half(who: str, layout: HeadLayout, head_dims: tuple[int, ...] | None) -> str | None:
    if layout.device.type != "cuda":
        return f"it does not run on {layout.device.type}"
    if layout.dtype not in (torch.float16, torch.bfloat16):
        return f"{who} take float16 and bfloat16, not {layout.dtype}"
    if head_dims is not None and layout.head_dim not in head_dims:
        return f"{who} know head sizes {head_dims}, not {layout.head_dim}"
    capability = torch.cuda.get_device_capability(layout.device)
    return None if capability >= (8, 0) else f"the GPU's compute capability {capability} is below 8.0"


def _unfit_for_cuda(layout: HeadLayout) -> str | None:
    from vllm_blend.ops import cuda_library

    return _unfit_for_half("the CUDA kernels", layout, cuda_library.HEAD_DIMS)


def _unfit_for_flashinfer(layout: HeadLayout) -> str | None:
    from vllm_blend.attention.flashinfer import HEAD_DIMS

    return _unfit_for_half("FlashInfer's kernels", layout, HEAD_DIMS)


KINDS: dict[str, Kind] = {  # in order of preference, where times are equal
    "cpu": Kind(_cpu, _unfit_for_cpu, "build the CPU kernels with `pip install -e .`"),
    "cuda": Kind(_cuda, _unfit_for_cuda, "build the CUDA kernels with scripts/build_cuda.sh"),
    "flashinfer": Kind(
        _flashinfer,
        _unfit_for_flashinfer,
        "install flashinfer-python, and nvcc and ninja, with which it compiles its kernels (or flashinfer-jit-cache)",
        "flashinfer",
    ),
    "xformers": Kind(
        _xformers,
        lambda layout: _unfit_for_half("xformers' kernels", layout, None),
        "install an xformers that was built for this torch and CUDA",
        "xformers",
    ),
    "torch_native": Kind(lambda layout: TorchNativeBackend(), lambda layout: None, "report this"),
}
