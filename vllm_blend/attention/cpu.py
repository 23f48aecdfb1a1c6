"""The contract on the compiled CPU kernels: the cache is read in place, whatever the mix of prefill and decode in a
step.
"""

from __future__ import annotations

import torch

from vllm_blend import ops
from vllm_blend.attention.metadata import AttentionBackend, LayerStep
from vllm_blend.ops.bindings import cpu_kernels


class CPUBackend(AttentionBackend):
    """See the module's docstring. Raises `KernelsUnavailable` (an ImportError) when the kernels are not built or
    switched off.

    Head sizes that the kernels do not know (multiples of 16 up to 256 they do) run the ops' plain torch twins.
    """

    name = "cpu"

    def __init__(self) -> None:
        cpu_kernels()

    def attend(self, step: LayerStep) -> torch.Tensor:
        metadata = step.metadata
        return ops.paged_attention(
            step.q,
            step.kv,
            metadata.positions,
            metadata.block_tables,
            *metadata.host_tensors,
            step.scale,
            step.window,
            step.sinks,
        )

    def attention_mass(self, step: LayerStep, query_rows: list[slice]) -> list[torch.Tensor]:
        metadata = step.metadata
        return ops.attention_mass(
            step.q,
            step.kv,
            metadata.positions,
            metadata.block_tables,
            query_rows,
            metadata.seq_lens,
            step.scale,
            step.window,
            step.sinks,
        )
