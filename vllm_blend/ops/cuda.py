"""Bindings of the CUDA kernels (csrc/cuda/kernels.h) on torch tensors, by ctypes: pointers, strides, current stream.

Nothing here copies, casts or synchronises, so every function can run under CUDA graph capture. A tensor a kernel cannot
take (wrong dtype, device, layout) raises ValueError or TypeError that names it; what fails in the library raises
RuntimeError. A paged cache is a pair of tensors [num_blocks, block_size, kv_heads, head_dim] of the same strides.
"""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
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


class _Cache(Structure):
    _fields_ = (
        [(n, c_void_p) for n in ("key", "value")]
        + [(n, c_int64) for n in ("page_stride", "slot_stride", "head_stride")]
        + [(n, c_int32) for n in ("num_blocks", "block_size", "kv_heads", "head_dim", "dtype")]
    )


class _Prefill(Structure):
    _fields_ = (
        [(n, c_void_p) for n in ("q", "out", "lse", "positions", "query_start_loc", "block_tables", "workspace")]
        + [("workspace_bytes", c_size_t)]
        + [(n, c_int64) for n in ("q_token_stride", "out_token_stride")]
        + [(n, c_int32) for n in ("block_table_stride", "num_tokens", "num_requests", "q_heads", "window", "variant")]
        + [("scale", c_float)]
    )


class _Decode(Structure):
    _fields_ = (
        [(n, c_void_p) for n in ("q", "out", "lse", "positions", "block_tables", "workspace")]
        + [("workspace_bytes", c_size_t)]
        + [(n, c_int64) for n in ("q_token_stride", "out_token_stride")]
        + [(n, c_int32) for n in ("block_table_stride", "batch", "q_heads", "window", "num_splits", "max_seq_len")]
        + [("scale", c_float)]
    )


