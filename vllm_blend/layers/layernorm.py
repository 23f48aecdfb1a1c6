"""RMSNorm, alone or fused with the residual addition before it."""

from __future__ import annotations

import torch
from torch import nn

from vllm_blend import ops


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., size]."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return norm(x + residual) and x + residual."""
        return ops.fused_add_rms_norm(x, residual, self.weight, self.eps)
