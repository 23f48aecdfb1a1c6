"""The compiled CPU kernels: the one place that loads them and declares their C functions (csrc/vllm_blend_cpu.h).

The library is built by `pip install` or `python setup.py build_ext --inplace`; nothing is compiled at import. Without
it, or with VLLM_BLEND_DISABLE_KERNELS=1, every op runs its plain torch twin. VLLM_BLEND_CPU_ISA picks an instruction
set below the best one (generic, avx2, avx512, avx512bf16, amx), to compare them or to get another machine's rounding.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from pathlib import Path
from typing import NoReturn, Protocol

import torch

from vllm_blend.ops import pointers as to
from vllm_blend.ops.c_functions import Float, Int, Int32, Int64, bind
from vllm_blend.ops.e4m3 import E4M3

logger = logging.getLogger(__name__)

ABI_VERSION = 6  # VB_ABI_VERSION of the header that the signatures below were written from
LIBRARY = Path(__file__).resolve().parent.parent / "libvllm_blend_cpu.so"
DISABLE_VARIABLE = "VLLM_BLEND_DISABLE_KERNELS"
ISA_VARIABLE = "VLLM_BLEND_CPU_ISA"
BUILD_HINT = (
    "build them with `pip install -e .` or `python setup.py build_ext --inplace` in the checkout"
    if (LIBRARY.parents[1] / "setup.py").is_file()
    else "they come with a wheel that was made where there is a C++ compiler; or install g++ or clang++ here, and the "
    "package again with --force-reinstall --no-deps --no-cache-dir"
)

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum vb_dtype
CACHE_CODES = DTYPE_CODES | {E4M3: 3}  # of caches and chunks

_STATUS: dict[int, tuple[type[Exception], str]] = {
    1: (TypeError, "the kernel was not built for this dtype or head size"),
    2: (IndexError, "slot_mapping holds a slot outside the cache"),
    3: (IndexError, "block_tables names a block outside the cache, or has fewer blocks than seq_lens needs"),
    4: (IndexError, "positions holds a position that is negative or not below its request's seq_len"),
    5: (MemoryError, "no memory for the kernel's scratch buffers"),
    6: (ValueError, "query_start_loc must rise from 0 to the number of tokens"),
}


class KernelsUnavailable(ImportError):
    """The compiled CPU kernels cannot be used; the message says why and what to do."""


# fmt: off
class CPUKernels(Protocol):
    """The kernels of one instruction set as C functions; each returns a status (see `raise_status`)."""

    isa: str
    linear_dtypes: set[torch.dtype]

    def rms_norm(
        self, out: to.Out, sum: to.Sum | None, x: to.Input, residual: to.Residual | None, weight: to.Weight,
        rows: Int64, n: Int64, x_stride: Int64, eps: Float, dtype: Int32, threads: Int32, /,
    ) -> Int: ...

    def silu_and_mul(
        self, out: to.Out, gate_up: to.GateUp, rows: Int64, n: Int64, stride: Int64, dtype: Int32, threads: Int32, /,
    ) -> Int: ...

    def rope(
        self, q_out: to.QueryOut, k_out: to.KeyOut | None, q: to.Query, k: to.Key | None, v: to.Value | None,
        cos: to.Cos, sin: to.Sin, key_cache: to.KeyCache | None, value_cache: to.ValueCache | None,
        slots: to.Slots | None, tokens: Int64, heads: Int64, kv_heads: Int64, head_dim: Int64, half: Int64,
        q_stride: Int64, k_stride: Int64, v_stride: Int64, num_slots: Int64, dtype: Int32, cache_dtype: Int32,
        threads: Int32, /,
    ) -> Int: ...

    def reshape_and_cache(
        self, k: to.Key, v: to.Value, key_cache: to.KeyCache, value_cache: to.ValueCache, slots: to.Slots,
        tokens: Int64, row: Int64, k_stride: Int64, v_stride: Int64, num_slots: Int64, dtype: Int32, cache_dtype: Int32,
        threads: Int32, /,
    ) -> Int: ...

    def place_chunk(
        self, k: to.Key, v: to.Value, cos: to.Cos, sin: to.Sin, key_cache: to.KeyCache, value_cache: to.ValueCache,
        slots: to.Slots, layers: Int64, tokens: Int64, kv_heads: Int64, head_dim: Int64, half: Int64, k_layer: Int64,
        v_layer: Int64, key_cache_layer: Int64, value_cache_layer: Int64, num_slots: Int64, source: Int32,
        target: Int32, threads: Int32, /,
    ) -> Int: ...

    def paged_attention(
        self, out: to.Out, q: to.Query, key_cache: to.KeyCache, value_cache: to.ValueCache, positions: to.Positions,
        block_tables: to.BlockTables, starts: to.QueryStarts, seq_lens: to.SeqLens, sinks: to.Sinks | None,
        tokens: Int64, requests: Int64, table_stride: Int64, num_blocks: Int64, block_size: Int64, heads: Int64,
        kv_heads: Int64, head_dim: Int64, q_stride: Int64, window: Int64, scale: Float, dtype: Int32,
        cache_dtype: Int32, threads: Int32, /,
    ) -> Int: ...

    def attention_states(
        self, out: to.Out, lse: to.LogSumExp, q: to.Query, key_cache: to.KeyCache, value_cache: to.ValueCache,
        positions: to.Positions, block_tables: to.BlockTables, starts: to.QueryStarts, seq_lens: to.SeqLens,
        tokens: Int64, table_stride: Int64, num_blocks: Int64, block_size: Int64, heads: Int64, kv_heads: Int64,
        head_dim: Int64, q_stride: Int64, scale: Float, dtype: Int32, cache_dtype: Int32, threads: Int32, /,
    ) -> Int: ...

    def attention_mass(
        self, mass: to.Mass, q: to.Query, key_cache: to.KeyCache, positions: to.Positions, block_tables: to.BlockTables,
        first: to.FirstRows, last: to.LastRows, seq_lens: to.SeqLens, offsets: to.Offsets, requests: Int64,
        table_stride: Int64, num_blocks: Int64, block_size: Int64, heads: Int64, kv_heads: Int64, head_dim: Int64,
        q_stride: Int64, window: Int64, scale: Float, dtype: Int32, cache_dtype: Int32, threads: Int32, /,
    ) -> Int: ...

    def window_sums(
        self, sums: to.Sums, q: to.Query, key_cache: to.KeyCache, positions: to.Positions, block_table: to.BlockTables,
        queries: Int64, keys: Int64, blocks: Int64, num_blocks: Int64, block_size: Int64, heads: Int64, kv_heads: Int64,
        head_dim: Int64, q_stride: Int64, buffer: Int64, scale: Float, power: Int32, dtype: Int32, cache_dtype: Int32,
        threads: Int32, /,
    ) -> Int: ...

    def accumulate_sums(
        self, metric: to.Metric, q: to.Query, head_keys: to.KeyCache, tables: to.BlockTables, lengths: to.SeqLens,
        key_positions: to.KeyPositions, query_positions: to.Positions, rows: Int64, table_width: Int64,
        table_stride: Int64, pages: Int64, block_size: Int64, group: Int64, head_dim: Int64, q_stride: Int64,
        buffer: Int64, scale: Float, power: Int32, dtype: Int32, cache_dtype: Int32, threads: Int32, /,
    ) -> Int: ...

    def linear(
        self, out: to.Out, x: to.Input, weight: to.Weight, bias: to.Bias | None, rows: Int64, size: Int64,
        features: Int64, x_stride: Int64, dtype: Int32, threads: Int32, /,
    ) -> Int: ...

    def int4_linear(
        self, out: to.Out, x: to.Input, weight: to.Weight, scales: to.Scales, zeros: to.ZeroPoints,
        bias: to.Bias | None, rows: Int64, size: Int64, features: Int64, group: Int64, x_stride: Int64,
        scale_dtype: Int32, dtype: Int32, threads: Int32, /,
    ) -> Int: ...

    def int4_unpack(
        self, out: to.Out, weight: to.Weight, scales: to.Scales, zeros: to.ZeroPoints, size: Int64, features: Int64,
        group: Int64, scale_dtype: Int32, dtype: Int32, threads: Int32, /,
    ) -> Int: ...

    def blocks_pack(
        self, out: to.Out, weight: to.Weight, rows: to.Rows, count: Int64, size: Int64, kind: Int32, threads: Int32, /,
    ) -> Int: ...

    def blocks_linear(
        self, out: to.Out, x: to.Input, weight: to.Weight, bias: to.Bias | None, rows: Int64, size: Int64,
        features: Int64, out_stride: Int64, x_stride: Int64, kind: Int32, dtype: Int32, threads: Int32, /,
    ) -> Int: ...

    def blocks_unpack(
        self, out: to.Out, weight: to.Weight, first: Int64, rows: Int64, size: Int64, kind: Int32, dtype: Int32,
        threads: Int32, /,
    ) -> Int: ...

    def blocks_rows(
        self, out: to.Out, weight: to.Weight, ids: to.Rows, count: Int64, size: Int64, kind: Int32, dtype: Int32,
        threads: Int32, /,
    ) -> Int: ...
# fmt: on


@cache
def _library() -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise KernelsUnavailable(f"the CPU kernels are not built ({LIBRARY} does not exist): {BUILD_HINT}")
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise KernelsUnavailable(f"the CPU kernels do not load ({error}): {BUILD_HINT}") from error
    library.vb_cpu_abi_version.restype = ctypes.c_int64
    version = library.vb_cpu_abi_version()
    if version != ABI_VERSION:
        raise KernelsUnavailable(f"the CPU kernels have ABI {version}, this package needs {ABI_VERSION}: {BUILD_HINT}")
    library.vb_cpu_isas.restype = ctypes.c_char_p
    return library


def cpu_isas() -> list[str]:
    """Return the instruction sets that the library was built for and this CPU runs, best first. Raises
    `KernelsUnavailable`."""
    names: bytes = _library().vb_cpu_isas()
    return names.decode().split()


@cache
def cpu_kernels() -> CPUKernels:
    """Return the kernels in use. Raises `KernelsUnavailable` when they are not built or are switched off."""
    disabled = os.environ.get(DISABLE_VARIABLE, "0")
    if disabled not in ("", "0"):
        raise KernelsUnavailable(f"the compiled kernels are switched off by {DISABLE_VARIABLE}={disabled}: unset it")
    isas = cpu_isas()
    wanted = os.environ.get(ISA_VARIABLE) or isas[0]
    if wanted not in isas:
        raise ValueError(
            f"{ISA_VARIABLE}={wanted} is not among the instruction sets of this machine: {', '.join(isas)}"
        )
    linear_dtypes = {torch.float32, torch.bfloat16} if wanted in ("amx", "avx512bf16") else {torch.float32}
    kernels: CPUKernels = bind(CPUKernels, _library(), f"vb_{wanted}_", isa=wanted, linear_dtypes=linear_dtypes)
    return kernels


@cache
def _kernels_or_none() -> CPUKernels | None:
    try:
        return cpu_kernels()
    except KernelsUnavailable as unavailable:
        level = logging.INFO if os.environ.get(DISABLE_VARIABLE) else logging.WARNING
        logger.log(
            level, "plain torch runs instead of the compiled kernels: %s", unavailable
        )  # once: the result is cached
        return None


def kernels_for(tensor: torch.Tensor) -> CPUKernels | None:
    """Return the kernels that can work on `tensor`, or None: then the op's torch twin is the one to run."""
    if tensor.is_cpu and tensor.dtype in DTYPE_CODES and not tensor.requires_grad:
        return _kernels_or_none()
    return None


def reload() -> None:
    """Forget what was decided and read the environment variables again."""
    cpu_kernels.cache_clear()
    _kernels_or_none.cache_clear()
    _library.cache_clear()


def raise_status(status: int, op: str) -> NoReturn:
    """Raise the exception that a kernel's non-zero status stands for."""
    kind, text = _STATUS.get(status, (RuntimeError, f"unknown kernel status {status}"))
    raise kind(f"{op}: {text}")
