"""Bindings of the sampling kernels (csrc/cuda/sampling*.cu, penalize.cu), by the rules of `ops.cuda_library`."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, addressof
from typing import Protocol

import torch

from vllm_blend.ops import pointers as to
from vllm_blend.ops.c_functions import Arguments, Int, Int32, Int64, Size, Stream, fields_of
from vllm_blend.ops.cuda_library import bound, check, expect, is_available, stream_of

MAX_VOCAB = 2**19 - 1
_DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_UNFILTERED, _FILTERED = 1, 2


class SamplingArguments(Structure):
    """The arguments of sampling (VbSample)."""

    logits: to.Logits
    row_stride: Int64
    settings: to.Settings
    uniforms: to.Uniforms | None
    tokens: to.Tokens
    places: to.Places | None
    workspace: to.Workspace
    workspace_bytes: Size
    rows: Int32
    vocab: Int32
    dtype: Int32
    kinds: Int32
    _fields_ = fields_of(__annotations__)


# fmt: off
class SamplingFunctions(Protocol):
    def sample_workspace_bytes(self, rows: Int, vocab: Int, /) -> Size: ...

    def sample(self, args: Arguments, stream: Stream, /) -> Int: ...

    def penalize(
        self, logits: to.Logits, row_stride: Int64, tables: to.Tables, sizes: to.TableSizes, changes: to.Changes,
        num_changes: Int, penalties: to.Penalties, rows: Int, stream: Stream, /,
    ) -> Int: ...
# fmt: on


_functions: Callable[[], SamplingFunctions] = bound(SamplingFunctions)


def accepts(logits: torch.Tensor) -> bool:
    """Return whether the kernels can work on `logits`; otherwise the op's torch twin is the one to run."""
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
    """Do `ops.sample_tokens`. settings [rows, 4] and uniforms [rows], float64 on the device. What rows there are tells
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
    functions = _functions()
    if tokens is None:
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    workspace = torch.empty(functions.sample_workspace_bytes(rows, vocab), dtype=torch.uint8, device=logits.device)
    args = SamplingArguments(rows=rows, vocab=vocab, dtype=_DTYPES[logits.dtype], row_stride=logits.stride(0))
    args.kinds = _FILTERED * any_filtered + _UNFILTERED * any_unfiltered
    args.logits, args.settings = to.Logits(logits), expect(to.Settings, settings, "settings", torch.float64)
    args.uniforms = None if uniforms is None else expect(to.Uniforms, uniforms, "uniforms", torch.float64)
    args.tokens = expect(to.Tokens, tokens, "tokens", torch.int64)
    args.places = None if places is None else expect(to.Places, places, "places", torch.int64)
    args.workspace, args.workspace_bytes = to.Workspace(workspace), workspace.numel()
    check("sample_tokens", functions.sample(Arguments(addressof(args)), stream_of(logits)))
    return tokens


def penalize(logits: torch.Tensor, packed: torch.Tensor, num_changes: int) -> None:
    """Do `ops.penalize` on logits [rows, vocabulary] float32. packed: int32, on the device: changes [num_changes, 4]
    (row, entry, token, count), the addresses of tables as int64 [rows], their sizes [rows], penalties as float32 [3,
    rows].
    """
    rows = logits.shape[0]
    if packed.shape != (4 * num_changes + 6 * rows,):
        raise ValueError(f"{num_changes} changes and {rows} rows do not make {tuple(packed.shape)} words")
    after = 16 * num_changes  # bytes
    code = _functions().penalize(
        expect(to.Logits, logits, "logits", torch.float32, False), logits.stride(0), to.Tables(packed) + after,
        to.TableSizes(packed) + (after + 8 * rows), expect(to.Changes, packed, "packed", torch.int32), num_changes,
        to.Penalties(packed) + (after + 12 * rows), rows, stream_of(logits),
    )  # fmt: skip
    check("penalize", code)
