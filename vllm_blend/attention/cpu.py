"""The contract on the compiled CPU kernels: the cache is read in place, whatever the mix of prefill and decode in a
step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_blend import ops
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerCache
from vllm_blend.ops.bindings import cpu_kernels


@dataclass(frozen=True)
class _HostStep:
    """The host lists of a step as the int64 tensors that the kernels read."""

    metadata: AttentionMetadata
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor


class CPUBackend(AttentionBackend):
    """See the module's docstring. Raises `KernelsUnavailable` (an ImportError) when the kernels are not built or
    switched off.

    Head sizes that the kernels do not know (multiples of 16 up to 256 they do) run the ops' plain torch twins.
    """

    name = "cpu"

    def __init__(self) -> None:
        cpu_kernels()
        self._step: _HostStep | None = None

    def attend(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        step = self._step
        if step is None or step.metadata is not metadata:  # once per step: every layer passes the same object
            starts = torch.tensor(metadata.query_start_loc, dtype=torch.int64)
            step = self._step = _HostStep(metadata, starts, torch.tensor(metadata.seq_lens, dtype=torch.int64))
        return ops.paged_attention(
            q,
            cache.key,
            cache.value,
            metadata.positions,
            metadata.block_tables,
            step.query_start_loc,
            step.seq_lens,
            scale,
            sliding_window,
        )

    def attention_mass(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        query_rows: list[slice],
        sliding_window: int | None = None,
    ) -> list[torch.Tensor]:
        return ops.attention_mass(
            q,
            cache.key,
            metadata.positions,
            metadata.block_tables,
            query_rows,
            metadata.seq_lens,
            scale,
            sliding_window,
        )
