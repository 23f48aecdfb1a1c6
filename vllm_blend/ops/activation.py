"""Gated activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [tokens, 2 * n], gate first -> [tokens, n]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
