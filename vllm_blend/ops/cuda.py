"""Bindings of the CUDA kernels (csrc/cuda/kernels.h) on torch tensors, by ctypes: pointers, strides, current stream.

Nothing here copies, casts or synchronises, so every function can run under CUDA graph capture. A tensor a kernel cannot
take (wrong dtype, device, layout) raises ValueError or TypeError that names it; what fails in the library raises
RuntimeError. A paged cache is a pair of tensors [num_blocks, block_size, kv_heads, head_dim] of the same strides.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Sequence
from ctypes import Structure, addressof, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
import torch

from vllm_blend.ops.cuda_build import LIBRARY_NAME, build_for, is_built_from, sources_folder

logger = logging.getLogger(__name__)

LIBRARY_VARIABLE = "VLLM_BLEND_CUDA_LIBRARY"
HEAD_DIMS = (64, 80, 96, 128, 256)
VARIANTS = {"auto": 0, "mma": 1, "wgmma": 2}
_DTYPES = {torch.float16: 0, torch.bfloat16: 1}
_ERRORS = {
    -1: "head_dim is not supported",
    -2: "the dtype must be float16 or bfloat16",
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

    _fields_ = (
        [(n, c_void_p) for n in ("key", "value")]
        + [(n, c_int64) for n in ("page_stride", "slot_stride", "head_stride")]
        + [(n, c_int32) for n in ("num_blocks", "block_size", "kv_heads", "head_dim", "dtype")]
    )
    address: int  # of this structure
    torch_dtype: torch.dtype


_P, _I, _L, _F = c_void_p, c_int, c_int64, c_float
_SIGNATURES = {
    "vb_prefill_variant": (_I, _I),
    "vb_place_chunk": (_P, _P, _L, _L, _P, _P, _P, _P, _P, _L, _L, _L, _I, _I, _I, _I, _I, _I, _I, _P),
    "vb_reshape_and_cache": (_P, _P, _L, _L, _P, _P, _P, _L, _L, _L, _I, _I, _I, _I, _I, _P),
    "vb_rope_and_cache": (_P, _L, _P, _P, _P, _P, _P, _P, _L, _L, _L, _I, _I, _I, _I, _I, _I, _I, _P),
    "vb_norm_rope_and_cache": (_P, _L, _P, _P, _F, *(_P,) * 6, _L, _L, _L, *(_I,) * 7, _P),
    "vb_rms_norm": (_P, _P, _P, _P, _L, _I, _F, _I, _P),
    "vb_silu_and_mul": (_P, _P, _L, _I, _I, _P),
    "vb_kv_deviation": (_P, _L, _P, _P, _P, _L, _L, _L, _P, _I, _I, _I, _I, _I, _P),
    "vb_copy_pieces": (_P, _I, _I, _I, _P, _P, _P),
}


def library_path() -> Path | None:
    """The library that has been built ahead: `VLLM_BLEND_CUDA_LIBRARY`, else build/cuda of the source tree (what
    scripts/build_cuda.sh makes), else the one installed with the package, if it is of these very sources.

    Builds nothing. Raises FileNotFoundError where the variable names no file.
    """
    forced = os.environ.get(LIBRARY_VARIABLE)
    if forced:
        if not Path(forced).is_file():
            raise FileNotFoundError(f"{LIBRARY_VARIABLE}={forced} is no file: name the library, or unset it")
        return Path(forced)
    package = Path(__file__).resolve().parents[1]
    by_script, installed = package.parent / "build" / "cuda" / LIBRARY_NAME, package / LIBRARY_NAME
    if by_script.is_file():
        if not is_built_from(by_script, sources_folder()):
            logger.warning("%s was built from other sources than these: run scripts/build_cuda.sh again", by_script)
        return by_script
    return installed if installed.is_file() and is_built_from(installed, sources_folder()) else None


def takes(tensor: torch.Tensor, *sizes: int) -> bool:
    """Whether the compiled kernels can work on `tensor`; otherwise the op's torch twin is the one to run.

    `sizes`: numbers of channels that a kernel reads in units of 16 bytes, so it takes multiples of 8 only.
    """
    if not (tensor.is_cuda and tensor.dtype in _DTYPES and is_available()):
        return False
    for size in sizes:
        if size % 8:
            _warn_of_size(size)
            return False
    return True


@cache
def _warn_of_size(size: int) -> None:
    logger.warning("plain torch runs where %d channels lie together: the CUDA kernels take multiples of 8", size)


@cache
def unavailable_reason() -> str | None:
    """Why the kernels cannot be used here, None where they can.

    On a machine with a CUDA device and no library yet, the first call builds it for that device (see `cuda_build`);
    when that fails it warns, once, and plain torch runs.
    """
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        _library()
    except RuntimeError as error:
        logger.warning("plain torch runs instead of the CUDA kernels: %s", error)
        return str(error)
    return None


@cache
def is_available() -> bool:
    """Whether the kernels can be used: a CUDA device, and the compiled library. See `unavailable_reason`."""
    return unavailable_reason() is None


@cache
def _library() -> ctypes.CDLL:
    """The library, loaded, built first where there is none. Raises RuntimeError saying why it cannot be used."""
    try:
        path = library_path() or build_for(_capabilities())
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(f"the CUDA kernels do not load: {error}") from error
    try:
        for name, arguments in _SIGNATURES.items():
            function = getattr(lib, name)
            function.argtypes, function.restype = arguments, c_int
    except AttributeError as error:
        raise RuntimeError(f"{path} was built from other sources ({error}): run scripts/build_cuda.sh again") from error
    code = lib.vb_prefill_variant(HEAD_DIMS[0], VARIANTS["auto"])
    if code < min(_ERRORS):  # -100 - cudaError_t: the library's own CUDA runtime cannot work with the driver
        hint = " (the driver is older than the CUDA they were built with, or not there)" if code == -100 - 35 else ""
        raise RuntimeError(f"the CUDA kernels of {path} get CUDA error {-100 - code}{hint}: update the driver")
    return lib


def _capabilities() -> list[tuple[int, int]]:
    return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


def _check(name: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{name}: {_ERRORS.get(code, f'CUDA error {code}')}")


def _stream(tensor: torch.Tensor) -> int:
    # The raw handle, as compiled torch code reads it: a Stream object costs microseconds, several times a layer.
    stream: int = torch._C._cuda_getCurrentRawStream(tensor.get_device())
    return stream


def _dtype(tensor: torch.Tensor, name: str) -> int:
    if tensor.dtype not in _DTYPES:
        raise TypeError(f"{name} is {tensor.dtype}, but the CUDA kernels take float16 and bfloat16")
    return _DTYPES[tensor.dtype]


def _expect(tensor: torch.Tensor, name: str, dtype: torch.dtype, contiguous: bool = True) -> int:
    """The data pointer of a tensor of this dtype on a GPU, contiguous in its last dimension at least."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}, but must be {dtype}")
    if not tensor.is_cuda:
        raise ValueError(f"{name} is on {tensor.device}, but must be on a CUDA device")
    if not (tensor.is_contiguous() if contiguous else tensor.stride(-1) == 1):
        raise ValueError(f"{name} must be contiguous")
    return tensor.data_ptr()


