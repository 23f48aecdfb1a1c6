"""The attention backends by name: how each is made, what rules it out, and which of them `"auto"` takes.

`"auto"` takes the first of `AUTO` that works here. The order is that of measured tables. On an H200
(benchmarks/results/h200_kernels.md, "Backends") our CUDA kernels were the fastest at dense prefill, scattered prefill
and decoding, FlashInfer came next, and plain torch was ahead of xformers in two of the three. On CPUs with AVX2 or
AVX-512 our kernels were faster than plain torch in each of 99 comparisons (float32, bfloat16 and float16, 3 to 5 head
layouts, all three jobs). Compiled for no instruction set they decode faster, and prefill in up to 1.6 times the time of
plain torch in float32 and bfloat16: `"torch_native"` is worth a try on such a machine.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from vllm_blend.attention.cpu import CPUBackend
from vllm_blend.attention.cuda import CUDABackend
from vllm_blend.attention.flashinfer import HEAD_DIMS as FLASHINFER_HEAD_DIMS
from vllm_blend.attention.flashinfer import FlashInferBackend
from vllm_blend.attention.metadata import AttentionBackend
from vllm_blend.attention.self_check import HeadLayout, agree
from vllm_blend.attention.torch_native import TorchNativeBackend
from vllm_blend.attention.xformers import XFormersBackend
from vllm_blend.ops import cuda_library
from vllm_blend.registry import Registry

logger = logging.getLogger(__name__)

AUTO = ("cpu", "cuda", "flashinfer", "torch_native")


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
    takes_sinks: bool = False
    takes_fp8_cache: bool = False


class Unusable(RuntimeError):
    """A backend that cannot be used here, and why. `missing`: its package is simply not installed."""

    def __init__(self, reason: str, missing: bool = False) -> None:
        super().__init__(reason)
        self.missing = missing


def make_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    num_heads: int = 8,
    num_kv_heads: int = 8,
    decode_graphs: bool = False,
    sinks: bool = False,
    fp8_cache: bool = False,
) -> AttentionBackend:
    """Return the backend called `name`; 'auto' is the first of `AUTO` that works here.

    With `sinks` the model has attention sinks, with `fp8_cache` the pages hold e4m3. With `decode_graphs` the engine
    wants to capture decode steps: a line of the log says where the backend cannot be. Raises ValueError for an unknown
    name or one that does not fit device, dtype, head size, sinks or pages, ImportError for one that is not installed or
    not built, and RuntimeError for one that does not work: with the reason and what to do.
    """
    layout = HeadLayout(device, dtype, num_heads, num_kv_heads, head_dim, sinks, fp8_cache)
    backend = KINDS[first_usable(layout)].make(layout) if name == "auto" else _make_named(name, layout)
    if decode_graphs and not backend.capturable_decode:
        logger.info("decoding runs without CUDA graphs: the attention backend %s cannot be captured", backend.name)
    return backend


@cache
def first_usable(layout: HeadLayout) -> str:
    """Return the first of `AUTO` that works; the log says why those before it do not. Asking again costs nothing."""
    reasons: dict[str, str] = {}
    for name in AUTO:
        reason = _why_not(name, layout)
        if reason is None:
            break
        reasons[name] = reason
    if layout.device.type == "cuda":
        torch.cuda.empty_cache()  # the KV cache is sized by what is free
    if layout.device.type in reasons:  # ours are called by the device that they run on
        where = "in plain torch" if name == "torch_native" else "without our kernels"
        logger.warning("attention runs %s: %s", where, reasons[layout.device.type])
    return name


def _why_not(name: str, layout: HeadLayout) -> str | None:
    """Return why a backend cannot be used, None if it can; log it where its package is missing or broken."""
    kind = KINDS[name]
    unfit = _unfit(kind, layout)
    if unfit is not None:
        return unfit
    try:
        make_usable(name, layout)
    except Unusable as error:
        if kind.package is not None:
            level = logging.INFO if error.missing else logging.WARNING
            logger.log(level, "attention backend %s is left out: %s", name, error)
        return str(error)
    return None


def make_usable(name: str, layout: HeadLayout) -> AttentionBackend:
    """Return a backend that was made and has computed a small step on this device, as plain torch does.

    Importing is not enough: a package may import and have no operators for this torch, or compile its kernels only when
    they are needed. Raises `Unusable`.
    """
    kind = KINDS[name]
    try:
        if kind.package is not None:
            importlib.import_module(kind.package)
        backend = kind.make(layout)
        agrees = agree(backend, TorchNativeBackend(), layout)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a broken package may raise anything, from OSError (a library) to SystemExit
        if isinstance(error, ModuleNotFoundError) and kind.package is not None and error.name == kind.package:
            raise Unusable(f"{kind.package} is not installed", missing=True) from error
        raise Unusable(f"{kind.package or 'it'} does not work here: {_one_line(error)}") from error
    if not agrees:
        raise Unusable(f"{kind.package or 'it'} computes something else than plain torch here")
    return backend


def _make_named(name: str, layout: HeadLayout) -> AttentionBackend:
    kind = KINDS.find(name)
    unfit = _unfit(kind, layout)
    if unfit is not None:
        raise ValueError(f"attention_backend={name!r} cannot serve this: {unfit}; use 'auto' or 'torch_native'")
    if kind.package is None:  # ours: what they raise says what to do
        return kind.make(layout)
    try:
        return make_usable(name, layout)
    except Unusable as error:
        raised = ImportError if error.missing else RuntimeError
        raise raised(f"attention_backend={name!r}: {error}. To fix it, {kind.fix}; or use 'auto'") from error


def _one_line(error: BaseException) -> str:
    """Return an exception in one line: libraries say what failed in the first of theirs, and often why in the last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return f"{type(error).__name__}: {text[:400]}"


