"""The compiled library of CUDA kernels (csrc/cuda/kernels.h): found or built, loaded once, and what its bindings share.

`ops/cuda.py` and the `ops/cuda_*.py` beside it each declare the functions that they call, see `c_functions` and
`bound`. They neither copy nor cast nor synchronise, so all of them can run under CUDA graph capture. A tensor that a
kernel cannot take (wrong dtype, device, layout) raises ValueError or TypeError that names it; what fails in the library
raises RuntimeError.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from ctypes import Structure, addressof
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from vllm_blend.ops import pointers as to
from vllm_blend.ops.c_functions import Cache, Int, Int32, Int64, Stream, bind, fields_of
from vllm_blend.ops.cuda_build import LIBRARY_NAME, build_for, is_built_from, sources_folder
from vllm_blend.ops.e4m3 import E4M3
from vllm_blend.ops.paged_kv import PagedKV

logger = logging.getLogger(__name__)

P = TypeVar("P")  # a role of pointers

LIBRARY_VARIABLE = "VLLM_BLEND_CUDA_LIBRARY"
HEAD_DIMS = (64, 80, 96, 128, 256)
VARIANTS = {"auto": 0, "mma": 1, "wgmma": 2}
DTYPES = {torch.float16: 0, torch.bfloat16: 1}  # VB_FP16, VB_BF16: of activations
CACHE_DTYPES = DTYPES | {E4M3: 3}  # VB_E4M3: of pages and chunks
_ERRORS = {
    -1: "head_dim is not supported",
    -2: "the dtype must be float16 or bfloat16, and that of the cache the same or float8_e4m3fn",
    -3: "block_size must be a power of two of at least 16",
    -4: "the number of query heads must be a multiple of the number of KV heads",
    -5: "this kernel variant does not run on this GPU",
    -6: "the workspace is too small",
    -7: "a pointer or stride is not a multiple of 16 bytes",
    -8: "the driver refused the tensor map of the cache",
    -9: "a size is out of range",
}


class CacheView(Structure):
    """A layer's cache as the kernels see it (VbCache)."""

    key: to.KeyCache
    value: to.ValueCache
    page_stride: Int64
    slot_stride: Int64
    head_stride: Int64
    num_blocks: Int32
    block_size: Int32
    kv_heads: Int32
    head_dim: Int32
    dtype: Int32
    _fields_ = fields_of(__annotations__)

    address: Cache  # of this structure
    activations: tuple[torch.dtype, ...]  # dtypes of the queries that it can be read with, and of K and V to write


class VariantFunctions(Protocol):
    def prefill_variant(self, head_dim: Int, variant: Int, /) -> Int: ...


def library_path() -> Path | None:
    """Return the library that has been built ahead: `VLLM_BLEND_CUDA_LIBRARY`, else build/cuda of the source tree (what
    scripts/build_cuda.sh makes), else the one installed with the package, if it is of these very sources.

    Builds nothing. Raises FileNotFoundError if the variable names no file.
    """
    forced = os.environ.get(LIBRARY_VARIABLE)
    if forced:
        if not Path(forced).is_file():
            raise FileNotFoundError(f"{LIBRARY_VARIABLE}={forced} is not a file: name the library, or unset it")
        return Path(forced)
    package = Path(__file__).resolve().parents[1]
    by_script, installed = package.parent / "build" / "cuda" / LIBRARY_NAME, package / LIBRARY_NAME
    if by_script.is_file():
        if not is_built_from(by_script, sources_folder()):
            logger.warning("%s was built from other sources than these: run scripts/build_cuda.sh again", by_script)
        return by_script
    return installed if installed.is_file() and is_built_from(installed, sources_folder()) else None


@cache
def unavailable_reason() -> str | None:
    """Return why the kernels cannot be used here, None if they can.

    On a machine with a CUDA device and no library yet, the first call builds it for that device (see `cuda_build`);
    when that fails it warns, once, and plain torch runs.
    """
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        library()
    except RuntimeError as error:
        logger.warning("plain torch runs instead of the CUDA kernels: %s", error)
        return str(error)
    return None


@cache
def is_available() -> bool:
    """Return whether the kernels can be used: a CUDA device, and the compiled library. See `unavailable_reason`."""
    return unavailable_reason() is None


@cache
def library() -> ctypes.CDLL:
    """Return the library, loaded, built first where there is none. Raises RuntimeError saying why it cannot be used."""
    try:
        path = library_path() or build_for(_capabilities())
    except OSError as error:
        raise RuntimeError(f"the CUDA kernels do not load: {error}") from error
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(f"the CUDA kernels do not load: {error} (delete {path} to have it built again)") from error
    functions: VariantFunctions = _bind(VariantFunctions, lib)
    code = functions.prefill_variant(HEAD_DIMS[0], VARIANTS["auto"])
    if code < min(_ERRORS):  # -100 - cudaError_t: the library's own CUDA runtime cannot work with the driver
        hint = " (the driver is older than the CUDA they were built with, or not there)" if code == -100 - 35 else ""
        raise RuntimeError(f"the CUDA kernels of {path} get CUDA error {-100 - code}{hint}: update the driver")
    return lib