def _rows(tensor: torch.Tensor, name: str, dtype: torch.dtype) -> int:
    """As `_expect` for [tokens, heads, head_dim] whose tokens may be strided (a slice of a packed projection)."""
    pointer = _expect(tensor, name, dtype, contiguous=False)
    if tensor.dim() != 3 or (tensor.stride(1) != tensor.shape[2] and tensor.shape[0] * (tensor.shape[1] - 1) > 0):
        raise ValueError(f"{name} must be [tokens, heads, head_dim] with contiguous heads")
    return pointer


_Known = tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor], CacheView]
_CACHES: dict[tuple[int, int], _Known] = {}


def cache_view(key: torch.Tensor, value: torch.Tensor) -> CacheView:
    """The C view of a layer's cache, remembered by object: layers ask for the same few over and over."""
    identity = (id(key), id(value))
    known = _CACHES.get(identity)
    if known is not None and known[0]() is key and known[1]() is value:
        return known[2]
    if len(_CACHES) > 1024:  # engines come and go
        _CACHES.clear()
    made = _make_cache(key, value)
    _CACHES[identity] = (weakref.ref(key), weakref.ref(value), made)
    return made


def _make_cache(key: torch.Tensor, value: torch.Tensor) -> CacheView:
    if key.shape != value.shape or key.stride() != value.stride() or key.dim() != 4:
        raise ValueError("key and value caches must be [num_blocks, block_size, kv_heads, head_dim] with equal strides")
    k, v = _expect(key, "key cache", key.dtype, False), _expect(value, "value cache", key.dtype, False)
    blocks, block_size, kv_heads, head_dim = key.shape
    view = CacheView(k, v, *key.stride()[:3], blocks, block_size, kv_heads, head_dim, _dtype(key, "key cache"))
    view.address, view.torch_dtype = addressof(view), key.dtype
    return view


def cache_pointers(caches: list[torch.Tensor]) -> torch.Tensor:
    """The addresses of per-layer caches on their device, for `place_chunks`. Made once: this copies to the device."""
    return torch.tensor([c.data_ptr() for c in caches], dtype=torch.int64, device=caches[0].device)


