"""Bindings of the sampling kernels (csrc/cuda/sampling.cu), by the rules of `ops.cuda`: nothing copies or waits."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import cache

import torch

from vllm_blend.ops import cuda

MAX_VOCAB = 2**19 - 1
_DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_UNFILTERED, _FILTERED = 1, 2


class _Sample(Structure):
    _fields_ = (
        [(n, c_void_p) for n in ("logits",)]
        + [(n, c_int64) for n in ("row_stride",)]
        + [(n, c_void_p) for n in ("settings", "uniforms", "tokens", "workspace")]
        + [("workspace_bytes", c_size_t)]
        + [(n, c_int32) for n in ("rows", "vocab", "dtype", "kinds")]
    )


_SIGNATURES = {
    "vb_sample": (POINTER(_Sample), c_void_p),
    "vb_penalize": (c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int64, c_void_p),
}


def takes(logits: torch.Tensor) -> bool:
    """Whether the kernels can work on `logits`; otherwise the op's torch twin is the one to run."""
    return logits.is_cuda and logits.dtype in _DTYPES and logits.shape[-1] <= MAX_VOCAB and cuda.is_available()


@cache
def _library() -> ctypes.CDLL:
    lib = cuda._library()
    for name, arguments in _SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, c_int
    lib.vb_sample_workspace_bytes.argtypes, lib.vb_sample_workspace_bytes.restype = (c_int, c_int), c_size_t
    return lib


def sample_tokens(
    logits: torch.Tensor,
    settings: torch.Tensor,
    uniforms: torch.Tensor | None,
    any_filtered: bool = True,
    any_unfiltered: bool = True,
) -> torch.Tensor:
    """`ops.sample_tokens`: settings [rows, 4] and uniforms [rows], float64 on the device. What rows there are tells
    which kernels are needed: filtered ones are random with min-p, top-k or top-p on."""
    rows, vocab = logits.shape
    if settings.shape != (rows, 4) or (uniforms is not None and uniforms.shape != (rows,)):
        given = None if uniforms is None else tuple(uniforms.shape)
        raise ValueError(f"{rows} rows of logits, but settings {tuple(settings.shape)} and uniforms {given}")
    if logits.stride(-1) != 1 and vocab > 1:
        raise ValueError("logits must be contiguous in their last dimension")
    lib = _library()
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    workspace = torch.empty(lib.vb_sample_workspace_bytes(rows, vocab), dtype=torch.uint8, device=logits.device)
    args = _Sample(
        logits.data_ptr(), logits.stride(0), cuda._expect(settings, "settings", torch.float64),
        None if uniforms is None else cuda._expect(uniforms, "uniforms", torch.float64), tokens.data_ptr(),
        workspace.data_ptr(), workspace.numel(), rows, vocab, _DTYPES[logits.dtype],
        _FILTERED * any_filtered + _UNFILTERED * any_unfiltered,
    )  # fmt: skip
    cuda._check("sample_tokens", lib.vb_sample(byref(args), cuda._stream(logits)))
    return tokens


def penalize(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, penalties: torch.Tensor
) -> None:
    """`ops.penalize`."""
    if penalties.shape != (3, logits.shape[0]) or not (rows.shape == tokens.shape == counts.shape):
        raise ValueError(
            f"penalties must be [3, {logits.shape[0]}], and rows, tokens and counts of one length: they are "
            f"{tuple(penalties.shape)}, {tuple(rows.shape)}, {tuple(tokens.shape)}, {tuple(counts.shape)}"
        )
    code = _library().vb_penalize(
        cuda._expect(logits, "logits", torch.float32, False), logits.stride(0),
        cuda._expect(rows, "rows", torch.int64), cuda._expect(tokens, "tokens", torch.int64),
        cuda._expect(counts, "counts", torch.float32), cuda._expect(penalties, "penalties", torch.float32),
        logits.shape[0], rows.shape[0], cuda._stream(logits),
    )  # fmt: skip
    cuda._check("penalize", code)
