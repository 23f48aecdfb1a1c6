"""The one place that loads compiled kernels, and the only one that knows their C signatures (csrc/vllm_blend_cpu.h).

The library is built by `pip install` or `python setup.py build_ext --inplace`; nothing is compiled at import. Without
it, or with VLLM_BLEND_DISABLE_KERNELS=1, every op runs its plain torch twin. VLLM_BLEND_CPU_ISA=generic|avx2|avx512|amx
picks an instruction set below the best one (to compare them, or to reproduce another machine's rounding).
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NoReturn

import torch

logger = logging.getLogger(__name__)

ABI_VERSION = 3  # VB_ABI_VERSION of the header that the signatures below were written from
LIBRARY = Path(__file__).resolve().parent.parent / "libvllm_blend_cpu.so"
DISABLE_VARIABLE = "VLLM_BLEND_DISABLE_KERNELS"
ISA_VARIABLE = "VLLM_BLEND_CPU_ISA"
BUILD_HINT = "build them with `pip install -e .` or `python setup.py build_ext --inplace` in the checkout"

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum vb_dtype

# p pointer, q int64, i int32, f float
_TYPES = {"p": ctypes.c_void_p, "q": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}
_SIGNATURES = {
    "rms_norm": "ppppp qqq f ii",
    "silu_and_mul": "pp qqq ii",
    "rope": "pppppppppp qqqqqqqqq ii",
    "reshape_and_cache": "ppppp qqqqq ii",
    "place_chunk": "ppppppp qqqqqqqqqq iii",
    "paged_attention": "pppppppp qqqqqqqqqq f ii",
    "attention_states": "ppppppppp qqqqqqqq f ii",
    "attention_mass": "ppppppppp qqqqqqqqq f ii",
    "window_sums": "ppppp qqqqqqqqqq f iii",
    "accumulate_sums": "ppppppp qqqqqqqqq f iii",
    "linear": "pppp qqqq ii",
}

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


class CPUKernels:
    """The kernels of one instruction set as C functions; each returns a status (see `raise_status`)."""

    rms_norm: Callable[..., int]
    silu_and_mul: Callable[..., int]
    rope: Callable[..., int]
    reshape_and_cache: Callable[..., int]
    place_chunk: Callable[..., int]
    paged_attention: Callable[..., int]
    attention_states: Callable[..., int]
    attention_mass: Callable[..., int]
    window_sums: Callable[..., int]
    accumulate_sums: Callable[..., int]
    linear: Callable[..., int]

    def __init__(self, library: ctypes.CDLL, isa: str) -> None:
        self.isa = isa
        self.linear_dtypes = {torch.float32, torch.bfloat16} if isa == "amx" else {torch.float32}
        for name, signature in _SIGNATURES.items():
            function = getattr(library, f"vb_{isa}_{name}")
            function.argtypes = [_TYPES[letter] for letter in signature.replace(" ", "")]
            function.restype = ctypes.c_int
            setattr(self, name, function)


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
    """Instruction sets that the library was built for and this CPU runs, best first. Raises `KernelsUnavailable`."""
    return _library().vb_cpu_isas().decode().split()


@cache
def cpu_kernels() -> CPUKernels:
    """The kernels in use. Raises `KernelsUnavailable` when they are not built or are switched off."""
    disabled = os.environ.get(DISABLE_VARIABLE, "0")
    if disabled not in ("", "0"):
        raise KernelsUnavailable(f"the compiled kernels are switched off by {DISABLE_VARIABLE}={disabled}: unset it")
    isas = cpu_isas()
    wanted = os.environ.get(ISA_VARIABLE) or isas[0]
    if wanted not in isas:
        raise ValueError(
            f"{ISA_VARIABLE}={wanted} is not among the instruction sets of this machine: {', '.join(isas)}"
        )
    return CPUKernels(_library(), wanted)


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


def cpu_kernels_available() -> bool:
    """Whether ops on CPU tensors run compiled kernels. The first call that finds none logs why."""
    return _kernels_or_none() is not None


def kernels_for(tensor: torch.Tensor) -> CPUKernels | None:
    """The kernels that can work on `tensor`, or None: then the op's torch twin is the one to run."""
    if tensor.is_cpu and tensor.dtype in DTYPE_CODES and not tensor.requires_grad:
        return _kernels_or_none()
    return None


def reload() -> None:
    """Forget what was decided and read the environment variables again."""
    cpu_kernels.cache_clear()
    _kernels_or_none.cache_clear()
    _library.cache_clear()


def raise_status(status: int, op: str) -> NoReturn:
    """The exception that a kernel's non-zero status stands for."""
    kind, text = _STATUS.get(status, (RuntimeError, f"unknown kernel status {status}"))
    raise kind(f"{op}: {text}")
