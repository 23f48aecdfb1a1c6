"""Products with weight matrices as checkpoints store them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_blend.ops import cpu
from vllm_blend.ops.bindings import kernels_for

# The numbers of rows for which the kernel beats torch's product. Measured on Sapphire Rapids, one thread, the four
# matrices of 12 layers of hidden size 384, milliseconds for kernel / torch. bf16 (31 MB): 1 row 1.2 / 2.7, 16 rows 1.4
# / 2.9, 64 rows 2.7 / 4.4, 128 rows 4.5 / 5.5, 300 rows 10.9 / 9.6. float32 (61 MB): 4 rows 4.1 / 3.2, 8 rows 4.1 /
# 4.5, 16 rows 4.2 / 5.2, 32 rows 5.4 / 7.4, 48 rows 11 / 11.
KERNEL_ROWS = {torch.bfloat16: range(129), torch.float32: range(8, 33)}
NEVER = range(0)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [..., in] times weight [out, in] transposed, plus bias [out] -> [..., out].

    torch has the fast product for many rows. With few it repacks the weights in every call; a kernel that reads them as
    they lie, on tile registers (AMX) for bf16, is faster.
    """
    if x.dim() == 2 and x.shape[0] in KERNEL_ROWS.get(x.dtype, NEVER):
        kernels = kernels_for(x)
        if kernels is not None and cpu.accepts_linear(kernels, x, weight, bias):
            return cpu.linear(kernels, x, weight, bias)
    return F.linear(x, weight, bias)
