"""Products with weight matrices as checkpoints store them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_blend.ops import cpu
from vllm_blend.ops.bindings import kernels_for

# Up to here the kernel beats torch's product, beyond it torch wins. Measured on 2 Sapphire Rapids cores, bf16, the four
# matrices of 12 layers of hidden size 384 (31 MB), milliseconds for kernel / torch: 1 row 0.8 / 1.9, 16 rows 0.9 / 2.1,
# 64 rows 1.9 / 2.8, 135 rows 3.5 / 3.6, 300 rows 6.8 / 6.7, 900 rows 20 / 12.
MAX_KERNEL_ROWS = 128


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias [out] -> [..., out].

    torch has the fast product for nearly everything. The exception is bf16 with few rows on a CPU with tile registers
    (AMX): there torch repacks the weights in every call, and a kernel that reads them as they lie is two to three times
    faster.
    """
    if x.dtype == torch.bfloat16 and x.dim() == 2 and x.shape[0] <= MAX_KERNEL_ROWS:
        kernels = kernels_for(x)
        if kernels is not None and kernels.linear is not None and cpu.takes_linear(x, weight, bias):
            return cpu.linear(kernels.linear, x, weight, bias)
    return F.linear(x, weight, bias)