def bound(declared: type) -> Callable[[], Any]:
    """Return what gives the functions of the library that this Protocol declares. The first call loads the library.

    Those that return an `Int` return 0 or an error for `check`.
    """
    return cache(lambda: _bind(declared, library()))


def _bind(declared: type, lib: ctypes.CDLL) -> Any:
    try:
        return bind(declared, lib, "vb_")
    except AttributeError as error:
        raise RuntimeError(
            f"{lib._name} was built from other sources ({error}): run scripts/build_cuda.sh again"
        ) from error


def _capabilities() -> list[tuple[int, int]]:
    return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


def check(name: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{name}: {_ERRORS.get(code, f'CUDA error {code}')}")


def stream_of(tensor: torch.Tensor) -> Stream:
    """Return the current stream of the tensor's device, on which its kernel is to run.

    Raises RuntimeError if another device is the current one: a kernel is launched on the current device, whatever the
    device of its tensors.
    """
    index = tensor.get_device()
    if index != torch._C._cuda_getDevice():
        raise RuntimeError(
            f"a CUDA kernel was called with tensors on cuda:{index}, but the current device of this thread is "
            f"cuda:{torch._C._cuda_getDevice()}: call it within torch.cuda.device({index})"
        )
    # The raw handle, as compiled torch code reads it: a Stream object costs microseconds, several times a layer.
    stream: Stream = torch._C._cuda_getCurrentRawStream(index)
    return stream


def dtype_code(tensor: torch.Tensor, name: str) -> int:
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} is {tensor.dtype}, but the CUDA kernels take float16 and bfloat16")
    return DTYPES[tensor.dtype]


def cache_dtype_code(tensor: torch.Tensor, name: str) -> int:
    if tensor.dtype not in CACHE_DTYPES:
        raise TypeError(f"{name} is {tensor.dtype}, but the CUDA kernels take float16, bfloat16 and float8_e4m3fn")
    return CACHE_DTYPES[tensor.dtype]


def expect(
    role: Callable[[torch.Tensor], P], tensor: torch.Tensor, name: str, dtype: torch.dtype, contiguous: bool = True
) -> P:
    """Return the pointer to a tensor of this dtype on a GPU, contiguous in its last dimension at least."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}, but must be {dtype}")
    if not tensor.is_cuda:
        raise ValueError(f"{name} is on {tensor.device}, but must be on a CUDA device")
    if not (tensor.is_contiguous() if contiguous else tensor.stride(-1) == 1):
        raise ValueError(f"{name} must be contiguous")
    return role(tensor)


def rows_of(role: Callable[[torch.Tensor], P], tensor: torch.Tensor, name: str, dtype: torch.dtype) -> P:
    """Do as `expect` for [tokens, heads, head_dim] whose tokens may be strided (a slice of a packed projection)."""
    pointer = expect(role, tensor, name, dtype, contiguous=False)
    if tensor.dim() != 3 or (tensor.stride(1) != tensor.shape[2] and tensor.shape[0] * (tensor.shape[1] - 1) > 0):
        raise ValueError(f"{name} must be [tokens, heads, head_dim] with contiguous heads")
    return pointer


def rows_for(role: Callable[[torch.Tensor], P], tensor: torch.Tensor, name: str, view: CacheView) -> P:
    """Do as `rows_of` for what a cache is read with, or for what is written to it."""
    if tensor.dtype not in view.activations:
        raise TypeError(f"{name} is {tensor.dtype}, but must be {' or '.join(map(str, view.activations))}")
    return rows_of(role, tensor, name, tensor.dtype)


def cache_view(kv: PagedKV) -> CacheView:
    """Return the C view of a layer's cache, kept with it: layers ask for the same few over and over."""
    if kv.cuda_view is None:
        kv.cuda_view = _make_cache(kv.key, kv.value)
    assert isinstance(kv.cuda_view, CacheView)
    return kv.cuda_view


def _make_cache(key: torch.Tensor, value: torch.Tensor) -> CacheView:
    if key.shape != value.shape or key.stride() != value.stride() or key.dim() != 4:
        raise ValueError("key and value caches must be [num_blocks, block_size, kv_heads, head_dim] with equal strides")
    k = expect(to.KeyCache, key, "key cache", key.dtype, False)
    v = expect(to.ValueCache, value, "value cache", key.dtype, False)
    blocks, block_size, kv_heads, head_dim = key.shape
    dtype = cache_dtype_code(key, "key cache")
    view = CacheView(k, v, *key.stride()[:3], blocks, block_size, kv_heads, head_dim, dtype)
    view.address, view.activations = Cache(addressof(view)), tuple(DTYPES) if key.dtype is E4M3 else (key.dtype,)
    return view