def _unfit(kind: Kind, layout: HeadLayout) -> str | None:
    if (unfit := kind.unfit(layout)) is not None:
        return unfit
    if layout.sinks and not kind.takes_sinks:
        return "it knows no attention sinks, which this model has"
    if layout.fp8_cache and not kind.takes_fp8_cache:
        return "it reads no FP8 KV cache"
    return None


def _unfit_for_cpu(layout: HeadLayout) -> str | None:
    return None if layout.device.type == "cpu" else f"it does not run on {layout.device.type}"


def _unfit_for_half(kernels: str, layout: HeadLayout, head_dims: tuple[int, ...] | None) -> str | None:
    if layout.device.type != "cuda":
        return f"it does not run on {layout.device.type}"
    if layout.dtype not in (torch.float16, torch.bfloat16):
        return f"{kernels} take float16 and bfloat16, not {layout.dtype}"
    if head_dims is not None and layout.head_dim not in head_dims:
        return f"{kernels} know head sizes {head_dims}, not {layout.head_dim}"
    capability = torch.cuda.get_device_capability(layout.device)
    return None if capability >= (8, 0) else f"the GPU's compute capability {capability} is below 8.0"


_BUILT_IN = {
    "cpu": Kind(
        lambda layout: CPUBackend(),
        _unfit_for_cpu,
        "build the CPU kernels with `pip install -e .`",
        takes_sinks=True,
        takes_fp8_cache=True,
    ),
    "cuda": Kind(
        lambda layout: CUDABackend(),
        lambda layout: _unfit_for_half("the CUDA kernels", layout, cuda_library.HEAD_DIMS),
        "build the CUDA kernels with scripts/build_cuda.sh",
        takes_fp8_cache=True,
    ),
    "flashinfer": Kind(
        lambda layout: FlashInferBackend(layout.device),
        lambda layout: _unfit_for_half("FlashInfer's kernels", layout, FLASHINFER_HEAD_DIMS),
        "install flashinfer-python, and nvcc and ninja, with which it compiles its kernels (or flashinfer-jit-cache)",
        "flashinfer",
    ),
    "xformers": Kind(
        lambda layout: XFormersBackend(),
        lambda layout: _unfit_for_half("xformers' kernels", layout, None),
        "install an xformers that was built for this torch and CUDA",
        "xformers",
    ),
    "torch_native": Kind(
        lambda layout: TorchNativeBackend(),
        lambda layout: None,
        "report this",
        takes_sinks=True,
        takes_fp8_cache=True,
    ),
}
KINDS: Registry[Kind] = Registry(
    "attention backend", "attention_backend", _BUILT_IN, aliases={"auto": "the first of AUTO"}
)