_P, _I, _L, _F = c_void_p, c_int, c_int64, c_float
_SIGNATURES = {
    "vb_prefill_variant": (_I, _I),
    "vb_prefill_plan": (POINTER(_Prefill), POINTER(_Cache), _P),
    "vb_prefill_attention": (POINTER(_Prefill), POINTER(_Cache), _P),
    "vb_decode_attention": (POINTER(_Decode), POINTER(_Cache), _P),
    "vb_merge_states": (_P, _P, _P, _P, _P, _P, _L, _I, _I, _P),
    "vb_place_chunk": (_P, _P, _L, _L, _P, _P, _P, _P, _P, _L, _L, _L, _I, _I, _I, _I, _I, _I, _I, _P),
    "vb_reshape_and_cache": (_P, _P, _L, _L, _P, _P, _P, _L, _L, _L, _I, _I, _I, _I, _I, _P),
    "vb_rope_and_cache": (_P, _L, _P, _P, _P, _P, _P, _P, _L, _L, _L, _I, _I, _I, _I, _I, _I, _I, _P),
    "vb_rms_norm": (_P, _P, _P, _P, _L, _I, _F, _I, _P),
    "vb_silu_and_mul": (_P, _P, _L, _I, _I, _P),
    "vb_kv_deviation": (_P, _L, _P, _P, _L, _L, _L, _P, _I, _I, _I, _I, _I, _I, _P),
    "vb_copy_pieces": (_P, _I, _I, _I, _P, _P, _P),
    "vb_attention_mass": (_P, _L, _P, _P, _P, _P, _I, _I, _I, _I, _F, POINTER(_Cache), _P),
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
        lib.vb_prefill_workspace_bytes.argtypes, lib.vb_prefill_workspace_bytes.restype = (c_int,) * 5, c_size_t
        lib.vb_decode_workspace_bytes.argtypes, lib.vb_decode_workspace_bytes.restype = (c_int,) * 5, c_size_t
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
    return int(torch._C._cuda_getCurrentRawStream(tensor.get_device()))


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


_CACHES: dict[tuple[int, int], tuple[torch.Size, torch.dtype, tuple[int, ...], _Cache]] = {}


def _cache_of(key: torch.Tensor, value: torch.Tensor) -> _Cache:
    """The C view of a layer's cache, remembered by address: layers ask for the same few over and over."""
    address = (key.data_ptr(), value.data_ptr())
    known = _CACHES.get(address)
    if known is not None and known[:3] == (key.shape, key.dtype, key.stride()) and known[0] == value.shape:
        return known[3]
    if len(_CACHES) > 1024:  # engines come and go; addresses of freed caches mean nothing
        _CACHES.clear()
    made = _make_cache(key, value)
    _CACHES[address] = (key.shape, key.dtype, key.stride(), made)
    return made


def _make_cache(key: torch.Tensor, value: torch.Tensor) -> _Cache:
    if key.shape != value.shape or key.stride() != value.stride() or key.dim() != 4:
        raise ValueError("key and value caches must be [num_blocks, block_size, kv_heads, head_dim] with equal strides")
    k, v = _expect(key, "key cache", key.dtype, False), _expect(value, "value cache", key.dtype, False)
    blocks, block_size, kv_heads, head_dim = key.shape
    return _Cache(k, v, *key.stride()[:3], blocks, block_size, kv_heads, head_dim, _dtype(key, "key cache"))


@dataclass(frozen=True)
class PrefillPlan:
    """The work list of one step on the device, shared by all layers (see csrc/cuda/prefill_plan.cuh)."""

    positions: torch.Tensor
    query_start_loc: torch.Tensor
    block_tables: torch.Tensor
    workspace: torch.Tensor
    q_heads: int
    window: int
    variant: int


def prefill_workspace_bytes(num_tokens: int, num_requests: int, q_heads: int, kv_heads: int, head_dim: int) -> int:
    return int(_library().vb_prefill_workspace_bytes(num_tokens, num_requests, q_heads, kv_heads, head_dim))


def plan_prefill(
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_tables: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    q_heads: int,
    sliding_window: int | None = None,
    variant: str = "auto",
    workspace: torch.Tensor | None = None,
) -> PrefillPlan:
    """Plan attention of positions [tokens] int64 (ascending in a request), rows query_start_loc [requests + 1] int32,
    block_tables [requests, max_blocks] int32. The plan holds for every layer with caches of this shape. `workspace`
    (uint8, `prefill_workspace_bytes`) may be given to reuse one; a plan is void once another uses its workspace."""
    cache = _cache_of(key_cache, value_cache)
    tokens, requests = positions.shape[0], query_start_loc.shape[0] - 1
    if workspace is None:
        needed = prefill_workspace_bytes(tokens, requests, q_heads, cache.kv_heads, cache.head_dim)
        workspace = torch.empty(needed, dtype=torch.uint8, device=positions.device)
    plan = PrefillPlan(
        positions, query_start_loc, block_tables, workspace, q_heads, sliding_window or 0, VARIANTS[variant]
    )
    _expect(positions, "positions", torch.int64)
    _expect(query_start_loc, "query_start_loc", torch.int32)
    _expect(block_tables, "block_tables", torch.int32, contiguous=False)
    args = _prefill_args(plan, 0, 0, 0, q_heads * cache.head_dim, q_heads * cache.head_dim, 1.0)
    _check("plan_prefill", _library().vb_prefill_plan(byref(args), byref(cache), _stream(positions)))
    return plan


def _prefill_args(
    plan: PrefillPlan, q: int, out: int, lse: int, q_stride: int, out_stride: int, scale: float
) -> _Prefill:
    return _Prefill(
        q, out, lse, plan.positions.data_ptr(), plan.query_start_loc.data_ptr(), plan.block_tables.data_ptr(),
        plan.workspace.data_ptr(), plan.workspace.numel(), q_stride, out_stride, plan.block_tables.stride(0),
        plan.positions.shape[0], plan.query_start_loc.shape[0] - 1, plan.q_heads, plan.window, plan.variant, scale,
    )  # fmt: skip


def prefill_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: PrefillPlan,
    scale: float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [tokens, q_heads, head_dim] at the plan's positions -> out, like q; lse [tokens, q_heads] float32
    receives the natural log-sum-exp when given."""
    cache = _cache_of(key_cache, value_cache)
    if q.shape[0] != plan.positions.shape[0] or q.shape[1:] != (plan.q_heads, cache.head_dim):
        raise ValueError(
            f"q is {tuple(q.shape)}, the plan is for {(plan.positions.shape[0], plan.q_heads, cache.head_dim)}"
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    args = _prefill_args(
        plan,
        _rows(q, "q", key_cache.dtype),
        _rows(out, "out", key_cache.dtype),
        0 if lse is None else _expect(lse, "lse", torch.float32),
        q.stride(0),
        out.stride(0),
        scale,
    )
    _check("prefill_attention", _library().vb_prefill_attention(byref(args), byref(cache), _stream(q)))
    return out


def decode_workspace_bytes(batch: int, q_heads: int, kv_heads: int, head_dim: int, num_splits: int = 0) -> int:
    return int(_library().vb_decode_workspace_bytes(batch, q_heads, kv_heads, head_dim, num_splits))


def decode_workspace(
    batch: int, q_heads: int, kv_heads: int, head_dim: int, device: torch.device, num_splits: int = 0
) -> torch.Tensor:
    """A workspace for `batch` requests. Zeroed once here; `decode_attention` leaves it ready for the next call.

    0 splits: as many as `decode_attention` would choose for this batch.
    """
    needed = decode_workspace_bytes(batch, q_heads, kv_heads, head_dim, num_splits)
    return torch.zeros(needed, dtype=torch.uint8, device=device)


def decode_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    workspace: torch.Tensor,
    max_seq_len: int,
    sliding_window: int | None = None,
    num_splits: int = 0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query a request: q [batch, q_heads, head_dim] at positions [batch] int64 -> out, like q.

    `max_seq_len` bounds the contexts and only guides how finely keys are split (`num_splits` 0).
    """
    cache = _cache_of(key_cache, value_cache)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    args = _Decode(
        _rows(q, "q", key_cache.dtype),
        _rows(out, "out", key_cache.dtype),
        0 if lse is None else _expect(lse, "lse", torch.float32),
        _expect(positions, "positions", torch.int64),
        _expect(block_tables, "block_tables", torch.int32, contiguous=False),
        _expect(workspace, "workspace", torch.uint8), workspace.numel(), q.stride(0), out.stride(0),
        block_tables.stride(0), q.shape[0], q.shape[1], sliding_window or 0, num_splits, max_seq_len, scale,
    )  # fmt: skip
    _check("decode_attention", _library().vb_decode_attention(byref(args), byref(cache), _stream(q)))
    return out


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key sets: outs [tokens, heads, head_dim], lses [tokens, heads]."""
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    code = _library().vb_merge_states(
        _expect(out_a, "out_a", out_a.dtype), _expect(lse_a, "lse_a", torch.float32),
        _expect(out_b, "out_b", out_a.dtype), _expect(lse_b, "lse_b", torch.float32),
        out.data_ptr(), lse.data_ptr(), lse.numel(), out.shape[-1], _dtype(out_a, "out_a"), _stream(out_a),
    )  # fmt: skip
    _check("merge_states", code)
    return out, lse


def cache_pointers(caches: list[torch.Tensor]) -> torch.Tensor:
    """The addresses of per-layer caches on their device, for `place_chunk`. Made once: this copies to the device."""
    return torch.tensor([c.data_ptr() for c in caches], dtype=torch.int64, device=caches[0].device)


def place_chunk(
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_pointers: torch.Tensor,
    value_pointers: torch.Tensor,
    layer_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`ops.place_chunk` over per-layer caches: k (before RoPE), v [layers, tokens, kv_heads, head_dim]; cos, sin
    [tokens, rotary_dim / 2] float32 at the target positions; key_pointers, value_pointers from `cache_pointers`;
    layer_cache: any layer's key cache, whose shape and strides all share. Negative slots are skipped."""
    layers, tokens, kv_heads, head_dim = k.shape
    if k.stride() != v.stride() or k.stride(2) != head_dim or k.stride(3) != 1:
        raise ValueError("k and v must have equal strides and contiguous heads")
    code = _library().vb_place_chunk(
        _expect(k, "k", layer_cache.dtype, False), _expect(v, "v", layer_cache.dtype, False), k.stride(0), k.stride(1),
        _expect(cos, "cos", torch.float32), _expect(sin, "sin", torch.float32),
        _expect(key_pointers, "key_pointers", torch.int64), _expect(value_pointers, "value_pointers", torch.int64),
        _expect(slot_mapping, "slot_mapping", torch.int64), *layer_cache.stride()[:3], layers, tokens, kv_heads,
        head_dim, cos.shape[-1], layer_cache.shape[1], _dtype(k, "k"), _stream(k),
    )  # fmt: skip
    _check("place_chunk", code)


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
    cache = _cache_of(key_cache, value_cache)
    code = _library().vb_reshape_and_cache(
        _rows(k, "k", key_cache.dtype), _rows(v, "v", key_cache.dtype), k.stride(0), v.stride(0), cache.key,
        cache.value, _expect(slot_mapping, "slot_mapping", torch.int64), *key_cache.stride()[:3], k.shape[0],
        cache.kv_heads, cache.head_dim, cache.block_size, cache.dtype, _stream(k),
    )  # fmt: skip
    _check("reshape_and_cache", code)


def rope_and_cache(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_heads: int,
) -> None:
    """Packed qkv [tokens, (q_heads + 2 * kv_heads) * head_dim]: q is rotated in place, k is rotated into its slot (in
    qkv it stays unrotated), v is copied into its slot. cos, sin: [max_positions, rotary_dim / 2] float32 tables."""
    cache = _cache_of(key_cache, value_cache)
    if qkv.shape[-1] != (q_heads + 2 * cache.kv_heads) * cache.head_dim:
        raise ValueError(f"qkv has {qkv.shape[-1]} channels, not (q_heads + 2 * kv_heads) * head_dim")
    code = _library().vb_rope_and_cache(
        _expect(qkv, "qkv", key_cache.dtype, False), qkv.stride(0), _expect(cos, "cos", torch.float32),
        _expect(sin, "sin", torch.float32), _expect(positions, "positions", torch.int64),
        _expect(slot_mapping, "slot_mapping", torch.int64), cache.key, cache.value, *key_cache.stride()[:3],
        qkv.shape[0], q_heads, cache.kv_heads, cache.head_dim, cos.shape[-1], cache.block_size, cache.dtype,
        _stream(qkv),
    )  # fmt: skip
    _check("rope_and_cache", code)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """`ops.rms_norm` of x [tokens, n]; with a residual, that of x + residual, and residual is replaced by the sum."""
    out = torch.empty_like(x)
    code = _library().vb_rms_norm(
        _expect(x, "x", x.dtype), 0 if residual is None else _expect(residual, "residual", x.dtype),
        _expect(weight, "weight", x.dtype), out.data_ptr(), x.numel() // x.shape[-1], x.shape[-1], eps, _dtype(x, "x"),
        _stream(x),
    )  # fmt: skip
    _check("rms_norm", code)
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`ops.silu_and_mul` of gate_up [tokens, 2 * n] -> [tokens, n]."""
    n = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], n), dtype=gate_up.dtype, device=gate_up.device)
    pointer = _expect(gate_up, "gate_up", gate_up.dtype)
    code = _library().vb_silu_and_mul(
        pointer, out.data_ptr(), out.numel() // n, n, _dtype(gate_up, "gate_up"), _stream(gate_up)
    )
    _check("silu_and_mul", code)
    return out


def kv_deviation(
    fresh: torch.Tensor,
    cached: torch.Tensor,
    slot_mapping: torch.Tensor,
    deviation: torch.Tensor,
    accumulate: bool = False,
) -> None:
    """deviation [tokens] float32 (+)= sum of squares of fresh [tokens, kv_heads, head_dim] minus the cache (K or V) at
    its slots: CacheBlend's measure (Yao et al., 2024, section 4)."""
    code = _library().vb_kv_deviation(
        _rows(fresh, "fresh", cached.dtype), fresh.stride(0), _expect(cached, "cached", cached.dtype, False),
        _expect(slot_mapping, "slot_mapping", torch.int64), *cached.stride()[:3],
        _expect(deviation, "deviation", torch.float32), accumulate, fresh.shape[0], fresh.shape[1], fresh.shape[2],
        cached.shape[1], _dtype(fresh, "fresh"), _stream(fresh),
    )  # fmt: skip
    _check("kv_deviation", code)


def attention_mass(
    q: torch.Tensor,
    lse: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    mass: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
) -> None:
    """mass [kv_heads, num_keys] float32 += attention probability each key gets from q [rows, q_heads, head_dim] of one
    request, summed over rows, divided by q_heads: `mass.sum(0)`, once after all layers, is the mean over heads.

    lse [rows, q_heads]: `prefill_attention`'s for the same q.
    """
    cache = _cache_of(key_cache, value_cache)
    code = _library().vb_attention_mass(
        _rows(q, "q", key_cache.dtype), q.stride(0), _expect(lse, "lse", torch.float32),
        _expect(positions, "positions", torch.int64), _expect(block_table, "block_table", torch.int32),
        _expect(mass, "mass", torch.float32), q.shape[0], mass.shape[1], q.shape[1], sliding_window or 0, scale,
        byref(cache), _stream(q),
    )  # fmt: skip
    _check("attention_mass", code)
