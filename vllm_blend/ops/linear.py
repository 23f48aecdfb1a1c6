"""Products with weight matrices as checkpoints store them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_blend.ops import cpu, cuda
from vllm_blend.ops import pointers as to
from vllm_blend.ops.bindings import kernels_for
from vllm_blend.ops.cuda_library import DTYPES, check, stream_of

# The numbers of rows for which the kernel beats torch's product, by dtype and instruction set. Measured on Sapphire
# Rapids, one thread of a shared machine, in CPU time, as the median of torch / kernel over pairs; the matrices of 12
# layers, of hidden size 384 / of a 0.6B model. bf16 on AMX: 1 to 8 rows 2.0 to 2.3 / 1.5 to 1.9, 32 rows 1.6 / 1.3, 64
# rows 1.1 / 1.3, 128 rows 0.95 / 1.2, 256 rows 0.85 / 1.2. float32 with AVX-512: 4 rows 0.9 / 1.0, 8 rows 1.1 / 1.6, 32
# rows 1.2 / 1.6, 64 rows 0.9 / 1.2; with AVX2 (MKL too): 1 row 0.8 / 0.8, 2 to 16 rows 1.5 to 1.7 / 1.5 to 1.95, 32
# rows 1.1 / 0.9. The generic kernels were not measured.
#
# Weights packed ahead for oneDNN (mkldnn::_reorder_linear_weight), as torch's compiler does, were tried in the same
# runs. On AMX the kernel takes 0.5 to 0.8 of their time up to 32 rows, and from 64 to 256 rows they beat the product
# chosen here by 1.05 to 1.3: to have both, each matrix would be in memory twice. In float32 they win at 4 rows of the
# larger model only (1.3). In bf16 without AMX they beat torch's product by 1.05 to 1.35 up to 32 rows, and by 0.9 to
# 1.2 above: too little for weights that nothing else can read, which tied embeddings would have twice, and that took 1
# to 2 seconds for 360 MiB at load.
KERNEL_ROWS = {
    torch.bfloat16: {"amx": range(129), "avx512bf16": range(1, 9)},
    torch.float32: {
        "amx": range(8, 33),
        "avx512bf16": range(8, 33),
        "avx512": range(8, 33),
        "avx2": range(2, 17),
        "generic": range(8, 33),
    },
}
NEVER = range(0)
# On an H100, a layer's four products of a 7B shape, one after another, take 0.87, 0.90 and 0.95 of torch's time with 1,
# 2 and 4 rows.
FEW_ROWS, FEW_ROWS_OUTS = 4, 4  # VB_FEW_ROWS, and of how many outputs VB_FEW_ROWS_OUTS is a multiple


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [..., in] times weight [out, in] transposed, plus bias [out] -> [..., out].

    torch has the fast product for many rows. With few it repacks the weights in every call; a kernel that reads them as
    they lie, on tile registers (AMX) for bf16, is faster. On a GPU, a kernel for up to FEW_ROWS rows asks for them
    while the kernel before it ends.
    """
    if x.is_cuda:
        return _few_rows(x, weight, bias) if _are_few(x, weight, bias) else F.linear(x, weight, bias)
    by_isa = KERNEL_ROWS.get(x.dtype)
    kernels = kernels_for(x) if by_isa and x.dim() == 2 else None
    if by_isa and kernels is not None:
        wins = x.shape[0] in by_isa.get(kernels.isa, NEVER)
        if wins and cpu.accepts_linear(kernels, x, weight, bias):
            return cpu.linear(kernels, x, weight, bias)
    return F.linear(x, weight, bias)


def _are_few(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    outs, size = weight.shape
    return (
        x.dim() == 2
        and 0 < x.shape[0] <= FEW_ROWS
        and x.shape[1] == size
        and outs % FEW_ROWS_OUTS == 0
        and size % 8 == 0
        and cuda.accepts(x)
        and weight.dtype == x.dtype
        and weight.is_contiguous()
        and not (x.requires_grad or weight.requires_grad)
        and (bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1] and bias.is_contiguous()))
    )


def _few_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    x = x.contiguous()
    rows, size = x.shape
    outs = len(weight)
    out = x.new_empty(rows, outs)
    code = cuda.functions().few_rows(
        to.Input(x), to.Weight(weight), None if bias is None else to.Bias(bias), to.Out(out), rows, size, outs,
        DTYPES[x.dtype], stream_of(x),
    )  # fmt: skip
    if code:
        check("few_rows", code)
    return out
