"""Bindings of the sampling kernels (csrc/cuda/sampling*.cu, penalize.cu), by the rules of `ops.cuda_library`."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int, c_int32, c_int64, c_size_t, c_void_p

import torch

from vllm_blend.ops.cuda_library import bound, check, expect, is_available, stream_of

MAX_VOCAB = 2**19 - 1
_DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_UNFILTERED, _FILTERED = 1, 2


class _Sample(Structure):
    _fields_ = (
        [(n, c_void_p) for n in ("logits",)]
        + [(n, c_int64) for n in ("row_stride",)]
        + [(n, c_void_p) for n in ("settings", "uniforms", "tokens", "places", "workspace")]
        + [("workspace_bytes", c_size_t)]
        + [(n, c_int32) for n in ("rows", "vocab", "dtype", "kinds")]
    )


_SIGNATURES = {
    "vb_sample": (POINTER(_Sample), c_void_p),
    "vb_penalize": (c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_int, c_void_p),
}
_SIZES = {"vb_sample_workspace_bytes": (c_int, c_int)}
_functions = bound(_SIGNATURES, _SIZES)


def takes(logits: torch.Tensor) -> bool:
    """Whether the kernels can work on `logits`; otherwise the op's torch twin is the one to run."""
    return logits.is_cuda and logits.dtype in _DTYPES and logits.shape[-1] <= MAX_VOCAB and is_available()


def sample_tokens(
    logits: torch.Tensor,
    settings: torch.Tensor,
    uniforms: torch.Tensor | None,
    any_filtered: bool = True,
    any_unfiltered: bool = True,
    tokens: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.sample_tokens`: settings [rows, 4] and uniforms [rows], float64 on the device. What rows there are tells
    which kernels are needed: filtered ones are random with min-p, top-k or top-p on. With places [rows] int64, it is
    `ops.resample_tokens`: they say where in `tokens` and `uniforms` a row stands."""
    rows, vocab = logits.shape
    if settings.shape != (rows, 4) or (places is None and uniforms is not None and uniforms.shape != (rows,)):
        given = None if uniforms is None else tuple(uniforms.shape)
        raise ValueError(f"{rows} rows of logits, but settings {tuple(settings.shape)} and uniforms {given}")
    if (tokens is None) != (places is None) or (places is not None and places.shape != (rows,)):
        raise ValueError(f"tokens and places go together, and {rows} rows of logits need as many places")
    if logits.stride(-1) != 1 and vocab > 1:
        raise ValueError("logits must be contiguous in their last dimension")
    lib = _functions()
    if tokens is None:
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    workspace = torch.empty(lib.vb_sample_workspace_bytes(rows, vocab), dtype=torch.uint8, device=logits.device)
    args = _Sample(
        logits.data_ptr(), logits.stride(0), expect(settings, "settings", torch.float64),
        None if uniforms is None else expect(uniforms, "uniforms", torch.float64),
        expect(tokens, "tokens", torch.int64),
        None if places is None else expect(places, "places", torch.int64),
        workspace.data_ptr(), workspace.numel(), rows, vocab, _DTYPES[logits.dtype],
        _FILTERED * any_filtered + _UNFILTERED * any_unfiltered,
    )  # fmt: skip
    check("sample_tokens", lib.vb_sample(byref(args), stream_of(logits)))
    return tokens


def penalize(logits: torch.Tensor, packed: torch.Tensor, num_changes: int) -> None:
    """`ops.penalize` of logits [rows, vocabulary] float32. packed: int32, on the device: changes [num_changes, 4] (row,
    entry, token, count), the addresses of tables as int64 [rows], their sizes [rows], penalties as float32 [3, rows].
    """
    rows = logits.shape[0]
    if packed.shape != (4 * num_changes + 6 * rows,):
        raise ValueError(f"{num_changes} changes and {rows} rows do not make {tuple(packed.shape)} words")
    changes = expect(packed, "packed", torch.int32)
    tables = changes + 16 * num_changes
    code = _functions().vb_penalize(
        expect(logits, "logits", torch.float32, False), logits.stride(0), tables, tables + 8 * rows, changes,
        num_changes, tables + 12 * rows, rows, stream_of(logits),
    )  # fmt: skip
    check("penalize", code)
