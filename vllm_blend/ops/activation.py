"""Gated activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_blend.ops import cuda
from vllm_blend.ops import pointers as to
from vllm_blend.ops.bindings import DTYPE_CODES, kernels_for, raise_status
from vllm_blend.ops.cuda_library import DTYPES, check, expect, stream_of


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up, GELU in its tanh form, for gate_up [tokens, 2 * n], gate first -> [tokens, n]."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up for gate_up [tokens, 2 * n], gate first -> [tokens, n]."""
    n = gate_up.shape[-1] // 2
    if cuda.accepts(gate_up, n):
        pointer = expect(to.GateUp, gate_up, "gate_up", gate_up.dtype)
        out = gate_up.new_empty((*gate_up.shape[:-1], n))
        code = cuda.functions().silu_and_mul(
            pointer, to.Out(out), out.numel() // n, n, DTYPES[gate_up.dtype], stream_of(gate_up)
        )
        if code:
            check("silu_and_mul", code)
        return out
    kernels = kernels_for(gate_up)
    if kernels is None:
        return silu_and_mul_reference(gate_up)
    if gate_up.dim() == 2 and gate_up.stride(1) == 1:
        stride = gate_up.stride(0)
    else:
        gate_up, stride = gate_up.contiguous(), 2 * n
    out = gate_up.new_empty(*gate_up.shape[:-1], n)
    status = kernels.silu_and_mul(
        to.Out(out), to.GateUp(gate_up), out.numel() // n if n else 0, n, stride, DTYPE_CODES[gate_up.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "silu_and_mul")
    return out


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
