"""Gated activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_blend.ops import cpu, cuda
from vllm_blend.ops.bindings import kernels_for


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [tokens, 2 * n], gate first -> [tokens, n]."""
    if cuda.takes(gate_up, gate_up.shape[-1] // 2):
        return cuda.silu_and_mul(gate_up)
    kernels = kernels_for(gate_up)
    if kernels is not None:
        return cpu.silu_and_mul(kernels, gate_up)
    return silu_and_mul_reference(gate_up)


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