def place_chunks(
    chunks: Sequence[tuple[torch.Tensor, torch.Tensor]],
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_pointers: torch.Tensor,
    value_pointers: torch.Tensor,
    layer_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`ops.place_chunks` over per-layer caches: k (before RoPE), v [layers, tokens, kv_heads, head_dim] of each; cos,
    sin [all tokens, rotary_dim / 2] float32 at the target positions; key_pointers, value_pointers from
    `cache_pointers`; layer_cache: any layer's key cache, whose shape and strides all share. Negative slots are
    skipped."""
    if cos.shape != sin.shape or len(cos) != sum(k.shape[1] for k, _ in chunks) or len(slot_mapping) != len(cos):
        raise ValueError("cos, sin and slot_mapping must have a row for each token of the chunks")
    at_cos, at_sin = _expect(cos, "cos", torch.float32), _expect(sin, "sin", torch.float32)
    at_slots = _expect(slot_mapping, "slot_mapping", torch.int64)
    caches = (
        _expect(key_pointers, "key_pointers", torch.int64), _expect(value_pointers, "value_pointers", torch.int64)
    )  # fmt: skip
    strides, half, block_size = layer_cache.stride()[:3], cos.shape[-1], layer_cache.shape[1]
    dtype, stream, launch = _dtype(layer_cache, "layer_cache"), _stream(layer_cache), _library().vb_place_chunk
    start = 0
    for k, v in chunks:  # by addresses: a slice of each tensor for each chunk takes longer than the launch
        layers, tokens, kv_heads, head_dim = k.shape
        if k.stride() != v.stride() or k.stride(2) != head_dim or k.stride(3) != 1:
            raise ValueError("k and v must have equal strides and contiguous heads")
        code = launch(
            _expect(k, "k", layer_cache.dtype, False), _expect(v, "v", layer_cache.dtype, False), k.stride(0),
            k.stride(1), at_cos + start * half * 4, at_sin + start * half * 4, *caches, at_slots + start * 8, *strides,
            layers, tokens, kv_heads, head_dim, half, block_size, dtype, stream,
        )  # fmt: skip
        if code:
            _check("place_chunk", code)
        start += tokens


def copy_pieces(table: np.ndarray, layer: int, pinned: bool, k: torch.Tensor, v: torch.Tensor, stream: int) -> None:
    """`ops.copy_pieces`: table: [pieces, 4] int64 as vb_copy_pieces takes it; pinned: whether all pieces are; k, v:
    device buffers that hold their rows, contiguous; stream: a cudaStream_t other than the default one."""
    pointers = (k.data_ptr(), v.data_ptr(), stream)
    code = _library().vb_copy_pieces(table.ctypes.data, len(table), layer, pinned, *pointers)
    _check("copy_pieces", code)


def reshape_and_cache(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """`ops.reshape_and_cache`; tokens of k, v may be strided, negative slots are skipped."""
    cache = cache_view(key_cache, value_cache)
    code = _library().vb_reshape_and_cache(
        _rows(k, "k", key_cache.dtype), _rows(v, "v", key_cache.dtype), k.stride(0), v.stride(0), cache.key,
        cache.value, _expect(slot_mapping, "slot_mapping", torch.int64), *key_cache.stride()[:3], k.shape[0],
        cache.kv_heads, cache.head_dim, cache.block_size, cache.dtype, _stream(k),
    )  # fmt: skip
    _check("reshape_and_cache", code)


def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rows: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """q [tokens, q_heads, head_dim] and k, v [tokens, kv_heads, head_dim] side by side in a packed projection: q is
    rotated in place, k is rotated into its slot (where it lies it stays unrotated), v is copied into its slot.

    cos, sin: [n, rotary_dim / 2] float32 tables; rows [tokens] int64: the row of the tables for each token.
    """
    cache = cache_view(key_cache, value_cache)
    if q.shape[0] and not are_packed(q, k, v):
        raise ValueError("q, k and v must lie side by side in one buffer [tokens, q, k and v]")
    tokens, q_heads, head_dim = q.shape
    if not (q.dtype == cache.torch_dtype and k.shape[1] == cache.kv_heads and head_dim == cache.head_dim):
        raise ValueError(f"q {tuple(q.shape)} {q.dtype} and {k.shape[1]} KV heads do not fit the cache")
    if not (
        cos.dtype == sin.dtype == torch.float32
        and rows.dtype == slot_mapping.dtype == torch.int64
        and cos.is_contiguous()
        and sin.is_contiguous()
        and rows.is_contiguous()
        and slot_mapping.is_contiguous()
        and cos.is_cuda
    ):
        for tensor, name in ((cos, "cos"), (sin, "sin")):
            _expect(tensor, name, torch.float32)
        for tensor, name in ((rows, "rows"), (slot_mapping, "slot_mapping")):
            _expect(tensor, name, torch.int64)
    code = _library().vb_rope_and_cache(
        q.data_ptr(), q.stride(0), cos.data_ptr(), sin.data_ptr(), rows.data_ptr(), slot_mapping.data_ptr(), cache.key,
        cache.value, cache.page_stride, cache.slot_stride, cache.head_stride, tokens, q_heads, cache.kv_heads,
        head_dim, cos.shape[1], cache.block_size, cache.dtype, _stream(q),
    )  # fmt: skip
    if code:
        _check("rope_and_cache", code)


def norm_rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rows: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """As `rope_and_cache`, with an RMSNorm over each head of q and k before the rotation; weights [head_dim]. Heads are
    rotated whole, by a power of two of 16 channels."""
    cache = cache_view(key_cache, value_cache)
    tokens, q_heads, head_dim = q.shape
    if tokens and not are_packed(q, k, v):
        raise ValueError("q, k and v must lie side by side in one buffer [tokens, q, k and v]")
    if not (q.dtype == cache.torch_dtype and k.shape[1] == cache.kv_heads and head_dim == cache.head_dim):
        raise ValueError(f"q {tuple(q.shape)} {q.dtype} and {k.shape[1]} KV heads do not fit the cache")
    code = _library().vb_norm_rope_and_cache(
        q.data_ptr(), q.stride(0), _expect(q_weight, "q_weight", q.dtype), _expect(k_weight, "k_weight", q.dtype), eps,
        _expect(cos, "cos", torch.float32), _expect(sin, "sin", torch.float32), _expect(rows, "rows", torch.int64),
        _expect(slot_mapping, "slot_mapping", torch.int64), cache.key, cache.value, cache.page_stride,
        cache.slot_stride, cache.head_stride, tokens, q_heads, cache.kv_heads, head_dim, cos.shape[1],
        cache.block_size, cache.dtype, _stream(q),
    )  # fmt: skip
    if code:
        _check("norm_rope_and_cache", code)


def are_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether q [tokens, q_heads, head_dim], k and v [tokens, kv_heads, head_dim] lie side by side, row for row."""
    head_dim = q.shape[2]
    of_q, of_kv, size = q.shape[1] * head_dim, k.shape[1] * head_dim, q.element_size()
    start, stride = q.data_ptr(), q.stride()
    return (
        stride == k.stride() == v.stride()
        and stride[1:] == (head_dim, 1)
        and k.data_ptr() - start == of_q * size
        and v.data_ptr() - start == (of_q + of_kv) * size
        and k.shape == v.shape
        and q.dtype == k.dtype == v.dtype
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """`ops.rms_norm` of x [tokens, n]; with a residual, that of x + residual, and residual is replaced by the sum."""
    dtype = x.dtype
    if not (
        dtype in _DTYPES
        and weight.dtype == dtype
        and x.is_contiguous()
        and weight.is_contiguous()
        and weight.is_cuda
        and (residual is None or (residual.dtype == dtype and residual.is_contiguous() and residual.is_cuda))
    ):
        for tensor, name in ((x, "x"), (weight, "weight"), (residual, "residual")):
            if tensor is not None:
                _expect(tensor, name, dtype)
        _dtype(x, "x")
    out = torch.empty_like(x)
    n = x.shape[-1]
    code = _library().vb_rms_norm(
        x.data_ptr(), None if residual is None else residual.data_ptr(), weight.data_ptr(), out.data_ptr(),
        x.numel() // n, n, eps, _DTYPES[dtype], _stream(x),
    )  # fmt: skip
    if code:
        _check("rms_norm", code)
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`ops.silu_and_mul` of gate_up [tokens, 2 * n] -> [tokens, n]."""
    shape = gate_up.shape
    n = shape[-1] // 2
    pointer = _expect(gate_up, "gate_up", gate_up.dtype)
    out = gate_up.new_empty((*shape[:-1], n))
    code = _library().vb_silu_and_mul(
        pointer, out.data_ptr(), out.numel() // n, n, _dtype(gate_up, "gate_up"), _stream(gate_up)
    )
    if code:
        _check("silu_and_mul", code)
    return out


def kv_deviation(
    fresh: torch.Tensor, cached: torch.Tensor, slot_mapping: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """`ops.kv_deviation`; tokens of fresh may be strided."""
    count = fresh.shape[0] if rows is None else rows.shape[0]
    deviation = torch.empty(count, dtype=torch.float32, device=fresh.device)
    wanted = None if rows is None else _expect(rows, "rows", torch.int64)
    code = _library().vb_kv_deviation(
        _rows(fresh, "fresh", cached.dtype), fresh.stride(0), _expect(cached, "cached", cached.dtype, False),
        _expect(slot_mapping, "slot_mapping", torch.int64), wanted, *cached.stride()[:3], deviation.data_ptr(), count,
        fresh.shape[1], fresh.shape[2], cached.shape[1], _dtype(fresh, "fresh"), _stream(fresh),
    )  # fmt: skip
    _check("kv_deviation", code)
    return deviation
